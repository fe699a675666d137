"""Requests about documents: questions whose answers quote one of several, and summaries."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.workloads.request import Request
from benchmarks.workloads.sources import Choice, Document, documents

SHOWN = 4
"""Documents that a question comes with."""

_SENTENCE = re.compile(r"(?<=[.:])\s+(?=[A-Z\"])")


def paragraphs(document: Document) -> list[str]:
    """Its paragraphs of running text, on one line each; headings, code and notes are left out."""
    parts = (" ".join(part.split()) for part in document.text.split("\n\n"))
    return [part for part in parts if len(part) >= 120 and part[-1] in ".:)" and part[0] != "["]


def passages(choice: Choice) -> list[Document]:
    """Neighbouring paragraphs, as many as make up half of the characters of a document."""
    found = []
    for document in documents(choice):
        text = ""
        for part in paragraphs(document):
            text += f"{part}\n"
            if len(text) >= choice.characters // 2:
                found.append(Document(document.title, text[: choice.characters]))
                text = ""
    return found


def retrieval(choice: Choice) -> Iterator[Request]:
    """Questions with some passages each; a few passages are asked for often, as everywhere."""
    dice, known = choice.random("retrieval"), passages(choice)
    dice.shuffle(known)
    while True:
        wanted = known[int(len(known) * dice.random() ** 2)]
        shown = [wanted, *dice.sample([each for each in known if each != wanted], SHOWN - 1)]
        dice.shuffle(shown)
        place = shown.index(wanted) + 1
        told = "\n".join(f"[{number}] {each.text}" for number, each in enumerate(shown, 1))
        sentences = _SENTENCE.split(wanted.text)
        first = dice.randrange(max(1, len(sentences) - 2))
        quoted = " ".join(" ".join(sentences[first : first + 3]).split())
        begins = " ".join(quoted.split()[:5])
        ask = f"\nQuote what the documentation of {wanted.title} says, from '{begins}' on."
        answer = f"Passage [{place}], about {wanted.title}, says:\n\n> {quoted}\n\nSee [{place}].\n"
        yield Request([{"role": "user", "content": told + ask}], answer)


def summaries(choice: Choice) -> Iterator[Request]:
    """Documents to sum up; the answer has what each paragraph says first."""
    dice = choice.random("summaries")
    known = [each for each in documents(choice) if len(paragraphs(each)) >= 3]
    while True:
        document = dice.choice(known)
        parts = paragraphs(document)
        first = dice.randrange(len(parts) - 2)
        kept, size = [], 0
        for part in parts[first:]:
            kept.append(part)
            size += len(part)
            if size >= choice.characters:
                break
        ask = f"Sum up what follows, a line for each paragraph.\n\n{document.title}\n\n"
        answer = "".join(f"- {_SENTENCE.split(part)[0]}\n" for part in kept)
        yield Request([{"role": "user", "content": ask + "\n\n".join(kept) + "\n"}], answer)
