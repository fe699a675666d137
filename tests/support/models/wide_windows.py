"""Targets whose sliding windows are wider than any text: a minimal new target family."""

from __future__ import annotations

from typing import Any

from vllm_graft import hookimpl
from vllm_graft.hooks.entries import TargetFamily
from vllm_graft.spec_decode.targets.dense import DenseFamily


class WideWindows(DenseFamily):
    """Layers with a window that no text fills compute plain attention."""

    attached: list[str] = []  # noqa: RUF012

    def claims(self, layer: Any) -> bool:
        window = getattr(getattr(layer, "impl", None), "sliding_window", None)
        return super().claims(layer) and isinstance(window, int) and window >= LONGEST

    def attach(self, name: str, layer: Any, context: Any, *, is_draft: bool) -> None:
        super().attach(name, layer, context, is_draft=is_draft)
        self.attached.append(name)


LONGEST = 256
"""Tokens of the longest text of the engines that are tested."""


@hookimpl
def graft_target_families() -> list[TargetFamily]:
    load = "tests.support.models.wide_windows:WideWindows"
    serves = ("sliding-window attention",)
    return [TargetFamily("wide windows", load, "windows that no text fills", serves=serves)]
