"""Classes that build what a part has chosen in their place."""

from typing import Any

from vllm_graft.seams.wrap import build_instead


class Stock:
    def __init__(self, config: str) -> None:
        self.config = config


class Trees(Stock):
    pass


class Graphs(Stock):
    pass


def test_two_parts_may_stand_over_one_class() -> None:
    """Each with its own configurations; hooking again changes nothing."""
    built: list[type[Any]] = []

    def trees(stock: type[Any], config: Any) -> type[Any]:
        return Trees if config in ("trees", "both") else stock

    def graphs(stock: type[Any], config: Any) -> type[Any]:
        return Graphs if config in ("graphs", "both") else stock

    for choose in (trees, graphs, trees, graphs):
        build_instead(Stock, choose, built.append)
    found = [Stock(config) for config in ("trees", "graphs", "both", "none")]
    assert [type(each) for each in found] == [Trees, Graphs, Trees, Stock]
    assert [each.config for each in found] == ["trees", "graphs", "both", "none"]
    assert built == [Trees, Graphs, Trees]
    # A subclass that somebody builds by its own name is what it is.
    assert type(Graphs("trees")) is Graphs
    assert built == [Trees, Graphs, Trees]
