"""What runs in this process: parts publish, ``graft_info()`` collects."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from vllm_graft.base.log import info_once
from vllm_graft.base.metric import Numbers
from vllm_graft.base.version import __version__

Provider = Callable[[], Mapping[str, Any]]

_providers: dict[str, Provider] = {}
_counted: dict[str, Callable[[], Numbers]] = {}
_declined: dict[str, str] = {}


def publish(part: str, provider: Provider, numbers: Callable[[], Numbers] | None = None) -> None:
    """Announce that ``part`` is active. A later call replaces an earlier.

    Args:
        provider: returns what ``graft_info()`` shows, as plain Python values (they cross process
            borders). It is asked between engine steps, so it may synchronise with the device.
        numbers: returns the numbers of the part's metrics. It is asked about once per second while
            the engine serves, so it must not touch the device.
    """
    _providers[part] = provider
    _counted.pop(part, None)
    if numbers is not None:
        _counted[part] = numbers


def decline(part: str, reason: str) -> None:
    """Note that a part which a preset turned on can't run here after all, and say so once."""
    _declined[part] = reason
    info_once(f"vllm-graft {__version__}: {part} off, as this worker found: {reason}")


def declined() -> dict[str, str]:
    """Why parts that a preset turned on do not run in this process."""
    return dict(_declined)


def weakly(method: Provider) -> Provider:
    """A bound method as a provider that does not keep a stopped engine's memory alive."""
    weak = weakref.WeakMethod(method)

    def report() -> Mapping[str, Any]:
        alive = weak()
        return {} if alive is None else alive()

    return report


def numbers() -> dict[str, Numbers]:
    """Copies of the numbers of each part's metrics, which other threads may read."""
    return {
        part: {
            key: dict(found) if isinstance(found, Mapping) else found
            for key, found in read().items()
        }
        for part, read in _counted.items()
    }


def states() -> dict[str, Any]:
    """Which parts run in this process, and why others that a preset turned on do not."""
    return {"on": active_parts(), "declined": declined()}


def active_parts() -> list[str]:
    """Parts that have published in this process."""
    return sorted(_providers)


def collect() -> dict[str, dict[str, Any]]:
    """Each part's counters; ``{"error": ...}`` for a provider that raises."""
    return {part: _read(provider) for part, provider in sorted(_providers.items())}


def clear() -> None:
    """Forget every part (a second engine in one process; tests)."""
    _providers.clear()
    _counted.clear()
    _declined.clear()


def _read(provider: Provider) -> dict[str, Any]:
    # One part's counters must not take down the report on the others.
    try:
        return dict(provider())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
