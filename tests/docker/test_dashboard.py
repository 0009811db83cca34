"""The dashboard asks for what exists; tests/serving/test_metrics.py compares it with a live server."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
import yaml

pytest.importorskip("promql_parser", reason="promql-parser is missing: make setup")

from tests.docker.dashboard import ROOT, VARIABLES, Query, kept_labels, load, missing, queries, series

SOURCES = ROOT / "docker/grafana/provisioning/datasources/prometheus.yaml"
EXPOSED = {"a_total": {"engine", "mode"}, "b_bucket": {"engine", "le"}}


def test_every_query_is_promql() -> None:
    found = queries()
    assert len(found) > 15
    for query in found:
        assert series(query.expression), query


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}: {query.legend}")
def test_every_legend_names_labels_that_the_query_keeps(query: Query) -> None:
    assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= kept_labels(query.expression)


def test_the_checks_see_what_is_wrong() -> None:
    good = (
        'sum by (mode) (rate(a_total{engine=~".*"}[1m])) / 2'
        " + histogram_quantile(0.5, sum by (le) (rate(b_bucket[1m])))"
    )
    assert missing(good, EXPOSED) == []
    assert missing("rate(c_total[1m])", EXPOSED) == ["there is no c_total"]
    assert missing('a_total{kind="x"}', EXPOSED) == ["a_total has no label kind"]
    assert missing("sum by (le) (a_total)", EXPOSED) == ["a_total has no label le"]
    assert kept_labels("sum(a_total) / sum by (mode) (a_total)") == {"mode"}
    with pytest.raises(ValueError, match="parenthesis"):
        series("sum by mode rate(a_total[1m]")


def test_each_of_our_metrics_has_a_panel() -> None:
    text = (ROOT / "npu_gptoss/serving/metrics.py").read_text()
    found = re.findall(r'(Gauge|Counter)\(\s*"(\w+)"', text)
    ours = {f"{name}{'' if kind == 'Gauge' else '_total'}" for kind, name in found}
    assert len(ours) == 4
    assert ours <= {wanted.metric for query in queries() for wanted in series(query.expression)}


def test_our_metrics_are_explained() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    names = {w.metric for query in queries() for w in series(query.expression) if w.metric.startswith("npu_gptoss_")}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_variables_panels_and_data_source_fit_together() -> None:
    dashboard = load()
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {name for target in queries_raw() for name in re.findall(r"\$\{?(\w+)\}?", target)}
    assert used - {"__rate_interval"} <= defined <= set(VARIABLES)
    (source,) = yaml.safe_load(SOURCES.read_text())["datasources"]
    chosen = next(v for v in dashboard["templating"]["list"] if v["name"] == "datasource")
    assert chosen["current"]["value"] == source["uid"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


def queries_raw() -> list[str]:
    return [target["expr"] for panel in load()["panels"] for target in panel.get("targets", ())]


def test_a_rate_spans_several_scrapes() -> None:
    """Grafana's $__rate_interval is four of the data source's intervals, so that has to be Prometheus's."""
    scrape = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["global"]["scrape_interval"]
    (source,) = yaml.safe_load(SOURCES.read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == scrape
