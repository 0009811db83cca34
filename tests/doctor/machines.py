"""Made-up machines: a folder for a root, a dictionary for the installed packages, and fake entry points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

from npu_gptoss.doctor.findings import Finding, Found, Words
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.serving.platform import GROUP as PLATFORMS

GENERAL = "vllm.general_plugins"

# name, value and package of what is installed on a well set-up Ascend machine, in vLLM's order
ASCEND_PLUGINS = {
    GENERAL: (
        ("ascend_enhanced_model", "vllm_ascend:register_model", "vllm-ascend"),
        ("npu_gptoss", "npu_gptoss.plugin:register", "npu-gptoss"),
    ),
    PLATFORMS: (
        ("ascend", "vllm_ascend:register", "vllm-ascend"),
        ("npu_gptoss_cpu", "npu_gptoss.serving.platform:cpu_platform", "npu-gptoss"),
    ),
}
CPU_PLUGINS = {GENERAL: ASCEND_PLUGINS[GENERAL][1:], PLATFORMS: ASCEND_PLUGINS[PLATFORMS][1:]}

ASCEND_PACKAGES = {
    "torch": "2.7.1+cpu",
    "torch-npu": "2.7.1",
    "vllm": "0.11.0+empty",
    "vllm-ascend": "0.11.0",
    "openai-harmony": "0.0.4",
}
ASCEND_9_1_PACKAGES = {
    "torch": "2.10.0+cpu",
    "torch-npu": "2.10.0.post4",
    "vllm": "0.23.0+empty",
    "vllm-ascend": "0.23.0",
    "triton-ascend": "3.2.0",
    "fastapi": "0.123.10",
}
CPU_PACKAGES = {"torch": "2.8.0", "vllm": "0.11.0+empty", "openai-harmony": "0.0.4"}

Plugins = Mapping[str, Iterable[tuple[str, str, str]]]


def machine(
    root: Path,
    packages: Mapping[str, str] = CPU_PACKAGES,
    plugins: Plugins = CPU_PLUGINS,
    python: tuple[int, int, int] = (3, 11, 9),
    folders: Mapping[str, Path] = MappingProxyType({}),
    **environ: str,
) -> Machine:
    return Machine(
        root=root,
        environ={"HOME": str(root / "home"), **environ},
        python=python,
        version=dict(packages).get,
        package=folders.get,
        entry_points=lambda group: [
            SimpleNamespace(name=name, value=value, group=group, dist=SimpleNamespace(name=package))
            for name, value, package in plugins.get(group, ())
        ],
    )


def ascend(root: Path, packages: Mapping[str, str] = ASCEND_PACKAGES, **more: object) -> Machine:
    return machine(root, packages, **{"plugins": ASCEND_PLUGINS, **more})


def gpu(root: Path, packages: Mapping[str, str] = CPU_PACKAGES, **more: object) -> Machine:
    write(root / "dev/nvidia0")
    return machine(root, packages, **more)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def only(found: Found, state: str, *phrases: str) -> Finding:
    """The one finding, in this state; each phrase stands in its sentence or its remedy."""
    (finding,) = [found] if isinstance(found, Finding) else found
    assert finding.state == state, finding
    for phrase in phrases:
        assert phrase in f"{finding.sentence} {finding.remedy}", finding
    return finding


def in_words(findings: Iterable[Finding], groups: Mapping[str, Sequence[str]], brief: bool = False) -> str:
    """The whole report for people, of findings in the order of the groups."""
    lines: list[str] = []
    words = Words(groups, brief, lines.append)
    for finding in findings:
        words.add(finding)
    words.end()
    return "\n".join(lines)
