"""Corpora: texts that a memory has from files, and is given while it serves. The engine core reads
and tokenises them and says where they go, so that all ranks have the same. Workers write between
two steps, on the stream that drafts: no step finds a part of a corpus."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag
from vllm_graft.base.values import human, reason_of, shown
from vllm_graft.spec_decode.lookup.references import CHARACTERS, encoded
from vllm_graft.spec_decode.trees.text_state import BORDER, SEGMENT, SEGMENT_BYTES

if TYPE_CHECKING:
    from vllm_graft.spec_decode.config.tree_config import MemoryConfig
    from vllm_graft.spec_decode.lookup.references import Tokenizer
    from vllm_graft.spec_decode.lookup.served_references import Owners

METHOD = "graft_corpora"
"""What ``collective_rpc`` is asked for."""

ROOM, _FILES = flag("tree", "memory", "corpora_bytes"), flag("tree", "memory", "corpora")
_CHUNK = 1 << 15
"""Characters that the tokenizer gets at once: threads share the work."""


def room_of(memory: MemoryConfig) -> int:
    """Tokens that corpora may have, with one more for each text."""
    return memory.corpora_bytes // SEGMENT_BYTES * SEGMENT


def read_texts(path: str, tokens: int) -> list[str]:
    """Read the texts of a file that could have so many tokens. Raises `ConfigError` for a file that
    can't be read, is of another form, or has too much."""
    try:
        file = Path(path).expanduser()
        if file.exists() and not file.is_file():
            raise ValueError("it is no file")
        most = CHARACTERS * tokens
        with file.open("rb") as opened:
            found = opened.read(most + 1)
        if len(found) > most:
            raise ValueError(f"it has over {human(most)}, and there is room for {tokens} tokens")
        text = found.decode()
        if file.suffix != ".jsonl":
            return [text]
        return [_text(json.loads(line)) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{_FILES}: can't read {shown(path)}: {reason_of(error)}") from error


def _text(value: Any) -> str:
    found = value.get("text") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise ValueError("a line is neither a string nor an object with a string 'text'")
    return found


@dataclass(frozen=True)
class Corpus:
    """A corpus that is there: its tokens, its segments, and whether it is a tenant's."""

    tokens: int
    places: tuple[int, ...]
    is_salted: bool


class Corpora:
    """The corpora of an engine, by name.

    Args:
        config: their room, and the files of the start.
        tokenizer: of the model; None where it has none.
        owners: numbers the scopes.
        write: tells all workers a scope, segments, tokens and the first serial.
        erase: tells all workers segments of which nothing is to be found any more.
    """

    def __init__(
        self,
        config: MemoryConfig,
        tokenizer: Tokenizer | None,
        owners: Owners,
        write: Callable[[int, Sequence[int], Sequence[int], int], object],
        erase: Callable[[Sequence[int]], object],
    ) -> None:
        self.config, self.tokenizer, self.owners = config, tokenizer, owners
        self._write, self._erase = write, erase
        self.segments = room_of(config) // SEGMENT
        self._free = list(range(self.segments))
        self._added = 0
        self.known: dict[str, Corpus] = {}

    def asked(
        self,
        *,
        add: str | None = None,
        drop: str | None = None,
        text: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Drop a corpus, add one, and list all. Raises `ConfigError` if it can't be done. Then all
        is as it was. `add`: name of a new one. Without `text` it is a file, as in the
        configuration. `salt`: ``cache_salt`` of those who find it. `adapter`: name of their LoRA
        adapter."""
        gone = None if drop is None else self._known(drop)
        if add is not None:
            tokens = self.tokens_of(add, text)
            if add in self.known and add != drop:
                raise ConfigError(f"there is a corpus {shown(add)}: drop it in the same call")
            free = len(self._free) + (0 if gone is None else len(gone.places))
            self._require(add, tokens, free, salt, adapter)
        if drop is not None:
            self.drop(drop)
        if add is not None:
            self.add(add, tokens, salt, adapter)
        free = len(self._free) * SEGMENT
        corpora = [
            {"name": name, "tokens": each.tokens, "salted": each.is_salted}
            for name, each in self.known.items()
        ]
        return {"corpora": corpora, "tokens_free": free, "tokens": self.segments * SEGMENT}

    def tokens_of(self, name: str, text: str | None = None) -> array[int]:
        """The tokens of a text, or of those in a file, a `BORDER` behind each."""
        if not self.segments:
            raise ConfigError(f"there is no room for corpora: set {ROOM}")
        if self.tokenizer is None:
            raise ConfigError("corpora are tokenised, which --skip-tokenizer-init forbids: drop it")
        most = self.segments * SEGMENT
        tokens = array("i")
        for each in read_texts(name, most) if text is None else [text]:
            try:
                tokens.extend(itertools.chain(*encoded(self.tokenizer, [*_chunks(each)])))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # A tokenizer in Rust may panic, which is no Exception and would end the engine.
                why = reason_of(error)
                raise ConfigError(f"corpus {shown(name)} is not tokenised: {why}") from error
            tokens.append(BORDER)
            if len(tokens) > most:
                raise self._lack(name, f"more than {most}", most)
        if not tokens:
            raise ConfigError(f"corpus {shown(name)} has no text: give it one")
        return tokens

    def add(self, name: str, tokens: Sequence[int], salt: str | None, adapter: str | None) -> None:
        """Write a corpus of a new name to all ranks."""
        self._require(name, tokens, len(self._free), salt, adapter)
        count = -(-len(tokens) // SEGMENT)
        places, self._added = tuple(self._free[:count]), self._added + 1
        try:
            scope = self.owners.scope(salt, adapter)
            self._write(scope, places, tokens, self._added * self.segments)
        except BaseException:
            # No rank may know more than another: they would draft different trees.
            self._erase(places)
            raise
        self._free = self._free[count:]
        of_tenant = bool(salt or adapter)
        self.known[name] = Corpus(len(tokens), places, of_tenant)

    def drop(self, name: str) -> None:
        """Let nobody find a corpus any more."""
        self._erase(self._known(name).places)
        self._free += self.known.pop(name).places

    def answer(
        self, original: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Stand in the place of ``EngineCore.collective_rpc``."""
        if method != METHOD:
            return original(method, timeout, args, kwargs)
        return [self.asked(*args, **(kwargs or {}))]

    def _known(self, name: str) -> Corpus:
        if name not in self.known:
            names = ", ".join(map(shown, self.known)) or "none"
            raise ConfigError(f"there is no corpus {shown(name)}: there are {names}")
        return self.known[name]

    def _require(
        self, name: str, tokens: Sequence[int], free: int, salt: str | None, adapter: str | None
    ) -> None:
        if self.config.scope == "server" and (salt or adapter):
            raise ConfigError(
                f"salt and adapter are for {flag('tree', 'memory', 'scope')} tenant: drop them"
            )
        if len(tokens) > free * SEGMENT:
            raise self._lack(name, str(len(tokens)), free * SEGMENT)

    def _lack(self, name: str, tokens: str, free: int) -> ConfigError:
        return ConfigError(
            f"corpus {shown(name)} has {tokens} tokens, and there is room for {free}: raise "
            f"{ROOM}, which is {int(self.config.corpora_bytes)}, or drop another one"
        )


def _chunks(text: str) -> Iterator[str]:
    """The parts of a text, which is cut behind lines."""
    begin = 0
    while begin < len(text):
        end = text.rfind("\n", begin, begin + _CHUNK) + 1 if begin + _CHUNK < len(text) else 0
        end = end or begin + _CHUNK
        yield text[begin:end]
        begin = end
