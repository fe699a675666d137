"""Import a CUDA build of torchvision under a CPU build of torch. PyPI's torchvision is built
against CUDA. Without its C++ library ``_meta_registrations.py`` raises for want of two operators;
transformers imports torchvision, so vLLM does not import either."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def install() -> None:
    """Watch for the import of torchvision; imports nothing itself, a second call does nothing."""
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds no module: only acts just before the one that would fail is loaded."""

    _library: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == "torchvision._meta_registrations" and self._library is None:
            self._define_missing()

    def _define_missing(self) -> None:
        import torch

        self._library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                self._library.define(name + _BOXES)
