"""Verification around the walk: chunks of rows, placeholders, and logprobs along the path."""

import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import _iter_request_chunks

from vllm_graft.spec_decode.trees.tree import TreeState
from vllm_graft.spec_decode.verification import sampler as verify
from vllm_graft.spec_decode.verification.context import VerifyStep
from vllm_graft.spec_decode.verification.sampler import TreeRejectionSampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, NODES = 11, 4
# Node 0 has children 1 and 2, node 2 has 3, node 3 has 4.
PARENTS = [-1, 0, 0, 2, 3]
TREE_TOKENS = [5, 6, 7, 8]


class FakeSampler:
    """Draw the largest logit; processed logits are the raw ones times two."""

    def __init__(self, num_logprobs: int, mode: str, prefill_lens: list[int]) -> None:
        self.compute_nans, self.logprobs_mode = False, mode
        self.req_states = SimpleNamespace(
            prefill_len=SimpleNamespace(
                gpu=torch.tensor(prefill_lens, dtype=torch.int32, device=DEVICE)
            )
        )
        self.sampling_states = SimpleNamespace(max_num_logprobs=lambda slots: num_logprobs)
        self.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda slots: 0)
        self.calls: list[list[Any]] = []
        self.alive: list[int] = []
        """At each call, how many of the earlier processed logits were still held."""
        self._processed: list[weakref.ref[torch.Tensor]] = []

    def sample(self, logits: torch.Tensor, *rows: Any, return_logprobs: bool) -> Any:
        self.calls.append([row.tolist() for row in rows])
        self.alive.append(sum(each() is not None for each in self._processed))
        processed = logits * 2 if return_logprobs else logits
        self._processed.append(weakref.ref(processed))
        return logits.argmax(-1), processed


def make(
    drawn: list[list[int]],
    *,
    num_logprobs: int = verify.NO_LOGPROBS,
    mode: str = "raw_logprobs",
    prefill_lens: list[int] | None = None,
) -> tuple[TreeRejectionSampler, FakeSampler, torch.Tensor, Any]:
    """Make requests that verify a tree each; ``drawn[r][i]`` is the target's draw at row i."""
    num_reqs, counts = len(drawn), [len(row) for row in drawn]
    slots = list(range(num_reqs))[::-1]
    starts = np.array([0, *np.cumsum(counts)])
    flat = [token for row in drawn for token in row]
    logits = torch.randn(len(flat), VOCAB, generator=torch.Generator().manual_seed(3))
    logits[range(len(flat)), flat] = 9.0
    tree = TreeState.allocate(num_reqs, NODES, DEVICE)
    tree.parents[:] = torch.tensor(PARENTS)
    context = SimpleNamespace(
        shape=SimpleNamespace(num_nodes=NODES),
        emitted=None,
        extra_nodes=None,
        extra_counts=None,
        teaches=None,
        coupled=True,
        by_temperature=np.zeros(num_reqs, dtype=bool),
        tree=tree,
        path=torch.full((num_reqs, NODES + 1), -7, dtype=torch.int32, device=DEVICE),
    )
    owner = torch.arange(num_reqs).repeat_interleave(torch.tensor(counts))
    local = [i for count in counts for i in range(count)]
    batch = SimpleNamespace(
        num_reqs=num_reqs,
        num_tokens=len(flat),
        idx_mapping=torch.tensor(slots, device=DEVICE),
        idx_mapping_np=np.array(slots),
        expanded_idx_mapping=torch.tensor(slots)[owner].to(DEVICE),
        expanded_local_pos=torch.tensor(local, dtype=torch.int32, device=DEVICE),
        cu_num_logits=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        cu_num_logits_np=starts,
        logits_indices=torch.arange(len(flat), device=DEVICE),
        input_ids=torch.tensor(
            [[9, *TREE_TOKENS][i] for i in local], dtype=torch.int32, device=DEVICE
        ),
        positions=torch.tensor([20 + i for i in local], device=DEVICE),
        seq_lens=torch.tensor([20 + count for count in counts], dtype=torch.int32, device=DEVICE),
        seq_lens_cpu_upper_bound=torch.tensor([20 + count for count in counts]),
    )
    context.step = VerifyStep(batch, batch.cu_num_logits.diff() - 1)  # type: ignore[arg-type]
    config = SimpleNamespace(
        num_speculative_tokens=NODES,
        enable_adaptive_verification=False,
        rejection_sample_method="standard",
    )
    sampler = FakeSampler(num_logprobs, mode, prefill_lens or [4] * num_reqs)
    tree_sampler = TreeRejectionSampler(sampler, config, torch.device(DEVICE), context)  # type: ignore[arg-type]
    return tree_sampler, sampler, logits.to(DEVICE), batch


def walk(drawn: list[int]) -> tuple[list[int], list[int]]:
    """Return tokens and nodes by the definition: go to the child that holds the drawn token."""
    tokens, nodes, node = [], [0], 0
    while True:
        tokens.append(drawn[node])
        matching = [
            child
            for child in range(1, len(drawn))
            if PARENTS[child] == node and TREE_TOKENS[child - 1] == drawn[node]
        ]
        if not matching:
            return tokens, nodes
        node = matching[0]
        nodes.append(node)


# Nothing accepted; node 1; nodes 2, 3, 4; a prefix of the tree; no draft at all.
DRAWN = [[1, 1, 1, 1, 1], [5, 2, 3, 4, 4], [6, 0, 7, 8, 10], [6, 0, 3], [4]]


def test_it_emits_the_path_that_the_target_draws() -> None:
    tree_sampler, _, logits, batch = make(DRAWN)
    output = tree_sampler(logits, batch)
    expected = [walk(row) for row in DRAWN]
    assert output.num_sampled.tolist() == [len(tokens) for tokens, _ in expected]
    assert output.num_rejected.tolist() == [
        len(row) - len(tokens) for row, (tokens, _) in zip(DRAWN, expected)
    ]
    for r, (tokens, nodes) in enumerate(expected):
        assert output.sampled_token_ids[r, : len(tokens)].tolist() == tokens
        assert tree_sampler.context.path[r, : len(nodes)].tolist() == nodes
    assert output.sampled_token_ids.shape == (len(DRAWN), NODES + 1)
    assert output.logprobs_tensors is None
    step = tree_sampler.context.step
    assert step is not None
    assert step.num_sampled is output.num_sampled


def test_rows_of_prompts_have_no_logits() -> None:
    tree_sampler, _, logits, batch = make(DRAWN)
    expected = tree_sampler(logits, batch)
    plain = [
        torch.full((3,), -5, dtype=each.dtype, device=DEVICE)
        for each in (batch.input_ids, batch.positions)
    ]
    batch.input_ids = torch.cat((plain[0], batch.input_ids))
    batch.positions = torch.cat((plain[1], batch.positions))
    batch.logits_indices += 3
    batch.num_tokens += 3
    found = tree_sampler(logits, batch)
    assert found.num_sampled.tolist() == expected.num_sampled.tolist()
    assert torch.equal(found.sampled_token_ids, expected.sampled_token_ids)
    # Padding of a graph lies after the rows of a batch without prompts.
    batch.logits_indices -= 3
    batch.num_tokens -= 3
    batch.input_ids, batch.positions = (
        torch.cat((each[3:], rest)) for each, rest in zip((batch.input_ids, batch.positions), plain)
    )
    assert tree_sampler(logits, batch).num_sampled.tolist() == expected.num_sampled.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_temperature_alone_makes_no_copy(dtype: torch.dtype, mode: str) -> None:
    """Tokens are those of vLLM's sampler, which copies logits to divide them."""
    temperature = torch.tensor([0.0, 0.3, 0.6, 1.0, 1.7], device=DEVICE)
    seeds = torch.arange(5, device=DEVICE) + 7
    tree_sampler, sampler, logits, batch = make(DRAWN, mode=mode)
    logits = (logits / 3).to(dtype)
    sampler.sampling_states.temperature = SimpleNamespace(gpu=temperature)
    sampler.sampling_states.seeds = SimpleNamespace(gpu=seeds)
    sampler.use_fp64_gumbel = False  # type: ignore[attr-defined]
    tree_sampler.context.by_temperature[:] = True
    copied = logits.float()
    apply_temperature(copied, batch.expanded_idx_mapping, temperature)
    expected = gumbel_sample(
        copied,
        batch.expanded_idx_mapping,
        temperature,
        seeds,
        batch.positions,
        apply_temperature=False,
        is_drafting=False,
    )
    before = logits.clone()
    output = tree_sampler(logits, batch)
    assert sampler.calls == []
    assert torch.equal(logits, before)
    bounds = batch.cu_num_logits_np.tolist()
    rows = [expected[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    for r, row in enumerate(rows):
        tokens, _ = walk(row)
        assert output.sampled_token_ids[r, : len(tokens)].tolist() == tokens
    # If one request needs more, all go through vLLM's sampler.
    tree_sampler.context.by_temperature[0] = False
    tree_sampler(logits, batch)
    assert len(sampler.calls) == 1


class Slices(TorchDispatchMode):
    """Counts slices of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.slice.Tensor
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("limit", "slices"), [(100, False), (5, True)])
def test_a_padded_batch_is_verified_without_a_slice(
    monkeypatch: pytest.MonkeyPatch, limit: int, slices: bool
) -> None:
    """Each one takes the host as long as a part of a launch; chunks of a batch can't do without."""
    expected = make(DRAWN)[0](*make(DRAWN)[2:])
    tree_sampler, sampler, logits, batch = make(DRAWN)
    for name in ("positions", "input_ids", "seq_lens"):
        rows = getattr(batch, name)
        setattr(batch, name, torch.cat([rows, torch.full_like(rows, 99)]))
    nothing = SimpleNamespace(gpu=None)
    sampler.sampling_states.temperature = sampler.sampling_states.seeds = nothing
    sampler.use_fp64_gumbel = False  # type: ignore[attr-defined]
    tree_sampler.context.by_temperature[:] = True
    monkeypatch.setattr(verify, "gumbel_sample", lambda logits, *_, **__: logits.argmax(-1))
    monkeypatch.setattr(verify, "get_max_chunk_logits", lambda vocab: limit)
    with Slices() as found:
        output = tree_sampler(logits, batch)
    assert bool(found.count) is slices
    assert torch.equal(output.sampled_token_ids, expected.sampled_token_ids)
    assert torch.equal(output.num_sampled, expected.num_sampled)


def test_drafts_behind_an_unfinished_prompt_are_not_followed() -> None:
    # The list is by slot: the third request's root, at position 20, is in a prompt of 21 tokens.
    prefill_lens = [4, 4, 21, 4, 20]
    tree_sampler, _, logits, batch = make(DRAWN, prefill_lens=prefill_lens)
    output = tree_sampler(logits, batch)
    followed = [len(walk(row)[0]) for row in DRAWN]
    assert followed[2] == 4
    assert output.num_sampled.tolist() == [*followed[:2], 1, *followed[3:]]


def test_drafts_that_a_grammar_refuses_are_not_followed() -> None:
    tree_sampler, _, logits, batch = make(DRAWN)
    invalid = torch.zeros(len(logits), dtype=torch.bool, device=DEVICE)
    invalid[10 + 3] = True
    output = tree_sampler(logits, batch, invalid_drafts=invalid)
    assert output.num_sampled.tolist()[2] == 2
    # Without the mark the same request goes on.
    assert tree_sampler(logits, batch).num_sampled.tolist()[2] == 4


def logprobs_of(sampled: Any, num_sampled: Any, rows: Any, starts: Any, np: Any, n: int) -> Any:
    """Return the rows themselves in place of the logprobs that vLLM would compute from them."""
    assert starts.tolist() == np.tolist()
    assert starts[0] == 0
    assert starts[-1] == len(rows)
    return LogprobsTensors(rows, rows, rows.argmax(-1), np.tolist())


@pytest.mark.parametrize("limit", [1, 5, 7, 10, 100])
def test_chunks_hold_whole_requests(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    whole, _, logits, batch = make(DRAWN, num_logprobs=2, mode="processed_logprobs")
    chunked, sampler, _, _ = make(DRAWN, num_logprobs=2, mode="processed_logprobs")
    for one in (whole, chunked):
        monkeypatch.setattr(one, "_get_logprobs_tensors", logprobs_of)
    expected = whole(logits, batch)
    monkeypatch.setattr(verify, "get_max_chunk_logits", lambda vocab: limit)
    found = chunked(logits, batch)
    ranges = list(_iter_request_chunks(batch.cu_num_logits_np, limit))
    assert len(sampler.calls) == len(ranges)
    slots = batch.idx_mapping_np.tolist()
    for (expanded, requests, requests_np, positions, _, local, bounds), (first, last) in zip(
        sampler.calls, ranges
    ):
        assert requests == requests_np == slots[first:last]
        assert expanded == [s for s, row in zip(slots[first:last], DRAWN[first:last]) for _ in row]
        assert local == [i for row in DRAWN[first:last] for i in range(len(row))]
        assert positions == [20 + i for i in local]
        assert bounds == [20 + len(row) for row in DRAWN[first:last]]
    assert torch.equal(found.num_sampled, expected.num_sampled)
    assert torch.equal(found.sampled_token_ids, expected.sampled_token_ids)
    for ours, theirs in zip(found.logprobs_tensors[:3], expected.logprobs_tensors[:3]):
        assert torch.equal(ours, theirs)
    bounds = found.logprobs_tensors.cu_num_generated_tokens
    assert bounds == expected.logprobs_tensors.cu_num_generated_tokens
    assert bounds == batch.cu_num_logits_np.tolist()
    # No chunk's processed logits outlive the chunk.
    assert sampler.alive == [0] * len(ranges)


@pytest.mark.parametrize("limit", range(1, 12))
def test_chunks_are_those_of_the_chain(limit: int) -> None:
    starts = np.array([0, 3, 4, 9, 9 + limit, 10 + limit, 12 + limit])
    assert verify._ranges(starts, limit) == list(_iter_request_chunks(starts, limit))


@pytest.mark.parametrize(("mode", "factor"), [("raw_logprobs", 1), ("processed_logprobs", 2)])
def test_logprobs_are_of_the_path_s_rows(
    monkeypatch: pytest.MonkeyPatch, mode: str, factor: int
) -> None:
    tree_sampler, _, logits, batch = make(DRAWN, num_logprobs=3, mode=mode)
    asked: list[Any] = []

    def record(*given: Any) -> Any:
        asked.extend(given)
        return logprobs_of(*given)

    monkeypatch.setattr(tree_sampler, "_get_logprobs_tensors", record)
    tree_sampler(logits, batch)
    _, num_sampled, rows, starts, _, count = asked
    assert count == 3
    assert num_sampled.tolist() == [len(walk(row)[0]) for row in DRAWN]
    moved = 0
    for r, drawn in enumerate(DRAWN):
        first = int(starts[r])
        for depth, node in enumerate(walk(drawn)[1]):
            assert torch.equal(rows[first + depth], logits[first + node] * factor)
            moved += depth != node
    assert moved > 0


def test_the_kernels_of_vllm_read_these_rows() -> None:
    tree_sampler, _, logits, batch = make(DRAWN, num_logprobs=0)
    tensors = tree_sampler(logits, batch).logprobs_tensors
    assert tensors is not None
    logp = logits.log_softmax(-1)
    for r, drawn in enumerate(DRAWN):
        first = int(batch.cu_num_logits_np[r])
        for depth, (token, node) in enumerate(zip(*walk(drawn))):
            assert int(tensors.logprob_token_ids[first + depth, 0]) == token
            torch.testing.assert_close(
                tensors.logprobs[first + depth, 0], logp[first + node, token]
            )
