"""Tiny random checkpoints in the formats that vLLM loads; no network is used."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the target; a draft head shares those of one layer."""

    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 4
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    max_positions: int = 2048
    init_std: float = 0.08

    def aux_layers(self) -> list[int]:
        """Three different layers whose inputs EAGLE-3 reads. vLLM's default is the set (2, L // 2,
        L - 3), which has fewer than three members in a shallow model and makes the shape of ``fc``
        wrong; so the heads name theirs."""
        return [1, self.num_layers // 2, self.num_layers - 1]


TINY = TinyShape()
_TRAINING_TEXT = ("def main(argv):\n    return [int(x) for x in argv]\n", "The quick brown fox. ")


def write_tokenizer(folder: Path, vocab_size: int = TINY.vocab_size) -> None:
    """A byte-level BPE tokenizer of at most ``vocab_size`` entries; 0 is BOS and 1 is EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": TINY.max_positions,
        },
    )


def write_llama(folder: Path, shape: TinyShape = TINY, seed: int = 0) -> Path:
    """A random Llama target with its tokenizer. Returns ``folder``."""
    torch, randn = random_weights(seed, shape)
    vocab, hidden = shape.vocab_size, shape.hidden_size
    weights = {
        "model.embed_tokens.weight": randn(vocab, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": randn(vocab, hidden),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= layer_weights(prefix, shape, hidden, torch, randn)
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(hidden)
    config = model_config(shape, shape.num_layers, "LlamaForCausalLM")
    write_checkpoint(folder, weights, config)
    write_tokenizer(folder, vocab)
    return folder


def write_eagle(folder: Path, shape: TinyShape = TINY, seed: int = 1) -> Path:
    """A random EAGLE-1 head: no input norm, no final norm, embedding and lm_head of the target."""
    torch, randn = random_weights(seed, shape)
    weights = {
        "fc.weight": randn(shape.hidden_size, 2 * shape.hidden_size),
        **layer_weights("layers.0", shape, shape.hidden_size, torch, randn),
    }
    write_checkpoint(folder, weights, model_config(shape, 1, "EagleLlamaForCausalLM"))
    return folder


def write_eagle3(
    folder: Path, shape: TinyShape = TINY, draft_vocab_size: int | None = None, seed: int = 2
) -> Path:
    """A random EAGLE-3 head, with a reduced draft vocabulary if ``draft_vocab_size`` is given.
    ``d2t`` ``[draft_vocab_size]`` int64 then holds target id minus draft id, ``t2d``
    ``[vocab_size]`` bool marks the target ids that the head can draft."""
    torch, randn = random_weights(seed, shape)
    hidden, draft_vocab = shape.hidden_size, draft_vocab_size or shape.vocab_size
    weights = {
        "fc.weight": randn(hidden, 3 * hidden),
        **layer_weights("midlayer", shape, 2 * hidden, torch, randn),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": randn(draft_vocab, hidden),
    }
    if draft_vocab != shape.vocab_size:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(shape.vocab_size, generator=generator)
        hot = order[:draft_vocab].sort().values
        weights["d2t"] = hot - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
        weights["t2d"][hot] = True
    config = model_config(shape, 1, "LlamaForCausalLMEagle3") | {
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": shape.aux_layers(),
    }
    write_checkpoint(folder, weights, config)
    return folder


def random_weights(seed: int, shape: TinyShape) -> tuple[Any, Any]:
    """Return torch, and a function from sizes to a tensor of normal numbers of ``init_std``."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> Any:
        return torch.randn(*size, generator=generator) * shape.init_std

    return torch, randn


def layer_weights(
    prefix: str, shape: TinyShape, qkv_inputs: int, torch: Any, randn: Any
) -> dict[str, Any]:
    """Weights of one decoder layer without its input norm; attention reads ``qkv_inputs``."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        f"{prefix}.self_attn.q_proj.weight": randn(queries, qkv_inputs),
        f"{prefix}.self_attn.k_proj.weight": randn(keys, qkv_inputs),
        f"{prefix}.self_attn.v_proj.weight": randn(keys, qkv_inputs),
        f"{prefix}.self_attn.o_proj.weight": randn(hidden, queries),
        f"{prefix}.mlp.gate_proj.weight": randn(inner, hidden),
        f"{prefix}.mlp.up_proj.weight": randn(inner, hidden),
        f"{prefix}.mlp.down_proj.weight": randn(hidden, inner),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
    }


def model_config(shape: TinyShape, num_layers: int, architecture: str) -> dict[str, Any]:
    """What ``config.json`` says of a Llama of these sizes."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def write_checkpoint(folder: Path, weights: dict[str, Any], config: dict[str, Any]) -> None:
    """Write weights and ``config.json`` into a folder, which is made."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    _write_json(folder / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
