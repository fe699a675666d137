"""The table of workloads by name, and how often their answers repeat."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from benchmarks.workloads import questions, reading
from benchmarks.workloads.agent import TURNS, agent
from benchmarks.workloads.edits import edits
from benchmarks.workloads.repeats import Said, Shares, shares
from benchmarks.workloads.request import Request, pieces
from benchmarks.workloads.sources import Choice


class Workload(NamedTuple):
    """What makes the requests of a workload, and what they are.

    `replayed`: the answers follow from what is asked, so that a model which can't follow
    instructions is made to say them. `turns` are the most requests of a session.
    """

    make: Callable[[Choice], Iterator[Request]]
    replayed: bool
    about: str
    turns: int = 1


WORKLOADS = {
    "chat": Workload(questions.chat, False, "first questions of ShareGPT's conversations"),
    "code": Workload(questions.code, False, "HumanEval's functions to complete"),
    "edits": Workload(edits, True, "edits of source files, which are written again"),
    "predicted": Workload(partial(edits, predicted=True), True, "the same, with a prediction"),
    "agent": Workload(agent, True, "sessions of tool calls by schema, three on each file", TURNS),
    "retrieval": Workload(reading.retrieval, True, "answers that quote one of four documents"),
    "summaries": Workload(reading.summaries, True, "the first sentence of each paragraph"),
    "rollout": Workload(questions.rollout, False, "answers to some of HumanEval's tasks, twice"),
}


def requests_of(name: str, count: int, arguments: argparse.Namespace) -> list[Request]:
    """So many requests of a workload, or all that there are.

    Of a session and of a rollout all requests come, so that there may be more.
    """
    choice = Choice.of(arguments)
    made = WORKLOADS[name].make(choice)
    found = [*islice(made, choice.rollout if name == "rollout" else count)]
    for each in made if found and found[-1].session else ():
        if each.session != found[-1].session:
            break
        found.append(each)
    return found


def repeats(requests: Sequence[Request], tokenizer: Any = None) -> Shares:
    """How often the answers that are known repeat; without a tokenizer in `pieces`."""
    tokens = pieces if tokenizer is None else tokenizer.encode
    known = (each for each in requests if each.answer)
    return shares(Said(tokens(each.prompt), tokens(each.answer), each.cache_salt) for each in known)
