"""Write a target of Qwen3-Next's or Qwen3.5's shapes with made-up weights, to measure trees on it.

    python -m benchmarks.recurrent_steps OUT
    python -m benchmarks.recurrent_steps OUT --shape qwen3.5-9b
    vllm-graft bench trees OUT --method mtp --arms none chain:3 chain:7 tree:7 --topk 2 --steps 4

OUT gets `target/`, whose MTP module drafts, and `prompts.json`. Its layers have the sizes of
Qwen3-Next-80B-A3B, but there are 12 of 48, and 128 experts of 512 in each, so that two engines fit
one GPU. With `--shape qwen3.5-9b` they have those of Qwen3.5-9B, which is dense: 16 layers of 32.
Without FlashInfer, vLLM wants
`--options '{"additional_config": {"gdn_prefill_backend": "triton"}}'`.

A module is as good as `--chances` says: its first guess of a token is right with the first chance,
the second with the second one, and so on, at each depth and independent of the guesses before.
All passes are computed as ever, so that tokens per second are those of a trained module that
guesses as well. With `--random` it is a random one, of which hardly any draft is accepted.

    python -m benchmarks.recurrent_steps OUT --hot-tokens 49152 --hot-share 0.97

A target emits all tokens of the vocabulary alike, so that no vocabulary of hot tokens holds what
comes next. With `--hot-tokens N --hot-share SHARE` the fraction SHARE of what it emits has ids
below N, with which `graft.tree.hot_tokens` N begins, and the rest is beyond them. Its text is
nearly N tokens long and begins anew then. Prompts are rows of characters that are a token each, and
answers to prompts that follow each other begin 192 tokens apart: with N 49152, 250 answers in turn
of so many tokens have no token in common. A vocabulary would learn what is asked for again, so say
`--new-prompts` to `vllm-graft bench trees`.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.known_acceptance import HotText, follow_a_table
from tests.support.recurrent_models import write_qwen3_5, write_qwen3_next
from vllm_graft.testing.models.llama import write_tokenizer

_COMMON: dict[str, Any] = {
    "heads": (16, 32), "head": 128, "num_attention_heads": 16, "head_dim": 256, "dtype": "bfloat16",
    "kinds": ("linear_attention",) * 3 + ("full_attention",),
}  # fmt: skip

EXPERTS: dict[str, Any] = _COMMON | {
    "hidden": 2048, "layers": 12, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 128, "num_experts_per_tok": 10,
    "num_key_value_heads": 2, "vocab_size": 151936,
}  # fmt: skip
"""Of Qwen3-Next-80B-A3B, with fewer layers and experts."""

DENSE: dict[str, Any] = _COMMON | {
    "hidden": 4096, "layers": 16, "intermediate_size": 12288, "num_key_value_heads": 4,
    "vocab_size": 248320,
}  # fmt: skip
"""Of Qwen3.5-9B, with fewer layers: what ``Qwen3_5TextConfig`` has by default."""

SHAPES: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "qwen3-next": (write_qwen3_next, EXPERTS),
    "qwen3.5-9b": (write_qwen3_5, DENSE),
}


CHANCES = (0.70, 0.10, 0.05, 0.03)
"""What is known of real heads: an EAGLE-3 head of ours guesses 0.49 of ShareGPT's tokens, an MTP
module of ours 0.6 to 0.7 at temperature 1, and 0.92 of greedy texts of its own target. Of further
guesses nothing was measured: these fall as a power of the rank, about ``0.2 * rank ** -1.2``."""

TINY: dict[str, dict[str, Any]] = {
    "qwen3-next": {"hidden": 256, "intermediate_size": 64, "moe_intermediate_size": 64},
    "qwen3.5-9b": {"hidden": 256, "intermediate_size": 64},
}
"""Directions of fewer numbers are too much alike for a table to be read of them."""

_PROMPTS, _CHARACTERS = 256, 2000
"""Prompts of a target with hot tokens, and the length of each prompt."""

_ALPHABET = [chr(0x4E00 + place) for place in range(_PROMPTS)]
"""Characters of these prompts. No two prompts have the same one at a place, so that they end with
different ones wherever they are cut."""


def write(
    folder: Path,
    writer: Callable[..., Path],
    sizes: dict[str, Any],
    chances: Sequence[float] | None = CHANCES,
    hot: tuple[int, float] | None = None,
) -> None:
    """Write the target, a tokenizer of few tokens, and prompts of the standard library.

    Args:
        folder: written.
        writer: writes the target.
        sizes: of the target.
        chances: how often each guess of the module is right; None for a random module and target.
        hot: how many tokens are hot, and which share they have of what is emitted; None for a
            target that emits all tokens alike. Prompts are made up if they are given.

    Raises:
        ValueError: if the target does not have so many tokens, or prompts use all hot ones.
    """
    target, text = folder / "target", None
    write_tokenizer(target)
    if hot:
        tokens, share = hot
        text = HotText(tokens, share, apart=_add_alphabet(target))
    edit = None if chances is None else partial(follow_a_table, chances=chances, hot=text)
    writer(target, edit=edit, **sizes)
    prompts = _rows() if hot else _library()
    (folder / "prompts.json").write_text(json.dumps(prompts))


def _library() -> list[str]:
    """Beginnings of files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [text[:_CHARACTERS] for text in texts if len(text) >= _CHARACTERS][:128]


def _add_alphabet(folder: Path) -> int:
    """Give the tokenizer a token for each character of `_ALPHABET`; return how many it has then."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(list(_ALPHABET))
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


def _rows() -> list[str]:
    """Prompts that begin, and end, with one character of the alphabet after the other."""
    characters = _ALPHABET * (2 + _CHARACTERS // _PROMPTS)
    return ["".join(characters[first : first + _CHARACTERS]) for first in range(_PROMPTS)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-next", help="%(default)s")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to try the benchmark")
    parser.add_argument(
        "--layers", type=int,
        help="in the place of 12 or 16, a multiple of 4; with few layers the host may take longer "
        "for a step than the GPU",
    )  # fmt: skip
    parser.add_argument(
        "--chances", type=float, nargs="+", default=CHANCES, metavar="CHANCE",
        help="of the module's guesses to be right, best first (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--random", action="store_true", help="a random module in a random target")
    parser.add_argument(
        "--hot-tokens", type=int, metavar="N",
        help="ids below it are hot (default: all tokens are alike)",
    )  # fmt: skip
    parser.add_argument(
        "--hot-share", type=float, metavar="SHARE", help="of hot tokens in what is emitted: 0 to 1"
    )
    arguments = parser.parse_args(argv)
    tokens, share, layers = arguments.hot_tokens, arguments.hot_share, arguments.layers
    hot = None if tokens is None or share is None else (tokens, share)
    if layers is not None and (layers < 4 or layers % 4):
        parser.error(f"--layers {layers}: say a multiple of 4, as one layer of four attends")
    if (tokens is None) != (share is None):
        parser.error("--hot-tokens and --hot-share: say both or none")
    if hot and arguments.random:
        parser.error("--random: a random target has no share of hot tokens, drop --hot-tokens")
    chances = None if arguments.random else arguments.chances
    writer, sizes = SHAPES[arguments.shape]
    if arguments.tiny:
        sizes = TINY[arguments.shape] | ({"vocab_size": 2 * tokens} if hot else {})
    if layers is not None:
        sizes = sizes | {"layers": layers}
    write(arguments.out, writer, sizes, chances, hot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
