"""The queries of the Grafana dashboard and of the alerts as PromQL: which series and labels they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "docker/grafana/dashboards/gpt-oss.json").read_text())
RULES = yaml.safe_load((ROOT / "docker/alerts.yml").read_text())["groups"][0]["rules"]
ALERT = "alert "
# what Grafana puts in the place of its variables: everything is chosen
VARIABLES = {"__rate_interval": "1m", "model": ".*", "engine": ".*", "datasource": "prometheus"}


@dataclass(frozen=True)
class Query:
    panel: str
    raw: str
    legend: str

    @property
    def expression(self) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda found: VARIABLES[found[1]], self.raw)


@dataclass(frozen=True)
class Series:
    """A metric that a query names, with the labels that it matches and groups by."""

    metric: str
    labels: frozenset[str]


def queries() -> list[Query]:
    return [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]


def alerts() -> list[Query]:
    """legend: the summary, which names labels as `{{ $labels.instance }}`."""
    return [Query(ALERT + rule["alert"], rule["expr"], rule["annotations"]["summary"]) for rule in RULES]


def children(node: Any) -> Iterator[Any]:
    for name in ("lhs", "rhs", "expr", "args", "param", "vector_selector"):
        value = getattr(node, name, None)
        if value is not None:
            yield from value if isinstance(value, list) else [value]


def grouped(node: Any) -> frozenset[str]:
    """Labels that an aggregation keeps."""
    modifier = getattr(node, "modifier", None)
    return frozenset(modifier.labels) if isinstance(node, promql_parser.AggregateExpr) and modifier else frozenset()


def series(expression: str) -> list[Series]:
    """Raises ValueError when the expression is no PromQL."""

    def walk(node: Any, kept: frozenset[str]) -> Iterator[Series]:
        if isinstance(node, promql_parser.VectorSelector):
            yield Series(node.name, kept | {matcher.name for matcher in node.matchers.matchers})
            return
        for child in children(node):
            yield from walk(child, kept | grouped(node))

    return list(walk(promql_parser.parse(expression), frozenset()))


def kept_labels(expression: str) -> frozenset[str]:
    """Labels of the result, from the outermost aggregations."""

    def walk(node: Any) -> frozenset[str]:
        if isinstance(node, promql_parser.AggregateExpr):
            return grouped(node)
        return frozenset().union(*map(walk, children(node)))

    return walk(promql_parser.parse(expression))


def missing(expression: str, exposed: dict[str, set[str]]) -> list[str]:
    """Series and labels of a query that a server lacks. `exposed`: sample name -> names of its labels."""
    wrong = []
    for wanted in series(expression):
        if wanted.metric not in exposed:
            wrong.append(f"there is no {wanted.metric}")
        elif absent := wanted.labels - exposed[wanted.metric]:
            wrong.append(f"{wanted.metric} has no label {', '.join(sorted(absent))}")
    return wrong
