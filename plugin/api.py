"""What third parties import from us, in one place that stays while files move. Nothing is loaded
before a name is used: hooks' own modules are imported in the frontend too."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm_graft.base.markers import hookimpl as hookimpl
from vllm_graft.base.version import __version__ as __version__

if TYPE_CHECKING:
    from vllm_graft.base.errors import ConfigError as ConfigError
    from vllm_graft.base.errors import GraftError as GraftError
    from vllm_graft.base.errors import HookError as HookError
    from vllm_graft.config import GraftConfig as GraftConfig
    from vllm_graft.graph_runners.language.draft import DraftGraphRunner as DraftGraphRunner
    from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner as ViTCudaGraphRunner
    from vllm_graft.graph_runners.vision.towers.adapter import FixedSizeAdapter as FixedSizeAdapter
    from vllm_graft.graph_runners.vision.towers.adapter import VisionAdapter as VisionAdapter
    from vllm_graft.hicache.config.connector_options import Options as Options
    from vllm_graft.hicache.config.connector_options import option_flag as option_flag
    from vllm_graft.hicache.config.connector_options import parse_options as parse_options
    from vllm_graft.hicache.host.eviction import EvictionPolicy as EvictionPolicy
    from vllm_graft.hicache.pages.page_key import PageKey as PageKey
    from vllm_graft.hicache.storage.backend import ReadStatus as ReadStatus
    from vllm_graft.hicache.storage.backend import StorageBackend as StorageBackend
    from vllm_graft.hooks import entries as entries
    from vllm_graft.hooks.entries import Health as Health
    from vllm_graft.spec_decode.config.tree_config import TreeConfig as TreeConfig
    from vllm_graft.spec_decode.drafters.base import Drafter as Drafter
    from vllm_graft.spec_decode.drafters.base import Extra as Extra
    from vllm_graft.spec_decode.drafters.base import Growth as Growth
    from vllm_graft.spec_decode.drafters.base import PasslessGrowth as PasslessGrowth
    from vllm_graft.spec_decode.drafters.target_dependent import (
        TargetDependentTrees as TargetDependentTrees,
    )
    from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting as TreeDrafting
    from vllm_graft.spec_decode.targets.dense.layer import DenseFamily as DenseFamily
    from vllm_graft.spec_decode.targets.families import TargetFamily as TargetFamily
    from vllm_graft.spec_decode.targets.families import TargetState as TargetState
    from vllm_graft.spec_decode.trees.tree import CandidateTable as CandidateTable
    from vllm_graft.spec_decode.trees.tree import TreeShape as TreeShape
    from vllm_graft.spec_decode.tuning.shapes import TreePolicy as TreePolicy

_NAMES = {
    "base.errors": "ConfigError GraftError HookError",
    "config": "GraftConfig",
    "graph_runners.language.draft": "DraftGraphRunner",
    "graph_runners.vision.runner": "ViTCudaGraphRunner",
    "graph_runners.vision.towers.adapter": "FixedSizeAdapter VisionAdapter",
    "hicache.config.connector_options": "Options option_flag parse_options",
    "hicache.host.eviction": "EvictionPolicy",
    "hicache.pages.page_key": "PageKey",
    "hicache.storage.backend": "ReadStatus StorageBackend",
    "hooks.entries": "Health",
    "spec_decode.config.tree_config": "TreeConfig",
    "spec_decode.drafters.base": "Drafter Extra Growth PasslessGrowth",
    "spec_decode.drafters.target_dependent": "TargetDependentTrees",
    "spec_decode.drafters.tree_drafting": "TreeDrafting",
    "spec_decode.targets.families": "TargetFamily TargetState",
    "spec_decode.targets.dense.layer": "DenseFamily",
    "spec_decode.trees.tree": "CandidateTable TreeShape",
    "spec_decode.tuning.shapes": "TreePolicy",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES, "__version__", "entries", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name == "entries":
        return importlib.import_module("vllm_graft.hooks.entries")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"vllm_graft.{_HOMES[name]}"), name)
