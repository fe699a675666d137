"""Tokens per second of our trees with n-grams and without, on edits of source files and on prose.

    python -m benchmarks.edits PAIR --arms tree:63 tree:63+ngram auto:63 auto:63+ngram

PAIR is a folder as `tests/pair` is. As in `vllm-graft bench trees`, all arms are up at the same
time and take turns. There are two workloads:

- `edit`: each prompt is a part of a module of the standard library and an instruction to rename a
  name in it; the answer is that part with the name changed. A small target can't follow
  instructions, so the answer is *replayed*: wherever the target draws, the answer's token has by
  far the largest logit. All passes run as ever, and the draft proposes what it would for such a
  text;
- `prose`: the pair's own prompts, with the target's own answers. Here n-grams should cost nothing.
"""

from __future__ import annotations

import argparse
import ast
import functools
import keyword
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import pair_arms
from benchmarks.watched_loop import Call
from vllm_graft.bench.common import arm_processes, report
from vllm_graft.bench.common.arm import Arm, Row, table
from vllm_graft.bench.trees import command

WORKLOADS = ("edit", "prose")


class Edit(NamedTuple):
    """A part of a source file with an instruction, and the part as it is after the edit."""

    prompt: str
    answer: str


def edits(count: int, characters: int) -> list[Edit]:
    """Edits of so many modules of the standard library, the same ones on each machine of a Python.

    Raises:
        BenchmarkError: the library has too few modules.
    """
    found: list[Edit] = []
    for text in _modules():
        start = max(text.find("\nclass "), text.find("\ndef "), 0)
        part = text[start:].lstrip("\n")[:characters].rpartition("\n")[0] + "\n"
        names = Counter(re.findall(r"\b[a-z_]{4,}\b", part))
        for word in (*keyword.kwlist, "self"):
            names.pop(word, None)
        if len(part) < characters // 2 or not names:
            continue
        # The most frequent one; of equally frequent ones the first in the alphabet.
        old = min(names, key=lambda name: (-names[name], name))
        new = f"{old}_value"
        ask = f"\n# The same code, with {old} renamed to {new}:\n"
        found.append(Edit(part + ask, re.sub(rf"\b{old}\b", new, part)))
        if len(found) == count:
            return found
    raise report.BenchmarkError(f"only {len(found)} modules have {characters} characters")


def _modules() -> Iterator[str]:
    """Texts of modules that can be parsed, in the order of their names."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        yield text


CERTAIN = 1e4
"""A logit that leaves all other tokens no chance, and that bfloat16 can hold."""


class Replay:
    """Lets a worker draw given answers, whatever samples and verifies its tokens.

    Args:
        answers: token ids of the answer to each prompt, by the prompt's token ids.
        max_reqs: request-state slots.
        width: most tokens of a text.
        device: where tokens are drawn.
    """

    def __init__(
        self,
        answers: dict[tuple[int, ...], list[int]],
        max_reqs: int,
        width: int,
        device: torch.device,
    ) -> None:
        self.answers = answers
        self.texts = torch.full((max_reqs, width + 1), -1, dtype=torch.int64, device=device)

    def add(self, slot: int, prompt: Sequence[int]) -> None:
        """Note a new request's answer; behind its end the target's own draws stay.

        Raises:
            RuntimeError: if the prompt is not one of the given ones.
        """
        answer = self.answers.get(tuple(prompt))
        if answer is None:
            raise RuntimeError(f"no answer to replay for a prompt of {len(prompt)} tokens")
        end = min(len(prompt) + len(answer), self.texts.shape[1])
        text = torch.tensor(answer[: end - len(prompt)])
        self.texts[slot].fill_(-1)
        self.texts[slot, len(prompt) : end] = text.to(self.texts.device)

    def force(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Write to ``[rows, vocab]`` logits of rows at some positions of some slots, ``[rows]``.

        A row at a position draws the token of the next position.
        """
        wanted = self.texts[slots.long(), positions + 1][:, None]
        place = wanted.clamp(min=0)
        kept = logits.gather(1, place)
        logits.scatter_(1, place, kept.masked_fill(wanted >= 0, CERTAIN))


def replay(worker: Any, answers: dict[tuple[int, ...], list[int]]) -> int:
    """Replay answers in an engine; this runs in its worker. Returns how many there are."""
    runner = worker.model_runner
    replayed = Replay(answers, runner.max_num_reqs, runner.max_model_len, runner.device)
    state, model = runner.model_state, runner.model
    add, sample, compute = state.add_request, runner.sample, model.compute_logits
    batches: list[Any] = []

    @functools.wraps(add)
    def add_request(req_index: int, request: Any) -> None:
        add(req_index, request)
        replayed.add(req_index, request.prompt_token_ids)

    @functools.wraps(sample)
    def sample_instead(hidden: Any, batch: Any, *args: Any) -> Any:
        batches.append(batch)
        return sample(hidden, batch, *args)

    @functools.wraps(compute)
    def compute_instead(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if batches and logits is not None:
            batch = batches.pop()
            positions = batch.positions[batch.logits_indices]
            replayed.force(logits, batch.expanded_idx_mapping, positions)
        return logits

    state.add_request, runner.sample, model.compute_logits = (
        add_request,
        sample_instead,
        compute_instead,
    )
    return len(answers)


def answers_to(cases: Iterable[Edit], tokenizer: Any) -> dict[tuple[int, ...], list[int]]:
    """What `replay` wants: the tokens of each answer, by those of its prompt."""
    return {
        tuple(tokenizer.encode(case.prompt)): tokenizer.encode(
            case.answer, add_special_tokens=False
        )
        for case in cases
    }


@contextmanager
def engines(
    arguments: argparse.Namespace,
    prompts: list[str],
    answers: dict[tuple[int, ...], list[int]],
) -> Iterator[dict[Arm, Connection]]:
    """The engines of all arms, which replay the answers if there are any."""
    pipes = pair_arms.start(pair_arms.read_arms(arguments), arguments, prompts)
    try:
        for arm, pipe in pipes.items() if answers else ():
            pipe.send(Call(replay, (answers,)))
            arm_processes.answer(arm, pipe)
        yield pipes
    finally:
        for pipe in pipes.values():
            pipe.send(None)


def tokenizer_of(pair: Path) -> Any:
    """The tokenizer of a pair's target."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(pair / "target"))


def measure(arguments: argparse.Namespace, workload: str) -> list[Row]:
    """Measure all arms on one workload."""
    cases = edits(arguments.files, arguments.prompt) if workload == "edit" else []
    answers = answers_to(cases, tokenizer_of(arguments.pair)) if cases else {}
    prompts = [case.prompt for case in cases]
    prompts = prompts or pair_arms.read_prompts(arguments.pair, arguments.prompt)
    with engines(arguments, prompts, answers) as pipes:
        return command.measure_cases(pipes, arguments)


def make_parser(description: str, workloads: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of what benchmarks of workloads are told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pair_arms.add_pair_arguments(parser)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--arms", nargs="+")
    command.add_loads(parser)
    parser.add_argument("--workload", nargs="+", choices=workloads, default=[*workloads])
    parser.add_argument("--json", type=Path)
    return parser


def run(
    arguments: argparse.Namespace, measured: Callable[[argparse.Namespace, str], list[Row]]
) -> int:
    """Measure each workload, print its table, write all rows."""
    rows: list[dict[str, Any]] = []
    for workload in arguments.workload:
        found = measured(arguments, workload)
        print(f"{workload}:\n{table(found, command.rate_cell)}", flush=True)
        rows += [{"workload": workload, **row.flat()} for row in found]
    if arguments.json:
        report.write_json(arguments.json, rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, WORKLOADS)
    parser.add_argument("--files", type=int, default=32, help="modules that are edited")
    arms = ["tree:63", "tree:63+ngram"]
    parser.set_defaults(arms=arms, requests_in_flight=[1, 16], prompt=1500)
    return run(parser.parse_args(argv), measure)


if __name__ == "__main__":
    raise SystemExit(main())
