"""What is wrong with how a random configuration is judged."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fuzz.config.inputs import Case
from vllm_graft.base.errors import ConfigError
from vllm_graft.config import GraftConfig, can_only_be_ours
from vllm_graft.hicache.cache_refusals import parse_connectors
from vllm_graft.spec_decode.tuning.shapes import auto_schedule

FLAGS = ("--additional-config.", "--kv-transfer-config.")
LONGEST = 8000


def problem_of(case: Case, check: Callable[[Case], Any], root: Path) -> str | None:
    """Say in a sentence what is wrong with how an input is judged; None if nothing is.

    Raises:
        ConfigError: the input is rightly refused.
    """
    try:
        config = check(case)
    except ConfigError as error:
        if wrong := wrong_message(str(error)):
            return f"{wrong}: {str(error)[:500]!r}"
        raise
    except BaseException as error:
        return f"{type(error).__name__} came out: {str(error)[:500]}"
    if isinstance(case.additional, dict):
        for key, value in case.additional.items():
            if isinstance(key, str) and key != "graft" and can_only_be_ours(key, value):
                return f"the key {key!r} was accepted"
    try:
        build(case, config, root)
    except BaseException as error:
        return f"accepted, and then {type(error).__name__}: {str(error)[:500]}"
    return None


def wrong_message(text: str) -> str | None:
    """Say what is wrong with the message of an error."""
    if not text.startswith(FLAGS):
        return "the message does not begin with the full flag"
    if "Traceback" in text or 'File "' in text:
        return "the message holds a traceback"
    if not all(line.isprintable() for line in text.split("\n")):
        return "the message can't be printed"
    return "the message is too long" if len(text) > LONGEST else None


def build(case: Case, config: Any, root: Path) -> None:
    """Read an accepted input as a worker does, and build all parts that need no model."""
    from vllm_graft.hicache import setup

    if isinstance(case.additional, dict) and "graft" in case.additional:
        parsed = GraftConfig.from_vllm(config)
        assert parsed is not None
        # Depths and presets are replaced by what they stand for.
        values = json.loads(json.dumps(config.additional_config["graft"], sort_keys=True))
        assert GraftConfig.parse(values) == parsed
        assert pickle.loads(pickle.dumps(parsed)) == parsed
        if parsed.tree is not None:
            auto_schedule(parsed.tree, config.speculative_config.num_speculative_tokens, 256)
    connectors = parse_connectors(config)
    again = copy.copy(config)
    again.kv_transfer_config = pickle.loads(pickle.dumps(config.kv_transfer_config))
    assert parse_connectors(again) == connectors
    for _, one in connectors:
        setup.make_policy(one.eviction, 8)
        if one.storage is not None:
            setup.make_backend(one, bytes(16)).close()
            for store in root.glob("store*"):
                shutil.rmtree(store)
