"""The state of each part, from a configuration and what the workers say."""

from types import SimpleNamespace
from typing import Any

from vllm_graft.base.options import KEY
from vllm_graft.metrics.part_states import part_states


class Toy:
    def __init__(self, name: str, asked: bool) -> None:
        self.name, self.asked = name, asked

    def describe(self, asked: Any, vllm_config: Any) -> str:
        if self.name == "rude":
            raise RuntimeError("no")
        return f"{self.name}s"


def states(parts: list[Any], workers: list[Any], graft: Any = None) -> list[list[str]]:
    config = SimpleNamespace(additional_config={} if graft is None else {KEY: graft})
    sections = {part.name: {} for part in parts if part.asked}
    return part_states(parts, sections, config, workers)


def test_states() -> None:
    parts = [Toy("tree", True), Toy("vit", True), Toy("draft", True), Toy("hicache", False)]
    # The first of two stages of a pipeline encodes, and the last drafts.
    workers = [{"on": ["vit"], "declined": {}}, {"on": ["tree"], "declined": {"tree.head": "old"}}]
    assert states(parts, workers) == [
        ["tree", "on", "trees"],
        ["vit", "on", "vits"],
        ["draft", "missing", "drafts"],
        ["hicache", "off", "not asked for"],
        ["tree.head", "declined", "old"],
    ]


def test_a_worker_s_reason_is_told() -> None:
    workers = [{"on": [], "declined": {"vit": "no adapter"}}]
    assert states([Toy("vit", True)], workers) == [["vit", "declined", "no adapter"]]


def test_a_preset_s_reason_is_told() -> None:
    decided = {"decided": {"preset": "auto", "on": {}, "off": {"vit": "text only"}}}
    assert states([Toy("vit", False)], [], decided) == [["vit", "off", "text only"]]


def test_a_part_that_cannot_describe_itself_is_on_all_the_same() -> None:
    found = states([Toy("rude", True)], [{"on": ["rude"], "declined": {}}])
    assert found == [["rude", "on", "RuntimeError: no"]]
