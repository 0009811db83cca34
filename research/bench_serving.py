"""What clients of `vllm serve` see with our model and with stock's, measured by `vllm bench serve`.

    npu-gptoss bench checkpoint DIR --size 20b
    python research/bench_serving.py --model DIR --out OUT --gpus 0 1

Needs vLLM 0.33 and a GPU; `bpe-openai` where DIR has no tokenizer yet. An engine is `ours`, `stock`, or `stock:humming`
for another of stock's experts backends. Each of --gpus (`0,1` is one server over two) takes its share of the engines
one after the other, all GPUs at the same time. OUT gets a record and logs of each engine, written after each point;
`research/bench_table.py` reads the records.

The servers keep vLLM's own defaults but for the prefix cache, which is off: random prompts have nothing in common.
Flags after `--` go to each server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from npu_gptoss.bench.random_checkpoint import model_name
from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.tiny.tokenizer_files import write_tokenizer_files
from research.bench_peer_vllm import document, save
from research.children import Child, inside
from scripts.serve_here import ours, serving_environment, start, stop, tail, wait_until_ready

OURS, STOCK = "ours", "stock"
NAME = "gpt-oss"
INPUT, OUTPUT = 1024, 256
WARM_UP_OUTPUT, WARM_UP_REQUESTS = (
    32,
    4,
)  # of the round before each point; as many requests as streams, at least so many
START_SECONDS, POINT_SECONDS, PATIENCE = 400, 240, 5
TIMES, STATISTICS = ("ttft", "itl", "tpot"), ("mean", "median", "p99")
DEFINITIONS = {
    "streams": "requests in flight at any time (--max-concurrency); the next is sent when one is answered. Before each "
    f"point, of every engine, a round of as many requests, of {WARM_UP_OUTPUT} tokens each, is sent and not counted: "
    "what the server compiles for batches of that size it has then",
    "output_tokens_per_s": "all generated tokens over the seconds from the first request to the last answer",
    "ttft_ms": "from sending a request to its first token, mean, median and 99th percentile over requests",
    "itl_ms": "between two pieces of a stream, over all of them; a piece is a token, or several when the client lags",
    "tpot_ms": "from a request's first token to its last, by the tokens after the first; over requests",
    "input_tokens": f"of a random prompt, mean; {OUTPUT} tokens are generated for each whatever they are, greedily",
}

_servers: list[int] = []  # process groups


def requests_of(streams: int) -> int:
    """Enough rounds that the first prompts, which come all at once, weigh little; few enough that all points of an
    engine take little more than a minute."""
    return max(12, streams * (6 if streams <= 64 else 4))


def rounds_of(streams: Sequence[int]) -> list[tuple[int, int, int]]:
    """(streams, requests, tokens of each answer): for each point the round that warms it up, and the point itself."""
    rounds = []
    for each in streams:
        rounds += [(each, max(each, WARM_UP_REQUESTS), WARM_UP_OUTPUT), (each, requests_of(each), OUTPUT)]
    return rounds


def arguments_of(url: str, tokenizer: Path, streams: int, requests: int, output: int, seed: int) -> list[str]:
    """For `vllm bench serve`. Each seed has prompts of its own."""
    flags = {
        "base-url": url,
        "model": NAME,
        "tokenizer": tokenizer,
        "dataset-name": "random",
        "random-input-len": INPUT,
        "random-output-len": output,
        "num-prompts": requests,
        "max-concurrency": streams,
        "seed": seed,
        "temperature": 0,
        "percentile-metrics": ",".join(TIMES),
        "metric-percentiles": "99",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*words, "--ignore-eos", "--disable-tqdm"]


def row_of(result: Mapping[str, Any], streams: int) -> dict[str, Any]:
    """A record's fields from what `vllm bench serve` found. Raises RuntimeError for answers that are not whole."""
    requests = requests_of(streams)
    if result["completed"] != requests or result["total_output_tokens"] != requests * OUTPUT:
        raise RuntimeError(
            f"{streams} streams: expected {requests} answers of {OUTPUT} tokens, got {result['completed']} with "
            f"{result['total_output_tokens']} in all; the server's log says why"
        )
    return {
        "streams": streams,
        "requests": requests,
        "input_tokens": round(result["total_input_tokens"] / requests),
        "output_tokens": OUTPUT,
        "duration_s": round(result["duration"], 3),
        "output_tokens_per_s": round(result["output_throughput"], 2),
        **{f"{time}_{kind}_ms": round(result[f"{kind}_{time}_ms"], 3) for time in TIMES for kind in STATISTICS},
    }


def serve_command(model: Path, engine: str, gpus: str, port: int, flags: Sequence[str]) -> list[str]:
    """Without vLLM's console script, which a copied installation lacks."""
    backend = engine.partition(":")[2]
    count = len(gpus.split(","))
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--no-enable-prefix-caching"),
        *(("--tensor-parallel-size", str(count)) if count > 1 else ()),
        *(("--moe-backend", backend) if backend else ()),
        *flags,
    ]


def computing(log: Path, engine: str) -> list[str]:
    """What the server's log says of its kernels. Raises RuntimeError where another engine runs than was asked for."""
    lines = ours(log)
    if bool(lines) != (engine == OURS):
        raise RuntimeError(f"{engine}: the wrong model runs: {lines or 'not ours'}; is this package's plugin found?")
    told = {line.partition("] ")[2] for line in tail(log)}
    return [*lines, *sorted(line for line in told if line.startswith("Using ") and "backend" in line)]


def measure(args: argparse.Namespace, engine: str, gpus: str) -> None:
    name = engine.replace(":", "_")
    config = GptOssConfig.from_directory(args.model)
    environment = serving_environment(args.model, args.model, on="cuda")
    environment |= {"CUDA_VISIBLE_DEVICES": gpus, "NPU_GPTOSS": "1" if engine == OURS else "0"}
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", args.out / f"{name}.log"
    command = serve_command(args.model, engine, gpus, port, args.flags)
    points = rounds_of(args.streams)
    server = start(command, environment, log)
    _servers.append(server.pid)
    client_log = args.out / f"{name}_client.log"
    client = Child(f"client of {engine}", [sys.executable, __file__, "--child"], client_log, environment)
    try:
        client.tell([arguments_of(url, args.model, *point, seed) for seed, point in enumerate(points)])
        seconds = wait_until_ready(server, url, log, START_SECONDS)
        client.hear(START_SECONDS)
        kernels = computing(log, engine)
        print(f"{engine} on GPU {gpus}: ready after {seconds:.0f} s. {' '.join(kernels)}", flush=True)
        settings = {"start_s": round(seconds, 1), "flags": command[5:], "kernels": kernels}
        settings["moe_backend"] = engine.partition(":")[2] or None  # None: vLLM's own choice
        settings |= {"engines": args.engines, "gpus": args.gpus}
        keys = {"model": model_name(config), "weights": "bf16" if config.quantization is None else "mxfp4"}
        keys["layout"] = f"tp{len(gpus.split(','))}"
        rows: list[dict[str, Any]] = []
        for number, (streams, _, output) in enumerate(points):
            found = client.ask(number, POINT_SECONDS)
            if output == OUTPUT:
                rows.append({**keys, **row_of(found, streams)})
                print(engine, json.dumps(rows[-1]), flush=True)
                content = document("serving", DEFINITIONS, settings, rows, ours=engine == OURS)
                save(args.out / f"serving_{name}.json", content)
    finally:
        client.end()
        stop(server, PATIENCE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lane(args: argparse.Namespace, number: int) -> bool:
    """The engines of one of --gpus, one after the other. Whether all were measured: others are worth having."""
    whole = True
    for engine in args.engines[number :: len(args.gpus)]:
        try:
            measure(args, engine, args.gpus[number])
        except (RuntimeError, OSError, InputError) as error:
            print(f"{engine}: {error}", file=sys.stderr, flush=True)
            whole = False
    return whole


def ratios(folder: Path, engines: Sequence[str]) -> list[str]:
    """Sentences: ours over each stock, from the records."""
    found = {}
    for engine in engines:
        file = folder / f"serving_{engine.replace(':', '_')}.json"
        if file.exists():
            found[engine] = {row["streams"]: row for row in json.loads(file.read_text())["records"]}
    lines = []
    for engine, rows in found.items():
        for streams in sorted(rows.keys() & found.get(OURS, {}).keys()) if engine != OURS else ():
            mine, other = found[OURS][streams], rows[streams]
            times = ", ".join(
                f"p99 {time.upper()} {mine[f'{time}_p99_ms'] / other[f'{time}_p99_ms']:.2f} ×"
                for time in ("itl", "ttft")
            )
            speed = mine["output_tokens_per_s"] / other["output_tokens_per_s"]
            lines.append(f"ours over {engine}, {streams} streams: output tok/s {speed:.2f} ×, {times}")
    return lines


def end(signum: int, frame: object) -> None:
    """Servers are process groups of their own, and would keep their GPUs."""
    for group in _servers:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    os._exit(128 + signum)


# -- in a child


def child() -> None:
    """Makes all prompts while the server starts, which takes a while, and then runs the points that it is told."""
    hear, say = inside()
    every = hear()
    from vllm.benchmarks import serve
    from vllm.tokenizers import get_tokenizer
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    points = [parser.parse_args(arguments) for arguments in every]
    tokenizer = get_tokenizer(points[0].tokenizer)
    prompts = {point.seed: serve.get_samples(point, tokenizer) for point in points}
    serve.get_samples = lambda point, tokenizer: prompts.pop(point.seed)
    say("ready")
    while True:
        say(serve.main(points[hear()]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT")
    parser.add_argument("--engines", nargs="+", default=[OURS, STOCK], help="ours, stock, stock:BACKEND (both)")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="one after the other on the first by default")
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 64, 16, 1])
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="further flags for each `vllm serve`")
    args = parser.parse_args(arguments)
    if wrong := [engine for engine in args.engines if engine != OURS and engine.partition(":")[0] != STOCK]:
        parser.error(f"an engine is {OURS}, {STOCK} or {STOCK}:BACKEND, got {', '.join(wrong)}")
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.model / "tokenizer.json").exists():
        write_tokenizer_files(args.model)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, end)
    print(json.dumps(DEFINITIONS, indent=1), flush=True)
    with ThreadPoolExecutor(len(args.gpus)) as pool:
        whole = list(pool.map(lambda number: lane(args, number), range(len(args.gpus))))
    print("\n".join(ratios(args.out, args.engines)))
    return 0 if all(whole) else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child()
    sys.exit(main())
