"""The part ``graft.tree``: how vLLM comes to draft and verify trees.

Six things are hooked, all inert until a configuration has the section:

1. a speculator of vLLM's that a drafter stands over, asked to build itself, builds the chosen
   drafter, a subclass of it. The class object stays the same, and each construction decides by its
   own configuration;
2. CUDA graphs of the target are planned for every number of nodes that may be chosen, and for
   mixed batches;
3. with ``shape: auto`` the workers are asked what they measured of these graphs, and the scheduler,
   which is built next, learns from there how many nodes pay;
4. drafts for requests with structured output carry their parents to the engine core, whose manager
   of grammars then masks each node by its own path;
5. the engine core makes the references of requests where it takes them in;
6. with drafts that nobody but a preset asked for, requests may ask for all that they may without.

Workers unpickle their configuration and never see the frontend's checks: so each of these reads it.
"""

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from vllm_graft.base.decision import Decision, Preset, gave_drafts
from vllm_graft.base.errors import HookError
from vllm_graft.base.options import flag
from vllm_graft.base.part import Offer, Part
from vllm_graft.base.refusal import Refusal, sentences
from vllm_graft.base.values import human
from vllm_graft.hooks import entries, manager
from vllm_graft.seams.permission import require_seams
from vllm_graft.seams.post_import import after_import
from vllm_graft.seams.wrap import BuiltClasses, around, build_instead, require_speculator
from vllm_graft.spec_decode.chunking.graph_fit import ask_workers, count_fitted, make_room
from vllm_graft.spec_decode.config.tree_config import NAME, TreeConfig
from vllm_graft.spec_decode.counts.tree_metrics import METRICS
from vllm_graft.spec_decode.grammars.tree_grammars import follow_trees, send_parents
from vllm_graft.spec_decode.models.drafts import (
    HOOK,
    chosen,
    draft_has_experts,
    has_model,
    is_block,
)
from vllm_graft.spec_decode.presets import tree_preset
from vllm_graft.spec_decode.presets.known_drafts import no_draft
from vllm_graft.spec_decode.presets.node_count import (
    count_nodes,
    fall_back,
    fill_in_depth,
    leave_to_stock,
)
from vllm_graft.spec_decode.refusals.tree_refusals import LATE, refusals
from vllm_graft.spec_decode.tuning.rank_agreement import follow_ranks, step_together
from vllm_graft.spec_decode.tuning.shapes import DENSE, NARROW, auto_schedule
from vllm_graft.spec_decode.verification.accepted_kv import count_accepted, hold_saves
from vllm_graft.spec_decode.worker_mends import (
    adapt_sampled_rows,
    cut_prompt_logprobs,
    follow_weights,
)

_CONFIG = "vllm.config.vllm"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
_ENGINE = "vllm.v1.engine.core"
_STRUCTURED_OUTPUT = "vllm.v1.structured_output"
_REQUESTS = "vllm.v1.engine.input_processor"

_NODES = 31
"""What a draft model is told to be asked for where there is none."""


class TreePart(Part):
    """Trees of drafts."""

    name = NAME
    asks_for = "tree drafts"
    flag = flag(NAME)
    metrics = METRICS

    def __init__(self) -> None:
        self.built = BuiltClasses("drafts")

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        return refusals()

    def install(self) -> None:
        after_import(_CONFIG, _hook_config)
        after_import(_SPECULATORS, self._hook_speculators)
        after_import(_SCHEDULER, _hook_scheduler)
        after_import(_GRAPHS, _hook_graphs)
        after_import(_ENGINE, _hook_engine)
        after_import(_STRUCTURED_OUTPUT, follow_trees)
        after_import(_REQUESTS, _hook_requests)

    def automatic(self, preset: Preset, vllm_config: Any) -> Offer | str:
        return tree_preset.offer(preset, vllm_config)

    def seams(self, asked: TreeConfig, vllm_config: Any) -> tuple[str, ...]:
        return tree_preset.rooms(vllm_config)

    def fill_in(self, asked: TreeConfig, vllm_config: Any) -> None:
        """Give vLLM the number of nodes, ``shape: auto`` its numbers, and prompts that are computed
        whole their room, unless the user did. Raises `ConfigError` if a depth and a number of nodes
        were given that don't go together."""
        speculative = vllm_config.speculative_config
        if speculative is None:
            return
        make_room(vllm_config)
        if is_block(asked, speculative):
            asked = fill_in_depth(asked, vllm_config)
        asked = fall_back(asked, vllm_config)
        if asked.nodes is not None:
            asked = count_nodes(asked, vllm_config)
        if asked.shape != "auto":
            return
        if speculative.num_speculative_tokens_per_batch_size is None:
            speculative.num_speculative_tokens_per_batch_size = auto_schedule(
                asked,
                speculative.num_speculative_tokens,
                vllm_config.scheduler_config.max_num_seqs,
                NARROW if draft_has_experts(asked, speculative) else DENSE,
                rests=not has_model(asked, speculative),
            )

    def refuses(self, asked: TreeConfig, vllm_config: Any) -> Iterator[str]:
        if vllm_config.speculative_config is None:
            yield no_draft(vllm_config, tokens=_NODES)
        else:
            yield from super().refuses(asked, vllm_config)

    def foresees(self, asked: TreeConfig, vllm_config: Any) -> Iterator[str]:
        yield from sentences(LATE, asked, vllm_config)

    def describe(self, asked: TreeConfig, vllm_config: Any) -> str:
        speculative = vllm_config.speculative_config
        offers = {
            "drafter": chosen(asked, speculative),
            "policy": manager.manager().choose(
                "graft_tree_policies", asked.policy, flag(NAME, "policy")
            ),
            "graph_runner": manager.manager().choose(
                "graft_draft_graph_runners", asked.graph_runner, flag(NAME, "graph_runner")
            ),
        }
        parts = [f"{key} {each.entry.name} ({each.provider})" for key, each in offers.items()]
        most = "up to " if asked.shape == "auto" else ""
        nodes = speculative.num_speculative_tokens
        narrow = most and draft_has_experts(asked, speculative)
        levels = "; narrow shapes, as the draft has experts" if narrow else ""
        shape = f"trees of {most}{nodes} nodes (topk {asked.topk}, steps {asked.steps}{levels})"
        if asked.topk == 1:
            shape = f"chains of {most}{nodes} tokens (topk 1), verified by the target's own layers"
        if asked.memory is not None:
            shape += f" with a memory of {human(int(asked.memory.bytes))}"
        return f"{shape}; {', '.join(parts)}"

    def verify(self, asked: TreeConfig, worker: Any, vllm_config: Any) -> None:
        """Check that the worker drafts with a class of ours; mend what only a loaded model has."""
        entry = chosen(asked, vllm_config.speculative_config).entry
        assert isinstance(entry, entries.Drafter)
        stock = entry.speculator.rpartition(":")[2]
        require_speculator(worker, self.built, self.flag, self.asks_for, stock)
        cut_prompt_logprobs(worker)
        send_parents(worker)
        count_fitted(worker)
        follow_weights(worker)
        hold_saves(worker)
        if step_together(vllm_config):
            follow_ranks(worker)
        if getattr(vllm_config, "lora_config", None) is not None:
            adapt_sampled_rows(worker)

    def speculator_class(self, stock: type[Any], vllm_config: Any) -> type[Any]:
        """The class to build for a speculator of vLLM's: ``stock`` itself without our section.

        Raises:
            SeamError: if this vLLM is not one that trees were written for.
            HookError: if the chosen drafter is not a subclass of ``stock``.
        """
        config = TreeConfig.from_vllm(vllm_config)
        if config is None:
            return stock
        manager.manager().tell(vllm_config)
        require_seams("core", NAME)
        entry = chosen(config, vllm_config.speculative_config).entry
        drafter: type[Any] = entry.resolve()
        if not (isinstance(drafter, type) and issubclass(drafter, stock)):
            raise HookError(
                f"{flag(NAME, 'drafter')}={entry.name}: {drafter!r} must be a subclass of vLLM's "
                f"{stock.__name__}"
            )
        return drafter

    def _hook_speculators(self, module: ModuleType) -> None:
        for offer in manager.manager().offers(HOOK):
            if isinstance(offer.entry, entries.Drafter):
                path, _, name = offer.entry.speculator.partition(":")
                after_import(path, functools.partial(self._hook_speculator, name))

    def _hook_speculator(self, name: str, module: ModuleType) -> None:
        build_instead(getattr(module, name, None), self.speculator_class, self.built.add)


def _hook_config(module: ModuleType) -> None:
    @around(module.VllmConfig, "_maybe_disable_dynamic_sd_for_data_parallel")
    def unless_trees(original: Any, self: Any) -> None:
        # Ranks that step together agree on the number of drafts of ours.
        if TreeConfig.from_vllm(self) is None:
            original(self)


def _hook_scheduler(module: ModuleType) -> None:
    @around(module.Scheduler, "__init__")
    def then_tune(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if TreeConfig.from_vllm(self.vllm_config) is not None:
            from vllm_graft.spec_decode.tuning.scheduling import tune

            # First: what a connector is told of a step comes behind all that changes the step.
            count_accepted(self)
            tune(self)


def _hook_engine(module: ModuleType) -> None:
    # It ends when the workers have captured their graphs, and before the scheduler is built.
    @around(module.EngineCore, "_initialize_kv_caches")
    def then_measure(original: Any, self: Any, vllm_config: Any) -> Any:
        leave_declined(self, vllm_config)
        result = original(self, vllm_config)
        config = TreeConfig.from_vllm(vllm_config)
        if config is None:
            return result
        if config.shape == "auto":
            from vllm_graft.spec_decode.drafters.tuner_seed import measure

            measure(self)
        if config.fit_prompts:
            ask_workers(self)
        if vllm_config.speculative_config is not None:
            from vllm_graft.spec_decode.lookup.served_references import carry_references

            carry_references(self, config, vllm_config)
        return result


def leave_declined(core: Any, vllm_config: Any) -> None:
    """Make an engine core one without trees if its workers have declined those of a preset."""
    if TreeConfig.from_vllm(vllm_config) is None or Decision.from_vllm(vllm_config) is None:
        return
    if any(core.collective_rpc(drafts_stock)):
        leave_to_stock(vllm_config)


def drafts_stock(worker: Any) -> bool:
    """Runs in each worker: whether its drafter has become vLLM's own."""
    from vllm_graft.spec_decode.drafters.draft_trees import StockChain

    return isinstance(worker.model_runner.speculator, StockChain)


def _hook_requests(module: ModuleType) -> None:
    @around(module.InputProcessor, "__init__")
    def then_admit(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if gave_drafts(vllm_config):
            # vLLM refuses `min_p` and `logit_bias` beside drafts. The user asked for none, and
            # each node of a tree is sampled from its own logits, which both change.
            self.speculative_config = None


def _hook_graphs(module: ModuleType) -> None:
    @around(module.CudaGraphManager, "_init_candidates")
    def then_plan(original: Any, self: Any) -> None:
        original(self)
        plan_graphs(self, of_target=isinstance(self, module.ModelCudaGraphManager))


def plan_graphs(graphs: Any, *, of_target: bool) -> None:
    """Plan the target's graphs for all numbers of nodes that are chosen among, and mixed ones."""
    config = TreeConfig.from_vllm(graphs.vllm_config)
    speculative = graphs.vllm_config.speculative_config
    if config is None or speculative is None:
        return
    # Graphs of a draft's levels have other rows than a query of the target; those of a draft
    # model's first pass have one more.
    if graphs.decode_query_len != speculative.num_speculative_tokens + 1:
        return
    if config.shape == "auto":
        from vllm_graft.graph_runners.language.widths import plan_widths
        from vllm_graft.spec_decode.tuning.scheduling import graph_counts

        plan_widths(graphs, graph_counts(graphs.vllm_config))
    # The draft has one layer: in a mixed batch it is launched, as ever. A chain is verified by
    # vLLM's own attention, whose graphs of mixed batches are vLLM's matter.
    if of_target and config.topk > 1:
        from vllm_graft.graph_runners.language.mixed import plan_mixed_graphs

        plan_mixed_graphs(graphs, config.mixed_graphs, flag(NAME, "mixed_graphs"))


TREES = TreePart()
