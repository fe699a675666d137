"""The command line of ``vllm-graft prove``."""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import GraftError
from vllm_graft.base.values import reason_of
from vllm_graft.plan.command import begin

HELP = """usage: vllm-graft prove MODEL [--json] [flags of vllm serve]

Show that the parts that these flags ask for work with the vLLM and the device of this machine. A
tiny model of the same family, with random weights, answers with these parts and without: greedy
and seeded requests, in chunks, on shared prefixes, preempted, from the host cache if there is one,
and about images if there are vision graphs. Answers have to be the same. MODEL's config.json is
read, for images its processor, too, and no weights.

The result is kept in ~/.cache/vllm-graft/proofs, or below XDG_CACHE_HOME, where a start with a
vLLM that was never tested looks for it. It stands for these flags, variables that choose kernels,
this device, and the versions of vLLM and vllm-graft, and as long as vLLM's symbols look as they
did.

  --json                print the proof as JSON

Exit status: 0 if the answers are the same, 1 if not, 2 if vLLM doesn't know a flag, 3 if nothing of
ours would run."""

_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
NOTHING = 3
MOST = 12
"""Differences that are printed; all are kept."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    if (status := begin(arguments, HELP, _QUIET)) is not None:
        return status
    given = [each for each in arguments if each != "--json"]
    try:
        proof = prove(given)
    except GraftError as error:
        sys.exit(str(error))
    if proof is None:
        print(
            "Nothing that a proof can show would run with these flags: `vllm-graft plan` says what "
            "would. Host caches of recurrent states have no proof."
        )
        return NOTHING
    as_json = len(given) < len(arguments)
    print(json.dumps(asdict(proof)) if as_json else render(proof))
    try:
        kept = proof.keep()
    except OSError as error:
        sys.exit(f"No start finds this proof, as it can't be kept: {reason_of(error)}")
    if not as_json:
        print(f"kept: {kept}")
    return 0 if proof.passed else 1


def prove(arguments: Sequence[str]) -> Any:
    """Run both engines; returns a `vllm_graft.seams.proofs.Proof` that is not kept yet, or None if
    the flags turn nothing of ours on. Raises `GraftError` if the flags are refused."""
    from vllm_graft.proof import engine_process, verdict
    from vllm_graft.proof.arms import make_arms
    from vllm_graft.proof.questions import rounds
    from vllm_graft.seams.proofs import Machine, Proof, command_of

    began = time.monotonic()
    # They import vLLM while the flags are read.
    with engine_process.both() as processes:
        engine, vllm_config, parts, flags = _read(arguments)
        if not parts:
            return None
        with tempfile.TemporaryDirectory(prefix="vllm-graft-proof-") as folder:
            arms = make_arms(engine, vllm_config, parts, Path(folder))
            asked = list(rounds(cache="hicache" in parts, look=arms.look))
            for process, options in zip(processes, (arms.alone, arms.asked)):
                process.ask(arms.target, options, asked)
            alone, ours = (process.finish() for process in processes)
    if alone.error:
        raise GraftError(f"The tiny model does not run without our parts: {alone.error}")
    if ours.counts.get("vllm:graft_vit_graphs/bucket"):
        # Towers without grids, and users who leave buckets out, have none.
        arms.wanted["vllm:graft_vit_replays/bucket"] = "replays of padded vision graphs"
    wrong = [f"the engine with our parts fails: {ours.error}"] if ours.error else []
    if not wrong:
        wrong += verdict.differences(asked, ours.answers, alone.answers, arms.dtype)
        wrong += verdict.broken(ours.counts)
        wrong += verdict.undone(ours.counts, arms.wanted)
    shown = {what: ours.counts.get(name, 0.0) for name, what in arms.wanted.items()}
    shown["seconds until the engine with our parts ran"] = round(ours.starting, 1)
    seconds = round(time.monotonic() - began, 1)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Proof(
        Machine.here(), flags, sorted(parts), ours.rows, wrong, shown, command_of(arguments), now,
        seconds,
    )  # fmt: skip


def _read(arguments: Sequence[str]) -> tuple[Any, Any, set[str], dict[str, Any]]:
    """vLLM's ``EngineArgs`` and configuration, our parts that can be proven, what binds a proof."""
    from vllm_graft.activation import asked_for
    from vllm_graft.plan.request import Request, inspecting
    from vllm_graft.seams.permission import proving

    for preset in (False, True):
        # A server gets no preset that nobody named. Flags without a part of ours ask what one does.
        with proving() as seen, inspecting():
            request = Request.parse(arguments, preset=preset)
            vllm_config = request.create()
        if parts := {part.name for part, _ in asked_for(vllm_config)}:
            break
    if vllm_config.model_config.is_hybrid:
        parts -= {"hicache"}
    return request.engine, vllm_config, parts, seen.flags


def render(proof: Any) -> str:
    """The report for people."""
    machine = proof.machine
    versions = f"vLLM {machine.vllm}, vllm-graft {machine.graft}"
    lines = [
        f"{versions}, {machine.device} {machine.driver}".strip(),
        f"parts: {', '.join(proof.parts)}",
        *(f"{count:g} {what}" for what, count in proof.shown.items()),
        *(f"differs from tested versions: vllm.{path}" for path in sorted(proof.rows)),
        *(f"WRONG: {each}" for each in proof.differences[:MOST]),
    ]
    if (more := len(proof.differences) - MOST) > 0:
        lines.append(f"and {more} differences more")
    said = "passed: answers are those without our parts" if proof.passed else "FAILED"
    return "\n".join([*lines, f"{said} ({proof.seconds:g} s)"])
