"""What tokens mean in a checkpoint, by the files of its tokenizer that this machine has."""

from __future__ import annotations

import filecmp
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILES = ("tokenizer.json", "vocab.json")
"""Files that have each token with its id. They are compared with their own kind alone, as others
write the same token in another way."""


@functools.cache
def differing(
    one: str, other: str, revisions: tuple[str | None, ...]
) -> dict[int, tuple[str, str]]:
    """Find the ids that are another token in another checkpoint.

    Args:
        one: a folder, or a repository of the Hub, of which only files that are on this machine are
            read.
        other: likewise.
        revisions: of both.

    Returns:
        The tokens in both, by their id. Empty if one of them has no tokenizer of its own, and for
        tokens that only one of them has.
    """
    for name in _FILES:
        own, theirs = (_file(*each, name) for each in zip((one, other), revisions))
        if own is None or theirs is None:
            continue
        if filecmp.cmp(own, theirs, shallow=False):
            break
        first, second = _tokens(own), _tokens(theirs)
        shared = sorted(first.keys() & second.keys())
        return {id: (first[id], second[id]) for id in shared if first[id] != second[id]}
    return {}


def _file(checkpoint: str, revision: str | None, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    if (file := Path(checkpoint, name)).is_file():
        return file
    try:
        cached = try_to_load_from_cache(checkpoint, name, revision=revision)
    except ValueError:  # It is no name of a repository.
        return None
    return Path(cached) if isinstance(cached, str) else None


def _tokens(file: Path) -> dict[int, str]:
    """The tokens by their ids; none of a file in another form."""
    try:
        return {id: token for token, id in _pairs(json.loads(file.read_bytes())) if type(id) is int}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _pairs(read: Any) -> Iterator[tuple[str, int]]:
    vocabulary = read["model"]["vocab"] if "model" in read else read
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:
        yield from ((token, id) for id, (token, *_) in enumerate(vocabulary))
    yield from ((each["content"], each["id"]) for each in read.get("added_tokens", ()))
