"""``vllm-graft info``: what runs in a server, from its ``/metrics`` alone."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import GraftError
from vllm_graft.base.metric import PREFIX
from vllm_graft.base.text_table import table
from vllm_graft.base.values import printable, reason_of, shown
from vllm_graft.metrics.part_states import DECLINED, MISSING, ON

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

INFO = f"{PREFIX}info"
PROMPTS = "vllm:prompt_tokens_total"
"""VLLM's own count of the tokens of all prompts, wherever their K/V came from."""
_READ = (PREFIX, PROMPTS)
SECONDS = 10.0
"""How long a server may take for its whole answer."""
MAX_BYTES = 8 << 20
"""Bytes of an answer, which the parser reads in about 1 s per MiB."""
MAX_LINE = 16 << 10
"""Characters of a line that is read."""
CACHE = "hicache"
_STYLES = {ON: "green", "off": "dim", DECLINED: "bold red", MISSING: "bold red"}
_GIVE = "Give the address of a running `vllm serve`, for example http://127.0.0.1:8000."
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
    """What a server's ``/metrics`` say. ``numbers`` are metrics of ours that are not zero, summed
    over the engines, by name and label; ``prompt_tokens`` are those of all prompts."""

    parts: list[PartInfo]
    numbers: dict[str, float] = field(default_factory=dict)
    prompt_tokens: float = 0.0

    @property
    def is_well(self) -> bool:
        """Whether every part that was asked for runs."""
        return not any(part.state in (DECLINED, MISSING) for part in self.parts)


def ask(url: str) -> ServerInfo:
    """Ask a server at an address like ``http://127.0.0.1:8000``. Raises `GraftError` if it can't be
    asked, does not answer within `SECONDS`, with more than `MAX_BYTES`, or with nothing of ours."""
    head = f"--url {shown(_without_secrets(url))}"
    try:
        found = read(_page(url))
    except ImportError as error:
        raise GraftError(
            f"{head}: {reason_of(error)}. vLLM brings the client: run this where vLLM is installed."
        ) from error
    except _Refused as error:
        raise GraftError(f"{head}: /metrics can't be read: {error}. {_GIVE}") from None
    if not found.parts:
        raise GraftError(
            f"{head}: /metrics has no {INFO}. Either this is no vLLM server, it has nothing of "
            "vllm-graft turned on (run `vllm-graft doctor` on its machine), or it was started with "
            "--disable-log-stats."
        )
    return found


def read(text: str) -> ServerInfo:
    """What a page of ``/metrics`` says; `_Refused` if a line of ours has another form."""
    parts: list[PartInfo] = []
    numbers: dict[str, float] = {}
    prompt_tokens = 0.0
    for name, labels, value in _samples(text):
        if name == PROMPTS:
            prompt_tokens += value
        elif name == INFO and value == 1:
            named = {key: labels.get(key, "") for key in PartInfo.__dataclass_fields__}
            parts.append(PartInfo(**named))
        elif name != INFO and value and not name.endswith(_SKIPPED):
            own = [f"{k}={v}" for k, v in labels.items() if k not in ("model_name", "engine")]
            key = f"{name}{{{', '.join(own)}}}" if own else name
            numbers[key] = numbers.get(key, 0) + value
    parts.sort(key=lambda part: (part.engine, part.part))
    return ServerInfo(parts, dict(sorted(numbers.items())), prompt_tokens)


class _Refused(Exception):
    """An answer or an address that is not taken, and why."""


def samples(text: str, prefix: str | tuple[str, ...] = "") -> Iterator[Sample]:
    """The samples of a page whose names begin with a prefix, by the parser that vLLM brings. Raises
    `ImportError` without vLLM, and ValueError and others if such a line has another form."""
    from prometheus_client import parser

    # Python's own splitlines() would also split labels.
    ours = "\n".join(line for line in text.split("\n") if line.startswith(prefix))
    for family in parser.text_string_to_metric_families(ours):
        yield from family.samples


def total(text: str, name: str, **labels: str) -> float:
    """The sum of all samples of a name that have these labels; 0 if there is none."""
    return sum(
        sample.value
        for sample in samples(text, name)
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    # The parser's time grows with the square of a line.
    if any(len(line) > MAX_LINE for line in text.split("\n") if line.startswith(_READ)):
        raise _Refused(f"a line of it has more than {MAX_LINE} characters")
    try:
        for sample in samples(text, _READ):
            yield sample.name, sample.labels, float(sample.value)
    except ImportError:
        raise
    except Exception as error:  # The parser has more kinds of them than ValueError.
        raise _Refused(f"it is not in Prometheus' text format: {reason_of(error)}") from None


def _page(url: str) -> str:
    """The text at an address, within `SECONDS`."""
    below = re.split(r"[/?#]", url.removeprefix(_scheme(url)), maxsplit=1)[1:]
    if any("@" in each for each in below):
        # What stands before it is then taken for host and port, and shown in errors.
        raise _Refused('an "@" follows a "/", "?" or "#": in a password, write %2F, %3F or %23')
    address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    asked: Future[str] = Future()

    def ask() -> None:
        try:
            asked.set_result(_asked(address))
        except Exception as error:
            asked.set_exception(error)

    # Nobody waits for its end: the lookup of a name, or headers, may take longer.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return asked.result(SECONDS)
    except TimeoutError:
        raise _Refused(f"the server did not answer within {SECONDS:g} s") from None


def _asked(address: str) -> str:
    """The text at an address, within `MAX_BYTES`. Redirects are not followed."""
    import httpx

    found = bytearray()
    try:
        with httpx.stream(
            "GET", address, timeout=SECONDS, headers={"Accept-Encoding": "identity"}
        ) as answer:
            if answer.status_code != 200:
                raise _Refused(f"the server answers with status {answer.status_code}")
            for chunk in answer.iter_raw():
                found += chunk
                if len(found) > MAX_BYTES:
                    raise _Refused(f"the answer has more than {MAX_BYTES >> 20} MiB")
    except httpx.TimeoutException:
        raise TimeoutError from None
    except (ValueError, httpx.InvalidURL, httpx.UnsupportedProtocol):
        # The error's text may have the address, with a password.
        raise _Refused("this is no address") from None
    except httpx.RemoteProtocolError as error:
        raise _Refused(f"the answer is not in HTTP: {shown(str(error))}") from None
    except (httpx.HTTPError, OSError) as error:
        raise _Refused(reason_of(error)) from None
    return found.decode(errors="replace")


def _without_secrets(url: str) -> str:
    """An address without user, password and query."""
    scheme = _scheme(url)
    return re.split(r"[?#]", scheme + url.removeprefix(scheme).rpartition("@")[2])[0]


def _scheme(url: str) -> str:
    found = re.match(r"[\w+.-]+://", url)
    return found.group() if found else ""


def answers(found: ServerInfo) -> dict[str, float]:
    """What a person asks first. ``trees``: the steps of requests in which one was verified;
    ``tokens_per_step``: their mean yield; ``cached_share``: the part of all prompt tokens whose K/V
    came from host and storage. What nothing was counted of is left out."""
    told: dict[str, float] = {}
    if trees := found.numbers.get(f"{PREFIX}tree_trees_total"):
        accepted = found.numbers.get(f"{PREFIX}tree_nodes_accepted_total", 0.0)
        told |= {"trees": trees, "tokens_per_step": 1 + accepted / trees}
    if found.prompt_tokens and any(part.part == CACHE and part.state == ON for part in found.parts):
        hits = (f"{PREFIX}{CACHE}_hit_tokens_{source}_total" for source in ("host", "storage"))
        cached = sum(found.numbers.get(name, 0.0) for name in hits)
        told["cached_share"] = cached / found.prompt_tokens
    return told if all(map(math.isfinite, told.values())) else {}


def sentences(found: ServerInfo) -> Iterator[str]:
    """Say what a person asks first, a line each."""
    told = answers(found)
    if "trees" in told:
        yield f"trees: {told['tokens_per_step']:.1f} tokens per step ({told['trees']:,.0f} steps)\n"
    if "cached_share" in told:
        yield f"host cache: {told['cached_share']:.0%} of prompt tokens\n"


def render(found: ServerInfo) -> str:
    """The report for people."""
    many = len({part.engine for part in found.parts}) > 1
    names = [f"{part.part} ({part.engine})" if many else part.part for part in found.parts]
    rows = [
        (f"  {printable(name)}", printable(part.state), printable(part.detail))
        for name, part in zip(names, found.parts)
    ]
    told = f"vllm-graft {printable(found.parts[0].version)}\n"
    told += "".join(sentences(found))
    told += table(("", "", ""), rows, _STYLES)
    if found.numbers:
        numbers = [
            (f"  {printable(name)}", f"{number:,.10g}") for name, number in found.numbers.items()
        ]
        told += f"\n{table(('', ''), numbers)}"
    return told.rstrip("\n")


def as_dict(found: ServerInfo) -> dict[str, Any]:
    """The report for programs."""
    # JSON has no NaN and no infinity.
    numbers = {name: n if math.isfinite(n) else None for name, n in found.numbers.items()}
    parts = [vars(part) for part in found.parts]
    return {"ok": found.is_well, "answers": answers(found), "parts": parts, "metrics": numbers}
