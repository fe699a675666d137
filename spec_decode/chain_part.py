"""The part ``graft.draft``: CUDA graphs of a standalone draft model.

``StandaloneARSpeculator``, asked to build itself, builds our subclass of it.
"""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from vllm_graft.base.decision import Preset
from vllm_graft.base.options import flag
from vllm_graft.base.part import Offer, Part
from vllm_graft.base.refusal import Refusal
from vllm_graft.hooks import manager
from vllm_graft.seams.permission import require_seams
from vllm_graft.seams.post_import import after_import
from vllm_graft.seams.wrap import BuiltClasses, build_instead, require_speculator
from vllm_graft.spec_decode.config.draft_config import NAME, DraftConfig
from vllm_graft.spec_decode.counts.tree_metrics import CHAIN_METRICS
from vllm_graft.spec_decode.refusals.chain_refusals import NO_DRAFT, REFUSALS
from vllm_graft.spec_decode.worker_mends import cut_prompt_logprobs

_MODULE = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"
_STOCK = "StandaloneARSpeculator"


class ChainPart(Part):
    """Graphs of the passes of a standalone draft model."""

    name = NAME
    asks_for = "CUDA graphs of the draft's loop"
    flag = flag(NAME)
    refusals: Sequence[Refusal] = REFUSALS
    metrics = CHAIN_METRICS

    def __init__(self) -> None:
        self.built = BuiltClasses("drafts")

    def install(self) -> None:
        after_import(_MODULE, self._hook)

    def automatic(self, preset: Preset, vllm_config: Any) -> Offer | str:
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "draft_model":
            return ""
        says = f"graphs of a draft model's chain of {speculative.num_speculative_tokens}"
        return Offer(DraftConfig(), says)

    def seams(self, asked: DraftConfig, vllm_config: Any) -> tuple[str, ...]:
        # The graph runner's symbols stand under the part that had it first.
        return "core", "tree", NAME

    def refuses(self, asked: DraftConfig, vllm_config: Any) -> Iterator[str]:
        if vllm_config.speculative_config is None:
            yield NO_DRAFT
        else:
            yield from super().refuses(asked, vllm_config)

    def describe(self, asked: DraftConfig, vllm_config: Any) -> str:
        offer = manager.manager().choose(
            "graft_draft_graph_runners", asked.graph_runner, flag(NAME, "graph_runner")
        )
        steps = vllm_config.speculative_config.num_speculative_tokens
        chosen = f"graph_runner {offer.entry.name} ({offer.provider})"
        return f"graphs of a draft model's chain of {steps}; {chosen}"

    def verify(self, asked: DraftConfig, worker: Any, vllm_config: Any) -> None:
        require_speculator(worker, self.built, self.flag, self.asks_for, _STOCK)
        cut_prompt_logprobs(worker)

    def speculator_class(self, stock: type[Any], vllm_config: Any) -> type[Any]:
        """The class to build for ``StandaloneARSpeculator(...)``: ``stock`` without our section.

        Raises:
            SeamError: if this vLLM is not the one that the graphs were written for.
        """
        if DraftConfig.from_vllm(vllm_config) is None:
            return stock
        # The graph runner's symbols stand under the part that had it first.
        require_seams("core", "tree", "draft")
        from vllm_graft.spec_decode.drafters.standalone.chain import ChainSpeculator

        return ChainSpeculator

    def _hook(self, module: ModuleType) -> None:
        build_instead(getattr(module, _STOCK, None), self.speculator_class, self.built.add)


CHAINS = ChainPart()
