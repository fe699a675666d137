"""The kernels of several decoder layers in a row, as a decoding step launches them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.products.plan import Plan
from benchmarks.products.product_call import Space, multiply
from benchmarks.products.shapes import INPUTS, OUTPUTS, Buffers, Product
from benchmarks.products.small_kernels import launch_add_norm, launch_mix, launch_silu_mul

Ways = Mapping[str, Plan | None]
"""How each product, by its name, is computed."""

HEAD = 128


@dataclass(frozen=True)
class Chain:
    """Launches kernels over the first rows of buffers.

    What is launched begins from the buffers ``start`` and ``delta`` alone or overwrites all that it
    reads, so that it computes the same each time.

    Attributes:
        buffers: tensors.
        rows: how many rows.
        space: memory of products.
        overlapped: whether the small kernels begin before those before them have ended.
    """

    buffers: Buffers
    rows: int
    space: Space
    overlapped: bool

    def whole(self, ways: Ways) -> None:
        """Run all layers: ``delta`` takes the last output, ``residual`` the sum of all before."""
        products = {each.name: each for each in self.buffers.layer.products}
        for number in range(self.buffers.layers):
            self._norm(first=number == 0)
            self._multiply(products["qkv"], number, ways["qkv"])
            self._mix()
            self._multiply(products["o"], number, ways["o"])
            self._norm()
            self._multiply(products["gate_up"], number, ways["gate_up"])
            self._gate()
            self._multiply(products["down"], number, ways["down"])

    def one_product(self, product: Product, plan: Plan | None, *, skip: bool = False) -> None:
        """One product of all layers, each between the small kernels that are around it.

        With `skip` the small kernels alone.
        """
        before, after = {
            "qkv": (self._first_norm, self._mix),
            "o": (self._mix, self._first_norm),
            "gate_up": (self._first_norm, self._gate),
            "down": (self._gate, self._first_norm),
        }[product.name]
        for number in range(self.buffers.layers):
            before()
            if not skip:
                self._multiply(product, number, plan)
            after()

    def _multiply(self, product: Product, number: int, plan: Plan | None) -> None:
        multiply(
            plan,
            product,
            self.buffers.rows(INPUTS[product.name], self.rows),
            self.buffers.weights[product.name][number],
            self.buffers.rows(OUTPUTS[product.name], self.rows),
            self.space,
        )

    def _first_norm(self) -> None:
        rows = self.buffers.rows
        launch_add_norm(
            rows("delta", self.rows), rows("start", self.rows), rows("residual", self.rows),
            self.buffers.gain, rows("normed", self.rows), overlapped=self.overlapped,
        )  # fmt: skip

    def _norm(self, *, first: bool = False) -> None:
        rows = self.buffers.rows
        launch_add_norm(
            None if first else rows("delta", self.rows),
            rows("start" if first else "residual", self.rows),
            rows("residual", self.rows), self.buffers.gain, rows("normed", self.rows),
            overlapped=self.overlapped,
        )  # fmt: skip

    def _mix(self) -> None:
        rows = self.buffers.rows
        launch_mix(
            rows("qkv", self.rows), rows("mixed", self.rows),
            min(HEAD, self.buffers.layer.key), overlapped=self.overlapped,
        )  # fmt: skip

    def _gate(self) -> None:
        rows = self.buffers.rows
        launch_silu_mul(
            rows("gate_up", self.rows), rows("gated", self.rows), overlapped=self.overlapped
        )
