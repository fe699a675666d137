"""Engines that drop nodes at random: tokens stay the target's, and no more experts are read."""

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.real_pair import mixture
from tests.support.answers.text_requests import both_kinds
from tests.support.engines.pairs import Answer, Pair, Request, answer_all, crowded, differing
from tests.support.engines.recurrent_layers import interpreted
from tests.support.models.mtp_targets import write_glm4_moe
from tests.support.models.recurrent_models import write_qwen3_next
from tests.support.step_work import counting
from vllm_graft.base.errors import ConfigError
from vllm_graft.seams.wrap import around
from vllm_graft.spec_decode.tuning.drops import KEEP_ALL, Drops
from vllm_graft.testing import cpu_engine, model_runner, spec_metrics

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
def prices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Another price in each step, of all nodes or of few."""
    drawn, asked = random.Random(0), list[tuple[float, float]]()

    def price(drops: Drops, size: int, batch: int) -> tuple[float, float]:
        asked.append((drawn.choice([0.0, 1.0, 2.0, 4.0, 1e6]), -drawn.uniform(0.05, 0.5)))
        return asked[-1]

    monkeypatch.setattr(Drops, "price", price)
    monkeypatch.setattr(Drops, "nodes", lambda _, __, allowed: drawn.choice(allowed))
    return asked


def test_a_mixture_answers_as_the_dense_target(
    mixed: Pair, samples: list[Request], expected: list[Answer]
) -> None:
    with mixed.engine() as llm:
        assert not differing(answer_all(llm, samples), expected)


@pytest.mark.parametrize("options", [{"max_num_seqs": 3}, crowded(blocks=14)])
def test_tokens_are_those_of_the_target_alone(
    mixed: Pair,
    samples: list[Request],
    expected: list[Answer],
    prices: list[tuple[float, float]],
    options: dict[str, Any],
) -> None:
    with mixed.engine(nodes=NODES, tree=AUTO, **options) as llm:
        assert not differing(answer_all(llm, samples), expected)
        context = model_runner(llm).speculator.context
        kept, verified = int(context.drop.kept), context.counters.nodes_verified
        assert spec_metrics(llm).acceptance_length > 1.1
    assert len(set(prices)) > 10
    assert 0.05 * verified < kept < 0.8 * verified


def test_grammars_do_not_see_dropped_nodes(mixed: Pair, prices: list[tuple[float, float]]) -> None:
    forms = map(
        StructuredOutputsParams, (None,) * 3, ["[a-z ]{8,40}", "(if|return) [a-z]+", "[0-9]+"]
    )
    ask = [
        Request(text, {"max_tokens": 12, "temperature": 0, "structured_outputs": form})
        for text, form in zip(mixed.prompts, forms)
    ]
    options: dict[str, Any] = {"max_num_seqs": 3}
    with mixed.engine(**options) as llm:
        alone = answer_all(llm, ask)
    with mixed.engine(nodes=NODES, tree=AUTO, **options) as llm:
        assert not differing(answer_all(llm, ask), alone)
    assert prices


def count_copies(runner: Any, logits: dict[int, torch.Tensor]) -> int:
    """Compare the experts of a step's dropped rows with their root's; return how many were."""
    context = runner.speculator.context
    starts, depths = context.step.batch.query_start_loc.tolist(), context.rows.row_depths
    found = 0
    for first, last in itertools.pairwise(starts):
        if last - first - 1 not in runner.speculator.trees.plans:
            continue  # It is a prompt.
        nodes = torch.arange(first + 1, last)
        copies, others = nodes[depths[nodes] == 0], nodes[depths[nodes] > 0]
        chosen = torch.stack([each.topk(EACH).indices.sort().values for each in logits.values()])
        assert (chosen[:, copies] == chosen[:, first, None]).all()
        # Control: other nodes ask for others.
        assert len(others) < 4 or (chosen[:, others] != chosen[:, first, None]).any()
        found += len(copies)
    return found


def test_dropped_rows_ask_for_the_root_s_experts(
    mixed: Pair, samples: list[Request], prices: list[tuple[float, float]]
) -> None:
    logits, counted = dict[int, torch.Tensor](), list[int]()
    with mixed.engine(nodes=NODES, tree=AUTO, max_num_seqs=3) as llm:
        runner = model_runner(llm)
        for number, layer in enumerate(runner.model.model.layers):
            layer.mlp.gate.register_forward_hook(
                lambda _, __, output, n=number: logits.__setitem__(n, output[0].clone())
            )

        @around(runner.rejection_sampler, "walk")
        def then_compare(walk: Any, *args: Any) -> None:
            walk(*args)
            counted.append(count_copies(model_runner(llm), logits))

        del runner
        answer_all(llm, samples[:3])
    assert sum(counted) > 50
    assert prices


def test_a_price_costs_no_wait(mixed: Pair, prices: list[tuple[float, float]]) -> None:
    """A step with another price launches one copy more than one without the key."""
    ask, found = [Request(mixed.prompts[0], {"temperature": 0, "max_tokens": 40})], {}
    options: dict[str, Any] = {"max_num_seqs": 1, "graphs": [1, 2, 4, 8, 16]}
    for drop in (False, True):
        tree = AUTO | {"drop": drop}
        with (
            mixed.engine(nodes=3, tree=tree, **options) as llm,
            counting(model_runner(llm)) as steps,
        ):
            answer_all(llm, ask)
        found[drop] = [step for step in steps if step.launches["_walk_kernel"]]
    usual = {drop: max(steps, key=steps.count) for drop, steps in found.items()}
    assert usual[True].launches == usual[False].launches
    more = usual[True].operators - usual[False].operators
    assert sum(more.values()) <= 2
    assert KEEP_ALL not in prices


MIXTURES = {
    "glm": (write_glm4_moe, {"from_states": 0.2}, {}),
    "states": (write_qwen3_next, {}, {"recurrent_form": "states"}),
    "inputs": (write_qwen3_next, {}, {"recurrent_form": "inputs"}),
}


@pytest.mark.parametrize(
    "kind", ["glm", "inputs", pytest.param("states", marks=pytest.mark.nightly)]
)
def test_tokens_of_other_mixtures(
    kind: str, tmp_path: Path, prices: list[tuple[float, float]]
) -> None:
    """Experts that differ, chosen by groups; and layers with recurrent states, of both forms."""
    write, sizes, form = MIXTURES[kind]
    folder, prompts = write(tmp_path, **sizes), [[7, 3, 9, 30, 2], [5] * 40, [*range(1, 60)], [11]]
    speculative = {"method": "mtp", "model": str(folder), "num_speculative_tokens": 7}
    tree = {"topk": 2, "steps": 4, **AUTO, **form}
    options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 128, "skip_tokenizer_init": True}
    with interpreted():
        with cpu_engine(folder, **options) as llm:
            alone = both_kinds(llm, prompts, 12)
        drafts = {"speculative_config": speculative, "additional_config": {"graft": {"tree": tree}}}
        with cpu_engine(folder, **options, **drafts) as llm:
            assert both_kinds(llm, prompts, 12) == alone
            context = model_runner(llm).speculator.context
            assert 0 < int(context.drop.kept) < context.counters.nodes_verified
    assert prices


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"drop": True}, "shape is 'fixed'"),
        ({"drop": True, "shape": "auto", "topk": 1}, "topk is 1"),
        (AUTO, "the target has no experts"),
        ({**AUTO, "topk": 3, "steps": 3}, "nothing but n-grams drafts"),
    ],
)
def test_what_cannot_drop_is_refused(
    pair: Pair, mixed: Pair, tree: dict[str, Any], says: str
) -> None:
    which = pair if tree is AUTO else mixed
    method = "ngram_gpu" if "n-grams" in says else "eagle3"
    lengths = {"prompt_lookup_min": 1, "prompt_lookup_max": 6} if "n-grams" in says else {}
    asked = which.engine(nodes=3, tree=tree, method=method, speculative=lengths)
    with pytest.raises(ConfigError, match=says), asked:
        pass
