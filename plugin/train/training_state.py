"""What a training run is, at a step, on disk: it goes on from there after a kill.

Batches and their order follow from the seed and the number of the step, and nothing else of
training is drawn, so that no generator has a state to keep.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_FILE = "checkpoint.pt"


@dataclass
class TrainingState:
    """Attributes:
    head: parameters, in float32.
    optimizer: the optimizer's state.
    step: steps that are done.
    seconds: for which training ran, without starts.
    whole: for which it is to run.
    """

    head: dict[str, Any]
    optimizer: dict[str, Any]
    step: int
    seconds: float
    whole: float

    def save(self, work: Path) -> None:
        """Replace the one before, which stays if this is interrupted."""
        part = work / f"{_FILE}.part"
        torch.save(vars(self), part)
        os.replace(part, work / _FILE)

    @classmethod
    def load(cls, work: Path, device: torch.device) -> TrainingState | None:
        """The last one; None if there is none."""
        file = work / _FILE
        if not file.exists():
            return None
        return cls(**torch.load(file, map_location=device, weights_only=True))
