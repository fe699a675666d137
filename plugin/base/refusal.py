"""What a part cannot be combined with, as rows. Messages and tables are made of them."""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from vllm_graft.base.options import target_of
from vllm_graft.base.values import shown


@dataclass(frozen=True)
class Found:
    """A refused thing of a configuration. `text`: what it has, with full flags and values: a
    sentence without its stop. `instead`: what to do, if the values tell it better."""

    text: str
    instead: str = ""


class Sentence(str):
    """A sentence with what to do; ``fact`` is without, for those who did not ask for the part."""

    __slots__ = ("fact",)

    fact: str

    def __new__(cls, text: str, fact: str) -> Self:
        made = super().__new__(cls, text)
        made.fact = fact
        return made


Find = Callable[[Any, Any], Iterable[Found | str]]
"""Looks for a thing with a part's section and vLLM's configuration. Text alone is a `Found`."""


@dataclass(frozen=True)
class Refusal:
    """One thing that rules a part out. `what`: the thing, as a user knows it. `why`: a sentence
    that says why the part can't be combined with it. `instead`: what to do, with full flags: an
    order without its stop."""

    what: str
    why: str
    instead: str
    find: Find

    def told(self) -> dict[str, str]:
        return {"what": self.what, "why": self.why, "instead": self.instead}

    def sentences(self, asked: Any, vllm_config: Any) -> Iterator[Sentence]:
        """Say of each thing found what it is, why it is refused, and what to do."""
        why = _plain(self.why).removesuffix(".")
        for each in self.find(asked, vllm_config):
            found = Found(each) if isinstance(each, str) else each
            fact = f"{found.text}. {why}"
            yield Sentence(f"{fact}: {found.instead or _plain(self.instead)}.", f"{fact}.")


class Refusals(list[Refusal]):
    """Rows of one kind, in the order in which they are checked."""

    def row(self, what: str, why: str, instead: str) -> Callable[[Find], Refusal]:
        """Make the function below it look for a thing, whose row is added."""

        def make(find: Find) -> Refusal:
            self.append(made := Refusal(what, why, instead, find))
            return made

        return make


def setting(path: str, fine: Callable[[Any], Any] = operator.not_, says: str = "") -> Find:
    """Look at one value of vLLM's configuration. `path` has its section and attribute, as
    ``"parallel_config.pipeline_parallel_size"``; the target's ``model_config`` counts, also where
    vLLM derived a configuration for the draft. `fine` says whether a value is none to refuse, and
    `says` what to say of it; else its flag and the value are told."""
    section, _, name = path.rpartition(".")
    known = path if section == "speculative_config" else f"--{name.replace('_', '-')}"

    def find(asked: Any, vllm_config: Any) -> Iterator[str]:
        holder = vllm_config
        if section:
            is_model = section == "model_config"
            holder = target_of(vllm_config) if is_model else getattr(vllm_config, section)
        if holder is not None and not fine(value := getattr(holder, name)):
            given = "given" if known.startswith("--") else "true"
            yield says or f"{known} is {given if value is True else shown(value)}"

    return find


def facts(said: Iterable[str]) -> str:
    """What some sentences say without their advice, which is about flags that nobody gave."""
    return " ".join(getattr(each, "fact", each) for each in said)


def sentences(refusals: Iterable[Refusal], asked: Any, vllm_config: Any) -> Iterator[str]:
    """A sentence or two for each thing that some rows refuse."""
    for refusal in refusals:
        yield from refusal.sentences(asked, vllm_config)


def _plain(words: str) -> str:  # Without the marks of code that Markdown has.
    return words.replace("`", "")
