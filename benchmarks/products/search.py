"""Searches for the fastest plan of each product, and compares whole layers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from benchmarks.attention.search.compiling import Built, Compilers, outcome
from benchmarks.products.chain import Chain
from benchmarks.products.findings import FoundProduct, FoundRows, Tried
from benchmarks.products.plan import Plan, distinct, first_plans, later_plans
from benchmarks.products.product_call import RELATIVE, Space, launches_of, multiply
from benchmarks.products.shapes import INPUTS, Buffers, Product
from benchmarks.products.timing import Clock, Launches
from vllm_graft.base.values import reason_of

KINDS = frozenset({"tile", "deep"})

QUICK, CAREFUL, ROUNDS = 5, 15, 41
VARIED = 3
"""Plans of a product that are varied."""


class Search:
    """A search over the products of a layer, for one number of rows after another.

    Args:
        buffers: tensors and weights.
        space: memory of products.
        clock: times launches.
        compilers: compile kernels ahead; None where there is nothing to compile.
        copy_rate: bytes per second of a large copy; 0 if unknown.
        overlapped: whether kernels can begin before those before them have ended.
        few: about so many first plans of a product; 0 takes all.
        kinds: what is tried: Triton's kernel (`tile`), Gluon's (`deep`).
    """

    def __init__(
        self,
        buffers: Buffers,
        space: Space,
        clock: Clock,
        compilers: Compilers | None,
        copy_rate: float,
        *,
        overlapped: bool = True,
        few: int = 0,
        kinds: frozenset[str] = KINDS,
    ) -> None:
        self._buffers, self._space, self._clock = buffers, space, clock
        self._compilers, self._copy_rate = compilers, copy_rate
        self._overlapped, self._few, self._kinds = overlapped, few, kinds
        self._products = buffers.layer.products

    def start(self, rows: int) -> None:
        """Let the kernels of the first plans be compiled."""
        if self._compilers is not None:
            for product in self._products:
                for plan in self._first(product, rows):
                    self._building(plan, product, rows)

    def run(self, rows: int, deadline: float) -> FoundRows:
        """Search for one number of rows; no plan begins after the deadline (`time.monotonic`)."""
        found = FoundRows(rows)
        bytes_ = sum(each.bytes for each in self._products)
        found.floor = bytes_ / self._copy_rate * 1e6 if self._copy_rate else 0.0
        # What an earlier search has left in the buffers may be NaN.
        self._chain(rows, overlapped=False).whole({each.name: None for each in self._products})
        found.products = {each.name: self._yardstick(each, rows) for each in self._products}
        self._plans(list(found.products.values()), rows, deadline)
        self._arms(found)
        return found

    def _plans(self, products: list[FoundProduct], rows: int, deadline: float) -> None:
        """Time the first plans, variations of the best, and the best without an overlap.

        Kernels of all products are compiled while those of one are timed.
        """
        begin = time.monotonic()
        multiprocessors = self._space.multiprocessors

        def first(each: FoundProduct) -> list[Plan]:
            return self._first(each.product, rows)

        def varied(each: FoundProduct) -> list[Plan]:
            best = [one.plan for one in each.ranked(overlapped=self._overlapped)[:VARIED]]
            changed = [
                change
                for plan in best
                if plan
                for change in later_plans(plan, each.product, rows, multiprocessors)
            ]
            return [change for change in changed if self._overlapped or not change.overlapped]

        def late(each: FoundProduct) -> list[Plan]:
            best = [one.plan for one in each.ranked(overlapped=True)[:8]]
            return [plan._replace(overlapped=False, ahead=0, roll=False) for plan in best if plan]

        for plans, share in (
            (first, 0.45),
            (varied, 0.6),
            (varied, 0.72),
            (varied, 0.82),
            (late, 0.9),
        ):
            until = begin + share * (deadline - begin)
            # A result without the arm that is not overlapped is none.
            self._stage(products, plans, rows, float("inf") if plans is late else until)
        for each in products:
            self._again(each, rows)

    def _stage(
        self,
        products: list[FoundProduct],
        plans: Callable[[FoundProduct], list[Plan]],
        rows: int,
        until: float,
    ) -> None:
        """Time more plans of all products, each for its share of the time."""
        coming = []
        for each in products:
            known = {one.plan for one in each.tried}
            new = [plan for plan in distinct(plans(each)) if plan not in known]
            coming.append([(plan, self._building(plan, each.product, rows)) for plan in new])
        for number, (found, new_plans) in enumerate(zip(products, coming)):
            now = time.monotonic()
            end = now + (until - now) / (len(products) - number)
            expected = self._expected(found.product, rows)
            for plan, building in new_plans:
                if time.monotonic() > end:
                    break
                found.tried.append(self._try(found.product, plan, building, expected, rows))

    def _chain(self, rows: int, *, overlapped: bool) -> Chain:
        return Chain(self._buffers, rows, self._space, overlapped and self._overlapped)

    def _first(self, product: Product, rows: int) -> list[Plan]:
        plans = first_plans(product, rows, self._space.multiprocessors)
        plans = [plan for plan in plans if plan.kind in self._kinds]
        if not self._overlapped:
            plans = distinct(plan._replace(overlapped=False, ahead=0) for plan in plans)
        return plans[:: max(1, len(plans) // self._few)] if self._few else plans

    def _building(self, plan: Plan, product: Product, rows: int) -> Sequence[Future[Built]]:
        if self._compilers is None:
            return ()
        launches = launches_of(plan, product, rows, self._space.multiprocessors)
        return self._compilers.start(launches)

    def _yardstick(self, product: Product, rows: int) -> FoundProduct:
        """Time PyTorch's product, and the small kernels around it."""
        found = FoundProduct(product)

        def us(*, overlapped: bool, skip: bool = False) -> float:
            chain = self._chain(rows, overlapped=overlapped)
            launches = functools.partial(chain.one_product, product, None, skip=skip)
            return self._clock.time(launches, CAREFUL) / self._buffers.layers

        found.cublas, found.around = us(overlapped=False), us(overlapped=False, skip=True)
        found.cublas_overlapped = us(overlapped=True)
        return found

    def _expected(self, product: Product, rows: int) -> torch.Tensor:
        x = self._buffers.rows(INPUTS[product.name], rows)
        return x.float() @ self._buffers.weights[product.name][0].float().t()

    def _try(
        self,
        product: Product,
        plan: Plan,
        building: Sequence[Future[Built]],
        expected: torch.Tensor,
        rows: int,
    ) -> Tried:
        tried = Tried(plan)
        for each in building:
            tried.built = outcome(each)
            if tried.built.error:
                tried.failure = tried.built.error
                return tried
        try:
            tried.error = self._error(product, plan, expected, rows)
            if not tried.error <= RELATIVE:
                tried.failure = f"relative error {tried.error:.4f}"
                # It may have left counters of tiles that others would go on to count.
                self._space.arrived.zero_()
                return tried
            tried.us = self._time(product, plan, rows, QUICK)
        except Exception as error:  # Any error of a kernel is a line of the report.
            tried.failure = reason_of(error)
        return tried

    def _error(self, product: Product, plan: Plan, expected: torch.Tensor, rows: int) -> float:
        """Relative error, with NaN before where results are to be written."""
        x = self._buffers.rows(INPUTS[product.name], rows)
        out = torch.full_like(expected, float("nan"), dtype=torch.bfloat16)
        multiply(plan, product, x, self._buffers.weights[product.name][0], out, self._space)
        return float((out.float() - expected).norm() / expected.norm())

    def _time(self, product: Product, plan: Plan, rows: int, repeats: int) -> float:
        chain = self._chain(rows, overlapped=plan.overlapped)
        launches = functools.partial(chain.one_product, product, plan)
        return self._clock.time(launches, repeats) / self._buffers.layers

    def _again(self, found: FoundProduct, rows: int) -> None:
        """Time the best few with more repeats: the least of many is by luck."""
        for overlapped in (True, False):
            for each in found.ranked(overlapped=overlapped)[:4]:
                assert each.plan is not None
                each.us = self._time(found.product, each.plan, rows, CAREFUL)

    def _arms(self, found: FoundRows) -> None:
        """Time whole layers in all arms, all in turn."""
        names = [each.name for each in self._products]
        cublas: dict[str, Plan | None] = dict.fromkeys(names)
        each = found.products
        plain = {name: each[name].best(overlapped=False) for name in names}
        arms: dict[str, tuple[dict[str, Plan | None], bool]] = {
            "cublas": (cublas, False),
            "cublas+small pdl": (cublas, True),
            "ours": (plain, False),
        }
        if self._overlapped:
            best = {name: each[name].best(overlapped=True) for name in names}
            winners = {
                name: best[name] if each[name].wins(overlapped=True) else None for name in names
            }
            arms["ours+pdl"] = best, True
            arms["gate_up+pdl"] = {**cublas, "gate_up": best["gate_up"]}, True
            arms["winners+pdl"] = winners, True
            for name in names:
                changed = None if winners[name] else best[name]
                arms[f"winners, other {name}"] = {**winners, name: changed}, True
        calls: dict[str, Launches] = {
            name: functools.partial(self._chain(found.rows, overlapped=small).whole, ways)
            for name, (ways, small) in arms.items()
        }
        found.ways = {
            name: {which: plan.short if plan else "cublas" for which, plan in ways.items()}
            for name, (ways, _) in arms.items()
        }
        try:
            self._check(found, calls)
            taken = self._clock.compare(calls, ROUNDS)
        except Exception as error:  # Any error of a kernel is a line of the report.
            found.note = reason_of(error)
            return
        found.arms = {name: us / self._buffers.layers for name, us in taken.items()}

    def _check(self, found: FoundRows, calls: dict[str, Launches]) -> None:
        """Compare outputs of whole chains: an overlap that reads too early computes other bits."""
        expected = None
        for name, call in calls.items():
            # Kernels overlap in graphs: launched one by one each begins long after the one before.
            call = self._clock.captured(call)
            outputs = [self._output(call, found.rows) for _ in range(3)]
            found.same[name] = all(torch.equal(each, outputs[0]) for each in outputs)
            if expected is None:
                expected = outputs[0].float()
            error = (outputs[0].float() - expected).norm() / expected.norm()
            found.errors[name] = float(error)

    def _output(self, call: Launches, rows: int) -> torch.Tensor:
        """The last output and the sum of all before, with NaN before in all that is overwritten."""
        for name in ("delta", "residual", "normed", "qkv", "mixed", "gate_up", "gated"):
            self._buffers.rows(name, rows).fill_(float("nan"))
        call()
        delta = self._buffers.rows("delta", rows)
        return torch.cat([delta, self._buffers.rows("residual", rows)]).clone()
