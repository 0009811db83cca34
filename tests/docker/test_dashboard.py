"""The dashboard's and the alerts' queries; tests/serving/test_openai_api.py compares them with a live server."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
import yaml

pytest.importorskip("promql_parser", reason="promql-parser is missing: make setup")

from tests.docker.dashboard import DASHBOARD, ROOT, RULES, VARIABLES, Query, alerts, kept_labels, queries, series

(SOURCE,) = yaml.safe_load((ROOT / "docker/grafana/provisioning/datasources/prometheus.yaml").read_text())[
    "datasources"
]


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}: {query.legend}")
def test_every_query_is_promql_and_its_legend_names_labels_that_it_keeps(query: Query) -> None:
    assert series(query.expression)
    assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= kept_labels(query.expression)


def test_an_alert_is_incomplete_or_the_page_does_not_explain_it() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    for rule, query in zip(RULES, alerts(), strict=True):
        assert series(query.expression)
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert f"| `{rule['alert']}` |" in page
        if kept := kept_labels(query.expression):
            assert set(re.findall(r"\$labels\.(\w+)", query.legend)) <= kept
    assert yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]
    mounts = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    assert "./alerts.yml:/etc/prometheus/alerts.yml:ro" in mounts


def test_a_value_that_alarms_is_not_marked_on_its_panel() -> None:
    defaults = {panel["title"]: panel.get("fieldConfig", {}).get("defaults", {}) for panel in DASHBOARD["panels"]}
    marked = {title for title, values in defaults.items() if len(values.get("thresholds", {}).get("steps", ())) > 1}
    assert {"KV cache in use", "Refused and failed requests per minute", "Padded tokens"} <= marked


def test_each_of_our_metrics_has_a_panel_and_an_explanation() -> None:
    found = re.findall(r'(Gauge|Counter)\(\s*"(\w+)"', (ROOT / "npu_gptoss/serving/metrics.py").read_text())
    ours = {f"{name}{'' if kind == 'Gauge' else '_total'}" for kind, name in found}
    assert len(ours) == 5
    shown = {wanted.metric for query in queries() for wanted in series(query.expression)}
    assert ours <= shown
    page = (ROOT / "docs/monitoring.md").read_text()
    assert [name for name in sorted(shown) if name.startswith("npu_gptoss_") and f"`{name}`" not in page] == []


def test_variables_panels_and_data_source_fit_together() -> None:
    defined = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    used = {name for query in queries() for name in re.findall(r"\$\{?(\w+)\}?", query.raw)}
    assert used - {"__rate_interval"} <= set(defined) <= set(VARIABLES)
    assert defined["datasource"]["current"]["value"] == SOURCE["uid"]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


def test_a_rate_spans_several_scrapes() -> None:
    """Grafana's $__rate_interval is four of the data source's intervals, so that has to be Prometheus's."""
    scrape = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert SOURCE["jsonData"]["timeInterval"] == scrape
