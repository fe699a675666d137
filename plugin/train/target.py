"""What the configuration and the files of a target say, before anything of it is loaded."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import reason_of, shown

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

_EMBEDDINGS = ("embed_tokens", "tok_embeddings", "word_embeddings", "wte", "embeddings")
_NORMS = ("norm", "final_layernorm", "final_norm", "norm_f", "ln_f")
_OUTPUTS = ("lm_head", "output", "embed_out")
"""Names of the layers at both ends of a model, the usual ones first."""

_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Numbers of configurations that multiply logits, with their exponents."""

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tekken.json")

STATES = 3
"""States of the target that a head reads."""


@dataclass(frozen=True)
class Target:
    """Facts of a target.

    Attributes:
        layers: of its decoder.
        aux: the layers whose inputs a head reads, which ascend; `layers` is the last one's output.
        layer: a layer of it as a Llama's configuration describes it, whose sizes a head has.
        embedding, norm, output: names of tensors; output is the embedding where they are tied.
        files: file of each of these.
        scale: factor of logits.
        softcap: logits stay within it; 0: no limit.
    """

    architectures: tuple[str, ...]
    revision: str | None
    layers: int
    layer: dict[str, Any]
    aux: tuple[int, ...]
    embedding: str
    norm: str
    output: str
    files: dict[str, str]
    scale: float = 1.0
    softcap: float = 0.0
    bytes_each: int = 2

    @classmethod
    def of(cls, model_config: Any) -> Self:
        """Read vLLM's ``ModelConfig`` and the names of the checkpoint's tensors. Raises
        `ConfigError`, which says why, if no head can be trained for it."""
        _require_trainable(model_config)
        text = model_config.hf_text_config
        layers, hidden = model_config.get_total_num_hidden_layers(), model_config.get_hidden_size()
        ffn, files = _fact(text, "intermediate_size"), _files(model_config)
        embedding, norm, output = _ends(files, str(model_config.model))
        taken = (embedding, output, norm, norm.removesuffix("weight") + "bias")
        scale = 1.0
        for name, power in _SCALES.items():
            scale *= float(_fact(text, name) or 1.0) ** power
        return cls(
            architectures=tuple(model_config.architectures),
            revision=model_config.revision,
            layers=layers,
            layer={
                "vocab_size": model_config.get_vocab_size(),
                "hidden_size": hidden,
                "intermediate_size": ffn if type(ffn) is int and ffn >= hidden else 4 * hidden,
                "num_attention_heads": text.num_attention_heads,
                "num_key_value_heads": model_config.get_total_num_kv_heads(),
                "head_dim": model_config.get_head_size(),
                "max_position_embeddings": _fact(text, "max_position_embeddings") or 4096,
                "rms_norm_eps": float(_fact(text, "rms_norm_eps") or 1e-5),
                "rope_parameters": {"rope_type": "default", "rope_theta": _theta(text)},
            },
            aux=read_layers(layers),
            embedding=embedding,
            norm=norm,
            output=output,
            files={name: files[name] for name in taken if name in files},
            scale=scale,
            softcap=float(_fact(text, "final_logit_softcapping") or 0.0),
            bytes_each=model_config.dtype.itemsize,
        )

    @property
    def hidden(self) -> int:
        return int(self.layer["hidden_size"])

    @property
    def vocab(self) -> int:
        return int(self.layer["vocab_size"])

    @property
    def taken(self) -> tuple[int, ...]:
        """Layers whose inputs are kept: those that a head reads, and the last one's output."""
        return tuple(sorted({*self.aux, self.layers}))

    @property
    def token_bytes(self) -> int:
        return len(self.taken) * self.hidden * self.bytes_each


def read_layers(count: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads: vLLM's choice, mended where that has equal ones."""
    found = {each for each in (2, count // 2, count - 3) if 0 < each < count}
    for each in (count - 1, 1, 0, count):
        if len(found) < STATES and 0 <= each <= count:
            found.add(each)
    return tuple(sorted(found))


def _require_trainable(model_config: Any) -> None:
    from vllm_graft.plan.planning import gives_states

    name = " ".join(model_config.architectures)
    if model_config.runner_type != "generate":
        raise ConfigError(f"MODEL is {name}, which writes no text: give a model that does.")
    if getattr(model_config, "use_mla", False):
        raise ConfigError(
            f"MODEL is {name}, whose attention is MLA: vLLM can't hand out the hidden states of "
            "such a model. Its own MTP module drafts for it; `vllm-graft plan MODEL` says how."
        )
    if not gives_states(model_config):
        raise ConfigError(
            f"MODEL is {name}, of which vLLM gives drafts no hidden states, so that no EAGLE-3 "
            "head could be served: use a standalone draft model or n-grams."
        )


def _fact(text: Any, name: str) -> Any:
    """A value of a configuration; None where there is none, or one for each layer."""
    try:
        return getattr(text, name, None)
    except Exception:  # Transformers' own, of configurations whose layers differ.
        return None


def _theta(text: Any) -> float:
    given = _fact(text, "rope_parameters")
    given = given if isinstance(given, Mapping) else {}
    # One set, or one for each kind of layer.
    for each in (given, *(value for value in given.values() if isinstance(value, Mapping))):
        if theta := each.get("rope_theta"):
            return float(theta)
    return float(_fact(text, "rope_theta") or 10000.0)


def checkpoint_file(model: str, revision: str | None, name: str) -> Path | None:
    """A file of a checkpoint, which may be fetched from the Hub; None if it has none so named."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            model, name, revision=revision, _raise_exceptions_for_missing_entries=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"MODEL {model}: {name} can't be read: {reason_of(error)}. Give a folder, or a "
            "repository that this machine reaches."
        ) from None
    return Path(found) if found else None


def _files(model_config: Any) -> dict[str, str]:
    model, revision = str(model_config.model), model_config.revision
    if index := checkpoint_file(model, revision, INDEX):
        return {**json.loads(index.read_text())["weight_map"]}
    if single := checkpoint_file(model, revision, SINGLE):
        return dict.fromkeys(header_of(single), SINGLE)
    raise ConfigError(
        f"MODEL {model} has neither {INDEX} nor {SINGLE}, of which training takes the embedding "
        "and the output layer: give a checkpoint in safetensors."
    )


def header_of(file: Path) -> dict[str, Any]:
    """What a file of safetensors says of its tensors."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        found: dict[str, Any] = json.loads(stream.read(size))
    return {name: each for name, each in found.items() if name != "__metadata__"}


def _ends(files: Mapping[str, str], model: str) -> tuple[str, str, str]:
    """Names of a decoder's embedding, last norm and output layer."""
    # A tower of images may have an embedding and norms as well; the decoder's lie side by side.
    for embedding in _ending(files, _EMBEDDINGS):
        stem = embedding.removesuffix(".weight").rpartition(".")[0]
        prefix = f"{stem}." if stem else ""
        norms = [f"{prefix}{name}.weight" for name in _NORMS if f"{prefix}{name}.weight" in files]
        if norms:
            output = next(_ending(files, _OUTPUTS), embedding)
            return embedding, norms[0], output
    some = shown(sorted(files)[:5])
    raise ConfigError(
        f"MODEL {model} has no embedding beside a last norm among its tensors ({some}, ...): "
        f"names like model.{_EMBEDDINGS[0]}.weight and model.{_NORMS[0]}.weight are looked for."
    )


def _ending(files: Mapping[str, str], names: tuple[str, ...]) -> Iterator[str]:
    """Tensors that end in one of some names, outside of layers; short ones first."""
    for name in names:
        found = (each for each in files if f".{each}".endswith(f".{name}.weight"))
        yield from sorted((each for each in found if ".layers." not in each), key=len)


def copy_tokenizer(model: str, revision: str | None, folder: Path) -> list[str]:
    """Copy a target's tokenizer beside its head: a head whose ids mean other tokens to a target
    than to the tokenizer beside it is refused when it is served."""
    names = []
    for name in _TOKENIZER:
        if file := checkpoint_file(model, revision, name):
            (folder / name).write_bytes(file.read_bytes())
            names.append(name)
    return names
