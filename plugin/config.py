"""The configuration: what stands under ``graft`` in vLLM's ``--additional-config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_graft.base.options import KEY, Section, parse_section
from vllm_graft.graph_runners.vision.vision_config import VitConfig
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HINTS = {
    "hicache": " The host KV cache is a KV connector: its keys stand in kv_connector_extra_config "
    "of --kv-transfer-config.",
    "eagle": " It is called 'tree' now: write graft.tree for graft.eagle, and graft.tree.shape for "
    "graft.eagle.tree.",
    "tree.tree": " It is called 'shape' now.",
    "tree.proposer": " It is called 'drafter' now.",
}
"""What to say of keys that stand elsewhere, or had another name."""


class GraftConfig(Section):
    """Everything under ``graft``; a part that is None is off."""

    tree: TreeConfig | None = None
    vit: VitConfig | None = None
    draft: DraftConfig | None = None

    @classmethod
    def parse(cls, values: object) -> GraftConfig:
        """Validate what stands under ``graft``.

        Numbers may be strings of digits, as the dotted command line gives them.

        Raises:
            ConfigError: with a line for each wrong key: its full flag, the value, what is allowed.
        """
        return parse_section(cls, values, hints=HINTS)

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> GraftConfig | None:
        """The configuration in ``vllm_config.additional_config``; None without a ``graft`` key."""
        additional = vllm_config.additional_config
        if not isinstance(additional, Mapping) or KEY not in additional:
            return None
        return cls.parse(additional[KEY])
