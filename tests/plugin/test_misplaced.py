"""Keys that were meant for us and stand elsewhere: some are refused, some may be another's."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.base import log
from vllm_graft.base.errors import ConfigError
from vllm_graft.config import GraftConfig
from vllm_graft.misplaced import refuse_misplaced


@pytest.fixture(autouse=True)
def forget_what_was_said() -> None:
    log.warning_once.cache_clear()


def _refusal(additional: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_misplaced(additional)
    message = str(caught.value)
    assert message.startswith("--additional-config.graft: the key ")
    return message


@pytest.mark.parametrize(
    "key",
    [
        *("graft.tree.topk", "graft_eagle_topk", "graft-eagle-topk", "graft:eagle:topk"),
        *("Graft.Eagle.Topk", "GRAFT_EAGLE.TOPK", "vllm_graft.tree.topk", "vllm-graft-eagle.topk"),
        *("--additional-config.graft.tree.topk", "additional_config.graft.tree.topk"),
        *(" graft.tree.topk ", "graft.topk", "eagle.topk"),
    ],
)
@pytest.mark.parametrize("beside", [{}, {"graft": {}}, {"graft": {"tree": {"steps": 3}}}])
def test_what_begins_with_our_name_is_refused_with_how_to_write_it(
    key: str, beside: dict[str, Any]
) -> None:
    message = _refusal({**beside, key: 4})
    assert repr(key) in message
    advised = json.loads(message.partition("write --additional-config '")[2].removesuffix("'."))
    assert advised == {"graft": {"tree": {"topk": 4}}}
    assert GraftConfig.parse(advised["graft"]).tree is not None


@pytest.mark.parametrize(
    ("additional", "advised"),
    [
        ({"Graft": {"vit": {}}}, {"graft": {"vit": {}}}),
        ({"graft_eagle": {}}, {"graft": {"tree": {}}}),
        ({"graft.vit": {"memory": 64}}, {"graft": {"vit": {"memory": 64}}}),
        ({"graft-draft-graph-runner": "eager"}, {"graft": {"draft": {"graph_runner": "eager"}}}),
        ({"graff": {"eagle": {"topk": 4}}}, {"graft": {"tree": {"topk": 4}}}),
        ({"grft": {"eagle.topk": 4}}, {"graft": {"eagle.topk": 4}}),
        ({"eagle": {"topk": 4, "steps": 3}}, {"graft": {"tree": {"topk": 4, "steps": 3}}}),
        ({"egle": {"topk": 4, "mine": 3}}, {"graft": {"tree": {"topk": 4, "mine": 3}}}),
        ({"vit": {"memory": 64}}, {"graft": {"vit": {"memory": 64}}}),
        ({"draft": {"extend": True}}, {"graft": {"draft": {"extend": True}}}),
        ({"draft.extend": True}, {"graft": {"draft": {"extend": True}}}),
    ],
)
def test_a_part_beside_our_key_is_refused(additional: Any, advised: Any) -> None:
    message = _refusal(additional)
    found = message.partition("write --additional-config '")[2].removesuffix("'.")
    assert json.loads(found) == advised


@pytest.mark.parametrize(
    "additional", [{"hicache": {"host_bytes": "1GiB"}}, {"graft_hicache": {}}, {"hicache.load": 1}]
)
def test_the_host_cache_is_no_key_of_it(additional: Any) -> None:
    message = _refusal(additional)
    assert '"kv_connector": "HiCacheConnector"' in message
    assert "--kv-transfer-config.kv_connector_extra_config" in message


def test_a_value_that_is_no_json_does_not_hide_the_sentence() -> None:
    assert 'write --additional-config \'{"graft": {"tree": ...}}\'.' in _refusal(
        {"graft_eagle": {1, 2}}
    )
    assert len(_refusal({"graft_eagle": ["x" * 10_000]})) < 300


def test_every_one_of_them_is_named() -> None:
    assert len(_refusal({"graft.vit": {}, "other": 1, "graft.tree": {}}).splitlines()) == 2


@pytest.mark.parametrize(
    ("additional", "named"),
    [
        ({"eagle": {}}, "eagle"),
        ({"eagle": {"their": 1, "own": 2, "topk": 3}}, "eagle"),
        ({"draft": True}, "draft"),
        ({"vit": None, "graft": {}}, "vit"),
        ({"vit_memory": 64}, "vit_memory"),
        ({"draft_window": 64}, "draft_window"),
        ({"hot-tokens": 8192, "graft": {"tree": {}}}, "hot-tokens"),
        ({"hicache": {"size": 1}}, "hicache"),
        ({"grft": 1}, "grft"),
        ({"graff": {}}, "graff"),
    ],
)
def test_what_may_be_another_plugin_s_is_warned_about_once(
    additional: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_misplaced(additional)
    refuse_misplaced(additional)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"--additional-config.{named} is not read by vllm-graft")


@pytest.mark.parametrize(
    "additional",
    [
        {},
        {"graft": {"tree": {}}},
        {"kda_prefill_backend": "auto", "gdn_prefill_backend": "x", "ascend_scheduler_config": {}},
        {"topk": 4, "memory": 3, "eplb_config": {"expert_map_path": None}},
        {1: 2, None: {"eagle": {}}, b"graft": 1},
        SimpleNamespace(graft_eagle={}),
        None,
    ],
)
def test_the_rest_is_nobody_s_business(additional: Any, caplog: pytest.LogCaptureFixture) -> None:
    refuse_misplaced(additional)
    assert caplog.records == []
