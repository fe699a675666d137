"""`vllm-graft bench vit` on a Qwen3-VL with the whole tower, few text layers and made-up weights.

    python -m benchmarks.vit --arms off stock ours off+compile ours+compile --output vit.json

Nothing is downloaded. The weights are written into each engine in place: vLLM's dummy ones are
almost zero, so that no image would change the text.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.vision import vision_models
from tests.support.vision.random_towers import TOWERS
from vllm_graft.bench.common.report import exit_status, require_plotting
from vllm_graft.bench.vision import command
from vllm_graft.bench.vision.command import Looking

TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
"""Sizes of Qwen3-VL-8B, but for 4 layers instead of 36 and a small vocabulary."""

FLAGS = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-num-batched-tokens", "8192"]
FLAGS += ["--max-model-len", "8192"]


class MadeUp(Looking):
    """An engine whose weights are drawn anew, alike in all arms."""

    def __init__(self, llm: Any, prompt: str | None) -> None:
        llm.collective_rpc(draw_weights)
        super().__init__(llm, prompt)


def draw_weights(worker: Any) -> None:
    """Write normal weights of sigma 1 / sqrt(inputs), in place, because graphs hold addresses."""
    import torch

    model = worker.model_runner.get_model()
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight[0].numel() ** -0.5, generator=generator)
            elif name.endswith("weight"):
                weight.fill_(1.0)
            else:
                weight.normal_(std=0.02, generator=generator)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the checkpoint without weights, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument("--output")
    parser.add_argument("--plot")
    with tempfile.TemporaryDirectory() as folder:
        arguments, more = parser.parse_known_args(argv)
        vision_models.write_qwen3_vl(
            Path(folder), vision=TOWERS["qwen3"].vision, text=TEXT, weights=False
        )
        arguments.prompt = vision_models.QWEN_PROMPT
        flags = [folder, *FLAGS, *more]
        require_plotting(arguments.plot)
        # By its own name, which processes that the engines start can import.
        from benchmarks.vit import MadeUp as Importable

        return exit_status("benchmarks.vit", lambda: command.run(arguments, flags, Importable))


if __name__ == "__main__":
    raise SystemExit(main())
