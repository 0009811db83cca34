"""Two ranks against one, in fp32 over gloo: the same logits but for the order of sums, the same tokens on each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO

import pytest
import torch
import torch.distributed as dist

from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.engine import engine as engine_module
from npu_gptoss.engine.launched import device_and_ranks
from npu_gptoss.model.ranks import Ranks
from npu_gptoss.model.sharding import EXPERT, TENSOR
from tests.checkpoints import new_checkpoint, write_random_checkpoint
from tests.engine.on_ranks import answers
from tests.engine.recording import RerunRecorder
from tests.refused import refused
from tests.serving.server import free_port
from tests.tolerances import assert_close

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory, layers=2, window=20)


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, list]:
    return answers(Engine(directory, dtype="float32", num_blocks=100))


def on_ranks(directory: Path, size: int, *layouts: str, device: str = "cpu") -> list[list[dict[str, list]]]:
    """The answers of each rank with each of `layouts` (experts, graphs, …).

    They write to files: a rank that waits for a reader keeps the others from ending.
    """
    port = free_port()
    script = ROOT / "tests" / "engine" / "on_ranks.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        out, err = ([stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(size)] for _ in range(2))
        processes = []
        for rank in range(size):
            command = [sys.executable, script, device, directory, str(rank), str(size), str(port), *layouts]
            process = subprocess.Popen(command, stdout=out[rank], stderr=err[rank], cwd=ROOT, env=environment)
            processes.append(process)
            stack.callback(process.kill)
        end = time.monotonic() + 100
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                break  # the others may wait for this one for ever
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
        assert codes == [0] * size, "\n".join(f"rank {rank}: {read(file)[-3000:]}" for rank, file in enumerate(err))
        return [json.loads(read(file).splitlines()[-1]) for file in out]


def read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def test_two_ranks_compute_the_tokens_of_one_rank(directory: Path, alone: dict[str, list]) -> None:
    """Every tensor cut, and experts dealt out, with graphs."""
    first, second = on_ranks(directory, 2, TENSOR, "none", EXPERT, "full")
    assert first == second  # bit for bit: whoever parts company computes another step than the others
    want = torch.tensor(alone["logits"])
    assert want.std() > 1
    greedy = (0, 3)
    for layout in first:
        # sums of two halves, through two layers; logits of standard deviation 2
        assert_close(torch.tensor(layout["logits"]), want, torch.float32, atol=1e-4)
        assert [layout["tokens"][i] for i in greedy] == [list(alone["tokens"][i]) for i in greedy]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs: make test-cuda")
@pytest.mark.parametrize("experts", [TENSOR, EXPERT])
@pytest.mark.parametrize("size", [size for size in (2, 4) if size <= max(2, torch.cuda.device_count())])
def test_gpus_over_nccl_compute_the_tokens_of_one_gpu(size: int, experts: str, tmp_path: Path) -> None:
    """In bf16 and with NCCL inside the graphs: one set of bits on all ranks, and one GPU's logits but for rounding."""
    write_random_checkpoint(tmp_path, layers=2, hidden=256, intermediate=256, heads=8, kv_heads=4, mxfp4=True)
    want = torch.tensor(answers(Engine(tmp_path, device="cuda", num_blocks=100, graph_sizes=(1, 2, 4)))["logits"])
    results = on_ranks(tmp_path, size, experts, "full", device="cuda")
    assert all(result == results[0] for result in results)
    got = torch.tensor(results[0][0]["logits"])
    assert (got - want).norm() / want.norm() < 0.05


def under_torchrun(command: list[str]) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    return [*torchrun, "--rdzv-endpoint", "127.0.0.1:0", *command]


def run_python(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)


def test_generate_under_torchrun_answers_once(directory: Path) -> None:
    generate = ["-m", "npu_gptoss.cli", "generate", "--model", str(directory), "--prompt-ids", "1,2,3", "--json"]
    generate += ["--device", "cpu", "--dtype", "float32", "--max-tokens", "5", "--num-blocks", "10"]
    together = run_python(under_torchrun([*generate, "--share-experts", "expert"]))
    assert together.returncode == 0, together.stderr
    alone = Engine(directory, dtype="float32", num_blocks=10).generate([[1, 2, 3]], SamplingParams(max_tokens=5))
    assert [row["token_ids"] for row in json.loads(together.stdout)] == [list(result.token_ids) for result in alone]


def test_bench_under_torchrun_writes_one_table_with_its_layout(directory, tmp_path) -> None:
    bench = ["-m", "npu_gptoss.cli", "bench", "decode", "--model", str(directory), "--device", "cpu"]
    bench += ["--num-blocks", "20", "--batch", "2", "--context", "20", "300", "--steps", "2", "--gpu-price", "1"]
    run = run_python(under_torchrun([*bench, "--share-experts", "expert", "--json", str(tmp_path / "decode.json")]))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("one GPU hour") == 1
    assert run.stderr.count("batch 2, context 300: not measured") == 1
    content = json.loads((tmp_path / "decode.json").read_text())
    (record,) = content["records"]
    assert (record["layout"], record["gpus"], record["weights"]) == ("ep2", 2, "bf16")
    assert list(content["ceilings"]) == ["2 x measured here"]
    seconds = record["tpot_ms"] / 1e3
    assert record["dollars_per_million_tokens"] == pytest.approx(2 / 3600 * seconds / 2 * 1e6, rel=1e-3)


def test_a_device_by_number_is_refused_where_each_rank_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    with refused("device"), device_and_ranks("cuda:1", TENSOR):
        pass


def test_a_closed_engine_holds_no_graph_and_still_answers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for ever for a graph that holds one of its collectives."""
    monkeypatch.setattr(engine_module, "Recorder", RerunRecorder)
    engine = Engine(directory, dtype="float32", num_blocks=100, graphs="full", graph_sizes=(1,))
    params = SamplingParams(max_tokens=5)
    want = [result.token_ids for result in engine.generate([[1, 2, 3]], params)]
    graphs = weakref.ref(engine.graphs)
    engine.close()
    assert graphs() is None
    assert [result.token_ids for result in engine.generate([[1, 2, 3]], params)] == want


GROUP = """
import torch.distributed as dist
from npu_gptoss.engine.launched import device_and_ranks
from npu_gptoss.model.sharding import EXPERT, TENSOR, Shard

for experts in (TENSOR, EXPERT):
    with device_and_ranks("cpu", experts) as (device, ranks):
        assert (device, ranks.shard) == ("cpu", Shard(0, 1, experts))
        assert dist.is_initialized()
    assert not dist.is_initialized()
"""


def test_the_group_of_processes_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process waits at its end, or warns, and no second engine could be made in it. In a separate process:
    vLLM leaves its group in this one."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in {**place, "TORCHELASTIC_RUN_ID": "test"}.items():
        monkeypatch.setenv(name, value)
    run = run_python(["-c", GROUP])
    assert run.returncode == 0, run.stderr


def test_without_torchrun_there_is_one_process_and_the_device_asked_for() -> None:
    with device_and_ranks("cuda:1", TENSOR) as (device, ranks):
        assert (device, ranks) == ("cuda:1", None)


def test_ranks_need_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # an engine of another test may have one
    with refused("torch.distributed"):
        Ranks.of_this_process()
