"""The command ``vllm-graft``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import GraftError
from vllm_graft.base.refusal import as_table
from vllm_graft.base.version import __version__
from vllm_graft.hooks.manager import COLLECTED, Offer, manager
from vllm_graft.scaffold.new_plugin import KINDS

APART = {"bench": "vllm_graft.bench", "plan": "vllm_graft.plan.command"}
"""Commands that read their own flags, by the module that has their ``main``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its status; 1: something is to mend, 3: vLLM was not tested."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in APART:
        # Benchmarks stand above us: they are loaded when they are asked for, by name.
        run: Callable[[Sequence[str]], int] = importlib.import_module(APART[given[0]]).main
        return run(given[1:])
    arguments = make_parser().parse_args(given)
    return int(arguments.command(arguments))


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands but those of `APART`, which it only lists."""
    parser = argparse.ArgumentParser(prog="vllm-graft", description="Look at vllm-graft.")
    parser.add_argument("--version", action="version", version=f"vllm-graft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    checks = "check versions, device, seams and plugins; status 1: a problem, 3: vLLM not tested"
    for name, command, text in (
        ("doctor", _doctor, checks),
        ("hooks", _hooks, "list every hook, its entries and who provides them"),
        ("support", _support, "list what is supported with what, as the support matrix"),
        ("refused", _refused, "list what each part can't be combined with"),
        ("info", _info, "ask a running server which parts are on; status 1: one is not as asked"),
        ("metrics", _metrics, "list every metric in /metrics"),
        ("new-plugin", _new_plugin, "write a plugin of your own: package, hook, tests, readme"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(command=command)
        if command is _doctor:
            told = "compare a wheel of vLLM that is not installed, or its unpacked folder, instead"
            sub.add_argument("--wheel", type=Path, metavar="FILE", help=told)
        if command is _new_plugin:
            sub.add_argument("name", metavar="NAME", help="of the distribution, as graft-wide")
            told = "what the plugin adds (default: %(default)s)"
            sub.add_argument("--kind", choices=[*KINDS], default=next(iter(KINDS)), help=told)
            told = "folder in which its folder is made (default: the current one)"
            sub.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help=told)
        if command is _info:
            told = "address of the server (default: %(default)s)"
            sub.add_argument("--url", default="http://127.0.0.1:8000", help=told)
    told = "say what `vllm serve` would run with its flags; status 1: refused, 3: nothing of ours"
    commands.add_parser("plan", help=told)
    commands.add_parser("bench", help="measure; see vllm-graft bench --help")
    return parser


def _tell(
    arguments: argparse.Namespace, programs: Callable[[], Any], people: Callable[[], str]
) -> int:
    print(json.dumps(programs()) if arguments.json else people())
    return 0


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

    def lines() -> Iterator[str]:
        for hook, rows in offers.items():
            yield hook
            for row in rows:
                yield f"  {row['name']:<12} {row['provider']:<24} {row['summary']}"

    return _tell(arguments, lambda: offers, lambda: "\n".join(lines()))


def _row(offer: Offer) -> dict[str, str]:
    entry = offer.entry
    return {"name": entry.name, "provider": str(offer.provider), "summary": entry.summary}


def _support(arguments: argparse.Namespace) -> int:
    from vllm_graft import support_matrix
    from vllm_graft.parts import PARTS

    return _tell(
        arguments,
        lambda: support_matrix.as_dict(manager(), PARTS),
        lambda: support_matrix.as_page(manager(), PARTS),
    )


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


def _refused(arguments: argparse.Namespace) -> int:
    from vllm_graft.parts import PARTS

    return _tell(
        arguments,
        lambda: {part.name: [each.told() for each in part.refusals] for part in PARTS},
        lambda: "\n".join(
            f"## {part.flag.removeprefix('--')}\n\n{as_table(part.refusals)}\n" for part in PARTS
        ),
    )


def _info(arguments: argparse.Namespace) -> int:
    from vllm_graft.metrics import server_info

    try:
        found = server_info.ask(arguments.url)
    except GraftError as error:
        sys.exit(str(error))
    _tell(arguments, lambda: server_info.as_dict(found), lambda: server_info.render(found))
    return 0 if found.is_well else 1


def _metrics(arguments: argparse.Namespace) -> int:
    from vllm_graft.metrics.catalogue import as_page, catalogue
    from vllm_graft.parts import PARTS

    found = catalogue(PARTS)
    rows = [
        {**vars(row), "kind": row.kind.value, "origin": row.origin.value}
        for rows in found.values()
        for row in rows
    ]
    return _tell(arguments, lambda: rows, lambda: as_page(found))
