"""A pair whose target is a mixture of experts that computes what the dense target computes.

    python -m benchmarks.real_pair.mixture PAIR OUT [--site FOLDER] [--experts 128 ...]

Every expert of a layer is the layer's dense MLP (sparse upcycling, arXiv:2212.05055), and the
weights of those that a row asks for add up to 1: so drafts are accepted as in the dense pair, and a
step costs what a step of a mixture in these shapes costs. All sizes are first widened (`widening`).
The checkpoint stays dense: experts are copied when the model is loaded.

The router is a random projection of the hidden state. Rows ask for experts as if by chance, where
trained routers send like rows to like experts. So more of them are read than in a trained mixture.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.mixtral import MixtralMoE
from vllm.model_executor.models.registry import ModelRegistry

from benchmarks.real_pair.widening import Shape, widen_draft, widen_target

NAME = "UpcycledLlamaForCausalLM"

SHAPE = Shape(hidden=2048, ffn=1024, kv_heads=4, layers=20, vocab=151936)
"""Those of Qwen3-30B-A3B, with wider experts (1,024 instead of 768) and fewer layers."""


class UpcycledLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", **options: Any) -> None:
        super().__init__(vllm_config, prefix, **options)
        config: Any = vllm_config.model_config.hf_config
        self.mlp = MixtralMoE(
            config.num_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.intermediate_size,
            prefix=f"{prefix}.mlp",
        )


class UpcycledLlama(LlamaForCausalLM):
    """A Llama with a mixture in the place of each MLP, on one device."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=UpcycledLayer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a dense Llama's weights."""
        dense: dict[str, torch.Tensor] = {}

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if ".mlp." not in name:
                    yield name, weight
                dense[name] = weight

        loaded: set[str] = super().load_weights(others())
        generator = torch.Generator().manual_seed(0)
        for name, target in self.named_parameters():
            layer, found, part = name.partition(".mlp.")
            if not found:
                continue
            own = [dense[f"{layer}.mlp.{each}_proj.weight"] for each in ("gate", "up", "down")]
            if part.endswith("w13_weight"):
                target.data.copy_(torch.cat(own[:2]).to(target.device).expand_as(target))
            elif part.endswith("w2_weight"):
                target.data.copy_(own[2].to(target.device).expand_as(target))
            else:
                target.data.copy_(torch.randn(target.shape, generator=generator))
            loaded.add(name)
        return loaded


def register() -> None:
    """Tell vLLM of the model; an entry point of ``vllm.general_plugins``."""
    ModelRegistry.register_model(NAME, f"{__name__}:{UpcycledLlama.__name__}")


def tell_all_processes(site: Path) -> None:
    """Let each process of vLLM whose path has a folder call `register`."""
    folder = site / "upcycled-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: upcycled\nVersion: 0\n")
    point = "benchmarks.real_pair.mixture:register"
    (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\nupcycled = {point}\n")


def upcycle(folder: Path, experts: int, each: int) -> None:
    """Make a dense Llama's folder one of a mixture, of whose experts a row reads `each`."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {"architectures": [NAME], "num_experts": experts, "num_experts_per_tok": each}
    file.write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--site", type=Path, help="a folder of the path of all processes")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--experts-per-token", type=int, default=8)
    for name in ("hidden", "ffn", "layers", "heads", "kv_heads"):
        parser.add_argument(f"--{name}", type=int, default=getattr(SHAPE, name))
    told = parser.parse_args()
    sizes = {name: getattr(told, name) for name in ("hidden", "ffn", "layers", "heads", "kv_heads")}
    wide = Shape(**sizes, vocab=SHAPE.vocab)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    widen_target(told.pair, told.out, wide, device)
    widen_draft(told.pair, told.out, wide, device)
    upcycle(told.out / "target", told.experts, told.experts_per_token)
    shutil.copy(told.pair / "prompts.json", told.out)
    if told.site:
        tell_all_processes(told.site)


if __name__ == "__main__":
    main()
