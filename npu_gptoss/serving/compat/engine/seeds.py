"""Makes the tokens of a seeded request depend on the request alone.

If a step ends within a prompt, vLLM samples a token from the prompt's last row and discards it. It then turns the
request's generator back by four, the advance of CUDA's generator per row. A CPU's generator has no offset and raises,
which ends the engine; an NPU's advances differently. Here the generator of such a row is kept out of the step, so that
nothing has to be turned back.

vLLM's CPU sampler also ignores all seeds as soon as one request of the batch has none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import ASCEND_RUNNER, RUNNER, SAMPLING

_HELD = "_npu_gptoss_held_generators"  # of a runner: the requests whose generators are out of the batch


@repair("seed-rows", f"{RUNNER}:GPUModelRunner._update_states", releases=("0.11",), until="0.23")
def install_rows(module: ModuleType) -> None:
    """A seeded request whose prompt is cut by the end of a step ends the engine on a CPU; on an NPU it draws other
    tokens than an uncut prompt."""
    runner = module.GPUModelRunner
    expect_source(runner._bookkeeping_sync, "gen.set_offset(gen.get_offset() - 4)", "if gen is not None:")
    _install(runner)


@repair("seed-rows-ascend", f"{ASCEND_RUNNER}:NPUModelRunner._update_states", releases=("0.11",), until="0.23")
def install_ascend_rows(module: ModuleType) -> None:
    """Same as seed-rows, in vllm-ascend's worker."""
    from npu_gptoss.serving.compat.start.ascend import expect_release

    expect_release()
    runner = module.NPUModelRunner
    expect_source(runner.execute_model, "generator.set_offset(generator.get_offset() - 4)", "if generator is not None:")
    _install(runner)


def _install(runner: Any) -> None:
    expect_parameters(runner._update_states, "self", "scheduler_output")
    expect_source(runner._update_states, "self.input_batch.condense()", "generator.manual_seed(sampling_params.seed)")

    @around(runner, "_update_states")
    def _update_states(original: Callable[..., None], self: Any, scheduler_output: Any) -> None:
        batch, requests = self.input_batch, self.requests
        for request_id in vars(self).pop(_HELD, ()):
            index = batch.req_id_to_index.get(request_id)
            if index is not None:
                batch.generators[index] = requests[request_id].generator
        original(self, scheduler_output)
        if not batch.generators:
            return
        scheduled = scheduler_output.num_scheduled_tokens
        held = []
        for index in list(batch.generators):
            request = requests[batch.req_ids[index]]
            if request.num_computed_tokens + scheduled[request.req_id] < request.num_tokens:
                del batch.generators[index]  # the sampling metadata holds the same dict
                held.append(request.req_id)
        setattr(self, _HELD, held)


@repair("seed-neighbours", f"{SAMPLING}:TopKTopPSampler.forward_cpu", releases=("0.11",), until="0.23")
def install_cpu_sampler(module: ModuleType) -> None:
    """On a CPU all seeds are ignored as long as one request of the batch has none."""
    sampler = module.TopKTopPSampler
    own = sampler.forward_cpu
    expect_parameters(own, "self", "logits", "generators", "k", "p")
    expect_source(own, "if len(generators) != logits.shape[0]:", "q[i].exponential_(generator=generator)")

    @around(sampler, "forward_cpu")
    def forward_cpu(
        original: Callable[..., Any], self: Any, logits: Any, generators: dict[int, Any], k: Any, p: Any
    ) -> tuple[Any, Any]:
        import torch

        if len(generators) in (0, logits.shape[0]):
            return original(self, logits, generators, k, p)
        logits = self.apply_top_k_top_p(logits, k, p)
        sampled, returned = original(self, logits, {}, None, None)
        rows = list(generators)
        probabilities = logits[rows].softmax(dim=-1, dtype=torch.float32)
        noise = torch.empty_like(probabilities)
        for row, index in enumerate(rows):
            noise[row].exponential_(generator=generators[index])
        sampled[rows] = probabilities.div_(noise).argmax(dim=-1).to(sampled.dtype)
        return sampled, returned
