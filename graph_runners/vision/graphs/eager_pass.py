"""A pass of the model without graphs: what a graph is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_graft.graph_runners.vision.graphs.vision_batch import VisionBatch

Outputs = list[torch.Tensor]
"""The embeddings of each item, ``[tokens, hidden]``."""


class EagerPass(NamedTuple):
    """A measured pass.

    Attributes:
        batch: the inputs.
        indices: the items of the batch that the pass encoded.
        outputs: their embeddings.
        seconds: how long the pass took.
        peak: bytes that it needed beyond those in use.
    """

    batch: VisionBatch
    indices: Sequence[int]
    outputs: Outputs
    seconds: float
    peak: int
