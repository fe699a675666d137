"""Samples of a Prometheus page, read without the client library, which comes with vLLM only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


class Sample(NamedTuple):
    """One sample: a name, labels, and a value."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The samples of a page in Prometheus' text format. Lines of another form are passed over."""
    for line in text.splitlines():
        found = None if line.startswith("#") else _LINE.match(line)
        if found is not None:
            name, labels, value = found.groups()
            yield Sample(name, dict(_labels(labels or "")), float(value))


def total(text: str, name: str, **labels: str) -> float:
    """The sum of all samples of a name that have these labels; 0 if there is none."""
    return sum(
        sample.value
        for sample in samples(text)
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, re.sub(r"\\[\\\"n]", lambda found: _ESCAPED[found.group()], value)
