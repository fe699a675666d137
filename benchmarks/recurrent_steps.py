"""Write a target of Qwen3-Next's shapes with made-up weights, to time steps of trees on it.

    python -m benchmarks.recurrent_steps OUT
    vllm-graft bench trees OUT --method mtp --arms none chain:3 chain:7 tree:7 --topk 2 --steps 4

OUT gets `target/`, whose MTP module drafts, and `prompts.json`. Its layers have the sizes of
Qwen3-Next-80B-A3B, but there are 12 of 48, and 128 experts of 512 in each, so that two engines fit
one GPU. A random module's drafts are hardly ever accepted. So what a step takes is measured, and
not how many tokens per second a trained module would bring. Without FlashInfer, vLLM wants
`--options '{"additional_config": {"gdn_prefill_backend": "triton"}}'`.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.recurrent_models import write_qwen3_next
from vllm_graft.testing.models.llama import write_tokenizer

SIZES: dict[str, Any] = {
    "hidden": 2048, "layers": 12, "heads": (16, 32), "head": 128, "dtype": "bfloat16",
    "kinds": ("linear_attention",) * 3 + ("full_attention",),
    "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts": 128, "num_experts_per_tok": 10, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
}  # fmt: skip


def write(folder: Path, sizes: dict[str, Any]) -> None:
    """Write the target, a tokenizer of few tokens, and prompts of the standard library."""
    target = write_qwen3_next(folder / "target", **sizes)
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
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to try the benchmark")
    arguments = parser.parse_args(argv)
    write(arguments.out, {} if arguments.tiny else SIZES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
