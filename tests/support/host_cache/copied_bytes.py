"""Made-up pools, and every byte that copies of them move."""

from vllm_graft.hicache.copies.strided import StridedCopies
from vllm_graft.hicache.messages.operation import CacheOperation
from vllm_graft.hicache.pages.layout import LayerPages, layer_copies

HOST = 1 << 40
NO_LIMIT = 1 << 31
Bytes = list[tuple[int, int]]
"""Device and host address of every byte, sorted."""


def pool_of(number: int, widths: list[list[int]], gap: int, together: bool) -> list[LayerPages]:
    """Make layers with a run per width; their blocks are apart (``LB``) or together (``BL``)."""
    layers, host, base = [], 0, (number + 1) << 30
    whole = sum(map(sum, widths)) + gap
    for place, sizes in enumerate(widths):
        runs, offset = [], 0
        for size in sizes:
            runs.append((offset, host, size))
            offset, host = offset + size + (0 if together else gap), host + size
        layers.append(
            LayerPages(
                f"pool{number}.layers.{place}",
                base,
                whole if together else offset + gap,
                tuple(runs),
            )
        )
        base += offset if together else 1 << 20
    return layers


def bytes_of(copies: StridedCopies, begin: int = 0, end: int | None = None) -> Bytes:
    """List every byte of 2D copies."""
    c = copies
    columns = (c.device, c.host, c.device_pitch, c.host_pitch, c.width, c.rows)
    return sorted(
        (device + row * pitch + at, host + row * host_pitch + at)
        for device, host, pitch, host_pitch, width, rows in zip(
            *(column[begin:end].tolist() for column in columns)
        )
        for row in range(rows)
        for at in range(width)
    )


def pages_of(
    pools: dict[int, list[LayerPages]], operation: CacheOperation, slot_bytes: int
) -> tuple[Bytes, dict[str, Bytes]]:
    """List every byte of an operation's pages, in all and by layer."""
    parts = ((pools[t.group], t.device_indices, t.host_indices) for t in operation.transfers)
    runs, ranges = layer_copies(parts, slot_bytes, HOST)
    rows = list(zip(runs.device.tolist(), runs.host.tolist(), runs.sizes.tolist()))

    def those(begin: int, end: int) -> Bytes:
        return sorted((d + at, h + at) for d, h, n in rows[begin:end] for at in range(n))

    return those(0, len(rows)), {name: those(*span) for name, span in ranges.items()}
