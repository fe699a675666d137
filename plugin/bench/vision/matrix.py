"""Compare the graphs' answers with the model's, over random batches."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_graft.bench.common.timing import Deadline
from vllm_graft.bench.vision.arms import Arm
from vllm_graft.bench.vision.image_cases import Batch
from vllm_graft.bench.vision.random_towers import Pixels


def relative_error(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest relative L2 error over the items; infinite on NaN.

    Args:
        found: tensors [tokens, hidden], any float dtype.
        expected: likewise, of the same shapes.

    Raises:
        ValueError: the shapes differ.
    """
    shapes = [tuple(tensor.shape) for tensor in found], [tuple(t.shape) for t in expected]
    if shapes[0] != shapes[1]:
        raise ValueError(f"shapes {shapes[0]} instead of {shapes[1]}")
    worst = 0.0
    for one, other in zip(found, expected):
        error = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-20)
        value = float(error)
        worst = max(worst, value if value == value else float("inf"))
    return worst


def identical(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether all tensors are equal bit by bit."""
    import torch

    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@dataclass
class Tally:
    """The findings for one tier.

    Attributes:
        batches: how many batches were compared.
        identical: how many were equal bit by bit.
        worst: largest relative error.
        worst_batch: the batch that had it.
    """

    batches: int = 0
    identical: int = 0
    worst: float = 0.0
    worst_batch: str = ""

    def add(self, same: bool, error: float, batch: Batch) -> None:
        """Count one comparison."""
        self.batches += 1
        self.identical += same
        if error > self.worst:
            self.worst, self.worst_batch = error, f"{batch.modality} {batch.grids}"


@dataclass
class MatrixResult:
    """The findings of the matrix on one tower.

    Attributes:
        tower: name of the tower.
        tiers: tallies by the tier that answered: see :func:`tier_of`.
        kinds: numbers of batches by kind.
        crashes: batches whose call raised, and the exceptions.
        split: error of the model, item by item, against itself: the effect of other shapes alone.
    """

    tower: str
    tiers: dict[str, Tally] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)
    split: Tally = field(default_factory=Tally)

    def brief(self) -> str:
        """Return a line to print during the run."""
        tiers = ", ".join(
            f"{tier} {tally.identical}/{tally.batches} identical, worst {tally.worst:.1e}"
            for tier, tally in sorted(self.tiers.items())
        )
        return f"{tiers}; {len(self.crashes)} crashes"

    def lines(self) -> list[list[str]]:
        """Return rows of the report: tower, tier, batches, identical, worst error, where."""
        named = [*sorted(self.tiers.items()), ("(eager, item by item)", self.split)]
        return [
            [
                self.tower,
                tier,
                str(tally.batches),
                str(tally.identical),
                f"{tally.worst:.1e}",
                tally.worst_batch[:60],
            ]
            for tier, tally in named
        ]


HEADER = ("tower", "tier", "batches", "identical", "worst relative error", "of")


def tier_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return which tier answered between two readings of the replays by tier.

    Returns:
        ``exact`` for one exact graph, which must be bit-identical to the model; ``exact, cut`` for
        several, which must be so to the model given the same groups (GEMMs of the whole batch have
        other shapes, and round otherwise); ``bucket``; ``mixed`` of both; ``eager``.
    """
    exact, bucket = (after.get(tier, 0) - before.get(tier, 0) for tier in ("exact", "bucket"))
    if exact and bucket:
        return "mixed"
    if exact:
        return "exact" if exact == 1 else "exact, cut"
    return "bucket" if bucket else "eager"


def replays(statistics: Mapping[str, Any]) -> dict[str, int]:
    """Read the replays by tier from a manager's counters."""
    by_tier = statistics.get("replays", {})
    return dict(by_tier) if isinstance(by_tier, Mapping) else {}


def compare(
    tower: str,
    eager: Arm,
    arm: Arm,
    batches: Iterable[Batch],
    pixels: Pixels,
    deadline: Deadline,
    split_every: int = 50,
) -> MatrixResult:
    """Run every batch both ways; go on after a call that raises."""
    result = MatrixResult(tower)
    for number, batch in enumerate(batches):
        if deadline.passed:
            break
        result.kinds[batch.kind] = result.kinds.get(batch.kind, 0) + 1
        inputs = pixels.of(batch, number)
        expected = eager(inputs)
        before = replays(arm.statistics())
        declined = arm.eager_calls
        try:
            found = arm(inputs)
            error = relative_error(found, expected)
        except Exception as raised:
            result.crashes.append(f"{batch}: {type(raised).__name__}: {raised}")
            if len(result.crashes) == 1:
                traceback.print_exc()
            continue
        tier = "eager" if arm.eager_calls > declined else tier_of(before, replays(arm.statistics()))
        same = identical(found, expected)
        if tier == "exact, cut" and not same:
            same = identical(found, _in_groups(arm, inputs))
        result.tiers.setdefault(tier, Tally()).add(same, error, batch)
        if number % 100 == 99:
            print(f"{number + 1} batches: {result.brief()}", flush=True)
        if number % split_every == 0 and len(batch.grids) > 1:
            _against_itself(result.split, eager, batch, pixels, number, expected)
    return result


def _in_groups(arm: Arm, inputs: Mapping[str, Any]) -> list[Any]:
    """Run the model on the groups that our runner cuts a batch into, in order."""
    import torch

    from vllm_graft.graph_runners.vision import replay_plan as plan

    runner = arm.manager
    found: dict[int, Any] = {}
    with torch.inference_mode():
        for step in plan.groups(runner.tower.items(inputs), runner.max_rows):
            parts = runner.tower.eager(inputs, step.indices)
            found.update(zip(step.indices, parts))
    return [found[index] for index in sorted(found)]


def _against_itself(
    tally: Tally, eager: Arm, batch: Batch, pixels: Pixels, shift: int, expected: Sequence[Any]
) -> None:
    """Compare the model item by item with itself on the batch: GEMM shapes change rounding."""
    values = pixels.of(batch, shift)
    names = list(values)
    start, alone = 0, []
    for grid in batch.grids:
        end = start + grid[0] * grid[1] * grid[2]
        one = Batch(batch.modality, (grid,))
        inputs = {names[0]: values[names[0]][start:end], names[1]: pixels.of(one)[names[1]]}
        alone += eager(inputs)
        start = end
    tally.add(identical(alone, expected), relative_error(alone, expected), batch)


def as_dict(result: MatrixResult) -> dict[str, Any]:
    """Return the findings for the JSON file."""
    return asdict(result)
