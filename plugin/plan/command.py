"""The command line of ``vllm-graft plan``."""

import json
import os
import sys
from collections.abc import Mapping, Sequence

from vllm_graft.base.errors import GraftError
from vllm_graft.plan.gpu import NAMED, OPTION, Gpu, pretend

HELP = f"""usage: vllm-graft plan MODEL [--json] [{OPTION} GPU] [flags of vllm serve]

Say what `vllm serve` would run with these flags: which parts are on and why not, what drafts, the
memory by part, and the command. Configuration files are read, and neither weights nor a GPU.
Without a part of ours among the flags, `--additional-config.graft auto` is planned.

  --json                print JSON
  {OPTION} H100            plan for this GPU instead of this machine's device: a name, or compute
                        capability and memory, as 9.0:80GiB. Known names:
                        {", ".join(NAMED)}

Exit status: 0 if parts of ours run, 1 if the server would not start, 2 if vLLM doesn't know a flag,
3 if it would start and nothing of ours would run."""

_QUIET = {
    # vLLM's log would stand between the lines of the plan.
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TRANSFORMERS_VERBOSITY": "error",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    if (status := begin(arguments, HELP, _QUIET)) is not None:
        return status
    try:
        gpu, rest = _gpu_of([each for each in arguments if each != "--json"])
        model = rest[0] if rest and not rest[0].startswith("-") else "the model"
        what = f"Reading the configuration of {model} for {gpu or 'this machine'}, with vLLM,"
        print(f"{what} whose import takes some time.", file=sys.stderr, flush=True)
        if gpu is not None:
            pretend(gpu)
    except GraftError as error:
        sys.exit(str(error))
    return _planned(rest, gpu, model, as_json="--json" in arguments)


def begin(arguments: Sequence[str], text: str, quiet: Mapping[str, str]) -> int | None:
    """Print a command's help if it is asked for, or nothing is; else set variables of logs that the
    user left open. Returns the exit status of help; None if the command has work to do."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(text)
        return 0 if arguments else 2
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    return None


def _gpu_of(arguments: list[str]) -> tuple[Gpu | None, list[str]]:
    for place, each in enumerate(arguments):
        name, given, value = each.partition("=")
        if name == OPTION:
            taken = 1 if given else 2
            text = value if given else "".join(arguments[place + 1 : place + 2])
            return Gpu.parse(text), arguments[:place] + arguments[place + taken :]
    return None, arguments


def _planned(arguments: list[str], gpu: Gpu | None, model: str, *, as_json: bool) -> int:
    # vLLM is imported from here on, when the environment and the platform are set.
    from vllm.platforms import current_platform

    from vllm_graft.plan.planning import as_dict, make_plan, refused, render
    from vllm_graft.plan.request import Request, inspecting

    if current_platform.is_unspecified():
        sys.exit(
            f"vLLM finds no device on this machine: say what to plan for, as {OPTION} 9.0:80GiB."
        )
    device = str(gpu) if gpu is not None else f"this machine ({current_platform.device_type})"
    with inspecting():
        try:
            plan = make_plan(Request.parse(arguments), device)
        except Exception as error:  # vLLM's parser asks the Hub for some models.
            plan = refused(error, device, model)
    print(json.dumps(as_dict(plan)) if as_json else render(plan))
    return plan.verdict.value
