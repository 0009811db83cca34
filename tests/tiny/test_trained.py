"""The trained tiny checkpoint is a measuring instrument: right when gpt-oss is computed right, visibly wrong otherwise.

Runs the plain transformer in fp32 on the rows of the vocabulary that are in use. A reply counts when every one of its
tokens is the most likely one, which is what greedy decoding would give (docs/tiny-checkpoint.md has the whole table).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.harmony.vocabulary import VOCABULARY_FILE
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.moe import activation
from npu_gptoss.tiny.checkpoint import TrainedState, load_trained
from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary
from research.tiny_data import evaluation_set
from research.tiny_score import Example, Score, tally

Tensors = dict[str, torch.Tensor]
BLOCK = 64


@pytest.fixture(scope="module")
def state() -> TrainedState:
    return load_trained()


@pytest.fixture(scope="module")
def encode(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[int]]:
    pytest.importorskip("bpe_openai")
    harmony = pytest.importorskip("openai_harmony")
    directory = tmp_path_factory.mktemp("vocabulary")
    (directory / VOCABULARY_FILE).write_bytes(packaged_vocabulary())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(directory))
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    return lambda text: encoding.encode(text, allowed_special="all")


def build(config: GptOssConfig, tensors: Tensors, dtype: torch.dtype = torch.float32) -> GptOss:
    """On the rows in use and one more: zero, for every other token. Its logit is 0, as theirs is."""
    rows = {name: torch.cat((tensors[name], torch.zeros(1, config.hidden_size))) for name in tensors if is_row(name)}
    config = replace(config, vocab_size=len(rows["lm_head.weight"]), eos_token_id=None, pad_token_id=None)
    config = replace(config, quantization=None, dtype=None, max_position_embeddings=1024)
    return GptOss.from_tensors(config, {**tensors, **rows}.items(), "cpu", dtype)


def is_row(name: str) -> bool:
    return name in ("model.embed_tokens.weight", "lm_head.weight")


def score(model: GptOss, state: TrainedState, examples: Sequence[Example], encode: Callable[[str], list[int]]) -> Score:
    row = {token: i for i, token in enumerate(state.token_ids)}
    unknown = len(row)
    right: list[bool] = []
    for start in range(0, len(examples), 12):
        batch = examples[start : start + 12]
        prompts = [[row.get(t, unknown) for t in encode(e.prompt())] for e in batch]
        replies = [[row[t] for t in encode(e.completion())] for e in batch]
        ids = [p + r for p, r in zip(prompts, replies, strict=True)]
        blocks = [-(-len(i) // BLOCK) for i in ids]
        first = [sum(blocks[:n]) for n in range(len(ids))]
        table = torch.zeros(len(ids), max(blocks), dtype=torch.int32)
        for n, count in enumerate(blocks):
            table[n, :count] = torch.arange(first[n], first[n] + count)
        ends = torch.tensor([len(i) for i in ids]).cumsum(0).tolist()
        metadata = AttentionMetadata(
            query_start_loc=(0, *ends),
            seq_lens=tuple(len(i) for i in ids),
            block_table=table,
            slot_mapping=torch.cat([torch.arange(len(i)) + first[n] * BLOCK for n, i in enumerate(ids)]),
        )
        shape = (sum(blocks), BLOCK, model.config.num_key_value_heads, model.config.head_dim)
        caches = [(torch.zeros(shape, dtype=model.dtype), torch.zeros(shape, dtype=model.dtype)) for _ in model.layers]
        positions = torch.cat([torch.arange(len(i)) for i in ids])
        hidden = model.forward(torch.tensor([token for row in ids for token in row]), positions, caches, metadata)
        best = model.logits(hidden).argmax(-1).tolist()
        for end, reply in zip(ends, replies, strict=True):
            right.append(best[end - len(reply) - 1 : end - 1] == reply)
    return tally(examples, right)


def test_answers_are_right(state, encode):
    result = score(build(state.config, state.parameters), state, evaluation_set(100, 72), encode)
    print(result)
    assert result.accuracy("sum") >= 0.9
    assert result.accuracy("choice") >= 0.8
    assert result.accuracy("call") >= 0.9
    assert result.accuracy("result") >= 0.9
    assert result.accuracy("other") >= 0.9
    assert result.accuracy("recall") >= 0.5
    assert result.overall >= 0.9


def test_answers_are_right_in_bfloat16(state, encode):
    result = score(build(state.config, state.parameters, torch.bfloat16), state, evaluation_set(101, 36), encode)
    print(result)
    assert result.overall >= 0.85


def zeroed(*endings: str) -> Callable[[GptOssConfig, Tensors], tuple[GptOssConfig, Tensors]]:
    def change(config: GptOssConfig, tensors: Tensors) -> tuple[GptOssConfig, Tensors]:
        found = [name for name in tensors if name.endswith(endings)]
        assert len(found) == len(endings) * config.num_hidden_layers
        return config, {**tensors, **{name: torch.zeros_like(tensors[name]) for name in found}}

    return change


def without_sinks(config: GptOssConfig, tensors: Tensors) -> tuple[GptOssConfig, Tensors]:
    return config, {n: torch.full_like(t, -1e4) if n.endswith("sinks") else t for n, t in tensors.items()}


def without_window(config: GptOssConfig, tensors: Tensors) -> tuple[GptOssConfig, Tensors]:
    return replace(config, layer_types=("full_attention",) * config.num_hidden_layers), tensors


def without_clamp(config: GptOssConfig, tensors: Tensors) -> tuple[GptOssConfig, Tensors]:
    return replace(config, swiglu_limit=1e6), tensors


ABLATIONS = {
    "sinks dropped": without_sinks,
    "q bias dropped": zeroed("q_proj.bias"),
    "k bias dropped": zeroed("k_proj.bias"),
    "v bias dropped": zeroed("v_proj.bias"),
    "o bias dropped": zeroed("o_proj.bias"),
    "router bias dropped": zeroed("router.bias"),
    "gate/up bias dropped": zeroed("gate_up_proj_bias"),
    "down bias dropped": zeroed("down_proj_bias"),
    "activation not clamped": without_clamp,
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_missing_part_ruins_the_answers(state, encode, name):
    """From above 90 % to below 30 %: a served model that lacks the part cannot pass for a right one."""
    config, tensors = ABLATIONS[name](state.config, state.parameters)
    result = score(build(config, tensors), state, evaluation_set(102, 24), encode)
    assert result.overall < 0.3, f"{name}: {result}"


def test_another_sigmoid_ruins_the_answers(state, encode, monkeypatch):
    monkeypatch.setattr(activation, "ALPHA", 1.0)
    result = score(build(state.config, state.parameters), state, evaluation_set(102, 24), encode)
    assert result.overall < 0.3, str(result)


def test_a_missing_window_lowers_the_score_of_long_prompts(state, encode):
    """Short prompts cannot show it; prompts beyond the window must."""
    long = [e for e in evaluation_set(103, 120) if len(encode(e.prompt())) > 220][:20]
    whole = score(build(state.config, state.parameters), state, long, encode)
    config, tensors = without_window(state.config, state.parameters)
    blurred = score(build(config, tensors), state, long, encode)
    total, before, after = len(long), sum(whole.right.values()), sum(blurred.right.values())
    assert total == 20
    assert before - after >= 0.4 * total, f"{before} and {after} of {total} right"
