"""Whether parts may run with the installed vLLM: as tested, or as proven on this machine. A proof
stands in for symbols that exist and whose text alone differs. It never does for one that is missing
or takes other parameters, nor for a symbol that looks otherwise than while it ran."""

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import parent_process
from typing import Any

from vllm_graft.base.errors import SeamError
from vllm_graft.base.log import info_once, warning_once
from vllm_graft.base.values import several
from vllm_graft.seams import compare, proofs
from vllm_graft.seams.compare import is_tested, provable, tested_text, vllm_version
from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.proofs import Proof
from vllm_graft.seams.versions import differing, moved_text


@dataclass
class Seen:
    """What is seen while something is proven in this process. `rows`: symbols that differ, by path,
    as they are found. `flags`: what a start with this configuration would look for a proof by."""

    rows: dict[str, str] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)


_seen: Seen | None = None


@contextlib.contextmanager
def proving() -> Iterator[Seen]:
    """Let parts run that a proof may stand in for; yields what is seen meanwhile."""
    global _seen
    _seen = Seen()
    try:
        yield _seen
    finally:
        _seen = None


def require_seams(*parts: str, ledger: Sequence[Seam] | None = None) -> None:
    """Refuse to go on with a vLLM that ``parts`` were neither written for nor proven with. Raises
    `SeamError`, which names each symbol, what was expected and found, and vLLM's version."""
    reports = [] if is_tested(vllm_version()) else compare.check_seams(parts, ledger)
    differ = [report for report in reports if report.problem]
    if not differ or not all(map(provable, differ)):
        if differ or not reports:
            compare.require_seams(*parts, ledger=ledger)
        return
    rows = {report.seam.path: report.found for report in differ}
    if _seen is not None:
        _seen.rows.update(rows)
    elif not any(_stands_for(proof, rows) for proof in proofs.of_this_machine()):
        compare.require_seams(*parts, ledger=ledger)


def unfit(parts: Collection[str]) -> str:
    """Why parts can't run on the installed vLLM, whatever was proven; empty if they may. This is
    for the frontend: it reads source files, and imports nothing."""
    differ = differing(*parts)
    if isinstance(differ, str):
        return differ
    missing = [report for report in differ if not provable(report)]
    tested = _seen is None and is_tested(vllm_version())
    return moved_text(vllm_version(), parts, differ if tested else missing)


def refused(parts: Collection[str], vllm_config: Any) -> str:
    """Why parts can't run on the installed vLLM with a complete configuration; empty if they can.
    Proofs are looked for by it, as vLLM fills in what they are bound to."""
    differ = differing(*parts)
    if (why := unfit(parts)) or isinstance(differ, str):
        return why
    if _seen is not None or is_tested(vllm_version()):
        return ""
    proof = proofs.find(vllm_config)
    rows = {report.seam.path: report.found for report in differ}
    if proof is not None and not proof.passed:
        head = f"The proof with vLLM {vllm_version()} of {proof.date} failed:"
        return several([head, *(f"  {each}" for each in proof.differences)])
    if not rows or (proof is not None and _stands_for(proof, rows)):
        return ""
    what = (
        "none of these flags is kept"
        if proof is None
        else "the one that is kept has not seen these"
    )
    return (
        f"vLLM {vllm_version()} was not tested (vLLM {tested_text()} was), and {len(rows)} of its "
        f"symbols have another text than there: {', '.join(sorted(rows))}. A proof stands in for "
        f"that, but {what}. Run `{how()}`, which takes a minute or two."
    )


def admit(parts: Collection[str], vllm_config: Any) -> None:
    """Refuse parts that were asked for by name, and say what stands in for tests. Raises
    `SeamError` with what differs, and with the command that may prove that it does no harm."""
    if not parts or _is_derived(vllm_config):
        return
    if _seen is not None:
        _seen.flags = proofs.flags_of(vllm_config)
    if _seen is not None or is_tested(vllm_version()):
        return
    if why := refused(parts, vllm_config):
        raise SeamError(why)
    proof, here = proofs.find(vllm_config), f"vLLM {vllm_version()} was not tested"
    if proof is None:
        warning_once(
            f"{here} (vLLM {tested_text()} was); every symbol that these parts touch is as "
            f"expected. `{how()}` shows in a minute or two whether they work."
        )
    else:
        info_once(
            f"{here}, but {', '.join(proof.parts)} were proven on this {proof.machine.device} at "
            f"{proof.date}: answers are those of an engine without them. {len(proof.rows)} symbols "
            "have another text than in tested versions"
        )


def _is_derived(vllm_config: Any) -> bool:
    """Whether vLLM made a configuration of one that was admitted before. A worker does so for
    drafts, in an environment with variables of vLLM's, and with its extension."""
    if parent_process() is not None and vllm_config.parallel_config.worker_extension_cls:
        return True
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft is speculative.target_model_config:
        return False
    return vllm_config.model_config is draft


def how() -> str:
    """The command that proves what this process was asked to serve."""
    serves = sys.argv[1:2] == ["serve"]
    return proofs.command_of(sys.argv[2:]) if serves else "vllm-graft prove MODEL [its flags]"


def _stands_for(proof: Proof, rows: dict[str, str]) -> bool:
    return proof.passed and rows.items() <= proof.rows.items()
