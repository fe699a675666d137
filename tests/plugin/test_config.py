"""The configuration: parsing, refusals, and their words."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.options import Section, did_you_mean, parse, section_type
from vllm_graft.config import GraftConfig
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.learn.learn_config import LearnConfig
from vllm_graft.spec_decode.config.tree_config import MemoryConfig, NgramConfig, TreeConfig


def tree(**values: Any) -> TreeConfig:
    found = GraftConfig.parse({"tree": values}).tree
    assert found is not None
    return found


def test_defaults() -> None:
    assert GraftConfig.parse({}) == GraftConfig(tree=None)
    told = {"topk": 8, "steps": 6, "hot_tokens": None, "head_dtype": "auto", "drafter": None}
    assert tree() == TreeConfig(**told, policy="dynamic", graph_runner="cuda_graph")


def test_digits_as_strings_are_numbers() -> None:
    assert tree(topk="4", steps="3") == TreeConfig(topk=4, steps=3)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *(("hot_tokens", value, value) for value in (None, 512, "a/hot.json")),
        ("hot_tokens", "512", 512),
        *(("ngram", off, None) for off in (None, False, "false")),
        *(("ngram", on, NgramConfig(min=3, max=16)) for on in (True, "True", "auto", {})),
        ("ngram", {"max": "4"}, NgramConfig(min=3, max=4)),
        ("ngram", {"min": 32, "max": 32}, NgramConfig(min=32, max=32)),
        ("ngram", {"reference": "0"}, NgramConfig(min=3, max=16, reference=0)),
        ("ngram", {"reference": 9}, NgramConfig(reference=9)),
        *(("memory", off, None) for off in (None, "False", {"scope": "request"})),
        ("memory", "true", MemoryConfig(bytes=64 << 20, scope="tenant", prompts=False)),
        ("memory", {}, MemoryConfig()),
        (
            "memory",
            {"bytes": "1.5GiB", "scope": "server"},
            MemoryConfig(bytes=3 << 29, scope="server"),
        ),
    ],
)
def test_forms_of_a_value(key: str, value: object, expected: object) -> None:
    assert getattr(tree(**{key: value}), key) == expected


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ngram", 3, ": 3 is refused: say true, false, or a mapping such as {'min': 3, 'max'"),
        ("ngram", "yes", ": 'yes' is refused: say true"),
        ("ngram", {"min": 0}, ".min: 0 is refused"),
        ("ngram", {"max": 33}, "Allowed: 1 to 32."),
        ("ngram", {"reference": -1}, ".reference: -1 is refused"),
        ("ngram", {"reference": (1 << 20) + 1}, "Allowed: 0 to 1048576."),
        ("ngram", {"min": True}, "true and false are not numbers"),
        ("ngram", {"minimum": 3}, ".minimum: unknown key. Did you mean 'min'?"),
        ("ngram", {"min": 17}, "min is 17, and max is 16: min must not exceed max"),
        ("memory", 64, ": 64 is refused: say true, false, or a mapping such as {'bytes'"),
        ("memory", {"bytes": 0}, ".bytes: 0 is refused"),
        ("memory", {"bytes": "much"}, "say a number of bytes, or one with a unit"),
        ("memory", {"bytes": True}, "true and false are not numbers"),
        ("memory", {"scope": "request", "byte": 1}, ".byte: unknown key"),
        ("memory", {"scope": "user"}, ".scope: 'user' is refused"),
        ("memory", {"size": 3}, ".size: unknown key."),
    ],
)
def test_what_is_neither_on_nor_off_nor_keys(key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tree(**{key: value})
    assert str(caught.value).startswith(f"--additional-config.graft.tree.{key}")
    assert (f"tree.{key}{words}" if words[0] in ".:" else words) in str(caught.value)


def switches() -> dict[str, type[Section]]:
    """The section of each key that is true or false, by its path."""
    found, left = dict[str, type[Section]](), [("graft", GraftConfig), ("extra", HiCacheConfig)]
    while left:
        path, section = left.pop()
        for name, field in section.model_fields.items():
            if (inner := section_type(field.annotation)) is not None:
                left.append((f"{path}.{name}", inner))
            elif re.search(r"\bbool\b", repr(field.annotation)):
                found[f"{path}.{name}"] = section
    return found


@pytest.mark.parametrize("key", switches())
def test_a_switch_is_true_or_false(key: str) -> None:
    path, _, name = key.rpartition(".")
    section = switches()[key]
    least = {HiCacheConfig: {"host_bytes": "1GiB"}, LearnConfig: {"record": "texts"}}.get(
        section, {}
    )
    for given, meant in ((True, True), ("True", True), (False, False), ("false", False)):
        assert getattr(parse(section, {name: given, **least}, path), name) is meant
    for wrong in ("yes", "off", "1", 1, 0, 0.0, []):
        with pytest.raises(ConfigError) as caught:
            parse(section, {name: wrong, **least}, path)
        assert str(caught.value) == f"{key}: {wrong!r} is refused: say true or false."


@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (2, 3), (3, 2), (4, 4)])
def test_num_candidates_counts_a_full_tree(topk: int, steps: int) -> None:
    # Level by level: every expanded node gets topk children, topk of each level are expanded.
    expanded, nodes = 1, 0
    for _ in range(steps):
        children = expanded * topk
        nodes += children
        expanded = min(topk, children)
    assert TreeConfig(topk=topk, steps=steps).num_candidates == nodes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tree": {"topkk": 8}}, ["-config.graft.tree.topkk: unknown key", "mean 'topk'?"]),
        ({"tre": {}}, ["--additional-config.graft.tre", "Did you mean 'tree'?"]),
        ({"tree": {"zzz": 1}}, ["graft.tree.zzz", "Known: attention, coupled, draft_window, d"]),
        ({"tree": {"topk": 33}}, ["graft.tree.topk", "33", "Allowed: 1 to 32"]),
        ({"tree": {"topk": 0}}, ["graft.tree.topk", "0", "Allowed: 1 to 32"]),
        ({"tree": {"steps": "0"}}, ["graft.tree.steps", "'0'", "Allowed: 1 to 32"]),
        ({"tree": {"steps": 2.5}}, ["graft.tree.steps", "2.5", "Allowed: 1 to 32"]),
        ({"tree": {"steps": True}}, ["graft.tree.steps", "True", "not numbers"]),
        ({"tree": {"topk": "eight"}}, ["graft.tree.topk", "'eight'", "Allowed: 1 to 32"]),
        ({"tree": {"hot_tokens": "a.bin"}}, ["graft.tree.hot_tokens", ".safetensors"]),
        ({"tree": {"head_dtype": "fp4"}}, ["graft.tree.head_dtype: 'fp4'", "'auto' or 'fp8'"]),
        ({"tree": {"hot_tokens": 0}}, ["graft.tree.hot_tokens: 0", "how many tokens"]),
        ({"tree": {"hot_tokens": "-3"}}, ["graft.tree.hot_tokens: '-3'", "how many tokens"]),
        ({"tree": {"hot_tokens": True}}, ["graft.tree.hot_tokens: True", "how many tokens"]),
        ({"tree": {"hot_tokens": 2.5}}, ["graft.tree.hot_tokens: 2.5", ".safetensors"]),
        ({"tree": {"draft_window": 0}}, ["graft.tree.draft_window", "0", "1"]),
        ({"tree": {"attention": "fa3"}}, ["graft.tree.attention", "'fa3'", "'flash'"]),
        ({"tree": {"policy": ""}}, ["graft.tree.policy", "''"]),
        ({"tree": 3}, ["graft.tree:", "3", "a mapping with the keys topk, steps"]),
        ({1: 2}, ["--additional-config.graft: the key 1 is refused", "a key is a text"]),
        ({"tree": {None: 1}}, ["--additional-config.graft.tree: the key None is refused"]),
        ({"tree": {"policy": b"x"}}, ["graft.tree.policy: b'x' is refused: a bytes is neither"]),
        ({"tree": {"hot_tokens": "a\0.json"}}, [r"graft.tree.hot_tokens: 'a\x00.json'"]),
        ({"tree": {"hot_tokens": "9" * 5000}}, ["graft.tree.hot_tokens: '999", "more than 4096"]),
        ({"vit": {"capture_share": float("nan")}}, ["graft.vit.capture_share: nan", "no finite"]),
        ({"vit": {"capture_share": "nan"}}, ["graft.vit.capture_share: 'nan'", "finite number"]),
        ({"vit": {"buckets": [128, 0]}}, ["graft.vit.buckets[1]: 0", "greater than or equal to 1"]),
        ({"vit": {"buckets": [1 << 20]}}, ["graft.vit.buckets[0]: 1048576", "equal to 65536"]),
        ({"hicache": {}}, ["graft.hicache: unknown key. The host KV cache is a KV connector"]),
        ("eagle", ["--additional-config.graft:", "'eagle'", "a mapping with the keys tree"]),
        (None, ["--additional-config.graft:", "None"]),
    ],
)
def test_refusals(values: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        GraftConfig.parse(values)
    assert [word for word in words if word not in str(caught.value)] == []


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        GraftConfig.parse({"tree": {"topkk": 8, "steps": 99}})
    assert len(str(caught.value).splitlines()) == 2


def test_errors_are_not_value_errors() -> None:
    # pydantic, which validates VllmConfig, wraps a ValueError and hides our sentence.
    assert issubclass(ConfigError, GraftError)
    assert not issubclass(GraftError, (ValueError, AssertionError))


def test_frozen_and_hashable() -> None:
    config = GraftConfig.parse({"tree": {}})
    with pytest.raises(ValidationError):
        config.tree = None
    assert len({config, GraftConfig.parse({"tree": {"topk": 8}})}) == 1


@pytest.mark.parametrize("additional", [{}, {"other": 1}, SimpleNamespace(graft={})])
def test_from_vllm_without_our_key(additional: Any) -> None:
    assert GraftConfig.from_vllm(SimpleNamespace(additional_config=additional)) is None


def test_from_vllm_with_our_key() -> None:
    vllm_config: Any = SimpleNamespace(additional_config={"graft": {"tree": {"topk": 2}}})
    assert GraftConfig.from_vllm(vllm_config) == GraftConfig(tree=TreeConfig(topk=2))


def test_did_you_mean() -> None:
    assert did_you_mean("dinamic", ["dynamic", "wide"]) == " Did you mean 'dynamic'?"
    assert did_you_mean("zzz", []) == " Known: none."
