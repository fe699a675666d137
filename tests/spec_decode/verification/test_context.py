"""The state that tree parts share: which kernel computes attention, and the rows of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_graft.spec_decode.trees.shape import TreeShape
from vllm_graft.spec_decode.verification.context import TreeContext, VerifyMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def context() -> TreeContext:
    shape = TreeShape(topk=2, steps=3, num_nodes=4)
    context = TreeContext.allocate(shape, 4, 32, SimpleNamespace(), torch.device(DEVICE))  # type: ignore[arg-type]
    context.tree.depths[:] = torch.tensor([0, 1, 1, 2, 2])
    context.tree.masks[:] = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101])
    context.rows.num_rows.fill_(-7)
    context.rows.prefix_lens.fill_(-7)
    context.rows.row_masks.fill_(-7)
    return context


def make_batch(lengths: list[int], drafts: list[int], padding: int = 0) -> Any:
    starts = np.cumsum([0, *lengths])
    return SimpleNamespace(
        num_reqs=len(lengths),
        num_reqs_after_padding=len(lengths) + padding,
        num_draft_tokens=sum(drafts),
        num_draft_tokens_per_req=np.array(drafts),
        idx_mapping=torch.arange(len(lengths), device=DEVICE),
        idx_mapping_np=np.arange(len(lengths)),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        cu_num_logits=torch.tensor(np.cumsum([0, *(d + 1 for d in drafts)]), device=DEVICE).int(),
        positions=torch.arange(int(starts[-1]), device=DEVICE) + 100,
    )


@pytest.mark.parametrize(
    ("drafts", "for_capture", "mode"),
    [
        (None, False, VerifyMode.NONE),
        ([0, 0], False, VerifyMode.NONE),
        ([0, 3], False, VerifyMode.MIXED),
        ([1, 3], False, VerifyMode.ALL),
        # Captured dummy batches carry no drafts, but their replays do.
        (None, True, VerifyMode.ALL),
        ([0, 0], True, VerifyMode.ALL),
    ],
)
def test_who_computes_attention(
    context: TreeContext, drafts: list[int] | None, for_capture: bool, mode: VerifyMode
) -> None:
    batch: Any = SimpleNamespace(
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
        num_reqs=2,
        num_tokens=8,
        max_query_len=4,
    )
    context.choose_mode(batch, for_capture)
    assert context.mode is mode
    # A captured pass computes no rows: the warm-up's batch may have had more rows per request.
    assert (context.rows.num_rows == (0 if for_capture else -7)).all()
    assert (context.rows.prefix_lens == (0 if for_capture else -7)).all()


def test_a_graph_without_drafts_is_the_platform_s(context: TreeContext) -> None:
    batch: Any = SimpleNamespace(
        num_draft_tokens_per_req=None, num_reqs=2, num_tokens=2, max_query_len=1
    )
    context.choose_mode(batch, for_capture=True, is_graph=True)
    assert context.mode is VerifyMode.NONE


@pytest.mark.parametrize("is_graph", [False, True])
def test_graphs_of_mixed_batches(context: TreeContext, is_graph: bool) -> None:
    # This captured pass declares longer queries than its dummy requests have.
    dummy: Any = SimpleNamespace(
        num_draft_tokens_per_req=None, num_reqs=4, num_tokens=8, max_query_len=8
    )
    context.choose_mode(dummy, for_capture=True)
    assert context.mode is VerifyMode.MIXED
    batch: Any = SimpleNamespace(num_draft_tokens_per_req=np.array([0, 3]))
    context.choose_mode(batch, for_capture=False, is_graph=is_graph)
    counters = context.counters
    assert (counters.mixed_replays, counters.mixed_launches) == (is_graph, not is_graph)


def test_tree_rows_among_others(context: TreeContext) -> None:
    batch = make_batch([5, 3, 4], [4, 0, 2], padding=1)
    computed = torch.tensor([40, 50, 60, 0], dtype=torch.int32, device=DEVICE)
    context.begin(batch, computed, keep_shift=True)
    assert context.rows.num_rows.tolist() == [5, 0, 3, 0]
    assert context.rows.prefix_lens.tolist() == [40, 0, 61, 0]
    # The third request's drafts follow one prompt token.
    depths = [0, 1, 1, 2, 2]
    positions = [40 + d for d in depths] + [105, 106, 107] + [108] + [61 + d for d in depths[:3]]
    assert batch.positions.tolist() == positions
    assert context.rows.row_masks[:5].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10101]
    assert context.rows.row_masks[9:12].tolist() == [0b1, 0b11, 0b101]
    step = context.step
    assert step is not None
    assert step.num_drafts.tolist() == [4, 0, 2]
    assert step.depth_shift is not None
    assert step.depth_shift.tolist() == [p - 100 - i for i, p in enumerate(positions)]
    assert step.num_sampled is None
    assert (context.counters.verify_steps, context.counters.nodes_verified) == (1, 6)


def test_without_drafts_one_token_queries_are_the_tree_kernel_s(context: TreeContext) -> None:
    """A FULL graph of them holds no other kernel; vLLM's number of drafts may be 0 for a size."""
    batch = make_batch([1, 1, 1], [0, 0, 0], padding=1)
    context.begin(batch, torch.tensor([40, 50, 60, 0], dtype=torch.int32, device=DEVICE))
    assert context.rows.num_rows.tolist() == [1, 1, 1, 0]
    assert context.rows.prefix_lens.tolist() == [40, 50, 60, 0]
    assert context.rows.row_masks[:3].tolist() == [1, 1, 1]
    assert batch.positions.tolist() == [100, 101, 102]
    assert context.counters.verify_steps == 0
    assert context.step is not None
    assert context.step.depth_shift is None


def test_metadata_without_the_keys_of_trees(context: TreeContext) -> None:
    metadata: Any = SimpleNamespace(
        seq_lens=torch.tensor([45, 53]), scheduler_metadata="a schedule", max_query_len=5
    )
    plain = context.plain_metadata(metadata)
    assert plain.seq_lens.data_ptr() == context.rows.plain_lens.data_ptr()
    assert plain.seq_lens.shape == (2,)
    assert (plain.scheduler_metadata, plain.max_query_len) == (None, 5)
    assert metadata.scheduler_metadata == "a schedule"
    # All layers of a pass share the metadata; the next pass has its own.
    assert context.plain_metadata(metadata) is plain
    context.choose_mode(SimpleNamespace(num_draft_tokens_per_req=None), for_capture=False)  # type: ignore[arg-type]
    assert context.plain_metadata(metadata) is not plain
