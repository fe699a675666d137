"""Trees and stock's chains of the same drafter, which take turns on one GPU."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.bench.common.closed_loop import Ask, Call, Case, Measured, fix_drafts, hold_nodes
from vllm_graft.bench.common.engine_arms import Arm, draft_folder, is_ours, read_arm
from vllm_graft.bench.common.timing import Deadline
from vllm_graft.bench.trees import arm_processes
from vllm_graft.bench.trees.command import read_prompts
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.tuning.shapes import auto_schedule

BARS = {1: 1.15, 4: 1.08, 16: 1.03, 64: 0.99}
"""Ours over stock's best chain, by batch."""

REQUESTS = {1: 5, 4: 14, 16: 44, 64: 152}
"""Requests of a turn, by batch; four batches for others."""

LENGTHS = {"mtp": [1, 2, 3], "dspark": [7]}
STEPS = {"mtp": 4, "dspark": 7}
"""Depth of trees: an MTP module is trained for the first one, and a block has so many."""

WARM_UP_TOKENS = 24

Columns = dict[str, tuple[Any, int | None]]
"""A connection to an engine, and how many drafts it is told, by the name of a column."""


@dataclass
class Cell:
    """A temperature and a batch, and what each column measured there, round by round."""

    temperature: float
    batch: int
    found: dict[str, list[Measured | None]] = field(default_factory=dict)
    took: float = 0.0

    def case(self, number: int, tokens: int) -> Case:
        """The load of a round; each has other prompts and seeds."""
        requests = REQUESTS.get(self.batch, 4 * self.batch)
        return Case(self.temperature, self.batch, requests, tokens, first=number * requests)

    def rates(self, column: str) -> list[float]:
        """Tokens per second of a column, in the rounds that it took part in."""
        return [measured.rate for measured in self.found[column] if measured]

    def best(self) -> str | None:
        """Stock's column with the highest median."""
        stock = [name for name in self.found if not is_ours(name)]
        return max(stock, key=lambda name: statistics.median(self.rates(name)), default=None)

    def kept(self, columns: Sequence[str], keep: float) -> list[str]:
        """Columns that take part in a further round: ours, and stock's that may be the best."""
        best = self.best()
        if best is None:
            return list(columns)
        least = keep * statistics.median(self.rates(best))
        return [
            name
            for name in columns
            if is_ours(name) or statistics.median(self.rates(name)) >= least
        ]

    def ours(self) -> list[str]:
        """Our columns."""
        return [name for name in self.found if is_ours(name)]

    def ratios(self, ours: str | None = None) -> list[float]:
        """One of ours over the fastest of stock's columns in each round, whose prompts are its own.

        Args:
            ours: the column; None for the first one.
        """
        if ours is None:
            if not self.ours():
                return []
            ours = self.ours()[0]
        stock = [found for name, found in self.found.items() if not is_ours(name)]
        ratios = []
        for mine, *others in zip(self.found[ours], *stock, strict=True):
            rates = [measured.rate for measured in others if measured]
            if mine and rates:
                ratios.append(mine.rate / max(rates))
        return ratios


class Race:
    """Engines that take turns, and what they have shown so far.

    Args:
        columns: who takes part.
        cells: in the order in which they are measured in each round.
        keep: see `Cell.kept`.
        tokens: tokens of an answer.
        file: written anew after each cell; None for nowhere.
        settings: noted in the file.
        held: the number of nodes that is kept for a column whose engine has others, too; None where
            the engine chooses.
    """

    def __init__(
        self,
        columns: Columns,
        cells: list[Cell],
        *,
        keep: float,
        tokens: int,
        file: str | None,
        settings: Mapping[str, str],
        held: Mapping[str, int | None] | None = None,
    ) -> None:
        self.columns, self.cells, self.keep = columns, cells, keep
        self.held = dict(held or {})
        self.tokens, self.file, self.settings = tokens, file, dict(settings)

    def run(self, rounds: int, deadline: Deadline) -> None:
        """Go round the cells, and leave out what would not end in time."""
        self._warm_up()
        for number in range(rounds):
            for cell in self.cells:
                if deadline.left > cell.took:
                    self._measure(cell, number)
                    self.write()

    def _warm_up(self) -> None:
        """Have all engines compile their kernels, for each batch, greedy or not."""
        for cell in {(cell.batch, cell.temperature > 0): cell for cell in self.cells}.values():
            requests = cell.batch + max(1, cell.batch // 2)
            short = cell.case(0, min(WARM_UP_TOKENS, self.tokens))
            for name, (pipe, drafts) in self.columns.items():
                self._hold(name)
                if drafts is not None:
                    _ask(pipe, Call(fix_drafts, (drafts,)))
                # Requests may end before the last one decodes, which a measurement would not allow.
                _ask(pipe, Ask(replace(short, requests=requests), margins=False))

    def _measure(self, cell: Cell, number: int) -> None:
        began, case = time.perf_counter(), cell.case(number, self.tokens)
        names = cell.kept(list(self.columns), self.keep)
        for name in names if number % 2 == 0 else reversed(names):
            found = cell.found.setdefault(name, [])
            found += [None] * (number - len(found))
            pipe, drafts = self.columns[name]
            self._hold(name)
            found.append(_ask(pipe, replace(case, drafts=drafts)))
        for found in cell.found.values():
            found += [None] * (number + 1 - len(found))
        cell.took = time.perf_counter() - began
        line = ", ".join(
            f"{name} {measured.rate:.0f} ({measured.acceptance:.2f} of {measured.drafted:.1f} "
            f"nodes in {1e3 * measured.step:.2f} ms)"
            for name, found in cell.found.items()
            if (measured := found[number])
        )
        compared = [cell.ratios(name) for name in cell.ours()]
        ratios = [statistics.median(each) for each in compared if each]
        against = ", ".join(f"{ratio:.3f}" for ratio in ratios or [0.0])
        print(
            f"t {cell.temperature:g} batch {cell.batch}, round {number}: {line}; "
            f"ours / {cell.best()} {against}; {cell.took:.1f} s",
            flush=True,
        )

    def _hold(self, name: str) -> None:
        """Have a column's engine keep its number of nodes, or choose."""
        if name in self.held:
            _ask(self.columns[name][0], Call(hold_nodes, (self.held[name],)))

    def write(self) -> None:
        """Write all that is known."""
        if self.file is not None:
            found = [asdict(cell) for cell in self.cells]
            values = {"settings": self.settings, "cells": found, "table": table(self.cells)}
            report.write_json(self.file, values, quiet=True)


def _ask(pipe: Connection, wish: Case | Ask | Call) -> Any:
    pipe.send(wish)
    try:
        return pipe.recv()
    except EOFError:
        raise report.BenchmarkError("an engine died; its log is above") from None


def table(cells: Sequence[Cell]) -> str:
    """Lay out the medians of each cell beside its bar, by batch and temperature."""
    rows = []
    ordered = sorted(cells, key=lambda each: (each.batch, each.temperature))
    for cell, ours in [(each, ours) for each in ordered for ours in each.ours()]:
        ratios, bar = cell.ratios(ours), BARS.get(cell.batch)
        if not ratios:
            continue
        best = cell.best()
        ratio = statistics.median(ratios)
        met = "-" if bar is None else "yes" if ratio >= bar else "no"
        rows.append(
            [
                str(cell.batch),
                f"{cell.temperature:g}",
                str(len(ratios)),
                *(_median(cell, name) for name in (str(best), ours)),
                f"{ratio:.3f}",
                f"{min(ratios):.3f} to {max(ratios):.3f}",
                "-" if bar is None else f"{bar:.2f}",
                met,
            ]
        )
    head = ["batch", "temperature", "rounds", "stock's best: tokens/s (length)", "ours"]
    return markdown.table([*head, "ratio", "of the rounds", "bar", "met"], rows)


def _median(cell: Cell, name: str) -> str:
    lengths = [measured.acceptance for measured in cell.found[name] if measured]
    rate, length = statistics.median(cell.rates(name)), statistics.median(lengths)
    return f"{name} {rate:.0f} ({length:.2f})"


def arms_of(arguments: argparse.Namespace) -> list[Arm]:
    """Stock's engines and ours.

    A block drafter of vLLM's drafts as many tokens as it was started with, so that each length is
    an engine of its own.
    """
    method, most = arguments.kind, max(arguments.batch)
    lengths = arguments.lengths or LENGTHS[method]
    end = "+fp8" if arguments.fp8_draft else ""
    several = ",".join(map(str, lengths))
    names = [several] if method == "mtp" else [str(length) for length in lengths]
    names = [f"{arguments.chains}:{each}{end}" for each in names]
    # What has a colon is the name of an arm.
    names += dict.fromkeys(
        ours if ":" in ours else f"auto:{arguments.nodes}{end or ours}" for ours in arguments.ours
    )
    draft = draft_folder(arguments.pair, method)
    return [
        read_arm(name, draft, arguments.topk, _steps(arguments), most, method) for name in names
    ]


def _steps(arguments: argparse.Namespace) -> int:
    """Depth of our trees."""
    return arguments.auto_steps or STEPS[arguments.kind]


def fixed_columns(
    arguments: argparse.Namespace, columns: Columns
) -> tuple[Columns, dict[str, int | None]]:
    """Columns with `--fixed` numbers of nodes besides, of the engines that choose theirs.

    Returns:
        All columns, and the number of nodes that each of these engines' columns keeps.

    Raises:
        BenchmarkError: an engine does not choose among such numbers.
    """
    if not arguments.fixed:
        return columns, {}
    found: Columns = {}
    held: dict[str, int | None] = {}
    for name, (pipe, drafts) in columns.items():
        found[name] = pipe, drafts
        if not name.startswith("auto:"):
            continue
        config = TreeConfig(topk=arguments.topk, steps=_steps(arguments), shape="auto")
        most = int(name.removeprefix("auto:").partition("+")[0])
        known = {nodes for *_, nodes in auto_schedule(config, most, max(arguments.batch))}
        if unknown := sorted(set(arguments.fixed) - known):
            raise report.BenchmarkError(
                f"--fixed {unknown}: {name} chooses among {sorted(known)} nodes with up to "
                f"{max(arguments.batch)} requests"
            )
        held[name] = None
        for nodes in dict.fromkeys(arguments.fixed):
            found[f"{name}@{nodes}"], held[f"{name}@{nodes}"] = (pipe, drafts), nodes
    return found, held


def run(arguments: argparse.Namespace, settings: Mapping[str, str]) -> None:
    """Start the engines, measure, print the table; `settings` are noted in the file."""
    deadline = Deadline(arguments.seconds)
    prompts = read_prompts(arguments.pair, arguments.prompt)
    arms = arms_of(arguments)
    # Said before an engine starts.
    fixed_columns(arguments, {name: (None, None) for arm in arms for name in arm.columns})
    pipes = arm_processes.start(arms, arguments, prompts)
    columns: Columns = {
        column: (pipe, drafts)
        for arm, pipe in pipes.items()
        for column, drafts in arm.columns.items()
    }
    columns, held = fixed_columns(arguments, columns)
    # Small batches come first, where the bars are highest.
    cells = [Cell(t, batch) for batch in sorted(arguments.batch) for t in arguments.temperature]
    race = Race(
        columns,
        cells,
        keep=arguments.keep,
        tokens=arguments.tokens,
        file=arguments.json,
        settings=settings,
        held=held,
    )
    try:
        race.run(arguments.rounds, deadline)
    finally:
        for pipe in pipes.values():
            try:
                pipe.send(None)
            except OSError:
                continue
        print(table(cells), flush=True)
