"""The metadata of a draft's passes, narrowed to its window, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.spec_decode.targets.dense.test_attention_layer import (
    HEADS,
    NAME,
    ROWS,
    SIZE,
    make_context,
    make_layer,
)
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.dense.draft_window import DraftWindow
from vllm_graft.spec_decode.targets.dense.layer import DraftTreeMetadata, graft_attention
from vllm_graft.spec_decode.targets.dense.plain_attention import windowed_table_reference
from vllm_graft.spec_decode.verification.context import VerifyMode

WINDOW, BLOCK = 20, 16


@dataclass
class Metadata:
    """What FlashAttention's metadata have that matters here."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    scheduler_metadata: torch.Tensor | None


def metadata() -> Metadata:
    """Two requests, of 100 and 30 tokens, with 5 and 2 rows."""
    return Metadata(
        query_start_loc=torch.tensor([0, 5, 7]),
        seq_lens=torch.tensor([100, 30]),
        block_table=torch.arange(20).view(2, 10),
        max_query_len=5,
        max_seq_len=160,
        num_actual_tokens=7,
        scheduler_metadata=torch.zeros(3),
    )


def level(number: int) -> DraftTreeMetadata:
    """A level behind texts of 100 and 30 tokens."""
    return DraftTreeMetadata(
        level=number,
        topk=2,
        num_reqs=2,
        prefix_lens=torch.tensor([100, 30]),
        block_table=torch.arange(20).view(2, 10),
        ancestors=torch.zeros(2, 2, 3),
        scratch=torch.zeros(2, 6, HEADS, 2 * SIZE),
        max_seq_len=4096,
    )


def windowed() -> DraftWindow:
    return DraftWindow(WINDOW, windowed_table_reference)


def test_a_pass_over_accepted_rows() -> None:
    whole = metadata()
    found = windowed().of_extend(whole, BLOCK)
    # The first request's window begins at position 75, in the block that begins at 64.
    assert found.block_table.tolist() == [[0, 4, 5, 6], [10, 11, 0, 0]]
    assert found.seq_lens.tolist() == [100 - 3 * BLOCK, 30]
    assert found.max_seq_len == 64
    assert found.scheduler_metadata is None
    assert (found.max_query_len, found.num_actual_tokens) == (5, 7)
    # The target's layers read the same object.
    assert whole.seq_lens.tolist() == [100, 30]
    assert whole.scheduler_metadata is not None


def test_the_levels_of_a_tree_share_a_table() -> None:
    calls: list[int] = []

    def narrow(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return windowed_table_reference(*args, **kwargs)

    window = DraftWindow(WINDOW, narrow)
    found = [window.of_level(level(number), BLOCK) for number in (0, 1, 2)]
    assert len(calls) == 1
    for each in found:
        # It begins at position 80, which begins a block.
        assert each.block_table.tolist() == [[0, 5, 6, 0], [10, 11, 0, 0]]
        assert each.prefix_lens.tolist() == [100 - 4 * BLOCK, 30]
        assert each.max_seq_len == 4 * BLOCK
    window.of_level(level(0), BLOCK)
    assert len(calls) == 2


@pytest.mark.parametrize("is_draft", [True, False])
def test_layers_of_drafts_alone_have_one(is_draft: bool) -> None:
    layer, context = make_layer(), make_context(VerifyMode.NONE)
    stock = layer.impl
    context.draft_window = WINDOW
    graft_attention(NAME, layer, context, is_draft=is_draft)
    if layer.impl.window is not None:
        layer.impl.window = windowed()
    query, output = torch.ones(ROWS, HEADS, SIZE), torch.zeros(ROWS, HEADS, SIZE)
    cache, given = torch.zeros(20, HEADS, BLOCK, 2 * SIZE), metadata()
    layer.impl.forward(layer, query, query, query, cache, given, output)
    [(*_, seen, _, _, _)] = stock.calls
    assert (seen is given) != is_draft
    assert seen.seq_lens.tolist() == [52 if is_draft else 100, 30]


@pytest.mark.parametrize("own", [17, (16, 0)])
def test_a_layer_with_a_window_of_its_own_is_refused(own: Any) -> None:
    layer, context = make_layer(), make_context(VerifyMode.NONE)
    context.draft_window = WINDOW
    layer.impl.sliding_window = own
    with pytest.raises(ConfigError) as caught:
        graft_attention(NAME, layer, context, is_draft=True)
    message = str(caught.value)
    assert message.startswith("--additional-config.graft.tree.draft_window needs a draft of plain")
    assert f"layer {NAME} has a window of 17 positions of its own: drop the key" in message
    graft_attention(NAME, layer, context, is_draft=False)
