from __future__ import annotations

import json

from npu_gptoss.doctor.checks import GROUPS
from npu_gptoss.doctor.findings import as_json, failed, not_applicable, ok, warning
from tests.doctor.machines import in_words

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
    assert as_json(FINDINGS[:2], "", "cpu")["ok"], "a warning is no failure"
    assert report["counts"] == {"ok": 2, "warning": 1, "failed": 1, "not applicable": 1}
    assert report["findings"][2] == {
        "check": "cann",
        "state": "failed",
        "sentence": "CANN is old.",
        "remedy": "Install a newer one.",
        "details": ["why"],
        "subject": "",
    }


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
