"""The kernel that each operation selects for a gpt-oss call on this machine, and the reasons against the others."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Iterator
from typing import TYPE_CHECKING

from npu_gptoss.doctor.findings import Finding, failed, ok, warning

if TYPE_CHECKING:
    from npu_gptoss.kernels.selection import Explanation


def kernels(platform: str) -> Iterator[Finding]:
    """One finding for each operation. Needs torch. platform: the one that this machine serves on."""
    from npu_gptoss.kernels import current_platform, explain, load_kernels
    from npu_gptoss.kernels.command import example
    from npu_gptoss.kernels.registry import Priority, registry

    complaints = logging.handlers.BufferingHandler(10**6)  # warnings of loading third-party kernels
    complaints.setLevel(logging.WARNING)
    logger = logging.getLogger("npu_gptoss.kernels")
    logger.addHandler(complaints)
    try:
        load_kernels()
    finally:
        logger.removeHandler(complaints)
    for record in complaints.buffer:
        yield warning(record.getMessage(), "Repair or uninstall that package, or set NPU_GPTOSS_DISABLE_PLUGINS=1.")
    for name, operation in sorted(registry.operations.items()):
        found = explain(operation, *example(operation))
        # of one band: a portable kernel is no loss, and one for some shapes only is none for the others
        made_for = [
            c.kernel
            for c in found.candidates
            if platform in c.kernel.capability.platforms
            and Priority.PERFORMANT <= c.kernel.priority < Priority.SPECIALISED
        ]
        more = {"subject": name, "details": tuple(_lines(found))}
        by = f", by the override {found.override!r}" if found.override else ""
        remedy = "Repair the causes in the lines above; `npu-gptoss kernels explain` shows it again."
        if by:
            remedy = f"Unset NPU_GPTOSS_KERNEL_{name.replace('.', '_').upper()}."
        if found.selected is None:
            yield failed(f"No kernel can run{by}.", remedy, **more)
        elif made_for and found.selected.priority < min(kernel.priority for kernel in made_for):
            better = f"{made_for[0].name}, which is made for this machine"
            here = f"kernels are selected for {current_platform().kind}"
            yield warning(f"{found.selected.name} is selected{by} and not {better} ({here}).", remedy, **more)
        elif found.selected.priority == Priority.REFERENCE:
            yield warning(f"{found.selected.name} is selected{by}, the definition: right, and slow.", remedy, **more)
        else:
            yield ok(f"{found.selected.name} is selected{by}.", **more)


def _lines(found: Explanation) -> Iterator[str]:
    """The kernels for this platform that are not selected, with the reasons, and how many are for other platforms."""
    elsewhere = 0
    for candidate in found.candidates:
        if any(reason.startswith("runs on ") for reason in candidate.reasons):
            elsewhere += 1
        elif candidate.kernel is not found.selected:
            yield f"{candidate.kernel.name}: {'; '.join(candidate.reasons) or 'could run, is not selected'}"
    if elsewhere:
        yield f"for other platforms: {elsewhere} (`npu-gptoss kernels explain {found.operation.name}`)"
