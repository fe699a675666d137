"""Kimi Linear, whose layers have KDA or MLA: trees answer as the target alone does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.text_requests import both_kinds
from tests.support.engines.kimi_layers import interpreted
from tests.support.engines.recorded_engine import recorded_engine
from tests.support.engines.spoilt_rows import first_rows, in_order
from tests.support.models.kimi_models import RANK, ROPE, write_kimi_linear
from tests.support.models.recurrent_models import draft_shape
from tests.support.models.table_drafter import table_trees
from tests.support.watches import count_launches
from vllm_graft.plan.memory import memory_of
from vllm_graft.spec_decode.targets.families import UnchangedState
from vllm_graft.spec_decode.targets.latent.latent_layer import LatentFamily, TreeKimiLatents
from vllm_graft.spec_decode.targets.recurrent import recurrent_family, recurrent_layer
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import RecurrentFamily
from vllm_graft.spec_decode.targets.recurrent.recurrent_kinds import TreeKeyDecays
from vllm_graft.testing import cpu_engine, greedy, model_runner, spec_metrics, write_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 60)), [11]]
"""The last one is padded with placeholders for drafts, as others run when it comes."""

TOKENS = 12
STATE = (3 * 2 * 16 * (3 + 7) + 2 * 16 * 16) * 4
"""Bytes of the layer with KDA per verified row: windows of ten inputs, and two heads' states."""

FORMS = ["inputs", pytest.param("states", marks=pytest.mark.nightly)]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with interpreted():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi_linear(tmp_path_factory.mktemp("kimi"), layers=2)


def options(**more: Any) -> dict[str, Any]:
    # CPU_MLA has no blocks of the size that recurrent layers need; TRITON_MLA is interpreted.
    # Others wait for one of the first two: their prompts meet trees.
    usual = {"max_model_len": 128, "max_num_seqs": 2, "skip_tokenizer_init": True}
    return usual | {"attention": "triton", "enable_prefix_caching": False} | more


def trees(draft: Path | None = None, form: str = "auto", **more: Any) -> dict[str, Any]:
    """Options of an engine whose drafts come from the table, as n-grams or a head's would."""
    return options(**table_trees(draft, recurrent=True, recurrent_form=form), **more)


def answers(llm: Any) -> list[list[int]]:
    """Tokens of greedy and of seeded requests."""
    return both_kinds(llm, PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def alone(target: Path) -> list[list[int]]:
    with interpreted(), cpu_engine(target, **options()) as llm:
        return answers(llm)


@pytest.fixture(autouse=True)
def table(alone: list[list[int]], learn: Any) -> None:
    """Drafts from a table of the target's tokens are accepted far more than n-grams."""
    learn(alone)


def grafted(layer: Any, name: str) -> Any:
    """What stands in place of a method, beneath what breaks a graph for it."""
    found = getattr(layer, name, None)
    return getattr(found, "__wrapped__", found)


def check_layers(llm: Any) -> None:
    layers = model_runner(llm).vllm_config.compilation_config.static_forward_context.values()
    ours = [grafted(layer, name) for layer in layers for name in ("_forward", "_attention")]
    assert sum(isinstance(each, TreeKeyDecays) for each in ours) == 1
    assert sum(isinstance(each, TreeKimiLatents) for each in ours) == 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel of KDA was launched."""
    return count_launches(monkeypatch, recurrent_layer, "tree_recurrence", "tree_chunk")


@pytest.mark.parametrize("form", FORMS)
def test_trees_answer_as_the_target_alone(
    form: str, target: Path, alone: list[list[int]], launches: dict[str, int]
) -> None:
    with cpu_engine(target, **trees(form=form)) as llm:
        assert answers(llm) == alone
        check_layers(llm)
        planned = {row.what: row.num_bytes for row in memory_of(llm.llm_engine.vllm_config)[0]}
        held = model_runner(llm).speculator.context.kept_bytes
        assert bool(held) is (form == "inputs")
        assert planned.get("inputs of tree rows", 0) == held
        # One layer has latents in float32, for which a request needs no state.
        assert planned["K/V of the target"] == (RANK + ROPE) * 4
        assert planned["recurrent state of the target"] == 8 * STATE
        runner, metrics = model_runner(llm), spec_metrics(llm)
        assert runner.speculator.context.counters.mixed_launches
        assert runner.speculator.context.counters.tree_launches
    assert metrics.accepted_tokens > metrics.drafts
    assert bool(launches["tree_chunk"]) is (form == "inputs")
    assert bool(launches["tree_recurrence"]) is (form == "states")


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["inputs", "states"])
def test_full_graphs_hold_both_kinds_of_layers(
    form: str, target: Path, alone: list[list[int]]
) -> None:
    with recorded_engine(target, **trees(form=form, graphs=[8, 16])) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) == alone[:2]
        assert model_runner(llm).speculator.context.counters.tree_replays
        check_layers(llm)


@pytest.mark.nightly
def test_forms_take_turns(target: Path, alone: list[list[int]], launches: dict[str, int]) -> None:
    """One request at a time has seven drafts, two have one each: then the rows leave states."""
    more = trees()
    more["speculative_config"]["num_speculative_tokens_per_batch_size"] = [(1, 1, 7), (2, 2, 1)]
    more["additional_config"]["graft"]["tree"]["shape"] = "auto"
    with cpu_engine(target, **more) as llm:
        assert answers(llm) == alone
    assert launches["tree_chunk"]
    assert launches["tree_recurrence"]


@pytest.mark.nightly
def test_a_head_drafts(tmp_path: Path, learn: Any) -> None:
    """An EAGLE-3 head brings a layer of a third kind, plain attention."""
    target = write_kimi_linear(tmp_path / "target")
    draft = write_eagle3(tmp_path / "head", draft_shape())
    with cpu_engine(target, **options()) as llm:
        expected = greedy(llm, PROMPTS[:3], TOKENS)
    learn(expected)
    with cpu_engine(target, **trees(draft)) as llm:
        assert greedy(llm, PROMPTS[:3], TOKENS) == expected
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["inputs", "states"])
@pytest.mark.parametrize("spoilt", ["commit", "latents", "parents"])
def test_answers_differ_without(
    form: str, spoilt: str, target: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: what is accepted stays where it is, or each row follows the one before."""
    if spoilt == "commit":
        monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    elif spoilt == "latents":
        monkeypatch.setattr(LatentFamily, "state", lambda *_: UnchangedState())
    else:
        name = "tree_recurrence" if form == "states" else "tree_chunk"
        monkeypatch.setattr(recurrent_layer, name, in_order(getattr(recurrent_layer, name)))
    with cpu_engine(target, **trees(form=form)) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) != alone[:2]


@pytest.mark.nightly
def test_answers_differ_without_accepted_inputs(
    target: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the state is continued by the first rows, whatever was accepted."""
    spoilt = first_rows(recurrent_family.fold_states)
    monkeypatch.setattr(recurrent_family, "fold_states", spoilt)
    with cpu_engine(target, **trees()) as llm:
        assert greedy(llm, PROMPTS[:2], TOKENS) != alone[:2]
