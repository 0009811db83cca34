"""docs/troubleshooting.md quotes what programs say: each text stands in the source of whoever says it."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import pytest

from emulator.tests.machine import venv
from tests.markdown import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
# (title, texts, who says them) of each entry
ENTRIES = re.findall(r"^### (.+?)\n+```text\n(.*?)^```\n+\*From:\* (.*?)(?=^\*|\Z)", PAGE, re.M | re.S)
OURS = "npu-gptoss"
# sentences that are put together from parts, by functions
COMPOSED = re.compile(r"Files are damaged|config\.json is not gpt-oss's|The tokenizer or generation_config")

ELSEWHERE = re.compile(r"CANN|HCCL|driver|loader|nobody")  # no source of theirs is here


def normal(text: str) -> str:
    """Pieces of a text that stand below each other put together; white space and escapes do not count."""
    return re.sub(r"\s+", " ", re.sub(r"""["']\s*\n\s*[rf]*["']""", "", text)).replace('\\"', '"').replace("\\'", "'")


@functools.cache
def site_packages(emulated: bool) -> Path:
    if emulated:
        (found,) = venv().glob("lib/python*/site-packages")
        return found
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parent.parent


@functools.cache
def sources_of(name: str) -> tuple[str, ...]:
    """The text of each source file of a package; of a compiled one, its bytes."""
    if name == OURS:
        folders = [path for path in (ROOT / "npu_gptoss", ROOT / "emulator", ROOT / "scripts") if path.exists()]
        files = [file for folder in folders for file in folder.rglob("*.py")]
    else:
        pattern, emulated = PACKAGES[name]
        files = list(site_packages(emulated).glob(pattern))
    assert files, name
    return tuple(normal(file.read_bytes().decode("utf-8", errors="ignore")) for file in files)


PACKAGES = {
    "vLLM 0.11.0": ("vllm/**/*.py", False),
    "vllm-ascend 0.11.0": ("vllm_ascend/**/*.py", True),
    "torch-npu 2.7.1": ("torch_npu/lib/libtorch_npu.so", True),
    "openai-harmony": ("openai_harmony/*.so", False),
    "torch (": ("torch/__init__.py", False),
}


def said_by(source: str, text: str) -> bool:
    """Whether one file has all that stands between the holes (`…`) of a text."""
    plain = re.sub(r"^[\w.]*(Error|Exception): ", "", text)  # the class is Python's
    parts = [part for part in map(str.strip, plain.split("…")) if part]
    return any(all(part in written for part in parts) for written in sources_of(source))


def whose(told: str) -> list[str]:
    return [name for name in (*PACKAGES, OURS) if name in told]


def test_the_page_has_entries() -> None:
    assert len(ENTRIES) == PAGE.count("\n### ") > 20


@pytest.mark.parametrize(
    ("title", "texts", "told"),
    [
        pytest.param(*entry, id=entry[0], marks=[pytest.mark.emulated] if re.search("ascend|npu 2", entry[2]) else [])
        for entry in ENTRIES
    ],
)
def test_each_text_stands_in_the_source_of_whoever_says_it(title: str, texts: str, told: str) -> None:
    sources = whose(told)
    if not ELSEWHERE.search(told) and not COMPOSED.match(title):
        assert [source for source in sources if not any(said_by(source, text) for text in texts.splitlines())] == []
        assert [text for text in texts.splitlines() if not any(said_by(source, text) for source in sources)] == []


@pytest.mark.parametrize(
    ("source", "text"), [(OURS, "npu-gptoss cannot serve " + "that. …"), ("vLLM 0.11.0", "core initialisation failed.")]
)
def test_a_text_that_nobody_says_is_found(source: str, text: str) -> None:
    assert not said_by(source, text)
