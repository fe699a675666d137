"""What is supported with what, as tables: the entries of the hooks, and what parts refuse."""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_graft.base.part import Part
from vllm_graft.base.text_table import Table
from vllm_graft.hooks import entries
from vllm_graft.hooks.feature import Feature
from vllm_graft.hooks.manager import Manager
from vllm_graft.spec_decode.targets.families import FEATURES, HOOK


def tables(offered: Manager) -> Iterator[Table]:
    """The tables of what runs, third parties' entries included."""
    heads: tuple[str, ...] = ("layers of the target", "drafts", "family, or why there is no tree")
    yield Table("Targets of trees", heads, [*_targets(offered)])
    heads = ("`method`", "drafter", "what it does")
    yield Table("Draft models of trees", heads, [*_drafters(offered)])
    for hook, title in (
        ("graft_vision_adapters", "Vision towers that need an adapter of ours"),
        ("graft_storage_backends", "Storage of the host KV cache"),
        ("graft_eviction_policies", "Eviction from the host KV cache"),
    ):
        rows = [(f"`{offer.entry.name}`", offer.entry.summary) for offer in offered.offers(hook)]
        yield Table(title, ("name", "what it is"), [*rows])


def _targets(offered: Manager) -> Iterator[tuple[str, str, str]]:
    offers = (offer.entry for offer in offered.offers(HOOK))
    families = [entry for entry in offers if isinstance(entry, entries.TargetFamily)]
    yield "plain attention", "trees", "`dense`"
    for feature in FEATURES:
        serving = [f"`{entry.name}`" for entry in families if feature.name in entry.serves]
        if serving:
            yield feature.name, _trees_on(feature), ", ".join(serving)
        else:
            yield feature.name, "a chain" if feature.chain else "refused", feature.why


def _trees_on(feature: Feature) -> str:
    if not feature.asked:
        return "trees"
    if feature.unasked:
        return f"trees, and a chain with `{feature.asked}: false`"
    return f"trees with `{feature.asked}: true`, else a chain"


def _drafters(offered: Manager) -> Iterator[tuple[str, str, str]]:
    for offer in offered.offers("graft_drafters"):
        if isinstance(offer.entry, entries.Drafter):
            methods = ", ".join(f"`{method}`" for method in offer.entry.methods)
            asked = (
                "; only where `graft.tree` is asked for by name, as nobody measured yet how fast "
                "such trees are"
            )
            says = offer.entry.summary + (asked if offer.entry.unmeasured else "")
            yield methods, f"`{offer.entry.name}`", says


def as_dict(offered: Manager, parts: Sequence[Part]) -> dict[str, Any]:
    """The tables and refusals for programs."""
    return {
        "tables": [
            {"title": table.title, "rows": [dict(zip(table.heads, row)) for row in table.rows]}
            for table in tables(offered)
        ],
        "refused": {part.name: [each.told() for each in part.refusals] for part in parts},
    }


def page(offered: Manager, parts: Sequence[Part]) -> Iterator[Table]:
    """Yield all tables, and below them what each part can't be combined with."""
    yield from tables(offered)
    for part in parts:
        name = f"`{part.flag.removeprefix('--').removeprefix('additional-config.')}`"
        rows = [tuple(each.told().values()) for each in part.refusals]
        yield Table(f"What is refused with {name}", ("what", "why", "instead"), rows)
