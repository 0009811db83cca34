"""The rows of a runner's batch: seeds, allowed tokens and their widths depend on the row's own request alone.

If a step ends within a prompt, vLLM samples a token from the prompt's last row and discards it. It then turns the
request's generator back by four, the advance of CUDA's generator per row. A CPU's generator has no offset and raises,
which ends the engine; an NPU's advances differently. Here the generator of such a row is kept out of the step, so that
nothing has to be turned back.

When vLLM moves the last row into a gap, it leaves the row's mask of allowed tokens behind. As long as any request of
the batch has `allowed_token_ids`, the next request in that row is restricted by the old mask. When two rows are
swapped, both end with the same mask, because the mask is exchanged through views.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import Original, around, either, expect_source, repair
from npu_gptoss.serving.compat.targets import ASCEND_RUNNER, BOTH, RUNNER

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

_HELD = "_npu_gptoss_held_generators"  # of a runner: the requests whose generators are out of the batch


@repair("seed-rows", f"{RUNNER}:GPUModelRunner._update_states", until="0.23")
@repair("seed-rows-ascend", f"{ASCEND_RUNNER}:NPUModelRunner._update_states", until="0.23")
def install_seeds(module: ModuleType) -> None:
    """A seeded request whose prompt is cut by the end of a step ends the engine on a CPU; on an NPU it draws other
    tokens than an uncut prompt."""
    runner = getattr(module, either(module, "NPUModelRunner", "GPUModelRunner"))
    turns_back = getattr(runner, either(runner, "_bookkeeping_sync", "execute_model"))
    expect_source(turns_back, ".set_offset(gen", ".get_offset() - 4)", "is not None:")
    expect_source(runner._update_states, "self.input_batch.condense()", "generator.manual_seed(sampling_params.seed)")

    @around(runner, "_update_states")
    def _update_states(original: Original, self: Any, scheduler_output: Any) -> None:
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


@repair("seed-neighbours", "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu", until="0.23")
def install_cpu_sampler(module: ModuleType) -> None:
    """On a CPU all seeds are ignored as long as one request of the batch has none."""
    sampler = module.TopKTopPSampler
    expect_source(
        sampler.forward_cpu, "if len(generators) != logits.shape[0]:", "q[i].exponential_(generator=generator)"
    )

    @around(sampler, "forward_cpu")
    def forward_cpu(
        original: Original, self: Any, logits: Any, generators: dict[int, Any], k: Any, p: Any
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


@repair("row-masks", "vllm.v1.worker.gpu_input_batch:InputBatch.add_request .swap_states", releases=BOTH, until="0.33")
@repair("row-masks-ascend", "vllm_ascend.worker.npu_input_batch:InputBatch.add_request .swap_states", until="0.23")
def install_masks(module: ModuleType) -> None:
    """A request's allowed_token_ids restrict the next one in its row, too."""
    batch = module.InputBatch
    expect_source(batch.add_request, "self.allowed_token_ids_mask_cpu_tensor[req_index] = True", "return req_index")
    expect_source(batch.swap_states, "self.allowed_token_ids_mask_cpu_tensor[i1], ", "swap_dict_values(")

    @around(batch, "add_request")
    def add_request(original: Original, self: Any, request: Any) -> int:
        index = original(self, request)
        mask = self.allowed_token_ids_mask_cpu_tensor
        if mask is not None and request.req_id not in self.has_allowed_token_ids:
            mask[index] = False
        return index

    @around(batch, "swap_states")
    def swap_states(original: Original, self: Any, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        swapped = None if mask is None else mask[[i2, i1]]  # a copy
        original(self, i1, i2)
        if swapped is not None:
            mask[[i1, i2]] = swapped


def _widths(sampling: SamplingParams) -> dict[str, tuple[int, int]]:
    """Returns for each field the tokens that a request puts into a row of the V2 runner's tables, and the row's
    width."""
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias as rows

    # min_tokens suppresses the request's and the model's own stop tokens
    suppressed = sampling.all_stop_token_ids if sampling.min_tokens > 0 else ()
    words = sum(map(len, sampling.bad_words_token_ids or ()))
    return {
        "allowed_token_ids": (len(sampling.allowed_token_ids or ()), rows.MAX_NUM_ALLOWED_TOKEN_IDS),
        "logit_bias": (len(sampling.logit_bias or ()), rows.MAX_NUM_LOGIT_BIAS_TOKENS),
        "stop_token_ids": (len(suppressed), rows.MAX_NUM_STOP_TOKEN_IDS),
        "bad_words": (words, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    }


@repair(
    "row-widths",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    releases="0.33",
    until="vLLM checks a request against the widths of its second runner's tables",
)
def install_widths(module: ModuleType) -> None:
    """If the allowed tokens, biases, tokens of bad words, or stop tokens with min_tokens exceed a row of the runner's
    tables, the worker raises and the engine ends."""
    from vllm.exceptions import VLLMValidationError

    processor = module.InputProcessor
    expect_source(processor.process_inputs, "sampling_params.update_from_tokenizer(self.tokenizer)")

    @around(processor, "process_inputs")
    def process_inputs(original: Original, *args: Any, **keywords: Any) -> Any:
        request = original(*args, **keywords)
        if request.sampling_params is not None:
            for name, (count, most) in _widths(request.sampling_params).items():
                if count > most:
                    raise VLLMValidationError(f"{name}: expected at most {most} tokens, got {count}.", parameter=name)
        return request
