"""What a rank pays on the host to load MXFP4 experts under vLLM: CPU seconds and peak memory for one layer.

python research/load_cost.py --experts 32 --ranks 1 2 4 8

Each line is a process of its own on one thread, with the middle rank's share of random tensors of the published sizes.
Parameters lie on no device, so only the host's part counts: cutting and expanding. One rank of one is also what every
rank paid when it expanded whole tensors and cut afterwards.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from npu_gptoss.model.checkpoint import expand_stream
from npu_gptoss.moe.mxfp4 import GROUP
from npu_gptoss.serving import loading

HIDDEN = INTERMEDIATE = 2880
PREFIX = "model.layers.0.mlp.experts."


def packed_layer(experts: int) -> dict[str, torch.Tensor]:
    """Random codes; scales that make small numbers."""
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        shape = (experts, rows, columns // GROUP)
        tensors[f"{PREFIX}{name}_blocks"] = torch.randint(0, 256, (*shape, GROUP // 2), dtype=torch.uint8)
        tensors[f"{PREFIX}{name}_scales"] = torch.randint(110, 125, shape, dtype=torch.uint8)
    return tensors


def placements(experts: int, ranks: int, expert_parallel: bool) -> dict[str, loading.Placement]:
    """As `loading` makes them of the layer of rank `ranks // 2`."""
    rank, local, width = ranks // 2, experts, INTERMEDIATE // ranks
    layer = SimpleNamespace(tp_rank=rank, tp_size=ranks, intermediate_size_per_partition=width, expert_map=None)
    if expert_parallel:
        local, width = experts // ranks, INTERMEDIATE
        expert_map = torch.full((experts,), -1)
        expert_map[rank * local : (rank + 1) * local] = torch.arange(local)
        layer = SimpleNamespace(tp_rank=0, tp_size=1, intermediate_size_per_partition=width, expert_map=expert_map)
    shapes = {"gate_up_proj": (local, HIDDEN, 2 * width), "down_proj": (local, width, HIDDEN)}
    parameters = {
        PREFIX + name: torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
        for name, shape in shapes.items()
    }
    return {name: loading._experts(name, parameter, layer) for name, parameter in parameters.items()}


def load(tensors: dict[str, torch.Tensor], to: dict[str, loading.Placement], answer: object) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for name, tensor in expand_stream(loading._cut(tensors.items(), to), torch.bfloat16):
        to[name].place(tensor)
        del tensor
    seconds = time.process_time() - start
    answer.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10))


def measured(tensors: dict[str, torch.Tensor], to: dict[str, loading.Placement]) -> tuple[float, int]:
    """(CPU seconds, bytes of memory at the peak beside the checkpoint's own), in a process of its own."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=load, args=(tensors, to, sender))
    process.start()
    found = receiver.recv()
    process.join()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=32, help="of a layer: 32 of 20b (default), 128 of 120b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="tensor parallel sizes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # no threads before the fork
    tensors = packed_layer(options.experts)
    print("| ranks | experts are | CPU seconds | peak MiB | share of the seconds | of the peak |")
    print("|---|---|---|---|---|---|")
    whole = None
    for ranks in options.ranks:
        for expert_parallel in (False, True)[: 1 if ranks == 1 else 2]:
            seconds, peak = measured(tensors, placements(options.experts, ranks, expert_parallel))
            whole = whole or (seconds, peak)
            how = "whole" if ranks == 1 else "dealt out" if expert_parallel else "cut"
            shares = f"{seconds / whole[0]:.2f} | {peak / whole[1]:.2f}"
            print(f"| {ranks} | {how} | {seconds:.2f} | {peak >> 20} | {shares} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
