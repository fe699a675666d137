"""The context of a step, ranks that are compared, and memory that verification allocates."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from tests.support.samples.drafted_batches import DEVICE, drafted_batch, drafted_context
from vllm_graft.base.errors import GraftError
from vllm_graft.spec_decode.targets.model_state import samples_by_temperature
from vllm_graft.spec_decode.trees import tree as rank_check
from vllm_graft.spec_decode.trees.tree import TreeState
from vllm_graft.spec_decode.verification import sampler as verify
from vllm_graft.spec_decode.verification.context import TreeContext, VerifyMode
from vllm_graft.spec_decode.verification.sampler import TreeRejectionSampler


@pytest.fixture
def context() -> TreeContext:
    context = drafted_context()
    context.rows.num_rows.fill_(-7)
    context.rows.prefix_lens.fill_(-7)
    context.rows.row_masks.fill_(-7)
    return context


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
    batch = drafted_batch([5, 3, 4], [4, 0, 2], padding=1)
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
    assert step.num_drafts[:3].tolist() == [4, 0, 2]
    assert step.depth_shift is not None
    assert step.depth_shift.tolist() == [p - 100 - i for i, p in enumerate(positions)]
    assert step.num_sampled is None
    assert (context.counters.verify_steps, context.counters.nodes_verified) == (1, 6)


def test_without_drafts_one_token_queries_are_the_tree_kernel_s(context: TreeContext) -> None:
    """A FULL graph of them holds no other kernel; vLLM's number of drafts may be 0 for a size."""
    batch = drafted_batch([1, 1, 1], [0, 0, 0], padding=1)
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


SLOTS = torch.tensor([3, 0])


def trees() -> tuple[TreeState, torch.Tensor]:
    return TreeState.allocate(4, 3, "cpu"), torch.arange(6).view(2, 3)


def other_rank(
    monkeypatch: pytest.MonkeyPatch, drafts: torch.Tensor, tree: TreeState
) -> list[torch.Tensor]:
    """Let a second rank send its own rows; the rows of this rank are noted."""
    seen: list[torch.Tensor] = []
    topology = [each[SLOTS].long() for each in (tree.parents, tree.depths, tree.masks)]
    peer = torch.cat([drafts, *topology], dim=1)

    def gather(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return torch.stack([rows, peer])

    monkeypatch.setattr(rank_check, "gather_rows", gather)
    return seen


def test_a_rank_alone_and_equal_ranks_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, drafts = trees()
    rank_check.check_trees(tree, SLOTS, drafts)
    seen = other_rank(monkeypatch, drafts, tree)
    rank_check.check_trees(tree, SLOTS, drafts)
    assert len(seen) == 1


@pytest.mark.parametrize("what", ["token", "parents", "depths", "masks"])
def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    tree, drafts = trees()
    theirs, others = trees()
    if what == "token":
        others[1, 2] += 1
    else:
        getattr(theirs, what)[0, 2] += 1
    other_rank(monkeypatch, others, theirs)
    message = r"ranks 0 and 1 drafted different trees for row 1 of a batch of 2 requests"
    with pytest.raises(GraftError, match=message):
        rank_check.check_trees(tree, SLOTS, drafts)


def test_slots_of_no_request_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, drafts = trees()
    theirs, others = trees()
    theirs.parents[1] += 1
    other_rank(monkeypatch, others, theirs)
    rank_check.check_trees(tree, SLOTS, drafts)


ROWS, REQS, VOCAB = 4, 6, 2500
FLOAT32 = 4
ALL = REQS * ROWS * VOCAB * FLOAT32


@pytest.fixture(autouse=True)
def _buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


class Allocations(TorchDispatchMode):
    """Record the bytes of every tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        fresh = {_storage(tensor): tensor for tensor in _tensors(result)}
        self.sizes += [
            tensor.untyped_storage().nbytes() for key, tensor in fresh.items() if key not in known
        ]
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def sampler_of(params: list[SamplingParams]) -> Any:
    """Make vLLM's sampler with a request per slot; only temperature, top-k, top-p and min-p."""
    sampler: Any = object.__new__(Sampler)
    sampler.sampling_states = SamplingStates(len(params), VOCAB)
    sampler.needs_logits_processing = np.array(
        [sampler.sampling_states.add_request(slot, each) for slot, each in enumerate(params)]
    )
    sampler.sampling_states.apply_staged_writes()
    sampler.logits_processors = []
    sampler.thinking_budget_state = SimpleNamespace(apply=lambda logits, context: None)
    sampler.use_flashinfer = sampler.use_xpu_sampler = sampler.use_fp64_gumbel = False
    sampler.logprobs_mode = "raw_logprobs"
    return sampler


def draw(logits: torch.Tensor, params: list[SamplingParams]) -> tuple[torch.Tensor, list[int]]:
    """Draw tokens of `ROWS` rows per request; return them and the sizes of allocations."""
    slots = torch.arange(REQS, device=DEVICE)
    verifier: Any = object.__new__(TreeRejectionSampler)
    verifier.sampler = sampler_of(params)
    alone = np.array([samples_by_temperature(each) for each in params])
    verifier.context = SimpleNamespace(by_temperature=alone)
    batch: Any = SimpleNamespace(
        idx_mapping=slots,
        idx_mapping_np=np.arange(REQS),
        expanded_idx_mapping=slots.repeat_interleave(ROWS),
        expanded_local_pos=torch.arange(ROWS, device=DEVICE).repeat(REQS),
        cu_num_logits=torch.arange(REQS + 1, device=DEVICE) * ROWS,
        cu_num_logits_np=np.arange(REQS + 1) * ROWS,
        seq_lens_cpu_upper_bound=torch.full((REQS,), 40),
    )
    positions = torch.arange(REQS * ROWS, device=DEVICE)
    rows: Any = SimpleNamespace(logits=logits, positions=positions, ids=positions)
    with Allocations() as seen:
        chunks = verify._chunks(batch, verify._max_rows(VOCAB))
        tokens = torch.cat([verifier._draw(rows, batch, chunk)[0] for chunk in chunks])
    return tokens, seen.sizes


def logits_with_ties(seed: int) -> torch.Tensor:
    """Make bf16 logits of few distinct values: many rows have their largest several times."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-40, 3, (REQS * ROWS, VOCAB), generator=generator)
    return (values / 8).to(torch.bfloat16).to(DEVICE)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_rows_take_the_first_of_the_largest_without_a_copy(seed: int) -> None:
    logits = logits_with_ties(seed)
    best = logits.max(-1, keepdim=True).values
    assert int((logits == best).sum(-1).min()) > 1
    tokens, sizes = draw(logits, [SamplingParams(temperature=0)] * REQS)
    assert torch.equal(tokens, logits.argmax(-1))
    first = (logits == best).int().argmax(-1)
    assert torch.equal(tokens, first)
    # No allocation is as large as half of the model's own logits.
    assert max(sizes) < ALL // FLOAT32


def test_temperature_takes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_with_ties(5)
    params = [SamplingParams(temperature=t, seed=i) for i, t in enumerate((0, 0.3, 0.6, 1, 1.5, 2))]
    tokens, sizes = draw(logits, params)
    assert max(sizes) < ALL // FLOAT32
    # The tokens equal those of vLLM's sampler, which divides a copy.
    monkeypatch.setattr(f"{__name__}.samples_by_temperature", lambda params: False)
    copied, sizes = draw(logits, params)
    assert max(sizes) == ALL
    assert torch.equal(tokens, copied)


@pytest.mark.parametrize("rows", [ROWS, 2 * ROWS, 100])
def test_float32_copies_are_of_a_chunk(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MAX_CHUNK_BYTES", rows * VOCAB * FLOAT32)
    logits = logits_with_ties(7)
    params = [SamplingParams(temperature=0.6, min_p=0.01, seed=3)] * REQS
    tokens, sizes = draw(logits, params)
    chunk = min(rows, REQS * ROWS) * VOCAB * FLOAT32
    assert max(sizes) == chunk
    monkeypatch.setattr(verify, "MAX_CHUNK_BYTES", 2**30)
    assert torch.equal(tokens, draw(logits, params)[0])


def test_a_large_batch_adds_less_than_a_gibibyte() -> None:
    """Batch 64, 31 nodes, Llama-3's vocabulary: values and indices of torch's sort count too."""
    vocab, rows = 128_256, 64 * 32
    most = verify._max_rows(vocab)
    assert most >= 32
    assert most * vocab * FLOAT32 <= verify.MAX_CHUNK_BYTES
    assert rows / most > 2
    copy, values, indices = (most * vocab * size for size in (4, 4, 8))
    assert copy + values + indices <= 2**30


@pytest.mark.parametrize("coupled", [False, True])
def test_noise_of_flashinfer_is_left_out_where_drafts_look_at_it(*, coupled: bool) -> None:
    sampler: Any = SimpleNamespace(use_flashinfer=True)
    config: Any = MagicMock(rejection_sample_method="standard", num_speculative_tokens=3)
    context: Any = SimpleNamespace(coupled=coupled)
    TreeRejectionSampler(sampler, config, torch.device("cpu"), context)
    assert sampler.use_flashinfer is not coupled
