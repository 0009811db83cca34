"""docs/tuning.md lists the kernels of a GPU that are registered."""

from __future__ import annotations

import re

from npu_gptoss.kernels import load_kernels
from npu_gptoss.kernels.registry import registry
from tests.markdown import ROOT


def test_table_of_kernels_has_every_registered_one() -> None:
    load_kernels()
    registered = {
        name: {
            kernel.name.removeprefix(f"{name}.")
            for kernel in registry.kernels_of(operation)
            if "cuda" in kernel.capability.platforms and kernel.origin == "npu_gptoss"
        }
        for name, operation in registry.operations.items()
        if name.split(".")[0] in ("attention", "dense", "graphs", "moe")
    }
    section = (ROOT / "docs/tuning.md").read_text().partition("### One kernel against another")[2]
    listed: dict[str, set[str]] = {}
    operation = ""
    for first, kernels in re.findall(r"^\| (`[a-z._]+`)? ?\| ((?:`[a-z_]+`(?:, )?)+) \|", section, re.M):
        operation = first.strip("`") or operation
        listed.setdefault(operation, set()).update(re.findall(r"`([a-z_]+)`", kernels))
    assert listed == {name: kernels for name, kernels in registered.items() if kernels}
