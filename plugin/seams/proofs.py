"""Proofs that our parts work with a vLLM that they were never tested with, as this user keeps them.
``vllm-graft prove`` writes them, and a start looks for one (`permission`)."""

import hashlib
import importlib.metadata
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from vllm_graft.base.decision import Decision, gave_drafts
from vllm_graft.base.options import KEY, target_of, without
from vllm_graft.base.version import __version__
from vllm_graft.seams.compare import vllm_version

_DRIVER = Path("/proc/driver/nvidia/version")
_OF_MACHINE = frozenset({"host_bytes", "storage", "prefetch", "weights", "staging_bytes"})
"""Keys of the host cache that say how much and where, and of whose code the proof runs all."""

_LIBRARIES = ("CUBLAS", "CUDNN_", "NVIDIA_TF32", "TORCH_", "TRITON_DEFAULT_", "TRITON_F32_")
"""What variables begin with by which libraries below vLLM choose kernels."""

STARTED_WITH = dict(os.environ)
"""The environment when the plugin is loaded: vLLM sets variables of its own for some models."""

_SECRETS = ("--api-key", "--hf-token")
"""Flags of ``vllm serve`` that are neither logged nor kept."""


def command_of(arguments: Sequence[str]) -> str:
    """The command that proves what ``vllm serve`` with these arguments would run."""
    return shlex.join(["vllm-graft", "prove", *without(arguments, *_SECRETS)])


@dataclass(frozen=True)
class Machine:
    """What a proof is bound to, beside the flags."""

    vllm: str
    graft: str
    device: str
    driver: str
    plugins: str
    """Third parties' packages that add to ours, with their versions."""

    @classmethod
    def here(cls) -> Self:
        """This process's; no device is started."""
        from vllm.platforms import current_platform

        driver = _DRIVER.read_text().partition("\n")[0] if _DRIVER.is_file() else ""
        device = str(current_platform.get_device_name())
        found = importlib.metadata.entry_points(group="vllm_graft")
        packages = {f"{each.dist.name} {each.dist.version}" for each in found if each.dist}
        return cls(vllm_version(), __version__, device, driver, ", ".join(sorted(packages)))


@dataclass(frozen=True)
class Proof:
    """What ``vllm-graft prove`` has found, and bound to which machine and flags (`flags_of`): the
    names of our `parts` that ran; vLLM's symbols that differed from the ledger meanwhile, by path,
    as they were (`rows`); why it failed (`differences`, none if it passed); how often what was to
    be `shown` happened, by what it is. `date` is the time of its end in ISO 8601."""

    machine: Machine
    flags: dict[str, Any]
    parts: list[str]
    rows: dict[str, str]
    differences: list[str]
    shown: dict[str, float]
    command: str
    date: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the answers were the same, and all that was asked for was shown."""
        return not self.differences

    @property
    def file(self) -> Path:
        """The file that it is kept in; a later proof of the same takes its place."""
        return _file(self.machine, self.flags)

    def keep(self) -> Path:
        """Write the file, whole or not at all, and return its path."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        written = self.file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(asdict(self), indent=1) + "\n")
        written.replace(self.file)
        return self.file


def folder() -> Path:
    """The folder of kept proofs."""
    # Unlike `Path.home`, it raises nothing for a user without a home.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "vllm-graft" / "proofs"


def find(vllm_config: Any) -> Proof | None:
    """The proof of a configuration on this machine; None if there is none."""
    return _read(_file(Machine.here(), flags_of(vllm_config)))


def of_this_machine() -> Iterator[Proof]:
    """Yield the proofs with this process's versions and device."""
    here = Machine.here()
    for file in sorted(folder().glob("*.json")):
        proof = _read(file)
        if proof is not None and proof.machine == here:
            yield proof


def flags_of(vllm_config: Any) -> dict[str, Any]:
    """What of a complete configuration decides which code of vLLM's and ours runs."""
    model, speculative = target_of(vllm_config), vllm_config.speculative_config
    ranks, cache, drafts = vllm_config.parallel_config, vllm_config.cache_config, None
    seeing = getattr(model, "multimodal_config", None)
    if speculative is not None and not gave_drafts(vllm_config):
        draft = getattr(speculative.draft_model_config, "model", None)
        drafts = {"method": speculative.method, "model": draft}
    return {
        "model": getattr(model, "model", None),
        # What lies in a folder may be another model by now.
        "architectures": list(getattr(model, "architectures", None) or ()),
        "dtype": str(getattr(model, "dtype", None)),
        "enforce_eager": bool(getattr(model, "enforce_eager", False)),
        "kv_cache_dtype": str(cache.cache_dtype),
        # vLLM chooses one for the machine unless it is given.
        "block_size": cache.block_size if cache.user_specified_block_size else None,
        "drafts": drafts,
        "additional": _asked(vllm_config),
        "cache": _cache(vllm_config.kv_transfer_config),
        "lora": _adapters(vllm_config.lora_config),
        "attention": str(vllm_config.attention_config.backend),
        "encoder_attention": str(getattr(seeing, "mm_encoder_attn_backend", None)),
        "graphs": str(vllm_config.compilation_config.cudagraph_mode),
        "async_scheduling": bool(vllm_config.scheduler_config.async_scheduling),
        "environment": _environment(),
        "ranks": [
            ranks.tensor_parallel_size,
            ranks.pipeline_parallel_size,
            ranks.data_parallel_size,
        ],
    }


def _asked(vllm_config: Any) -> Any:
    """Return ``additional_config``, with a preset in place of what it has decided."""
    additional, decided = vllm_config.additional_config or {}, Decision.from_vllm(vllm_config)
    return {**additional, KEY: decided.preset} if decided is not None else additional


def _adapters(lora: Any) -> dict[str, Any] | None:
    names = ("max_lora_rank", "max_loras", "fully_sharded_loras", "enable_tower_connector_lora")
    return None if lora is None else {name: getattr(lora, name, None) for name in names}


def _environment() -> dict[str, str]:
    """Variables that the user set and that kernels are chosen by; no secret is among them."""
    from vllm import envs

    known = envs.compile_factors()
    return {
        name: value
        for name, value in STARTED_WITH.items()
        if name in known or name.startswith(_LIBRARIES)
    }


def _cache(transfer: Any) -> Any:
    if transfer is None:
        return None
    return {"connector": transfer.kv_connector, **_kept(transfer.kv_connector_extra_config or {})}


def _kept(given: Any) -> Any:
    """A connector's keys and those of connectors below it, without sizes, places and nonces."""
    if isinstance(given, (list, tuple)):
        return [_kept(each) for each in given]
    if not isinstance(given, Mapping):
        return given
    kept = {
        name: _kept(each)
        for name, each in given.items()
        if name not in _OF_MACHINE and not name.startswith("_")
    }
    return {**kept, "storage": True} if given.get("storage") else kept


def _file(machine: Machine, flags: Mapping[str, Any]) -> Path:
    identity = json.dumps([asdict(machine), flags], sort_keys=True, default=str)
    return folder() / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> Proof | None:
    """A kept proof; None where there is none, or none that this user and this version wrote."""
    try:
        if file.stat().st_uid not in (os.geteuid(), 0):
            return None
        proof = TypeAdapter(Proof).validate_json(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    # A name is of what is inside.
    return proof if proof.file.name == file.name else None
