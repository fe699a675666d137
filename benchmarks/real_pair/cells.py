"""Cells of the serving benchmark, what was measured in them, and the table of ours over stock's."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.base.text_table import markdown
from vllm_graft.bench.common.arm import is_ours

TOKENS_PER_SECOND = {1: 600.0, 4: 2000.0, 16: 6000.0, 64: 13000.0}
"""What a wide pair emits on a fast GPU, by requests in flight; it sizes a cell to its seconds."""

TOKENS_PER_ANSWER = 180

SLOWEST = 8
"""Requests whose place is kept to see which ones make the 99th percentile of first tokens."""


@dataclass(frozen=True)
class Cell:
    """A load: so many requests in flight all the time, or so many that come per second.

    Attributes:
        temperature: of all requests.
        batch: requests in flight.
        rate: requests per second (Poisson); 0 where `batch` counts.
        workload: what is asked.
    """

    temperature: float
    batch: int
    rate: float = 0.0
    workload: str = "chat"

    def __str__(self) -> str:
        """What the table says."""
        load = f"{self.rate:g} per second" if self.rate else f"{self.batch} in flight"
        asked = "" if self.workload == "chat" else f"{self.workload}, "
        return f"{asked}temperature {self.temperature:g}, {load}"


@dataclass(frozen=True)
class Measured:
    """One arm's turn at a cell: times in milliseconds, rates per second.

    Attributes:
        tokens: output tokens.
        goodput: requests that met the objectives.
        in_time: share of the requests that met them; a run of before has none. Where it is 1 for
            all arms, goodput tells how soon the last answers ended, and not how many requests per
            second a server can take.
        acceptance: mean acceptance length with the bonus token; 1 without drafts.
        positions: share of drafts accepted, by place in the chain or depth.
        emitted: output tokens in all, and `seconds` that it took.
        slowest: the requests whose first tokens came last, as (place in the order of arrival,
            milliseconds), at most `SLOWEST` of them; a run of before has none.
        engine: what the server counted meanwhile, by the names of `serving.COUNTED`.
    """

    tokens: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tpot_p50: float
    tpot_p99: float
    goodput: float
    acceptance: float
    requests: int
    emitted: int
    seconds: float
    in_time: float = math.nan
    slowest: Sequence[tuple[int, float]] = ()
    engine: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Measured:
        """Read a result of `vllm bench serve`."""
        times = {
            f"{kind}_p{share}": round(found[f"p{share}_{kind}_ms"], 3)
            for kind in ("ttft", "itl", "tpot")
            for share in (50, 99)
        }
        goodput = found.get("request_goodput") or 0.0
        return cls(
            tokens=round(found["output_throughput"], 2),
            goodput=round(goodput, 3),
            in_time=round(goodput * found["duration"] / max(1, found["completed"]), 4),
            acceptance=round(found.get("spec_decode_acceptance_length") or 1.0, 3),
            requests=found["completed"],
            emitted=found["total_output_tokens"],
            seconds=round(found["duration"], 3),
            slowest=_slowest(found.get("ttfts", ())),
            **times,
        )

    def __str__(self) -> str:
        """A line for the terminal."""
        return (
            f"{self.tokens:.0f} tokens/s, length {self.acceptance:.2f}, "
            f"TTFT {self.ttft_p50:.0f} / {self.ttft_p99:.0f} ms, "
            f"ITL {self.itl_p50:.1f} / {self.itl_p99:.1f} ms, goodput {self.goodput:.2f}, "
            f"{self.in_time:.0%} in time"
        )


def _slowest(ttfts: Sequence[float]) -> list[tuple[int, float]]:
    last = sorted(enumerate(ttfts), key=lambda each: -each[1])[:SLOWEST]
    return [(place, round(1000 * seconds, 1)) for place, seconds in last]


def most_requests(cell: Cell, seconds: float) -> int:
    """How many requests a turn of about so many seconds has."""
    if cell.rate:
        return max(4, round(cell.rate * seconds))
    known = min(TOKENS_PER_SECOND, key=lambda batch: abs(batch - cell.batch))
    rate = TOKENS_PER_SECOND[known] * cell.batch / known
    return max(2 * cell.batch, round(rate * seconds / TOKENS_PER_ANSWER), 4)


def ours(name: str) -> bool:
    """Whether an arm is one of vllm-graft."""
    return is_ours(name.rpartition("/")[2])


def medians(turns: Sequence[Measured]) -> Measured:
    """The median of each figure over an arm's turns."""
    figures = [key for key in vars(turns[0]) if key not in ("slowest", "engine")]
    return Measured(
        **{key: statistics.median(getattr(turn, key) for turn in turns) for key in figures}
    )


Found = Mapping[Cell, Mapping[str, Sequence[Measured]]]


def read(file: str) -> dict[Cell, dict[str, list[Measured]]]:
    """Read what a race wrote."""
    with open(file) as stream:
        cells = json.load(stream)["cells"]
    return {
        Cell(**each["cell"]): {
            name: [Measured(**turn) for turn in turns] for name, turns in each["arms"].items()
        }
        for each in cells
    }


@dataclass(frozen=True)
class Contest:
    """Our best arm of a cell against stock's best arm there."""

    cell: Cell
    stock: str
    ours: str
    ratio: float
    stock_measured: Measured
    our_measured: Measured


def contests(runs: Sequence[Found]) -> list[Contest]:
    """Find the strongest opponent of each cell.

    Each run was measured on one GPU, and only arms of one run are compared. Where runs had other
    opponents, the one that our arm did worst against counts.
    """
    found: dict[Cell, Contest] = {}
    for run in runs:
        for cell, arms in run.items():
            middle = {name: medians(turns) for name, turns in arms.items()}
            mine = [name for name in middle if ours(name)]
            theirs = [name for name in middle if not ours(name)]
            if not mine or not theirs:
                continue
            best, stock = (
                max(names, key=lambda name: middle[name].tokens) for names in (mine, theirs)
            )
            ratio = middle[best].tokens / middle[stock].tokens
            if cell not in found or ratio < found[cell].ratio:
                found[cell] = Contest(cell, stock, best, ratio, middle[stock], middle[best])
    return sorted(
        found.values(),
        key=lambda each: (
            each.cell.workload,
            each.cell.temperature,
            each.cell.rate,
            each.cell.batch,
        ),
    )


def headline(runs: Sequence[Found]) -> str:
    """Lay out ours over stock's best arm, cell by cell, with the times that users feel."""
    rows = [
        [
            str(each.cell),
            each.stock,
            f"{each.stock_measured.tokens:.0f}",
            each.ours,
            f"{each.our_measured.tokens:.0f}",
            f"{each.ratio:.2f}",
            *(_pair(each, key) for key in ("acceptance",)),
            *(_pair(each, key) for key in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")),
            _pair(each, "goodput"),
            f"{each.stock_measured.in_time:.0%} / {each.our_measured.in_time:.0%}",
        ]
        for each in contests(runs)
    ]
    head = ["load", "stock's best", "tokens/s", "ours", "tokens/s", "ratio", "length"]
    head += ["TTFT p50, ms", "TTFT p99", "ITL p50", "ITL p99", "goodput, requests/s", "in time"]
    return markdown(head, rows)


def _pair(contest: Contest, key: str) -> str:
    digits = 2 if key in ("acceptance", "goodput") else 1
    values = (getattr(each, key) for each in (contest.stock_measured, contest.our_measured))
    return " / ".join(f"{value:.{digits}f}" for value in values)


def every_arm(run: Found) -> str:
    """Lay out the tokens per second of all arms of one run, acceptance lengths in brackets."""
    names = list(dict.fromkeys(name for arms in run.values() for name in arms))
    rows = []
    for cell, arms in run.items():
        middle = {name: medians(turns) for name, turns in arms.items()}
        shown = [
            f"{middle[name].tokens:.0f} ({middle[name].acceptance:.2f})" if name in middle else "-"
            for name in names
        ]
        rows.append([str(cell), *shown])
    return markdown(["load", *names], rows)


PAUSE, FIRST_TOKEN = 25.0, 1000.0
"""Objectives in milliseconds: the 99th percentile between tokens, and that of first tokens."""


def sustained(run: Found) -> str:
    """Lay out the greatest rate of requests at which each arm meets both objectives.

    The rates of a run rise, and an arm sustains a rate if it meets the objectives there and at all
    lower ones. In brackets are both percentiles at that rate and at the next one. The ratio is that
    of our best arm over stock's.
    """
    names = list(dict.fromkeys(name for arms in run.values() for name in arms))
    loads = sorted({(cell.workload, cell.temperature) for cell in run if cell.rate})
    rows = []
    for workload, temperature in loads:
        by_rate = {
            cell.rate: arms
            for cell, arms in run.items()
            if cell.rate and (cell.workload, cell.temperature) == (workload, temperature)
        }
        kept = {name: _kept(name, sorted(by_rate), by_rate) for name in names}
        mine = max((kept[name][0] for name in names if ours(name)), default=0.0)
        theirs = max((kept[name][0] for name in names if not ours(name)), default=0.0)
        ratio = f"{mine / theirs:.2f}" if theirs else "-"
        load = f"{workload}, temperature {temperature:g}"
        rows.append([load, *(kept[name][1] for name in names), ratio])
    return markdown(["load", *names, "ratio"], rows)


def _kept(
    name: str, rates: Sequence[float], by_rate: Mapping[float, Mapping[str, Sequence[Measured]]]
) -> tuple[float, str]:
    """The greatest rate that an arm sustains, 0 for none, and what the table says of it."""
    most, seen = 0.0, []
    for rate in rates:
        if name not in by_rate[rate]:
            break
        found = medians(by_rate[rate][name])
        seen.append(f"{rate:g}: {found.itl_p99:.1f}, {found.ttft_p99:.0f}")
        if not (found.itl_p99 < PAUSE and found.ttft_p99 < FIRST_TOKEN):
            break
        most = rate
    return most, f"{most:g} ({'; '.join(seen[-2:])})"
