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
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.known_acceptance import follow_a_table
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


def write(
    folder: Path,
    writer: Callable[..., Path],
    sizes: dict[str, Any],
    chances: Sequence[float] | None = CHANCES,
) -> None:
    """Write the target, a tokenizer of few tokens, and prompts of the standard library.

    Args:
        folder: written.
        writer: writes the target.
        sizes: of the target.
        chances: how often each guess of the module is right; None for a random module and target.
    """
    edit = None if chances is None else partial(follow_a_table, chances=chances)
    target = writer(folder / "target", edit=edit, **sizes)
    write_tokenizer(target)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    prompts = [text[:2000] for text in texts if len(text) >= 2000]
    (folder / "prompts.json").write_text(json.dumps(prompts[:128]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-next", help="%(default)s")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to try the benchmark")
    parser.add_argument(
        "--chances", type=float, nargs="+", default=CHANCES, metavar="CHANCE",
        help="of the module's guesses to be right, best first (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--random", action="store_true", help="a random module in a random target")
    arguments = parser.parse_args(argv)
    chances = None if arguments.random else arguments.chances
    writer, sizes = SHAPES[arguments.shape]
    write(arguments.out, writer, TINY[arguments.shape] if arguments.tiny else sizes, chances)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
