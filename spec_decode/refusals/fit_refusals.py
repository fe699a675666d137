"""Drafts that were made for another target, found by what both configurations say. What a
configuration leaves open is never refused. VLLM itself looks at the vocabulary of ``draft_model``
alone: other sizes end an engine in its first step, or pass and draft badly."""

import filecmp
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import target_of
from vllm_graft.base.refusal import Refusals, sentences
from vllm_graft.base.values import shown
from vllm_graft.spec_decode.config.tree_config import TreeConfig

_FILES = ("tokenizer.json", "vocab.json")
"""Files that have each token with its id. They are compared with their own kind alone, as others
write the same token in another way."""


@functools.cache
def differing(
    one: str, other: str, revisions: tuple[str | None, ...]
) -> dict[int, tuple[str, str]]:
    """Find the ids that are another token in another checkpoint. Returns the tokens in both, by
    their id. Empty if one of them has no tokenizer of its own, and for tokens that only one of them
    has. `one`: a folder, or a repository of the Hub, of which files on this machine are read.
    `other`: likewise. `revisions`: of both."""
    for name in _FILES:
        own, theirs = (_file(*each, name) for each in zip((one, other), revisions))
        if own is None or theirs is None:
            continue
        if filecmp.cmp(own, theirs, shallow=False):
            break
        first, second = _tokens(own), _tokens(theirs)
        shared = sorted(first.keys() & second.keys())
        return {id: (first[id], second[id]) for id in shared if first[id] != second[id]}
    return {}


def _file(checkpoint: str, revision: str | None, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    if (file := Path(checkpoint, name)).is_file():
        return file
    try:
        cached = try_to_load_from_cache(checkpoint, name, revision=revision)
    except ValueError:  # It is no name of a repository.
        return None
    return Path(cached) if isinstance(cached, str) else None


def _tokens(file: Path) -> dict[int, str]:
    """The tokens by their ids; none of a file in another form."""
    try:
        return {id: token for token, id in _pairs(json.loads(file.read_bytes())) if type(id) is int}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _pairs(read: Any) -> Iterator[tuple[str, int]]:
    vocabulary = read["model"]["vocab"] if "model" in read else read
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:
        yield from ((token, id) for id, (token, *_) in enumerate(vocabulary))
    yield from ((each["content"], each["id"]) for each in read.get("added_tokens", ()))


_DRAFT = "speculative_config.model"
_OTHER = f"set `{_DRAFT}` to a draft that was made for this target, or drop `--speculative-config`"

PADDING = 256
"""Tokens by which vocabularies may differ: heads are used with fine-tuned targets that have a few
tokens more, and some checkpoints pad their tables."""

_OF_STATES = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Methods whose drafts read states of the target."""

_SIZE_OF_TARGET = ("DFlashLagunaForCausalLM",)
"""Drafts whose classes take the target's own size of states (laguna_dflash.py)."""

CRASHES = Refusals()
"""Drafts with which stock vLLM ends in its first step as well."""


def _models(vllm_config: Any) -> tuple[Any, Any]:
    """Model configurations of draft and target; both None where they are one or one is missing."""
    draft, target = vllm_config.speculative_config.draft_model_config, target_of(vllm_config)
    known = draft is not None and target is not None and draft is not target
    return (draft, target) if known else (None, None)


def _number(config: Any, *names: str) -> int:
    """The first positive integer of a configuration under some names; 0 if it has none."""
    values = (getattr(config, name, None) for name in names)
    found: int = next((each for each in values if type(each) is int and each > 0), 0)
    return found


def _text(model: Any) -> Any:
    return getattr(model, "hf_text_config", None)


@CRASHES.row(
    "drafts made for targets of another hidden size",
    "The draft can't read this target's states: vLLM stops at the first request, also without "
    "trees.",
    _OTHER,
)
def _states(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    draft, target = _models(vllm_config)
    if draft is None or vllm_config.speculative_config.method not in _OF_STATES:
        return
    if set(getattr(draft, "architectures", None) or ()).intersection(_SIZE_OF_TARGET):
        return
    # As the models' classes read it: EAGLE-3, DFlash and DSpark, then Gemma 4's assistants.
    own = _number(draft.hf_config, "target_hidden_size", "backbone_hidden_size")
    own, size = own or _number(_text(draft), "hidden_size"), _number(_text(target), "hidden_size")
    if own and size and own != size:
        yield f"The draft reads states of {own} numbers, but the target's hidden_size is {size}"


@CRASHES.row(
    "drafts that read layers which the target does not have",
    "The draft gets fewer states than it reads: vLLM stops at the first request, also without "
    "trees.",
    _OTHER,
)
def _layers(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    draft, target = _models(vllm_config)
    if draft is None or not (count := _number(_text(target), "num_hidden_layers")):
        return
    # Layer 0 is the embedding; the state behind the last layer has the number of layers.
    if beyond := [layer for layer in _captured(draft.hf_config) if layer > count]:
        yield f"The draft reads the state behind layer {beyond[0]}, but the target has {count}"


def _captured(config: Any) -> list[int]:
    """The layers of the target that a draft reads, as in vLLM's eagle3_utils.py; those of DFlash
    and DSpark are counted from 0."""
    nested = getattr(config, "dflash_config", None)
    nested = nested if isinstance(nested, Mapping) else {}
    for layers, first in (
        (getattr(config, "eagle_aux_hidden_state_layer_ids", None), 0),
        (nested.get("target_layer_ids"), 1),
        (getattr(config, "target_layer_ids", None), 1),
    ):
        if isinstance(layers, (list, tuple)) and layers:
            return [layer + first for layer in layers if type(layer) is int]
    return []


DRIFTS = Refusals()
"""Drafts that are valid for vLLM and propose tokens of another model."""


@DRIFTS.row(
    "drafts made for another vocabulary",
    "The draft's tokens mean something else to the target, so that next to none is accepted.",
    _OTHER,
)
def _vocabulary(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """Drafts whose vocabulary is not the target's, of which theirs may be a part (d2t)."""
    draft, target = _models(vllm_config)
    own, size = _number(_text(draft), "vocab_size"), _number(_text(target), "vocab_size")
    # A DSpark draft may bring tokens of its own.
    larger = vllm_config.speculative_config.method == "dspark" and own > size
    if own and size and abs(own - size) > PADDING and not larger:
        yield f"The draft's vocab_size is {own}, but the target's is {size}"


@DRIFTS.row(
    "drafts made for another tokenizer",
    "The draft's tokens mean something else to the target, so that next to none is accepted.",
    f"{_OTHER}; if it was made for this target, remove the tokenizer from its folder",
)
def _tokenizer(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """Drafts beside which there is a tokenizer whose ids are other tokens than the target's."""
    draft, target = _models(vllm_config)
    if draft is None or getattr(vllm_config.speculative_config, "use_heterogeneous_vocab", False):
        return
    # To vLLM the draft's tokenizer is the target's.
    revisions = target.tokenizer_revision, draft.revision
    found = differing(str(target.tokenizer), str(draft.model), revisions)
    if len(found) > PADDING:
        id, (theirs, own) = next(iter(found.items()))
        yield (
            f"The tokenizer beside the draft is another than the target's: {len(found)} ids are "
            f"other tokens, as {id}, which is {shown(own)} to the draft and {shown(theirs)} to the "
            "target"
        )


def require_fit(vllm_config: Any) -> None:
    """Raise a `ConfigError` for a draft with which any engine would stop in its first step."""
    if found := list(sentences(CRASHES, TreeConfig(), vllm_config)):
        raise ConfigError("\n  ".join([f"{_DRAFT} is a draft for another target:", *found]))
