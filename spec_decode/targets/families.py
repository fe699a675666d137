"""Which family serves which layer of a loaded model, and the features that a family must serve."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_graft.base.errors import ConfigError
from vllm_graft.hooks import entries, manager
from vllm_graft.hooks.feature import Feature, if_model_has
from vllm_graft.seams.permission import require_seams
from vllm_graft.spec_decode.targets.dense.dense_features import DENSE
from vllm_graft.spec_decode.targets.latent.latent_features import LATENT
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import RECURRENT

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables

    from vllm_graft.base.refusal import Refusal
    from vllm_graft.seams.ledger.entry import Seam
    from vllm_graft.spec_decode.verification.context import TreeContext, VerifyStep

_OWN = re.compile(r"^class (\w*Attention\w*)\([^)]*\bAttentionLayerBase\b", re.MULTILINE)
"""A class of attention that is none of vLLM's own; those of caches beside one have other names."""

_KNOWN = ("MultiHeadLatentAttention",)
"""Classes of this kind that a family of ours claims: Kimi Linear's MLA."""


def own_attention(model: Any) -> str:
    """What a model has of attention classes of its own, as the words after "The target"; empty for
    none, and for classes that are not vLLM's. Files are read, and nothing is imported."""
    text = getattr(model, "hf_text_config", None)
    names = [*(getattr(model, "architectures", None) or ())]
    names += getattr(text, "architectures", None) or ()
    found = [each for name in names for each in _declared(name)]
    return f"has attention layers of a class of its own ({found[0]})" if found else ""


@functools.cache
def _declared(architecture: str) -> tuple[str, ...]:
    """The classes in the file, or the package, of the model that vLLM has for an architecture."""
    from vllm.model_executor.models import ModelRegistry

    module = getattr(ModelRegistry.models.get(architecture), "module_name", "")
    package, _, rest = module.partition(".")
    spec = find_spec("vllm")
    if package != "vllm" or spec is None or not spec.submodule_search_locations:
        return ()
    path = Path(spec.submodule_search_locations[0], *rest.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    texts = (file.read_text(encoding="utf-8") for file in files if file.is_file())
    found = {name for text in texts for name in _OWN.findall(text)}
    return tuple(sorted(found.difference(_KNOWN)))


class TargetState(Protocol):
    """What the layers of one family cache, before and after a pass over trees. `reads_rows` says
    whether a pass without drafts reads the context's `rows`, too, with one token per request."""

    reads_rows: bool = True

    def fork(self, step: VerifyStep) -> None:
        """Before the pass: make room for what differs between branches; by default nothing."""
        return

    def commit(self, path: torch.Tensor, step: VerifyStep) -> None:
        """After verification: leave what a chain of the accepted tokens would have left. `path` is
        int32 ``[max_reqs, num_nodes + 1]``, accepted nodes of each request of the batch; the step's
        ``num_sampled`` says how many of them count."""


class TargetFamily(Protocol):
    """How trees are verified on one kind of attention layer."""

    def claims(self, layer: Any) -> bool:
        """Whether a layer, one of vLLM's ``AttentionLayerBase``, is of this family's kind."""

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        """Make the layer `name` serve tree rows besides what it does already. The levels of the
        draft's layers (`is_draft`) read a scratch of K/V. Raises `ConfigError` if the layer's
        backend or cache is one that can't be read."""

    def state(
        self, layers: Mapping[str, Any], kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> TargetState:
        """Make the state of the target's layers of this family, whose ``kv_cache`` is bound."""


FEATURES: tuple[Feature, ...] = (
    *RECURRENT,
    *LATENT,
    Feature(
        "an encoder and a decoder",
        "Nobody has tried cross attention with trees.",
        in_model=if_model_has("is_encoder_decoder", "is an encoder-decoder"),
        chain=False,
    ),
    Feature(
        "attention layers of classes that no family knows",
        "Nobody knows how they read their cache, or which rows they compute together.",
        in_model=own_attention,
    ),
    *DENSE,
)


def unserved_in_model(model: Any, served: Collection[str]) -> Iterator[tuple[Feature, str]]:
    """The features of a model that are not served, each with the words of ``Feature.in_model``."""
    for feature in FEATURES:
        if feature.name not in served and (says := feature.in_model(model)):
            yield feature, says


def in_layer(layer: Any) -> list[str]:
    """Names of the features that a loaded layer has."""
    if not hasattr(layer, "impl"):
        return []  # A recurrent layer, whose kind its family knows.
    return [feature.name for feature in FEATURES if feature.in_layer(layer)]


HOOK = "graft_target_families"


@dataclass(frozen=True)
class Served:
    """A family, the features that it serves, and a third party's rows of the ledger."""

    family: TargetFamily
    features: Collection[str]
    seams: tuple[Seam, ...] = ()


def served_features() -> set[str]:
    """Features that some family serves; loads no family."""
    return {name for entry in _entries() for name in entry.serves}


def families() -> list[Served]:
    """Load the families, third parties' before ours."""
    return [Served(entry.resolve()(), entry.serves, entry.own_seams()) for entry in _entries()]


def family_refusals() -> tuple[Refusal, ...]:
    """What trees on single families cannot be combined with; loads no family."""
    return tuple(row for entry in _entries() for row in entry.own_refusals())


def _entries() -> list[entries.TargetFamily]:
    offered = [offer.entry for offer in manager.manager().offers(HOOK)]
    return [entry for entry in offered if isinstance(entry, entries.TargetFamily)]


def family_of(name: str, layer: Any, among: Sequence[Served]) -> TargetFamily:
    """The first family that claims a layer and serves all of its features, else a `ConfigError`."""
    claiming = [served for served in among if served.family.claims(layer)]
    if not claiming:
        raise ConfigError(
            f"--additional-config.graft.tree does not support layers like {name}, a "
            f"{type(layer).__name__}: remove the graft.tree keys to draft chains"
        )
    has = in_layer(layer)
    for served in claiming:
        if all(feature in served.features for feature in has):
            return served.family
    known = {feature for served in claiming for feature in served.features}
    feature = next((feature for feature in has if feature not in known), " with ".join(has))
    raise ConfigError(
        f"--additional-config.graft.tree does not support {feature}, which layer {name} "
        f"uses: remove the graft.tree keys to serve this model with vLLM's own chain"
    )


class UnchangedState(TargetState):
    """What vLLM itself keeps in step with the accepted tokens of a chain."""

    reads_rows = False

    def commit(self, path: torch.Tensor, step: VerifyStep) -> None:
        """Do nothing: the accepted rows are the first ones."""


class UnchangedFamily:
    """Any layers of chains (``topk: 1``), whose rows are in order, so that the engine is right."""

    def claims(self, layer: Any) -> bool:
        return True

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        """Leave the layer alone."""

    def state(self, *args: Any, **kwargs: Any) -> UnchangedState:
        return UnchangedState()


class ServedLayers:
    """The layers of a target and its draft by name, each with the family that serves it. The layers
    of a target stay as they are where trees are chains (`chain`), those of a draft where it has no
    trees (`draft_too`). Raises `ConfigError` if no family serves one of the layers."""

    def __init__(
        self,
        layers: Mapping[str, Any],
        draft: Collection[str],
        *,
        chain: bool = False,
        draft_too: bool = True,
    ) -> None:
        among, own = families(), UnchangedFamily()
        self._among = among
        self._layers, self._draft = dict(layers), frozenset(draft)
        self._families: dict[str, TargetFamily] = {
            name: family_of(name, layer, among) if grafted else own
            for name, layer in layers.items()
            for grafted in [draft_too if name in self._draft else not chain]
        }

    @property
    def attending(self) -> dict[str, Any]:
        """The layers that tree attention is put over, by name; recurrent layers are none."""
        from vllm.model_executor.layers.mamba.abstract import MambaBase

        return {
            name: self._layers[name]
            for name, family in self._families.items()
            if not isinstance(family, UnchangedFamily)
            and not isinstance(self._layers[name], MambaBase)
        }

    def attach(self, context: TreeContext) -> None:
        """Make every layer serve tree rows.

        Raises:
            ConfigError: if a layer's backend or cache can't be read.
            SeamError: if this vLLM differs from what a third party's family was written for.
        """
        used = set(map(id, self._families.values()))
        for served in self._among:
            if served.seams and id(served.family) in used:
                require_seams(*{seam.part for seam in served.seams}, ledger=served.seams)
        for name, family in self._families.items():
            family.attach(name, self._layers[name], context, is_draft=name in self._draft)

    def states(
        self, layers: Mapping[str, Any], kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> list[TargetState]:
        """Make one state per family that the target has layers of, once the cache is allocated."""
        of_target = {n: kind for n, kind in self._families.items() if n not in self._draft}
        return [
            kind.state(
                {name: layers[name] for name, own in of_target.items() if own is kind},
                kv_cache_config,
                block_tables,
            )
            for kind in dict.fromkeys(of_target.values())
        ]
