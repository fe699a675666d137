"""`make demo`: the tree beside stock vLLM's chain, over the OpenAI API of a real `vllm serve`.

Three servers run on the small trained pair of `tests/pair`: with vllm-graft's tree, with stock
vLLM's chain, and without speculation. Each gets the same requests, one server after the other. On a
GPU, where a start takes most of the time, all three start at once. The table at the end says how
many tokens a verification step emitted, and whether the answers equal those of the server that does
not speculate. All compute in float32, in which kernels that round differently agree on the tokens.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from openai import DefaultHttpxClient, OpenAI, OpenAIError

from tests.support.engines.pair_server import MODEL, server_settings, settled_counters, speculate
from tests.support.engines.shipped_pair import SHIPPED as PAIR
from tests.support.engines.vllm_server import VLLM, ServerError, SpecDecodeCounters, VllmServer

COMMAND = VLLM
PROMPTS = 4
MAX_TOKENS = 32
STREAMED_TOKENS = 48


@dataclass(frozen=True)
class Arm:
    """One server of the comparison: its name in the table, and its flags."""

    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Answers:
    """The answers of one arm: token ids of each request, and the counters of each group."""

    greedy: list[list[int]]
    sampled: list[list[int]]
    greedy_counters: SpecDecodeCounters
    sampled_counters: SpecDecodeCounters


TREE = Arm(
    "tree of 15",
    (
        *speculate(PAIR, 15),
        "--additional-config.graft.tree.topk",
        "4",
        "--additional-config.graft.tree.steps",
        "5",
    ),
)
CHAIN = Arm("chain of 5", speculate(PAIR, 5))
PLAIN = Arm("no speculation", ())


def complete(client: OpenAI, prompt: str, temperature: float) -> list[int]:
    """Return the token ids of one completion."""
    answer = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=temperature,
        seed=1234,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    ids: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return ids


def stream(client: OpenAI, prompt: str) -> list[int]:
    """Print a greedy completion as it arrives; return its token ids."""
    print(f"--- prompt ---\n{prompt}\n--- answer ---", flush=True)
    ids: list[int] = []
    for chunk in client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=STREAMED_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    ):
        print(chunk.choices[0].text, end="", flush=True)
        ids += chunk.choices[0].token_ids or []  # type: ignore[attr-defined]
    print("\n--- end ---", flush=True)
    return ids


def ask(server: VllmServer, prompts: Sequence[str]) -> Answers:
    """Send the requests of one arm: one streamed, then the rest side by side."""
    # A proxy of the environment must not see the loopback interface.
    http = DefaultHttpxClient(trust_env=False)
    with (
        OpenAI(
            base_url=f"{server.address}/v1", api_key="none", max_retries=0, http_client=http
        ) as client,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):

        def group(temperature: float) -> list[list[int]]:
            return list(pool.map(lambda prompt: complete(client, prompt, temperature), prompts))

        greedy = [stream(client, prompts[0]), *group(0.0)]
        at_greedy = settled_counters(server)
        sampled = group(1.0)
        at_sampled = settled_counters(server)
    return Answers(greedy, sampled, at_greedy, at_sampled - at_greedy)


def start(arm: Arm, folder: Path, cuda: bool) -> VllmServer:
    """Return the server of an arm. It starts when it is entered."""
    flags, environment = server_settings(PAIR, cuda)
    log = folder / f"{arm.name.replace(' ', '-')}.log"
    return VllmServer([*flags, *arm.flags], log, environment, COMMAND, report=say)


def answers_of(arm: Arm, server: VllmServer, prompts: Sequence[str]) -> Answers:
    """Wait for a server, send it the requests, and stop it."""
    say(f"\n== {arm.name} ==")
    with server:
        server.wait_ready()
        try:
            answers = ask(server, prompts)
        except (OpenAIError, OSError) as error:
            raise server.failure(f"a request failed ({error!r})") from error
        say("stopping the server")
    return answers


def run_arms(
    arms: Sequence[Arm], prompts: Sequence[str], folder: Path, *, cuda: bool
) -> dict[str, Answers]:
    """Return the answers of each arm; its name is the key."""
    servers = {arm: start(arm, folder, cuda) for arm in arms}
    with ExitStack() as running:
        if cuda:
            for server in servers.values():
                running.enter_context(server)
        return {arm.name: answers_of(arm, server, prompts) for arm, server in servers.items()}


def say(line: str) -> None:
    print(line, flush=True)


def table(answers: dict[str, Answers], reference: Answers) -> str:
    """Lay out acceptance lengths and equality with the reference, one line per arm."""
    rows = [("", "tokens per step, greedy", "at temperature 1", "greedy equal", "seeded equal")]
    for name, arm in answers.items():
        lengths = (arm.greedy_counters.acceptance_length, arm.sampled_counters.acceptance_length)
        greedy, sampled = (f"{x:.2f}" if x else "1" for x in lengths)
        equal = (same(arm.greedy, reference.greedy), same(arm.sampled, reference.sampled))
        rows.append((name, greedy, sampled, *equal))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)) for row in rows)


def same(ours: list[list[int]], theirs: list[list[int]]) -> str:
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return "yes" if equal == len(theirs) else f"{equal} of {len(theirs)}"


def exact(tree: Answers, reference: Answers) -> bool:
    """Return whether the tree's answers, greedy and seeded, are all those of the target alone."""
    return tree.greedy == reference.greedy and tree.sampled == reference.sampled


def on_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def main() -> int:
    # An exception unwinds through the servers' context managers, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    prompts = json.loads((PAIR / "prompts.json").read_text())[:PROMPTS]
    folder = Path(tempfile.mkdtemp(prefix="vllm-graft-demo-"))
    cuda = on_cuda()
    say("GPU; all servers start at once" if cuda else "CPU; about a minute per server")
    say(f"server logs: {folder}")
    try:
        answers = run_arms((TREE, CHAIN, PLAIN), prompts, folder, cuda=cuda)
    except ServerError as error:
        say(f"\nFAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted; the server is stopped")
        return 128 + signal.SIGINT
    tree, reference = answers[TREE.name], answers[PLAIN.name]
    say("\n" + table(answers, reference))
    say(f"\n'equal': the same tokens as with {PLAIN.name}. Stock's chain keeps the distribution of")
    say("seeded samples, not the samples; the tree keeps both.")
    if exact(tree, reference):
        return 0
    say("FAILED: the tree's answers differ")
    return 1


if __name__ == "__main__":
    sys.exit(main())
