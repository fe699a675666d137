"""What has been counted since the last time, from numbers that count since the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_graft.base.metric import Kind, Metric, Number, Numbers

News = dict[str, Number | dict[str, Number]]
"""Like `Numbers`: increments of counters and histograms, and gauges that have changed."""


class Increments:
    """Remembers a part's numbers, and says what has changed.

    Args:
        rows: the metrics. Numbers that no row names are passed over.
    """

    def __init__(self, rows: Iterable[Metric]) -> None:
        self._kinds = {row.key: row.kind for row in rows}
        self._known: dict[str, dict[str, Number]] = {}

    def take(self, numbers: Numbers) -> News:
        """What has changed since the last call; empty if nothing has.

        A counter that is lower than before has begun anew, in a process that was started again. Its
        whole value is then new.
        """
        news: News = {}
        for key in self._kinds.keys() & numbers.keys():
            found = numbers[key]
            labelled = isinstance(found, Mapping)
            by_label: Mapping[str, Number] = found if isinstance(found, Mapping) else {"": found}
            changed = self._changed(key, by_label)
            if changed:
                news[key] = changed if labelled else changed[""]
        return news

    def _changed(self, key: str, found: Mapping[str, Number]) -> dict[str, Number]:
        known = self._known.setdefault(key, {})
        changed: dict[str, Number] = {}
        for label, value in found.items():
            before = known.get(label, 0)
            if self._kinds[key] is Kind.GAUGE:
                if value != before or label not in known:
                    changed[label] = value
            elif new := value - before if value >= before else value:
                changed[label] = new
            known[label] = value
        return changed
