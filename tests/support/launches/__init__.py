"""Calls of all kernels, and the check that what they launch compiles."""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

from tests.support.compiling.launch_compiler import compiled, kernels_of, launches_in
from vllm_graft.spec_decode.kernels.kernel_launch import Launch


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
    package: ModuleType, calls: Iterable[Callable[[], object]], capability: int
) -> None:
    """Check that all kernels of a package are launched in some calls, and that they compile."""
    launches = launches_in(package, calls)
    assert kernels_of(package) == {launch.kernel for launch in launches}
    check_launches(launches, capability)
