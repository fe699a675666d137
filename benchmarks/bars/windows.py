"""Comparisons of `benchmarks.bars` and their table: cells, windows of two engines, the bars."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import node_counts
from benchmarks.bars import step_pace
from benchmarks.step_bytes import step_cell
from vllm_graft.base.text_table import markdown
from vllm_graft.bench.common import report
from vllm_graft.bench.common.arm import is_ours

DEFAULT_CELLS = """[
    [0.6, 1, 5, 14], [0.6, 4, 7, 40], [1, 4, 5, 40], [0, 16, 7, 64], [0.6, 16, 7, 64],
    [1, 16, 5, 64], [1, 1, 5, 14], [0, 1, 7, 14], [0, 4, 7, 40], [0, 64, 3, 192],
    [0, 128, 3, 320], [0.6, 64, 3, 192], [0.6, 128, 3, 320], [1, 64, 3, 192], [1, 128, 3, 320]
]"""
"""Temperature, batch, the chain's length, requests; the most important cells come first."""

BARS = {1: (1.12, 1.25), 4: (1.03, 1.15), 16: (1.03, 1.15), 64: (0.99, 0.99), 128: (0.99, 0.99)}
"""The ratio of ours to the chain that is to be reached, by batch: at temperature 0, and above."""

LEVELS_BAR, ROWS_BAR, HOST_BAR = 1.35, 1.06, 1.05
"""Bars 3, 4 and 5, which are upper bounds."""

LEAST_LENGTH, FEW_TOKENS = 1.05, 500
"""Acceptance length below which a draft is broken, and a number of tokens too small to judge it."""


@dataclass(frozen=True)
class Cell:
    """One comparison: stock's chain of `chain` drafts per step against our trees."""

    temperature: float
    batch: int
    chain: int
    requests: int

    @property
    def bar(self) -> float | None:
        """The ratio of ours to the chain that is to be reached; None where no bar was set."""
        return BARS[self.batch][self.temperature > 0] if self.batch in BARS else None


@dataclass(frozen=True)
class Side:
    """One engine's window: tokens per second, acceptance length, microseconds of the host.

    `sent` is a checksum of prompts and seeds; `seconds` is the length of the whole turn; `nodes` is
    what `node_counts` says of `shape: auto`, `pace` what `step_pace.summary` says of any
    engine. `step_ms` is the mean time of a step, `tokens_per_step` what one read of the target's
    weights yields for all requests together, and `bandwidth` the share of the memory's bandwidth
    that a step uses (`StepBytes.use`), None where it is unknown.
    """

    rate: float
    acceptance: float
    sent: int
    host: dict[str, float]
    seconds: float
    nodes: dict[int, dict[str, float]] = field(default_factory=dict)
    pace: dict[str, dict[str, float]] = field(default_factory=dict)
    step_ms: float = 0.0
    tokens_per_step: float = 0.0
    bandwidth: float | None = None


@dataclass(frozen=True)
class Window:
    """One turn of each engine at a cell; `others` are keyed by the names of their arms."""

    cell: Cell
    number: int
    chain: Side
    ours: Side
    ratio: float
    others: Mapping[str, Side] = field(default_factory=dict)

    @property
    def void(self) -> bool:
        """Whether a side had no draft accepted: its draft is broken, so nothing is compared."""
        sides = (self.chain, self.ours)
        many = all(side.rate * side.seconds > FEW_TOKENS for side in sides)
        return many and min(side.acceptance for side in sides) < LEAST_LENGTH

    @property
    def host_ratio(self) -> float | None:
        """Our host time over the chain's; None where a window had fewer than two steps to time."""
        chain, ours = self.chain.host.get("host"), self.ours.host.get("host")
        return ours / chain if ours and chain else None

    def over(self, name: str) -> float:
        """Return our rate over that of one of the others."""
        return self.ours.rate / self.others[name].rate

    @property
    def over_best(self) -> float:
        """Our rate over that of the fastest of stock's engines."""
        stock = [side.rate for name, side in self.others.items() if not is_ours(name)]
        return self.ours.rate / max([self.chain.rate, *stock])

    def __str__(self) -> str:
        """A line for the terminal."""
        cell, hosts = self.cell, (self.chain.host.get("host"), self.ours.host.get("host"))
        host = " / ".join("-" if each is None else f"{each / 1e3:.2f}" for each in hosts)
        return (
            f"t {cell.temperature:g} batch {cell.batch}: chain:{cell.chain} {self.chain.rate:.0f}, "
            f"ours {self.ours.rate:.0f}, {self.ratio:.3f} (bar {_shown(cell.bar)}); length "
            f"{self.chain.acceptance:.2f} / {self.ours.acceptance:.2f}; host {host} ms, "
            f"{_shown(self.host_ratio)}; {self.chain.seconds + self.ours.seconds:.1f} s"
            + "".join(
                f"; {name} {other.rate:.0f} ({other.acceptance:.2f}), {self.over(name):.3f}"
                for name, other in self.others.items()
            )
            + (f"; {nodes}" if (nodes := node_counts.line(self.ours.nodes)) else "")
            + self._paces()
            + ("; VOID: a side's drafts are all rejected" if self.void else "")
        )

    def _paces(self) -> str:
        sides = {"chain": self.chain, "ours": self.ours} | dict(self.others)
        found = {name: step_pace.line(side.pace) for name, side in sides.items()}
        return "".join(f"\n    {name}: {text}" for name, text in found.items() if text)


def _shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def read_cells(text: str, lengths: Sequence[int], max_num_seqs: int) -> list[Cell]:
    """Read cells from a JSON list of [temperature, batch, chain, requests].

    Raises:
        BenchmarkError: the text is something else, or asks for what the engines can't do.
    """
    try:
        cells = [Cell(float(t), int(b), int(k), int(n)) for t, b, k, n in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise report.BenchmarkError(
            f"--cells {text!r}: {error}; give [[temperature, batch, chain, requests], ...]"
        ) from None
    for cell in cells:
        if not 1 <= cell.batch <= min(max_num_seqs, cell.requests) or cell.chain not in lengths:
            raise report.BenchmarkError(
                f"--cells {cell}: its batch must be at most its requests and --max-num-seqs "
                f"{max_num_seqs}, and its chain one of {list(lengths)}, the lengths of --chain"
            )
    return cells


def table(windows: Sequence[Window]) -> str:
    """Lay out the medians of each cell's windows, by batch and temperature, beside the bars.

    Windows that are void are left out.
    """
    others = list(windows[0].others) if windows else []
    several = any(not is_ours(name) for name in others)
    rows = []
    for cell, found in _by_cell(windows):
        ratio = statistics.median(window.ratio for window in found)
        hosts = [window.host_ratio for window in found if window.host_ratio is not None]
        rows.append(
            [
                str(cell.batch),
                f"{cell.temperature:g}",
                str(len(found)),
                *(_median_side([w.chain for w in found], f" (chain of {cell.chain})")),
                *(_median_side([w.ours for w in found])),
                f"{ratio:.3f}",
                _shown(cell.bar),
                "-" if cell.bar is None else "yes" if ratio >= cell.bar else "no",
                _shown(statistics.median(hosts) if hosts else None),
                *(f"{statistics.median(w.over(name) for w in found):.3f}" for name in others),
                *([f"{statistics.median(w.over_best for w in found):.3f}"] if several else []),
            ]
        )
    head = ["batch", "temperature", "windows", "chain: tokens/s", "length", "ours: tokens/s"]
    head += ["length", "ratio", "bar", "met", f"host, bar {HOST_BAR}"]
    head += [f"ours / {name}" for name in others] + ["ours / stock's best"] * several
    return markdown(head, rows)


def step_table(windows: Sequence[Window]) -> str:
    """Lay out medians of each engine: a step's time, tokens per read of the target, bandwidth."""
    names = ["chain", "ours", *(windows[0].others if windows else ())]
    rows = []
    for cell, found in _by_cell(windows):
        row = [str(cell.batch), f"{cell.temperature:g}"]
        for name in names:
            sides = [
                {"chain": window.chain, "ours": window.ours, **window.others}[name]
                for window in found
            ]
            row.append(_step(sides))
        rows.append(row)
    return markdown(["batch", "temperature", *names], rows)


def _by_cell(windows: Sequence[Window]) -> list[tuple[Cell, list[Window]]]:
    """The windows that are not void, by cell, in the order of batch and temperature."""
    cells: dict[Cell, list[Window]] = {}
    for window in windows:
        if not window.void:
            cells.setdefault(window.cell, []).append(window)
    return sorted(cells.items(), key=lambda item: (item[0].batch, item[0].temperature))


def _step(sides: Sequence[Side]) -> str:
    step = statistics.median(side.step_ms for side in sides)
    tokens = statistics.median(side.tokens_per_step for side in sides)
    known = [side.bandwidth for side in sides if side.bandwidth is not None]
    return step_cell(step, tokens, statistics.median(known) if known else None)


def _median_side(sides: Sequence[Side], note: str = "") -> list[str]:
    rate = statistics.median(side.rate for side in sides)
    return [f"{rate:.0f}{note}", f"{statistics.median(side.acceptance for side in sides):.2f}"]


def device_lines(device: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lay out a line each for bars 3 and 4, and their kernels if they were asked for."""
    lines = []
    for bar, limit in (("3", LEVELS_BAR), ("4", ROWS_BAR)):
        found = device.get(bar, {"skipped": "not asked for"})
        if "skipped" in found:
            lines.append(f"bar {bar}: skipped: {found['skipped']}")
            continue
        if bar == "3":
            what = (
                f"{found['passes']} passes of the draft {found['greedy_ms']:.3f} ms (sampled "
                f"{found['sampled_ms']:.3f}), {found['bytes_a_pass'] / 1e6:.0f} MB each at "
                f"{found['copy_gb_per_s']:.0f} GB/s {found['floor_ms']:.3f} ms"
            )
        else:
            what = (
                f"the target over {found['rows']} rows {found['ms']:.3f} ms, over one "
                f"{found['one_row_ms']:.3f} ms, {found['context']} tokens of context"
            )
        met = "met" if found["ratio"] <= limit else "not met"
        lines.append(f"bar {bar}: {what}: {found['ratio']:.3f} (bar {limit}: {met})")
        lines += found["kernels"]
    return lines
