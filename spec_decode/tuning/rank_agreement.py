"""Data-parallel ranks of a target with experts agree on how many nodes a step drafts.

The experts lie on all ranks, so that a pass is one of all ranks. Each of them has to run the same
passes of the draft, dummy batches included, or all of them wait forever (vLLM #44185). In every
step vLLM's runner exchanges the numbers of the ranks' rows. Three more rows go with them:

- the drafts that a rank's scheduler has planned. All ranks draft the most of these. A rank keeps as
  many as it has planned, because the first nodes of a tree are the best tree of so many;
- its wish, the drafts that it would plan alone;
- its requests.

A scheduler hears of the others with the result of a step, and plans the largest wish. So the ranks
soon verify trees of one size, which a CUDA graph of all ranks needs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graft.seams.wrap import around

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler


class Said(NamedTuple):
    """What a rank says of a step: `drafts`, one more than it has planned, or 0 in a dummy batch."""

    drafts: int = 0
    wish: int = 0
    requests: int = 0


class Heard(NamedTuple):
    """The largest wish and the most requests of all other ranks."""

    wish: int = 0
    requests: int = 0


_SAID, _HEARD = "vllm_graft_said", "vllm_graft_heard"
"""Attributes of a ``SchedulerOutput`` and of a ``ModelRunnerOutput``."""


def step_together(vllm_config: VllmConfig) -> bool:
    """Whether an engine's ranks have to agree on numbers of drafts, which change."""
    speculative = vllm_config.speculative_config
    return (
        vllm_config.parallel_config.data_parallel_size > 1
        and vllm_config.model_config.is_moe
        and speculative is not None
        and speculative.uses_dynamic_speculative_decoding()
    )


class RankAgreement:
    """The worker's side: what the ranks have told each other in the latest exchange. `said`: what
    this rank will say. `heard`: what the others have said. `drafts`: what all ranks draft, as long
    as all batches are dummies; None before the first."""

    def __init__(self) -> None:
        self.said, self.heard = Said(), Heard()
        self.drafts: int | None = None

    def exchange(
        self, tensor: torch.Tensor, rank: int, add_up: Callable[[torch.Tensor], object]
    ) -> None:
        """Add up vLLM's numbers, int32 ``[rows, ranks]``, over all ranks, and ours with them."""
        import torch

        rows = len(tensor)
        ours = tensor.new_zeros(len(self.said), tensor.shape[1])
        ours[:, rank] = tensor.new_tensor(self.said)
        both = torch.cat([tensor, ours])
        add_up(both)
        tensor.copy_(both[:rows])
        self.hear([Said(*each) for each in both[rows:].t().tolist()], rank)

    def hear(self, said: list[Said], rank: int) -> None:
        if most := max(each.drafts for each in said):
            self.drafts = most - 1
        others = [each for place, each in enumerate(said) if place != rank]
        self.heard = Heard(
            max((each.wish for each in others), default=0),
            max((each.requests for each in others), default=0),
        )


def ride_along(module: Any, agreement: RankAgreement) -> None:
    """Send an agreement's rows in the exchange of vLLM's ``gpu.dp_utils``, the given module."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_dp_group

    def all_reduce(tensor: torch.Tensor, *, group: Any) -> None:
        from torch import distributed

        add_up = functools.partial(distributed.all_reduce, group=group)
        agreement.exchange(tensor, distributed.get_rank(group), add_up)

    def cpu_all_reduce_(tensor: torch.Tensor) -> None:
        agreement.exchange(tensor, group().rank_in_group, group().cpu_all_reduce_)

    if hasattr(module, "dist"):
        module.dist = SimpleNamespace(all_reduce=all_reduce)
    else:  # Since vLLM 0.33.
        module.get_dp_group = lambda: SimpleNamespace(cpu_all_reduce_=cpu_all_reduce_)


def follow_ranks(worker: Any) -> None:
    """Let a worker, which has loaded its model, draft as many nodes as all ranks agree on."""
    from vllm.v1.worker.gpu import dp_utils

    runner, agreement = worker.model_runner, RankAgreement()
    ride_along(dp_utils, agreement)

    @around(runner, "execute_model")
    def then_say(
        original: Any, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        agreement.said = getattr(scheduler_output, _SAID, Said())
        return original(scheduler_output, *args, **kwargs)

    @around(runner.speculator, "propose")
    def then_agree(
        original: Any, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> Any:
        # Since vLLM 0.33 the ranks may agree to draft nothing.
        if not getattr(kwargs.get("dp_sync_state"), "skip_drafts", False):
            num_speculative_tokens = agreement.drafts
        return original(*args, num_speculative_tokens=num_speculative_tokens, **kwargs)

    @around(runner, "sample_tokens")
    def then_report(original: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if (result := getattr(output, "model_runner_output", None)) is not None:
            setattr(result, _HEARD, agreement.heard)
        return output

    @around(worker, "execute_dummy_batch")
    def then_fit(original: Any) -> Any:
        with _rows_of_dummies(runner, agreement):
            return original()


@contextlib.contextmanager
def _rows_of_dummies(runner: Any, agreement: RankAgreement) -> Iterator[None]:
    """Give a dummy request as many rows as the others verify, so that a CUDA graph fits all."""
    whole = runner.decode_query_len
    if agreement.drafts is not None:
        runner.decode_query_len = agreement.drafts + 1
    try:
        yield
    finally:
        runner.decode_query_len = whole


class SharedLookup(list[int]):
    """Stands before a scheduler's table of drafts by batch size, and heeds the other ranks. All
    ranks look up the largest batch: a pass has as many rows as its largest rank. As in
    `TunedLookup`, reading an entry begins a step."""

    def __init__(self, table: list[int]) -> None:
        super().__init__(table)
        self.heard, self.wish = Heard(), 0
        self.tuner = getattr(table, "tuner", None)
        self._table = table

    def __getitem__(self, batch: Any) -> Any:
        largest = min(max(batch, self.heard.requests), len(self) - 1)
        self.wish = self._table[largest]
        return max(self.wish, self.heard.wish)


def share_wishes(scheduler: Scheduler) -> SharedLookup:
    """Let a scheduler that has a table tell its wishes to the other ranks, and heed theirs."""
    table = scheduler.dynamic_sd_lookup
    assert table is not None
    lookup = SharedLookup(table)
    scheduler.dynamic_sd_lookup = lookup

    # Only this scheduler is changed: others in the process may have other configurations.
    @around(scheduler, "_update_after_schedule")
    def then_say(original: Any, output: SchedulerOutput) -> Any:
        planned = output.num_spec_tokens_to_schedule + 1
        setattr(output, _SAID, Said(planned, lookup.wish, len(output.num_scheduled_tokens)))
        return original(output)

    @around(scheduler, "update_from_output")
    def then_hear(original: Any, scheduler_output: SchedulerOutput, result: Any) -> Any:
        lookup.heard = getattr(result, _HEARD, lookup.heard)
        return original(scheduler_output, result)

    return lookup
