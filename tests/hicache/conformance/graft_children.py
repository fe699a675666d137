"""Our connector below MultiConnector does not keep what another one there fails to load.

These tests run in the process of vLLM's own tests, with their schedulers and mock connector.
"""

from typing import Any

import graft_stand_ins
import pytest
from vllm.v1.request import RequestStatus

from tests.v1.kv_connector.unit.utils import (
    create_model_runner_output,
    create_request,
    create_scheduler,
    create_vllm_config,
)

POLICIES = pytest.mark.parametrize("policy", ["fail", "recompute"])


def two_connectors(policy: str, is_async: bool) -> tuple[Any, Any]:
    """Make a scheduler with ours and a connector that offers two blocks of every request."""
    other = {
        "kv_connector": "MockKVConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tests.v1.kv_connector.unit.utils",
        "kv_connector_extra_config": {"matched_tokens": 32, "is_async": is_async},
    }
    ours = {
        "kv_connector": "HiCacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": graft_stand_ins.EXTRA,
    }
    config = create_vllm_config(
        kv_connector="MultiConnector",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [other, ours]},
    )
    scheduler = create_scheduler(config)
    return scheduler, scheduler.connector._connectors[1].scheduler


@POLICIES
def test_a_failed_receive_of_another_connector_is_not_stored(policy: str) -> None:
    scheduler, ours = two_connectors(policy, is_async=True)
    request = create_request(num_tokens=50)
    scheduler.add_request(request)
    step = scheduler.schedule()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    output = create_model_runner_output([], finished_recving={request.request_id})
    output.kv_connector_output.failed_recving = {request.request_id}
    scheduler.update_from_output(step, output)
    assert len(ours.index) == 0


@POLICIES
def test_what_was_computed_from_invalid_blocks_is_not_kept(policy: str) -> None:
    scheduler, ours = two_connectors(policy, is_async=False)
    request = create_request(num_tokens=50)
    scheduler.add_request(request)
    step = scheduler.schedule()
    (operation,) = step.kv_connector_metadata.metadata[1].stores
    assert sum(map(len, operation.transfers)) == 3
    blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    output = create_model_runner_output([request], invalid_block_ids={blocks[0]})
    scheduler.update_from_output(step, output)
    ours.controller.report({operation.ids[0]: 1}, {})
    assert len(ours.index) == 0
    assert ours.index.num_free == ours.index.num_slots


def test_what_was_computed_from_valid_blocks_is_kept() -> None:
    scheduler, ours = two_connectors("recompute", is_async=False)
    request = create_request(num_tokens=50)
    scheduler.add_request(request)
    step = scheduler.schedule()
    (operation,) = step.kv_connector_metadata.metadata[1].stores
    scheduler.update_from_output(step, create_model_runner_output([request]))
    ours.controller.report({operation.ids[0]: 1}, {})
    assert sum(page.ready for page in ours.index._pages.values()) == 3
