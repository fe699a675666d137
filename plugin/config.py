"""The configuration: what stands under ``graft`` in vLLM's ``--additional-config``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic import ValidationError as PydanticError

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import below, require_plain, several, shown
from vllm_graft.spec_decode.trees.shape import num_candidates

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from vllm.config import VllmConfig

KEY = "graft"
FLAG = f"--additional-config.{KEY}"

_ELSEWHERE = {
    "hicache": " The host KV cache is a KV connector: its keys stand in kv_connector_extra_config "
    "of --kv-transfer-config."
}
"""Parts that are not switched on here."""

HOT_TOKEN_SUFFIXES = (".json", ".pt", ".safetensors", ".txt")


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


def _hot_tokens(value: object) -> object:
    """A number, also one in digits as the dotted command line gives it, or a file's name."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    is_number = type(value) is int and value > 0
    is_file = isinstance(value, str) and value.endswith(HOT_TOKEN_SUFFIXES)
    if value is None or is_number or (is_file and "\0" not in str(value)):
        return value
    endings = ", ".join(HOT_TOKEN_SUFFIXES)
    raise ValueError(f"say how many tokens to learn, or a file whose name ends in {endings}")


Count = Annotated[int, BeforeValidator(_not_bool)]
Patches = Annotated[Count, Field(ge=1, le=65536)]
EntryName = Annotated[str, StringConstraints(min_length=1)]


class Part(BaseModel):
    """Base of every part's model: frozen, hashable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EagleConfig(Part):
    """Tree EAGLE. Given (even as ``{}``), it replaces vLLM's chain of drafts by a tree."""

    topk: Count = Field(default=8, ge=1, le=32)
    """Children that a node may get, and nodes that are expanded at each level."""

    steps: Count = Field(default=6, ge=1, le=32)
    """Levels of the tree below its root; one pass of the draft model each."""

    tree: Literal["fixed", "auto"] = "fixed"
    """``fixed``: every tree has ``num_speculative_tokens`` nodes, or as many as vLLM's
    ``num_speculative_tokens_per_batch_size`` says. ``auto``: chosen while serving, among shapes up
    to these bounds, by the measured cost of a step and the measured acceptance length."""

    coupled: bool = True
    """Rank the drafts of sampled requests by the draft's logits with the noise that the target
    will be sampled with, not by probability alone. Outputs are the same; more is accepted."""

    attention: Literal["auto", "triton", "flash"] = "auto"
    """How verified trees are attended. ``triton``: by one kernel. ``flash``: by FlashAttention 3
    over the keys before the tree, then by a small kernel over the tree's own. ``auto``: by what
    was measured to be faster when the engine started, where there is FlashAttention 3."""

    mixed_graphs: bool | None = None
    """Whether steps with prompts beside trees run as one CUDA graph as well, where vLLM launches
    them piece by piece. None: where that is possible and cudagraph_mode captures mixed batches."""

    hot_tokens: Annotated[int | str | None, BeforeValidator(_hot_tokens)] = None
    """Tokens that the levels of a tree choose from. A number: so many of the draft's vocabulary,
    learned while serving and used while they hold nearly all that is emitted. A file: these token
    ids, always (a JSON list, one id a line in .txt, or a 1-D integer tensor in .pt or
    .safetensors). None: the draft's whole vocabulary."""

    head_dtype: Literal["auto", "fp8"] = "auto"
    """What drafts are chosen by. ``fp8``: the draft's output head in FP8 (e4m3, a scale a token),
    which ``quantization`` of the speculative config leaves out. ``auto``: as it is loaded."""

    proposer: EntryName = "tree"
    """Name of a ``graft_proposers`` entry."""

    policy: EntryName = "dynamic"
    """Name of a ``graft_tree_policies`` entry."""

    graph_runner: EntryName = "cuda_graph"
    """Name of a ``graft_draft_graph_runners`` entry."""

    @property
    def max_nodes(self) -> int:
        """Non-root nodes a full tree holds: ``topk``, then ``topk`` children of ``topk`` nodes."""
        return num_candidates(self.topk, self.steps)


class DraftConfig(Part):
    """Graphs of a standalone draft model (``method: draft_model``). Given (even as ``{}``), the
    loop over it runs as CUDA graphs."""

    extend: bool = True
    """Whether the first pass, over the tokens that were accepted, is captured as well, where the
    attention backend is FLASH_ATTN or TRITON_ATTN."""

    graph_runner: EntryName = "cuda_graph"
    """Name of a ``graft_draft_graph_runners`` entry."""


class VitConfig(Part):
    """Vision-encoder graphs. Given (even as ``{}``), they replace vLLM's own."""

    runner: EntryName = "cuda_graph"
    """Name of a ``graft_vit_graph_runners`` entry."""

    memory: Count = Field(default=512, ge=32, le=65536)
    """MiB that the graphs may take, static buffers and pool together."""

    verify: bool = True
    """Whether each graph's first replay is compared with the eager pass."""

    fuse: bool | None = None
    """Whether norms, rotations and gates of the tower's blocks run as fewer kernels in graphs. None
    is where that has the same bits, which is tried at the start; true refuses to start without."""

    min_hits: Count = Field(default=2, ge=1, le=1000)
    """Times that a layout is seen before it gets a graph of its own."""

    max_patches: Count | None = Field(default=None, ge=64, le=65536)
    """Patches of the largest graph; None is what fits and pays, 8192 at most."""

    buckets: tuple[Patches, ...] | None = None
    """Patches of the padded graphs; None is steps of 1.25, an empty list none."""

    capture_share: float = Field(default=0.019, ge=0, le=1)
    """Most of the wall time that captures may take while serving; 0: at the start only, 1: all."""


class GraftConfig(Part):
    """Everything under ``graft``; a part that is None is off."""

    eagle: EagleConfig | None = None
    vit: VitConfig | None = None
    draft: DraftConfig | None = None

    @classmethod
    def parse(cls, values: object) -> GraftConfig:
        """Validate what stands under ``graft``.

        Numbers may be strings of digits, as the dotted command line gives them.

        Raises:
            ConfigError: with a line for each wrong key: its full flag, the value, what is allowed.
        """
        require_plain(values, FLAG)
        try:
            return cls.model_validate(values)
        except PydanticError as error:
            lines = [_explain(cls, details) for details in error.errors()]
            raise ConfigError(several(lines)) from None

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> GraftConfig | None:
        """The configuration in ``vllm_config.additional_config``; None without a ``graft`` key."""
        additional = vllm_config.additional_config
        if not isinstance(additional, Mapping) or KEY not in additional:
            return None
        return cls.parse(additional[KEY])


def flag(*path: str | int) -> str:
    """The command-line flag of a key: ``flag("eagle", "topk")``."""
    return below(FLAG, *path)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with a leading blank, or the known names when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names) or 'none'}."


def _explain(model: type[Part], details: ErrorDetails) -> str:
    """One sentence for one of pydantic's errors."""
    path, value = details["loc"], details["input"]
    if details["type"] == "extra_forbidden":
        known = _model_at(model, path[:-1]).model_fields
        hint = _ELSEWHERE.get(str(path[-1])) or did_you_mean(str(path[-1]), known)
        return f"{flag(*path)}: unknown key.{hint}"
    context = details.get("ctx", {})
    reason = str(context["error"]) if "error" in context else details["msg"]
    return f"{flag(*path)}: {shown(value)} is refused: {reason}.{_allowed(model, path)}"


def _allowed(model: type[Part], path: tuple[str | int, ...]) -> str:
    """`` Allowed: 1 to 32.`` for a number, a model's keys for a part, else nothing."""
    if not path:
        return f" Allowed: a mapping with the keys {', '.join(model.model_fields)}."
    if isinstance(path[-1], int):
        path = path[:-1]  # A member of a list: the list's own bounds are told.
    parent = _model_at(model, path[:-1])
    field = parent.model_fields[str(path[-1])]
    low = [rule.ge for rule in field.metadata if hasattr(rule, "ge")]
    high = [rule.le for rule in field.metadata if hasattr(rule, "le")]
    if low and high:
        return f" Allowed: {low[0]} to {high[0]}."
    part = _part_type(field.annotation)
    return f" Allowed: a mapping with the keys {', '.join(part.model_fields)}." if part else ""


def _model_at(model: type[Part], path: Iterable[str | int]) -> type[Part]:
    """The model that validates the mapping found at ``path``."""
    for name in path:
        part = _part_type(model.model_fields[str(name)].annotation)
        assert part is not None, f"{name} holds no mapping"
        model = part
    return model


def _part_type(annotation: Any) -> type[Part] | None:
    """``EagleConfig`` out of ``EagleConfig | None``; None where there is no model."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Part):
            return candidate
    return None
