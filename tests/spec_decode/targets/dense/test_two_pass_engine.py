"""Two passes in a real engine: recorded FULL graphs, with plain torch for FlashAttention 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engines.pairs import Answer, Pair, Request, answer_all
from vllm_graft.spec_decode.kernels.attention.own_rows import attend_own_rows
from vllm_graft.spec_decode.refusals import verification_refusals
from vllm_graft.spec_decode.targets.dense.two_pass import Passes
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.spec_decode.tuning import attention_timing as crossover

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


class PlainFlash:
    """The first pass in torch operations that a recorded graph can replay.

    It takes its lengths from the plan, so the plan of another batch gives other tokens.
    """

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


@pytest.mark.slow
def test_two_passes_serve_the_engine(
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
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
        from vllm_graft.testing import model_runner

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
