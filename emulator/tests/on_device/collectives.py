"""`python collectives.py RANKS`: every collective on RANKS processes; prints `OK n` or the differences.

`python collectives.py RANKS apart`: mismatched ranks: different sizes, then rank 0 reduces while others broadcast.
`python collectives.py RANKS experts`: dispatch to experts and combine, and what they refuse.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_npu

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def exchange(rank: int, ranks: int, dtype: torch.dtype) -> dict[str, bool]:
    """Name of each collective -> True if the result is right."""
    base = [(torch.arange(12) + 100 * r).to(dtype) for r in range(ranks)]
    mine, part = base[rank].npu(), 12 // ranks
    total = sum(tensor.float() for tensor in base).to(dtype)
    found = {}

    x = mine.clone()
    dist.all_reduce(x)
    found["all_reduce"] = torch.equal(x.cpu(), total)
    x = mine.clone()
    dist.all_reduce(x, dist.ReduceOp.MAX)
    found["all_reduce max"] = torch.equal(x.cpu(), base[-1])
    x = mine.clone()
    dist.all_reduce(x, dist.ReduceOp.MIN)
    found["all_reduce min"] = torch.equal(x.cpu(), base[0])
    x = (mine * 0 + rank + 2).clone()
    dist.all_reduce(x, dist.ReduceOp.PRODUCT)
    found["all_reduce product"] = x.tolist() == [math.prod(range(2, ranks + 2))] * 12
    x = mine.clone()
    dist.reduce(x, 1)
    found["reduce"] = rank != 1 or torch.equal(x.cpu(), total)
    x = torch.empty(12, dtype=dtype, device="npu")
    dist.scatter(x, [(mine + r).clone() for r in range(ranks)] if rank == 1 else None, 1)
    found["scatter"] = torch.equal(x.cpu(), (base[1].npu() + rank).cpu())
    x = torch.empty(12 * ranks, dtype=dtype, device="npu")
    dist.all_gather_into_tensor(x, mine)
    found["all_gather_into_tensor"] = torch.equal(x.cpu(), torch.cat(base))
    several = [torch.empty(12, dtype=dtype, device="npu") for _ in range(ranks)]
    dist.all_gather(several, mine)
    found["all_gather"] = all(torch.equal(a.cpu(), b) for a, b in zip(several, base, strict=True))
    x = torch.empty(part, dtype=dtype, device="npu")
    dist.reduce_scatter_tensor(x, mine)
    found["reduce_scatter_tensor"] = torch.equal(x.cpu(), total[rank * part : rank * part + part])
    x = mine.clone()
    dist.broadcast(x, 1)
    found["broadcast"] = torch.equal(x.cpu(), base[1])
    x = torch.empty(12, dtype=dtype, device="npu")
    dist.all_to_all_single(x, mine)
    found["all_to_all"] = torch.equal(x.cpu(), torch.cat([b[rank * part : rank * part + part] for b in base]))

    counts = [[(r + s) % 3 for r in range(ranks)] for s in range(ranks)]  # counts[sender][receiver]
    send, receive = counts[rank], [counts[s][rank] for s in range(ranks)]
    x = torch.empty(sum(receive), dtype=dtype, device="npu")
    dist.all_to_all_single(x, mine[: sum(send)], receive, send)
    pieces = [base[s][sum(counts[s][:rank]) :][: counts[s][rank]] for s in range(ranks)]
    found["all_to_all with sizes"] = torch.equal(x.cpu(), torch.cat(pieces))

    x = torch.empty(12, dtype=dtype, device="npu")
    if rank == 0:
        dist.send(mine, 1)
    if rank == 1:
        dist.recv(x, 0)
        found["send, recv"] = torch.equal(x.cpu(), base[0])
    operations = [dist.P2POp(dist.isend, mine, (rank + 1) % ranks), dist.P2POp(dist.irecv, x, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found["a ring of send and recv"] = torch.equal(x.cpu(), base[(rank - 1) % ranks])
    return {f"{name} {dtype}": value for name, value in found.items()}


def others(rank: int, ranks: int) -> dict[str, bool]:
    found = {}
    group = dist.new_group([0, 1])
    if rank < 2:
        x = torch.ones(3, device="npu")
        dist.all_reduce(x, group=group)
        found["all_reduce of a group"] = x.tolist() == [2, 2, 2]
    dist.barrier()
    x = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16, device="npu")
    dist.all_reduce(x)  # rounded at each step, it would stay 256
    found["a sum in float32, rounded once"] = x.item() == torch.tensor(255.0 + ranks).bfloat16().item()
    large = torch.full((20_000_000,), 1.0, device="npu")  # more than one slot of shared memory
    dist.all_reduce(large)
    found["all_reduce of 80 MB"] = bool((large == ranks).all())

    size = 128  # 512 bytes: torch_npu pads fewer by an aclop, and refuses it in a capture
    x, graph = torch.ones(size, device="npu"), torch.npu.NPUGraph()
    several = [torch.empty(size, device="npu") for _ in range(ranks)]
    with torch.npu.graph(graph):
        y = x * (rank + 1)
        dist.all_gather(several, y)
        dist.all_reduce(y)
        z = y + 1
    for value in (1, 3):
        x.fill_(value)
        graph.replay()
        found[f"all_reduce in a graph, {value}"] = z.tolist() == [value * ranks * (ranks + 1) / 2 + 1] * size
        found[f"all_gather in a graph, {value}"] = [p.tolist() for p in several] == [
            [value * (r + 1)] * size for r in range(ranks)
        ]
    return found


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def sizes_differ(rank: int, ranks: int) -> bool:
    """Rank 0 sends three elements to rank 1, which expects two. Only rank 1 fails its own expectation."""
    group = dist.new_group(range(ranks))
    send = [1 + 2 * (rank == 0 and to == 1) for to in range(ranks)]
    receive = [1 + (rank == 1 and of == 0) for of in range(ranks)]
    x, y = torch.ones(sum(send), device="npu"), torch.empty(sum(receive), device="npu")
    text = refusal(lambda: dist.all_to_all_single(y, x, receive, send, group=group))
    return "rank 0 sends 12 bytes and rank 1 expects 8" in text if rank == 1 else True


def lengths_differ(rank: int) -> bool:
    if rank > 1:
        return True
    x = torch.ones(3 - rank, device="npu")
    text = refusal(lambda: dist.recv(x, 0) if rank else dist.send(x, 1))
    return "rank 0 sent 12 bytes and rank 1 expects 8" in text if rank else text == ""


def apart(rank: int, ranks: int) -> dict[str, bool]:
    """Runs last in these processes: their communicator is broken afterwards."""
    found = {"all_to_all": sizes_differ(rank, ranks), "send, recv": lengths_differ(rank)}
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(4, device="npu"))
        else:
            dist.broadcast(torch.ones(4, device="npu"), 1)
        torch.npu.synchronize()
    except RuntimeError as error:
        text = str(error)
        words = ("HcclAllReduce of 16 bytes", "HcclBroadcast", "do not meet")
        return {**found, "refused": all(word in text for word in words)}
    return {**found, "refused": False}


EXPERTS, HIDDEN, CHOICES = 16, 1024, 4  # an A3 takes no narrower rows


def through_experts(
    rank: int, ranks: int, rows: int, active: int, *, shared: int = 0, cumulative: bool = True, captured: bool = False
) -> bool:
    """Rows travel to experts that multiply with their number + 1, and come back: exactly the weighted sum."""
    group = dist.new_group(range(ranks))
    random = torch.Generator().manual_seed(rows * ranks + rank)
    x = torch.randn(rows, HIDDEN, generator=random).bfloat16()
    ids = torch.rand(rows, EXPERTS, generator=random).topk(CHOICES).indices.int()
    scales = torch.rand(rows, CHOICES, generator=random)
    mask = torch.arange(rows) < active
    local = EXPERTS // ranks
    common = {
        "group_ep": group._get_backend(torch.device("npu")).get_hccl_comm_name(rank),
        "ep_world_size": ranks,
        "ep_rank_id": rank,
        "moe_expert_num": EXPERTS,
        "global_bs": shared,
        "x_active_mask": None if shared else mask.npu(),
    }
    given, chosen, weights = x.npu(), ids.npu(), scales.npu()

    def step() -> torch.Tensor:
        came, _, places, numbers, received, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
            x=given, expert_ids=chosen, expert_token_nums_type=int(not cumulative), **common
        )
        ends = numbers if cumulative else numbers.cumsum(0)
        expert = torch.bucketize(torch.arange(len(came), device="npu"), ends, right=True) + rank * local
        came = (came.float() * (expert + 1)[:, None]).bfloat16()
        return torch_npu.npu_moe_distribute_combine_v2(
            expand_x=came,
            expert_ids=chosen,
            assist_info_for_combine=places,
            ep_send_counts=received,
            expert_scales=weights,
            **common,
        )

    if captured:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            out = step()
        given.copy_(torch.randn(rows, HIDDEN, generator=random).bfloat16())
        graph.replay()
        x = given.cpu()
    else:
        out = step()
    expected = torch.zeros(rows, HIDDEN)
    for choice in range(CHOICES):
        rowwise = (x.float() * (ids[:, choice, None] + 1)).bfloat16()
        expected += rowwise.float() * scales[:, choice, None]
    last = rows if shared else active
    same = torch.equal(out.cpu()[:last], expected.bfloat16()[:last])
    return same and (bool(shared) or bool(out.cpu()[last:].isnan().all()))


def experts(rank: int, ranks: int) -> dict[str, bool]:
    found = {
        "all rows": through_experts(rank, ranks, 5, 5),
        "some rows, none on the last rank": through_experts(rank, ranks, 6, rank != ranks - 1 and rank + 1),
        "counts": through_experts(rank, ranks, 3, 3, cumulative=False),
        "unequal ranks": through_experts(rank, ranks, 1 + rank, 1 + rank, shared=ranks * ranks),
        "in a graph": through_experts(rank, ranks, 4, 3, captured=True),
    }
    text = refusal(lambda: through_experts(rank, ranks, 2 + rank, 1))
    found["unequal ranks unsaid"] = "do not meet" in text
    return found


def work(rank: int, ranks: int, store: str, queue: mp.Queue, how: str) -> None:
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=store, rank=rank, world_size=ranks)
    found = {}
    if how == "apart":
        found = apart(rank, ranks)
    elif how == "experts":
        found = experts(rank, ranks)
    else:
        for dtype in DTYPES:
            found |= exchange(rank, ranks, dtype)
        found |= others(rank, ranks)
    queue.put((rank, found))
    queue.close()
    queue.join_thread()
    os._exit(0)


def main(ranks: int, how: str = "together") -> int:
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:  # another process could take a port before rank 0 listens on it
        store = f"file://{folder}/store"
        processes = [
            context.Process(target=work, args=(rank, ranks, store, queue, how), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        answers = dict(queue.get(timeout=240) for _ in processes)
    wrong = [f"rank {rank}: {name}" for rank, found in answers.items() for name, right in found.items() if not right]
    print("\n".join(wrong) if wrong else f"OK {sum(map(len, answers.values()))}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
