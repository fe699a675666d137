"""Replicas of a model on one machine, any of which gets a turn: shared host memory and private.

    python -m benchmarks.replicas MODEL --replicas 3 --host-gib 48 --load-format dummy

Turns of sessions come at random times, `--rate` a second, and go to any replica, as a router sends
them that knows of no caches. Each replica has `--gpu-tokens` of K/V on the device, and all together
have `--host-gib` of host memory: one region, or as many equal parts as there are replicas. Answers
are not what sessions go on with, but random tokens, so that all pools get the same prompts at the
same times.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_graft.bench.common import arm_processes
from vllm_graft.bench.common.arm import percentile
from vllm_graft.bench.hicache.cache_parts import Sizes, add_sizes, read_sizes
from vllm_graft.bench.hicache.prompt_driver import Answer, Driver, random_prompt
from vllm_graft.bench.hicache.sessions import length_between

if TYPE_CHECKING:
    from vllm_graft.bench.common.serve_flags import Serving

OTHERS = "vllm:graft_hicache_hit_pages_of_others"
PAUSE = 5.0
"""Least seconds between two turns of a session."""


@dataclass(frozen=True)
class Turn:
    """A prompt that comes `at` so many seconds."""

    at: float
    prompt: list[int]


def turns_of(sizes: Sizes, replicas: int) -> list[list[Turn]]:
    """The turns that each replica gets."""
    draw, found = random.Random(0), [list[Turn]() for _ in range(replicas)]
    lengths = (f"first-{session}" for session in range(sizes.sessions))
    texts = [
        random_prompt(seed, length_between(sizes.history, sizes.history_max, seed), sizes.vocab)
        for seed in lengths
    ]
    asked, since = [0] * sizes.sessions, [-PAUSE] * sizes.sessions
    now = draw.expovariate(sizes.rate)
    while now < sizes.session_seconds:
        idle = [
            session
            for session in range(sizes.sessions)
            if asked[session] < sizes.turns and now - since[session] > PAUSE
        ]
        if idle:
            session = draw.choice(idle)
            draw.choice(found).append(Turn(now, texts[session]))
            asked[session] += 1
            since[session] = now
            more = sizes.reply + sizes.turn_tokens
            texts[session] = texts[session] + random_prompt(f"{session} {now}", more, sizes.vocab)
        now += draw.expovariate(sizes.rate)
    return found


class Replica:
    """An engine that answers its turns, from a time of all replicas' clock on."""

    def __init__(self, llm: Any, sizes: Sizes) -> None:
        self._llm, self._driver, self._reply = llm, Driver(llm), sizes.reply
        self._driver.run([random_prompt("warm", sizes.suffix, sizes.vocab)], 4)

    def __call__(self, wish: tuple[float, list[Turn]]) -> dict[str, Any]:
        begin, turns = wish[0], deque(wish[1])
        driver, answers = self._driver, list[Answer]()
        while turns or driver.busy:
            while turns and begin + turns[0].at <= driver.now():
                turn = turns.popleft()
                driver.submit(turn.prompt, self._reply, begin + turn.at)
            if driver.busy:
                answers += driver.step().values()
            else:
                driver.rest()
        metrics = {each.name: getattr(each, "value", 0) for each in self._llm.get_metrics()}
        return {
            "firsts": [1e3 * each.ttft for each in answers],
            "cached": sum(each.cached for each in answers),
            "tokens": sum(len(each.prompt) for each in answers),
            "errors": sum(each.reason != "length" for each in answers),
            "pages_of_others": metrics.get(OTHERS, 0),
        }


def measure(pool: str, replicas: int, sizes: Sizes, given: Serving) -> dict[str, Any]:
    """Let replicas with a kind of host memory answer all turns."""
    from vllm_graft.bench.hicache.command import read_arm

    size = int(sizes.host_gib * 2**30)
    extra = {
        "shared": {"shared": True, "host_bytes": size},
        "private": {"host_bytes": size // replicas},
    }
    name = f"ours:{json.dumps(extra[pool])}" if pool in extra else pool
    arms = [read_arm(name, sizes, given) for _ in range(replicas)]
    pipes = arm_processes.start(arms, given.model, partial(Replica, sizes=sizes))
    begin = time.perf_counter() + 1
    for turns, pipe in zip(turns_of(sizes, replicas), pipes.values(), strict=True):
        pipe.send((begin, turns))
    found = [arm_processes.answer(arm, pipe) for arm, pipe in pipes.items()]
    arm_processes.stop(pipes)
    firsts = [first for each in found for first in each.pop("firsts")]
    total = {name: sum(each[name] for each in found) for name in found[0]}
    return {
        "pool": pool,
        "first_token_ms": percentile(firsts, 0.5),
        "first_token_p99_ms": percentile(firsts, 0.99),
        "hit_rate": total["cached"] / total["tokens"],
        "turns": len(firsts),
        **total,
    }


def main(words: list[str] | None = None) -> None:
    """Print a line of JSON for each kind of host memory."""
    # Replicas import this module before their engine prepares for vLLM.
    from vllm_graft.bench.common.serve_flags import Serving

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--pools", nargs="+", default=["private", "shared", "private", "shared"])
    add_sizes(parser)
    arguments, flags = parser.parse_known_args(words)
    sizes, given = read_sizes(arguments), Serving.read(flags)
    for pool in arguments.pools:
        found = measure(pool, arguments.replicas, sizes, given)
        print(json.dumps({key: round(value, 3) if isinstance(value, float) else value
                          for key, value in found.items()}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
