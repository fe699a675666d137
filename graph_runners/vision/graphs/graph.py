"""A captured pass of a tower: an exact graph of one layout, or the padded graph of a bucket."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_graft.graph_runners.vision.capture.device_memory import Arena
from vllm_graft.graph_runners.vision.capture.graph_backend import Captured, GraphBackend
from vllm_graft.graph_runners.vision.towers.tower import Buffers, Item, Pieces, Tower


class TowerGraph:
    """A captured `Tower.forward`, and the static buffers that it reads. Graphs share the data
    buffers, which the arena holds, and the memory of their outputs, which lie in the pool. So the
    caller loads, replays and clones without another replay in between. `own` are the bytes of each
    buffer that is not shared."""

    def __init__(self, tower: Tower, buffers: Buffers, own: Sequence[int]) -> None:
        self.buffers = buffers
        self.own = tuple(own)
        self._tower = tower
        self._captured: Captured | None = None

    def capture(self, backend: GraphBackend) -> None:
        self._captured = backend.capture(lambda: self._tower.forward(self.buffers))

    def replay(self) -> Any:
        """The static output, valid until the next replay of any graph."""
        if self._captured is None:
            raise RuntimeError("the graph was dropped")
        self._captured.replay()
        return self._captured.output

    def drop(self) -> None:
        if self._captured is not None:
            self._captured.reset()
        self._captured = None
        self.buffers = {}
        self.own = ()

    def _load_data(self, pieces: Pieces) -> int | None:
        """Copy data into the buffers: the rows that were written, or None if they do not fit."""
        written = 0
        for name, tensors in pieces.items():
            buffer = self.buffers.get(name)
            if buffer is None or not _accepts(buffer, tensors):
                return None
            if buffer.ndim == 0:
                if buffer.device.type == "cpu" and not torch.equal(buffer, tensors[0]):
                    return None
                buffer.copy_(tensors[0])
                continue
            written = 0
            for tensor in tensors:
                buffer[written : written + tensor.shape[0]].copy_(tensor, non_blocking=True)
                written += tensor.shape[0]
        return written


class ExactGraph(TowerGraph):
    """A graph for items of known layouts; the constants that follow from layouts are frozen.
    `pieces`: data of the items that the graph is captured with. `constants`: tensors that follow
    from their layouts; they are copied."""

    def __init__(self, tower: Tower, arena: Arena, pieces: Pieces, constants: Buffers) -> None:
        frozen = {
            name: value if _on_host(value) else value.clone() for name, value in constants.items()
        }
        data = {name: _static(arena, name, tensors) for name, tensors in pieces.items()}
        super().__init__(tower, {**data, **frozen}, [value.nbytes for value in frozen.values()])
        self._rows = {name: buffer.shape[0] for name, buffer in data.items() if buffer.ndim}

    def load(self, pieces: Pieces) -> bool:
        """Copy data in; False if their shapes or dtypes are not those of the capture."""
        rows = {name: sum(len(t) for t in ts) for name, ts in pieces.items() if ts[0].ndim}
        return rows == self._rows and self._load_data(pieces) is not None


class PaddedGraph(TowerGraph):
    """The graph of a bucket: it takes any items of up to `rows` patches; padding fills the rest.
    Padding has segments of its own. So every row belongs to a segment and is written, and the
    offsets that attention kernels get end at the number of rows. Offsets have room for more
    segments than a capture uses; unused segments are empty. Numbers that kernels read on the host
    are frozen at an upper bound. `pieces` are examples of shapes and dtypes, `constants` what
    :meth:`filled` returned."""

    def __init__(
        self, tower: Tower, arena: Arena, rows: int, pieces: Pieces, constants: Buffers,
        segments: int,
    ) -> None:  # fmt: skip
        self.rows = rows
        self._offsets: set[str] = set()
        buffers = {}
        own = []
        for name, value in constants.items():
            if _on_host(value):
                buffers[name] = value
            elif _is_offsets(value, rows):
                self._offsets.add(name)
                buffers[name] = value.new_full((max(segments, 2 * len(value)) + 17,), rows)
                buffers[name][: len(value)].copy_(value)
                own.append(buffers[name].nbytes)
            else:
                buffers[name] = arena.rows(name, value.shape[0], value)
                buffers[name].copy_(value)
        data = {name: arena.rows(name, rows, tensors[0]) for name, tensors in pieces.items()}
        super().__init__(tower, {**data, **buffers}, own)

    @staticmethod
    def filled(tower: Tower, rows: int, like: Item) -> Buffers:
        """The constants of a bucket that holds padding alone; host numbers are at their bounds.
        `like` is an item of the bucket's modality and dtype. Raises `ValueError` if the tower has
        no padding for so many rows."""
        fill = tower.padding(like, rows)
        if not fill:
            raise ValueError(f"{type(tower).__name__} cannot fill {rows} rows")
        return {**tower.constants(fill), **tower.bounds(rows)}

    def metadata(self, items: Sequence[Item]) -> Buffers | None:
        """The constants of these items and of the padding; None if they cannot fill the bucket."""
        used = sum(item.rows for item in items)
        fill = self._tower.padding(items[0], self.rows - used) if used < self.rows else []
        if fill is None or used > self.rows:
            return None
        return self._tower.constants([*items, *fill])

    def load(self, constants: Buffers, used: int, pieces: Pieces) -> bool:
        """Copy metadata and data in; False if they do not fit, and it must not be replayed.
        `constants` are what :meth:`metadata` returned, read only; the items have `used` patches."""
        if any(not self._fits(name, value) for name, value in constants.items()):
            return False
        if self._load_data(pieces) != used:
            return False
        for name in pieces:
            # Otherwise padding would hold data of earlier batches, and outputs could depend on it.
            self.buffers[name][used:].zero_()
        for name, value in constants.items():
            if _on_host(value):
                continue
            self.buffers[name][: len(value)].copy_(value, non_blocking=True)
            if name in self._offsets:
                self.buffers[name][len(value) :].fill_(self.rows)
        return True

    def _fits(self, name: str, value: torch.Tensor) -> bool:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.dtype != value.dtype:
            return False
        if _on_host(value):
            return bool(value <= buffer)
        if name in self._offsets:
            return len(value) <= len(buffer)
        return bool(value.shape == buffer.shape)


def _static(arena: Arena, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if tensors[0].ndim == 0:
        return tensors[0].clone()
    return arena.rows(name, sum(len(tensor) for tensor in tensors), tensors[0])


def _accepts(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    if buffer.ndim == 0:
        return len(tensors) == 1 and tensors[0].ndim == 0 and tensors[0].dtype == buffer.dtype
    return sum(len(tensor) for tensor in tensors) <= len(buffer) and all(
        tensor.dtype == buffer.dtype and tensor.shape[1:] == buffer.shape[1:] for tensor in tensors
    )


def _on_host(value: torch.Tensor) -> bool:
    """Whether this is a number that kernels read on the host; such tensors have no dimensions."""
    return bool(value.ndim == 0)


def _is_offsets(value: torch.Tensor, rows: int) -> bool:
    """Whether this is ``[segments + 1]`` cumulative offsets of segments, from 0 to `rows`."""
    integers = value.dtype in (torch.int32, torch.int64)
    if not integers or value.ndim != 1 or len(value) < 2:
        return False
    return int(value[0]) == 0 and int(value[-1]) == rows
