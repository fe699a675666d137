"""The worker's side: what ``collective_rpc("graft_info")`` answers.

Loaded in workers only, as ``--worker-extension-cls vllm_graft.WorkerExtension``; our own hook in
the frontend sets that flag where it is free.
"""

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
        """Which parts run in this worker: ``on``, their names, and ``declined``, reasons by name.

        It is asked once by the engine core, for the metric ``vllm:graft_info``.
        """
        return info.states()

    def graft_info(self) -> dict[str, Any]:
        """What runs in this worker, as plain values.

        Returns:
            ``version``; ``config`` (None without a ``graft`` key); ``parts``, those active;
            ``counters`` of each active part; ``seams``, each moved symbol with its reason (empty
            when all is well); ``plugins`` and ``broken_plugins``, third parties; ``preset``, what
            ``graft: auto`` or another preset turned on and left off (None without one).
        """
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
