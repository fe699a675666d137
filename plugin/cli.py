"""The command ``vllm-graft``."""

import argparse
import importlib
import json
import os
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import GraftError
from vllm_graft.base.text_table import Table
from vllm_graft.base.values import reason_of
from vllm_graft.base.version import __version__
from vllm_graft.hooks.manager import COLLECTED, Offer, manager
from vllm_graft.scaffold.new_plugin import KINDS

ABOUT = (
    "A plugin of vLLM: trees of drafts, CUDA graphs of drafts and vision towers, and a host KV "
    "cache, switched on by flags of `vllm serve`. These commands say what runs and measure it."
)

APART = {
    "bench": "vllm_graft.bench",
    "learn": "vllm_graft.train.rounds",
    "plan": "vllm_graft.plan.command",
    "prove": "vllm_graft.proof.command",
    "train": "vllm_graft.train.command",
}
"""Commands that read their own flags, by the module that has their ``main``."""

NOT_ASKED = 3
"""Exit status of ``info`` where a server can't be asked, or has nothing of ours."""

UNREAD = 141
"""Exit status where nobody reads our output any more: a shell's for a program that SIGPIPE ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its status; 1: something is to mend, 3: vLLM was not tested."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except RuntimeError as error:
        from vllm_graft.doctor import CURE, is_cured

        if not is_cured(error):
            raise
        sys.exit(f"vLLM can't be imported: {reason_of(error)}. {CURE}")
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        # At its exit, Python would complain of what could not be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _run(given: Sequence[str]) -> int:
    if given and given[0] in APART:
        # Benchmarks stand above us: they are loaded when they are asked for, by name.
        run: Callable[[Sequence[str]], int] = importlib.import_module(APART[given[0]]).main
        return run(given[1:])
    parser = make_parser()
    if not given:
        parser.print_help()
        return 2
    arguments = parser.parse_args(given)
    return int(arguments.command(arguments))


def _nobody_reads() -> bool:
    """Whether the other end of standard output, a pipe, is closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands but those of `APART`, which it only lists."""
    parser = argparse.ArgumentParser(prog="vllm-graft", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"vllm-graft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, text: str, command: Callable[[argparse.Namespace], int] | None = None
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if command is not None:
            sub.add_argument("--json", action="store_true", help="print JSON")
            sub.set_defaults(command=command)
        return sub

    # In the order in which somebody needs them; lists come last.
    checks = "check versions, device, seams and plugins; status 1: a problem, 3: vLLM not tested"
    doctor = add("doctor", checks, _doctor)
    told = "compare a wheel of vLLM that is not installed, or its unpacked folder, instead"
    doctor.add_argument("--wheel", type=Path, metavar="FILE", help=told)
    told = "say what `vllm serve` would run with its flags; status 1: refused, 3: nothing of ours"
    add("plan", told)
    told = "show that the parts of such flags work with this vLLM and this device; status 1: not"
    add("prove", told)
    told = "train a draft head for a model that has none, from texts that it answers"
    add("train", told)
    add("learn", "go on training a server's head from what it records, and publish what is better")
    told = "ask a running server which parts are on; status 1: one is not as asked, 3: no answer"
    info = add("info", told, _info)
    told = "address of the server (default: %(default)s)"
    info.add_argument("--url", default="http://127.0.0.1:8000", help=told)
    add("bench", "measure; see vllm-graft bench --help")
    told = "write a plugin of your own: package, hook, tests, readme"
    _of_new_plugin(add("new-plugin", told, _new_plugin))
    told = "list what is supported with what, and what each part can't be combined with"
    for listing in (
        add("support", told, _support),
        add("hooks", "list every hook, its entries and who provides them", _hooks),
        add("metrics", "list every metric in /metrics", _metrics),
    ):
        listing.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    return parser


def _of_new_plugin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the distribution, as graft-wide")
    told = "what the plugin adds (default: %(default)s)"
    parser.add_argument("--kind", choices=[*KINDS], default=next(iter(KINDS)), help=told)
    told = "folder in which its folder is made (default: the current one)"
    parser.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help=told)


def _tell(
    arguments: argparse.Namespace, programs: Callable[[], Any], people: Callable[[], str]
) -> int:
    print(json.dumps(programs()) if arguments.json else people())
    return 0


def _list(
    arguments: argparse.Namespace, programs: Callable[[], Any], tables: Iterable[Table]
) -> int:
    form = Table.markdown if arguments.markdown else Table.text
    return _tell(arguments, programs, lambda: "\n\n".join(map(form, tables)))


def _doctor(arguments: argparse.Namespace) -> int:
    from vllm_graft import doctor

    if arguments.wheel is None:
        findings = doctor.diagnose(manager())
    else:
        try:
            findings = doctor.diagnose_wheel(arguments.wheel)
        except GraftError as error:
            sys.exit(f"--wheel {str(arguments.wheel)!r}: {error}")
    _tell(arguments, lambda: doctor.as_dict(findings), lambda: doctor.render(findings))
    return doctor.exit_status(findings)


def _hooks(arguments: argparse.Namespace) -> int:
    offers = {hook: [_row(offer) for offer in manager().offers(hook)] for hook in COLLECTED}
    heads = ("name", "provider", "summary")
    tables = (
        Table(hook, heads, [[row[head] for head in heads] for row in rows])
        for hook, rows in offers.items()
    )
    return _list(arguments, lambda: offers, tables)


def _row(offer: Offer) -> dict[str, str]:
    entry = offer.entry
    return {"name": entry.name, "provider": str(offer.provider), "summary": entry.summary}


def _support(arguments: argparse.Namespace) -> int:
    from vllm_graft import support_matrix
    from vllm_graft.parts import PARTS

    tables = support_matrix.page(manager(), PARTS)
    return _list(arguments, lambda: support_matrix.as_dict(manager(), PARTS), tables)


def _new_plugin(arguments: argparse.Namespace) -> int:
    from vllm_graft.scaffold.new_plugin import write

    try:
        folder = write(arguments.name, arguments.kind, arguments.into)
    except GraftError as error:
        sys.exit(str(error))
    made = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    told = [*(str(folder / file) for file in made), ""]
    told.append(f"now: cd {folder} && pip install -e '.[test]' && pytest")
    return _tell(arguments, lambda: {"folder": str(folder), "files": made}, lambda: "\n".join(told))


def _info(arguments: argparse.Namespace) -> int:
    from vllm_graft.metrics import server_info

    try:
        found = server_info.ask(arguments.url)
    except GraftError as error:
        print(error, file=sys.stderr)
        return NOT_ASKED
    _tell(arguments, lambda: server_info.as_dict(found), lambda: server_info.render(found))
    return 0 if found.is_well else 1


def _metrics(arguments: argparse.Namespace) -> int:
    from vllm_graft.metrics.catalogue import catalogue, tables
    from vllm_graft.parts import PARTS

    found = catalogue(PARTS)
    rows = [
        {
            "name": row.name,
            "kind": row.kind.value,
            "labels": row.labels,
            "values": row.values,
            "origin": row.origin.value,
            "help": row.help,
        }
        for rows in found.values()
        for row in rows
    ]
    return _list(arguments, lambda: rows, tables(found))
