"""Measures `vllm serve` with this package's model and with stock's, by the client of `vllm bench serve`.

    npu-gptoss bench checkpoint DIR --size 20b
    python research/bench_serving.py --model DIR --out OUT --gpus 0 1

Needs vLLM 0.33 and a GPU; writes a tokenizer where DIR has none (needs `bpe-openai`). An engine is `ours`, `stock`, or
`stock:humming` for another of stock's experts backends. Each of --gpus (`0,1` is one server over two) measures its
share of the engines in turn; all GPUs work at the same time. OUT gets a record and logs of each engine, written after
each point.

Servers keep vLLM's defaults except the prefix cache, which is off because random prompts share nothing. Flags after
`--` go to each server. One client process can be slower than a server of 256 streams; --clients shares the streams out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from npu_gptoss.bench.random_checkpoint import model_name
from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.tiny.tokenizer_files import write_tokenizer_files
from research.bench_peer_vllm import document, save
from scripts.serve_here import ours, serving_environment, start, stop, tail, wait_until_ready

OURS, STOCK = "ours", "stock"
NAME = "gpt-oss"
LENGTHS = (1024, 256)  # tokens of a prompt and of its answer
WARM_UP_OUTPUT, WARM_UP_REQUESTS = 32, 4  # tokens of an answer; at least so many requests
START_SECONDS, POINT_SECONDS, PATIENCE = 400, 240, 5
TIMES = ("ttft", "itl", "tpot")
STATISTICS: dict[str, Callable[[Any], Any]] = {"mean": np.mean, "median": np.median}
STATISTICS["p99"] = lambda seconds: np.percentile(seconds, 99)
DEFINITIONS = {
    "streams": "requests in flight at any time (--max-concurrency); the next is sent when one is answered. Before each "
    f"point, of every engine, a round of as many requests, of {WARM_UP_OUTPUT} tokens each, is sent and not counted: "
    "what the server compiles for batches of that size it has then",
    "output_tokens_per_s": "all generated tokens over the seconds from the first request to the last token",
    "ttft_ms": "from sending a request to its first token, mean, median and 99th percentile over requests",
    "itl_ms": "between two pieces of a stream, over all of them; a piece is a token, or several when the client lags",
    "clients": "processes of `vllm bench serve` that share the streams and send at the same time",
    "tpot_ms": "from a request's first token to its last, by the tokens after the first; over requests",
    "joules_a_token": "energy of the GPUs in the point, by NVML, over the generated tokens; null without a counter",
    "input_tokens": "of a random prompt, mean; output_tokens are generated for each whatever they are, greedily",
}
Round = tuple[int, int, int, int]  # streams, requests, tokens of each prompt, tokens of each answer

_servers: list[int] = []  # process groups


def requests_of(streams: int, output: int) -> int:
    """Requests of a point: several rounds, so that the first prompts weigh little, in a minute or two for an engine."""
    return max(12, streams * (2 if output > 512 else 6 if streams <= 64 else 4))


def rounds_of(streams: Sequence[int], lengths: Sequence[tuple[int, int]]) -> list[Round]:
    """Returns for each point the round that warms it up, and the point itself."""
    rounds = []
    for (read, output), each in itertools.product(lengths, streams):
        rounds += [(each, max(each, WARM_UP_REQUESTS), read, WARM_UP_OUTPUT)]
        rounds += [(each, requests_of(each, output), read, output)]
    return rounds


def shares_of(whole: Round, clients: int) -> list[Round | None]:
    """The part of each client; None where there are fewer streams than clients."""
    streams, requests, *lengths = whole
    busy = min(streams, clients)
    parts = [[total // busy + (n < total % busy) for n in range(busy)] for total in (streams, requests)]
    return [*((*part, *lengths) for part in zip(*parts, strict=True)), *[None] * (clients - busy)]


def arguments_of(url: str, tokenizer: Path, part: Round, seed: int) -> list[str]:
    """Returns the arguments of `vllm bench serve`. Prompts differ between seeds."""
    streams, requests, read, output = part
    flags = {"base-url": url, "model": NAME, "tokenizer": tokenizer, "seed": seed, "temperature": 0}
    flags |= {"dataset-name": "random", "random-input-len": read, "random-output-len": output}
    flags |= {"num-prompts": requests, "max-concurrency": streams}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*words, "--ignore-eos", "--disable-tqdm", "--save-detailed"]


def energy(gpus: str) -> float:
    """Joules that these GPUs have used since their driver was loaded; NaN where NVML has no counter."""
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) for gpu in gpus.split(",")]
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1e3
    except pynvml.NVMLError:
        return math.nan


def row_of(results: Sequence[Mapping[str, Any]], point: Round, joules: float = math.nan) -> dict[str, Any]:
    """A record of a point from the results of its clients. Raises RuntimeError for answers that are not whole."""
    streams, requests, _, output = point
    completed, tokens, read = (
        sum(result[name] for result in results) for name in ("completed", "total_output_tokens", "total_input_tokens")
    )
    if completed != requests or tokens != requests * output:
        raise RuntimeError(
            f"{streams} streams: expected {requests} answers of {output} tokens, got {completed} with "
            f"{tokens} in all; the server's log says why"
        )
    begins, firsts, gaps = (
        [each for result in results for each in result[name]] for name in ("start_times", "ttfts", "itls")
    )
    # clients of one machine read one clock
    ends = [begin + first + sum(gap) for begin, first, gap in zip(begins, firsts, gaps, strict=True)]
    duration = max(ends) - min(begins)
    times = {"ttft": firsts, "itl": [each for gap in gaps for each in gap]}
    times["tpot"] = [sum(gap) / (output - 1) for gap in gaps]
    return {
        "streams": streams,
        "requests": requests,
        "clients": len(results),
        "input_tokens": round(read / requests),
        "output_tokens": output,
        "duration_s": round(duration, 3),
        "output_tokens_per_s": round(tokens / duration, 2),
        "joules_a_token": None if math.isnan(joules) else round(joules / tokens, 4),
        **{f"{time}_{kind}_ms": round(1e3 * of(times[time]), 3) for time in TIMES for kind, of in STATISTICS.items()},
    }


def serve_command(model: Path, engine: str, gpus: str, port: int, flags: Sequence[str]) -> list[str]:
    """Starts vLLM as a module: a copied installation lacks its console script."""
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
    """The server's own lines about its kernels. Raises RuntimeError where another engine runs than was asked for."""
    lines = ours(log)
    if bool(lines) != (engine == OURS):
        raise RuntimeError(f"{engine}: the wrong model runs: {lines or 'not ours'}; is this package's plugin found?")
    logged = {line.partition("] ")[2] for line in tail(log)}
    return [*lines, *sorted(line for line in logged if line.startswith("Using ") and "backend" in line)]


class Client:
    """A process of `vllm bench serve`. It makes all its prompts while the server starts."""

    def __init__(self, log: Path, environment: Mapping[str, str], every: Sequence[Sequence[str]]) -> None:
        self.log = log
        self.connection, theirs = multiprocessing.Pipe()
        started = (theirs, log, environment, every)
        self.process = multiprocessing.get_context("spawn").Process(target=client, args=started, daemon=True)
        self.process.start()
        theirs.close()

    def answer(self, seconds: float) -> Any:
        """Returns the next answer. Raises RuntimeError where there is none in time."""
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
        except EOFError:
            pass
        raise RuntimeError(f"a client did not answer; its log: {self.log}")

    def begin(self) -> None:
        self.connection.send("next")

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def client(connection: Connection, log: Path, environment: Mapping[str, str], every: Sequence[Sequence[str]]) -> None:
    """Runs in a client: prepares all points, then runs the next one at each message."""
    sys.stdout = sys.stderr = log.open("w", encoding="utf-8", buffering=1)
    os.environ.update(environment)
    from vllm.benchmarks import serve
    from vllm.tokenizers import get_tokenizer
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    points = [parser.parse_args(arguments) for arguments in every]
    tokenizer = get_tokenizer(points[0].tokenizer)
    prompts = {point.seed: serve.get_samples(point, tokenizer) for point in points}
    serve.get_samples = lambda point, tokenizer: prompts.pop(point.seed)
    connection.send("ready")
    for point in points:
        connection.recv()
        connection.send(serve.main(point))
    connection.recv()  # waits until it is ended


def measure(args: argparse.Namespace, engine: str, gpus: str) -> None:
    """Measures all points of one engine; writes its record after each."""
    name = engine.replace(":", "_")
    config = GptOssConfig.from_directory(args.model)
    environment = serving_environment(args.model, args.model, on="cuda")
    environment |= {"CUDA_VISIBLE_DEVICES": gpus, "NPU_GPTOSS": "1" if engine == OURS else "0"}
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", args.out / f"{name}.log"
    command = serve_command(args.model, engine, gpus, port, args.flags)
    points = rounds_of(args.streams, args.lengths)
    server = start(command, environment, log)
    _servers.append(server.pid)
    clients: list[Client] = []
    try:
        for n in range(min(args.clients, max(args.streams))):
            parts = [part for point in points if (part := shares_of(point, args.clients)[n])]
            seeds = itertools.count(n, args.clients)
            every = [arguments_of(url, args.model, part, next(seeds)) for part in parts]
            clients.append(Client(args.out / f"{name}_client{n}.log", environment, every))
        seconds = wait_until_ready(server, url, log, START_SECONDS)
        for each in clients:
            each.answer(START_SECONDS)
        kernels = computing(log, engine)
        print(f"{engine} on GPU {gpus}: ready after {seconds:.0f} s. {' '.join(kernels)}", flush=True)
        settings = {"start_s": round(seconds, 1), "flags": command[5:], "kernels": kernels}
        settings["moe_backend"] = engine.partition(":")[2] or None  # None: vLLM's own choice
        settings |= {"engines": args.engines, "gpus": args.gpus, "clients": args.clients}
        keys = {"model": model_name(config), "weights": "bf16" if config.quantization is None else "mxfp4"}
        keys["layout"] = f"tp{len(gpus.split(','))}"
        rows: list[dict[str, Any]] = []
        for point in points:
            busy, before = clients[: min(point[0], args.clients)], energy(gpus)
            for each in busy:
                each.begin()
            found = [each.answer(POINT_SECONDS) for each in busy]
            if point[3] != WARM_UP_OUTPUT:
                rows.append({**keys, **row_of(found, point, energy(gpus) - before)})
                print(engine, json.dumps(rows[-1]), flush=True)
                content = document("serving", DEFINITIONS, settings, rows, ours=engine == OURS)
                save(args.out / f"serving_{name}.json", content)
    finally:
        for each in clients:
            each.end()
        stop(server, PATIENCE)


def lengths(text: str) -> tuple[int, int]:
    read, output = map(int, text.split("x"))
    return read, output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lane(args: argparse.Namespace, number: int) -> bool:
    """Measures the engines of one of --gpus in turn. A failed one is reported and costs the others nothing."""
    whole = True
    for engine in args.engines[number :: len(args.gpus)]:
        try:
            measure(args, engine, args.gpus[number])
        except (RuntimeError, OSError, InputError) as error:
            print(f"{engine}: {error}", file=sys.stderr, flush=True)
            whole = False
    return whole


def end(signum: int, frame: object) -> None:
    """Ends the servers, which are process groups of their own and would keep their GPUs."""
    for group in _servers:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(128 + signum)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT")
    parser.add_argument("--engines", nargs="+", default=[OURS, STOCK], help="ours, stock, stock:BACKEND (both)")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="where servers run; engines take turns on each (0)")
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 64, 16, 1])
    lengths_help = "tokens of prompts and answers; InferenceX asks for 1024x1024 1024x8192 8192x1024 (1024x256)"
    parser.add_argument("--lengths", type=lengths, nargs="+", default=[LENGTHS], metavar="INxOUT", help=lengths_help)
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
    return 0 if all(whole) else 1


if __name__ == "__main__":
    sys.exit(main())
