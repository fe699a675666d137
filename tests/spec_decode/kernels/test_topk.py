from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.crossed import crossed
from vllm_graft.spec_decode.kernels import kernel_launch
from vllm_graft.spec_decode.kernels.candidates import expand_frontier, seed_frontier
from vllm_graft.spec_decode.kernels.topk import Noise, topk_logprobs
from vllm_graft.spec_decode.trees.tree import CandidateTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plain(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the best by a stable sort of the whole row."""
    logp = logits.float().log_softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return logp.gather(1, order), order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "vocab", "topk"), [(1, 7, 7), (3, 100, 8), (5, 4096, 1), (2, 4099, 10), (2, 9000, 32)]
)
def test_equals_a_sort(dtype: torch.dtype, rows: int, vocab: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(DEVICE, dtype)
    logp, tokens = topk_logprobs(logits, topk)
    wanted_logp, wanted = plain(logits, topk)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logp, wanted_logp, atol=2e-5, rtol=1e-5)
    assert (logp <= 0).all()


def test_ties_take_the_lower_index() -> None:
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[1, [17, 4500, 300]] = 3.0
    _, tokens = topk_logprobs(logits, 4)
    assert tokens.tolist() == [[0, 1, 2, 3], [17, 300, 4500, 0]]


def test_masked_tokens_and_padding() -> None:
    """-inf never wins over a number, also where it fills whole blocks."""
    logits = torch.full((1, 8300), float("-inf"), device=DEVICE)
    logits[0, 8299], logits[0, 5] = 1.0, 2.0
    logp, tokens = topk_logprobs(logits, 2)
    assert tokens.tolist() == [[5, 8299]]
    torch.testing.assert_close(logp, torch.tensor([[1.0, 0.0]], device=DEVICE) - 1.3132617)


def test_nan_is_no_token() -> None:
    """Padding rows hold anything, but their result must be a token and no NaN."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    wanted = plain(logits, 3)[1]
    logits[1] = float("nan")
    logits[2, wanted[2, 0]] = float("nan")
    logp, tokens = topk_logprobs(logits, 3, torch.arange(5000, device=DEVICE))
    assert torch.equal(tokens[0], wanted[0])
    assert tokens[1].tolist() == [0, 1, 2]
    assert logp[1].tolist() == [float("-inf")] * 3
    assert torch.equal(tokens[2, :2], wanted[2, 1:])
    assert not logp.isnan().any()


def test_maps_ids_and_takes_strided_rows() -> None:
    storage = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits = storage[:, :150]
    names = torch.arange(150, device=DEVICE) * 3 + 1
    _, tokens = topk_logprobs(logits, 5, names)
    assert torch.equal(tokens, names[plain(logits, 5)[1]])


def test_refuses_more_than_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="topk must be 1 to 3"):
        topk_logprobs(torch.zeros(1, 3), 4)


@pytest.mark.parametrize(("mapped", "fp64"), crossed([False, True], [False, True]))
def test_the_best_with_noise_is_the_sampler_s_draw(mapped: bool, fp64: bool) -> None:
    """vLLM's own sampler is the oracle: our best token is its draw, at each temperature."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    generator = torch.Generator().manual_seed(8)
    rows, vocab, draft_vocab = 3, 6000, 5000
    temperature = torch.tensor([0.7, 0.0, 1.0, 2.5], device=DEVICE)
    seeds = torch.tensor([11, 12, 2**40 + 13, 14], device=DEVICE)
    idx_mapping = torch.tensor([2, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    positions = torch.arange(100, 100 + 4 * rows, device=DEVICE)
    logits = (torch.randn(4 * rows, vocab, generator=generator) * 3).to(DEVICE)
    target_ids = None
    draft = logits
    if mapped:
        target_ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        target_ids = target_ids.to(DEVICE)
        draft = logits[:, target_ids].contiguous()
        logits = torch.full_like(logits, float("-inf")).index_copy(1, target_ids, draft)
    drawn = gumbel_sample(
        logits.clone(),
        idx_mapping.repeat_interleave(rows),
        temperature,
        seeds,
        positions + 1,
        apply_temperature=True,
        is_drafting=False,
        use_fp64=fp64,
    )
    noise = Noise(temperature, seeds, idx_mapping, positions, rows, 1, fp64)
    logp, tokens = topk_logprobs(draft, 4, target_ids, noise=noise)
    assert torch.equal(tokens[:, 0], drawn)
    assert (logp[:, :-1] >= logp[:, 1:]).all()
    assert (logp.exp().sum(1) <= 1.0001).all()
    # Greedy rows are ranked by probability, the others are not.
    plain_logp, plain_tokens = topk_logprobs(draft, 4, target_ids)
    greedy = slice(2 * rows, 3 * rows)
    assert torch.equal(tokens[greedy], plain_tokens[greedy])
    assert torch.equal(logp[greedy], plain_logp[greedy])
    assert not torch.equal(tokens, plain_tokens)
    # Another position has other noise.
    moved = Noise(temperature, seeds, idx_mapping, positions + 1, rows, 1, fp64)
    assert not torch.equal(topk_logprobs(draft, 4, target_ids, noise=moved)[1], tokens)


def test_logits_are_sharpened_before_noise() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 700, generator=generator).to(DEVICE)
    ones, ids = torch.ones(4, device=DEVICE), torch.arange(4, device=DEVICE)
    temperature, positions = torch.tensor([0.0, 0.5, 1.0, 1.5], device=DEVICE), ids + 40
    noise = Noise(temperature, ones.long(), ids, positions, 1)
    logp, tokens = topk_logprobs(logits, 8, noise=noise, sharpness=1.5)
    wanted_logp, wanted = topk_logprobs(logits * 1.5, 8, noise=noise)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logp, wanted_logp)
    assert not torch.equal(topk_logprobs(logits, 8, noise=noise)[1], tokens)


def test_padding_has_no_noise() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    ones = torch.ones(1, device=DEVICE)
    padding = torch.tensor([-1, -1], dtype=torch.int32, device=DEVICE)
    noise = Noise(ones, ones.long(), padding, torch.zeros(2, dtype=torch.int64, device=DEVICE), 1)
    assert torch.equal(topk_logprobs(logits, 5, noise=noise)[1], topk_logprobs(logits, 5)[1])


def _biased(
    num_shared: int, nodes: int, vocab: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Biases, shared logits with a stride between rows, and their sums in float32."""
    generator = torch.Generator().manual_seed(vocab + nodes)
    biases = torch.randn(num_shared * nodes, vocab, generator=generator).to(DEVICE, dtype)
    shared = (torch.randn(num_shared, 3, vocab, generator=generator) * 3).to(DEVICE, dtype)[:, 1]
    return biases, shared, biases.float() + shared.float().repeat_interleave(nodes, 0)


@pytest.mark.parametrize(
    ("shape", "noisy", "many"),
    crossed(
        [(2, 4, 5000, torch.bfloat16), (3, 1, 100, torch.float32), (2, 6, 1500, torch.float32)],
        [False, True],
        [1, 10**9],
    ),
)
def test_rows_with_shared_logits_are_those_of_the_sums(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int, torch.dtype],
    noisy: bool,
    many: int,
) -> None:
    """However many rows a program takes; one of the requests is greedy, one is padding."""
    monkeypatch.setattr(kernel_launch, "_MANY_PROGRAMS", many)
    num_shared, nodes, vocab, dtype = shape
    rows = num_shared * nodes
    assert kernel_launch.rows_per_program(rows, nodes, 1) == (nodes if many == 1 else 1)
    biases, shared, sums = _biased(num_shared, nodes, vocab, dtype)
    noise = None
    if noisy:
        noise = Noise(
            torch.tensor([0.7, 0.0, 1.3], device=DEVICE),
            torch.tensor([11, 12, 2**40 + 13], device=DEVICE),
            torch.tensor([2, 1, -1][:num_shared], device=DEVICE),
            torch.arange(90, 90 + num_shared, device=DEVICE).repeat_interleave(nodes),
            nodes,
        )
    names = torch.arange(vocab, device=DEVICE) * 2 + 1
    logp, tokens = topk_logprobs(shared, 4, names, None, noise, 1.1, biases)
    wanted_logp, wanted = topk_logprobs(sums, 4, names, None, noise, 1.1)
    assert torch.equal(tokens, wanted)
    assert torch.equal(logp, wanted_logp)
    # Controls: the logits of the wrong request, and no noise, give other tokens.
    assert not torch.equal(topk_logprobs(shared.flip(0), 4, biases=biases)[1] * 2 + 1, tokens)
    if noisy:
        assert not torch.equal(topk_logprobs(shared, 4, names, biases=biases)[1], tokens)


def test_a_program_takes_several_rows_where_programs_are_many() -> None:
    assert kernel_launch.rows_per_program(8, 8, 63) == 1
    assert kernel_launch.rows_per_program(32, 8, 63) == 2
    assert kernel_launch.rows_per_program(64, 4, 63) == 4
    assert kernel_launch.rows_per_program(48, 3, 63) == 3
    assert kernel_launch.rows_per_program(16, 1, 63) == 1


@pytest.mark.skipif(DEVICE == "cuda", reason="interpreted kernels")
@pytest.mark.parametrize("topk", [1, 8])
def test_engines_of_tests_rank_and_draw_as_the_kernels_do(
    topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, with ties, noise, NaN and rows that have too few numbers."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    from tests.support.engines.quick_kernels import quicken
    from tests.support.engines.quick_launches import LAUNCHES

    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 5000, generator=generator).round(decimals=1)
    logits[1] = -1.0
    logits[2, 2:] = float("-inf")
    logits[3, ::7] = float("nan")
    logits[4] *= -1e37
    biases, shared = torch.randn(8, 5000, generator=generator).half().split([6, 2])
    seeds = torch.tensor([7, -3, 1 << 40, 0, 12, 5])
    heat = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.3])
    slots, positions = torch.tensor([0, 1, 2, -1, 4, 5]), torch.arange(6) * 1000
    drawn = Noise(heat, seeds, slots, positions, 1)
    grouped = Noise(heat, seeds, torch.tensor([1, 5]), positions // 3000, 3)
    names = torch.randperm(5000, generator=generator)

    def ranked() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            topk_logprobs(logits, topk),
            topk_logprobs(logits[:, :9], topk),
            topk_logprobs(logits, topk, noise=drawn),
            topk_logprobs(logits.bfloat16(), topk, names, noise=drawn, sharpness=1.5),
            topk_logprobs(shared, topk, names, noise=grouped, biases=biases),
        ]

    def sampled() -> list[torch.Tensor]:
        rows = logits.nan_to_num(0.0), slots, heat, seeds, positions
        drawn = [gumbel_sample(*rows, *each) for each in product([True, False], repeat=2)]
        scores = compute_topk_scores(logits[:2], topk, drawn[0][:2])
        return [*drawn, scores.selected_token_ranks, scores.logprobs.mul(1e4).round()]

    def grown() -> list[torch.Tensor]:
        table = CandidateTable.allocate(5, topk, 3, "cpu")
        moved = [torch.zeros(5 * topk, dtype=torch.long) for _ in range(2)]
        logp = shared.float()[0, : 3 * topk**2].round(decimals=1).view(-1, topk)
        tokens = names[: 3 * topk**2].view(-1, topk)
        seed_frontier(table, logp[:3], tokens[:3], 3)
        expand_frontier(table, 1, logp, tokens, 3, *moved)
        alike = (each[:topk].expand(3, topk, topk) for each in (logp, tokens))
        expand_frontier(table, 2, *alike, 3, *moved)
        return [*(each[:3] for each in vars(table).values()), *moved]

    expected, wanted, right = ranked(), sampled(), grown()
    quicken(monkeypatch.setattr)
    calls: Counter[str] = Counter()
    for name, function in list(LAUNCHES.items()):

        def counted(*args: Any, name: str = name[1], function: Any = function) -> Any:
            calls[name] += 1
            return function(*args)

        monkeypatch.setitem(LAUNCHES, name, counted)
    for ours, theirs in zip(ranked(), expected, strict=True):
        assert torch.equal(ours[1], theirs[1])
        torch.testing.assert_close(ours[0], theirs[0], rtol=2e-6, atol=2e-6)
    assert all(map(torch.equal, sampled(), wanted))
    assert all(map(torch.equal, grown(), right))
    ranks = {"_block_kernel": 5, "_merge_kernel": 5}
    draws = {"_gumbel_sample_kernel": 4, "_topk_log_softmax_kernel": 1, "_ranks_kernel": 1}
    assert calls == ranks | draws | {"_expand_kernel": 2}
    assert not torch.equal(expected[0][1], expected[2][1])
    assert not torch.equal(wanted[0], wanted[1])
