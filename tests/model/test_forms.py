"""Whatever gpt-oss files people have: served with the right numbers, or refused in one sentence with a true remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npu_gptoss.engine import Engine
from npu_gptoss.model.check import check_directory
from tests.model.corrupt import VOCABULARY
from tests.model.forms import CONVERT, FORMS, MERGE, Form, write_bases
from tests.oracle import load_oracle, oracle_logits, random_prompts
from tests.refused import refused
from tests.tolerances import assert_close

(PROMPT,) = random_prompts([140], VOCABULARY)  # longer than the window
TEXT = "alpha w7 beta"


def logits(folder: Path) -> torch.Tensor:
    return Engine(folder, dtype="float32", num_blocks=16).logits(PROMPT)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def right(bases: Path) -> torch.Tensor:
    found = logits(bases / "bf16-single")
    assert torch.equal(found, logits(bases / "mxfp4-single"))
    assert_close(found, oracle_logits(load_oracle(bases / "bf16-single"), PROMPT), scale=3.0)  # sums in other orders
    return found


@pytest.mark.parametrize("form", [form for form in FORMS if form.served], ids=lambda form: form.name)
def test_form_is_not_read_with_other_numbers(form: Form, bases: Path, right: torch.Tensor, tmp_path: Path) -> None:
    folder = form.written(tmp_path / "model", bases)
    check_directory(folder)
    found = logits(folder)
    if form.oracle:
        assert not torch.equal(found, right) or "left out" in form.name
        assert_close(found, oracle_logits(load_oracle(folder), PROMPT), scale=3.0)
    else:
        assert torch.equal(found[:, :VOCABULARY], right)
    text = Engine(folder, num_blocks=16).text
    assert text.encode(TEXT) == [0, 7, 1]
    assert text.decode([0, 7, 1]).split() in (TEXT.split(), ["alpha", "beta"])  # w7 may be special


@pytest.mark.parametrize("form", [form for form in FORMS if not form.served], ids=lambda form: form.name)
def test_form_is_not_refused_with_a_wrong_remedy(form: Form, bases: Path, right: torch.Tensor, tmp_path: Path) -> None:
    folder = form.written(tmp_path / "model", bases)
    said = []
    readers = (check_directory, lambda path: Engine(path, num_blocks=4).text.encode(TEXT))
    for read in readers if form.field != "chat_template.jinja" else readers[:1]:  # which text alone does not need
        with refused(form.field or str(folder)) as caught:
            read(folder)
        said.append(str(caught.value))
    assert "\n" not in said[0]
    assert form.tool in said[0]
    commands = {CONVERT: f"npu-gptoss convert {folder} {folder}-converted", MERGE: f"--lora {folder}`"}
    assert all(written in said[0] for command, written in commands.items() if command in form.do)
    assert ("npu-gptoss convert" in said[0]) == ("npu-gptoss convert" in form.do)
    if form.mend is not None:
        form.mend(folder)
        check_directory(folder)
        assert torch.equal(logits(folder), right)
