"""Lists the programs that Triton would compile for a warm-up and for random steps, by its own keys, without a GPU; and
compiles the Gluon programs to the machine code of a Hopper GPU.

python -m tests.model.programs '[{"experts": 32, "gluon": true, "ranks": 1, "reach": {...}}, ...]'
python -m tests.model.programs --compile
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompilationError, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, StepMetadata
from npu_gptoss.kernels import triton_launch
from npu_gptoss.kernels.platform import Platform, platform_override
from npu_gptoss.model import warm_up as subject
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import expected_tensors
from npu_gptoss.model.ranks import Ranks
from npu_gptoss.model.sharding import TENSOR, Shard
from npu_gptoss.model.transformer import GptOss, KVCache
from npu_gptoss.moe.triton import layout
from tests.model.published import published_config

META = torch.device("meta")
TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)
SHARED_BYTES = 227 << 10  # of a program on Hopper, at most
BLOCK_SIZE, STEPS = 16, 150
asked: set[str] = set()
launches: dict[str, tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = {}  # of each the first
compile_or_launch = JITFunction.run
HOPPER_RELEASE = (("triton", "3.6.0"),)  # whatever is installed: the kernels in Gluon are chosen


@functools.cache
def binder(kernel: JITFunction) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, BACKEND)


def ask(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In the place of a launch."""
    _, specialization, options = binder(kernel)(*args, **kwargs)
    program = f"{kernel.fn.__module__}.{kernel.fn.__name__} {specialization} {sorted(options.items())}"
    launches.setdefault(program, (kernel, args, kwargs))
    asked.add(program)


class Alone(Ranks):
    """One rank of two without an answer from the other."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def side_by_side(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return tensor if out is None else out


def model_of(experts: int, ranks: int) -> GptOss:
    config = GptOssConfig.from_dict(published_config(num_hidden_layers=2, num_local_experts=experts))
    specs = expected_tensors(config).items()
    tensors = ((name, torch.empty(spec.shape, dtype=spec.dtypes[0], device=META)) for name, spec in specs)
    shared = None if ranks == 1 else Alone(Shard(0, ranks, TENSOR))
    return GptOss.from_tensors(config, tensors, META, torch.bfloat16, ranks=shared)


def empty(rows: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(rows, *shape, dtype=dtype, device=META)


def random_steps(reach: subject.Reach, draw: random.Random) -> Iterator[StepMetadata]:
    """Prompts, decode and both, as far as `reach` says; of decode some with lengths on the device."""
    for _ in range(STEPS):
        decode = draw.randint(0, min(draw.choice([1, 8, 64, reach.decode_rows]), reach.decode_rows, reach.rows))
        room = min(draw.choice([20, 200, reach.rows]), reach.rows) - decode
        prompts: list[int] = []
        while room > 1 and len(prompts) < draw.randint(0, 3):
            prompts.append(draw.randint(2, min(room, reach.keys)))
            room -= prompts[-1]
        rows = [*[1] * decode, *prompts] or [1]
        longest = draw.randint(1, draw.choice([1, 100, 1000, reach.keys]))
        lengths = [max(each, draw.randint(1, min(longest, reach.keys))) for each in rows]
        starts = (0, *accumulate(rows))
        width = -(-max(lengths) // BLOCK_SIZE) + draw.randint(0, 20)
        table = empty(len(rows), width, dtype=torch.int32)
        slots = empty(starts[-1] + 1)[draw.randint(0, 1) :]  # of vLLM's second group, after an odd number of others
        if prompts or draw.random() < 0.3:
            yield AttentionMetadata(starts, tuple(lengths), table, slots)
        else:
            yield DecodeMetadata(empty(len(rows), dtype=torch.int32), table, slots, max(lengths))


def serve(model: GptOss, caches: list[KVCache], step: StepMetadata, graph_rows: int) -> None:
    """The launches of a step outside of a graph."""
    rows = step.num_tokens
    if rows > graph_rows:
        model.forward(empty(rows), empty(rows), caches, step, live=step.lengths)
    else:
        query = empty(rows, model.heads, model.config.head_dim, dtype=model.dtype)
        for index, cache in enumerate(caches):
            model.attend(index, query, cache, step)


def missing(experts: int, gluon: bool, ranks: int, reach: subject.Reach) -> list[str]:
    """The programs of random steps beyond those of the warm-up."""
    asked.clear()
    binder.cache_clear()
    here = Platform("cuda", frozenset({"triton"}), (9, 0), HOPPER_RELEASE if gluon else (("triton", "3.8.0"),))
    with platform_override(here):
        model = model_of(experts, ranks)
        heads, dim = model.config.num_key_value_heads, model.config.head_dim
        memory = empty(64, BLOCK_SIZE, heads, 2 * dim, dtype=torch.bfloat16)
        caches = [(memory[..., :dim], memory[..., dim:])] * len(model.layers)
        model.keep_shortlist()
        subject.warm_up(model, caches, reach)
        warmed, draw = set(asked), random.Random(0)
        assert len(warmed) >= 10
        for step in random_steps(reach, draw):
            serve(model, caches, step, reach.graph_rows)
            rows = draw.randint(1, reach.decode_rows)
            hidden = empty(rows, model.config.hidden_size, dtype=model.dtype)
            model.head(hidden)
            if rows <= model.token_rows:
                model.token(hidden, draw.choice((None, empty(rows, model.config.vocab_size, dtype=torch.float32))))
    return sorted(asked - warmed)


class NoDriver:
    """All that Triton asks of a GPU's driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def innermost(error: BaseException) -> BaseException:
    """A kernel's error names only the call that failed."""
    return error if error.__cause__ is None else innermost(error.__cause__)


def refused() -> dict[str, list[str]]:
    """The faults of each Gluon kernel's programs: the compiler's message, or too much shared memory."""
    launches.clear()
    binder.cache_clear()
    here = Platform("cuda", frozenset({"triton"}), (9, 0), HOPPER_RELEASE)
    found: dict[str, list[str]] = {}
    with platform_override(here), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "supports_pdl", lambda device: True)
        model = model_of(32, 1)
        heads, dim = model.config.num_key_value_heads, model.config.head_dim
        memory = empty(8, BLOCK_SIZE, heads, 2 * dim, dtype=torch.bfloat16)
        caches = [(memory[..., :dim], memory[..., dim:])] * len(model.layers)
        subject.warm_up(model, caches, subject.Reach(rows=2048, decode_rows=32, keys=1024))
        for kernel, args, kwargs in launches.values():
            name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
            if not kernel.is_gluon():
                continue
            wrong = found.setdefault(name.removeprefix("npu_gptoss."), [])
            try:
                made = compile_or_launch(kernel, *args, grid=(1,), warmup=True, **kwargs)
                made = made.result() if hasattr(made, "result") else made
            except CompilationError as error:
                wrong.append(str(innermost(error))[-500:])
            else:
                if made.metadata.shared > SHARED_BYTES:
                    wrong.append(f"{made.metadata.shared} bytes of shared memory of {SHARED_BYTES}")
    return found


def main() -> None:
    JITFunction.run = ask  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign]
    layout._check_scales = lambda scales: None  # looks at values
    if sys.argv[1] == "--compile":
        driver.set_active(NoDriver())  # type: ignore[arg-type]
        print(json.dumps(refused()))
        return
    questions = json.loads(sys.argv[1])
    print(json.dumps([missing(**each | {"reach": subject.Reach(**each["reach"])}) for each in questions]))


if __name__ == "__main__":
    main()
