"""Verifies targets in several processes. The definition works on one core, and a GPU's kernels wait for it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from npu_gptoss.engine.device import kernels_for
from npu_gptoss.kernels import load_kernels
from npu_gptoss.verify.runner import Report, Target, targets, verify


@contextmanager
def one_thread() -> Iterator[None]:
    """Of torch's inside: the definition's tensors are small, and on a busy machine several threads wait for each other,
    spinning, in each operation: a minute's work of one took two ten minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reports(found: Sequence[Target], device: torch.device, jobs: int, **options: Any) -> Iterator[Report]:
    """In the order of the targets. options: of `verify`."""
    if jobs == 1:
        yield from (verify(target, device, **options) for target in found)
        return
    work = partial(_by_name, device=str(device), **options)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for target, parts in zip(found, pool.map(work, [target.name for target in found]), strict=True):
            yield Report(target, *parts)


def _by_name(name: str, *, device: str, **options: Any) -> tuple[Any, ...]:
    """The parts of a report without its target, which cannot be sent between processes."""
    load_kernels()
    where = torch.device(device)
    with kernels_for(where), torch.inference_mode(), one_thread():
        target = next(each for each in targets(where, name)[0] if each.name == name)
        report = verify(target, where, **options)
    return report.calls, report.mutations, report.reasons, report.notes
