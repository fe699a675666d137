"""The worker's side: what ``collective_rpc("graft_info")`` answers. Our hook in the frontend sets
``--worker-extension-cls vllm_graft.WorkerExtension`` if it is free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.activation import require_registered
from vllm_graft.base import decision, info
from vllm_graft.base.version import __version__
from vllm_graft.config import GraftConfig
from vllm_graft.hooks.manager import manager
from vllm_graft.seams import compare as seams

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Somebody asked for us by name. In a worker where vLLM never called register(), serving on without
# us would be a silent lie.
require_registered()


class WorkerExtension:
    """Mixed into vLLM's worker class; adds methods, overrides none."""

    vllm_config: VllmConfig

    def graft_states(self) -> dict[str, Any]:
        """Names of parts that are ``on``, and reasons by name of those ``declined``."""
        return info.states()

    def graft_info(self) -> dict[str, Any]:
        """What runs in this worker, as plain values. Returns ``version``; ``config`` (None without
        a ``graft`` key); ``parts``, those active, and their ``counters``; ``seams``, each moved
        symbol with its reason; ``plugins`` and ``broken_plugins``, third parties; ``preset``, its
        decisions (None without one)."""
        config = GraftConfig.from_vllm(self.vllm_config)
        parts = info.active_parts()
        plugins = manager()
        return {
            "version": __version__,
            "config": None if config is None else config.model_dump(),
            "parts": parts,
            "counters": info.collect(),
            "seams": {
                report.seam.path: report.problem
                for report in seams.check_seams(parts)
                if report.problem
            },
            "plugins": [str(provider) for provider in plugins.third_parties],
            "preset": decision.told(self.vllm_config),
            "broken_plugins": {str(who): why for who, why in plugins.broken.items()},
        }
