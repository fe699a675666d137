"""Placement of host memory on the NUMA node next to a GPU."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

from vllm_graft.base.log import info_once

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_SYSFS = Path("/sys/bus/pci/devices")


def node_of_gpu(pci_address: str, sysfs: Path = _SYSFS) -> int | None:
    """The NUMA node of a PCI device such as ``"0000:17:00.0"``; None if it is unknown."""
    try:
        node = int((sysfs / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Ask the kernel to take a range's memory from ``node`` when it is first touched.

    This is only a preference: if the node is full, memory of another one is used.

    Args:
        address: start of the range.
        num_bytes: length of the range.
        node: number of the NUMA node.

    Returns:
        Whether the kernel accepted it.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(ctypes.sizeof(mask) * 8),
        ctypes.c_uint(0),
    )
    if failed:
        # Containers often forbid mbind. The memory still works, perhaps more slowly.
        info_once(f"host KV cache: memory is not bound to NUMA node {node} (mbind is refused)")
    return not failed
