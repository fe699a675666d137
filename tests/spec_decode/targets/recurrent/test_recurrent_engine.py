"""Targets with recurrent layers: trees answer as the target alone does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.text_requests import both_kinds
from tests.support.engines.cache_engines import metrics as cache_metrics
from tests.support.engines.cache_engines import transfer
from tests.support.engines.pairs import counter
from tests.support.engines.recurrent_layers import interpreted
from tests.support.engines.spoilt_rows import first_rows, in_order
from tests.support.models.recurrent_models import (
    draft_shape,
    write_falcon_h1,
    write_granite_hybrid,
    write_nemotron_h,
    write_qwen3_next,
)
from tests.support.watches import count_launches
from vllm_graft.plan.memory import memory_of
from vllm_graft.spec_decode.targets.families import UnchangedState
from vllm_graft.spec_decode.targets.recurrent import (
    delta_layer,
    recurrent_family,
    recurrent_layer,
)
from vllm_graft.spec_decode.targets.recurrent.mamba_layer import TreeSelectiveState
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import RecurrentFamily
from vllm_graft.spec_decode.tuning import graph_fit
from vllm_graft.testing import cpu_engine, greedy, model_runner, spec_metrics, write_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 60)), [11]]
"""The last one is padded with placeholders for drafts, as others run when it comes."""

TOKENS = 12
LONG, LONG_TOKENS = list(range(100, 159)), 48
"""A prompt that ends before the second block does, and tokens that fill this block and the next."""

TREE = {"topk": 2, "steps": 4, "recurrent": True}
FORMS = ["inputs", pytest.param("states", marks=pytest.mark.nightly)]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with interpreted():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_next(tmp_path_factory.mktemp("recurrent"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle3(tmp_path_factory.mktemp("head"), draft_shape())


def options(**more: Any) -> dict[str, Any]:
    # Others wait for one of the first two: their prompts meet trees.
    return {"max_model_len": 128, "max_num_seqs": 2, "skip_tokenizer_init": True, **more}


def trees(
    draft: Path | None, nodes: int = 7, method: str = "mtp", form: str = "auto", **more: Any
) -> dict[str, Any]:
    """Options of an engine whose drafts come from the table, or without a draft from MTP."""
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": nodes}
    tree: dict[str, Any] = TREE | {"recurrent_form": form}
    if method == "ngram":
        speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        tree["drafter"] = "table_alone"
    if draft is not None:
        speculative |= {"method": "eagle3", "model": str(draft)}
        tree["drafter"] = "table"
    given = {"speculative_config": speculative, "additional_config": {"graft": {"tree": tree}}}
    return options(**given, **more)


def answers(llm: Any) -> list[list[int]]:
    """Tokens of greedy and of seeded requests."""
    return both_kinds(llm, PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def both(target: Path) -> tuple[list[list[int]], list[int]]:
    with interpreted(), cpu_engine(target, **options()) as llm:
        return answers(llm), greedy(llm, [LONG], LONG_TOKENS)[0]


@pytest.fixture(scope="module")
def alone(both: tuple[list[list[int]], list[int]]) -> list[list[int]]:
    return both[0]


@pytest.fixture(scope="module")
def long(both: tuple[list[list[int]], list[int]]) -> list[int]:
    return both[1]


@pytest.fixture
def table(alone: list[list[int]], long: list[int], learn: Any) -> None:
    """Drafts from a table of the target's tokens are accepted far more than a random head's."""
    learn([*alone, long])


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("form", FORMS)
def test_trees_answer_as_the_target_alone(
    form: str,
    target: Path,
    draft: Path,
    alone: list[list[int]],
    launches: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tree beside the prompt of 40 tokens keeps 3 of 7 nodes."""
    monkeypatch.setattr(graph_fit, "graph_rows", lambda *_: 44)
    with cpu_engine(target, **trees(draft, form=form)) as llm:
        assert answers(llm) == alone
        runner, metrics = model_runner(llm), spec_metrics(llm)
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        cores = [getattr(layer, "_forward_core", None) for layer in layers]
        assert sum(isinstance(core, delta_layer.TreeDeltaRule) for core in cores) == 2
        counters = runner.speculator.context.counters
        assert counters.mixed_launches
        assert counters.cut_steps
        assert counters.tree_launches
        planned = {row.what: row.num_bytes for row in memory_of(llm.llm_engine.vllm_config)[0]}
        assert planned.get("inputs of tree rows", 0) == runner.speculator.context.kept_bytes
    assert metrics.accepted_tokens > metrics.drafts
    assert bool(launches["tree_chunk"]) is (form == "inputs")
    assert bool(launches["tree_recurrence"]) is (form == "states")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel of the gated delta rule was launched, layers told apart."""
    return count_launches(monkeypatch, recurrent_layer, "tree_recurrence", "tree_chunk")


@pytest.mark.nightly
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("form", ["inputs", "states"])
def test_states_by_prefix_and_graphs(form: str, target: Path, draft: Path, long: list[int]) -> None:
    """States move on from block to block while trees are verified; FULL graphs hold the kernels."""
    more = {"enable_prefix_caching": True, "graphs": [1, 2, 8, 16], "block_size": 32}
    with cpu_engine(target, **trees(draft, form=form, **more)) as llm:
        assert model_runner(llm).vllm_config.cache_config.mamba_cache_mode == "align"
        assert greedy(llm, [LONG], LONG_TOKENS) == [long]
        for _ in range(2):
            assert greedy(llm, [LONG + long[:40]], 8) == [long[40:]]
        # The first two of three full blocks are taken: speculation leaves out the last one.
        assert counter(llm, "vllm:prefix_cache_hits") == 64
        assert model_runner(llm).speculator.context.counters.tree_replays
        assert spec_metrics(llm).acceptance_length > 2


@pytest.mark.nightly
@pytest.mark.usefixtures("table")
def test_forms_take_turns(
    target: Path, draft: Path, alone: list[list[int]], launches: dict[str, int]
) -> None:
    """One request at a time has seven drafts, two have one each: then the rows leave states."""
    more = trees(draft)
    more["speculative_config"]["num_speculative_tokens_per_batch_size"] = [(1, 1, 7), (2, 2, 1)]
    more["additional_config"]["graft"]["tree"]["shape"] = "auto"
    with cpu_engine(target, **more) as llm:
        assert answers(llm) == alone
    assert launches["tree_chunk"]
    assert launches["tree_recurrence"]


@pytest.mark.nightly
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_states_come_back_from_the_host(
    load: str, target: Path, draft: Path, long: list[int]
) -> None:
    """The host cache has K/V and states that trees have left at the ends of blocks."""
    more = {"enable_prefix_caching": True, "block_size": 32}
    with cpu_engine(target, **trees(draft, kv_transfer_config=transfer(load=load), **more)) as llm:
        assert greedy(llm, [LONG], LONG_TOKENS) == [long]
        assert greedy(llm, [LONG + long[:40]], 8) == [long[40:]]
        # With async scheduling vLLM frees the last blocks a step late.
        while not llm.reset_prefix_cache():
            llm.llm_engine.step()
        assert counter(llm, "vllm:external_prefix_cache_hits") == 0
        assert greedy(llm, [LONG + long[:40]], 8) == [long[40:]]
        # Speculation leaves out the last of three full blocks, on the host as on the device.
        assert counter(llm, "vllm:external_prefix_cache_hits") == 64
        assert cache_metrics(llm)["hit_tokens_host"] == 64
        assert counter(llm, "vllm:prefix_cache_hits") == 0


@pytest.mark.nightly
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("form", "spoilt"), [("states", "commit"), ("states", "parents"), ("inputs", "parents")]
)
def test_answers_differ_without(
    form: str,
    spoilt: str,
    target: Path,
    draft: Path,
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative controls: accepted states stay where they are, or rows follow the one before."""
    if spoilt == "commit":
        monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    else:
        name = "tree_recurrence" if form == "states" else "keep_rows"
        monkeypatch.setattr(recurrent_layer, name, in_order(getattr(recurrent_layer, name)))
    with cpu_engine(target, **trees(draft, form=form)) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) != alone[:2]


@pytest.mark.nightly
@pytest.mark.usefixtures("table")
def test_answers_differ_without_accepted_inputs(
    target: Path, draft: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the state is continued by the first rows, whatever was accepted."""
    spoilt = first_rows(recurrent_family.fold_states)
    monkeypatch.setattr(recurrent_family, "fold_states", spoilt)
    with cpu_engine(target, **trees(draft)) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) != alone[:2]


@pytest.mark.nightly
def test_the_target_s_own_module_drafts(target: Path, alone: list[list[int]]) -> None:
    """Its drafts are wrong, as its weights are random: every step goes on from the root's state."""
    with cpu_engine(target, **trees(None, nodes=3)) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) == alone[:2]
        assert type(model_runner(llm).speculator).__name__ == "MtpTrees"


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nemotron_h(tmp_path_factory.mktemp("mamba"))


@pytest.mark.nightly
def test_mamba_2_answers_as_the_target_alone(
    mamba: Path, tmp_path: Path, learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefix caching is off: vLLM's CPU then has no states at the ends of blocks."""
    more = {"enable_prefix_caching": False}
    with cpu_engine(mamba, **options(**more)) as llm:
        alone = answers(llm)
    learn(alone)
    draft = write_eagle3(tmp_path / "head", draft_shape(layers=6))
    with cpu_engine(mamba, **trees(draft, **more)) as llm:
        assert answers(llm) == alone
        runner, metrics = model_runner(llm), spec_metrics(llm)
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        scans = [getattr(layer, "conv_ssm_forward", None) for layer in layers]
        assert sum(isinstance(scan, TreeSelectiveState) for scan in scans) == 2
        planned = {row.what: row.num_bytes for row in memory_of(llm.llm_engine.vllm_config)[0]}
        assert planned["inputs of tree rows"] == runner.speculator.context.kept_bytes > 0
        assert runner.speculator.context.counters.mixed_launches
    assert metrics.accepted_tokens > metrics.drafts
    with cpu_engine(mamba, **trees(draft, graphs=[8, 16], **more)) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) == alone[:2]
        assert model_runner(llm).speculator.context.counters.tree_replays
    with cpu_engine(mamba, **trees(draft, form="states", **more)) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) == alone[:2]
        assert model_runner(llm).speculator.context.kept_bytes == 0
    # Negative control: accepted states stay where they are.
    monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    with cpu_engine(mamba, **trees(draft, **more)) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) != alone[:2]


@pytest.mark.nightly
@pytest.mark.parametrize("write", [write_falcon_h1, write_granite_hybrid])
def test_mamba_2_without_a_draft_model(
    write: Callable[[Path], Path], tmp_path: Path, learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM has no EAGLE for these models; n-grams, and here a table, draft for them."""
    target, more = write(tmp_path / "target"), {"enable_prefix_caching": False}
    with cpu_engine(target, **options(**more)) as llm:
        alone = answers(llm)
    learn(alone)
    drafting = trees(None, method="ngram", **more)
    with cpu_engine(target, **drafting) as llm:
        assert answers(llm) == alone
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts
    # Negative control: accepted states stay where they are.
    monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    with cpu_engine(target, **drafting) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) != alone[:2]
