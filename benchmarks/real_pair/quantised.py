"""A GGUF file's weights in parts that can travel alone, and the checkpoint that parts are put into.

A part holds rows of matrices as the GGUF file has them, which takes a third of the bytes of
bfloat16. Parts may arrive in any order, and several processes may put theirs into the checkpoint at
the same time: `layout.json` beside it says where each tensor goes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_graft.bench.common.report import BenchmarkError

LAYOUT, CHECKPOINT = "layout.json", "model.safetensors"

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")

FLOATS = 0
"""A GGUF file's number for float32."""

SAME_MATRIX = 0.2
"""Two roundings of one matrix differ by less of its norm; two matrices differ by more than it."""


@dataclass(frozen=True)
class Source:
    """A tensor of a GGUF file.

    Attributes:
        rows: uint8 ``[rows, bytes]``, as the file has them.
        kind: number of the format of `rows`.
        shape: of the values.
    """

    rows: np.ndarray[Any, Any]
    kind: int
    shape: tuple[int, ...]

    def values(self, rows: slice) -> np.ndarray[Any, Any]:
        """Values of some rows, float32."""
        return _values(self.rows[rows], self.kind)


def _values(rows: np.ndarray[Any, Any], kind: int) -> np.ndarray[Any, Any]:
    if kind == FLOATS:
        return np.ascontiguousarray(rows).view(np.float32)
    from gguf import GGMLQuantizationType, dequantize

    found: np.ndarray[Any, Any] = dequantize(rows, GGMLQuantizationType(kind))
    return found


def checkpoint_name(name: str) -> str:
    """The name that a checkpoint has for a tensor of a GGUF file.

    Raises:
        BenchmarkError: no name is known.
    """
    found = _NAME.fullmatch(name)
    if not found or found[2] not in _NAMES:
        raise BenchmarkError(f"the GGUF file has a tensor {name!r}, which has no known place")
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{_NAMES[found[2]]}.{found[3]}"


def sources(gguf: Path) -> dict[str, Source]:
    """The tensors of a GGUF file by their names in a checkpoint.

    One of two equal matrices, the embedding and the output layer, is left out: the output layer,
    which has more bits, is both.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf))
    field: Any = {name: each.contents() for name, each in reader.fields.items() if each.types}
    kind = field["general.architecture"]
    found = {}
    for each in reader.tensors:
        shape = tuple(int(size) for size in each.shape[::-1])
        rows = each.data.view(np.uint8).reshape(shape[0] if len(shape) > 1 else 1, -1)
        name = checkpoint_name(each.name)
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            key = "head_count" if "q_proj" in name else "head_count_kv"
            rows = _halves(rows, field[f"{kind}.attention.{key}"])
        found[name] = Source(rows, int(each.tensor_type), shape)
    if "lm_head.weight" in found and _same(
        found["lm_head.weight"], found["model.embed_tokens.weight"]
    ):
        found["model.embed_tokens.weight"] = found.pop("lm_head.weight")
    return found


def _halves(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Put the rows that RoPE rotates together half a head apart; a Llama's are side by side."""
    apart = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(apart).reshape(rows.shape)


def _same(one: Source, other: Source) -> bool:
    if one.shape != other.shape:
        return False
    left, right = (each.values(slice(0, 256)) for each in (one, other))
    return bool(np.linalg.norm(left - right) < SAME_MATRIX * np.linalg.norm(left))


def header_of(found: dict[str, Source]) -> dict[str, Any]:
    """The header of a file of safetensors that has all tensors in bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, each in sorted(found.items()):
        end = place + 2 * int(np.prod(each.shape))
        header[name] = {"dtype": "BF16", "shape": list(each.shape), "data_offsets": [place, end]}
        place = end
    return header


def pieces(found: dict[str, Source], most: int) -> Iterator[dict[str, tuple[int, Source, slice]]]:
    """Rows of tensors, in parts of at most `most` bytes, by ``NAME@ROW``."""
    part: dict[str, tuple[int, Source, slice]] = {}
    room = most
    for name, each in sorted(found.items()):
        start, (count, width) = 0, each.rows.shape
        while start < count:
            if room < width:
                yield part
                part, room = {}, most
            end = min(count, start + room // width)
            part[f"{name}@{start}"] = (start, each, slice(start, end))
            room -= (end - start) * width
            start = end
    if part:
        yield part


def write_parts(gguf: Path, folder: Path, target: Path, most: int) -> list[Path]:
    """Write a GGUF file's weights to `folder` in parts, and `target/layout.json`."""
    found = sources(gguf)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, part in enumerate(pieces(found, most)):
        file = folder / f"{number:02}.safetensors"
        rows = {
            name: torch.from_numpy(np.array(each.rows[place]))
            for name, (_, each, place) in part.items()
        }
        save_file(rows, file, {name: str(each.kind) for name, (_, each, _) in part.items()})
        files.append(file)
    write_layout(target, {"header": header_of(found)})
    return files


def write_layout(target: Path, layout: dict[str, Any]) -> None:
    """Write where the tensors of a checkpoint are."""
    (target / LAYOUT).write_text(json.dumps(layout) + "\n")


def read_layout(target: Path) -> dict[str, Any]:
    """Read it."""
    found: dict[str, Any] = json.loads((target / LAYOUT).read_text())
    return found


def put(part: Path, target: Path) -> None:
    """Put a part's rows into the checkpoint of `target`, in bfloat16."""
    header = read_layout(target)["header"]
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    size = max(each["data_offsets"][1] for name, each in header.items() if name[0] != "_")
    file = os.open(target / CHECKPOINT, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # All parts write the same head.
        os.truncate(file, 8 + len(head) + size)
        os.pwrite(file, len(head).to_bytes(8, "little") + head, 0)
        with safe_open(part, "pt") as stored:
            kinds = stored.metadata()
            for key in stored.keys():  # noqa: SIM118
                name, _, row = key.partition("@")
                begin, end = header[name]["data_offsets"]
                rows: Tensor = stored.get_tensor(key)
                values = torch.from_numpy(_values(rows.numpy(), int(kinds[key]))).bfloat16()
                width = 2 * values.shape[-1]
                place = begin + int(row) * width
                if place + len(values) * width > end:
                    raise BenchmarkError(f"{part}: {key} has more rows than its place in {target}")
                _write(file, values, 8 + len(head) + place)
    finally:
        os.close(file)


def _write(file: int, values: Tensor, place: int) -> None:
    told = memoryview(values.contiguous().view(torch.int16).numpy()).cast("B")
    while told:
        count = os.pwrite(file, told, place)
        told, place = told[count:], place + count


def put_all(parts: Sequence[Path], target: Path) -> None:
    """Put several parts into the checkpoint, as many at a time as there are cores."""
    if len(parts) == 1:
        put(parts[0], target)
        return
    with ProcessPoolExecutor(min(len(parts), os.cpu_count() or 1)) as workers:
        for done in [workers.submit(put, part, target) for part in parts]:
            done.result()


def checksum(target: Path) -> str:
    """The SHA-256 of the checkpoint of `target`."""
    with (target / CHECKPOINT).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seal(target: Path) -> None:
    """Write down the checksum of a checkpoint that is whole."""
    write_layout(target, read_layout(target) | {"sha256": checksum(target)})


def check(target: Path, seconds: float = 0) -> None:
    """Compare a checkpoint with the checksum that was written down where it was made first.

    Args:
        target: its folder.
        seconds: so long is waited for others that still put their parts into it.

    Raises:
        BenchmarkError: they differ: a part is missing or broken.
    """
    wanted, until = read_layout(target)["sha256"], time.monotonic() + seconds
    while True:
        found = checksum(target) if (target / CHECKPOINT).exists() else "none"
        if found == wanted:
            return
        if time.monotonic() > until:
            break
        time.sleep(1)
    raise BenchmarkError(
        f"{target / CHECKPOINT} has the SHA-256 {found}, not {wanted}: a part is missing or "
        "broken. Put all parts into it again"
    )
