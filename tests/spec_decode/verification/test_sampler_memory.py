"""Memory that verification allocates beside the model's logits, and greedy draws from ties.

vLLM's own sampler is at work here, over tree rows of several requests.
"""

from __future__ import annotations

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

from vllm_graft.spec_decode.targets.model_state import samples_by_temperature
from vllm_graft.spec_decode.verification import sampler as verify
from vllm_graft.spec_decode.verification.sampler import TreeRejectionSampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
