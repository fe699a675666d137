"""Reading the options that stand under ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_graft.config import did_you_mean
from vllm_graft.errors import ConfigError

FLAG = "--kv-transfer-config.kv_connector_extra_config"


class Options(BaseModel):
    """Base of every part's options: frozen, and unknown keys are refused.

    Sizes are :class:`pydantic.ByteSize`: a number of bytes, or a text like ``"64GiB"``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


OptionsT = TypeVar("OptionsT", bound=Options)


def parse(model: type[OptionsT], values: Mapping[str, Any], *path: str) -> OptionsT:
    """Validate ``values``, which stand under ``path`` below :data:`FLAG`.

    Raises:
        ConfigError: with a line for each wrong key: its full flag, the value, what is allowed.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for details in error.errors():
            flag = option_flag(*path, *map(str, details["loc"]))
            if details["type"] == "extra_forbidden":
                hint = did_you_mean(str(details["loc"][-1]), model.model_fields)
                lines.append(f"{flag}: unknown key.{hint}")
            elif details["type"] == "missing":
                lines.append(f"{flag}: missing; give it.")
            else:
                lines.append(f"{flag}: {details['input']!r} is refused: {details['msg']}.")
        raise ConfigError("\n".join(lines)) from None


def option_flag(*path: str) -> str:
    """The full name of a key: ``option_flag("storage", "path")``."""
    return ".".join([FLAG, *path])
