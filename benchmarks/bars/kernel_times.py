"""Profile where the device's time goes: its kernels by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_NAME = 100


@dataclass(frozen=True)
class Kernel:
    """The launches of all kernels with one name.

    Attributes:
        name: the profiler's name.
        count: number of launches.
        microseconds: device time of all launches.
    """

    name: str
    count: int
    microseconds: float

    def __str__(self) -> str:
        """A line: the sum, the launches, the mean of one."""
        mean = self.microseconds / self.count
        return f"{self.microseconds:9.1f} us {self.count:5d} x {mean:7.2f}  {self.name[:_NAME]}"


def by_name(events: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Sum up ``(name, microseconds)`` of each launch, the longest sums first."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in events:
        found[name].append(microseconds)
    kernels = [Kernel(name, len(times), sum(times)) for name, times in found.items()]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


def on_device(events: Iterable[Any]) -> list[Any]:
    """Select the kernels and copies of the CUDA device from a profiler's events."""
    from torch.autograd import DeviceType

    return [event for event in events if event.device_type == DeviceType.CUDA]


def kernels_of(region: Callable[[], Any]) -> list[Kernel]:
    """Profile the kernels and copies of a region on the current CUDA device, with those of graphs.

    Run the region once before, or compiling and loading count as well. It waits for the device.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        region()
        torch.cuda.synchronize()
    return by_name(
        (event.name, event.time_range.elapsed_us()) for event in on_device(profiler.events() or ())
    )


def lines(kernels: Sequence[Kernel], most: int = 20) -> list[str]:
    """Lay out the sum, and a line for each of the `most` longest."""
    total = sum(kernel.microseconds for kernel in kernels)
    launches = sum(kernel.count for kernel in kernels)
    return [f"{total:9.1f} us {launches:5d} launches", *map(str, kernels[:most])]
