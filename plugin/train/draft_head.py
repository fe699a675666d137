"""An EAGLE-3 head (arXiv:2503.01840) that is trained, and the files that vLLM loads it from."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import reason_of, shown
from vllm_graft.train.lessons import Lesson
from vllm_graft.train.target import SINGLE as WEIGHTS
from vllm_graft.train.target import Target

Past = list[tuple[Tensor, Tensor]]
"""K and V ``[texts, heads, length, head]`` of each pass so far."""

DEPTH = 5
"""Tokens of a chain that a head's configuration asks for, if it was trained for as many."""


def head_config(target: Target, model: str, draft_vocab: int, passes: int) -> dict[str, Any]:
    """What ``config.json`` says of a head, in the form of the speculators project: it names the
    target, and the head has the sizes of a layer of it."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": min(DEPTH, passes)}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": model, "architectures": list(target.architectures)},
        },
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target.hidden,
        "eagle_aux_hidden_state_layer_ids": list(target.aux),
        "norm_before_residual": False,
        "dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            **target.layer,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    }


Layered = Mapping[str, Any]
"""Sizes of the head's layer, as a configuration of Transformers names them."""


def layer_of(config: Mapping[str, Any]) -> Layered:
    """The layer of a head's configuration, in the form of `head_config` or in vLLM's own."""
    found: Layered = config.get("transformer_layer_config", config)
    return found


def shifted(states: Tensor, count: int) -> Tensor:
    """Move ``[..., length, size]`` `count` places later; zeros come in."""
    return F.pad(states, (0, 0, count, 0))[..., : states.shape[-2], :]


class Attention(nn.Module):
    """Attention of one pass, to the keys that the same step of a real draft would see."""

    def __init__(self, layer: Layered, inputs: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
        self.head = layer["head_dim"]
        self.theta = (layer.get("rope_parameters") or layer)["rope_theta"]
        self.q_proj = nn.Linear(inputs, self.heads * self.head, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head, layer["hidden_size"], bias=False)

    def rotated(self, states: Tensor) -> Tensor:
        """Rotate ``[texts, heads, length, head]`` by the places 0, 1, ... (RoPE)."""
        half = self.head // 2
        steps = self.theta ** (-torch.arange(half, device=states.device) / half)
        angles = torch.arange(states.shape[2], device=states.device)[:, None] * steps
        cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
        left, right = states.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def forward(self, inputs: Tensor, past: Past) -> Tensor:
        """Attend from ``[texts, length, inputs]``; K and V of this pass are added to `past`. Row i
        of pass p belongs to a draft that began at place i - p. It sees the keys of pass 0 up to
        there, and then one key of each later pass: that of pass r at place i - p + r."""
        length, group = inputs.shape[1], self.heads // self.kv_heads
        q, k, v = (
            proj(inputs).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (each.repeat_interleave(group, 1) for each in (self.rotated(k), v))
        past.append((k, v))
        number = len(past) - 1
        q = self.rotated(q) / math.sqrt(self.head)
        first_k, first_v = past[0]
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-number)
        drafted = [
            (shifted(k, number - r), shifted(v, number - r)) for r, (k, v) in enumerate(past) if r
        ]
        scores = [(q @ first_k.mT).masked_fill(~seen, -1e4)]
        scores += [(q * k).sum(-1, keepdim=True).to(scores[0].dtype) for k, _ in drafted]
        weights = torch.cat(scores, -1).softmax(-1).to(v.dtype)
        out = weights[..., :length] @ first_v
        for place, (_, v) in enumerate(drafted, length):
            out = out + weights[..., place, None] * v
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


class Layer(nn.Module):
    """The head's layer, which reads a token's embedding beside its state."""

    def __init__(self, layer: Layered) -> None:
        super().__init__()
        hidden, eps = layer["hidden_size"], layer["rms_norm_eps"]
        self.self_attn = Attention(layer, 2 * hidden)
        self.mlp = LlamaMLP(SimpleNamespace(**{**layer, "hidden_act": "silu", "mlp_bias": False}))
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)

    def forward(self, embeds: Tensor, states: Tensor, past: Past) -> Tensor:
        inputs = torch.cat((self.input_layernorm(embeds), self.hidden_norm(states)), -1)
        states = states + self.self_attn(inputs, past)
        found: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


class Head(nn.Module):
    """The head. Its parameters have the names that vLLM's `Eagle3LlamaForCausalLM` loads. `config`:
    as of `head_config`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config, layer = config, layer_of(config)
        hidden, count = layer["hidden_size"], len(config["eagle_aux_hidden_state_layer_ids"])
        self.fc = nn.Linear(count * hidden, hidden, bias=False)
        self.midlayer = Layer(layer)
        self.norm = nn.RMSNorm(hidden, layer["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, config["draft_vocab_size"], bias=False)

    def forward(self, aux: Tensor, embeds: Tensor, passes: int) -> list[Tensor]:
        """Return normed states ``[texts, length, hidden]`` of each pass; `logits` reads them. `aux`
        ``[texts, length, layers * hidden]`` has the target's states at place i, `embeds` ``[texts,
        length, hidden]`` the token after it. What comes out at i is about the token after that one.
        A pass reads the states of the pass before, as drafting does ("training-time test")."""
        # Autocast would keep the sum of the layers in bfloat16.
        states = self.fc(aux).float()
        past: Past = []
        found = []
        for _ in range(passes):
            states = self.midlayer(embeds, states, past)
            found.append(self.norm(states))
            states = shifted(states, 1)
        return found

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[rows, draft_vocab]`` of states ``[rows, hidden]``."""
        found: Tensor = self.lm_head(states)
        return found


def save_head(head: Head, ids: Tensor, folder: Path) -> None:
    """Write a head that drafts the target's tokens `ids` ``[draft_vocab]``, which ascend."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: each.detach().bfloat16().cpu().contiguous() for name, each in head.named_parameters()
    }
    ids = ids.cpu()
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.isin(torch.arange(layer_of(head.config)["vocab_size"]), ids)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    # Some versions of safetensors write a file for its owner alone.
    (folder / WEIGHTS).chmod(0o644)
    (folder / "config.json").write_text(json.dumps(head.config, indent=1) + "\n")


def read_head(folder: Path) -> tuple[Head, Tensor]:
    """Read a head in float32, and the target's tokens that it drafts, int64 ``[draft_vocab]``.
    Raises `ConfigError` if there is none, or one of a form that `Head` does not have."""
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / WEIGHTS)
        rope = layer_of(config).get("rope_parameters") or {}
        if config.get("norm_before_residual") or rope.get("rope_type", "default") != "default":
            raise ValueError("its layer has norm_before_residual or a rope_type of its own")
        # The target's embedding is the head's too.
        weights = {name: each for name, each in weights.items() if "embed_tokens" not in name}
        offsets, _ = weights.pop("d2t"), weights.pop("t2d", None)
        head = Head(config)
        head.load_state_dict({name: each.float() for name, each in weights.items()})
    except Exception as error:  # Of files, JSON, safetensors, missing keys and wrong shapes.
        raise ConfigError(
            f"--start-from (of `vllm-graft learn`: --head) {shown(str(folder))} has no head that "
            f"training can go on with: {reason_of(error)}. Give the folder of one that `vllm-graft "
            "train` made."
        ) from None
    return head, offsets + torch.arange(len(offsets))


@dataclass(frozen=True)
class Agreement:
    """How often drafts of a head are accepted by depth, estimated on texts that it has not seen.

    Attributes:
        agree: share of the target's likeliest tokens that are the draft's too, where all earlier
            drafts of the chain agreed; the first draft leads.
        overlap: mean of sum(min(p, q)) over places, which is how often a sampled draft is accepted.
        length: mean acceptance length of a greedy chain over all depths, with the bonus token.
        rows: places that were looked at.
    """

    agree: list[float]
    overlap: list[float]
    length: float
    rows: int


@torch.no_grad()
def agreement(head: Head, lessons: Iterable[Lesson], passes: int) -> Agreement:
    """Compare a head with its target on texts of which each token was the target's own."""
    same, asked, shared = ([0.0] * passes for _ in range(3))
    rows = 0
    for lesson in lessons:
        rows += len(lesson.best)
        # Whether the draft agreed so far, for a chain that began so many places earlier.
        before = torch.ones_like(lesson.rows)
        on_gpu = lesson.aux.device.type == "cuda"
        with torch.autocast(lesson.aux.device.type, torch.bfloat16, enabled=on_gpu):
            for number, states in enumerate(head(lesson.aux, lesson.embeds, passes)):
                logits = head.logits(states[lesson.rows]).float()
                agree = logits.argmax(-1) == lesson.best
                live = before[lesson.rows]
                same[number] += (agree & live).sum().item()
                asked[number] += live.sum().item()
                drawn = torch.minimum(logits.softmax(-1), lesson.wanted.float())
                shared[number] += drawn.sum().item()
                held = torch.zeros_like(before)
                held[lesson.rows] = agree & live
                before = F.pad(held[:, :-1], (1, 0))
    agreed = [part / max(1.0, whole) for part, whole in zip(same, asked, strict=True)]
    length = 1 + sum(math.prod(agreed[: depth + 1]) for depth in range(passes))
    return Agreement(
        [round(each, 4) for each in agreed],
        [round(each / max(1, rows), 4) for each in shared],
        round(length, 3),
        rows,
    )
