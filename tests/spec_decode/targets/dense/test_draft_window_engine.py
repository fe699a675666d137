"""A draft with a window, and targets in two passes: answers stay those of the target."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.answers.text_requests import in_pairs
from tests.support.engines.gpu_engines import shipped_trees
from tests.support.engines.pairs import (
    Answer,
    Pair,
    Request,
    answer_all,
    counter,
    differing,
    scheduling,
)
from tests.support.models.mtp_targets import write_mimo
from tests.support.references.windowed_reference import compared
from tests.support.samples.attention_samples import AttentionShape, draft_problem, untouched
from tests.support.watches import Drafted, drafted
from vllm_graft.spec_decode.kernels.attention.own_rows import attend_own_rows
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.refusals import verification_refusals
from vllm_graft.spec_decode.targets.dense import window
from vllm_graft.spec_decode.targets.dense.two_pass import Passes
from vllm_graft.spec_decode.targets.dense.window import windowed_table
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch
from vllm_graft.spec_decode.tuning import attention_timing as crossover
from vllm_graft.testing import TinyShape, greedy, model_runner, write_eagle, write_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WINDOW, BLOCK = 16, 32

OPTIONS: dict[str, Any] = {"max_model_len": 448, "block_size": BLOCK, "max_num_batched_tokens": 160}


def long_requests(pair: Pair, prompts: int, tokens: int) -> list[Request]:
    """Prompts of 284 tokens and more; two requests share each."""
    return in_pairs(tokens, ["\n".join(pair.prompts[4 * place :][:4]) for place in range(prompts)])


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return long_requests(pair, 2, 16)


@pytest.fixture(scope="module")
def alone(pair: Pair, requests: list[Request]) -> list[Answer]:
    with pair.engine(**OPTIONS) as llm:
        return answer_all(llm, requests)


def test_rows_see_their_window_and_answers_are_the_target_s(
    pair: Pair, requests: list[Request], alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in parts, share prefixes, and are preempted for lack of blocks."""
    few = {**OPTIONS, "num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    tree = {"draft_window": WINDOW}
    with pair.engine(nodes=7, topk=3, steps=3, tree=tree, **few) as llm:
        with scheduling(llm) as schedule, compared(monkeypatch, WINDOW) as seen:
            assert differing(answer_all(llm, requests), alone) == []
        (info,) = llm.collective_rpc("graft_info")
        assert counter(llm, "vllm:prefix_cache_hits") > 0
    assert schedule.prompt_chunks > 0
    assert schedule.preempted > 0
    assert info["counters"]["tree"]["draft_window"] == WINDOW
    assert min(seen.levels, seen.accepted) > 100
    assert seen.otherwise > seen.narrower / 2 > 100


def test_rows_that_see_too_much_are_found(
    pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: one block too many is read, which holds NaN."""
    stock = window.DraftWindow.__init__

    def widened(self: Any, tokens: int, narrow: Any) -> None:
        stock(self, tokens + BLOCK, narrow)

    monkeypatch.setattr(window.DraftWindow, "__init__", widened)
    with (
        pair.engine(nodes=3, topk=2, steps=2, tree={"draft_window": WINDOW}, **OPTIONS) as llm,
        compared(monkeypatch, WINDOW),
        pytest.raises(AssertionError, match="not close"),
    ):
        answer_all(llm, requests[:1])


def drafts(pair: Pair, requests: list[Request], alone: list[Answer], **options: Any) -> Drafted:
    """What an engine with 7 nodes drafts; its answers have to be the target's."""
    tree = options.pop("tree", {})
    with (
        pair.engine(nodes=7, topk=3, steps=3, tree=tree, **OPTIONS, **options) as llm,
        drafted(llm) as found,
    ):
        assert differing(answer_all(llm, requests), alone) == []
        if options.get("graphs"):
            graphs = model_runner(llm).speculator.draft_graphs()
            assert sum(graph.replays for graph in graphs) > 0
            del graphs
    return dict(found)


def test_a_short_window_changes_drafts_and_a_long_one_does_not(
    pair: Pair, requests: list[Request], alone: list[Answer]
) -> None:
    few = requests[1:2], alone[1:2]
    whole = drafts(pair, *few)
    long = {"draft_window": OPTIONS["max_model_len"]}
    assert drafts(pair, *few, tree=long) == whole
    narrow = drafts(pair, *few, tree={"draft_window": WINDOW})
    common = [key for key in whole if key in narrow]
    assert len(common) > 5
    assert sum(whole[key] != narrow[key] for key in common) > len(common) / 4


def test_kernels_in_graphs_draft_the_same(pair: Pair) -> None:
    """Interpreted kernels, replayed: a graph makes its tables anew from each step's lengths."""
    short = [Request(pair.prompts[0], {"max_tokens": 5, "temperature": 0})]
    tree = {"draft_window": 1}
    with pair.engine(**OPTIONS) as llm:
        answers = answer_all(llm, short)
    plain = drafts(pair, short, answers, tree=tree)
    assert drafts(pair, short, answers, tree=tree, graphs=[8, 16]) == plain


@pytest.mark.parametrize("kind", ["mtp", pytest.param("eagle", marks=pytest.mark.nightly)])
def test_other_drafts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MTP module, and an EAGLE-1 head of two layers: each reads K and V of its own."""
    if kind == "mtp":
        target = draft = write_mimo(tmp_path / "target", from_states=0.2)
    else:
        target = write_llama(tmp_path / "target")
        draft = write_eagle(tmp_path / "draft", TinyShape(num_layers=2))
    pair = Pair(str(target), str(draft), [])
    prompts = [[7, 3, 9, 30, 2] * 30, list(range(1, 90))]
    options: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": BLOCK}
    with pair.engine(**options) as llm:
        expected = greedy(llm, prompts, 12)
    tree = {"draft_window": WINDOW}
    with (
        pair.engine(nodes=5, topk=2, steps=3, method=kind, tree=tree, **options) as llm,
        compared(monkeypatch, WINDOW) as seen,
    ):
        assert greedy(llm, prompts, 12) == expected
    assert min(seen.levels, seen.narrower) > 20


# --- on a device --------------------------------------------------------------------------------

LONG = 48
"""The window there."""


@pytest.mark.gpu
def test_answers_are_the_target_s_and_graphs_equal_launches(pair: Pair) -> None:
    requests, pair = long_requests(pair, 4, 40), pair.on("cuda")
    with pair.engine(max_model_len=512) as llm:
        expected = answer_all(llm, requests)
    tree = {"draft_window": LONG, "graph_runner": "verify"}
    with pair.engine(nodes=15, tree=tree, max_model_len=512) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        [info] = llm.collective_rpc("graft_info")
    counters = info["counters"]["tree"]
    assert counters["draft_window"] == LONG
    assert counters["draft_replays"] > 0
    assert counters["draft_graphs_differing"] == {15: []}


@pytest.mark.gpu
def test_rows_see_their_window(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, by FlashAttention where vLLM takes it; what is outside holds NaN."""
    # Graphs run no Python: without them each pass comes by here.
    with shipped_trees({"draft_window": LONG}, graphs=False) as llm:
        speculator = model_runner(llm).speculator
        layers = speculator.vllm_config.compilation_config.static_forward_context
        impl = layers[min(speculator.draft_attn_layer_names)].impl
        del speculator, layers
        with compared(monkeypatch, LONG, tolerance=4e-2) as seen:
            answer_all(llm, long_requests(pair, 2, 40))
    assert type(impl).__name__.startswith("Tree")
    assert min(seen.levels, seen.accepted) > 100
    assert seen.otherwise > seen.narrower / 4 > 25


@pytest.mark.gpu
def test_a_level_reads_what_its_narrowed_table_names() -> None:
    """It computes what it does over a table as wide as the whole text."""
    shape = AttentionShape(
        rows=(0, 0), lens=(30_000, 700), kv_heads=8, group=4, head_size=128, dtype=torch.bfloat16
    )
    problem = draft_problem(shape, 8, 6, 2, "cuda")
    table, lens = windowed_table(
        problem.block_table, problem.prefix_lens, None, window=2048, max_rows=0, block_size=16
    )
    assert lens.tolist() == [16 + 30_000 - (30_000 - 2048) // 16 * 16, 700]
    fields = {**vars(problem), "block_table": table, "prefix_lens": lens, "max_seq_len": None}
    out, expected = untouched(problem.query), untouched(problem.query)
    tree_attention(DraftBatch(**fields), out)
    first = (30_000 - 2048) // 16
    seen = torch.cat([problem.block_table[0, :1], problem.block_table[0, first:]])
    whole = problem.block_table.clone()
    whole[0, : len(seen)] = seen
    tree_attention(DraftBatch(**fields | {"block_table": whole}), expected)
    torch.testing.assert_close(out, expected)


# --- targets in two passes ----------------------------------------------------------------------


class PlainFlash:
    """The first pass in torch operations that a recorded graph can replay."""

    def __init__(self) -> None:
        self.plans = 0
        self.passes = 0
        self.captured = 0

    def plan_prefix(self, batch: TreeBatch, **options: Any) -> torch.Tensor:
        self.plans += 1
        return batch.prefix_lens.clone()

    def flash_prefix_attention(
        self, batch: TreeBatch, *, plan: torch.Tensor, multiprocessors: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.passes += 1
        self.captured += torch.cuda.is_current_stream_capturing()
        query, cache = batch.query, batch.kv_cache
        requests, (tokens, heads, size), kv_heads = len(plan), query.shape, cache.shape[1]
        pages = cache[batch.block_table[:requests].long()].float()
        keys = pages.transpose(2, 3).flatten(1, 2)
        key, value = keys.split(size, dim=-1)
        rows = query.float().view(requests, batch.max_rows, kv_heads, -1, size)
        logits = torch.einsum("brhgd,bnhd->bhgrn", rows, key) * batch.scale
        seen = torch.arange(keys.shape[1]) < plan[:, None]
        logits = logits.masked_fill(~seen[:, None, None, None], float("-inf"))
        out = torch.einsum("bhgrn,bnhd->brhgd", logits.softmax(-1), value)
        lse = logits.logsumexp(-1).permute(1, 2, 0, 3).reshape(heads, tokens)
        return out.reshape(query.shape), lse


def test_two_passes_serve_the_engine(
    pair: Pair, samples: list[Request], expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = PlainFlash()
    passes = Passes(flash.plan_prefix, flash.flash_prefix_attention, attend_own_rows)
    plain = crossover._PLAIN._replace(passes=passes, why_not=lambda layer: None)
    monkeypatch.setattr(crossover, "_PLAIN", plain)
    monkeypatch.setattr(verification_refusals, "_no_flash", lambda config, latents: None)
    short = [Request(each.prompt, {**each.params, "max_tokens": 8}) for each in samples[2:5]]
    with pair.engine(
        nodes=15,
        tree={"attention": "flash"},
        attention="triton",
        graphs=[8, 16, 32],
        max_num_seqs=2,
    ) as llm:
        found = [answer.tokens[0] for answer in answer_all(llm, short)]
        assert found == [answer.tokens[0][:8] for answer in expected[2:5]]
        [info] = llm.collective_rpc("graft_info")
        [attention] = info["counters"]["tree"]["attention"]
        assert attention["asked"] == "flash"
        # There are the widest trees of one and of two requests, and other sizes that vLLM captured.
        assert {"1x16", "2x16"} <= attention["used"].keys()
        assert set(attention["used"].values()) == {"flash"}
        runner = model_runner(llm)
        assert sum(graph.replays for graph in runner.cudagraph_manager.graphs.values()) > 0
        # Each pass, captured or not, plans once for all layers of the target.
        layers = runner.compilation_config.static_forward_context.values()
        both = [layer for layer in layers if layer.impl.two_pass is not None]
        assert 1 < len(both) < len(layers)
        assert flash.passes == flash.plans * len(both)
        assert flash.captured >= 2 * len(both)
        del runner, layers, both


def test_flash_is_refused_where_it_is_not(pair: Pair) -> None:
    with (
        pytest.raises(Exception, match=r"graft\.tree\.attention is 'flash', but the platform cpu"),
        pair.engine(nodes=15, tree={"attention": "flash"}),
    ):
        pass
