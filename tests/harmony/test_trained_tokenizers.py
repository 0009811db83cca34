"""Tokenizers as training leaves them: padding and truncation in the file, tokens added or renamed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("openai_harmony")

from tokenizers import AddedToken, Tokenizer

from npu_gptoss.engine.text import TextCodec
from npu_gptoss.harmony.encoding import Encoder, load_encoder
from npu_gptoss.harmony.parser import text_of
from npu_gptoss.harmony.rendering import CHANNEL, END, MESSAGE
from tests.harmony.conftest import conversation

GROWN = 1200  # tokens: some have ids behind openai-harmony's 201 088


@pytest.fixture(scope="module")
def trained(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that training has padded, cut and grown, with a reserved token that it renamed."""
    folder = tmp_path_factory.mktemp("trained")
    text = (directory / "tokenizer.json").read_text().replace("<|reserved_200013|>", "<|tool|>")
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_tokens(["Zyxglorp", *(f"neu{i}é" for i in range(GROWN))])
    tokenizer.add_special_tokens([AddedToken("<|seen|>", special=True)])
    tokenizer.enable_padding(length=64, pad_id=199999, pad_token="<|endoftext|>")
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def grown(trained: Path, library: object) -> Encoder:
    return load_encoder(trained)


def test_padding_and_truncation_of_training_reach_no_prompt(grown: Encoder, encoder: Encoder, trained: Path) -> None:
    messages = conversation([{"role": "user", "content": "What is 3 + 4? " * 20}])
    assert grown.encode(messages) == encoder.encode(messages)
    assert TextCodec(trained).encode("a longer text of ten words or so, in total") == encoder.text(
        "a longer text of ten words or so, in total"
    )


@pytest.mark.parametrize("name", ["Zyxglorp", "neu0é", f"neu{GROWN - 1}é", "<|tool|>", "<|seen|>"])
def test_tokens_of_training_are_read_and_written_by_their_names(grown: Encoder, trained: Path, name: str) -> None:
    token = Tokenizer.from_file(str(trained / "tokenizer.json")).token_to_id(name)
    assert grown.text(f"say {name}!") == [*grown.text("say "), token, *grown.text("!")]
    assert TextCodec(trained).encode(f"say {name}!") == grown.text(f"say {name}!")
    assert grown.decode([token]) == name or not name.isascii()  # the decoder of `tokenizers` spoils others
    parser, told = grown.parser(), ""
    for part in (*grown.header("final"), *grown.text("say "), token, *grown.text(" and more")):
        told += parser.process(part).last_content_delta or ""
    assert told == f"say {name} and more"
    assert text_of(parser.process(END).messages[0]) == told


def test_control_tokens_stay_letters_in_a_text(grown: Encoder) -> None:
    assert not {CHANNEL, MESSAGE, END} & set(grown.text("<|channel|>final<|message|>x<|end|><|seen|>"))


def test_unused_id_takes_no_text_with_it(grown: Encoder, encoder: Encoder) -> None:
    """A row of the embedding's padding, which a model with noise in its head may choose."""
    for one in (grown, encoder):
        parser, told = one.parser(), ""
        for part in (*one.header("final"), *one.text("say "), 205_000, *one.text("it"), END):
            told += parser.process(part).last_content_delta or ""
        assert told == text_of(parser.messages[0]) == "say it"
