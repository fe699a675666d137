"""Refusals of a configuration, part by part, as the front door makes them."""

from typing import Any

from vllm_graft.activation import refuse
from vllm_graft.config import GraftConfig
from vllm_graft.parts import PARTS


def validate(config: GraftConfig, vllm_config: Any) -> None:
    """Refuse what a part of `config` can't be combined with."""
    for part in PARTS:
        section = getattr(config, part.name, None)
        if section is not None:
            refuse(part, section, vllm_config)
