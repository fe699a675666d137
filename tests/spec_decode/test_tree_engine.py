"""Real engines: trees and chains change how fast tokens come, never which; limits, sleep mode."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams, TokensPrompt

from tests.support.engines.pairs import (
    Answer,
    Pair,
    Request,
    answer_all,
    counter,
    crowded,
    differing,
    scheduling,
)
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.window_models import with_windows
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.drafters import tree_drafting
from vllm_graft.spec_decode.presets import node_count
from vllm_graft.spec_decode.refusals import tree_refusals
from vllm_graft.spec_decode.targets.dense import layer as dense_layer
from vllm_graft.spec_decode.targets.dense.layer import TreeAttentionMixin
from vllm_graft.spec_decode.verification import context
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("nodes", "topk", "steps"), [(31, 8, 6), pytest.param(63, 4, 7, marks=pytest.mark.nightly)]
)
def test_tokens_are_those_of_the_target_alone(
    pair: Pair, samples: list[Request], expected: list[Answer], nodes: int, topk: int, steps: int
) -> None:
    options: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 512}
    with pair.engine(nodes=nodes, topk=topk, steps=steps, **options) as llm:
        assert not differing(answer_all(llm, samples[:2]), expected[:2])
        assert spec_metrics(llm).acceptance_length > 1.5


def test_tokens_hold_when_crowded(
    pair: Pair, samples: list[Request], expected: list[Answer]
) -> None:
    """Chunked prefill, prefix caching, async scheduling and preemption, all at once."""
    with pair.engine(nodes=15, **crowded(blocks=14)) as llm:
        core: Any = llm.llm_engine.engine_core
        assert type(core.engine_core.scheduler).__name__ == "AsyncScheduler"
        del core
        with scheduling(llm) as seen:
            assert not differing(answer_all(llm, samples), expected)
        assert seen.prompt_chunks > 0
        assert seen.chunks_beside_drafts > 0
        assert seen.preempted > 0
        assert counter(llm, "vllm:prefix_cache_hits") > 0


def test_without_compaction_or_mask_tokens_differ(
    pair: Pair, samples: list[Request], expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: accepted K/V stays where it was, or each node sees every other one."""
    prepare_rows = context.prepare_rows

    def unmasked(*args: Any, **kwargs: Any) -> None:
        prepare_rows(*args, **kwargs)
        args[3].row_masks.fill_(-1)

    spoilt = (
        (dense_layer, "compact_kv", lambda *args, **kwargs: None),
        (context, "prepare_rows", unmasked),
    )
    with pair.engine(nodes=15) as llm:
        for module, name, instead in spoilt:
            assert llm.reset_prefix_cache()
            with monkeypatch.context() as patch:
                patch.setattr(module, name, instead)
                assert differing(answer_all(llm, samples[:3]), expected[:3])


@pytest.mark.slow
def test_triton_kernels_serve_the_engine(
    pair: Pair, samples: list[Request], expected: list[Answer]
) -> None:
    """The path of a GPU runs without one: Triton kernels, recorded FULL graphs, padded batches."""
    short = [Request(each.prompt, {**each.params, "max_tokens": 8}) for each in samples[2:5]]
    # Two requests have 32 rows in the target, and 8 rows in a level of the draft.
    with pair.engine(nodes=15, attention="triton", graphs=[8, 16, 32], max_num_seqs=2) as llm:
        found = [answer.tokens[0] for answer in answer_all(llm, short)]
        assert found == [answer.tokens[0][:8] for answer in expected[2:5]]
        runner = model_runner(llm)
        target = runner.cudagraph_manager.graphs.values()
        levels = runner.speculator.draft_graphs()
        assert sum(graph.replays for graph in target) > 0
        assert sum(graph.replays for graph in levels) > 0
        del runner, target, levels


def test_no_key_no_change(pair: Pair) -> None:
    """Stock vLLM runs without a graft key, though the plugin is installed."""
    with pair.engine(chain=3) as llm:
        runner = model_runner(llm)
        names = {
            type(runner.speculator).__module__,
            type(runner.model_state).__module__,
            type(runner.rejection_sampler).__module__,
        }
        layers = runner.compilation_config.static_forward_context.values()
        names |= {type(layer.impl).__module__ for layer in layers}
        del runner, layers
        assert not [name for name in names if "graft" in name]


ROWS = 8
BLOCK = 32
PROMPT = list(range(5, 5 + 2 * BLOCK + 1))
"""Two blocks, which are cached, and a token that is left."""


def _ask(llm: Any, name: str, prompt: list[int], tokens: int = 2) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)


def _answers(llm: Any, most: int = 60) -> dict[str, list[int]]:
    """Tokens of what is answered within so many steps."""
    engine, found = llm.llm_engine, {}
    for _ in range(most):
        if not engine.has_unfinished_requests():
            break
        found |= {each.request_id: list(each.outputs[0].token_ids) for each in engine.step()}
    return found


def test_the_least_limits_serve_and_lesser_ones_do_not(pair: Pair) -> None:
    with pair.engine(
        method="ngram",
        nodes=ROWS - 1,
        topk=2,
        speculative={"prompt_lookup_max": 3},
        enable_prefix_caching=True,
        block_size=BLOCK,
        max_num_seqs=2,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=ROWS,
    ) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        _ask(llm, "first", PROMPT)
        expected = _answers(llm)["first"]
        scheduler.max_num_scheduled_tokens = ROWS
        _ask(llm, "cached", PROMPT)
        assert _answers(llm) == {"cached": expected}

        scheduler.max_num_scheduled_tokens = ROWS - 1
        _ask(llm, "waiting", PROMPT)
        assert _answers(llm) == {}
        assert scheduler.get_request_counts() == (0, 1)
        scheduler.max_num_scheduled_tokens = ROWS
        assert _answers(llm) == {"waiting": expected}

        # Beside a request that runs, a prompt of one token is enough.
        scheduler.max_num_scheduled_tokens = 2 * ROWS
        for threshold, works in ((ROWS, True), (ROWS - 1, False)):
            scheduler.scheduler_config.long_prefill_token_threshold = threshold
            _ask(llm, f"running {threshold}", PROMPT[:3], tokens=4)
            llm.llm_engine.step()
            _ask(llm, f"short {threshold}", PROMPT[:1])
            if works:
                assert len(_answers(llm)) == 2
                continue
            with pytest.raises(AssertionError) as caught:
                _answers(llm)
            assert caught.traceback[-1].path.name == "scheduler.py"
        del scheduler


def test_all_of_it_is_allocated_in_memory_that_is_kept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no sleep mode: a pool stands in that says when it is in use."""
    seen: list[str] = []

    @contextlib.contextmanager
    def pool(vllm_config: Any) -> Iterator[None]:
        assert vllm_config.speculative_config.num_speculative_tokens == 3
        seen.append("begin")
        yield
        seen.append("end")

    def noted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(tree_drafting, "kept_memory", pool)
    owner = tree_drafting.TreeDrafting
    names = ("make_head", "allocate_context", "allocate_growths")
    for name in names:
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    attach = tree_drafting.ServedLayers.attach
    monkeypatch.setattr(tree_drafting.ServedLayers, "attach", noted("attach", attach))
    with pair.engine(nodes=3, tree={"head_dtype": "fp8", "ngram": True}) as llm:
        assert model_runner(llm).speculator.head.fp8 is not None
    assert seen == ["begin", *names, "attach", "end"]


def attended_by_trees(llm: Any) -> list[str]:
    """Names of the layers that tree attention was put over."""
    layers = model_runner(llm).vllm_config.compilation_config.static_forward_context
    return [
        name
        for name, layer in layers.items()
        if isinstance(getattr(layer, "impl", None), TreeAttentionMixin)
    ]


def test_a_chain_of_the_pair(pair: Pair, samples: list[Request], expected: list[Answer]) -> None:
    with pair.engine(nodes=5, topk=1, steps=5) as llm:
        assert differing(answer_all(llm, samples[:4]), expected[:4]) == []
        metrics = spec_metrics(llm)
        # The draft's alone.
        assert len(attended_by_trees(llm)) == 1
    assert metrics.accepted_tokens > metrics.drafts / 2


def test_a_chain_of_a_target_that_trees_refuse(
    tmp_path: Path, samples: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows stand for any feature that no family serves."""
    kinds = ["sliding_attention", "full_attention"] * 3
    target = with_windows(SHIPPED / "target", tmp_path / "target", kinds)
    windows = Pair(str(target), str(SHIPPED / "eagle3"), [])
    with windows.engine() as llm:
        alone = answer_all(llm, samples[:3])
    for module in (tree_refusals, node_count):
        monkeypatch.setattr(module, "served_features", set)
    # Negative control: no chain for whoever wants none.
    words = r"set --additional-config\.graft\.tree\.topk to 1 for a chain"
    with pytest.raises(ConfigError, match=words):
        windows.engine(nodes=15, tree={"fallback": "refuse"}).__enter__()
    with windows.engine(nodes=15, topk=4, steps=5) as llm:
        assert differing(answer_all(llm, samples[:3]), alone) == []
        metrics = spec_metrics(llm)
        assert model_runner(llm).num_speculative_steps == 5
        assert len(attended_by_trees(llm)) == 1
    assert metrics.accepted_tokens > metrics.drafts / 4
