"""The command line of ``vllm-graft plan``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

HELP = """usage: vllm-graft plan MODEL [--json] [flags of vllm serve]

Say what `vllm serve` would run with these flags on this machine: which parts are on and why not,
what drafts, the memory by part, and the command. Configuration files are read, and no weights.
Without a part of ours among the flags, `--additional-config.graft auto` is planned.

  --json                print JSON

Exit status: 0 if parts of ours run, 1 if the server would not start, 2 if vLLM doesn't know a flag,
3 if it would start and nothing of ours would run."""

_QUIET = {
    # vLLM's log would stand between the lines of the plan.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(HELP)
        return 0 if arguments else 2
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    # vLLM is imported from here on, when the environment is set.
    from vllm.platforms import current_platform

    from vllm_graft.plan.plan_report import as_dict, render
    from vllm_graft.plan.planning import make_plan
    from vllm_graft.plan.request import Request

    if current_platform.is_unspecified():
        sys.exit("vLLM finds no device on this machine: plan on the machine that will serve.")
    flags = [each for each in arguments if each != "--json"]
    device = f"this machine ({current_platform.device_type})"
    plan = make_plan(Request.parse(flags), device)
    print(json.dumps(as_dict(plan)) if "--json" in arguments else render(plan))
    return plan.verdict.value
