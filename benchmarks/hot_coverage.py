"""Say what share of real answers a learned vocabulary of hot tokens holds, by simulation.

    python -m benchmarks.hot_coverage train.json qwen.tiktoken --sizes 16384 49152 --batch 1 16

Conversations are a JSON list in ShareGPT's form, as `python -m benchmarks.real_pair fetch` writes
them. Each answer is a request, whose prompt is all that was said before. The tokenizer is a folder
for transformers, or a file `*.tiktoken` of Qwen's (the package `dashscope` on PyPI has one).

`--batch` requests are in flight. Each emits `--accepted` tokens per step, and the next one begins
when one ends. The vocabulary is `HotVocabulary` itself, as an engine drives it
(`graft.tree.hot_tokens`), but without a head. Nothing is drafted: a token counts as held if the
list of the step that emits it has it.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.spec_decode.heads.hot_rows import PlainRows
from vllm_graft.spec_decode.heads.hot_vocabulary import COVERAGE, HotVocabulary

_PARTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""What Qwen's tokenizer splits a text into before it merges bytes: ends of English words, words
with a mark or a space before them, single digits, marks, ends of lines, and other space."""


class Request(NamedTuple):
    """Tokens of a prompt, and of the answer to it: i64, of one dimension each."""

    prompt: Tensor
    answer: Tensor


@dataclass
class Coverage:
    """What a vocabulary held of the answers.

    Attributes:
        size: tokens of the vocabulary.
        batch: requests in flight.
        steps: steps of all requests together.
        used: those in which the vocabulary was in use.
        emitted: tokens of all steps.
        held: those that the vocabulary held when they were emitted.
        emitted_used: tokens of the steps in which it was in use.
        held_used: those of them that it held.
    """

    size: int
    batch: int
    steps: int = 0
    used: int = 0
    emitted: int = 0
    held: int = 0
    emitted_used: int = 0
    held_used: int = 0

    def add(self, emitted: int, held: int, used: bool) -> None:
        """Count a step."""
        self.steps += 1
        self.emitted += emitted
        self.held += held
        if used:
            self.used += 1
            self.emitted_used += emitted
            self.held_used += held

    def row(self) -> list[str]:
        """Show it in a table of `HEADS`."""
        shares = [
            (self.held, self.emitted),
            (self.used, self.steps),
            (self.held_used, self.emitted_used),
        ]
        cells = [f"{part / whole:.2%}" if whole else "-" for part, whole in shares]
        return [f"{self.size:,}", str(self.batch), f"{self.emitted:,}", *cells]


HEADS = ("hot tokens", "in flight", "tokens", "held", "steps in use", "held while in use")


def simulate(
    requests: Iterable[Request],
    vocab_size: int,
    size: int,
    batch: int,
    accepted: int,
    least: float = COVERAGE,
) -> Coverage:
    """Let a vocabulary follow requests, until no request is left to begin where one ends.

    Args:
        requests: in the order in which they begin.
        vocab_size: tokens of the tokenizer.
        size: tokens of the vocabulary.
        batch: requests in flight.
        accepted: tokens that each emits per step; the last step has what is left.
        least: the share above which the vocabulary is used.

    Raises:
        BenchmarkError: if there are fewer requests than the batch.
    """
    vocabulary = _vocabulary(size, vocab_size)
    vocabulary.least = lambda nodes, num_reqs: least
    waiting, found = iter(requests), Coverage(size, batch)
    live = [_begin(waiting, vocabulary, accepted) for _ in range(batch)]
    if not all(live):
        raise report.BenchmarkError(
            f"--batch {batch}: there are {sum(map(bool, live))} requests: have more, or a smaller "
            "batch"
        )
    choices, listed = -1, torch.zeros(vocab_size, dtype=torch.bool)
    while all(live):
        if choices != vocabulary.choices:
            choices = vocabulary.choices
            listed.zero_()[vocabulary.target_ids] = True
        tokens = torch.cat([steps.pop() for steps in live])
        used = vocabulary.narrows(nodes=1, num_reqs=batch)
        found.add(len(tokens), int(listed[tokens].sum()), used)
        vocabulary.emitted.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))
        vocabulary.step()
        live = [steps or _begin(waiting, vocabulary, accepted) for steps in live]
    return found


def _vocabulary(size: int, vocab_size: int) -> HotVocabulary:
    """A vocabulary of a draft that has all tokens, whose head has one number for each."""
    rows = PlainRows(SimpleNamespace(weight=torch.zeros(vocab_size, 1), tp_size=1), size)
    return HotVocabulary(size, torch.arange(vocab_size), vocab_size, rows)


def _begin(waiting: Iterator[Request], vocabulary: HotVocabulary, accepted: int) -> list[Tensor]:
    """What the steps of the next request emit, the first step last; empty if no request is left."""
    request = next(waiting, None)
    if request is None:
        return []
    vocabulary.read(request.prompt)
    return list(request.answer.split(accepted))[::-1]


def read_requests(
    conversations: Iterable[dict[str, Any]], encode: Callable[[str], Sequence[int]]
) -> list[Request]:
    """Make a request of each answer that is not empty and has something before it."""
    found: list[Request] = []
    for conversation in conversations:
        said: list[int] = []
        for turn in conversation["conversations"]:
            tokens = list(encode(turn["value"]))
            if turn["from"] == "gpt" and said and tokens:
                found.append(Request(torch.tensor(said), torch.tensor(tokens)))
            said += tokens
    return found


def read_tokenizer(path: Path) -> tuple[Callable[[str], Sequence[int]], int]:
    """Return what makes tokens of a text, and the number of all tokens."""
    if path.suffix == ".tiktoken":
        import tiktoken

        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        encoding = tiktoken.Encoding(
            path.stem, pat_str="|".join(_PARTS), mergeable_ranks=ranks, special_tokens={}
        )
        return encoding.encode_ordinary, encoding.n_vocab
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False), len(tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("conversations", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16384, 32768, 49152])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--accepted", type=int, default=3, help="tokens per step and request")
    parser.add_argument(
        "--least", type=float, default=COVERAGE,
        help="the share above which the list is used; a server knows what it gains "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, help="the first ones alone (default: all)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    encode, vocab_size = read_tokenizer(arguments.tokenizer)
    if wrong := [size for size in arguments.sizes if not 0 < size < vocab_size]:
        parser.error(f"--sizes {wrong[0]}: the tokenizer has {vocab_size} tokens, say fewer")
    if min(*arguments.batch, arguments.accepted) < 1:
        parser.error("--batch and --accepted: say at least 1")
    requests = read_requests(json.loads(arguments.conversations.read_text()), encode)
    requests = requests[: arguments.requests]
    found = [
        simulate(requests, vocab_size, size, batch, arguments.accepted, arguments.least)
        for batch in arguments.batch
        for size in arguments.sizes
    ]
    print(markdown.table(HEADS, [each.row() for each in found]), flush=True)
    if arguments.json:
        report.write_json(arguments.json, [asdict(each) for each in found])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
