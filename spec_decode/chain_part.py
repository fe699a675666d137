"""The part ``graft.draft``: CUDA graphs of a standalone draft model. ``StandaloneARSpeculator``,
asked to build itself, builds our subclass of it."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from vllm_graft.base.decision import Preset
from vllm_graft.base.options import flag, target_of
from vllm_graft.base.part import Offer, Part
from vllm_graft.base.refusal import Find, Found, Refusal, Refusals, sentences, setting
from vllm_graft.hooks import manager
from vllm_graft.seams.permission import require_seams
from vllm_graft.seams.post_import import after_import
from vllm_graft.seams.wrap import BuiltClasses, build_instead, require_speculator
from vllm_graft.spec_decode.config.draft_config import NAME, DraftConfig
from vllm_graft.spec_decode.counts.tree_metrics import CHAIN_METRICS
from vllm_graft.spec_decode.presets import tree_preset
from vllm_graft.spec_decode.refusals.engine_refusals import old_runner, overlap, ranks
from vllm_graft.spec_decode.refusals.tree_refusals import refusals
from vllm_graft.spec_decode.worker_mends import cut_prompt_logprobs

NO_DRAFT = (
    "There is no draft model: add --speculative-config "
    '\'{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 5}\'.'
)

_DROP = f"drop `{flag('draft')}`"
_UNTRIED = "It splits a request's rows, or the loop, over ranks; nobody has tried that."

REFUSALS = Refusals()


def _in_spec(find: Find) -> Find:
    """Look only where the method is right: other methods have other keys."""

    def only(draft: DraftConfig, vllm_config: Any) -> Iterator[Found | str]:
        if vllm_config.speculative_config.method == "draft_model":
            yield from find(draft, vllm_config)

    return only


REFUSALS.extend(
    (
        Refusal(
            "other methods than `draft_model`",
            "vLLM captures the loops of `eagle`, `eagle3` and `mtp` itself, and others have none.",
            f"set `speculative_config.method` to 'draft_model', or {_DROP}",
            setting("speculative_config.method", lambda method: method == "draft_model"),
        ),
        Refusal(
            "fewer than 2 speculative tokens",
            "The first token comes out of the pass over the accepted tokens, which is no loop.",
            "set `speculative_config.num_speculative_tokens` to 2 or more",
            _in_spec(
                setting("speculative_config.num_speculative_tokens", lambda tokens: tokens >= 2)
            ),
        ),
        Refusal(
            "`parallel_drafting`",
            "It drafts all tokens at once.",
            "set `speculative_config.parallel_drafting` to false",
            _in_spec(setting("speculative_config.parallel_drafting")),
        ),
        Refusal(
            "`enable_adaptive_verification`",
            "It estimates acceptance while drafting; nobody has tried that in these graphs.",
            "set `speculative_config.enable_adaptive_verification` to false",
            _in_spec(setting("speculative_config.enable_adaptive_verification")),
        ),
        old_runner("It drafts by other classes."),
        ranks(
            "data",
            "vLLM hands the target's number of tokens to the draft's loop, so ranks agree on no "
            "padded size.",
        ),
        *(ranks(kind, _UNTRIED) for kind in ("pipeline", "decode context", "prefill context")),
        overlap("It splits the draft's rows."),
    )
)


@REFUSALS.row("`--enforce-eager`", "It rules out all graphs.", f"drop it, or {_DROP}")
def _eager(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    target = target_of(vllm_config)
    if target is not None and target.enforce_eager:
        yield "--enforce-eager is given"
    elif vllm_config.speculative_config.enforce_eager:
        yield "speculative_config.enforce_eager is true"


@REFUSALS.row("platforms without CUDA graphs", "There is nothing to capture.", _DROP)
def _platform(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    from vllm.platforms import current_platform

    if not current_platform.support_static_graph_mode():
        yield f"The platform {current_platform.device_type} has no CUDA graphs"


@REFUSALS.row(
    "a `cudagraph_mode` without FULL decodes",
    "The loop is captured as a whole.",
    "set `compilation_config.cudagraph_mode` to FULL_AND_PIECEWISE or FULL_DECODE_ONLY, or "
    f"{_DROP}",
)
def _graph_mode(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    target = target_of(vllm_config)
    if mode == "PIECEWISE" or (mode == "NONE" and target is not None and not target.enforce_eager):
        yield f"compilation_config.cudagraph_mode is {mode}"


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
        trees = tree_preset.offer(preset, vllm_config)
        if isinstance(trees, Offer) and not any(sentences(refusals(), trees.section, vllm_config)):
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
        Raises `SeamError` if this vLLM is not the one that the graphs were written for."""
        if DraftConfig.from_vllm(vllm_config) is None:
            return stock
        # The graph runner's symbols stand under the part that had it first.
        require_seams("core", "tree", "draft")
        from vllm_graft.spec_decode.drafters.standalone.chain import ChainSpeculator

        return ChainSpeculator

    def _hook(self, module: ModuleType) -> None:
        build_instead(getattr(module, _STOCK, None), self.speculator_class, self.built.add)


CHAINS = ChainPart()
