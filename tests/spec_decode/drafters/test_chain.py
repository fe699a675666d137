"""The captured loop of a draft model: its static inputs, and refusals when it starts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from tests.support.vllm_configs import captured_config
from vllm_graft.base import info
from vllm_graft.base.errors import ConfigError
from vllm_graft.graph_runners.language.draft import DraftGraphRunner, EagerDraftRunner
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.drafters.standalone.chain import (
    ChainCounters,
    ChainInputs,
    ChainSpeculator,
)
from vllm_graft.spec_decode.drafters.standalone.first_pass import ExtendInputs


def test_inputs_keep_their_addresses_and_clear_what_is_padding() -> None:
    idx_mapping = torch.tensor([3, 0, 1, -1], dtype=torch.int64)
    inputs = ChainInputs.allocate(idx_mapping)
    captured = inputs.rows(4)
    seq_lens = torch.tensor([9, 8, 7, 6], dtype=torch.int32)
    inputs.load(seq_lens, torch.tensor([1, 0, 2], dtype=torch.int32), 3)
    assert captured.seq_lens.tolist() == [8, 8, 5, 0]
    inputs.load(seq_lens, torch.tensor([2], dtype=torch.int64), 1)
    assert captured.seq_lens.tolist() == [7, 0, 0, 0]
    assert captured.num_rejected.tolist() == [0, 0, 0, 0]
    idx_mapping.fill_(-1)
    assert captured.idx_mapping.tolist() == [-1] * 4


def batch_of(*widths: int) -> Any:
    """Make a batch of the target whose requests have so many rows."""
    num_tokens = sum(widths)
    return SimpleNamespace(
        num_reqs=len(widths),
        num_tokens=num_tokens,
        num_scheduled_tokens=np.array(widths),
        input_ids=torch.arange(num_tokens + 3, dtype=torch.int32) + 50,
        positions=torch.arange(num_tokens + 3) + 9,
        seq_lens=torch.arange(len(widths) + 1, dtype=torch.int32) + 20,
    )


def test_the_first_pass_takes_batches_of_as_many_rows_each() -> None:
    inputs = ExtendInputs.allocate(torch.full((4,), -1), 3)
    assert inputs.fits(batch_of(3))
    assert inputs.fits(batch_of(3, 3, 3))
    assert not inputs.fits(batch_of(3, 2))
    assert not inputs.fits(batch_of(2, 4))
    assert not inputs.fits(batch_of(12))


def test_inputs_of_the_first_pass_pad_with_requests_of_their_own_rows() -> None:
    idx_mapping = torch.tensor([2, 0, -1, -1])
    inputs = ExtendInputs.allocate(idx_mapping, 3)
    captured = inputs.rows(3)
    assert (captured.num_reqs, captured.num_tokens) == (3, 9)
    assert captured.query_start_loc.tolist() == captured.query_start_loc_np.tolist() == [0, 3, 6, 9]
    inputs.load(batch_of(3, 3, 3), torch.tensor([1, 1, 1]), torch.tensor([[7], [8], [9], [6]]))
    inputs.load(batch_of(3, 3), torch.tensor([2, 0]), torch.tensor([[4], [5], [6], [7]]))
    assert captured.input_ids[:6].tolist() == [50, 51, 52, 53, 54, 55]
    assert captured.positions[:6].tolist() == [9, 10, 11, 12, 13, 14]
    assert captured.seq_lens.tolist() == [20, 21, 3]
    assert captured.num_rejected.tolist() == [2, 0, 0]
    assert captured.last_sampled.tolist() == [4, 5, 6, 7]
    # Padding's index -1 reads the element before the first, so no cast may make a copy.
    assert captured.last_sampled.storage_offset() == 1
    assert captured.last_sampled.int().data_ptr() == captured.last_sampled.data_ptr()
    assert captured.num_rejected.int().data_ptr() == captured.num_rejected.data_ptr()


@pytest.fixture
def speculator(lone_rank: None) -> Any:
    """A speculator of five drafts per request that has yet to plan its graphs; no engine."""
    made: Any = object.__new__(ChainSpeculator)
    backend = SimpleNamespace(get_name=lambda: "PLANNED_ATTN")
    vars(made).update(
        graph_runner_cls=DraftGraphRunner,
        device=torch.device("cpu"),
        max_num_reqs=6,
        num_speculative_steps=5,
        supports_decode_metadata_update=True,
        attn_groups=[[SimpleNamespace(backend=backend)]],
        chain_runner=None,
        extend_runner=None,
        config=DraftConfig(),
        extend_inputs=ExtendInputs.allocate(torch.full((6,), -1), 6),
        counters=ChainCounters(),
        vllm_config=captured_config([1, 2, 4, 36]),
    )
    return made


FULL = CUDAGraphMode.FULL_DECODE_ONLY


def test_sizes_are_requests_and_a_batch_takes_the_next(speculator: Any) -> None:
    speculator.init_cudagraph_manager(FULL)
    runner = speculator.chain_runner
    descs = runner._capture_descs[CUDAGraphMode.FULL]
    assert [(desc.num_reqs, desc.num_tokens) for desc in descs] == [(4, 4), (2, 2), (1, 1)]
    assert speculator._graph_of(1) is None
    assert speculator.counters == ChainCounters(uncaptured=1)
    runner._graphs_captured, runner.graphs = True, dict.fromkeys(descs)
    assert [speculator._graph_of(batch).num_reqs for batch in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert speculator._graph_of(5) is None
    assert speculator.counters == ChainCounters(uncaptured=1, too_large=1)


def test_graphs_of_the_first_pass_hold_a_row_more_a_request(speculator: Any) -> None:
    vars(speculator.attn_groups[0][0].backend)["get_name"] = lambda: "FLASH_ATTN"
    speculator.init_cudagraph_manager(FULL)
    runner = speculator.extend_runner
    descs = runner._capture_descs[CUDAGraphMode.FULL]
    # These are the loop's numbers of requests for which 36 rows suffice.
    assert [(desc.num_reqs, desc.num_tokens) for desc in descs] == [(4, 28), (2, 14), (1, 7)]
    runner._graphs_captured, runner.graphs = True, dict.fromkeys(descs)
    inputs = speculator.extend_inputs
    assert speculator._extend_graph_of(batch_of(6)) == (inputs, runner, descs[2])
    assert speculator._extend_graph_of(batch_of(6, 6, 6)) == (inputs, runner, descs[0])
    for other in (batch_of(5), batch_of(6, 5), batch_of(*[6] * 5)):
        assert speculator._extend_graph_of(other) is None


@pytest.mark.parametrize(("extend", "backend"), [(True, "FLASHINFER"), (False, "FLASH_ATTN")])
def test_without_graphs_of_the_first_pass(speculator: Any, extend: bool, backend: str) -> None:
    vars(speculator.attn_groups[0][0].backend)["get_name"] = lambda: backend
    speculator.config = DraftConfig(extend=extend)
    speculator.init_cudagraph_manager(FULL)
    assert speculator.extend_runner is None
    assert speculator._extend_graph_of(batch_of(6)) is None


def test_each_size_is_prepared_outside_its_graph(
    speculator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def capture(self: Any, create: Any, title: str) -> None:
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            run = create(desc, warmup=False)
            said.append("capture")
            run(CUDAGraphMode.NONE)

    def prepare(num_reqs: int) -> Any:
        said.append(f"prepare {num_reqs}")
        return lambda: said.append(f"run {num_reqs}")

    monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "capture", capture)
    speculator.init_cudagraph_manager(FULL)
    speculator.chain_runner.capture_passes(prepare, "title")
    assert said[:3] == ["prepare 4", "capture", "run 4"]
    assert len(said) == 9


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_without_full_decodes_it_is_refused(speculator: Any, mode: CUDAGraphMode) -> None:
    with pytest.raises(ConfigError, match=rf"came out as {mode.name}.*FULL_DECODE_ONLY"):
        speculator.init_cudagraph_manager(mode)


def test_attention_planned_on_the_host_is_refused(speculator: Any) -> None:
    speculator.supports_decode_metadata_update = False
    with pytest.raises(ConfigError, match=r"\(PLANNED_ATTN\) plans each step on the host"):
        speculator.init_cudagraph_manager(FULL)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([36], "is at most --max-num-seqs 6: add sizes from 1 to 6"),
        ([1, 2, 4], "6 rows per request, so that the engine captures nothing at all"),
    ],
)
def test_sizes_without_a_graph_are_refused(speculator: Any, sizes: list[int], words: str) -> None:
    compilation = speculator.vllm_config.compilation_config
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = max(sizes)
    with pytest.raises(ConfigError, match=words):
        speculator.init_cudagraph_manager(FULL)


def test_the_eager_runner_captures_nothing_and_is_not_refused(speculator: Any) -> None:
    speculator.graph_runner_cls = EagerDraftRunner
    speculator.init_cudagraph_manager(FULL)
    assert not speculator.chain_runner.needs_capture()
    assert speculator._graph_of(1) is None


def test_a_preset_launches_what_cannot_be_captured(speculator: Any) -> None:
    info.clear()
    decided = {"preset": "auto", "on": {"draft": "graphs"}, "off": {}}
    speculator.vllm_config.additional_config = {"graft": {"draft": {}, "decided": decided}}
    speculator.supports_decode_metadata_update = False
    speculator.init_cudagraph_manager(FULL)
    assert "plans each step on the host" in info.declined()["draft"]
    speculator.capture()
    assert speculator._graph_of(1) is None
    assert speculator._extend_graph_of(batch_of(6)) is None
    assert speculator.report()["graphs"] == []
    info.clear()
