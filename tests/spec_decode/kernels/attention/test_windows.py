"""Sliding windows, chunks and sinks in the kernels, and block tables of a window."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.spec_decode.kernels.attention.test_tree_attention import DEVICE, draft_error, tree_error
from tests.support.crossed import crossed
from tests.support.references.tree_reference import tree_attention_reference
from tests.support.samples.attention_samples import (
    TOLERANCE,
    AttentionShape,
    draft_problem,
    tree_problem,
    untouched,
)
from tests.support.samples.attention_spaces import nan_space
from vllm_graft.spec_decode.kernels.attention import tree_attention as launching
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.targets.dense.plain_attention import windowed_table_reference
from vllm_graft.spec_decode.targets.dense.window import table_width, windowed_table

SIZES = {"rows": (9, 0, 16, 40, 3), "lens": (150, 30, 17, 300, 3), "group": 2}


@pytest.mark.parametrize(
    ("size", "kinds", "splits"),
    [
        *crossed([0, 1, 4, 16, 33, 128, 1000], [{}, {"sinks": True}], [1, 3]),
        *crossed([1, 4, 16, 48, 128, 149, 1000], [{"chunked": True}], [1, 3]),
    ],
)
def test_trees_equal_the_reference(size: int, kinds: dict[str, bool], splits: int) -> None:
    """Trees cross the ends of chunks. Blocks that no row sees, as those before the root's chunk,
    hold NaN, which a read would leave in the output."""
    problem = tree_problem(AttentionShape(**SIZES, window=size, **kinds), DEVICE)
    space = nan_space(problem, 12) if splits > 1 else None
    assert tree_error(problem, workspace=space, num_splits=splits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (256, 48), (512, 32)])
def test_head_sizes_of_models_with_windows(head_size: int, block_size: int) -> None:
    shape = AttentionShape(
        rows=(12, 5), lens=(200, 70), kv_heads=2, group=2, head_size=head_size,
        block_size=block_size, dtype=torch.bfloat16, window=50, sinks=True,
    )  # fmt: skip
    problem = tree_problem(shape, DEVICE)
    assert tree_error(problem, workspace=nan_space(problem, 4)) < TOLERANCE[torch.bfloat16]


def chain_outputs(
    shape: AttentionShape, run: object, sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of tree attention and of torch for a chain, whose mask no code of ours makes."""
    rows, keys = shape.rows[0], shape.lens[0]
    problem = tree_problem(shape, DEVICE)
    line = torch.arange(rows, device=DEVICE)
    problem = replace(
        problem, row_masks=(2 << line) - 1, row_depths=line.to(torch.int32), max_rows=rows
    )
    out = untouched(problem.query)
    run(problem, out)  # type: ignore[operator]
    positions = torch.arange(keys, device=DEVICE)
    blocks = problem.block_table[0, positions // shape.block_size].long()
    both = problem.kv_cache[blocks, 0, positions % shape.block_size].nan_to_num(0)
    key, value = both[None].expand(2, -1, -1).chunk(2, dim=-1)
    row = positions[keys - rows :, None]
    mask = (row >= positions) & sees(row, positions)
    expected = F.scaled_dot_product_attention(
        problem.query.transpose(0, 1), key, value, attn_mask=mask
    )
    return out, expected.transpose(0, 1)


@pytest.mark.parametrize(("size", "chunked"), [*product((3, 20, 64), (False, True)), (57, True)])
@pytest.mark.parametrize("run", [tree_attention, tree_attention_reference])
def test_a_chain_is_what_torch_computes(size: int, chunked: bool, run: object) -> None:
    """Its rows have the positions 53 to 59, so that chunks of 57 end within it."""

    def sees(row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key // size == row // size if chunked else row - key < size

    shape = AttentionShape(rows=(7,), lens=(60,), group=2, window=size, chunked=chunked)
    out, expected = chain_outputs(shape, run, sees)
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("size", "chunked"), [(94, True), (8, False)])
def test_distance_by_slot_is_wrong(size: int, chunked: bool) -> None:
    """Negative control: with slots in place of depths rows see other keys, or an earlier chunk."""
    shape = AttentionShape(rows=(12,), lens=(100,), window=size, chunked=chunked)
    problem = tree_problem(shape, DEVICE)
    by_slot = torch.arange(12, dtype=torch.int32, device=DEVICE)
    out, expected = untouched(problem.query), untouched(problem.query)
    tree_attention(replace(problem, row_depths=by_slot), out)
    tree_attention_reference(problem, expected)
    assert (out - expected).abs().max() > 1e-2


def test_a_sink_takes_weight() -> None:
    """This is a negative control; a sink is one more term of the sum, without a value."""
    problem = tree_problem(AttentionShape(rows=(1,), lens=(1,), group=2, sinks=True), DEVICE)
    assert problem.sinks is not None
    with_sink, without = untouched(problem.query), untouched(problem.query)
    tree_attention(problem, with_sink)
    tree_attention(replace(problem, sinks=None), without)
    key = problem.kv_cache[problem.block_table[0, 0].long(), 0, 0, :64]
    weight = ((problem.query[0] @ key) * problem.scale - problem.sinks).sigmoid()
    assert (with_sink[0] - weight[:, None] * without[0]).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("place", "sinks", "splits"),
    crossed([(0, 1), (4, 3), (17, 0), (40, 2), (500, 3)], [False, True], [1, 2]),
)
def test_drafts_equal_the_reference(place: tuple[int, int], sinks: bool, splits: int) -> None:
    window, level = place
    shape = AttentionShape(rows=(), lens=(90, 16, 1, 0), group=2, window=window, sinks=sinks)
    problem = draft_problem(shape, topk=4, steps=4, level=level, device=DEVICE)
    space = nan_space(problem, 12) if splits > 1 else None
    assert draft_error(problem, workspace=space, num_splits=splits) < TOLERANCE[torch.float32]


def test_a_window_needs_depths() -> None:
    problem = tree_problem(AttentionShape(rows=(2,), lens=(9,), window=3), DEVICE)
    with pytest.raises(ValueError, match="a window of 3 keys needs the depths of rows"):
        tree_attention(replace(problem, row_depths=None), untouched(problem.query))


LENGTHS = [0, 1, 15, 16, 17, 47, 48, 49, 64, 300, 1000]


def positions(length: int, rows: int, window: int, block: int) -> list[int]:
    """The positions that a request's rows see, as the documentation says it."""
    first = max(0, length - rows - window) // block * block
    return sorted({*range(min(block, length)), *range(first, length)})


def unpack(table: torch.Tensor, lens: torch.Tensor, block: int) -> list[list[int]]:
    """Positions by request, where a table's block b holds positions from b * block on."""
    return [
        [int(row[at // block]) * block + at % block for at in range(length)]
        for row, length in zip(table, lens.tolist())
    ]


@pytest.mark.parametrize("make", [windowed_table, windowed_table_reference])
@pytest.mark.parametrize("rows", [None, 1, 7, 200])
@pytest.mark.parametrize(("window", "block"), [(1, 16), (16, 16), (17, 16), (100, 32), (4096, 16)])
def test_tables_hold_the_window_s_positions(
    make: Any, window: int, block: int, rows: int | None
) -> None:
    lengths = [length for length in LENGTHS if length >= (rows or 0)]
    blocks = -(-max(lengths) // block) + 3
    whole = torch.arange(blocks, dtype=torch.int32, device=DEVICE).repeat(len(lengths), 1)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    starts = None
    if rows is not None:
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE) * rows
    table, lens = make(whole, kv_lens, starts, window=window, max_rows=rows or 0, block_size=block)
    expected = [positions(length, rows or 0, window, block) for length in lengths]
    assert unpack(table, lens, block) == expected
    assert table.shape[1] <= table_width(window, rows or 0, block)
    for row, length in zip(table.tolist(), lens.tolist()):
        assert not any(row[-(-length // block) :])


def test_a_dummy_batch_reads_no_block_beyond_the_table() -> None:
    """Lengths may be left over from another batch where requests are padding."""
    whole = torch.full((3, 4), 7, dtype=torch.int32, device=DEVICE)
    kv_lens = torch.tensor([9999, 64, 0], dtype=torch.int32, device=DEVICE)
    options = {"window": 16, "max_rows": 4, "block_size": 16}
    starts = torch.tensor([0, 9000, 9004, 9004], dtype=torch.int32, device=DEVICE)
    for make in (windowed_table, windowed_table_reference):
        table, lens = make(whole, kv_lens, starts, **options)
        assert lens.tolist() == [64, 48, 0]
        assert set(table.flatten().tolist()) <= {0, 7}


WINDOW = 40


def narrowed(problem: Any, make: Any = windowed_table) -> Any:
    block = problem.kv_cache.shape[2]
    table, lens = make(
        problem.block_table, problem.prefix_lens, None, window=WINDOW, max_rows=0, block_size=block
    )
    longest = table.shape[1] * block
    return replace(problem, block_table=table, prefix_lens=lens, max_seq_len=longest)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("splits", [1, 3])
def test_levels_see_nothing_outside_the_window(level: int, splits: int) -> None:
    """Each request's keys outside of it are NaN, and those inside are taken one by one."""
    shape = AttentionShape(rows=(0,) * 4, lens=(300, 33, 0, 170), group=2)
    problem = draft_problem(shape, 3, 4, level, DEVICE)
    block = shape.block_size
    cache, expected = problem.kv_cache.clone(), untouched(problem.query)
    kept = torch.zeros(len(cache), dtype=torch.bool)
    for r, length in enumerate(shape.lens):
        seen = positions(length, 0, WINDOW, block)
        alone = torch.cat([
            problem.kv_cache[problem.block_table[r, at // block], :, at % block][None]
            for at in seen
        ]) if seen else problem.kv_cache[0, :, :0].transpose(0, 1)  # fmt: skip
        kept[problem.block_table[r, [at // block for at in seen]].long().cpu()] = True
        own = slice(3 * r, 3 * r + 3)
        one = replace(
            problem,
            query=problem.query[own],
            kv_cache=alone.transpose(0, 1)[None],
            block_table=torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
            prefix_lens=torch.tensor([len(seen)], dtype=torch.int32, device=DEVICE),
            scratch_kv=problem.scratch_kv[r : r + 1],
            ancestors=problem.ancestors[r : r + 1],
            num_reqs=1,
        )
        out = untouched(one.query)
        tree_attention_reference(one, out)
        expected[own] = out
    cache[~kept.to(DEVICE)] = float("nan")
    assert not bool(kept.all())
    problem = replace(problem, kv_cache=cache)

    space = nan_space(problem, 16) if splits > 1 else None
    found = untouched(problem.query)
    tree_attention(narrowed(problem), found, workspace=space, num_splits=splits)
    assert float((found - expected).abs().max()) < TOLERANCE[torch.float32]
    # The control: the whole table reads the other blocks.
    tree_attention(problem, found, workspace=space, num_splits=splits)
    assert not torch.allclose(found, expected, atol=1e-2)


def test_splits_do_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level's time is bounded: grid and keys are the same at any context."""
    seen: list[tuple[int, int]] = []
    stock = launching.choose_plan

    def choose_plan(sizes: Any, splits: int | None = None) -> Any:
        plan = stock(sizes, splits)
        seen.append((sizes.keys, plan.splits))
        return plan

    monkeypatch.setattr(launching, "choose_plan", choose_plan)

    for length in (200, 1600):
        shape = AttentionShape(rows=(0,), lens=(length,))
        problem = draft_problem(shape, 2, 3, 1, DEVICE)
        space = nan_space(problem, 64)
        tree_attention(narrowed(problem), untouched(problem.query), workspace=space)
        tree_attention(problem, untouched(problem.query), workspace=space)
    short, _, long, control = seen
    assert short == long
    assert short[0] == table_width(WINDOW, 0, 16) * 16
    assert control[0] > 10 * long[0]
    assert control[1] > long[1]
