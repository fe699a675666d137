"""A pair in the shapes of an 8B model that computes what the small pair computes.

A step of the wide pair costs what an 8B model's step costs, and drafts are accepted as the small
pair accepts them. All sizes grow:

- hidden states get zeros behind. RMSNorm divides by the root of a mean over more numbers, which its
  weight and its epsilon make up for;
- heads of attention get partners whose output goes nowhere. A head that gets longer has its numbers
  spread so that RoPE rotates them at the same rates, and queries are scaled;
- units of the feed-forward layers and further layers have outputs of zero;
- tokens that are added must never be drawn: one channel of the hidden state is the same constant
  everywhere, and their rows of the output layer weigh it with a large negative number.

What has no effect is random, not zero, because a GPU that multiplies zeros draws less power and
clocks higher.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONSTANT, CONSTANT_NORM, NEVER = 0.01, 100.0, -100_000.0
"""The constant channel, its weight in the last norm, and in the output rows of added tokens."""

NOISE = 0.02
"""Standard deviation of weights without an effect."""

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; those of Llama-3.1-8B unless given."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    layers: int = 32
    vocab: int = 128256
    draft_vocab: int = 32000

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Read a configuration; one of a target has no draft vocabulary."""
        return cls(
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            layers=config["num_hidden_layers"],
            vocab=config["vocab_size"],
            draft_vocab=config.get("draft_vocab_size", 0),
        )

    @property
    def config(self) -> dict[str, Any]:
        """The keys of a configuration, without the number of layers."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocab,
        }


class Widening:
    """Widens weights from one shape to another.

    Raises:
        ValueError: a size would shrink, or heads don't fit into the wide ones.
    """

    def __init__(
        self, small: Shape, wide: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        grown = [wide.hidden > small.hidden, wide.ffn >= small.ffn, wide.layers >= small.layers]
        grown += [wide.kv_heads >= small.kv_heads, wide.vocab >= small.vocab]
        fits = self._group(wide) >= self._group(small) and wide.head % small.head == 0
        if not all(grown) or not fits:
            raise ValueError(f"{small} can't be widened to {wide}")
        self.small, self.wide, self.device, self.dtype = small, wide, device, dtype
        self.channel = small.hidden
        self.norm_scale = (small.hidden / wide.hidden) ** 0.5
        self.queries = self._rows(self._group(small), self._group(wide))
        self.keys = self._rows(1, 1)

    @staticmethod
    def _group(shape: Shape) -> int:
        return shape.heads // shape.kv_heads

    def _rows(self, small: int, wide: int) -> Tensor:
        """Where the rows of a projection with so many heads per K/V head go, in their order."""
        part, half = self.wide.head // self.small.head, self.small.head // 2
        inner = torch.arange(self.small.head)
        spread = torch.where(
            inner < half, inner * part, self.wide.head // 2 + (inner - half) * part
        )
        heads = torch.arange(self.small.kv_heads)[:, None] * wide + torch.arange(small)
        return (heads.flatten()[:, None] * self.wide.head + spread).flatten().to(self.device)

    def noise(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=self.dtype) * NOISE

    def _moved(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, torch.float32)

    def norm(self, weight: Tensor, last: bool = False) -> Tensor:
        """Widen a norm's weight; only the last norm lets the constant channel pass."""
        found = torch.zeros(self.wide.hidden, device=self.device, dtype=self.dtype)
        found[: self.small.hidden] = (self._moved(weight) * self.norm_scale).to(self.dtype)
        if last:
            found[self.channel] = CONSTANT_NORM
        return found

    def reading(self, weight: Tensor, rows: Tensor, wide_rows: int, scale: float = 1.0) -> Tensor:
        """Widen a product that reads normed hidden states, one or several side by side.

        Columns that meet a zero are random. Row r of it becomes row ``rows[r]``.
        """
        small, wide = self.small.hidden, self.wide.hidden
        found = self.noise(wide_rows, weight.shape[1] // small * wide)
        for part in range(weight.shape[1] // small):
            block = self._moved(weight[:, part * small : (part + 1) * small]) * scale
            found[rows, part * wide : part * wide + small] = block.to(self.dtype)
        return found

    def adding(self, weight: Tensor, columns: Tensor, wide_columns: int) -> Tensor:
        """Widen a product whose outcome is added to hidden states: all the rest stays zero."""
        found = torch.zeros(self.wide.hidden, wide_columns, device=self.device, dtype=self.dtype)
        small = torch.zeros(self.small.hidden, wide_columns, device=self.device, dtype=self.dtype)
        small[:, columns] = self._moved(weight).to(self.dtype)
        found[: self.small.hidden] = small
        return found

    def layer(self, weights: Weights, source: str, place: str, effect: bool) -> dict[str, Tensor]:
        """Widen a layer; one without an effect is a copy that adds nothing."""
        wide, units = self.wide, torch.arange(self.small.ffn, device=self.device)
        sizes = {"q": wide.heads * wide.head, "k": wide.kv_heads * wide.head}
        sizes["v"] = sizes["k"]
        found = {}
        for name, size in sizes.items():
            weight = weights[f"{source}self_attn.{name}_proj.weight"]
            rows = self.queries if name == "q" else self.keys
            # Attention divides by the root of the head's size.
            scale = (wide.head / self.small.head) ** 0.5 if name == "q" else 1.0
            product = self.reading(weight, rows, size, scale)
            if name == "q":
                self._silence_tails(product)
            found[f"{place}self_attn.{name}_proj.weight"] = product
        for name in ("gate", "up"):
            weight = weights[f"{source}mlp.{name}_proj.weight"]
            found[f"{place}mlp.{name}_proj.weight"] = self.reading(weight, units, wide.ffn)
        for name, columns, size in (
            ("self_attn.o_proj", self.queries, sizes["q"]),
            ("mlp.down_proj", units, wide.ffn),
        ):
            product = self.adding(weights[f"{source}{name}.weight"], columns, size)
            found[f"{place}{name}.weight"] = product if effect else product.zero_()
        for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
            if f"{source}{name}.weight" in weights:
                found[f"{place}{name}.weight"] = self.norm(weights[f"{source}{name}.weight"])
        return found

    def _silence_tails(self, queries: Tensor) -> None:
        """Have the added numbers of a used head's queries be zero: they meet keys that aren't."""
        used = torch.zeros(len(queries), dtype=torch.bool, device=self.device)
        used[self.queries] = True
        heads = used.view(-1, self.wide.head).any(1).repeat_interleave(self.wide.head)
        queries[heads & ~used] = 0

    def output(self, weight: Tensor, tokens: int) -> Tensor:
        """Widen an output layer to `tokens` rows, of which the added ones are never chosen."""
        found = torch.zeros(tokens, self.wide.hidden, device=self.device, dtype=self.dtype)
        found[: len(weight), : self.small.hidden] = self._moved(weight).to(self.dtype)
        found[len(weight) :, self.channel] = NEVER
        return found

    def embedding(self, weight: Tensor) -> Tensor:
        """Widen an embedding; the constant channel begins here."""
        found = torch.zeros(self.wide.vocab, self.wide.hidden, device=self.device, dtype=self.dtype)
        found[: len(weight), : self.small.hidden] = self._moved(weight).to(self.dtype)
        found[:, self.channel] = CONSTANT
        return found

    def combining(self, weight: Tensor) -> Tensor:
        """Widen the head's `fc`, which reads unnormed states and passes the constant on."""
        small, wide = self.small.hidden, self.wide.hidden
        parts = weight.shape[1] // small
        found = torch.zeros(wide, parts * wide, device=self.device, dtype=self.dtype)
        for part in range(parts):
            block = self._moved(weight[:, part * small : (part + 1) * small])
            found[:small, part * wide : part * wide + small] = block.to(self.dtype)
        found[self.channel, self.channel] = 1
        return found

    def target(self, weights: Weights) -> Iterator[dict[str, Tensor]]:
        """Widen a target, some weights at a time."""
        embedding = weights["model.embed_tokens.weight"]
        yield {
            "model.embed_tokens.weight": self.embedding(embedding),
            "model.norm.weight": self.norm(weights["model.norm.weight"], last=True),
            "lm_head.weight": self.output(
                weights.get("lm_head.weight", embedding), self.wide.vocab
            ),
        }
        for number in range(self.wide.layers):
            copied = min(number, self.small.layers - 1)
            source, place = f"model.layers.{copied}.", f"model.layers.{number}."
            yield self.layer(weights, source, place, effect=number < self.small.layers)

    def draft(self, weights: Weights) -> dict[str, Tensor]:
        """Widen a head, whose added tokens stand for tokens that the target never draws."""
        found = self.layer(weights, "midlayer.", "midlayer.", effect=True)
        found["norm.weight"] = self.norm(weights["norm.weight"], last=True)
        found["fc.weight"] = self.combining(weights["fc.weight"])
        found["lm_head.weight"] = self.output(weights["lm_head.weight"], self.wide.draft_vocab)
        offsets, added = weights["d2t"], self.wide.draft_vocab - len(weights["d2t"])
        if added > self.wide.vocab - self.small.vocab or added < 0:
            raise ValueError(
                f"{added} tokens of the draft have no tokens of the target to stand for"
            )
        # Row r stands for r + d2t[r]: from the first added token of the target on.
        tail = torch.full((added,), self.small.vocab - len(offsets), dtype=offsets.dtype)
        found["d2t"] = torch.cat((offsets, tail))
        found["t2d"] = torch.zeros(self.wide.vocab, dtype=torch.bool)
        found["t2d"][found["d2t"] + torch.arange(self.wide.draft_vocab)] = True
        return found


def widened_config(config: Mapping[str, Any], wide: Shape) -> dict[str, Any]:
    """The configuration of a widened model."""
    eps = config["rms_norm_eps"] * config["hidden_size"] / wide.hidden
    return {**config, **wide.config, "rms_norm_eps": eps, "tie_word_embeddings": False}


def wide_target_config(config: Mapping[str, Any], wide: Shape) -> dict[str, Any]:
    """The configuration of a widened target, which has more layers."""
    return widened_config(config, wide) | {"num_hidden_layers": wide.layers}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a checkpoint."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def widen_target(
    pair: Path, out: Path, wide: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write `out/target`, the target of `pair` in a wide shape, with its tokenizer."""
    source = pair / "target"
    config = json.loads((source / "config.json").read_text())
    widening = Widening(Shape.of(config), wide, device, dtype)
    torch.manual_seed(0)
    parts = widening.target(read_weights(source))
    write_target(source, out / "target", parts, wide_target_config(config, wide))


def write_target(
    source: Path, folder: Path, parts: Iterable[Weights], config: Mapping[str, Any]
) -> None:
    """Write a widened target in `folder`, a file for each of `parts`; the rest is of `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, part in enumerate(parts):
        name = f"model-{number:05d}.safetensors"
        write_weights(part, folder / name)
        places |= dict.fromkeys(part, name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    _write_json(folder / "config.json", config)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and not (folder / file.name).exists():
            shutil.copy(file, folder / file.name)


def head_config(folder: Path) -> dict[str, Any]:
    """A head's configuration in vLLM's own form; `vllm-graft train` writes that of speculators."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if (layer := found.get("transformer_layer_config")) is None:
        return found
    kept = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    names = {"architectures": ["LlamaForCausalLMEagle3"]}
    return {**layer, **names, **{name: found[name] for name in kept}}


def widen_draft(
    pair: Path, out: Path, wide: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write `out/eagle3`, the head of `pair` in a wide shape."""
    source, folder = pair / "eagle3", out / "eagle3"
    config = head_config(source)
    target = json.loads((pair / "target" / "config.json").read_text())
    # The head has one layer, and a number of layers of its target is only to be as before or more.
    small = Shape.of(config | {"num_hidden_layers": target["num_hidden_layers"]})
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    found = Widening(small, wide, device, dtype).draft(read_weights(source))
    write_weights(found, folder / "model.safetensors")
    # Without a choice vLLM takes layers by the target's number of layers, which has grown.
    layers = small.layers
    aux = {"eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3]}
    vocab = {"draft_vocab_size": wide.draft_vocab}
    _write_json(folder / "config.json", aux | widened_config(config, wide) | vocab)


def write_weights(weights: Weights, file: Path) -> None:
    """Write weights, which may be on a GPU."""
    stored = {name: weight.cpu().contiguous() for name, weight in weights.items()}
    save_file(stored, file, {"format": "pt"})


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")
