"""What stands under ``graft.tree``."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, model_validator

from vllm_graft.base.options import Bytes, Count, EntryName, GraftSection, Section, Switch, truth
from vllm_graft.spec_decode.trees.tree import MAX_NODES, num_candidates


class MemoryConfig(Section):
    """Texts of finished and running requests, in which those of others are looked for."""

    bytes: Bytes = Field(default=ByteSize(64 << 20), gt=0)
    """Memory of each rank's device. A token takes 36.6 bytes; the oldest texts make room for new
    ones."""

    scope: Literal["tenant", "server"] = "tenant"
    """Requests that draft from each other's texts. ``tenant``: those with the same ``cache_salt``
    and LoRA adapter; those without either share, as in vLLM's prefix cache. ``server``: all."""

    corpora: tuple[str, ...] = ()
    """Files of texts that the server knows from its start on, as `corpora_bytes` has room for them:
    ``.jsonl`` with a text per line (a string, or an object with ``text``), else one text in UTF-8.
    Requests without a ``cache_salt`` and an adapter find what is in them, with scope ``server``
    all."""

    corpora_bytes: Bytes = Field(default=ByteSize(0), ge=0)
    """Memory of each rank's device for corpora, beside ``bytes``; 0 for none. A token takes 36.6
    bytes. A corpus stays until it is dropped."""

    prompts: Switch = False
    """Whether the last 1,024 tokens of each prompt are kept too, 64 of them in a step. False:
    answers, each with the last 8 tokens before it."""


def memory_section(value: object) -> object:
    """``true`` for all defaults, ``false`` and the scope ``request`` for none; also as the words of
    a command."""
    keys = MemoryConfig.model_fields.keys()
    if isinstance(value, dict) and value.get("scope") == "request" and value.keys() <= keys:
        return None
    given = truth(value)
    if isinstance(given, bool):
        return MemoryConfig() if given else None
    if value is None or isinstance(value, (dict, MemoryConfig)):
        return value
    raise ValueError("say true, false, or a mapping such as {'bytes': '64MiB'}")


MAX_LENGTH = 32
"""Longest match that is told from shorter ones."""

MAX_REFERENCE = 1 << 20
"""Most tokens of a reference."""


class NgramConfig(Section):
    """N-grams of a request's own text, prompt and answer, as drafts beside those of the draft."""

    min: Count = Field(default=3, ge=1, le=MAX_LENGTH)
    """Tokens at the end of the text that must have occurred before, at least (vLLM's
    ``prompt_lookup_min``)."""

    max: Count = Field(default=16, ge=1, le=MAX_LENGTH)
    """Tokens at the end of the text that are compared, at most (``prompt_lookup_max``); not below
    ``min``. How often a match of each length goes on as it did before is learned while serving;
    matches of ``max`` tokens or more share one rate."""

    reference: Count = Field(default=2048, ge=0, le=MAX_REFERENCE)
    """Tokens of a second text per request in which its end is looked for as well: what its JSON
    schema or its choices force, and the answer that ``graft_prediction`` predicts. No more than
    the context. 0: none."""

    def room(self, max_model_len: int) -> int:
        """Tokens that a reference may have: no answer is longer than a context."""
        return min(self.reference, max_model_len)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, and max is {self.max}: min must not exceed max")
        return self


def lengths_of(tree: Any, speculative: Any) -> NgramConfig:
    """The section of n-grams alone: vLLM's own keys in its ``SpeculativeConfig`` have the
    lengths."""
    lengths = {"min": speculative.prompt_lookup_min, "max": speculative.prompt_lookup_max}
    given = {} if tree.ngram is None else {"reference": tree.ngram.reference}
    return NgramConfig(**lengths, **given)


def ngram_section(value: object) -> object:
    """``true`` and ``auto`` for all defaults, ``false`` for none; also as the words of a
    command."""
    if value is None or isinstance(value, (dict, NgramConfig)):
        return value
    given = truth(value)
    if isinstance(given, bool):
        return NgramConfig() if given else None
    if isinstance(value, str) and value.lower() == "auto":
        return NgramConfig()
    raise ValueError("say true, false, or a mapping such as {'min': 3, 'max': 16}")


NAME = "tree"

MAX_STEPS = 32

HOT_TOKEN_SUFFIXES = (".json", ".pt", ".safetensors", ".txt")


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


class TreeConfig(GraftSection):
    """Trees of drafts. Given (even as ``{}``), they replace vLLM's chain of drafts."""

    NAME = NAME

    topk: Count = Field(default=8, ge=1, le=32)
    """Children that a node may get, and nodes that are expanded at each level."""

    steps: Count = Field(default=6, ge=1, le=MAX_STEPS)
    """Levels of the tree below its root; the draft model runs once per level."""

    nodes: Count | None = Field(default=None, ge=1, le=MAX_NODES)
    """Nodes of a tree; then ``num_speculative_tokens`` is its depth, the ``steps``. None:
    ``num_speculative_tokens`` is the number of nodes."""

    shape: Literal["fixed", "auto"] = "fixed"
    """``fixed``: every tree has the number of nodes, or as many as vLLM's
    ``num_speculative_tokens_per_batch_size`` says. ``auto``: chosen while serving, among shapes up
    to these bounds, by the measured cost of a step and the measured acceptance length. Levels of a
    draft with experts are narrower where nodes are few."""

    fallback: Literal["chain", "refuse"] = "chain"
    """For a target with layers on which no tree can be verified: ``chain`` drafts a chain as long
    as the tree is deep, which the target's own layers verify; ``refuse`` stops the start."""

    coupled: Switch = True
    """Rank the drafts of sampled requests by the draft's logits with the noise that the target
    will be sampled with, not by probability alone. Outputs are the same; more is accepted."""

    attention: Literal["auto", "triton", "flash"] = "auto"
    """How verified trees are attended. ``triton``: by one kernel. ``flash``: by FlashAttention 3
    over the keys before the tree, then by a small kernel over the tree's own. ``auto``: by what
    was measured to be faster when the engine started, where there is FlashAttention 3."""

    mixed_graphs: Switch | None = None
    """Whether steps with prompts beside trees run as one CUDA graph as well, where vLLM launches
    them piece by piece. None: where that is possible and cudagraph_mode captures mixed batches."""

    fit_graphs: Switch = True
    """Whether trees beside prompts are cut to their best nodes where the step would have more rows
    than the largest CUDA graph with all nodes, and fit one with fewer. Outputs are the same."""

    fit_prompts: Switch = True
    """Whether prompts are computed in chunks that fit the largest CUDA graph, where up to three of
    its replays do what would be one step without a graph."""

    hot_tokens: Annotated[int | str | None, BeforeValidator(_hot_tokens)] = None
    """Tokens that the levels of a tree choose from. A number: so many of the draft's vocabulary,
    learned while serving and used while they hold nearly all that is emitted. A file: these token
    ids, always (a JSON list, one id per line in .txt, or a 1-D integer tensor in .pt or
    .safetensors). None: the draft's whole vocabulary."""

    learn_salted: Switch = True
    """Whether the texts of requests with a ``cache_salt`` count for learned hot tokens. False:
    nothing of such a text decides what other requests draft from."""

    head_dtype: Literal["auto", "fp8"] = "auto"
    """What drafts are chosen by. ``fp8``: the draft's output head in FP8 (e4m3, with one scale per
    token), which ``quantization`` of the speculative config leaves out. ``auto``: the head as it
    is loaded."""

    draft_window: Count | None = Field(default=None, ge=1, le=1 << 20)
    """Tokens before a tree that the draft's own attention sees, besides the first block of the
    text; more of them as far as their block begins earlier. The target sees all tokens, so that
    answers are the same. None: the draft sees all tokens, too."""

    ngram: Annotated[NgramConfig | None, BeforeValidator(ngram_section)] = None
    """Drafts from n-grams: where the end of a request's text has occurred in it before, what came
    then joins the tree beside what the draft model drafts. ``true``: with all defaults."""

    memory: Annotated[MemoryConfig | None, BeforeValidator(memory_section)] = None
    """N-grams of what other requests said: answers are kept on the device, and their continuations
    join the tree as those of a request's own text do. Needs ``ngram``, or method ``ngram``.
    ``true``: with all defaults."""

    recurrent: Switch | None = None
    """Whether targets with recurrent layers get trees. None: those with the gated delta rule do
    (Qwen3-Next, Qwen3.5). True: those with Kimi delta attention (Kimi Linear) or Mamba-2
    (Nemotron-H, Falcon-H1, Granite 4.0-H) as well. Others get what ``fallback`` says; with false
    all do. vLLM holds memory for a state of each node and request."""

    recurrent_form: Literal["auto", "states", "inputs"] = "auto"
    """What recurrent layers leave of each node until a path is accepted. ``states``: the state
    behind it, as vLLM's chains. ``inputs``: what the layer was given there; the accepted path's
    state is made of it. ``auto``: inputs where that moves fewer bytes."""

    drafter: EntryName | None = None
    """Name of a ``graft_drafters`` entry. None: the one that drafts with the speculative config's
    method."""

    policy: EntryName = "dynamic"
    """Name of a ``graft_tree_policies`` entry: ``dynamic``, ``whole`` (no shape of ``auto`` is
    smaller than ``topk`` and ``steps``), or a plugin's."""

    graph_runner: EntryName = "cuda_graph"
    """Name of a ``graft_draft_graph_runners`` entry. ``cuda_graph`` pads batches to the next
    captured size; ``verify`` compares the first replay of each size with launches, and gives a size
    that differs no graph (``graft_info()`` lists both); ``eager`` captures nothing."""

    @property
    def num_candidates(self) -> int:
        """Nodes that a tree of these bounds holds."""
        return num_candidates(self.topk, self.steps)
