"""Data-parallel ranks that step together draft one number of nodes, and come to verify one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.spec_decode.tree_part import _hook_config
from vllm_graft.spec_decode.tuning import rank_agreement
from vllm_graft.spec_decode.tuning.rank_agreement import (
    Heard,
    RankAgreement,
    Said,
    SharedLookup,
    follow_ranks,
    ride_along,
    share_wishes,
    step_together,
)


class Wire:
    """Adds up the tensors of several ranks, each in a thread."""

    def __init__(self, ranks: int) -> None:
        self._tensors: list[torch.Tensor] = []
        self._all_there = Barrier(ranks)

    def add_up(self, tensor: torch.Tensor) -> None:
        own = tensor.clone()
        self._tensors.append(own)
        self._all_there.wait(20)
        tensor.copy_(torch.stack(self._tensors).sum(0))
        if self._all_there.wait(20) == 0:
            self._tensors.clear()
        self._all_there.wait(20)


def exchange(agreements: list[RankAgreement], said: list[Said]) -> list[torch.Tensor]:
    """Let all ranks exchange what they say; return vLLM's own rows, as each has them then."""
    wire = Wire(len(agreements))

    def one(rank: int) -> torch.Tensor:
        rows = torch.zeros(6, len(agreements), dtype=torch.int32)
        rows[:, rank] = torch.arange(6) + 10 * rank
        agreements[rank].said = said[rank]
        agreements[rank].exchange(rows, rank, wire.add_up)
        return rows

    with ThreadPoolExecutor(len(agreements)) as pool:
        return list(pool.map(one, range(len(agreements))))


def test_all_ranks_draft_the_most_that_one_has_planned() -> None:
    ranks = [RankAgreement() for _ in range(3)]
    rows = exchange(ranks, [Said(8, 7, 2), Said(), Said(1, 15, 5)])
    assert [rank.drafts for rank in ranks] == [7, 7, 7]
    assert [rank.heard for rank in ranks] == [Heard(15, 5), Heard(15, 5), Heard(7, 2)]
    expected = torch.arange(6)[:, None] + 10 * torch.arange(3)
    assert all(torch.equal(each, expected.int()) for each in rows)


def test_no_drafts_are_a_number_and_dummies_are_none() -> None:
    ranks = [RankAgreement() for _ in range(2)]
    exchange(ranks, [Said(), Said()])
    assert [rank.drafts for rank in ranks] == [None, None]
    exchange(ranks, [Said(1, 0, 4), Said()])
    assert [rank.drafts for rank in ranks] == [0, 0]
    exchange(ranks, [Said(16, 15, 1), Said()])
    exchange(ranks, [Said(), Said()])
    # Dummies go on with the last number, which all ranks know.
    assert [rank.drafts for rank in ranks] == [15, 15]
    assert ranks[1].heard == Heard()


def of_two(tensor: torch.Tensor) -> None:
    """Add up with a second rank of 30 rows, which has planned 31 and wishes 15 for 4 requests."""
    second = torch.zeros_like(tensor)
    second[:, 1] = torch.tensor([30, 0, 0, -1, 0, 4, *[0] * (len(tensor) - 9), 32, 15, 4])
    tensor += second


def test_the_rows_go_with_vllm_s_own_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.distributed import parallel_state
    from vllm.v1.worker.gpu import dp_utils
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    group = SimpleNamespace(cpu_group="cpu", rank_in_group=0, cpu_all_reduce_=of_two)
    monkeypatch.setattr(parallel_state, "get_dp_group", lambda: group)
    for name in ("dist", "get_dp_group"):  # `ride_along` replaces one of them.
        monkeypatch.setattr(dp_utils, name, getattr(dp_utils, name, None), raising=False)
    monkeypatch.setattr(dp_utils, "get_dp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: of_two(tensor))
    agreement = RankAgreement()
    agreement.said = Said(8, 7, 1)
    ride_along(dp_utils, agreement)
    desc = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=8, num_reqs=1)
    _, state = dp_utils.sync_cudagraph_and_dp_padding(None, desc, 8, 1, 8, 2, 0)
    assert state is not None
    assert state.num_tokens_across_dp.tolist() == [8, 30]
    assert state.num_reqs == 4
    assert (agreement.drafts, agreement.heard) == (31, Heard(15, 4))


def test_the_exchange_of_vllm_0_33_carries_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    group = SimpleNamespace(rank_in_group=0, cpu_all_reduce_=of_two)
    monkeypatch.setattr(parallel_state, "get_dp_group", lambda: group)
    agreement, module = RankAgreement(), SimpleNamespace(get_dp_group=lambda: group)
    ride_along(module, agreement)
    rows = torch.zeros(7, 2, dtype=torch.int32)
    module.get_dp_group().cpu_all_reduce_(rows)
    assert rows[:6, 1].tolist() == [30, 0, 0, -1, 0, 4]
    assert (agreement.drafts, agreement.heard) == (31, Heard(15, 4))


class Scheduler:
    """A scheduler with a table of lengths; a step is planned for as many requests as are told."""

    def __init__(self, table: list[int]) -> None:
        self.dynamic_sd_lookup: Any = table

    def schedule(self, requests: int) -> Any:
        output = SimpleNamespace(
            num_spec_tokens_to_schedule=self.dynamic_sd_lookup[requests],
            num_scheduled_tokens=dict.fromkeys(map(str, range(requests)), 1),
        )
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, output: Any) -> None:
        pass

    def update_from_output(self, output: Any, result: Any) -> str:
        return "updated"


class Worker:
    """A worker whose runner keeps what its drafter and its dummy batches are told."""

    def __init__(self) -> None:
        self.model_runner = self
        self.speculator = SimpleNamespace(propose=self._propose)
        self.decode_query_len = 64
        self.drafted: list[Any] = []
        self.dummies: list[int] = []

    def _propose(self, *, num_speculative_tokens: int | None, **kwargs: Any) -> None:
        self.drafted.append(num_speculative_tokens)

    def execute_model(self, scheduler_output: Any) -> None:
        pass

    def sample_tokens(self) -> Any:
        return SimpleNamespace(model_runner_output=SimpleNamespace())

    def execute_dummy_batch(self) -> None:
        self.execute_model(SimpleNamespace())
        self.dummies.append(self.decode_query_len)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Scheduler, Worker, RankAgreement]]:
    """Two ranks, whose schedulers have the same table."""
    found: list[tuple[Scheduler, Worker, RankAgreement]] = []
    for _ in range(2):
        made: list[RankAgreement] = []

        def keep(module: Any, agreement: RankAgreement, made: Any = made) -> None:
            made.append(agreement)

        monkeypatch.setattr(rank_agreement, "ride_along", keep)
        scheduler, worker = Scheduler([0, 31, 31, 15, 15, 7]), Worker()
        share_wishes(scheduler)  # type: ignore[arg-type]
        follow_ranks(worker)
        found.append((scheduler, worker, made[0]))
    return found


def run(ranks: list[tuple[Scheduler, Worker, RankAgreement]], requests: list[int]) -> list[int]:
    """Run a step of so many requests on each rank; return what each has planned."""
    planned = []
    outputs = []
    for (scheduler, worker, _), count in zip(ranks, requests, strict=True):
        output = scheduler.schedule(count) if count else None
        planned.append(output.num_spec_tokens_to_schedule if output else 0)
        outputs.append(output)
        if output:
            worker.execute_model(output)
        else:
            worker.execute_dummy_batch()
    exchange([each for *_, each in ranks], [each.said for *_, each in ranks])
    for (scheduler, worker, _), output in zip(ranks, outputs, strict=True):
        worker.speculator.propose(num_speculative_tokens=None, dp_sync_state=None)
        if output:
            result = worker.sample_tokens().model_runner_output
            assert scheduler.update_from_output(output, result) == "updated"
    return planned


def test_ranks_come_to_plan_one_number(ranks: Any) -> None:
    assert run(ranks, [1, 5]) == [31, 7]
    assert [worker.drafted[-1] for _, worker, _ in ranks] == [31, 31]
    # Both know the larger batch now, and the first one's wish of then, which lasts for a step.
    assert run(ranks, [1, 5]) == [7, 31]
    assert [worker.drafted[-1] for _, worker, _ in ranks] == [31, 31]
    assert run(ranks, [1, 5]) == run(ranks, [1, 5]) == [7, 7]
    assert [worker.drafted[-1] for _, worker, _ in ranks] == [7, 7]
    # The other has no requests, and the one that has some is alone from the next step on.
    assert [run(ranks, [1, 0])[0] for _ in range(3)] == [7, 31, 31]


def test_a_rank_without_requests_follows(ranks: Any) -> None:
    for _ in range(3):
        run(ranks, [3, 0])
    (_, busy, _), (_, idle, _) = ranks
    assert idle.drafted == busy.drafted == [15, 15, 15]
    # Before the first exchange it has the rows of a full tree, then those of the other rank.
    assert idle.dummies == [64, 16, 16]
    assert idle.decode_query_len == 64


def test_vllm_may_leave_all_drafts_out(ranks: Any) -> None:
    run(ranks, [1, 1])
    _, worker, _ = ranks[0]
    skipped = SimpleNamespace(skip_drafts=True)
    worker.speculator.propose(num_speculative_tokens=0, dp_sync_state=skipped)
    assert worker.drafted[-2:] == [31, 0]


def test_batches_beyond_the_table_have_its_last_entry() -> None:
    lookup = SharedLookup([0, 31, 7])
    lookup.heard = Heard(3, 900)
    assert (lookup[1], lookup.wish, lookup.tuner) == (7, 7, None)


@pytest.mark.parametrize(
    ("replicas", "experts", "changes", "together"),
    [
        (2, True, True, True),
        (1, True, True, False),
        (2, False, True, False),
        (2, True, False, False),
    ],
)
def test_ranks_step_together_where_they_share_experts(
    replicas: int, experts: bool, changes: bool, together: bool
) -> None:
    uses: Callable[[], bool] = lambda: changes  # noqa: E731
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=replicas),
        model_config=SimpleNamespace(is_moe=experts),
        speculative_config=SimpleNamespace(uses_dynamic_speculative_decoding=uses),
    )
    assert step_together(config) is together


@pytest.mark.parametrize("graft", [{"tree": {}}, {"tree": {"shape": "auto"}}, {}])
def test_trees_alone_keep_their_table_beside_data_parallel_ranks(graft: dict[str, Any]) -> None:
    class VllmConfig:
        def __init__(self) -> None:
            self.additional_config, self.dropped = {"graft": graft}, False

        def _maybe_disable_dynamic_sd_for_data_parallel(self) -> None:
            self.dropped = True

    _hook_config(SimpleNamespace(VllmConfig=VllmConfig))  # type: ignore[arg-type]
    config = VllmConfig()
    config._maybe_disable_dynamic_sd_for_data_parallel()
    assert config.dropped is not bool(graft)
