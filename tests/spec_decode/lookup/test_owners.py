"""Whose texts are whose in a memory, and how a request carries it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_graft.spec_decode.lookup.served_references import Owners, carry
from vllm_graft.spec_decode.trees.text_state import NOBODY, NONE, reference_in


def request(
    salt: str | None = None, adapter: str | None = None, prompt: tuple[int, ...] = (1,)
) -> Any:
    lora = None if adapter is None else SimpleNamespace(lora_name=adapter)
    return SimpleNamespace(
        cache_salt=salt,
        lora_request=lora,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(),
    )


def test_a_tenant_is_a_salt_and_an_adapter() -> None:
    owners = Owners("tenant")
    tenants = [
        request(), request("a"), request("b"), request(None, "a"), request("a", "a"),
        request("None"), request(None, "None"), request("a", "b"),
    ]  # fmt: skip
    scopes = [owners.of(each).scope for each in tenants]
    assert len(set(scopes)) == len(scopes)
    assert scopes == [owners.of(each).scope for each in tenants]
    assert all(0 < scope < 1 << 63 for scope in scopes)
    # No other process knows the numbers of this one.
    assert scopes[0] != Owners("tenant").of(tenants[0]).scope


def test_prompts_are_told_apart_within_a_scope() -> None:
    owners = Owners("server")
    first, same, other = (
        owners.of(request()),
        owners.of(request("a")),
        owners.of(request(prompt=(1, 2))),
    )
    assert first == same
    assert first.scope == other.scope
    assert first.prompt != other.prompt
    tenants = Owners("tenant")
    assert tenants.of(request()).prompt != tenants.of(request("a")).prompt


def test_a_request_carries_its_owner_only_with_a_memory() -> None:
    asked, owners = request("a"), Owners("tenant")
    carry(asked, None)
    assert reference_in(asked.sampling_params) is NONE
    assert NONE.owner == NOBODY
    shared = asked.sampling_params
    carry(asked, None, owners=owners)
    assert reference_in(asked.sampling_params).owner == owners.of(asked)
    # The parameters may be those of other requests, too.
    assert reference_in(shared) is NONE
