"""Count sequences that a draft tree changes: none may differ, on a CPU in float32.

The pair's target answers prompts greedily and with seeds at temperature 1, alone and then with
trees, at several concurrency levels. Each engine with a tree has chunked prefill, prefix caching,
async scheduling, and so few blocks that it must preempt requests (with a single one there is
nothing to preempt). The exit code is 1 if a sequence differs, or if one of these never happened.

    python -m benchmarks.equality tests/pair --prompts 64
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.engines.pairs import (
    Answer,
    Pair,
    Request,
    answer_all,
    counter,
    differing,
    scheduling,
)
from tests.support.engines.shipped_pair import SHIPPED

CONCURRENCY = (1, 2, 4, 8)
# The topk and steps of a tree, by its number of nodes.
TREES = {15: (4, 4), 31: (8, 6)}
BLOCK = 32
MAX_MODEL_LEN = 256


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine with a tree against the target alone.

    Attributes:
        nodes: nodes of the tree.
        concurrency: requests that run side by side at most.
        sequences: answers compared.
        differ: indices of the answers that are not equal.
        acceptance_length: tokens emitted per verification step.
        prompt_chunks: steps that computed a part of a prompt but not its end.
        chunks_beside_drafts: how many of these steps verified drafts of another request.
        preempted: requests preempted.
        cached_tokens: prompt tokens found in the prefix cache.
        seconds: time that the answers took.
    """

    nodes: int
    concurrency: int
    sequences: int
    differ: list[int]
    acceptance_length: float
    prompt_chunks: int
    chunks_beside_drafts: int
    preempted: int
    cached_tokens: int
    seconds: float

    def missing(self) -> list[str]:
        """Name what the engine was expected to do and did not."""
        wanted = {"chunked prefill": self.prompt_chunks, "prefix caching": self.cached_tokens}
        if self.concurrency > 1:
            wanted["chunks beside drafts"] = self.chunks_beside_drafts
            wanted["preemption"] = self.preempted
        return [name for name, count in wanted.items() if not count]


def requests(prompts: list[str], max_tokens: int) -> list[Request]:
    """Make a greedy and a seeded request of each prompt, side by side: they share a prefix."""
    return [
        Request(prompt, {"max_tokens": max_tokens, **kind})
        for i, prompt in enumerate(prompts)
        for kind in ({"temperature": 0}, {"temperature": 1.0, "seed": 1000 + i})
    ]


def crowded(concurrency: int, nodes: int) -> dict[str, Any]:
    """Return engine options that force chunks, and preemption where there are several requests."""
    whole = MAX_MODEL_LEN // BLOCK
    return {
        "max_num_seqs": concurrency,
        # A step has room for a decode of every request and half a prompt.
        "max_num_batched_tokens": concurrency * (nodes + 1) + 48,
        # The cache has half the blocks that the requests may need.
        "num_gpu_blocks_override": max(whole, concurrency * 3) + 1,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        "async_scheduling": True,
    }


def measure(
    pair: Pair, asked: list[Request], expected: list[Answer], nodes: int, concurrency: int
) -> Row:
    from vllm_graft.testing import spec_metrics

    topk, steps = TREES[nodes]
    options = crowded(concurrency, nodes)
    with (
        pair.engine(nodes=nodes, topk=topk, steps=steps, **options) as llm,
        scheduling(llm) as seen,
    ):
        begin = time.monotonic()
        found = answer_all(llm, asked)
        return Row(
            nodes=nodes,
            concurrency=concurrency,
            sequences=len(found),
            differ=differing(found, expected),
            acceptance_length=round(spec_metrics(llm).acceptance_length, 3),
            prompt_chunks=seen.prompt_chunks,
            chunks_beside_drafts=seen.chunks_beside_drafts,
            preempted=seen.preempted,
            cached_tokens=int(counter(llm, "vllm:prefix_cache_hits")),
            seconds=round(time.monotonic() - begin, 1),
        )


def table(rows: list[Row]) -> str:
    """Lay the rows out, one line per engine."""
    head = ["nodes", "concurrency", "sequences", "differ", "acceptance", "chunks", "beside drafts"]
    head += ["preempted", "cached tokens", "seconds"]
    cells = [
        [str(len(v)) if isinstance(v, list) else str(v) for v in dataclasses.astuple(row)]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in [head, *cells]
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pair", nargs="?", type=Path, default=SHIPPED, help="folder of the pair")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--characters", type=int, default=400, help="cut prompts to so many")
    parser.add_argument("--tokens", type=int, default=24, help="tokens an answer")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--nodes", type=int, nargs="+", default=tuple(TREES), choices=TREES)
    parser.add_argument("--json", type=Path, help="file that takes the rows")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    pair = Pair.load(options.pair)
    prompts = [prompt[: options.characters] for prompt in pair.prompts[: options.prompts]]
    asked = requests(prompts, options.tokens)
    if len(asked) < 2 * options.prompts:
        print(f"{options.pair} has {len(pair.prompts)} prompts, not {options.prompts}")
        return 2
    print(f"{len(asked)} sequences of {options.tokens} tokens; the target alone", flush=True)
    with pair.engine(max_model_len=MAX_MODEL_LEN) as llm:
        expected = answer_all(llm, asked)
    rows: list[Row] = []
    for nodes in options.nodes:
        for concurrency in options.concurrency:
            rows.append(measure(pair, asked, expected, nodes, concurrency))
            print(table(rows[-1:]), flush=True)
            if options.json is not None:
                options.json.write_text(
                    json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n"
                )
    print("\n" + table(rows))
    missing = [
        f"tree of {row.nodes}, concurrency {row.concurrency}: no {name}"
        for row in rows
        for name in row.missing()
    ]
    differ = sum(len(row.differ) for row in rows)
    print(f"\n{differ} of {sum(row.sequences for row in rows)} sequences differ")
    print("\n".join(missing))
    return int(bool(differ or missing))


if __name__ == "__main__":
    # This has to come before anything imports Triton or vLLM.
    from vllm_graft.testing.interpreter import install as interpreter

    interpreter.install()
    sys.exit(main(sys.argv[1:]))
