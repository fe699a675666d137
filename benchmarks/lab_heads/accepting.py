"""Acceptance of a drafter in vLLM's engines on a CPU: stock's chains, our trees, a random drafter.

Each engine answers the pair's prompts, at each temperature. Greedy answers of all engines have to
be the same ones, as the target computes in float32.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab_heads import files, wide
from benchmarks.real_pair.widening import Shape
from benchmarks.whole_rows import whole_rows
from vllm_graft.base import markdown
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.testing.pairs import Answer, Pair, Request, answer_all, differing

ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 2**28,
}

USUAL = {
    "mtp": ["chain:1", "chain:2", "chain:3", "tree:15x4", "random chain:3"],
    "dspark": ["chain:7", "tree:15x7", "tree:31x7", "random chain:7"],
}
"""Engines that are measured. `tree:NxD` has N nodes and D levels."""


@dataclass(frozen=True)
class Load:
    """How many prompts are asked, for so many tokens, at each temperature."""

    prompts: int
    tokens: int
    temperatures: Sequence[float]

    def requests(self, texts: Sequence[str], temperature: float) -> list[Request]:
        """Requests whose seeds are their numbers."""
        params = {"temperature": temperature, "max_tokens": self.tokens}
        return [
            Request(text, {**params, "seed": number})
            for number, text in enumerate(texts[: self.prompts])
        ]


@dataclass(frozen=True)
class Row:
    """One engine at one temperature.

    Attributes:
        length: tokens per step of a request with drafts, the bonus token included.
        by_depth: share of the steps whose draft at each depth was accepted; of a tree, any.
        differ: answers that are not those of the first engine, which are compared if greedy.
    """

    engine: str
    temperature: float
    length: float
    by_depth: list[float]
    differ: int | None


def read_engine(name: str) -> dict[str, Any]:
    """Arguments of `Pair.engine` for the name of an engine.

    Raises:
        BenchmarkError: the name can't be read.
    """
    kind, _, rest = name.removeprefix("random ").partition(":")
    nodes, _, steps = rest.partition("x")
    if kind == "chain" and rest.isdigit():
        return {"chain": int(rest)}
    if kind == "tree" and nodes.isdigit() and steps.isdigit():
        return {"nodes": int(nodes), "steps": int(steps), "topk": min(8, int(nodes))}
    raise BenchmarkError(f"--arms {name!r}: say chain:K or tree:NxDEPTH, or `random ` before it")


def pair_of(pair: Path, drafter: Path, kind: str, scratch: Path) -> Pair:
    """The target and the draft that vLLM loads; files are written to `scratch`."""
    prompts = json.loads((pair / "prompts.json").read_text())
    if kind == "mtp":
        folder = str(mimo_of(pair / "target", drafter, scratch / f"{drafter.name}-mimo"))
        return Pair(folder, folder, prompts)
    return Pair(str(pair / "target"), str(drafter), prompts)


def mimo_of(target: Path, module: Path, out: Path) -> Path:
    """Write a MiMo of a Llama and a module, with wider hidden states where its heads need them."""
    config = files.read_config(target)
    if files.fits_a_mimo(config):
        files.write_mimo(target, module, out)
        return out
    shape = Shape.of(config)
    shape = replace(shape, hidden=shape.heads * shape.head)
    wide.widen_mtp(target, module, out, shape, torch.device("cpu"), torch.float32)
    return out / "target"


@contextlib.contextmanager
def engine(pair: Pair, kind: str, name: str) -> Iterator[Any]:
    """Start an engine whose sampler takes a program per row."""
    options = {"dtype": "float32", **ENGINE}
    with whole_rows(), pair.engine(method=kind, **read_engine(name), **options) as llm:
        yield llm


def run(
    pair: Path, work: Path, kind: str, names: Sequence[str] | None, load: Load, characters: int
) -> list[Row]:
    """Run the engines, one after the other."""
    scratch = work / "accept"
    files.add_noise(work / kind, scratch / f"random-{kind}")
    rows: list[Row] = []
    expected: dict[float, list[Answer]] = {}
    for name in names or USUAL[kind]:
        random = name.startswith("random ")
        drafter = scratch / f"random-{kind}" if random else work / kind
        with engine(pair_of(pair, drafter, kind, scratch), kind, name) as llm:
            texts = [text[:characters] for text in _prompts(pair)]
            for temperature in load.temperatures:
                found, row = _measured(llm, name, temperature, load.requests(texts, temperature))
                wanted = expected.setdefault(temperature, found)
                # Stock's chains draw other tokens for requests with a seed.
                differ = len(differing(found, wanted)) if temperature == 0 else None
                rows.append(Row(**{**vars(row), "differ": differ}))
                print(rows[-1], flush=True)
    return rows


def _prompts(pair: Path) -> list[str]:
    found: list[str] = json.loads((pair / "prompts.json").read_text())
    return found


def _measured(
    llm: Any, name: str, temperature: float, asked: list[Request]
) -> tuple[list[Answer], Row]:
    from vllm_graft.testing import spec_metrics

    before = spec_metrics(llm)
    found = answer_all(llm, asked)
    after = spec_metrics(llm)
    steps = max(1, after.drafts - before.drafts)
    accepted = after.accepted_tokens - before.accepted_tokens
    earlier = list(before.accepted_per_position) or [0] * len(after.accepted_per_position)
    depths = [
        round((late - early) / steps, 3)
        for late, early in zip(after.accepted_per_position, earlier, strict=True)
    ]
    while depths and not depths[-1]:
        depths.pop()
    return found, Row(name, temperature, round(1 + accepted / steps, 3), depths, None)


def table(rows: Sequence[Row]) -> str:
    """Lay rows out."""
    cells = [
        [
            row.engine,
            f"{row.temperature:g}",
            f"{row.length:.2f}",
            " ".join(f"{each:.2f}" for each in row.by_depth),
            "-" if row.differ is None else str(row.differ),
        ]
        for row in rows
    ]
    head = ["engine", "temperature", "tokens per step", "accepted, by depth", "greedy that differ"]
    return markdown.table(head, cells)
