"""The table, and the entry. How it drafts is tested with an engine, by whoever has a model."""

import json

import graft_bigram
import pytest
from graft_bigram.drafter import VARIABLE, BigramTrees, read_table

from vllm_graft.api import ConfigError


def test_a_token_without_followers_is_followed_by_itself(tmp_path, monkeypatch):
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"1": [2, 3, 0], "2": [0]}))
    monkeypatch.setenv(VARIABLE, str(file))
    assert read_table(4, 2).tolist() == [[0, 0], [2, 3], [0, 2], [3, 3]]


@pytest.mark.parametrize("text", ["{", "[1]", '{"0": [9, 9]}', '{"0": "ab"}'])
def test_a_file_that_is_no_table(text, tmp_path, monkeypatch):
    file = tmp_path / "table.json"
    file.write_text(text)
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(ConfigError, match=VARIABLE):
        read_table(4, 2)


def test_the_entry_leads_to_it():
    [entry] = graft_bigram.graft_drafters()
    assert entry.resolve() is BigramTrees
