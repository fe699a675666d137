"""Texts of files: what is asked, and what somebody wrote behind it."""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import reason_of, shown
from vllm_graft.learn.records import PATTERN

HELD_OUT = 16
"""One question in so many is for measuring alone."""

_PROMPT_SHARE = 4
"""One character in so many of a text without turns is the prompt."""

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
"""ShareGPT's names of roles."""

_FORMS = (
    "`messages` or `conversations` (turns with `role` and `content`, or `from` and `value`), "
    "`prompt`, or `text`"
)

_TRAFFIC = "traffic.jsonl"
"""A copy of what a server has recorded, in a run's folder."""

Messages = tuple[tuple[str, str], ...]
"""Role and content of each turn."""


class Tokens(tuple[int, ...]):
    """Token ids of the target, as ``graft.learn.record`` writes them."""

    __slots__ = ()


Words = Messages | Tokens | str


@dataclass(frozen=True)
class Text:
    """One question. `prompt`: the turns up to the first answer, or the beginning of a text without
    turns. `whole`: the same with what follows in the file; None where nothing does."""

    prompt: Words
    whole: Words | None = None

    @property
    def held_out(self) -> bool:
        """Whether it is for measuring; the prompt alone decides, whatever else there is."""
        return zlib.crc32(repr(self.prompt).encode(errors="surrogatepass")) % HELD_OUT == 0


def read_texts(files: Sequence[str], longest: int) -> tuple[list[Text], list[str]]:
    """Read each question of files once; a text without turns is cut into pieces of about `longest`
    tokens. Returns the questions, and a sentence on each file of which something was left out.
    Raises `ConfigError` if a file can't be read, or has nothing to ask."""
    texts: dict[Words, Text] = {}
    notes = []
    for name in files:
        found, left_out = _of_file(Path(name), longest)
        texts |= {each.prompt: each for each in reversed(found)}
        if left_out:
            notes.append(f"{name}: {len(left_out)} rows are left out; {left_out[0]}")
    if len(texts) < 2:
        raise ConfigError(
            f"--texts has {len(texts)} different question, and training needs two at least: one is "
            "for measuring. Give more texts."
        )
    return list(texts.values()), notes


def require_tokens(texts: Sequence[Text], vocab: int, model: str) -> None:
    """Raise ConfigError for recorded tokens that are not the model's."""
    recorded = (max(each.whole) for each in texts if isinstance(each.whole, Tokens))
    largest = max(recorded, default=0)
    if largest >= vocab:
        raise ConfigError(
            f"--from-traffic has token {largest}, and MODEL {model} has {vocab} tokens: it was "
            "recorded from another model. Give that one, or another folder."
        )


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Questions to learn from, and at least one held-out question."""
    learned = [each for each in texts if not each.held_out]
    held_out = [each for each in texts if each.held_out]
    if not held_out:
        held_out.append(learned.pop())
    if not learned:
        learned.append(held_out.pop())
    return learned, held_out


def _of_file(file: Path, longest: int) -> tuple[list[Text], list[str]]:
    """The questions of a file, and why rows have none."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--texts {str(file)!r} can't be read: {reason_of(error)}. Give files of text in UTF-8."
        ) from None
    if not content.strip():
        raise ConfigError(f"--texts {str(file)!r} is empty: give a file with texts, or drop it.")
    if file.suffix not in (".json", ".jsonl"):
        return list(_pieces(content, longest)), []
    found, left_out = list[Text](), list[str]()
    for place, read in _rows(file, content):
        try:
            found += _of_row(read(), longest)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            left_out.append(f"{place}: {error}")
    if not found:
        raise ConfigError(
            f"--texts {str(file)!r} has nothing to ask: {left_out[0] if left_out else 'no rows'}. "
            f"A row has {_FORMS}."
        )
    return found, left_out


def _rows(file: Path, content: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The place of each row, and what reads it."""
    if file.suffix == ".jsonl":
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                yield f"line {number}", partial(json.loads, line)
        return
    try:
        whole = json.loads(content)
    except ValueError as error:
        raise ConfigError(
            f"--texts {str(file)!r} is not JSON: {error}. Mend it, or name a file with a row in "
            "each line *.jsonl."
        ) from None
    for number, row in enumerate(whole if isinstance(whole, list) else [whole]):
        yield f"row {number}", partial(lambda row: row, row)


def _of_row(row: Any, longest: int) -> list[Text]:
    """The questions of a row. Raises `ValueError`, which says why, if it has none."""
    if isinstance(row, str):
        return list(_pieces(row, longest))
    if not isinstance(row, dict):
        raise ValueError(f"{shown(row)} is no object with fields")
    if (recorded := row.get("token_ids")) is not None:
        asked = Tokens(map(int, row["prompt_token_ids"]))
        return [Text(asked, Tokens((*asked, *map(int, recorded))))]
    for name in ("messages", "conversations", "prompt"):
        if isinstance(turns := row.get(name), list):
            return [_of_turns(turns)]
    if isinstance(prompt := row.get("prompt"), str) and prompt.strip():
        return [Text((("user", prompt),))]
    if isinstance(text := row.get("text"), str) and text.strip():
        return list(_pieces(text, longest))
    raise ValueError(f"its fields are {shown([*row])}, and none of {_FORMS}")


def _of_turns(given: Sequence[Any]) -> Text:
    turns: list[tuple[str, str]] = []
    for turn in given:
        role = str(turn.get("role") or turn.get("from"))
        role, content = _ROLES.get(role, role), turn.get("content", turn.get("value"))
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            content = "".join(part["text"] for part in content)
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            break
        turns.append((role, content))
    # Parts of long conversations may begin with an answer.
    while turns and turns[0][0] == "assistant":
        turns.pop(0)
    answer = next((n for n, (role, _) in enumerate(turns) if role == "assistant"), len(turns))
    prompt = tuple(turns[:answer])
    if not prompt or prompt[-1][0] != "user" or not prompt[-1][1].strip():
        raise ValueError("no turn of a user comes before the first answer")
    last = max((n for n, (role, _) in enumerate(turns) if role == "assistant"), default=-1)
    return Text(prompt, tuple(turns[: last + 1]) if last >= 0 else None)


def _pieces(text: str, longest: int) -> Iterator[Text]:
    """Cut a text without turns into pieces of `longest` tokens, if one has four characters."""
    size = 4 * longest
    for start in range(0, len(text), size):
        piece = text[start : start + size].strip()
        if len(piece) >= 2 * _PROMPT_SHARE:
            yield Text(piece[: len(piece) // _PROMPT_SHARE], piece)


def snapshot(folder: Path, work: Path, most: int | None = None) -> Path:
    """Copy the whole rows of a folder's records into a run's folder, for the run to go on with.
    `most`: bytes of the newest files, of which the last one may go over it; None takes all.

    Raises:
        ConfigError: there are none, or they can't be read.
    """
    copy = work / _TRAFFIC
    if copy.exists():
        return copy
    part, rows = work / f"{_TRAFFIC}.part", 0
    try:
        with part.open("wb") as written:
            for file in sorted(folder.glob(PATTERN), key=_age):
                if most is not None and written.tell() >= most:
                    break
                with file.open("rb") as lines:
                    # A server that is writing, or was killed, may leave half a row.
                    for line in lines:
                        if line.endswith(b"\n"):
                            rows += written.write(line) > 0
    except OSError as error:
        raise ConfigError(
            f"--from-traffic {shown(str(folder))} can't be read: {reason_of(error)}."
        ) from None
    if not rows:
        raise ConfigError(
            f"--from-traffic {shown(str(folder))} has no records: serve for a while with "
            "--additional-config.graft.learn.record set to it, or name the folder that has them."
        )
    part.rename(copy)
    return copy


def _age(file: Path) -> tuple[float, str]:
    """What sorts the newest first."""
    return -file.stat().st_mtime, file.name
