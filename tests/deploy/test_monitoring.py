"""Alerts and dashboard: about metrics that there are, each alert with an entry in the runbook."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.rendered import changed, find, of_kind, workloads
from tests.docs.markdown import DOCS, anchors, sections
from tokentape_contracts.errors import BY_CODE

RUNBOOK = DOCS / "guides" / "runbook.md"
RUNBOOK_URL = "https://git.example/tokentape/docs/guides/runbook.md"
"""What the overlay prod says of it."""
RULES: list[dict[str, Any]] = [
    rule for group in find("prod", "PrometheusRule", "tokentape")["spec"]["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES}
DASHBOARD = json.loads(find("prod", "ConfigMap", "tokentape-dashboard")["data"]["tokentape.json"])
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
TARGET_LABELS = {"namespace", "pod"}
"""What Prometheus adds to every series of a PodMonitor, and expressions here use."""
_REGEX = (promql.MatchOp.Re, promql.MatchOp.NotRe)
"""Of alternatives only: no expression here needs more."""


@dataclass(frozen=True)
class Series:
    """One series of `/metrics`."""

    name: str
    labels: dict[str, str]


@pytest.fixture
async def series(api: httpx.AsyncClient, assembler: httpx.AsyncClient) -> list[Series]:
    """Those of an API process and a worker process that have just started."""
    return [
        Series(sample.name, sample.labels)
        for client in (api, assembler)
        for family in text_string_to_metric_families((await client.get("/metrics")).text)
        for sample in family.samples
    ]


def complaints(expression: str, series: list[Series]) -> list[str]:
    """What an expression asks for that no process has: a metric, a label, a label's value.

    All series are there from the start, at 0: what a process does not tell now it never will.
    """
    found: list[str] = []
    names: set[str] = set()
    grouped: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            names.add(node.name)
            found.extend(_unmet(node, series))
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)

    promql.walk(promql.parse(expression), visit)
    labels = {label for each in series if each.name in names for label in each.labels}
    found += [f"no label {label}" for label in sorted(grouped - labels - TARGET_LABELS)]
    return found if names else ["no metric"]


def _unmet(selector: Any, series: list[Series]) -> list[str]:
    """Every value that a selector names must be one that the metric's label has."""
    mine = [each for each in series if each.name == selector.name]
    if not mine:
        return [f"no metric {selector.name}"]
    return [
        f"no {selector.name} with {matcher.name}={value}"
        for matcher in selector.matchers.matchers
        if matcher.name not in TARGET_LABELS
        for value in (matcher.value.split("|") if matcher.op in _REGEX else [matcher.value])
        if value not in {each.labels.get(matcher.name) for each in mine}
    ]


def test_what_is_not_there_is_noticed(series: list[Series]) -> None:
    """The check tells a metric, a label or a value that no process has."""
    expected = {
        "tokentape_turns_lost_total > 0": [],
        'sum by (namespace, code) (rate(tokentape_api_errors_total{code="store_unavailable"}[5m]))': [],
        'sum(tokentape_turns_roots_total{reason!="first"})': [],
        "tokentape_turns_lost": ["no metric tokentape_turns_lost"],
        "sum by (root) (tokentape_api_errors_total)": ["no label root"],
        'tokentape_api_errors_total{code=~"internal_error|on_fire"} > 0': [
            "no tokentape_api_errors_total with code=on_fire"
        ],
        'tokentape_turns_lost_total{kind=""}': ["no tokentape_turns_lost_total with kind="],
        "vector(1)": ["no metric"],
    }
    assert {expression: complaints(expression, series) for expression in expected} == expected


def test_alerts(series: list[Series]) -> None:
    """Each is about something that the processes tell, and names no label that its value lacks."""
    assert {name: found for name, rule in ALERTS.items() if (found := complaints(rule["expr"], series))} == {}
    for name, rule in ALERTS.items():
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert all(used <= group for group in _groups(rule["expr"])), name


def test_panels(series: list[Series]) -> None:
    """Each shows something that the processes tell, of the chosen namespace, under labels that it has."""
    for title, panel in PANELS.items():
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$namespace", "tokentape")
            assert complaints(expression, series) == [], title
            assert 'namespace="tokentape"' in expression, title
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert legend <= TARGET_LABELS.union(*_groups(expression)), title


def _groups(expression: str) -> list[set[str]]:
    """The labels of each `by`."""
    return [set(group.split(", ")) for group in re.findall(r"by \(([\w, ]+)\)", expression)]


def test_the_dashboard_is_one() -> None:
    """Panels have their own ids and places; the sidecar finds the ConfigMap by its label."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len(PANELS)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    assert find("prod", "ConfigMap", "tokentape-dashboard")["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_alerts_and_runbook() -> None:
    """Each alert has an entry in the runbook, each entry an alert; `runbook_url` leads there."""
    entries = {name: text for name, text in sections(RUNBOOK).items() if name.startswith("Tokentape")}
    assert sorted(entries) == sorted(ALERTS)
    assert len(ALERTS) == len(RULES)
    for name, rule in ALERTS.items():
        page, _, fragment = rule["annotations"]["runbook_url"].partition("#")
        assert page == RUNBOOK_URL
        assert fragment == name.lower()
        assert fragment in anchors(RUNBOOK)
        assert {"**Means.**", "**Look.**", "**Do.**"} <= set(re.findall(r"\*\*\w+\.\*\*", entries[name])), (
            name
        )


def test_the_runbook_is_named_in_one_place(tmp_path: Path) -> None:
    """An overlay that says where it is moves the link of every alert."""
    mine = changed("prod", tmp_path, lambda text: text.replace(RUNBOOK_URL, "https://wiki.example/Alerts"))
    (found,) = (manifest for manifest in mine if manifest["kind"] == "PrometheusRule")
    urls = [
        rule["annotations"]["runbook_url"] for group in found["spec"]["groups"] for rule in group["rules"]
    ]
    assert urls == [f"https://wiki.example/Alerts#{rule['alert'].lower()}" for rule in RULES]


def test_the_runbook_names_what_there_is(series: list[Series]) -> None:
    """Metrics in the runbook exist, and so do error codes that stand alone in backticks behind "code"."""
    text = RUNBOOK.read_text()
    names = {each.name for each in series}
    stems = names | {name.removesuffix("_bucket") for name in names}
    assert [name for name in re.findall(r"tokentape_\w+", text) if name not in stems] == []
    codes = re.findall(r"code `(\w+)`", text)
    assert codes
    assert [code for code in codes if code not in BY_CODE] == []


async def test_every_pod_is_scraped(api: httpx.AsyncClient, assembler: httpx.AsyncClient) -> None:
    """A monitor for each, at a port and path where its metrics are."""
    monitors = of_kind("prod", "PodMonitor")
    assert len(monitors) == 2
    for monitor in monitors:
        labels = monitor["spec"]["selector"]["matchLabels"]
        (pods,) = (w for w in workloads() if w.overlay == "prod" and labels.items() <= w.labels.items())
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {port["name"] for port in pods.container["ports"]}
        reply = await (api if pods.command == "api" else assembler).get(endpoint["path"])
        assert "tokentape_build_info" in reply.text
