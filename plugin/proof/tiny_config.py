"""A tiny configuration of a model's family: one period of its kinds of layers, small sizes. Sizes
of a head, of latents and of states stay as they are, because kernels are chosen by them.
Quantization goes, as the weights are random."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

VOCABULARY = 12
"""So few tokens that drafts of random weights are often right by chance."""

TEXT_TOKENS = range(2, 8)
"""Tokens without a meaning, of which prompts are made."""

_WINDOW = 64
"""Most tokens of a window or chunk; the proof's texts have several."""

_LEAST_LAYERS = 4
"""EAGLE-3 heads read the inputs of three layers, none of them the first."""

_WIDTH = 128
_HEADS, _LATENT_HEADS = 2, 16
_EXPERTS = 8
"""All are chosen for each token, because rounding must not choose another one."""

_DROPPED = frozenset({"quantization_config", "compression_config", "auto_map"})
_TEXTS = ("text_config", "transformer_layer_config", "llm_config")
_PERIOD = re.compile(r"(_interval|_pattern|_period|_layer_step)$")
_SPECIAL = re.compile(r"_token(_id|_ids)$")
_EXPERT_COUNT = re.compile(
    r"^(n_routed_experts|num_(local_)?experts|moe_num_experts|num_experts_per_tok(en)?"
    r"|experts_per_token|moe_k|moe_topk|moe_top_k|top_k_experts)$"
)
_LAYER_IDS = re.compile(r"layer_ids$")

_AT_MOST: dict[str, int] = {
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "intermediate_size_mlp": _WIDTH,
    "q_lora_rank": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 4,
    "sliding_window": _WINDOW,
    "attention_chunk_size": _WINDOW,
    "n_group": 1,
    "topk_group": 1,
    "n_groups": 1,
    "first_k_dense_replace": 1,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": VOCABULARY - 3,
}


class TinyConfig:
    """Makes the configurations of a target and of its draft, which fit together. `target`: what the
    target's ``config.json`` holds. `draft`: what the draft's holds; None without a draft model."""

    def __init__(self, target: Mapping[str, Any], draft: Mapping[str, Any] | None = None) -> None:
        self._target, self._draft = target, draft
        text = text_of(target)
        read = max(map(len, _layer_ids(draft or {})), default=0)
        self.num_layers = max(_LEAST_LAYERS, read + 1, _period(text))
        heads = _heads(text)
        self.hidden_size = max(_WIDTH, heads * (_head_dim(text) or 0) if heads == _HEADS else 0)
        self._tokens: dict[int, int] = {}

    def target(self) -> dict[str, Any]:
        return self._shrunk(self._target)

    def draft(self, method: str) -> dict[str, Any]:
        """The configuration of the draft of a method of vLLM's ``speculative_config``."""
        assert self._draft is not None
        made = self._shrunk(self._draft)
        if method == "eagle3":
            # vLLM's default is not three different layers in a shallow target.
            made["eagle_aux_hidden_state_layer_ids"] = self._spread(3)
        return made

    def _spread(self, count: int) -> list[int]:
        """So many different layers, none of them the first."""
        return [1 + place * (self.num_layers - 1) // count for place in range(count)]

    def _shrunk(self, config: Mapping[str, Any]) -> dict[str, Any]:
        total = config.get("num_hidden_layers")
        made: dict[str, Any] = {}
        for name, value in config.items():
            if isinstance(value, Mapping) and name not in _DROPPED:
                inner = _vision if "vision" in name else TinyConfig._shrunk
                made[name] = inner(self, value)
            elif name not in _DROPPED:
                made[name] = self._value(name, value, total)
        if "num_attention_heads" in config and "kv_lora_rank" not in config:
            made.setdefault("head_dim", _head_dim(config))
        return made | self._of_heads(config)

    def _of_heads(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers of heads, with groups of them where the model has groups."""
        found: dict[str, Any] = {}
        for name in config:
            if name.endswith(("num_attention_heads", "num_key_value_heads")):
                grouped = config[name] != config.get("num_attention_heads", config[name])
                found[name] = 1 if grouped and "key_value" in name else _heads(config)
        return found

    def _value(self, name: str, value: Any, total: int | None) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if name == "num_hidden_layers" or name == "max_window_layers":
            return min(value, self.num_layers)
        if name == "num_target_layers":
            return self.num_layers
        if name in ("hidden_size", "target_hidden_size"):
            return self.hidden_size
        if _EXPERT_COUNT.match(name):
            return _EXPERTS
        if name in _AT_MOST:
            return min(value, _AT_MOST[name])
        if _LAYER_IDS.search(name):
            return self._spread(len(value))
        if _SPECIAL.search(name):
            return self._token(name, value)
        if name == "layer_types" or (isinstance(value, (list, str)) and len(value) == total):
            return value[: min(total or self.num_layers, self.num_layers)]
        return value

    def _token(self, name: str, value: Any) -> Any:
        if name.startswith(("bos", "eos", "pad")):
            return 1 if name.startswith("eos") else 0
        if isinstance(value, list):
            return [self._token(name, each) for each in value]
        return self._tokens.setdefault(value, VOCABULARY - 1 - len(self._tokens))


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the language model."""
    return next((config[name] for name in _TEXTS if name in config), config)


def _vision(tiny: TinyConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    """A vision encoder of two layers, whose heads keep their size."""
    heads = config.get("num_heads") or config.get("num_attention_heads") or 1
    sizes = {
        "depth": 2,
        "num_hidden_layers": 2,
        "num_heads": _HEADS,
        "num_attention_heads": _HEADS,
        "hidden_size": config.get("hidden_size", 0) // heads * _HEADS,
        "intermediate_size": _WIDTH,
        "out_hidden_size": tiny.hidden_size,
        "deepstack_visual_indexes": [0, 1][: len(config.get("deepstack_visual_indexes", ()))],
        "fullatt_block_indexes": [1],
    }
    return {**config, **{name: each for name, each in sizes.items() if name in config}}


def _heads(config: Mapping[str, Any]) -> int:
    return _LATENT_HEADS if "kv_lora_rank" in config else _HEADS


def _head_dim(config: Mapping[str, Any]) -> int | None:
    if (found := config.get("head_dim")) is not None or "num_attention_heads" not in config:
        return found
    size: int = config["hidden_size"] // config["num_attention_heads"]
    return size


def _layer_ids(config: Mapping[str, Any]) -> Iterator[list[int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _layer_ids(value)
        elif _LAYER_IDS.search(name) and isinstance(value, list):
            yield value


def _period(config: Mapping[str, Any]) -> int:
    """How many of the first layers hold each kind of them."""
    total = config.get("num_hidden_layers") or 0
    found = [1]
    for name, value in config.items():
        if name == "layer_types" or (isinstance(value, (list, str)) and len(value) == total):
            kinds = [str(each) for each in value]
            found.append(max(kinds.index(kind) for kind in set(kinds)) + 1)
        elif _PERIOD.search(name) and isinstance(value, int) and value < total:
            found.append(value)
    return max(found)
