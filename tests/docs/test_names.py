"""Names in pages exist: environment variables, repairs, files, tests, links, and texts of our programs."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from npu_gptoss import envs
from npu_gptoss.serving.compat import patches
from scripts.docs.docs_site import is_external, links, resolved
from tests.markdown import PAGES, ROOT, name_of, spans
from tests.refusal_list import of_config, of_stack

FOLDERS = "npu_gptoss|emulator|research|scripts|tests|docs|docker|requirements|patches"


@cache
def sources() -> dict[str, str]:
    """Every file of the repository that is no page, by its path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".py", ".sh", ".yaml", ".yml", "Dockerfile", "Makefile")
    files = [name for name in listed if name.endswith(kinds) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in files}


def test_every_variable_and_repair_that_a_page_names_exists() -> None:
    elsewhere = "\n".join(text for name, text in sources().items() if not name.startswith("tests/"))
    known = {f"{envs.KERNEL_OVERRIDE_PREFIX}{operation}" for operation in envs.KERNEL_OPERATIONS} | set(envs.VARIABLES)
    repairs = {patch.name for patch in patches()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"\bNPU_GPTOSS_[A-Z0-9_]*[A-Z0-9]\b(?!_)", text):
            assert name in known or re.search(rf"\b{name}\b", elsewhere), f"{name_of(page)}: {name}"
        assert set(re.findall(r"\bpatch `([\w-]+)`", text)) <= repairs, name_of(page)


def is_missing(span: str, home: Path = ROOT) -> bool:
    """Finds a file, relative to the repository or to `home`, or a test that does not exist."""
    if found := re.fullmatch(rf"((?:{FOLDERS})/[\w./-]+)(?:::(\w+)(?:\[\w+\])?)?", span):
        file, test = found.groups()
        there = [folder / file for folder in (home, ROOT) if (folder / file).exists()]
        return not there or (test is not None and f"def {test}(" not in there[0].read_text())
    if re.fullmatch(r"(test|case)_\w+", span):
        return not any(f"def {span}(" in text for text in sources().values())
    return bool(re.fullmatch(r"test_\w+\.py", span)) and not any(name.endswith(f"/{span}") for name in sources())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_test_and_link_of_a_page_exists(page: Path) -> None:
    assert [span for span in spans(page) if is_missing(span, page.parent)] == []
    local = [target for _, target in links(page.read_text(encoding="utf-8")) if not is_external(target)]
    assert [target for target in local if not (ROOT / resolved(target, name_of(page))[0]).exists()] == []


def joined(text: str) -> str:
    """Joins the pieces of a string that stand below each other; white space and escapes do not count."""
    return re.sub(r"\s+", " ", re.sub(r"""["']\s*\n\s*[rf]*["']""", "", text)).replace('\\"', '"').replace("\\'", "'")


# (title, texts, programs) of each entry
ENTRIES = re.findall(
    r"^### (.+?)\n+```text\n(.*?)^```\n+\* \*\*From:\*\* (.*?)(?=^\*|\Z)",
    (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"),
    re.M | re.S,
)
FOREIGN = re.compile(r"vLLM|vllm-ascend|torch|openai-harmony|CANN|HCCL|driver|loader|nobody")


def test_troubleshooting_quotes_our_programs_as_they_are_written(monkeypatch, tmp_path: Path) -> None:
    """A refusal's sentence stands in no source: it is made of its parts."""
    ours = [texts for _, texts, said in ENTRIES if "npu-gptoss" in said and not FOREIGN.search(said)]
    assert len(ours) >= 5
    written = [joined(text) for name, text in sources().items() if not name.startswith("tests/")]
    written += map(str, (*of_stack(monkeypatch, tmp_path), *of_config()))
    for texts in ours:
        for text in texts.splitlines():
            parts = [part.strip() for part in re.sub(r"^[\w.]*(Error|Exception): ", "", text).split("…")]
            assert any(all(part in source for part in parts) for source in written), text
