from __future__ import annotations

import json

import pytest

from npu_gptoss.doctor.checks import GROUPS
from npu_gptoss.doctor.findings import (
    Finding,
    as_json,
    exit_code,
    failed,
    guarded,
    in_words,
    not_applicable,
    ok,
    warning,
)

FINDINGS = [
    ok("Python 3.11.9.", check="python"),
    warning("vLLM is odd.", "Install another.", check="vllm"),
    failed("CANN is old.", "Install a newer one.", details=("why",), check="cann"),
    not_applicable("There is none.", check="driver"),
    ok("small_ops is selected.", subject="moe.route", check="kernels"),
]


def test_the_json_report_keeps_its_fields():
    report = as_json(FINDINGS, "1.2.3", "ascend")
    assert report == json.loads(json.dumps(report)), "not plain JSON"
    assert list(report) == ["schema", "npu_gptoss", "platform", "ok", "counts", "findings"]
    assert (report["schema"], report["ok"]) == (1, False)
    assert report["counts"] == {"ok": 2, "warning": 1, "failed": 1, "not applicable": 1}
    assert report["findings"][2] == {
        "check": "cann",
        "state": "failed",
        "sentence": "CANN is old.",
        "remedy": "Install a newer one.",
        "details": ["why"],
        "subject": "",
    }


def test_only_a_failure_ends_with_one():
    assert exit_code(FINDINGS) == 1
    assert exit_code([finding for finding in FINDINGS if finding.state != "failed"]) == 0
    assert as_json(FINDINGS[:2], "", "cpu")["ok"] is True


def test_the_report_in_words_has_every_sentence_remedy_and_reason():
    text = in_words(FINDINGS, GROUPS)
    flat = " ".join(text.split())
    for finding in FINDINGS:
        assert finding.sentence in flat
        assert finding.remedy in flat
    assert "why" in flat
    assert "kernels moe.route: small_ops" in flat
    assert flat.endswith("2 ok, 1 warning, 1 failure, 1 not applicable Not ready. Repair first: cann.")
    assert max(map(len, text.splitlines())) <= 112


def test_brief_report_has_warnings_failures_and_the_verdict_only():
    text = in_words(FINDINGS, GROUPS, brief=True)
    assert "ok  " not in text
    assert "not applicable  " not in text
    assert ("vLLM is odd." in text, "→ Install a newer one." in text) == (True, True)
    assert text.splitlines()[-2:] == ["2 ok, 1 warning, 1 failure, 1 not applicable", "Not ready. Repair first: cann."]
    well = in_words([FINDINGS[0]], GROUPS, brief=True)
    assert well.splitlines() == ["", "1 ok, 0 warnings, 0 failures, 0 not applicable", "All is well."]
    assert in_words(FINDINGS[:2], GROUPS).endswith("Ready, with warnings: vllm.")


def test_a_trouble_without_a_remedy_cannot_be_reported():
    with pytest.raises(ValueError, match="remedy"):
        Finding("failed", "CANN is old.")
    with pytest.raises(ValueError, match="one of ok, warning, failed, not applicable"):
        Finding("bad", "CANN is old.", "Install a newer one.")


def test_broken_check_is_a_failure_and_keeps_its_findings():
    def check(text):
        yield ok(text)
        raise KeyError("gone")

    first, second = guarded("python", check, "fine")
    assert first == ok("fine", check="python")
    assert (second.state, second.check) == ("failed", "python")
    assert "This check itself broke" in second.sentence
    assert "KeyError" in second.sentence
    assert "a defect of npu-gptoss" in second.remedy
