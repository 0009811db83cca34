"""What clients of `vllm serve` see with our model and with stock's, measured by `vllm bench serve`.

    npu-gptoss bench checkpoint DIR --size 20b
    python research/bench_serving.py --model DIR --out OUT --gpus 0 1

Needs vLLM 0.33 and a GPU; `bpe-openai` where DIR has no tokenizer yet. An engine is `ours`, `stock`, or `stock:humming`
for another of stock's experts backends. Each of --gpus (`0,1` is one server over two) takes its share of the engines
one after the other, all GPUs at the same time. OUT gets a record and logs of each engine, written after each point;
`research/bench_table.py` reads the records.

The servers keep vLLM's own defaults but for the prefix cache, which is off: random prompts have nothing in common.
Flags after `--` go to each server. A client is one process, which 256 streams can keep busier than they keep the
server; --clients shares the streams out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

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
TIMES = ("ttft", "itl", "tpot")
STATISTICS: dict[str, Callable[[Any], Any]] = {
    "mean": np.mean,
    "median": np.median,
    "p99": lambda seconds: np.percentile(seconds, 99),
}
DEFINITIONS = {
    "streams": "requests in flight at any time (--max-concurrency); the next is sent when one is answered. Before each "
    f"point, of every engine, a round of as many requests, of {WARM_UP_OUTPUT} tokens each, is sent and not counted: "
    "what the server compiles for batches of that size it has then",
    "output_tokens_per_s": "all generated tokens over the seconds from the first request to the last token",
    "ttft_ms": "from sending a request to its first token, mean, median and 99th percentile over requests",
    "itl_ms": "between two pieces of a stream, over all of them; a piece is a token, or several when the client lags",
    "clients": "processes of `vllm bench serve` that share the streams and send at the same time",
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
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*words, "--ignore-eos", "--disable-tqdm", "--save-detailed"]


def shares_of(point: tuple[int, int, int], clients: int) -> list[tuple[int, int, int] | None]:
    """Streams, requests and tokens of an answer for each client; None where there are fewer streams than clients."""
    streams, requests, output = point
    busy = min(streams, clients)
    parts = [[whole // busy + (n < whole % busy) for n in range(busy)] for whole in (streams, requests)]
    return [*((*part, output) for part in zip(*parts, strict=True)), *[None] * (clients - busy)]


def asked(clients: Sequence[Child], parts: Sequence[tuple[int, int, int] | None]) -> list[Any]:
    """What each client that has a part finds; they begin together."""
    busy = [client for client, part in zip(clients, parts, strict=True) if part]
    for client in busy:
        client.tell("next")
    return [client.hear(POINT_SECONDS) for client in busy]


def row_of(results: Sequence[Mapping[str, Any]], streams: int) -> dict[str, Any]:
    """A record's fields from what `vllm bench serve` found in each client's requests, by its own definitions. Raises
    RuntimeError for answers that are not whole."""
    requests = requests_of(streams)
    completed, tokens, read = (
        sum(result[name] for result in results) for name in ("completed", "total_output_tokens", "total_input_tokens")
    )
    if completed != requests or tokens != requests * OUTPUT:
        raise RuntimeError(
            f"{streams} streams: expected {requests} answers of {OUTPUT} tokens, got {completed} with "
            f"{tokens} in all; the server's log says why"
        )
    begins, firsts, gaps = (
        [each for result in results for each in result[name]] for name in ("start_times", "ttfts", "itls")
    )
    # clients of one machine read one clock
    ends = [begin + first + sum(gap) for begin, first, gap in zip(begins, firsts, gaps, strict=True)]
    duration = max(ends) - min(begins)
    times = {"ttft": firsts, "itl": [each for gap in gaps for each in gap]}
    times["tpot"] = [sum(gap) / (OUTPUT - 1) for gap in gaps]
    return {
        "streams": streams,
        "requests": requests,
        "clients": len(results),
        "input_tokens": round(read / requests),
        "output_tokens": OUTPUT,
        "duration_s": round(duration, 3),
        "output_tokens_per_s": round(tokens / duration, 2),
        **{f"{time}_{kind}_ms": round(1e3 * of(times[time]), 3) for time in TIMES for kind, of in STATISTICS.items()},
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
    command_of_client = [sys.executable, __file__, "--child"]
    clients = [
        Child(f"client {n} of {engine}", command_of_client, args.out / f"{name}_client{n}.log", environment)
        for n in range(args.clients)
    ]
    try:
        for n, client in enumerate(clients):
            own = [shares_of(point, args.clients)[n] for point in points]
            seeds = itertools.count(n, args.clients)
            client.tell([arguments_of(url, args.model, *each, next(seeds)) for each in own if each])
        seconds = wait_until_ready(server, url, log, START_SECONDS)
        for client in clients:
            client.hear(START_SECONDS)
        kernels = computing(log, engine)
        print(f"{engine} on GPU {gpus}: ready after {seconds:.0f} s. {' '.join(kernels)}", flush=True)
        settings = {"start_s": round(seconds, 1), "flags": command[5:], "kernels": kernels}
        settings["moe_backend"] = engine.partition(":")[2] or None  # None: vLLM's own choice
        settings |= {"engines": args.engines, "gpus": args.gpus, "clients": args.clients}
        keys = {"model": model_name(config), "weights": "bf16" if config.quantization is None else "mxfp4"}
        keys["layout"] = f"tp{len(gpus.split(','))}"
        rows: list[dict[str, Any]] = []
        for streams, requests, output in points:
            found = asked(clients, shares_of((streams, requests, output), args.clients))
            if output == OUTPUT:
                rows.append({**keys, **row_of(found, streams)})
                print(engine, json.dumps(rows[-1]), flush=True)
                content = document("serving", DEFINITIONS, settings, rows, ours=engine == OURS)
                save(args.out / f"serving_{name}.json", content)
    finally:
        for client in clients:
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
    for point in points:
        hear()
        say(serve.main(point))
    hear()  # until it is ended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT")
    parser.add_argument("--engines", nargs="+", default=[OURS, STOCK], help="ours, stock, stock:BACKEND (both)")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="one after the other on the first by default")
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 64, 16, 1])
    parser.add_argument("--clients", type=int, default=1, metavar="N", help="processes that send (1)")
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
