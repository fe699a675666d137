"""The longest prefix that all pools hold, compared with the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_graft.hicache.pages.groups import Group, HitPolicy, alignment, longest_hit


def _group(index: int, policy: HitPolicy, block: int, window: int = 0) -> Group:
    return Group(index, block, 1, policy, window, 4096, (f"layers.{index}",))


FULL = _group(0, HitPolicy.ALL_PAGES, 16)
WINDOW = _group(1, HitPolicy.TRAILING_PAGES, 16, 40)
STATE = _group(2, HitPolicy.LAST_PAGE, 32)


def test_what_a_prefix_needs() -> None:
    assert list(FULL.needed(32, 96)) == [2, 3, 4, 5]
    assert list(WINDOW.needed(0, 160)) == [7, 8, 9], "token 160 looks back to 121"
    assert list(WINDOW.needed(128, 160)) == [8, 9]
    assert list(WINDOW.needed(0, 16)) == [0]
    assert list(STATE.needed(0, 96)) == [2]
    assert list(STATE.needed(96, 96)) == []
    assert alignment([FULL, WINDOW, STATE]) == 32


def _by_definition(
    groups: list[Group], start: int, limit: int, missing: set[tuple[int, int]]
) -> int:
    step = alignment(groups)
    for end in range(limit // step * step, start, -step):
        needed = [(group.index, block) for group in groups for block in group.needed(start, end)]
        if not missing.intersection(needed):
            return end
    return start


@given(
    pools=st.sets(st.sampled_from([FULL, WINDOW, STATE]), min_size=1),
    start=st.integers(0, 6).map(lambda blocks: blocks * 32),
    limit=st.integers(0, 400),
    missing=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 24)), max_size=12),
)
def test_longest_hit_is_the_longest(
    pools: set[Group], start: int, limit: int, missing: set[tuple[int, int]]
) -> None:
    groups = sorted(pools, key=lambda group: group.index)

    def has(group: int, block: int) -> bool:
        return (group, block) not in missing

    assert longest_hit(groups, start, limit, has) == _by_definition(groups, start, limit, missing)
