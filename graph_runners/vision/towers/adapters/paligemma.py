"""PaliGemma: a SigLIP tower of one image size, and a projector."""

from __future__ import annotations

from typing import Any

from vllm_graft.graph_runners.vision.towers.adapters.llava import LlavaAdapter


class PaliGemmaAdapter(LlavaAdapter):
    """The adapter of ``PaliGemmaForConditionalGeneration``; its parts are named like LLaVA's."""

    @classmethod
    def refuses(cls, model: Any) -> str | None:
        """Refuse nothing, as the tower is always SigLIP."""
        return None
