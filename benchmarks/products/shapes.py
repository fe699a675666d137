"""The products of a decoder layer, and the buffers between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPE = torch.bfloat16

ITEM = 2
"""Bytes of a number."""


@dataclass(frozen=True)
class Product:
    """A product of activations and weights: ``out[r, n] = sum over k of x[r, k] weight[n, k]``.

    Attributes:
        name: its name in a layer.
        columns: columns of the output, which are rows of the weights.
        depth: numbers that are multiplied and summed up for each.
    """

    name: str
    columns: int
    depth: int

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        return self.columns * self.depth * ITEM


@dataclass(frozen=True)
class Layer:
    """Sizes of a decoder layer.

    Attributes:
        hidden: numbers of a row between layers.
        query: numbers of a row's query in all heads.
        key: numbers of a row's key, and of its value, in all KV heads.
        inner: numbers of a row in the middle of the MLP.
    """

    hidden: int
    query: int
    key: int
    inner: int

    @property
    def products(self) -> tuple[Product, ...]:
        """The four products, in order."""
        return (
            Product("qkv", self.query + 2 * self.key, self.hidden),
            Product("o", self.hidden, self.query),
            Product("gate_up", 2 * self.inner, self.hidden),
            Product("down", self.hidden, self.inner),
        )


LLAMA_8B = Layer(hidden=4096, query=4096, key=1024, inner=14336)


class Buffers:
    """Tensors of rows between the kernels of a chain, and the weights of all its layers.

    Args:
        layer: sizes.
        layers: how many layers there are, each with weights of its own.
        most_rows: the largest number of rows.
        device: where the tensors are.
        seed: of the random numbers.
    """

    def __init__(
        self, layer: Layer, layers: int, most_rows: int, device: str, seed: int = 0
    ) -> None:
        self.layer, self.layers, self.device = layer, layers, device
        random = torch.Generator(device=device).manual_seed(seed)

        def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
            made = torch.empty(rows, columns, dtype=DTYPE, device=device)
            return made.normal_(0, scale, generator=random)

        self.weights = {
            each.name: [normal(each.columns, each.depth, each.depth**-0.5) for _ in range(layers)]
            for each in layer.products
        }
        self.gain = normal(1, layer.hidden, 1.0)[0]
        self._rows = {
            "start": normal(most_rows, layer.hidden, 1.0),
            "delta": normal(most_rows, layer.hidden, 1.0),
            "residual": normal(most_rows, layer.hidden, 1.0),
            "normed": normal(most_rows, layer.hidden, 1.0),
            "qkv": normal(most_rows, layer.query + 2 * layer.key, 1.0),
            "mixed": normal(most_rows, layer.query, 1.0),
            "gate_up": normal(most_rows, 2 * layer.inner, 1.0),
            "gated": normal(most_rows, layer.inner, 1.0),
        }

    def rows(self, name: str, rows: int) -> torch.Tensor:
        """The first rows of a buffer."""
        return self._rows[name][:rows]


INPUTS = {"qkv": "normed", "o": "mixed", "gate_up": "normed", "down": "gated"}
OUTPUTS = {"qkv": "qkv", "o": "delta", "gate_up": "gate_up", "down": "delta"}
"""The buffers that a product reads and writes."""
