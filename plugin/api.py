"""What third parties import from us, in one place that stays while files move.

Nothing is loaded before a name is used: hooks' own modules are imported in the frontend too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm_graft.base.markers import hookimpl
from vllm_graft.base.version import __version__

if TYPE_CHECKING:
    from vllm_graft.base.errors import ConfigError, GraftError, HookError
    from vllm_graft.config import GraftConfig
    from vllm_graft.graph_runners.language.draft import DraftGraphRunner
    from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner
    from vllm_graft.graph_runners.vision.towers.adapter import FixedSizeAdapter, VisionAdapter
    from vllm_graft.hicache.config.connector_options import Options, option_flag, parse_options
    from vllm_graft.hicache.host.eviction import EvictionPolicy
    from vllm_graft.hicache.pages.page_key import PageKey
    from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
    from vllm_graft.hooks import entries
    from vllm_graft.hooks.entries import Health
    from vllm_graft.spec_decode.config.tree_config import TreeConfig
    from vllm_graft.spec_decode.drafters.base import Drafter, Extra, Growth, PasslessGrowth
    from vllm_graft.spec_decode.drafters.eagle import TargetDependentTrees
    from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
    from vllm_graft.spec_decode.targets.dense.layer import DenseFamily
    from vllm_graft.spec_decode.targets.families import TargetFamily, TargetState
    from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeShape
    from vllm_graft.spec_decode.tuning.shapes import TreePolicy

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
    "spec_decode.drafters.eagle": "TargetDependentTrees",
    "spec_decode.drafters.tree_drafting": "TreeDrafting",
    "spec_decode.targets.families": "TargetFamily TargetState",
    "spec_decode.targets.dense.layer": "DenseFamily",
    "spec_decode.trees.tree": "CandidateTable TreeShape",
    "spec_decode.tuning.shapes": "TreePolicy",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "CandidateTable",
    "ConfigError",
    "DenseFamily",
    "DraftGraphRunner",
    "Drafter",
    "EvictionPolicy",
    "Extra",
    "FixedSizeAdapter",
    "GraftConfig",
    "GraftError",
    "Growth",
    "Health",
    "HookError",
    "Options",
    "PageKey",
    "PasslessGrowth",
    "ReadStatus",
    "StorageBackend",
    "TargetDependentTrees",
    "TargetFamily",
    "TargetState",
    "TreeConfig",
    "TreeDrafting",
    "TreePolicy",
    "TreeShape",
    "ViTCudaGraphRunner",
    "VisionAdapter",
    "__version__",
    "entries",
    "hookimpl",
    "option_flag",
    "parse_options",
]


def __getattr__(name: str) -> Any:
    if name == "entries":
        return importlib.import_module("vllm_graft.hooks.entries")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"vllm_graft.{_HOMES[name]}"), name)
