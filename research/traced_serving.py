"""`python traced_serving.py JOB.json`: serves on the emulated 910B with marks in the trace around what is counted.

Started by `trace_table.py` in the emulated environment, one process a path. The marks are put from outside, by
wrapping classes of vllm-ascend and of the package: a `begin` and an `end` for each step, layer, attention (KV write
included, as the splitting operator calls one layer's implementation) and experts (from the router's logits to the
combined sum). The `end` holds the host's CPU time in between, without what the emulated device spent.

The job: checkpoint (written when missing) and its shape, options of `LLM`, batches, context, steps, plugin (False:
vllm-ascend without this package).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

DEVICE_NAMESPACES = ("npu::", "atb::", "aten::")


class DeviceTime:
    """CPU time of this thread spent inside the emulated device; nested calls count once.

    Operators called through `torch.ops` count from their call on: the way into an emulated one leads through Python,
    which takes the longer the more arguments it has, and no real one does.
    """

    def __init__(self) -> None:
        self.spent, self.inside = 0, False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside, start = True, time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.thread_time_ns() - start
                self.inside = False

        return timed

    def around_operators(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.around(call)

        def of_device(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
            name = getattr(operator, "_qualified_op_name", None) or operator.name()
            return (timed if name.startswith(DEVICE_NAMESPACES) else call)(operator, *args, **kwargs)

        return of_device

    def install(self, eager: bool) -> None:
        import torch
        from ascend_emulator import copies, device, graphs, memory

        # not under torch.compile, which calls them while it traces
        for called in (torch._ops.OpOverload, torch._ops.OpOverloadPacket) if eager else ():
            called.__call__ = self.around_operators(called.__call__)
        device.Kernel.__call__ = self.around(device.Kernel.__call__)
        for module, name in ((graphs, "launch"), (memory, "poison"), (copies, "_transfer")):
            setattr(module, name, self.around(getattr(module, name)))


device_time = DeviceTime()


@contextlib.contextmanager
def region(name: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Marks in the trace; what is put into the yielded dictionary goes to the end's fields."""
    from ascend_emulator import trace

    found: dict[str, Any] = {}
    trace.mark("begin", region=name, **fields)
    start, device = time.thread_time_ns(), device_time.spent
    yield found
    spent = time.thread_time_ns() - start - (device_time.spent - device)
    for key, value in found.items():
        found[key] = value() if callable(value) else value
    trace.mark("end", region=name, host_ns=spent, **found)


def mark_steps() -> None:
    """vllm-ascend 0.23 samples in a call of its own, `sample_tokens`, behind an `execute_model` that returns None."""
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    execute, sample = NPUModelRunner.execute_model, getattr(NPUModelRunner, "sample_tokens", None)
    step = contextlib.ExitStack()

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = scheduler_output.num_scheduled_tokens
        tokens = scheduler_output.total_num_scheduled_tokens
        step.enter_context(region("step", requests=len(scheduled), tokens=tokens))
        result = execute(self, scheduler_output, *args, **kwargs)
        if sample is None or result is not None:
            step.close()
        return result

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        with step:
            return sample(self, *args, **kwargs)

    NPUModelRunner.execute_model = execute_model
    if sample is not None:
        NPUModelRunner.sample_tokens = sample_tokens


def mark_attention(implementation: type) -> None:
    from npu_gptoss.serving.lines.ascend import splitting_attention

    original, twice = implementation.forward, splitting_attention is not None

    def forward(self: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *a: Any, **k: Any):
        if metadata is None or (twice and k.get("trace_flag", True)):
            return original(self, layer, query, key, value, cache, metadata, *a, **k)
        lengths = [int(length) for length in metadata.seq_lens]
        with region("attention", seq_lens=lengths, window=getattr(self, "window", None)):
            return original(self, layer, query, key, value, cache, metadata, *a, **k)

    implementation.forward = forward


def mark_experts(method: type, home: Any, name: str) -> None:
    """`name` of `home`, a module or a class, returns (weights, ids) of the routing."""
    from ascend_emulator import memory

    routed: list[Any] = []
    route, original = getattr(home, name), method.apply

    def kept(*args: Any, **kwargs: Any) -> Any:
        result = route(*args, **kwargs)
        routed[:] = [result[1]]
        return result

    def distinct() -> int:
        return memory.alias(routed[0]).unique().numel()  # no copy to the host: the emulated memory is the host's

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        with region("experts") as found:
            result = original(self, *args, **kwargs)
            found["distinct"] = distinct
        return result

    setattr(home, name, kept)
    method.apply = apply


def mark_layers() -> None:
    from npu_gptoss.serving.model import DecoderLayer

    original = DecoderLayer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with region("layer"):
            return original(self, *args, **kwargs)

    DecoderLayer.forward = forward


def module(*names: str) -> Any:
    """The one of them that this vllm-ascend has."""
    return importlib.import_module(next(filter(importlib.util.find_spec, names)))


def install(plugin: bool, eager: bool) -> None:
    """All marks. Inside compiled graphs there is no Python to mark, so layers and experts are marked in eager mode."""
    from vllm.platforms import current_platform

    current_platform.pre_register_and_update()  # vllm-ascend patches vLLM before its worker is imported
    module("vllm_ascend.worker.worker_v1", "vllm_ascend.worker.worker")  # and its other modules come behind that
    device_time.install(eager)
    mark_steps()
    if not plugin:
        from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl

        mark_attention(AscendAttentionBackendImpl)
        if eager:
            home = module("vllm_ascend.ops.common_fused_moe", "vllm_ascend.ops.fused_moe.fused_moe")
            mark_experts(home.AscendUnquantizedFusedMoEMethod, home, "select_experts")
        return
    from npu_gptoss.serving.ascend import moe
    from npu_gptoss.serving.ascend.attention import AscendSinkImpl

    mark_attention(AscendSinkImpl)
    if eager:
        mark_experts(moe.AscendExpertsMethod, moe.AscendExpertsMethod, "route")
        mark_layers()


def write_checkpoint(directory: Path, *, vocabulary: int, mxfp4: bool, **shape: int) -> None:
    import torch

    from npu_gptoss.model import checkpoint
    from npu_gptoss.tiny import checkpoint as tiny

    config = replace(tiny.tiny_config(mxfp4=mxfp4, **shape), vocab_size=vocabulary, eos_token_id=1, pad_token_id=0)
    tensors = tiny.random_tensors(config, seed=0)
    expanded = tensors if mxfp4 else checkpoint.expand_stream(tensors, torch.bfloat16)
    checkpoint.write_checkpoint(directory, config, expanded)


def main(job: dict[str, Any]) -> None:
    directory = Path(job["checkpoint"])
    if not directory.exists():
        write_checkpoint(directory, **job["shape"])
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    registry._run_in_subprocess = lambda look: look()  # at the model's class; a process of its own costs ten seconds
    load_general_plugins()
    if job["plugin"]:
        import article_path  # noqa: F401  (registers the kernels; selected by name only)
    install(job["plugin"], job["options"].get("enforce_eager", False))
    engine = LLM(str(directory), skip_tokenizer_init=True, seed=0, **job["options"])
    sampling = SamplingParams(max_tokens=job["steps"] + 1, temperature=0, ignore_eos=True, detokenize=False)
    random_numbers = random.Random(0)
    for batch in job["batches"]:
        prompts = [
            [random_numbers.randrange(job["shape"]["vocabulary"]) for _ in range(job["context"])] for _ in range(batch)
        ]
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    code = 1
    try:
        main(json.loads(Path(sys.argv[1]).read_text()))
        code = 0
    except BaseException:
        traceback.print_exc()
    for worker in multiprocessing.active_children():  # they would outlive this process, at work
        worker.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever engines and process groups still want to say at exit
