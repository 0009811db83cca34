"""Text to tokens and back: special tokens are no text, and a missing or damaged tokenizer is said in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, processors

from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.engine.text import TextCodec
from npu_gptoss.errors import InputError
from tests.checkpoints import write_random_checkpoint
from tests.engine.conftest import WORDS
from tests.refused import refused


def test_text_goes_in_and_comes_out_without_special_tokens(worded_directory: Path) -> None:
    engine = Engine(worded_directory, dtype="float32", num_blocks=20)
    result = engine.generate([f"{WORDS[2]} {WORDS[0]}<|stop|>"], SamplingParams(max_tokens=4))[0]
    assert result.prompt_token_ids == (2, 0, 511)
    assert result.text == engine.text.decode(result.token_ids)
    assert len(result.text.split()) == 4
    last = SamplingParams(max_tokens=4, stop_token_ids=(result.token_ids[3],))
    stopped = engine.generate([[2, 0, 511]], last)[0]
    assert stopped.token_ids == result.token_ids
    assert stopped.text == engine.text.decode(result.token_ids[:3])  # the stop token is no text
    assert engine.text.decode([1, 511, 2]) == f"{WORDS[1]} {WORDS[2]}"


def test_no_token_is_added_to_a_text_and_the_file_is_read_once(tmp_path: Path) -> None:
    """A checkpoint's tokenizer may put a token before every text; a prompt in harmony brings its own."""
    tokenizer = Tokenizer(models.WordLevel({"alpha": 0, "[BOS]": 1}, unk_token="[BOS]"))
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("alpha").ids == [1, 0]
    codec = TextCodec(tmp_path)
    assert codec.encode("alpha") == [0]
    (tmp_path / "tokenizer.json").unlink()
    assert codec.encode("alpha") == [0]


def test_without_a_tokenizer_ids_work_and_text_is_refused(engine: Engine) -> None:
    assert engine.generate([[1]], SamplingParams(max_tokens=1))[0].text is None
    with refused("tokenizer.json"):
        engine.generate(["alpha"])


def test_a_damaged_tokenizer_is_an_error_in_words(worded_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((worded_directory / "tokenizer.json").read_text()[:500])
    with pytest.raises(InputError, match="cannot be read as a tokenizer"):
        TextCodec(tmp_path).encode("alpha")


def test_an_engine_reads_no_weights_for_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, layers=1)
    (tmp_path / "model.safetensors").unlink()
    Tokenizer(models.WordLevel({"alpha": 512}, unk_token="alpha")).save(str(tmp_path / "tokenizer.json"))
    with refused("tokenizer.json"):
        Engine(tmp_path, dtype="float32", num_blocks=20)


def test_half_a_surrogate_pair_is_refused(worded_directory: Path) -> None:
    with refused("text"):
        TextCodec(worded_directory).encode("alpha \ud800")
