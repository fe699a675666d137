"""Rows of drafts after a prompt are cut off vLLM's logprobs of the prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from vllm_graft import activation
from vllm_graft.graph_runners.vision import vision_part
from vllm_graft.spec_decode import chain_part, tree_part, worker_mends
from vllm_graft.spec_decode.verification.accepted_kv import LayerSaves
from vllm_graft.spec_decode.verification.context import Counters

LENGTHS = np.array([9, 1, 6, 20], dtype=np.int32)
"""Lengths of prompts, by slot."""


class Rows(NamedTuple):
    """A stand-in for vLLM's ``LogprobsTensors``: each row holds its number."""

    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any

    @classmethod
    def count(cls, rows: int) -> Rows:
        numbers = np.arange(rows)
        return cls(numbers[:, None], numbers[:, None] / 2, numbers)


def batch(**requests: tuple[int, int, int]) -> Any:
    """Make a batch from slots, tokens computed before, and tokens that the step computes."""
    slots, computed, scheduled = (np.array(column) for column in zip(*requests.values()))
    return SimpleNamespace(
        req_ids=list(requests),
        idx_mapping_np=slots,
        num_computed_prefill_tokens_np=computed,
        num_scheduled_tokens=scheduled,
    )


def lengths(found: dict[str, Any]) -> dict[str, int]:
    return {name: len(rows.logprobs) for name, rows in found.items()}


def test_a_prompt_of_one_token_beside_drafts_has_no_row() -> None:
    step = batch(a=(1, 0, 16))
    assert worker_mends.cut({"a": Rows.count(15)}, step, LENGTHS) == {}


def test_a_prompt_that_had_a_token_left_keeps_the_rows_before_it() -> None:
    """This happens in vLLM if requests that want logprobs read the prefix cache."""
    step = batch(a=(2, 3, 8))
    (kept,) = worker_mends.cut({"a": Rows.count(7)}, step, LENGTHS).values()
    assert [part.tolist() for part in kept] == [[[0], [1]], [[0.0], [0.5]], [0, 1]]


def test_prompts_without_drafts_are_left_as_they_are() -> None:
    # The requests: a whole prompt, the end of one in chunks, and one that decodes without logprobs.
    step = batch(a=(0, 0, 9), b=(3, 16, 4), c=(2, 6, 5))
    found = {"a": Rows.count(8), "b": Rows.count(19)}
    kept = worker_mends.cut(found, step, LENGTHS)
    assert kept["a"] is found["a"]
    assert kept["b"] is found["b"]
    assert lengths(kept) == {"a": 8, "b": 19}


class Stock:
    """A stand-in for vLLM's worker of prompt logprobs; each engine has one."""

    def compute_prompt_logprobs(self, *arguments: Any) -> dict[str, Rows]:
        return {"a": Rows.count(15)}


@pytest.mark.parametrize(
    ("graft", "rows"),
    [({"tree": {}}, {}), ({"draft": {}}, {}), ({"vit": {}}, {"a": 15}), (None, {"a": 15})],
)
def test_only_engines_whose_drafts_are_ours_are_mended(
    graft: Any, rows: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tree_part, chain_part):
        monkeypatch.setattr(module, "require_speculator", lambda *arguments: None)
    monkeypatch.setattr(vision_part.VisionPart, "verify", lambda *arguments: None)
    vllm_config: Any = SimpleNamespace(
        additional_config={"graft": graft} if graft else {},
        speculative_config=SimpleNamespace(method="eagle3"),
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    mended, other = Stock(), Stock()
    # A chain's drafts carry no parents.
    context = SimpleNamespace(
        shape=SimpleNamespace(topk=1), counters=Counters(), saves=LayerSaves()
    )
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(
            prompt_logprobs_worker=mended,
            speculator=SimpleNamespace(context=context),
            execute_model=lambda output: None,
            initialize_kv_cache=lambda: None,
        )
    )
    for _ in range(2):
        activation.verify_active(worker, vllm_config)
    step = batch(a=(1, 0, 16))
    arguments = (None, None, step, None, None, LENGTHS)
    assert lengths(mended.compute_prompt_logprobs(*arguments)) == rows
    assert lengths(other.compute_prompt_logprobs(*arguments)) == {"a": 15}
