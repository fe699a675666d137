"""Samples of a page in Prometheus' text format, read by the parser that vLLM brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.samples import Sample


def samples(text: str, prefix: str | tuple[str, ...] = "") -> Iterator[Sample]:
    """The samples of a page whose names begin with a prefix, or with one of several.

    Raises:
        ImportError: where vLLM is not installed.
        Exception: ValueError and others, if a line with this prefix has another form.
    """
    from prometheus_client import parser

    # Python's own splitlines() would also split labels.
    ours = "\n".join(line for line in text.split("\n") if line.startswith(prefix))
    for family in parser.text_string_to_metric_families(ours):
        yield from family.samples


def total(text: str, name: str, **labels: str) -> float:
    """The sum of all samples of a name that have these labels; 0 if there is none."""
    return sum(
        sample.value
        for sample in samples(text, name)
        if sample.name == name and labels.items() <= sample.labels.items()
    )
