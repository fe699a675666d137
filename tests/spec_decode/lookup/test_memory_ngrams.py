"""What n-grams with a memory keep of a request, and what they count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from vllm_graft.spec_decode.config.tree_config import MemoryConfig, NgramConfig
from vllm_graft.spec_decode.lookup import ngrams as lookup
from vllm_graft.spec_decode.lookup.ngrams import REST, Ngrams
from vllm_graft.spec_decode.trees.text_state import KEY, NONE, Owner, Reference, bytes_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OWNER = Owner(5, 7)


def made(*, prompts: bool = False) -> tuple[Ngrams, torch.Tensor, torch.Tensor]:
    """N-grams of two requests, with their texts and lengths."""
    memory = MemoryConfig(bytes=bytes_of(4, 2), prompts=prompts)
    ngrams = Ngrams(NgramConfig(), 2, 200, 1000, DEVICE, reference=4, memory=memory)
    texts = torch.arange(400, dtype=torch.int32, device=DEVICE).view(2, 200)
    lengths = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    states: Any = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=texts), total_len=SimpleNamespace(gpu=lengths)
    )
    ngrams.attach(states)
    return ngrams, texts, lengths


def request(carried: Reference, **tokens: Any) -> Any:
    params = SamplingParams(extra_args={KEY: carried})
    none = dict.fromkeys(("prompt_token_ids", "prefill_token_ids", "prompt_embeds"))
    return SimpleNamespace(sampling_params=params, **{**none, **tokens})


def kept(ngrams: Ngrams, lengths: torch.Tensor, length: int) -> list[int]:
    """The tokens in the memory when the text of slot 1 has grown to a length, without drafts."""
    lengths[1] = length
    batch: Any = SimpleNamespace(num_reqs=1, idx_mapping=torch.tensor([1], device=DEVICE))
    for _ in range(REST):
        ngrams.remember(batch, drafts=False)
    assert ngrams.state.memory is not None
    return [each for each in ngrams.state.memory.tokens.flatten().tolist() if each > 0]


@pytest.mark.parametrize(
    ("tokens", "first"),
    [
        ({"prompt_token_ids": [1] * 30}, 22),
        # After a preemption what was emitted before is kept already.
        ({"prompt_token_ids": [1] * 30, "prefill_token_ids": [1] * 50}, 42),
        ({"prompt_token_ids": [1] * 3}, 0),
        ({"prompt_embeds": torch.zeros(30, 2)}, 30),
    ],
)
def test_an_answer_is_kept_with_what_stands_before_it(tokens: dict[str, Any], first: int) -> None:
    ngrams, texts, lengths = made()
    ngrams.begin(1, request(Reference(owner=OWNER), **tokens))
    assert kept(ngrams, lengths, 60) == texts[1, first:60].tolist()
    # Further tokens come in the next step.
    assert kept(ngrams, lengths, 63) == texts[1, first:63].tolist()


def test_prompts_are_kept_if_asked() -> None:
    ngrams, texts, lengths = made(prompts=True)
    ngrams.begin(1, request(Reference(owner=OWNER), prompt_token_ids=[1] * 90))
    assert kept(ngrams, lengths, 90) == texts[1, :64].tolist()
    assert kept(ngrams, lengths, 90) == texts[1, :90].tolist()
    ngrams, texts, lengths = made(prompts=True)
    ngrams.begin(1, request(Reference(owner=OWNER), prompt_token_ids=[1] * 1100))
    assert ngrams.state.memory is not None
    assert ngrams.state.memory.begun[1, 2] == 1100 - 1024


def test_nobody_s_text_is_not_kept() -> None:
    """A request that carries no owner, as one that came by another way, neither reads nor tells."""
    ngrams, _, lengths = made()
    ngrams.begin(1, request(NONE, prompt_token_ids=[1] * 30))
    assert kept(ngrams, lengths, 60) == []


def test_most_steps_without_drafts_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them adds what it has emitted, then every few; one with drafts begins anew."""
    ngrams, _, _ = made()
    added: list[int] = []
    monkeypatch.setattr(lookup, "write_memory", lambda *_: added.append(step))
    batch: Any = SimpleNamespace(num_reqs=1, idx_mapping=None)
    for step in range(2 * REST + 4):
        ngrams.remember(batch, drafts=step == REST + 2)
    assert added == [0, REST, REST + 3, 2 * REST + 3]


def test_counts_of_the_memory_are_published() -> None:
    ngrams, _, _ = made()
    ngrams.counts.copy_(torch.tensor([9, 5, 4, 2]))
    ngrams.end_step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    numbers = ngrams.numbers()
    assert numbers["ngram_nodes_verified"] == 9
    assert (numbers["memory_nodes_verified"], numbers["memory_nodes_accepted"]) == (4, 2)
    found = ngrams.report()["memory"]
    assert (found["segments"], found["segments_written"], len(found["rates"])) == (4, 0, 48)
    alone = Ngrams(NgramConfig(), 2, 200, 1000, DEVICE)
    assert "memory_nodes_verified" not in alone.numbers()
    assert "memory" not in alone.report()
