"""The dashboard and the alert rules of `docs/dashboards`: their queries, and data for them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graft.metrics.server_info import samples

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "dashboards"
DASHBOARD = FOLDER / "vllm-graft.json"
ALERTS = FOLDER / "alerts.yaml"

_SELECTOR = re.compile(r"(vllm:\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


class Selector(NamedTuple):
    """A metric that a query reads, with the labels that it has to have."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def found_in(self, text: str) -> bool:
        """Whether a page of `/metrics` has a sample of it."""
        return any(
            all(_matches(one.labels.get(m[0], ""), m) for m in self.matchers)
            for one in samples(text, self.name)
            if one.name == self.name
        )


class Query(NamedTuple):
    title: str
    expression: str
    legend: str = ""

    @property
    def selectors(self) -> list[Selector]:
        return [
            Selector(name, tuple(_MATCHER.findall(matchers)))
            for name, matchers in _SELECTOR.findall(self.expression)
        ]


def panels() -> list[dict[str, Any]]:
    """Every panel that is not a heading."""
    board = json.loads(DASHBOARD.read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], target["expr"], target["legendFormat"])


def without_data(text: str, *parts: str) -> list[str]:
    """Titles of the queries on these parts for which a page of `/metrics` has no sample."""
    found = []
    for query in queries():
        for selector in query.selectors:
            if _part_of(selector.name) in parts and not selector.found_in(text):
                found.append(f"{query.title}: {selector.name}")
    return found


def _part_of(name: str) -> str:
    found = re.match(r"vllm:graft_(tree|vit|draft|hicache|learn)_", name)
    return found.group(1) if found else ""


def _matches(value: str, matcher: tuple[str, str, str]) -> bool:
    _, operator, wanted = matcher
    if wanted.startswith("$"):
        return True
    equal = bool(re.fullmatch(wanted, value)) if "~" in operator else value == wanted
    return equal != operator.startswith("!")
