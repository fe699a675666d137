"""What stands under ``--kv-transfer-config.kv_connector_extra_config`` for the host KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field
from pydantic import ValidationError as PydanticError

from vllm_graft.config import Count, EntryName, Part, did_you_mean
from vllm_graft.errors import ConfigError
from vllm_graft.hicache.nonce import without_nonce
from vllm_graft.hicache.options import FLAG, Bytes, option_flag, reason
from vllm_graft.values import MAX_DEPTH, below, require_plain, several, shown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from vllm.config import VllmConfig

CONNECTOR = "HiCacheConnector"
MULTI_CONNECTOR = "MultiConnector"
MODULE = "vllm_graft.hicache.connector"

STAGING_BYTES = 48 << 20
"""Three pieces, each of 256 blocks' part of a layer of an 8B model."""

_EXTRA = "kv_connector_extra_config"

_VLLM_KEYS = frozenset({"kv_load_failure_policy"})
"""Keys that vLLM itself puts beside ours."""


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


Number = Annotated[float, BeforeValidator(_not_bool)]


class PrefetchConfig(Part):
    """Reading from storage when a request arrives, before it is scheduled."""

    policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """When a request goes on with what has arrived: at once, never before the end, or after a
    deadline of ``base_seconds + seconds_per_1k_tokens * tokens / 1000``."""

    base_seconds: Number = Field(default=1.0, ge=0, le=600)
    seconds_per_1k_tokens: Number = Field(default=0.25, ge=0, le=600)

    max_seconds: Number = Field(default=20.0, ge=0, le=600)
    """Longest that a request waits, whatever the policy: storage may hang."""

    max_share: Number = Field(default=0.5, gt=0, le=1)
    """Share of the host pool's slots that prefetches in flight may hold."""

    threads: Count = Field(default=4, ge=1, le=256)
    """I/O threads that read; as many again write."""


class CostConfig(Part):
    """What the cost model starts from, until it has measured."""

    host_gbps: Number = Field(default=20.0, ge=1e-6, le=1e6)
    """GB/s between host and device."""

    disk_gbps: Number = Field(default=2.0, ge=1e-6, le=1e6)
    """GB/s read from storage."""

    prefill_tokens_per_second: Number = Field(default=20_000.0, ge=1e-3, le=1e9)


class HiCacheConfig(Part):
    """The host KV cache. ``host_bytes`` is all that has to be given."""

    host_bytes: Bytes = Field(gt=0)
    """Host memory of this engine on this node, for all its ranks; ``"64GiB"`` or a number."""

    write_policy: Literal["write_through", "write_through_selective", "write_back"] = (
        "write_through"
    )
    """When a full block is copied to the host: as soon as it is computed; when its prefix has been
    asked for ``write_after`` times; or when its request has finished."""

    write_after: Count = Field(default=2, ge=1, le=1000)
    """The k of ``write_through_selective``."""

    eviction: EntryName = "lru"
    """Name of a ``graft_eviction_policies`` entry."""

    load: Literal["auto", "async", "layerwise", "recompute"] = "auto"
    """How a hit comes to the device: chosen a request by the cost model; whole before the request
    runs; while its first step runs, layer by layer; or not at all."""

    kv_layout: Literal["LBHNC", "BLHNC"] | None = None
    """Layout of the device's KV cache to ask vLLM for; None leaves the choice to vLLM. ``BLHNC``
    keeps the layers of a block together, which makes few and large copies."""

    host_dtype: Literal["fp8"] | None = None
    """Type of K/V on the host and in storage: e4m3, which loses accuracy; None leaves it as it is
    on the device."""

    staging_bytes: Bytes = Field(default=ByteSize(STAGING_BYTES), ge=0)
    """Device memory that loads go through whose host slots are consecutive and whose blocks are
    not; 0 for none."""

    storage: dict[str, Any] | None = None
    """``backend``, the name of a ``graft_storage_backends`` entry, and the options of it."""

    prefetch: PrefetchConfig = PrefetchConfig()
    cost: CostConfig = CostConfig()

    weights: EntryName | None = None
    """Identity of the weights (a revision, a hash) for the namespace of stored pages, in place of
    looking at the files."""

    copy_delay_cycles: Count = Field(default=0, ge=0)
    """GPU clock cycles by which each load is held up, to look for races; for tests."""

    faults: dict[str, Any] | None = None
    """Options of the fault injector; None injects nothing."""

    @property
    def page_options(self) -> dict[str, str | None]:
        """What is asked of the pages' bytes."""
        return {"host_dtype": self.host_dtype, "kv_layout": self.kv_layout}

    @classmethod
    def parse(cls, values: object) -> HiCacheConfig:
        """Validate the extra config.

        Raises:
            ConfigError: a line for each wrong key: its full flag, the value, what is allowed.
        """
        require_plain(values, flag())
        if isinstance(values, Mapping):
            given = without_nonce(values)
            values = {key: value for key, value in given.items() if key not in _VLLM_KEYS}
        try:
            config = cls.model_validate(values)
        except PydanticError as error:
            lines = [_explain(cls, details) for details in error.errors()]
            raise ConfigError(several(lines)) from None
        if config.storage is not None and not isinstance(config.storage.get("backend"), str):
            raise ConfigError(
                f"{flag('storage', 'backend')} is missing: name a storage backend, for example "
                '{"backend": "segments", "path": "/var/cache/graft", "max_bytes": "500GiB"}.'
            )
        return config

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> HiCacheConfig | None:
        """The configuration of an engine whose connector is ours; None for other connectors."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            return None
        return cls.parse(transfer.kv_connector_extra_config)


def extra_configs(transfer: Any) -> list[tuple[str, object]]:
    """What each of our connectors is given, also those below a ``MultiConnector``.

    Args:
        transfer: vLLM's ``KVTransferConfig``, or None.

    Returns:
        Full flags, and what stands under each; nothing of it is validated.

    Raises:
        ConfigError: for a list of connectors, one of them ours, that vLLM could not read.
    """
    if transfer is None:
        return []
    names = ("kv_connector", "kv_connector_module_path", _EXTRA)
    top = {name: getattr(transfer, name, None) for name in names}
    return list(_extra_configs(top, FLAG.removesuffix(f".{_EXTRA}"), MAX_DEPTH))


def _extra_configs(
    transfer: Mapping[Any, Any], path: str, depth: int
) -> Iterator[tuple[str, object]]:
    name, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    path, extra = below(path, _EXTRA), transfer.get(_EXTRA, {})
    if name == CONNECTOR and module in (None, MODULE):
        yield path, extra
    elif name == MULTI_CONNECTOR and module is None and isinstance(extra, Mapping) and depth:
        children = extra.get("connectors")
        path = below(path, "connectors")
        if not isinstance(children, (list, tuple)):
            return  # None of them can be ours: vLLM says what it thinks of it.
        found: list[tuple[str, object]] = []
        for index, child in enumerate(children):
            if isinstance(child, Mapping):
                found += _extra_configs(child, below(path, index), depth - 1)
        for index, child in enumerate(children if found else ()):
            if not isinstance(child, Mapping):
                raise ConfigError(
                    f"{below(path, index)}: {shown(child)} is refused: a connector is a mapping "
                    "with the keys kv_connector, kv_role and kv_connector_extra_config."
                )
        yield from found


flag = option_flag
"""The command-line flag of a key: ``flag("prefetch", "policy")``."""


def _explain(model: type[Part], details: ErrorDetails) -> str:
    """One sentence for one of pydantic's errors."""
    path, value = details["loc"], details["input"]
    if details["type"] == "extra_forbidden":
        known = _keys_at(model, path[:-1])
        return f"{flag(*path)}: unknown key.{did_you_mean(str(path[-1]), known)}"
    if details["type"] == "missing":
        return f'{flag(*path)} is missing: give it, for example "64GiB".'
    return f"{flag(*path)}: {shown(value)} is refused: {reason(details)}."


def _keys_at(model: type[Part], path: tuple[str | int, ...]) -> list[str]:
    for name in path:
        annotation = model.model_fields[str(name)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, Part)):
            return []
        model = annotation
    return list(model.model_fields)
