"""docs/troubleshooting.md is true: its texts are those of the code, its tests exist, and no error of ours is missing.

An entry is a heading, a block of texts with `…` for what differs, and fields. Texts "from npu-gptoss" must stand in our
source, those from vLLM, vllm-ascend, torch-npu and openai-harmony in their released packages. The other way round,
every error and warning on the way to a served gpt-oss must have its line.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from npu_gptoss.harmony.vocabulary import parse_ranks
from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary
from tests.emulator.machine import venv
from tests.evidence import looks_like_tests, objection
from tests.messages import ROOT, fragments, holds, template, templates_of, tidy

PAGE = ROOT / "docs/troubleshooting.md"
FIELDS = ("From", "Means", "Do")
EVIDENCE = ("Shown by", "Seen by others")
OURS = "npu-gptoss"


@dataclass(frozen=True)
class Entry:
    title: str
    texts: tuple[str, ...]
    fields: dict[str, str]

    def sources(self) -> list[str]:
        """Whoever says one of the texts, of those whose texts can be looked up."""
        return [name for name in (*PACKAGES, OURS) if name in self.fields["From"]]


def entries_of(page: str) -> Iterator[Entry]:
    for section in re.split(r"^### ", page.partition("\n## ")[2], flags=re.M)[1:]:
        body = section.partition("\n## ")[0]
        title, _, rest = body.partition("\n")
        block = re.search(r"^```text\n(.*?)^```$", rest, re.M | re.S)
        assert block, f"{title}: no block of texts"
        prose = rest[block.end() :]
        found = re.findall(r"^\*([A-Z][a-z ]+):\* (.*?)(?=^\*[A-Z]|\Z)", prose, re.M | re.S)
        yield Entry(title, tuple(block[1].splitlines()), {name: text.strip() for name, text in found})


ENTRIES = tuple(entries_of(PAGE.read_text(encoding="utf-8")))


# --- who says a text


def site_packages(emulated: bool) -> Path:
    if emulated:
        (found,) = venv().glob("lib/python*/site-packages")
        return found
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parent.parent


@functools.cache
def sources_of(package: str, emulated: bool) -> tuple[str, ...]:
    """The Python files of a package, with the pieces of texts that stand below each other put together."""
    folder = site_packages(emulated) / package
    files = [folder / "__init__.py"] if package == "torch" else sorted(folder.rglob("*.py"))
    assert files, f"{folder} holds no Python"
    pieces = re.compile(r"""["']\s*\n\s*f?["']""")
    return tuple(tidy(pieces.sub("", file.read_text(encoding="utf-8", errors="ignore"))) for file in files)


@functools.cache
def binary_of(pattern: str, emulated: bool) -> bytes:
    files = sorted(site_packages(emulated).glob(pattern))
    assert files, pattern
    return b"".join(file.read_bytes() for file in files)


def in_python(package: str, emulated: bool, parts: list[str]) -> bool:
    return any(all(part in text for part in parts) for text in sources_of(package, emulated))


def in_binary(pattern: str, emulated: bool, parts: list[str]) -> bool:
    return all(part.encode() in binary_of(pattern, emulated) for part in parts)


# what an entry calls a source ("torch (", because torch-npu begins so too) -> whether the parts of a text are there
PACKAGES = {
    "vLLM 0.11.0": functools.partial(in_python, "vllm", False),
    "vllm-ascend 0.11.0": functools.partial(in_python, "vllm_ascend", True),
    "torch-npu 2.7.1": functools.partial(in_binary, "torch_npu/lib/libtorch_npu.so", True),
    "openai-harmony": functools.partial(in_binary, "openai_harmony/*.so", False),
    "torch (": functools.partial(in_python, "torch", False),
}


@functools.cache
def our_templates() -> tuple[str, ...]:
    files = [*sorted((ROOT / "npu_gptoss").rglob("*.py")), ROOT / "scripts/serve_cpu.py"]
    return tuple(text for file in files for text in templates_of(file))


def said_by(source: str, text: str) -> bool:
    # the class of an error, in front of its text, is Python's
    parts = fragments(re.sub(r"^[\w.]*(Error|Exception): ", "", text))
    if source == OURS:
        return any(holds(parts, written) for written in our_templates())
    return PACKAGES[source](parts)


# --- entries


def test_the_page_has_entries() -> None:
    assert len(ENTRIES) > 30
    assert {source for entry in ENTRIES for source in entry.sources()} == {*PACKAGES, OURS}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_an_entry_is_whole_and_its_evidence_exists(entry: Entry) -> None:
    assert list(entry.fields)[:3] == list(FIELDS), list(entry.fields)
    assert set(entry.fields) <= {*FIELDS, *EVIDENCE}
    assert set(entry.fields) & set(EVIDENCE), "neither a test nor a report of others"
    assert all(entry.fields.values())
    if shown := entry.fields.get("Shown by"):
        assert looks_like_tests(shown), "no test"
    for name in EVIDENCE:
        named = looks_like_tests(entry.fields.get(name, ""))
        assert {test: objection(test) for test in named if objection(test)} == {}
    if seen := entry.fields.get("Seen by others"):
        assert re.search(r"(issues?|PR) \d+", seen), "no report is named"


def test_an_entry_whose_tests_are_of_another_name_would_be_seen() -> None:
    test = "tests/test_troubleshooting.py::test_that_nobody_wrote"
    entry = Entry("x", ("y",), {"From": OURS, "Means": "m", "Do": "d", "Shown by": f"`{test}`"})
    with pytest.raises(AssertionError, match="test_that_nobody_wrote"):
        test_an_entry_is_whole_and_its_evidence_exists(entry)


# sentences that files.py and its like put together from parts; the tests that these entries name provoke them
COMPOSED = (
    "Files are damaged or missing",
    "config.json is not gpt-oss's",
    "The tokenizer or generation_config.json cannot be used",
)
FROM_ONE = [
    entry
    for entry in ENTRIES
    if entry.sources() == [OURS] and "CANN" not in entry.fields["From"] and entry.title not in COMPOSED
]


@pytest.mark.parametrize("entry", FROM_ONE, ids=lambda entry: entry.title)
def test_what_we_are_said_to_say_stands_in_our_code(entry: Entry) -> None:
    assert [text for text in entry.texts if not said_by(OURS, text)] == []


FOREIGN = [entry for entry in ENTRIES if set(entry.sources()) - {OURS}]
EMULATED = ("vllm-ascend 0.11.0", "torch-npu 2.7.1")


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            entry, id=entry.title, marks=[pytest.mark.emulated] if set(EMULATED) & set(entry.sources()) else []
        )
        for entry in FOREIGN
    ],
)
def test_what_others_are_said_to_say_stands_in_their_packages(entry: Entry) -> None:
    """Each source of an entry says a text; and each text is somebody's, unless CANN or the loader may have said it."""
    silent = [source for source in entry.sources() if not any(said_by(source, text) for text in entry.texts)]
    assert silent == []
    if not re.search(r"CANN|HCCL|driver|loader", entry.fields["From"]):
        nobodys = [text for text in entry.texts if not any(said_by(source, text) for source in entry.sources())]
        assert nobodys == []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (OURS, "npu-gptoss cannot serve that. …"),
        (OURS, "…: expected the … tensors of gpt-oss by config.toml, got …"),
        ("vLLM 0.11.0", "Engine core initialisation failed. See root cause above."),
        ("openai-harmony", "unexpected tokens left in message header"),
    ],
)
def test_a_text_that_nobody_says_would_be_seen(source: str, text: str) -> None:
    assert not said_by(source, text)


def test_templates_have_holes_where_values_go() -> None:
    import ast

    written = ast.parse('f"{a} came " + f"twice: {b!r}" + c', mode="eval").body
    assert tidy(template(written)) == "… came twice: …"
    assert fragments("… came twice: …") == ["came twice:"]
    assert holds(["a", "b"], "xa yb")
    assert not holds(["b", "a"], "xa yb")


# --- facts that the page states of others


def test_an_exclamation_mark_is_what_nan_chooses() -> None:
    pytest.importorskip("bpe_openai")
    logits = torch.full((1, 201_088), float("nan"))
    assert parse_ranks(packaged_vocabulary())[int(logits.argmax(-1))] == b"!"
