"""The frontend's validation of a random configuration."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.fuzz.config.inputs import Case
from tests.support.checkpoints import write_configs
from vllm_graft import activation


class Frontend:
    """The validation of a configuration in vLLM's frontend, for a model without weights.

    Args:
        root: a directory to write the models' configurations to.
    """

    def __init__(self, root: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.models import registry

        activation.install()
        target, draft = write_configs(root)
        self._arguments = EngineArgs(
            model=str(target),
            speculative_config={
                "method": "eagle3",
                "model": str(draft),
                "num_speculative_tokens": 7,
            },
            skip_tokenizer_init=True,
        )
        # vLLM would inspect each model's class in a child process, which takes seconds.
        with mock.patch.object(registry, "_run_in_subprocess", lambda fn: fn()):
            self._config = self._arguments.create_engine_config()

    def quick(self, case: Case) -> Any:
        """Run our part of the validation on a copy of a ready configuration; return the copy.

        Raises:
            ConfigError: the input is refused.
        """
        config = copy.copy(self._config)
        config.additional_config = case.additional
        config.kv_transfer_config = _transfer(case)
        config.parallel_config = copy.copy(self._config.parallel_config)
        config.compilation_config = copy.copy(self._config.compilation_config)
        config.speculative_config = copy.copy(self._config.speculative_config)
        activation.on_defaults(config)
        activation.on_config(config)
        return config

    def whole(self, case: Case) -> Any:
        """Run the frontend's whole validation."""
        arguments = copy.copy(self._arguments)
        arguments.additional_config = case.additional
        arguments.kv_transfer_config = _transfer(case)
        return arguments.create_engine_config()


def vllm_reads(case: Case) -> bool:
    """Return whether vLLM itself accepts the shape of the input before it asks us."""
    if case.connector != "MultiConnector":
        return True
    children = case.extra["connectors"]
    names = ("HiCacheConnector", "ExampleConnector")
    return all(isinstance(one, dict) and one.get("kv_connector") in names for one in children)


def _transfer(case: Case) -> Any:
    from vllm.config import KVTransferConfig

    if case.connector is None:
        return None
    transfer = KVTransferConfig(kv_connector=case.connector, kv_role="kv_both")
    # It is set afterwards: as an argument, vLLM itself would refuse keys that are no text.
    transfer.kv_connector_extra_config = case.extra
    return transfer
