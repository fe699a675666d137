"""Calls of all kernels, and the check that what they launch compiles."""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

from tests.support.compiling.launch_compiler import compiled, kernels_of, launches_in
from vllm_graft.spec_decode.kernels.kernel_launch import Launch, Pointer


def check_launches(
    launches: Sequence[Launch], capability: int, *, shared_bytes: int = 163 << 10
) -> None:
    """Check that all compile, with so much shared memory at most: that of a block of sm_80."""
    outcomes = compiled(launches, capability)
    failed = [(launch, one.error) for launch, one in zip(launches, outcomes) if one.error]
    assert failed == []
    assert len(outcomes) == len(launches) > 0
    assert max(one.shared_bytes for one in outcomes) <= shared_bytes


def check_kernels(
    package: ModuleType,
    calls: Iterable[Callable[[], object]],
    capability: int,
    *,
    sizes: bool = True,
) -> None:
    """Check that all kernels of a package are launched in some calls, and that they compile.

    Without ``sizes`` those are left out in which a kernel has no other branches.
    """
    launches = launches_in(package, calls)
    assert kernels_of(package) == {launch.kernel for launch in launches}
    check_launches(launches if sizes else varied(launches), capability)


def varied(launches: Iterable[Launch]) -> list[Launch]:
    """A few launches in which each argument is all that it is in any of them: none, a dtype, a
    flag, 0, 1 or a larger number.

    Of those that do equally well, the one of the smallest sizes compiles soonest.
    """
    waiting = {launch: _kinds(launch) for launch in sorted(launches, key=_size)}
    left = set().union(*waiting.values())
    kept = []
    while left:
        best = max(waiting, key=lambda launch: len(waiting[launch] & left))
        left -= waiting.pop(best)
        kept.append(best)
    return kept


def _kinds(launch: Launch) -> set[tuple[str, str, object]]:
    return {(launch.kernel, name, _kind(value)) for name, value in launch.arguments}


def _kind(value: object) -> object:
    if isinstance(value, Pointer):
        return value.dtype
    return "more" if type(value) is int and value > 1 else repr(value)


def _size(launch: Launch) -> int:
    return sum(value for _, value in launch.arguments if type(value) is int)
