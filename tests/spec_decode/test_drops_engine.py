"""Engines that drop nodes hard and at random: tokens stay the target's, and experts are not read."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.real_pair import mixture
from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing
from tests.support.step_work import counting
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.tuning.drops import KEEP_ALL, Drops
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

NODES, EXPERTS, EACH = 15, 16, 2
AUTO = {"shape": "auto", "drop": True}


@pytest.fixture(scope="module")
def mixed(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The pair with a mixture of experts that computes what the dense target computes."""
    folder = tmp_path_factory.mktemp("mixture")
    shutil.copytree(Path(pair.target).parent, folder, dirs_exist_ok=True)
    mixture.upcycle(folder / "target", EXPERTS, EACH)
    mixture.register()
    return Pair.load(folder)


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, float]]]:
    """Another price in each step, of all nodes or of few."""
    drawn, asked = random.Random(0), list[tuple[float, float]]()

    def price(drops: Drops, batch: int, pace: float) -> tuple[float, float]:
        asked.append((drawn.choice([0.0, 1.0, 2.0, 4.0, 1e6]), -drawn.uniform(0.05, 0.5)))
        return asked[-1]

    monkeypatch.setattr(Drops, "price", price)
    monkeypatch.setattr(Drops, "begin_block", lambda *_: True)
    yield asked


def test_a_mixture_answers_as_the_dense_target(
    mixed: Pair, samples: list[Request], expected: list[Answer]
) -> None:
    with mixed.engine() as llm:
        assert not differing(answer_all(llm, samples), expected)


@pytest.mark.parametrize("dense", [False, True])
def test_tokens_are_those_of_the_target_alone(
    mixed: Pair,
    samples: list[Request],
    expected: list[Answer],
    prices: list[tuple[float, float]],
    dense: bool,
) -> None:
    options: dict[str, Any] = {"max_num_seqs": 3, "async_scheduling": not dense}
    with mixed.engine(nodes=NODES, tree=AUTO, **options) as llm:
        assert not differing(answer_all(llm, samples), expected)
        context = model_runner(llm).speculator.context
        kept, verified = int(context.drop.kept), context.counters.nodes_verified
        assert spec_metrics(llm).acceptance_length > 1.1
    assert len(set(prices)) > 10
    assert 0.05 * verified < kept < 0.8 * verified


def test_grammars_do_not_see_dropped_nodes(
    mixed: Pair, prices: list[tuple[float, float]]
) -> None:
    ask = [
        Request(text, {"max_tokens": 12, "temperature": 0, "structured_outputs": {"regex": regex}})
        for text, regex in zip(mixed.prompts, ["[a-z ]{8,40}", "(import|return) [a-z]+", "[0-9]+"])
    ]
    options: dict[str, Any] = {"max_num_seqs": 3}
    with mixed.engine(**options) as llm:
        alone = answer_all(llm, ask)
    with mixed.engine(nodes=NODES, tree=AUTO, **options) as llm:
        assert not differing(answer_all(llm, ask), alone)
    assert prices


def test_dropped_rows_ask_for_the_root_s_experts(
    mixed: Pair, samples: list[Request], prices: list[tuple[float, float]]
) -> None:
    logits, compared = dict[int, torch.Tensor](), 0
    with mixed.engine(nodes=NODES, tree=AUTO, max_num_seqs=3) as llm:
        runner = model_runner(llm)
        layers, context = runner.model.model.layers, runner.speculator.context
        for number, layer in enumerate(layers):
            layer.mlp.gate.register_forward_hook(
                lambda _, __, output, n=number: logits.__setitem__(n, output[0].clone())
            )
        walk = runner.rejection_sampler.walk

        def then_compare(*args: Any) -> None:
            nonlocal compared
            walk(*args)
            batch, rows = context.step.batch, context.rows
            starts = batch.query_start_loc.tolist()
            for first, last in zip(starts, starts[1:]):
                drafts = last - first - 1
                if drafts not in runner.speculator.trees.plans:
                    continue
                own = torch.arange(first, last)
                copies = own[1:][rows.row_depths[own[1:]] == 0]
                others = own[1:][rows.row_depths[own[1:]] > 0]
                for each in logits.values():
                    chosen = each.topk(EACH, dim=-1).indices.sort(-1).values
                    assert (chosen[copies] == chosen[first]).all()
                    compared += len(copies)
                # Control: other nodes ask for others.
                if len(others) > 3:
                    assert (chosen[others] != chosen[first]).any()

        runner.rejection_sampler.walk = then_compare
        answer_all(llm, samples[:3])
        del runner, layers, context, walk
    assert compared > 100


def test_a_price_costs_no_wait(
    mixed: Pair, prices: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with another price launches one copy more than one without the key."""
    ask, found = [Request(mixed.prompts[0], {"temperature": 0, "max_tokens": 40})], {}
    options: dict[str, Any] = {"max_num_seqs": 1, "graphs": [1, 2, 4, 8, 16]}
    for drop in (False, True):
        with mixed.engine(nodes=3, tree=AUTO | {"drop": drop}, **options) as llm:
            with counting(model_runner(llm)) as steps:
                answer_all(llm, ask)
        found[drop] = [step for step in steps if step.launches["_walk_kernel"]]
    usual = {drop: max(steps, key=steps.count) for drop, steps in found.items()}
    assert usual[True].launches == usual[False].launches
    more = usual[True].operators - usual[False].operators
    assert sum(more.values()) <= 2
    assert KEEP_ALL not in prices


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"drop": True}, "shape is 'fixed'"),
        ({"drop": True, "shape": "auto", "topk": 1}, "topk is 1"),
        (AUTO, "the target has no experts"),
    ],
)
def test_what_cannot_drop_is_refused(
    pair: Pair, mixed: Pair, tree: dict[str, Any], says: str
) -> None:
    which = pair if tree is AUTO else mixed
    with pytest.raises(ConfigError, match=says), which.engine(nodes=3, tree=tree):
        pass
