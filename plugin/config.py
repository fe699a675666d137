"""The configuration: what stands under ``graft`` in vLLM's ``--additional-config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_graft.base import decision
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import FLAG, KEY, Section, did_you_mean, parse_section
from vllm_graft.base.values import shown
from vllm_graft.graph_runners.vision.vision_config import VitConfig
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HICACHE = (
    " The host KV cache is a KV connector: its keys stand in kv_connector_extra_config of "
    "--kv-transfer-config, whose kv_connector is HiCacheConnector."
)
"""What to say of keys of the host cache that stand among ours."""

HINTS = {
    "hicache": HICACHE,
    **{
        name: f" A preset stands in place of all keys: write {FLAG} {preset}."
        for name, preset in {"preset": "auto", **{each: each for each in decision.PRESETS}}.items()
    },
}
"""What to say of keys that stand elsewhere."""


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
        if isinstance(values, str):
            require_preset(values)
            return cls()
        if isinstance(values, Mapping):
            values = {key: value for key, value in values.items() if key != decision.NAME}
        return parse_section(cls, values, hints=HINTS)

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> GraftConfig | None:
        """The configuration in ``vllm_config.additional_config``; None without a ``graft`` key."""
        additional = vllm_config.additional_config
        if not isinstance(additional, Mapping) or KEY not in additional:
            return None
        return cls.parse(additional[KEY])


def require_preset(value: str) -> None:
    """Refuse a text below ``graft`` that is no preset.

    Raises:
        ConfigError: names the presets, and the parts.
    """
    if value not in decision.PRESETS:
        raise ConfigError(
            f"{FLAG}: {shown(value)} is no preset.{did_you_mean(value[:80], decision.PRESETS)} "
            f"Allowed: {', '.join(decision.PRESETS)}, or a mapping with the keys "
            f"{', '.join(GraftConfig.model_fields)}."
        )
