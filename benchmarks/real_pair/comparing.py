"""Answers of a pair's engines with chains and trees, against those of its target alone.

All engines compute in float32 on a CPU, with chunked prefill and prefix caching. Every other
request is greedy, the rest have seeds. Some prompts are longer than the windows of the target's
layers, and begin as another one does that is answered long before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.real_pair.conversations import Conversation, messages
from benchmarks.real_pair.targets import target_of
from tests.support.engines.pairs import Answer, Pair, Request, answer_all, counter, scheduling
from vllm_graft.base import markdown

ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 192,
    "kv_cache_memory_bytes": 2**28,
    "enable_prefix_caching": True,
}
"""A step has room for eight trees of 15 nodes and a part of a prompt."""

SHORT, LONG, LONGER = 64, 544, 200
"""Most tokens of a short prompt, fewest of what long prompts have in front, and how many more."""

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Arm:
    """One engine. Without `nodes`, `chain` is stock's; neither is the target alone.

    Attributes:
        window: whether tree attention keeps to the windows; False is the negative control.
    """

    name: str
    nodes: int = 0
    topk: int = 1
    steps: int = 0
    chain: int = 0
    window: bool = True

    def engine(self, pair: Pair, method: str) -> contextlib.AbstractContextManager[Any]:
        """Start it."""
        return pair.engine(
            nodes=self.nodes,
            topk=self.topk,
            steps=self.steps,
            chain=self.chain,
            method=method,
            **ENGINE,
        )


ALONE = Arm("alone")
ARMS = {
    arm.name: arm
    for arm in (
        Arm("chain", nodes=4, topk=1, steps=4),
        Arm("tree of 7", nodes=7, topk=2, steps=4),
        Arm("tree of 15", nodes=15, topk=4, steps=4),
        Arm("stock's chain", chain=4),
        Arm("no window", nodes=7, topk=2, steps=4, window=False),
    )
}


@dataclass(frozen=True)
class Row:
    """One engine against the target alone.

    Attributes:
        sequences: answers compared.
        differ: indices of the greedy answers that are not equal, and of the seeded ones.
        length: tokens per step of a request with drafts, the bonus token included.
        chunks: steps that computed a part of a prompt but not its end.
        cached: prompt tokens found in the prefix cache.
        seconds: time that the answers took.
    """

    name: str
    sequences: int
    differ: tuple[list[int], list[int]]
    length: float
    chunks: int
    cached: int
    seconds: float


def prompts(
    found: Sequence[Conversation], tokenizer: Any, count: int, window: int = LONG
) -> list[str]:
    """Short questions, and a quarter of long prompts: at the front, and at the end again.

    A long prompt is `window` tokens or more of conversations with a question behind.
    """

    def template(each: Conversation, turns: int | None = None) -> str:
        shown = messages(each)[:turns]
        text: str = tokenizer.apply_chat_template(
            shown, tokenize=False, add_generation_prompt=turns == 1
        )
        return text

    short: list[str] = []
    rest: list[Conversation] = []
    for each in found:
        question = template(each, 1)
        if len(tokenizer(question, add_special_tokens=False)["input_ids"]) <= SHORT:
            short.append(question)
        else:
            rest.append(each)
    bos = tokenizer.bos_token or ""
    talks = iter(rest)
    long = []
    many = max(1, count // 8)
    for _ in range(many):
        text, length = bos, 0
        while length < window:
            more = text + template(next(talks)).removeprefix(bos)
            grown = len(tokenizer(more, add_special_tokens=False)["input_ids"])
            if grown <= window + LONGER:
                text, length = more, grown
        long.append(text)
    questions = [question.removeprefix(bos) for question in short]
    first = [text + questions[place] for place, text in enumerate(long)]
    last = [text + questions[many + place] for place, text in enumerate(long)]
    middle = short[2 * many : count]
    if len(middle) < count - 2 * many:
        raise ValueError(f"{len(short)} short questions are too few for {count} prompts")
    return first + middle + last


def requests(asked: Sequence[str], tokens: int) -> list[Request]:
    """Greedy and seeded requests in turns."""
    kinds = ({"temperature": 0}, {"temperature": TEMPERATURE})
    return [
        Request(prompt, {"max_tokens": tokens, **kinds[i % 2], **({"seed": i} if i % 2 else {})})
        for i, prompt in enumerate(asked)
    ]


def differing(
    asked: Sequence[Request], found: Sequence[Answer], expected: Sequence[Answer]
) -> tuple[list[int], list[int]]:
    """Indices of greedy and of seeded answers that are not equal."""
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    seeded = [i for i in wrong if asked[i].params["temperature"] > 0]
    return [i for i in wrong if i not in seeded], seeded


def first_difference(found: Answer, expected: Answer) -> tuple[int, int, int]:
    """Place of the first token that differs, and both tokens there (-1 behind an end)."""
    ours, theirs = found.tokens[0], expected.tokens[0]
    for place in range(max(len(ours), len(theirs))):
        pair = [each[place] if place < len(each) else -1 for each in (ours, theirs)]
        if pair[0] != pair[1]:
            return place, pair[0], pair[1]
    raise ValueError("the answers are equal")


@functools.cache
def _loaded(target: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(str(target))


def explain(target: Path, request: Request, found: Answer, expected: Answer) -> None:
    """Print where an answer differs first, and how far apart the target's logits are there."""
    import torch

    place, ours, theirs = first_difference(found, expected)
    if min(ours, theirs) < 0:
        print(f"{request.params}: token {place} is {ours}, alone {theirs}", flush=True)
        return
    model, tokenizer = _loaded(target)
    before = tokenizer(request.prompt)["input_ids"] + expected.tokens[0][:place]
    with torch.no_grad():
        logits = model(torch.tensor([before]), logits_to_keep=1).logits[0, -1]
    print(
        f"{request.params}: behind {len(before)} tokens comes {ours}, alone {theirs}; their logits "
        f"are {logits[ours]:.5f} and {logits[theirs]:.5f}, the best is {logits.max():.5f}",
        flush=True,
    )


@contextlib.contextmanager
def _windows(kept: bool) -> Iterator[None]:
    from vllm_graft.spec_decode.targets.dense import layer

    with contextlib.ExitStack() as patches:
        if not kept:
            patches.enter_context(mock.patch.object(layer, "window_of", return_value=0))
        yield


class WholeRows:
    """Stands for `_gumbel_sample_kernel`, whose grid is rows by blocks of the vocabulary."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        """The launch of a grid."""
        rows, blocks = grid

        def launch(*given: Any, BLOCK_SIZE: int, **named: Any) -> None:
            # The best of each block, of which only the first is written.
            given[2].fill_(-math.inf)
            size = 1 << (blocks * BLOCK_SIZE - 1).bit_length()
            self._kernel[rows, 1](*given, BLOCK_SIZE=size, **named)

        return launch


@contextlib.contextmanager
def whole_rows() -> Iterator[None]:
    """Sample, and find the tokens of a tree, with one program per row, where Triton is interpreted.

    A program costs the interpreter milliseconds, and little more if it is wide. A row of 262,144
    tokens takes 256 programs of vLLM's sampler and 64 of a tree's drafts.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    from vllm_graft.spec_decode.kernels import topk

    def block(vocab_size: int) -> tuple[int, int]:
        return 1 << (vocab_size - 1).bit_length(), 1

    kernel = WholeRows(gumbel._gumbel_sample_kernel)
    with (
        mock.patch.object(gumbel, "_gumbel_sample_kernel", kernel),
        mock.patch.object(topk, "topk_block", block),
    ):
        yield


def measure(
    arm: Arm, pair: Pair, method: str, asked: list[Request], expected: list[Answer] | None
) -> tuple[Row, list[Answer]]:
    """Answers of one engine, and how they compare; None compares with nothing."""
    from vllm_graft.testing import spec_metrics

    with (
        whole_rows(),
        _windows(arm.window),
        arm.engine(pair, method) as llm,
        scheduling(llm) as seen,
    ):
        began = time.perf_counter()
        found = answer_all(llm, asked)
        seconds = round(time.perf_counter() - began, 1)
        drafting = bool(arm.nodes or arm.chain)
        length = round(spec_metrics(llm).acceptance_length, 3) if drafting else 1.0
        cached = int(counter(llm, "vllm:prefix_cache_hits"))
        differ = differing(asked, found, expected or found)
        row = Row(arm.name, len(found), differ, length, seen.prompt_chunks, cached, seconds)
    return row, found


def table(rows: Sequence[Row]) -> str:
    """Lay rows out."""
    head = ["engine", "sequences", "greedy that differ", "seeded that differ", "tokens per step"]
    head += ["parts of prompts", "cached tokens", "seconds"]
    cells = [
        [
            row.name,
            str(row.sequences),
            *(str(len(each)) for each in row.differ),
            f"{row.length:.2f}",
            str(row.chunks),
            str(row.cached),
            f"{row.seconds:.0f}",
        ]
        for row in rows
    ]
    return markdown.table(head, cells)


def failures(rows: Sequence[Row]) -> list[str]:
    """What must not be: an answer of ours that differs, a control that does not, an idle part."""
    found = []
    for row in rows:
        arm = ARMS.get(row.name, ALONE)
        differ = sum(map(len, row.differ))
        if not arm.window:
            if not differ:
                found.append(f"{row.name}: all answers are equal, so the comparison shows nothing")
            continue
        if arm.nodes and differ:
            found.append(f"{row.name}: {differ} of {row.sequences} answers differ")
        for name, count in (("chunked prefill", row.chunks), ("prefix caching", row.cached)):
            if not count:
                found.append(f"{row.name}: no {name}")
    return found


def read_answers(file: Path) -> tuple[list[Request], list[Answer]] | None:
    """Requests and answers of an earlier run of the target alone, if there are any."""
    if not file.exists():
        return None
    stored = json.loads(file.read_text())
    asked = [Request(each["prompt"], each["params"]) for each in stored]
    return asked, [Answer(each["tokens"], each["texts"], each["reasons"], []) for each in stored]


def write_answers(file: Path, asked: Sequence[Request], found: Sequence[Answer]) -> None:
    """Store what `read_answers` reads."""
    stored = [
        {
            "prompt": request.prompt,
            "params": request.params,
            "tokens": answer.tokens,
            "texts": answer.texts,
            "reasons": answer.reasons,
        }
        for request, answer in zip(asked, found, strict=True)
    ]
    file.write_text(json.dumps(stored, indent=1) + "\n")


def run(
    work: Path,
    names: Sequence[str],
    count: int,
    tokens: int,
    file: str | None,
    only: Sequence[int] | None = None,
) -> int:
    """Run the engines named, one after the other; return the exit status.

    `only` has the numbers of the requests that they get; None for all.
    """
    from transformers import AutoTokenizer

    from benchmarks.real_pair import pretrained

    tokenizer = AutoTokenizer.from_pretrained(str(work / "target"))
    method = target_of(work).head
    asked = requests(
        prompts(pretrained.read_conversations(work, "held_out"), tokenizer, count), tokens
    )
    pair = Pair(str(work / "target"), str(work / method), [])
    known = read_answers(work / "alone.json")
    if known is None or known[0] != asked:
        row, expected = measure(ALONE, pair, method, asked, None)
        write_answers(work / "alone.json", asked, expected)
        rows = [row]
        print(table(rows), flush=True)
    else:
        expected, rows = known[1], []
    if only is not None:
        asked = [asked[i] for i in only]
        expected = [expected[i] for i in only]
    for name in names:
        row, found = measure(ARMS[name], pair, method, asked, expected)
        rows.append(row)
        print(table(rows[-1:]), flush=True)
        # Stock's chains draw other tokens for requests with a seed, so nothing is to be explained.
        wrong = sorted(itertools.chain(*row.differ)) if ARMS[name].nodes else row.differ[0]
        for i in wrong:
            explain(work / "target", asked[i], found[i], expected[i])
        if file is not None:
            Path(file).write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    print(f"\n{table(rows)}")
    bad = failures(rows)
    print("\n".join(bad))
    return int(bool(bad))
