"""The dashboard and the alert rules: what they read exists, and their form is right."""

import json
import re
import shutil
import subprocess
from itertools import combinations
from typing import Any

import pytest
import yaml

from tests.support.answers import dashboard
from tests.support.answers.dashboard import ALERTS, DASHBOARD, Query, panels, queries, without_data
from vllm_graft.base.metric import Kind
from vllm_graft.metrics.catalogue import catalogue
from vllm_graft.parts import PARTS

OF_VLLM = {"vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:num_requests_waiting"}
"""Metrics of vLLM's own; an engine test looks for them in a server's page."""

SUFFIXES = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
"""Those of the names of samples, by the kind of their metric."""

OURS = {
    row.name + end: {"model_name", "engine", *row.labels, *({"le"} if end == "_bucket" else ())}
    for rows in catalogue(PARTS).values()
    for row in rows
    for end in SUFFIXES.get(row.kind, ("",))
}
"""The labels of our series."""

GRAFANA = {"model_name", "engine"}
"""What the variables of the dashboard select."""


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def rules() -> list[Query]:
    return [Query(rule["alert"], rule["expr"]) for rule in alerts()]


def unknown(query: Query) -> list[str]:
    """Names and labels of a query that the code does not have."""
    found = []
    labels: set[str] = set()
    for selector in query.selectors:
        if selector.name not in OURS and selector.name not in OF_VLLM:
            found.append(selector.name)
        known = OURS.get(selector.name, GRAFANA)
        labels |= known
        found += [label for label, *_ in selector.matchers if label not in known]
    kept = re.findall(r"by \(([^)]*)\)", query.expression)
    found += [label for each in kept for label in each.split(", ") if label not in labels]
    shown = re.findall(r"{{(\w+)}}", query.legend)
    return found + [label for label in shown if kept and label not in ", ".join(kept)]


@pytest.mark.parametrize("query", [*queries(), *rules()], ids=lambda query: query.title)
def test_a_query_reads_what_the_code_has(query: Query) -> None:
    assert query.selectors
    assert unknown(query) == []
    opened = [query.expression.count(each) for each in "({["]
    assert opened == [query.expression.count(each) for each in ")}]"]


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("sum (rate(vllm:graft_tree_tree_total[1m]))", ["vllm:graft_tree_tree_total"]),
        ("vllm:graft_tree_nodes_per_tree", ["vllm:graft_tree_nodes_per_tree"]),
        ('vllm:graft_tree_draft_launches_total{why="x"}', ["why"]),
        ("sum by (kind) (vllm:graft_tree_draft_launches_total)", ["kind"]),
    ],
)
def test_a_query_of_something_else_is_noticed(expression: str, found: list[str]) -> None:
    assert unknown(Query("", expression)) == found


def test_a_page_without_a_series_is_noticed() -> None:
    lines = [
        f'{selector.name}{{model_name="m",engine="0",le="1",state="on",reason="x"}} 1'
        for query in queries()
        for selector in query.selectors
    ]
    parts = ("", "tree", "vit", "draft", "hicache", "learn")
    assert without_data("\n".join(lines), *parts) == []
    gone = "vllm:graft_tree_trees_total"
    missing = without_data("\n".join(line for line in lines if gone not in line), *parts)
    assert "Acceptance length: vllm:graft_tree_trees_total" in missing


def test_every_part_is_on_the_dashboard() -> None:
    names = {selector.name for query in queries() for selector in query.selectors}
    assert {dashboard._part_of(name) for name in names} == {"", *(part.name for part in PARTS)}
    assert names >= OF_VLLM
    assert len(names) > 40


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 36
    assert {"title", "uid", "panels", "templating", "time", "timezone"} <= board.keys()
    every = board["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    variables = [each["name"] for each in board["templating"]["list"]]
    assert variables == ["datasource", "model_name", "engine"]
    for panel in panels():
        assert panel["type"] in {"timeseries", "stat", "table"}
        assert panel["title"]
        assert panel["description"].endswith((".", "num_drafts."))
        assert panel["datasource"]["uid"] == "${datasource}"
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids)
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= {*variables, "__rate_interval"}
            assert {"model_name", "engine"} <= used


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, two in combinations(places, 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        apart = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert beside or apart


def test_alert_rules_say_what_is_wrong() -> None:
    assert len(alerts()) > 4
    for rule in alerts():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Graft[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
        # Labels that a text names are those that the expression keeps.
        kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
        names = {label for each in kept for label in each.split(", ")}
        if not kept:
            names = set.union(*(OURS[each.name] for each in Query("", rule["expr"]).selectors))
        told = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
        assert set(told) <= names, rule["alert"]


def test_prometheus_takes_the_alert_rules() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    checked = subprocess.run([promtool, "check", "rules", str(ALERTS)], capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
