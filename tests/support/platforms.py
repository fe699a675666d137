"""Stand-ins for vLLM's platform, which asks NVML."""

from types import SimpleNamespace
from typing import Any


def platform(
    device_type: str = "cuda", capability: tuple[int, int] | None = (9, 0), *, nvidia: bool = True
) -> Any:
    found = None
    if device_type == "cuda" and capability is not None:
        major, minor = capability
        found = SimpleNamespace(major=major, minor=minor, as_version_str=lambda: f"{major}.{minor}")
    return SimpleNamespace(
        device_type=device_type,
        is_cuda=lambda: nvidia and device_type == "cuda",
        get_device_capability=lambda: found,
        get_device_total_memory=lambda: 80 << 30,
        support_static_graph_mode=lambda: device_type == "cuda",
    )
