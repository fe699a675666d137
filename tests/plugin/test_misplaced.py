"""Keys that were meant for us and stand elsewhere: some are refused, some may be another's."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.base import log
from vllm_graft.base.errors import ConfigError
from vllm_graft.config import refuse_misplaced


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
        *("graft.tree.topk", "graft_tree_topk", "graft-tree-topk", "graft:tree:topk"),
        *("Graft.Tree.Topk", "GRAFT_TREE.TOPK", "vllm_graft.tree.topk", "vllm-graft-tree.topk"),
        *("--additional-config.graft.tree.topk", "additional_config.graft.tree.topk"),
        *(" graft.tree.topk ", "tree.topk"),
    ],
)
@pytest.mark.parametrize("beside", [{}, {"graft": {}}, {"graft": {"tree": {"steps": 3}}}])
def test_what_begins_with_our_name_is_refused_with_how_to_write_it(
    key: str, beside: dict[str, Any]
) -> None:
    message = _refusal({**beside, key: 4})
    assert repr(key) in message
    assert message.endswith(" Write --additional-config.graft.tree.topk.")


@pytest.mark.parametrize(
    ("additional", "path"),
    [
        ({"Graft": {"vit": {}}}, ""),
        ({"grafts": {}}, ""),
        ({"grafted_s": {}}, ""),
        ({"graft.topk": 4}, ""),
        ({"graft_tree": {}}, ".tree"),
        ({"graft_tre": {}}, ".tree"),
        ({"graft.vit": {"memory": 64}}, ".vit"),
        ({"graft.hot_tokens": 64}, ".tree.hot_tokens"),
        ({"graft-draft-extend": "eager"}, ".draft.extend"),
        ({"graff": {"tree": {"topk": 4}}}, ""),
        ({"grft": {"tree.topk": 4}}, ""),
        ({"grft": "auto"}, ""),
        ({"tree": {"topk": 4, "steps": 3}}, ".tree"),
        ({"tre": {"topk": 4, "mine": 3}}, ".tree"),
        ({"vit": {"memory": 64}}, ".vit"),
        ({"draft": {"extend": True}}, ".draft"),
        ({"draft.extend": True}, ".draft.extend"),
    ],
)
def test_a_part_beside_our_key_is_refused(additional: Any, path: str) -> None:
    assert _refusal(additional).endswith(f" Write --additional-config.graft{path}.")


@pytest.mark.parametrize(
    "additional", [{"hicache": {"host_bytes": "1GiB"}}, {"graft_hicache": {}}, {"hicache.load": 1}]
)
def test_the_host_cache_is_no_key_of_it(additional: Any) -> None:
    message = _refusal(additional)
    assert "whose kv_connector is HiCacheConnector" in message
    assert "kv_connector_extra_config of --kv-transfer-config" in message


def test_every_one_of_them_is_named() -> None:
    assert len(_refusal({"graft.vit": {}, "other": 1, "graft.tree": {}}).splitlines()) == 2


@pytest.mark.parametrize(
    ("additional", "named"),
    [
        ({"tree": {}}, "tree"),
        ({"tree": {"their": 1, "own": 2, "topk": 3}}, "tree"),
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
        {"eagle": {"topk": 4}, "eagle.topk": 4},
        {"topk": 4, "memory": 3, "eplb_config": {"expert_map_path": None}},
        {1: 2, None: {"tree": {}}, b"graft": 1},
        SimpleNamespace(graft_tree={}),
        None,
    ],
)
def test_the_rest_is_nobody_s_business(additional: Any, caplog: pytest.LogCaptureFixture) -> None:
    refuse_misplaced(additional)
    assert caplog.records == []
