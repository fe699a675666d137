"""The keys of ``--kv-transfer-config.kv_connector_extra_config`` for the host KV cache."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ByteSize, Field

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import Bytes, Count, EntryName, Number, Section, Switch, parse
from vllm_graft.base.values import below, shown
from vllm_graft.hicache.config.connector_options import (
    CONNECTOR,
    EXTRA,
    MULTI_CONNECTOR,
    all_connectors,
    is_ours,
    option_flag,
)
from vllm_graft.hicache.config.nonce import without_nonce

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STAGING_BYTES = 48 << 20
"""Room for three buffers, each for one layer of 256 blocks of an 8B model."""

_VLLM_KEYS = frozenset({"kv_load_failure_policy"})
"""Keys that vLLM itself adds to ours."""


class PrefetchConfig(Section):
    """Options for reading from storage when a request arrives, before it is scheduled."""

    policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """How long a request waits for its prefetch once it could be scheduled: not at all, until all
    pages are read, or at most ``base_seconds + seconds_per_1k_tokens * tokens / 1000``."""

    base_seconds: Number = Field(default=1.0, ge=0, le=600)
    """Seconds that ``timeout`` waits at least, whatever the prompt's length."""

    seconds_per_1k_tokens: Number = Field(default=0.25, ge=0, le=600)
    """Seconds that the deadline of ``timeout`` grows by per 1000 tokens."""

    max_seconds: Number = Field(default=20.0, ge=0, le=600)
    """Most seconds that a request waits with any policy, as storage may hang."""

    max_share: Number = Field(default=0.5, gt=0, le=1)
    """Fraction of the host pool that prefetches in flight may hold."""

    threads: Count = Field(default=4, ge=1, le=256)
    """Number of I/O threads that read. As many threads write."""


class HiCacheConfig(Section):
    """The configuration of the host KV cache. Only ``host_bytes`` is required."""

    host_bytes: Bytes = Field(gt=0, examples=["64GiB"])
    """Bytes of host memory for all ranks of this engine, ``"64GiB"`` or a number. It is pinned on
    GPUs."""

    shared: Switch = False
    """Whether host memory is shared with every server of this user on this machine that serves the
    same model in the same form and sets this too, and by all replicas of data parallelism. All give
    the same ``host_bytes``, which is taken once."""

    write_policy: Literal["write_through", "write_through_selective", "write_back"] = (
        "write_through"
    )
    """When a full block is copied to the host: as soon as it is computed, once ``write_after``
    requests had its prefix, or when its request has finished."""

    write_after: Count = Field(default=2, ge=1, le=1000)
    """Number of requests with a prefix from which ``write_through_selective`` stores it."""

    eviction: EntryName = "lru"
    """Name of a ``graft_eviction_policies`` entry: ``lru``, ``arc``, or a plugin's."""

    load: Literal["auto", "async", "layerwise", "recompute"] = "auto"
    """How a hit is loaded to the device: as the cost model chooses for each request, always before
    the request runs, always layer by layer during its first step, or never."""

    kv_layout: Literal["LBHNC", "BLHNC"] | None = None
    """Layout of the device's KV cache that vLLM is asked for. None leaves the choice to vLLM.
    ``BLHNC`` keeps the layers of a block together, so that copies are few and large."""

    host_dtype: Literal["fp8", "packed"] | None = None
    """Form of K/V on the host and in storage. ``packed`` is bfloat16 in 12.4 bits, without loss.
    ``fp8`` is e4m3, which loses accuracy. None keeps the device's bytes."""

    staging_bytes: Bytes = Field(default=ByteSize(STAGING_BYTES), ge=0)
    """Bytes of device memory for staged loads: loads from consecutive host slots to blocks that are
    not consecutive. 0 turns them off."""

    storage: dict[str, Any] | None = None
    """``backend``, the name of an entry of ``graft_storage_backends``, and its options."""

    prefetch: PrefetchConfig = PrefetchConfig()

    weights: EntryName | None = None
    """Identity of the weights (a revision, a hash) for the namespace of stored pages. If given, the
    files of the weights are not read."""

    @property
    def page_options(self) -> dict[str, str | None]:
        """The options that change the bytes of pages."""
        return {"host_dtype": self.host_dtype, "kv_layout": self.kv_layout}

    @classmethod
    def parse(cls, values: object) -> HiCacheConfig:
        """Validate the extra config; see :func:`~vllm_graft.base.options.parse` for errors."""
        if isinstance(values, Mapping):
            given = without_nonce(values)
            values = {key: value for key, value in given.items() if key not in _VLLM_KEYS}
        config = parse(cls, values, flag())
        if config.storage is not None and not isinstance(config.storage.get("backend"), str):
            raise ConfigError(
                f"{flag('storage', 'backend')} is missing: name a storage backend, for example "
                '{"backend": "segments", "path": "/var/cache/graft", "max_bytes": "500GiB"}.'
            )
        return config

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> HiCacheConfig | None:
        """The configuration of an engine with our connector; None with another connector."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            return None
        return cls.parse(transfer.kv_connector_extra_config)


def extra_configs(transfer: Any) -> list[tuple[str, object]]:
    """The full flag and the extra config, not validated, of each of our connectors. They may be
    below a ``MultiConnector``. ``transfer`` is vLLM's ``KVTransferConfig`` or None. Raises
    `ConfigError` if a list of connectors contains ours, but vLLM cannot read the list."""
    found: list[tuple[str, object]] = []
    for path, given in all_connectors(transfer):
        if is_ours(given):
            found.append((below(path, EXTRA), given.get(EXTRA, {})))
        elif any(is_ours(each) for _, each in all_connectors(given)):
            _check_list(below(path, EXTRA, "connectors"), given[EXTRA]["connectors"])
    return found


def _check_list(path: str, children: Sequence[Any]) -> None:
    for index, child in enumerate(children):
        if not isinstance(child, Mapping):
            raise ConfigError(
                f"{below(path, index)}: {shown(child)} is refused: a connector is a mapping "
                "with the keys kv_connector, kv_role and kv_connector_extra_config."
            )
        if "engine_id" in child:
            raise ConfigError(
                f"{below(path, index)}.engine_id: {shown(child['engine_id'])} is refused: vLLM "
                "gives each connector below a MultiConnector the engine_id of all, and fails "
                "over a second one. Give it once, as --kv-transfer-config.engine_id."
            )


def refuse_misspelt(transfer: Any) -> None:
    """Raise ConfigError for a connector whose name nobody has and which is likest to ours. VLLM
    refuses it as well, without a hint. ``transfer`` is its ``KVTransferConfig`` or None."""
    for path, given in all_connectors(transfer):
        name = given.get("kv_connector")
        if given.get("kv_connector_module_path") is None and _is_likest_to_ours(name):
            raise ConfigError(
                f"{path}.kv_connector: {shown(name)} is no KV connector. Did you mean "
                f"{CONNECTOR!r}?"
            )


def _is_likest_to_ours(name: object) -> bool:
    if not isinstance(name, str) or name in (CONNECTOR, MULTI_CONNECTOR):
        return False
    word, ours = name[:80].casefold(), CONNECTOR.casefold()
    if not difflib.get_close_matches(word, [ours]):
        return False
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    known = KVConnectorFactory._registry
    nearest = difflib.get_close_matches(word, [ours, *map(str.casefold, known)], n=1)
    return name not in known and nearest == [ours]


flag = option_flag
"""The command-line flag of a key: ``flag("prefetch", "policy")``."""
