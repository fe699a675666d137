"""What was measured of the plans of products, and of whole layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.attention.search.compiling import Built
from benchmarks.products.plan import Plan
from benchmarks.products.shapes import Product


@dataclass
class Tried:
    """What was measured of a plan of one product.

    Attributes:
        plan: the plan; None is PyTorch's product.
        us: microseconds of a layer's product and the small kernels around it; None if not timed.
        error: relative error of the output.
        failure: why it was not timed, or what it computes wrongly.
        built: what its kernel takes.
    """

    plan: Plan | None
    us: float | None = None
    error: float | None = None
    failure: str = ""
    built: Built | None = None

    @property
    def best(self) -> float:
        """Its time; infinite if it did not run or is wrong."""
        return float("inf") if self.failure or self.us is None else self.us

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "short": self.plan.short if self.plan else "cublas",
            "plan": self.plan._asdict() if self.plan else None,
            "us": self.us,
            "error": self.error,
            "failure": self.failure,
            "built": self.built.plain() if self.built else None,
        }


@dataclass
class FoundProduct:
    """What was measured of one product for one number of rows.

    Attributes:
        product: its sizes.
        cublas: PyTorch's product between small kernels that are not overlapped.
        cublas_overlapped: the same between small kernels that are.
        around: the small kernels alone, not overlapped.
        tried: all plans.
    """

    product: Product
    cublas: float = float("nan")
    cublas_overlapped: float = float("nan")
    around: float = float("nan")
    tried: list[Tried] = field(default_factory=list)

    def ranked(self, *, overlapped: bool) -> list[Tried]:
        """What computes rightly, the fastest first."""
        right = [
            each
            for each in self.tried
            if each.plan and each.plan.overlapped == overlapped and each.best < float("inf")
        ]
        return sorted(right, key=lambda each: each.best)

    def best(self, *, overlapped: bool) -> Plan | None:
        """The fastest plan, whether or not PyTorch's product is faster; None if none runs."""
        return next((each.plan for each in self.ranked(overlapped=overlapped)), None)

    def wins(self, *, overlapped: bool) -> bool:
        """Whether a plan of ours is faster than PyTorch's product between overlapped kernels."""
        ranked = self.ranked(overlapped=overlapped)
        return bool(ranked) and ranked[0].best < self.cublas_overlapped

    def in_chain(self, tried: Tried | None) -> float:
        """Microseconds that a product takes in the chain; None is PyTorch's.

        PyTorch's product takes what it adds to the small kernels around it. Another takes so much
        less as the whole is faster.
        """
        own = self.cublas - self.around
        return own if tried is None else own - (self.cublas - tried.best)

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        ranked = sorted(self.tried, key=lambda each: each.best)
        return {
            "product": self.product.name,
            "columns": self.product.columns,
            "depth": self.product.depth,
            "cublas": self.cublas,
            "cublas_overlapped": self.cublas_overlapped,
            "around": self.around,
            "tried": [each.plain() for each in ranked],
        }


@dataclass
class FoundRows:
    """What was measured for one number of rows.

    Attributes:
        rows: how many.
        products: each product's results.
        arms: microseconds of a layer.
        ways: the plans of each arm, in a few letters.
        floor: microseconds in which a large copy moves a layer's weights.
        same: whether replays of each arm give the same bits.
        errors: relative error of each arm's last output from cuBLAS' chain.
        note: what went wrong.
    """

    rows: int
    products: dict[str, FoundProduct] = field(default_factory=dict)
    arms: dict[str, float] = field(default_factory=dict)
    ways: dict[str, dict[str, str]] = field(default_factory=dict)
    floor: float = 0.0
    same: dict[str, bool] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "rows": self.rows,
            "floor": self.floor,
            "arms": self.arms,
            "ways": self.ways,
            "same": self.same,
            "errors": self.errors,
            "note": self.note,
            "products": [each.plain() for each in self.products.values()],
        }
