"""What is asked: workloads that servers are measured with, and tasks of code to train on.

A workload is an iterable of requests, each a question and the most tokens of its answer. HumanEval
(arXiv:2107.03374) is for measuring alone. To train on there are functions of Python's standard
library, which every machine has.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.real_pair.conversations import (
    Conversation,
    first_prompt,
    is_held_out,
    messages,
    usable,
)

Request = tuple[str, int]
"""A question, and the most tokens of its answer."""

ANSWER, LONGEST = 512, 900
"""Tokens of an answer with code at most, and of a chat's question and answer at most: both fit into
2048 tokens with a chat template around them."""

TASK = (
    "Complete this function, and answer with the whole function in one block of Python.\n\n"
    "```python\n{}\n```"
)
WORDINGS = (
    "Write the body of this function.\n\n```python\n{}\n```",
    "Please implement this Python function:\n\n{}",
    "{}\n\nWhat would a good implementation of this function look like? Show the whole function.",
    "Implement the following as its docstring says. Say in a sentence or two how it works.\n\n{}",
    "Finish this code:\n\n```python\n{}\n```",
)
"""How functions are asked for in training."""

FEWEST_DOCUMENTED = 40
"""Characters of a docstring that says what a function does."""


def chat(pair: Path, tokenizer: Any) -> Iterator[Request]:
    """Held-out questions of people, with the length of the answer in the conversation."""
    for conversation in json.loads((pair / "held_out.json").read_text()):
        question, answer = (each["content"] for each in messages(conversation)[:2])
        asked, told = (len(tokenizer(text)["input_ids"]) for text in (question, answer))
        if 4 <= asked <= LONGEST and 4 <= told <= LONGEST:
            yield question, told


def human_eval(pair: Path, tokenizer: Any) -> Iterator[Request]:
    """HumanEval's tasks."""
    del tokenizer
    for task in json.loads((pair / "humaneval.json").read_text()):
        yield TASK.format(task.strip("\n")), ANSWER


WORKLOADS: dict[str, Callable[[Path, Any], Iterator[Request]]] = {
    "chat": chat,
    "humaneval": human_eval,
}
"""By the names that `serve --workloads` takes; each is given a pair and its tokenizer."""


def write_requests(found: Iterable[Request], file: Path) -> None:
    """Write requests as `vllm bench serve` reads its dataset "custom"."""
    lines = [json.dumps({"prompt": text, "output_tokens": most}) for text, most in found]
    file.write_text("\n".join(lines) + "\n")


def functions(count: int, folder: Path | None = None) -> list[Conversation]:
    """Conversations about functions of the standard library, in an order that looks random."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    found = []
    for file in sorted(folder.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idlelib"} & set(file.parts):
            found += list(_documented(file))
    order = random.Random(0)
    order.shuffle(found)
    asked = (
        {
            "id": f"function-{number}",
            "conversations": [
                {"from": "human", "value": order.choice(WORDINGS).format(declared)},
                {"from": "gpt", "value": f"```python\n{whole}\n```"},
            ],
        }
        for number, (declared, whole) in enumerate(found)
    )
    kept = [each for each in map(usable, asked) if each is not None]
    return kept[:count]


def _documented(file: Path) -> Iterator[tuple[str, str]]:
    """Functions that say what they do: without their bodies, and with them."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) == 1:
            continue
        if len(ast.get_docstring(node) or "") >= FEWEST_DOCUMENTED:
            whole, node.body = ast.unparse(node), node.body[:1]
            yield ast.unparse(node), whole


def mixed(train: list[Conversation], more: Iterable[Conversation]) -> list[Conversation]:
    """Put more conversations among those to train on, but for those that would be held out."""
    found = {first_prompt(each): each for each in (*more, *train)}
    kept = [each for each in found.values() if not is_held_out(each)]
    random.Random(0).shuffle(kept)
    return kept
