"""Tests of the policy: those of every tree policy, and its own."""

from importlib.metadata import entry_points

import pytest
from vllm_graft.api import TreeConfig
from vllm_graft.testing import TreePolicyContract

import graft_narrow
from graft_narrow.code import narrow


class TestNarrow(TreePolicyContract):
    @pytest.fixture
    def policy(self):
        return narrow


def test_it_is_no_wider_than_it_has_to_be():
    assert narrow(TreeConfig(topk=8, steps=4), 4).topk == 1
    assert narrow(TreeConfig(topk=8, steps=4), 14).topk == 2
    assert narrow(TreeConfig(topk=8, steps=4), 63).topk == 5


def test_the_entry_leads_to_it():
    [entry] = graft_narrow.graft_tree_policies()
    assert entry.resolve() is narrow


def test_vllm_graft_finds_the_plugin():
    [point] = entry_points(group="vllm_graft", name="graft_narrow")
    assert point.load() is graft_narrow
