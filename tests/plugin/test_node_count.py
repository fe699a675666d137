"""``graft.tree.nodes``: the user's number is a depth, and vLLM's the number of nodes."""

from typing import Any

import pytest

from tests.support.refusals import validate
from vllm_graft.base.errors import ConfigError
from vllm_graft.config import GraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.tree_part import TREES


def filled(config: Any, depth: int, **tree: Any) -> Any:
    """The section after the platform's defaults were applied, once as vLLM does first."""
    config.additional_config = {"graft": {"tree": tree}}
    config.speculative_config.num_speculative_tokens = depth
    config.speculative_config.num_speculative_tokens_per_batch_size = None
    TREES.fill_in(TreeConfig.from_vllm(config), config)
    return TreeConfig.from_vllm(config)


def test_the_depth_becomes_the_steps_and_vllm_gets_the_nodes(vllm_config: Any) -> None:
    tree = filled(vllm_config, 7, nodes=63)
    assert (tree.steps, tree.nodes) == (7, 63)
    assert vllm_config.speculative_config.num_speculative_tokens == 63
    validate(GraftConfig.from_vllm(vllm_config), vllm_config)
    assert "trees of 63 nodes (topk 8, steps 7)" in TREES.describe(tree, vllm_config)


def test_without_the_key_the_number_stays_the_nodes(vllm_config: Any) -> None:
    """Negative control."""
    tree = filled(vllm_config, 31, topk=8)
    assert (tree.steps, tree.nodes) == (6, None)
    assert vllm_config.speculative_config.num_speculative_tokens == 31


@pytest.mark.parametrize(("depth", "nodes"), [(7, 63), (31, 31), (12, 5)])
def test_a_second_time_changes_nothing(vllm_config: Any, depth: int, nodes: int) -> None:
    """VLLM calls the platform again for each configuration that it derives."""
    once = filled(vllm_config, depth, nodes=nodes)
    given = vllm_config.additional_config
    TREES.fill_in(once, vllm_config)
    assert TreeConfig.from_vllm(vllm_config) == once
    assert vllm_config.additional_config is given
    assert (once.steps, vllm_config.speculative_config.num_speculative_tokens) == (depth, nodes)


def test_what_the_user_gave_is_not_changed(vllm_config: Any) -> None:
    given = {"other": 1, "graft": {"vit": {}, "tree": {"nodes": 63}}}
    vllm_config.additional_config = given
    TREES.fill_in(TreeConfig.from_vllm(vllm_config), vllm_config)
    assert given == {"other": 1, "graft": {"vit": {}, "tree": {"nodes": 63}}}
    assert vllm_config.additional_config["other"] == 1
    assert vllm_config.additional_config["graft"]["vit"] == {}


def test_auto_chooses_among_numbers_up_to_the_nodes(vllm_config: Any) -> None:
    filled(vllm_config, 7, nodes=63, shape="auto")
    table = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    assert max(nodes for _, _, nodes in table) == 63


def test_two_depths_are_refused(vllm_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"steps is 6, but .* the depth of a tree, is 7: drop"):
        filled(vllm_config, 7, nodes=63, steps=6)
    assert filled(vllm_config, 6, nodes=63, steps=6).steps == 6
    assert vllm_config.speculative_config.num_speculative_tokens == 63


def test_a_depth_out_of_bounds_is_refused(vllm_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"is 33: set it to 1\.\.32"):
        filled(vllm_config, 33, nodes=63)


def test_a_tree_too_shallow_for_its_nodes_is_refused(vllm_config: Any) -> None:
    filled(vllm_config, 1, nodes=63)
    with pytest.raises(ConfigError, match=r"nodes is 63, but a tree of .*topk 8 and a depth of 1 "):
        validate(GraftConfig.from_vllm(vllm_config), vllm_config)


def test_rows_of_lora_are_checked_for_the_nodes(vllm_config: Any) -> None:
    """VLLM has checked them for the depth, before the nodes were known."""
    filled(vllm_config, 7, nodes=63)
    vllm_config.scheduler_config.max_num_batched_tokens = 256 * 64 - 1
    validate(GraftConfig.from_vllm(vllm_config), vllm_config)
    vllm_config.lora_config = object()
    words = r"With LoRA .* has 16384 rows .* is 16383.*lower --.*nodes"
    with pytest.raises(ConfigError, match=words):
        validate(GraftConfig.from_vllm(vllm_config), vllm_config)
    vllm_config.scheduler_config.max_num_batched_tokens += 1
    validate(GraftConfig.from_vllm(vllm_config), vllm_config)
