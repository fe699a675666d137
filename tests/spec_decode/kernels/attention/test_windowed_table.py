"""Block tables of a window, against lists of positions; kernels that read pages by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.spec_decode.kernels.attention.test_tree_attention import DEVICE
from tests.support.references.tree_reference import draft_attention_reference
from tests.support.samples.attention_samples import TOLERANCE, draft_problem, untouched
from tests.support.samples.attention_spaces import nan_space
from vllm_graft.spec_decode.kernels.attention import tree_attention
from vllm_graft.spec_decode.kernels.attention.tree_attention import draft_attention
from vllm_graft.spec_decode.kernels.attention.windowed_table import table_width, windowed_table
from vllm_graft.spec_decode.targets.dense.plain_attention import windowed_table_reference
from vllm_graft.spec_decode.targets.dense.samples import AttentionShape

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
        draft_attention_reference(one, out)
        expected[own] = out
    cache[~kept.to(DEVICE)] = float("nan")
    assert not bool(kept.all())
    problem = replace(problem, kv_cache=cache)

    space = nan_space(problem, 16) if splits > 1 else None
    found = untouched(problem.query)
    draft_attention(narrowed(problem), found, workspace=space, num_splits=splits)
    assert float((found - expected).abs().max()) < TOLERANCE[torch.float32]
    # The control: the whole table reads the other blocks.
    draft_attention(problem, found, workspace=space, num_splits=splits)
    assert not torch.allclose(found, expected, atol=1e-2)


def test_splits_do_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level's time is bounded: grid and keys are the same at any context."""
    seen: list[tuple[int, int]] = []
    stock = tree_attention.choose_plan

    def choose_plan(sizes: Any, splits: int | None = None) -> Any:
        plan = stock(sizes, splits)
        seen.append((sizes.keys, plan.splits))
        return plan

    monkeypatch.setattr(tree_attention, "choose_plan", choose_plan)

    for length in (200, 1600):
        shape = AttentionShape(rows=(0,), lens=(length,))
        problem = draft_problem(shape, 2, 3, 1, DEVICE)
        space = nan_space(problem, 64)
        draft_attention(narrowed(problem), untouched(problem.query), workspace=space)
        draft_attention(problem, untouched(problem.query), workspace=space)
    short, _, long, control = seen
    assert short == long
    assert short[0] == table_width(WINDOW, 0, 16) * 16
    assert control[0] > 10 * long[0]
    assert control[1] > long[1]
