"""Draw the pictures of docs/performance.md from the records of 20b in MXFP4 on one H200.

python scripts/docs/speed_picture.py

speed.svg: bars are tokens a second: ours, stock, and the floor, which fills the width. The offline engine's records
hold the floors of decode and prefill. The server's is the roofline of its load: prompts, and answers at full batches.
users.svg: output tokens a second of a server on one GPU against those of each of its users.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss.bench.random_checkpoint import full_config
from npu_gptoss.bench.roofline import H200, decode_work, prefill_work
from npu_gptoss.files import write_atomically

FOLDER = Path(__file__).resolve().parents[2] / "docs/benchmarks"
ENGINES = {"ours": "inside_vllm_0_33", "stock": "peer_0_33"}
WIDTH, LEFT, FULL, BAR = 800, 130, 440, 17
GPU_HOUR = 3.0  # dollars
LENGTHS = {"serving": ((1024, 256),), "lengths/serving": ((8192, 1024), (1024, 8192))}  # tokens in and out, by record
COLOURS = {"ours": "#1f5fbf", "stock": "#e08a2e", "floor": "#d0d4da"}


def record(name: str, **point: object) -> dict[str, float]:
    """The record of 20b in MXFP4 at a point of a file."""
    rows = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["records"]
    point |= {"model": "20b", "weights": "mxfp4"}
    (row,) = (row for row in rows if all(row[key] == value for key, value in point.items()))
    return row


def groups() -> Iterator[tuple[str, str, dict[str, float]]]:
    """A panel, a label, and tokens a second of each bar."""
    for batch in (1, 8, 32, 128):
        at = {"batch": batch, "context": 1024}
        times = {name: record(f"{folder}/decode", **at)["tpot_ms"] for name, folder in ENGINES.items()}
        times["floor"] = record("h200_decode_20b", **at)["floor_ms"]
        yield "Decode, 1024 tokens each", f"batch {batch}", {name: batch * 1e3 / ms for name, ms in times.items()}
    for tokens in (8192, 32768):
        at = {"prompt_tokens": tokens}
        times = {name: record(f"{folder}/prefill", **at)["prefill_s"] for name, folder in ENGINES.items()}
        times["floor"] = record("h200_prefill_20b", **at)["floor_ms"] / 1e3
        yield "Prefill of one prompt", f"{tokens} tokens", {name: tokens / s for name, s in times.items()}
    for streams in (1, 16, 64, 256):
        rows = {name: record(f"{folder}/serving", streams=streams) for name, folder in ENGINES.items()}
        speeds = {name: row["output_tokens_per_s"] for name, row in rows.items()}
        read, written = rows["ours"]["input_tokens"], rows["ours"]["output_tokens"]
        prompt = prefill_work(full_config("20b"), read, "mxfp4").floor_s(H200)
        step = decode_work(full_config("20b"), [read + written // 2] * streams, "mxfp4").floor_s(H200)
        speeds["floor"] = streams * written / (prompt * streams + step * written)
        yield "Server, 1024 tokens in, 256 out", f"streams {streams}", speeds


def drawn() -> str:
    title = "gpt-oss-20b, MXFP4, one NVIDIA H200, vLLM 0.33: tokens a second (longer is better)"
    shapes, y, last = [f'<text x="10" y="24" font-weight="bold">{title}</text>'], 40, ""
    for panel, label, speeds in groups():
        if panel != last:
            shapes.append(f'<text x="10" y="{y + 18}" font-weight="bold">{panel}</text>')
            y, last = y + 28, panel
        shapes.append(f'<text x="{LEFT - 10}" y="{y + 2 * BAR - 4}" text-anchor="end">{label}</text>')
        for name, speed in speeds.items():
            long = FULL * speed / speeds["floor"]
            text = f"{name} {speed:,.0f}".replace(",", " ")
            text += f", {speed / speeds['stock']:.2f} × stock" if name == "ours" else ""
            shapes.append(f'<rect x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR - 2}" fill="{COLOURS[name]}"/>')
            shapes.append(f'<text x="{LEFT + long + 6:.1f}" y="{y + 12}">{text}</text>')
            y += BAR
        y += 10
    return framed(shapes, y)


def framed(shapes: list[str], high: int) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" font-family="sans-serif">'
    style = f'<style>text {{ font-size: 13px; fill: #222 }}</style><rect width="{WIDTH}" height="{high}" fill="#fff"/>'
    return "\n".join([head, style, *shapes, "</svg>"]) + "\n"


def loads() -> Iterator[tuple[tuple[int, int], str, list[tuple[int, float, float]]]]:
    """Tokens in and out, an engine, and of each number of streams: tokens a second of a user, and of the GPU."""
    for name, sizes in LENGTHS.items():
        for read, written in sizes:
            for engine, folder in ENGINES.items():
                rows = json.loads((FOLDER / folder / f"{name}.json").read_text(encoding="utf-8"))["records"]
                rows = [row for row in rows if (row["input_tokens"], row["output_tokens"]) == (read, written)]
                points = [(r["streams"], 1e3 / r["tpot_median_ms"], r["output_tokens_per_s"]) for r in rows]
                yield (read, written), engine, sorted(points)


def users_drawn() -> str:
    """A panel for each load: its lines join the numbers of streams, further to the right and higher up is better."""
    title = "gpt-oss-20b, one H200, vLLM 0.33: output tokens/s of the GPU (up) and of a user (across), by streams"
    price = f"right: dollars a million output tokens, a GPU hour at ${GPU_HOUR:.2f}"
    shapes = [f'<text x="10" y="24" font-weight="bold">{title}</text>', f'<text x="10" y="44">{price}</text>']
    high, top, last = 190, 80, None
    left, right = 70, WIDTH - 90

    def place(user: float, gpu: float) -> tuple[float, float]:
        """0 to 800 tokens/s of a user; 200 to 20 000 of the GPU, as a logarithm."""
        return left + (right - left) * user / 800, top + high - high * math.log(gpu / 200) / math.log(100)

    for load, engine, points in loads():
        if load != last:
            top += 0 if last is None else high + 60
            last = load
            bottom = top + high
            shapes.append(f'<text x="10" y="{top - 8}" font-weight="bold">{load[0]} tokens in, {load[1]} out</text>')
            shapes.append(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>')
            for speed in (300, 1000, 3000, 10000):
                (_, y), dollars = place(0, speed), GPU_HOUR / 3600 / speed * 1e6
                shapes.append(f'<text x="{left - 8}" y="{y:.0f}" text-anchor="end">{speed}</text>')
                shapes.append(f'<text x="{right + 8}" y="{y:.0f}">${dollars:.2f}</text>')
            for speed in range(0, 801, 200):
                x, _ = place(speed, 200)
                shapes.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{speed}</text>')
        places = [place(user, gpu) for _, user, gpu in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[engine]}" stroke-width="2"/>')
        for (x, y), (streams, *_) in zip(places, points, strict=True):
            shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[engine]}"/>')
            below = 17 if engine == "stock" else -6
            shapes.append(f'<text x="{x + 5:.1f}" y="{y + below:.1f}">{engine} {streams}</text>')
    return framed(shapes, top + high + 40)


PICTURES = {"speed": (FOLDER / "speed.svg", drawn), "users": (FOLDER / "users.svg", users_drawn)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for file, draw in PICTURES.values():
        write_atomically(file, draw().encode())


if __name__ == "__main__":
    main()
