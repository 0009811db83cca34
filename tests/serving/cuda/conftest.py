"""A failure is told as it happens: a run on somebody's GPU may be ended before pytest's own report."""

from __future__ import annotations

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    terminal = item.config.pluginmanager.get_plugin("terminalreporter")
    if report.failed and terminal is not None:
        terminal.write_line(f"\n{item.name}: {str(report.longrepr)[-1500:]}")
    return report
