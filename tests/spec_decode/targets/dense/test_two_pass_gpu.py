"""FlashAttention 3 and the second pass, compiled: eager, planned, and in replayed graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.references.prefix_reference import prefix_attention_reference
from tests.support.samples.attention_samples import AttentionShape, tree_problem
from tests.support.samples.attention_spaces import captured, check_rows
from tests.support.watches import refused_synchronisations
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.targets.dense.plain_attention import tree_attention_reference
from vllm_graft.spec_decode.targets.dense.two_pass import (
    KernelChoice,
    Point,
    TwoPass,
    flash_prefix_attention,
    plan_prefix,
    points,
    two_pass_attention,
)
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.spec_decode.tuning.attention_timing import Geometry, measure

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("flash_attention_3")]

RELATIVE = 2e-2
# FlashAttention rounds the softmax weights to e4m3, which has three bits of mantissa.
RELATIVE_FP8 = 1e-1
SPLITS = 132


def bf16(rows: tuple[int, ...], lens: tuple[int, ...], **options: Any) -> AttentionShape:
    sizes = {"kv_heads": 8, "group": 4, "head_size": 128, "max_blocks": 2048}
    return AttentionShape(rows=rows, lens=lens, dtype=torch.bfloat16, **{**sizes, **options})


def make(shape: AttentionShape, seed: int = 0) -> TreeBatch:
    batch = tree_problem(shape, "cuda", seed)
    # FlashAttention's bound is the longest query; odd requests have three rows more.
    most = int(batch.query_start_loc.diff().max())
    return replace(batch, max_rows=most, max_seq_len=32768)


def nans(batch: TreeBatch) -> torch.Tensor:
    return torch.full(batch.query.shape, float("nan"), dtype=torch.bfloat16, device="cuda")


def expected(batch: TreeBatch) -> torch.Tensor:
    out = nans(batch).float()
    tree_attention_reference(replace(batch, max_rows=64), out)
    return out


def run(batch: TreeBatch) -> torch.Tensor:
    out = nans(batch)
    two_pass_attention(batch, out, multiprocessors=SPLITS)
    return out


def check(out: torch.Tensor, wanted: torch.Tensor, relative: float = RELATIVE) -> None:
    check_rows(out, wanted, relative)


SHAPES = [
    bf16((32,), (2048,)),
    bf16((32,) * 4, (2048, 40, 32, 9000)),
    bf16((32,) * 32, (100, 33, 32, 4000) * 8),
    bf16((7, 0, 60, 1), (300, 20, 5000, 1), kv_heads=2, group=1),
    bf16((20,) * 5, (20, 21, 999, 64, 3000), kv_heads=1, group=8, block_size=64),
    bf16((32,) * 3, (1000, 2000, 32), head_size=64, slots_first=True),
    bf16((32,) * 3, (1000, 2000, 32), kv_heads=2, head_size=256, block_size=128),
    bf16((1,) * 16, (5000,) * 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"b{len(shape.lens)}-{shape.head_size}")
def test_first_pass(shape: AttentionShape) -> None:
    """The contract of `PrefixAttention`, with and without a plan."""
    problem = make(shape)
    out, lse = prefix_attention_reference(problem, multiprocessors=SPLITS)
    seen = ~lse.isnan()
    plan = plan_prefix(problem, multiprocessors=SPLITS)
    for how in (None, plan, plan):
        ours, our_lse = flash_prefix_attention(problem, multiprocessors=SPLITS, plan=how)
        assert our_lse.shape == lse.shape
        assert (our_lse - lse)[seen].abs().max() < 1e-2
        error = (ours.float() - out).norm(dim=-1)[seen.T]
        assert (error <= RELATIVE * out.norm(dim=-1)[seen.T]).all()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"b{len(shape.lens)}-{shape.head_size}")
def test_both_passes(shape: AttentionShape) -> None:
    problem = make(shape)
    check(run(problem), expected(problem))


def test_soft_cap() -> None:
    problem = make(bf16((32, 16), (900, 16)))
    problem = replace(problem, scale=0.5)
    capped = replace(problem, soft_cap=5.0)
    check(run(capped), expected(capped))
    with pytest.raises(AssertionError):
        check(run(problem), expected(capped))


def test_sinks() -> None:
    """The second pass counts a sink, and FlashAttention does not."""
    problem = make(bf16((32, 16, 9), (900, 16, 4000), head_size=64, group=8, sinks=True))
    assert problem.sinks is not None
    check(run(problem), expected(problem))
    with pytest.raises(AssertionError):
        check(run(replace(problem, sinks=None)), expected(problem))


def test_without_the_mask_the_error_is_seen() -> None:
    problem = make(bf16((32,), (64,)))
    wanted = expected(problem)
    problem.row_masks.fill_(-1)
    with pytest.raises(AssertionError):
        check(run(problem), wanted)


def test_fp8() -> None:
    problem = make(bf16((32, 32, 20), (3000, 33, 20), fp8=True))
    q_scale = torch.tensor(0.5, device="cuda")
    small = (problem.query / q_scale).to(torch.float8_e4m3fn)
    plain = replace(problem, query=small.to(torch.bfloat16) * q_scale.to(torch.bfloat16))
    assert problem.v_scale is not None
    # The scales of a layer are scalars.
    scales = {"q_scale": q_scale, "v_scale": problem.v_scale.squeeze()}
    out = run(replace(problem, query=small, **scales))
    check(out, expected(plain), RELATIVE_FP8)


REPLAYS = [
    ((1000,) * 4, 4),
    ((40, 9000, 32, 30000), 4),
    # The last two requests are padding: empty queries, no keys.
    ((32, 5000, 0, 0), 2),
    ((0, 0, 0, 0), 0),
]


def even(batch: TreeBatch, starts: torch.Tensor, rows: int) -> TreeBatch:
    """Return the problem with `rows` rows per request."""
    tokens = int(starts[-1])
    return replace(
        batch,
        query=batch.query[:tokens].contiguous(),
        row_masks=batch.row_masks[:tokens].clone(),
        query_start_loc=starts.clone(),
        max_rows=rows,
    )


def tensors(batch: TreeBatch) -> list[tuple[str, torch.Tensor]]:
    return [(n, v) for n, v in vars(batch).items() if isinstance(v, torch.Tensor)]


def test_in_a_graph() -> None:
    """Lengths, pages and masks change between replays, in the very tensors of the capture."""
    rows = 32
    shapes = [bf16((rows,) * 5, (*(max(n, rows) for n in lens), 30000)) for lens, _ in REPLAYS]
    starts = torch.arange(0, 5 * rows + 1, rows, dtype=torch.int32, device="cuda")
    problems = [even(make(shape, seed), starts, rows) for seed, shape in enumerate(shapes)]
    static = replace(problems[0], **{n: t.clone() for n, t in tensors(problems[0])})
    metadata = object()
    out, both = nans(static), TwoPass(KernelChoice("flash"))

    def layers() -> None:
        for _ in range(3):
            both.attend(static, out, metadata, multiprocessors=SPLITS)

    # vLLM captures like this too: over a batch with nothing to compute.
    static.num_rows.zero_()
    static.prefix_lens.zero_()
    graph = captured(layers)
    for (lens, real), problem in zip(REPLAYS, problems, strict=True):
        # Only full batches have the fifth request.
        real = 5 if real == len(lens) else real
        problem.num_rows[real:] = 0
        problem.seq_lens[real:] = 0
        problem.prefix_lens[real:] = 0
        problem.query_start_loc[real + 1 :] = real * rows
        for name, value in tensors(problem):
            getattr(static, name).copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        check(out, expected(problem))


@pytest.mark.parametrize("batch", [1, 4, 16, 32])
def test_batches(batch: int) -> None:
    lens = tuple(32 + 977 * r % 5000 for r in range(batch))
    problem = make(bf16((32,) * batch, lens))
    check(run(problem), expected(problem))


def test_no_host_synchronisation() -> None:
    problem = make(bf16((32, 32), (400, 900)))
    both, out = TwoPass(KernelChoice("flash")), nans(problem)
    with refused_synchronisations():
        both.attend(problem, out, object(), multiprocessors=SPLITS)
    check(out, expected(problem))


@pytest.mark.parametrize("fp8", [False, True])
def test_measurement(fp8: bool) -> None:
    geometry = Geometry(32, 8, 128, torch.bfloat16, fp8, 16)
    where = points({8, 32}, 4, 8192)
    space = AttentionWorkspace.allocate(4, 32, 32, 128, 32, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    costs = measure(geometry, where, space, 8192, "cuda")
    assert list(costs) == where
    for times in costs.values():
        assert times.keys() == {"triton", "flash"}
        assert all(0.5 < time < 1e4 for time in times.values())
    # Four times the keys of four requests take longer with either kernel.
    for kernel in ("triton", "flash"):
        assert costs[Point(4, 32, 8192)][kernel] > costs[Point(4, 32, 2048)][kernel]  # type: ignore[index]
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


MIXED_SPLITS = 32


def stock(batch: TreeBatch, lens: torch.Tensor, out: torch.Tensor, *, splits: int) -> None:
    """Call FlashAttention as vLLM's backend does for prompts and decodes, without a schedule."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    key, value = batch.kv_cache.transpose(1, 2).split(batch.query.shape[2], dim=-1)
    flash_attn_varlen_func(
        q=batch.query,
        k=key,
        v=value,
        out=out,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_q=len(batch.query),
        seqused_k=lens,
        max_seqlen_k=batch.max_seq_len,
        block_table=batch.block_table,
        softmax_scale=batch.scale,
        causal=True,
        num_splits=splits,
        fa_version=3,
    )


@pytest.mark.parametrize("rows", [(8, 0, 8, 0, 8, 0), (64, 0, 4, 20, 1, 0), (4,) * 64 + (0,) * 8])
def test_rows_are_those_of_separate_passes(rows: tuple[int, ...]) -> None:
    lens = tuple(100 + 37 * i for i in range(len(rows)))
    shape = AttentionShape(
        rows=rows, lens=lens, kv_heads=8, group=4, head_size=128, dtype=torch.bfloat16
    )
    batch = replace(tree_problem(shape, "cuda"), max_rows=64, max_seq_len=8192, mixed=True)
    workspace = AttentionWorkspace.allocate(len(rows), 64, 32, 128, 8, "cuda")
    wanted = torch.full(batch.query.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    stock(batch, batch.seq_lens, wanted, splits=0)
    trees = wanted.float()
    tree_attention_reference(batch, trees)
    # An engine captures over a batch without keys, too.
    plain, num_rows = torch.zeros_like(batch.seq_lens), batch.num_rows.clone()
    batch.num_rows.zero_()
    out = torch.full_like(wanted, float("nan"))

    def run() -> None:
        stock(batch, plain, out, splits=MIXED_SPLITS)
        tree_attention(batch, out, workspace=workspace)

    graph = captured(run)
    batch.num_rows.copy_(num_rows)
    whole = num_rows == batch.query_start_loc.diff()
    plain.copy_(torch.where(whole, 0, batch.seq_lens))
    out.fill_(float("nan"))
    graph.replay()
    assert not out.isnan().any()
    error = (out.float() - trees).norm(dim=-1)
    assert (error <= RELATIVE * trees.norm(dim=-1)).all()
    # Negative control: without the tree kernel the trees' rows differ.
    stock(batch, plain, out, splits=MIXED_SPLITS)
    assert ((out.float() - trees).norm(dim=-1) > RELATIVE * trees.norm(dim=-1)).any()
