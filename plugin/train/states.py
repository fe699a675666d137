"""The folder with a target's answers and its states, a file for each text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One text of the folder: the request's number, which names the file; how many `tokens` have
    states, of which `prompt` were given; the temperature at which the target drew the rest, -1
    where somebody else wrote it; and whether it is for measuring alone."""

    number: int
    tokens: int
    prompt: int
    temperature: float
    held_out: bool


def file_of(folder: Path, number: int) -> Path:
    """The file of a text: ``hidden_states`` ``[tokens, layers, hidden]`` and int64 ``token_ids``
    ``[tokens]``."""
    return folder / f"{number:08d}.safetensors"


def open_index(folder: Path, part: int) -> IO[str]:
    """The index of one of several engines. A text without a line of it was not finished."""
    return (folder / f"index-{part}.jsonl").open("a")


def read_entries(folder: Path) -> list[Entry]:
    """Return all texts that are finished, in the order of their numbers."""
    found = {}
    for index in folder.glob("index-*.jsonl"):
        for line in index.read_text().splitlines():
            try:
                entry = Entry(**json.loads(line))
            except (ValueError, TypeError):  # A killed process left half of a line.
                continue
            if file_of(folder, entry.number).exists():
                found[entry.number] = entry
    return [found[number] for number in sorted(found)]


def load(folder: Path, entry: Entry) -> tuple[Tensor, Tensor]:
    """States ``[tokens, layers, hidden]`` of a text, in the dtype of the target, and its tokens."""
    found = load_file(file_of(folder, entry.number))
    return found["hidden_states"], found["token_ids"]


def tokens(folder: Path, entry: Entry) -> Tensor:
    """The tokens of a text alone."""
    with safe_open(file_of(folder, entry.number), "pt") as found:
        ids: Tensor = found.get_tensor("token_ids")
    return ids
