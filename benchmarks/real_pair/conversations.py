"""Conversations of people with assistants in ShareGPT's form; the file's end may be missing."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

Conversation = dict[str, Any]
"""An `id`, and `conversations`: a list of turns, each `from` "human" or "gpt", with its `value`."""

HELD_OUT = 16
"""One conversation in so many is held out of training."""

MOST_TURNS = 4
FEWEST_CHARACTERS, MOST_CHARACTERS = 8, 3000
"""Characters of a conversation's turns. Longer turns are left out, not cut."""

FIRST_FOREIGN, TYPOGRAPHY, SYMBOLS = "\u0250", "\u2000", "\u2600"
"""Letters from the first to the second are not Latin; quotation marks and bullets follow them."""


def whole(text: str) -> Iterator[Conversation]:
    """Read a JSON list of conversations up to the last one that is whole.

    Raises:
        ValueError: the text is no list.
    """
    decoder, place = json.JSONDecoder(), _skip(text, 0)
    if text[place : place + 1] != "[":
        raise ValueError(f"conversations are a JSON list, but the text begins {text[:20]!r}")
    place = _skip(text, place + 1)
    while place < len(text) and text[place] != "]":
        try:
            found, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            return
        yield found
        place = _skip(text, place)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def usable(found: Conversation) -> Conversation | None:
    """Return a conversation's first turns, person and assistant in turns; None where they don't do.

    An assistant's turn that comes first is left out: the file cuts long conversations into parts.
    Turns are in Latin letters, because small models know little else, and neither empty nor long.
    """
    turns: list[dict[str, str]] = []
    given = found.get("conversations", [])
    if given and given[0].get("from") == "gpt":
        given = given[1:]
    for number, turn in enumerate(given[:MOST_TURNS]):
        value = turn.get("value", "")
        right = turn.get("from") == ("human", "gpt")[number % 2]
        if not right or not FEWEST_CHARACTERS <= len(value) <= MOST_CHARACTERS:
            break
        if any(FIRST_FOREIGN <= letter < TYPOGRAPHY or letter >= SYMBOLS for letter in value):
            break
        turns.append({"from": turn["from"], "value": value})
    turns = turns[: len(turns) // 2 * 2]
    return {"id": str(found.get("id", "")), "conversations": turns} if turns else None


def is_held_out(conversation: Conversation) -> bool:
    """Whether a conversation is for measuring; its first question decides, whatever else there is.

    The parts of a long conversation have different names, but the same question may come again.
    """
    return zlib.crc32(first_prompt(conversation).encode()) % HELD_OUT == 0


def first_prompt(conversation: Conversation) -> str:
    """The first thing that the person says."""
    value: str = conversation["conversations"][0]["value"]
    return value


def split(text: str, most: int) -> tuple[list[Conversation], list[Conversation]]:
    """Read conversations for training and held-out ones, `most` in all; a question comes once."""
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    seen: set[str] = set()
    for found in whole(text):
        kept = usable(found)
        if kept is None or first_prompt(kept) in seen:
            continue
        seen.add(first_prompt(kept))
        (held_out if is_held_out(kept) else train).append(kept)
        if len(train) + len(held_out) == most:
            break
    return train, held_out


def messages(conversation: Conversation) -> list[dict[str, str]]:
    """The turns as chat templates take them."""
    roles = {"human": "user", "gpt": "assistant"}
    return [
        {"role": roles[turn["from"]], "content": turn["value"]}
        for turn in conversation["conversations"]
    ]


def tokens_of(
    tokenizer: Any, turns: Sequence[dict[str, str]], answer_follows: bool = True
) -> list[int]:
    """Token ids of turns in the model's chat template, as a server would compute them."""
    text = tokenizer.apply_chat_template(
        list(turns), tokenize=False, add_generation_prompt=answer_follows
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
