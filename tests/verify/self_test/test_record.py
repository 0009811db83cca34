"""Results are remembered for one CANN, one driver, one torch-npu; a server says which of them was never tested."""

from __future__ import annotations

import json

import pytest

from npu_gptoss.doctor.checks import SELF_TESTS
from npu_gptoss.doctor.findings import failed, not_applicable, ok, warning
from npu_gptoss.doctor.machine import Device
from npu_gptoss.doctor.record import remembered
from npu_gptoss.serving.ascend import start_check
from npu_gptoss.verify.self_test.record import FILE, remember, stack
from tests.doctor.machines import ascend, machine, only, write
from tests.doctor.test_cann import install_toolkit

ALL_RIGHT = [ok("x", check=name) for name in SELF_TESTS]


def installed(root, cann, driver="25.3.rc1"):
    """An Ascend machine with the same home for every CANN."""
    home = install_toolkit(root / cann, cann, "aarch64")
    write(root / "usr/local/Ascend/driver/version.info", f"package_version={driver}\n")
    return ascend(root, ASCEND_HOME_PATH=str(home))


A2, A3 = (Device("npu", name, 8, 64, 64) for name in ("Ascend910B3", "Ascend910_9391"))


@pytest.mark.parametrize("other", ["CANN", "card", "driver", "emulator"])
def test_results_of_one_machine_do_not_count_for_another_of_one_home(other, tmp_path):
    here = installed(tmp_path, "8.3.RC1")
    only(remembered(here, [], [A2]), "warning", "CANN 8.3.RC1 (Ascend910B3, driver 25.3.rc1", "never tested whole")
    only(remembered(here, ALL_RIGHT, [A2]), "ok", "all right (9 self-tests)")
    only(remembered(here, [], [A2]), "ok", "tested whole on 20")
    if other in ("CANN", "driver"):
        here = installed(tmp_path, "8.5.0") if other == "CANN" else installed(tmp_path, "8.3.RC1", driver="25.5.0")
    if other == "emulator":
        here = ascend(tmp_path, ASCEND_EMULATOR="1", **here.environ)
    only(remembered(here, [], [A3 if other == "card" else A2]), "warning", "never tested whole")


def test_wrong_results_are_remembered_by_name(tmp_path):
    here = installed(tmp_path, "8.3.RC1")
    found = [*ALL_RIGHT, failed("x", "y", check="self-test-moe"), warning("x", "y", check="self-test-graph")]
    only(remembered(here, found), "warning", "wrong are self-test-moe;")
    only(remembered(here, []), "warning", "wrong are self-test-moe;")


def test_tests_that_did_not_all_run_are_not_remembered_as_whole(tmp_path):
    here = installed(tmp_path, "8.3.RC1")
    only(remembered(here, ALL_RIGHT[1:]), "warning", "never tested whole")
    only(remembered(here, [*ALL_RIGHT[1:], not_applicable("x", check=SELF_TESTS[0])]), "warning", "never tested whole")


def test_folder_that_cannot_be_written_is_a_warning(tmp_path):
    here = installed(tmp_path, "8.3.RC1")
    write(tmp_path / "home/.cache", "a file in the folder's place")
    only(remembered(here, ALL_RIGHT), "warning", "cannot be written", "XDG_CACHE_HOME")


LISTED = '{"x": {"tests": ["products"], "when": "2026-11-30"}}'


@pytest.mark.parametrize("text", ["", "[]", '{"x": 1}', '{"x": {"strange": 1}}', LISTED, "\x00"])
def test_file_of_another_form_is_replaced(text, tmp_path):
    here = installed(tmp_path, "8.3.RC1")
    write(tmp_path / f"home/.cache/npu_gptoss/{FILE}", text)
    only(remembered(here, [], [A2]), "warning", "never tested whole")
    only(remembered(here, ALL_RIGHT), "ok", "all right")
    assert list(json.loads((tmp_path / f"home/.cache/npu_gptoss/{FILE}").read_text())) == [
        stack("no card", here.environ, here.root)
    ]


def test_a_machine_without_a_card_remembers_nothing(tmp_path):
    only(remembered(machine(tmp_path), ALL_RIGHT), "not applicable")
    assert not (tmp_path / "home").exists()


@pytest.fixture
def server(tmp_path, monkeypatch, caplog):
    """The log of a server on this machine at its start."""
    here = installed(tmp_path, "8.3.RC1")
    for name in ("HOME", "ASCEND_HOME_PATH"):
        monkeypatch.setenv(name, here.environ[name])
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(start_check, "name_of", lambda device: "Ascend910B3")

    def start(**tests):
        if tests:
            remember(stack("Ascend910B3"), tests)
        caplog.clear()
        start_check.tell_what_was_seen(None)
        return caplog.text

    return start


def test_server_warns_of_an_untested_cann_and_is_quiet_when_all_was_right(server):
    assert "CANN 8.3.RC1" in server()
    assert "was never tested whole here" in server()
    assert server(sink="ok") == ""
    assert "found wrong results on 20" in (said := server(sink="failed"))
    assert said.endswith(": sink.\n")
