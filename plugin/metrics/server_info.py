"""``vllm-graft info``: what runs in a server, from its ``/metrics`` alone."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.base.errors import GraftError
from vllm_graft.base.metric import PREFIX
from vllm_graft.base.text_table import table
from vllm_graft.base.values import reason_of, shown
from vllm_graft.metrics.exposition import samples
from vllm_graft.metrics.part_states import DECLINED, MISSING

INFO = f"{PREFIX}info"
SECONDS = 10.0
"""How long a server may take to answer."""
_STYLES = {"on": "green", "off": "dim", DECLINED: "bold red", MISSING: "bold red"}
_SKIPPED = ("_bucket", "_created", "_sum")


@dataclass(frozen=True)
class PartInfo:
    """A part of one engine."""

    engine: str
    part: str
    state: str
    detail: str
    version: str


@dataclass(frozen=True)
class ServerInfo:
    """What a server's ``/metrics`` say.

    Attributes:
        parts: each part of each engine.
        numbers: metrics of ours that are not zero, summed over the engines, by name and label.
    """

    parts: list[PartInfo]
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Whether every part that was asked for runs."""
        return not any(part.state in (DECLINED, MISSING) for part in self.parts)


def ask(url: str) -> ServerInfo:
    """Ask a server.

    Args:
        url: its address, as ``http://127.0.0.1:8000``.

    Raises:
        GraftError: if it can't be asked, or does not speak of vllm-graft.
    """
    address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=SECONDS) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise GraftError(
            f"--url {shown(url)}: {address} can't be read: {reason_of(error)}. Give the address of "
            "a running `vllm serve`, for example http://127.0.0.1:8000."
        ) from error
    found = read(text)
    if not found.parts:
        raise GraftError(
            f"--url {shown(url)}: {address} has no {INFO}. Either this server has nothing of "
            "vllm-graft turned on (run `vllm-graft doctor` on its machine), or it was started with "
            "--disable-log-stats."
        )
    return found


def read(text: str) -> ServerInfo:
    """What a page of ``/metrics`` says."""
    parts: list[PartInfo] = []
    numbers: dict[str, float] = {}
    for name, labels, value in samples(text):
        if name == INFO and value == 1:
            named = {key: labels.get(key, "") for key in PartInfo.__dataclass_fields__}
            parts.append(PartInfo(**named))
        elif name.startswith(PREFIX) and name != INFO and value and not name.endswith(_SKIPPED):
            own = [f"{k}={v}" for k, v in labels.items() if k not in ("model_name", "engine")]
            key = f"{name}{{{', '.join(own)}}}" if own else name
            numbers[key] = numbers.get(key, 0) + value
    parts.sort(key=lambda part: (part.engine, part.part))
    return ServerInfo(parts, dict(sorted(numbers.items())))


def render(found: ServerInfo) -> str:
    """The report for people."""
    many = len({part.engine for part in found.parts}) > 1
    names = [f"{part.part} ({part.engine})" if many else part.part for part in found.parts]
    rows = [(f"  {name}", part.state, part.detail) for name, part in zip(names, found.parts)]
    told = f"vllm-graft {found.parts[0].version}\n{table(('', '', ''), rows, _STYLES)}"
    if found.numbers:
        numbers = [(f"  {name}", f"{number:,.10g}") for name, number in found.numbers.items()]
        told += f"\n{table(('', ''), numbers)}"
    return told.rstrip("\n")


def as_dict(found: ServerInfo) -> dict[str, Any]:
    """The report for programs."""
    return {
        "ok": found.is_well,
        "parts": [vars(part) for part in found.parts],
        "metrics": found.numbers,
    }
