"""The extra configuration: refusals, and the nonce that tells two engines' regions apart."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines.cache_engines import transfer
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.config.connector_options import CONNECTOR
from vllm_graft.hicache.config.nonce import KEY, Nonce, nonce_of, stamp, without_nonce
from vllm_graft.hicache.pages.geometry import _engine_id, pool_prefix
from vllm_graft.hicache.pages.pool_shape import PAGE, PoolShape

FLAG = "--kv-transfer-config.kv_connector_extra_config"


def test_sizes_and_defaults() -> None:
    config = HiCacheConfig.parse({"host_bytes": "64GiB"})
    assert config.host_bytes == 64 << 30
    assert (config.load, config.eviction, config.write_policy) == ("auto", "lru", "write_through")
    assert HiCacheConfig.parse({"host_bytes": 4096}).host_bytes == 4096
    assert config.staging_bytes == 48 << 20
    for given, found in (("96MiB", 96 << 20), (0, 0)):
        values = {"host_bytes": 1, "staging_bytes": given}
        assert HiCacheConfig.parse(values).staging_bytes == found


def test_a_pool_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_bytes is 4096, .* give at least 16384"):
        PoolShape.fit(4096, 8000, num_shards=2)
    shape = PoolShape.fit(10 * PAGE, PAGE + 1, num_shards=2)
    assert (shape.num_slots, shape.slot_bytes) == (2, 2 * PAGE)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def _config(given: Any) -> Any:
    from vllm.config import KVTransferConfig, VllmConfig

    given = KVTransferConfig(**given) if isinstance(given, dict) else given
    return VllmConfig(kv_transfer_config=given)


def _extra(config: Any) -> dict[str, Any]:
    extra: dict[str, Any] = config.kv_transfer_config.kv_connector_extra_config
    return extra


def _multi(*children: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _name(config: Any) -> str:
    return _engine_id(config.kv_transfer_config, config.parallel_config).hex()


def test_each_configuration_has_a_nonce_of_its_own_also_from_one_object_of_the_users() -> None:
    from vllm.config import KVTransferConfig

    given = KVTransferConfig(**transfer(), engine_id="dup")
    one, other = _config(given), _config(given)
    assert nonce_of(_extra(one)) != nonce_of(_extra(other))
    assert nonce_of(_extra(one)) is not None
    assert _name(one) != _name(other)
    # The user's object is unchanged, and the parsed configuration is what the user has written.
    assert given.kv_connector_extra_config == without_nonce(_extra(one)) == {"host_bytes": "32MiB"}
    assert HiCacheConfig.parse(_extra(one)) == HiCacheConfig.parse({"host_bytes": "32MiB"})


def test_copies_of_a_configuration_have_its_nonce() -> None:
    """vLLM derives copies in any process, and sends copies to other processes."""
    config = _config(transfer())
    there = pickle.loads(pickle.dumps(config))
    again = _config(there.kv_transfer_config)
    copies = [there, again, copy.deepcopy(config), _config(config.kv_transfer_config)]
    assert {_name(found) for found in copies} == {_name(config)}
    assert {type(_extra(found)[KEY]) for found in copies} == {Nonce}
    # It is not stamped twice: the nonce and the object stay the same.
    assert again.kv_transfer_config is there.kv_transfer_config


def test_engines_of_data_parallelism_have_regions_of_their_own() -> None:
    """They share one configuration, but vLLM changes the id or the index for each."""
    config = _config({**transfer(), "engine_id": "../up/and\0away"})
    other = copy.deepcopy(config)
    other.kv_transfer_config.engine_id += "_dp1"
    third = copy.deepcopy(config)
    third.parallel_config.data_parallel_index = 2
    names = [_name(found) for found in (config, other, third)]
    assert len(set(names)) == 3
    assert not any(set(name) & set("/.\0") for name in names)


def test_engines_share_memory_by_what_their_pages_are() -> None:
    """Replicas and servers of one model, whatever their ids are; and each knows itself."""

    def prefix(config: Any) -> str:
        return pool_prefix(HiCacheConfig.parse(_extra(config)), config)

    config, other = _config(transfer(shared=True)), _config(transfer(shared=True, load="async"))
    replica = copy.deepcopy(config)
    replica.parallel_config.data_parallel_index = 2
    assert prefix(config) == prefix(replica) == prefix(other)
    assert len({_name(config), _name(replica), _name(other)}) == 3
    assert prefix(config) != prefix(_config(transfer(shared=True, kv_layout="BLHNC")))
    replica.cache_config.cache_dtype = "fp8"  # As a worker does while it loads a model.
    assert prefix(config) == prefix(replica)
    replica.parallel_config.tensor_parallel_size = 2
    assert prefix(config) != prefix(replica)


def test_connectors_below_a_multi_connector_have_regions_of_their_own() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    plain = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config = _config(_multi(transfer(), plain, transfer(), _multi(transfer())))
    given = _extra(config)["connectors"]
    assert given[1] is plain or given[1] == plain
    children = [child for _, child in MultiConnector._get_connector_classes_and_configs(config)]
    names = [_name(children[number]) for number in (0, 2)]
    nested = MultiConnector._get_connector_classes_and_configs(children[3])[0][1]
    assert len({*names, _name(nested)}) == 3
    there = pickle.loads(pickle.dumps(config))
    found = MultiConnector._get_connector_classes_and_configs(there)
    assert [_name(found[number][1]) for number in (0, 2)] == names


@pytest.mark.parametrize(
    "connectors", [None, "x", [1], [{"kv_connector": CONNECTOR, "kv_connector_extra_config": 3}]]
)
def test_what_is_no_list_of_connectors_is_left_to_those_who_check_it(connectors: Any) -> None:
    from vllm.config import KVTransferConfig

    given = KVTransferConfig(
        **{**_multi(), "kv_connector_extra_config": {"connectors": connectors}}
    )
    config: Any = SimpleNamespace(kv_transfer_config=given)
    stamp(config)
    assert config.kv_transfer_config is given


def test_another_class_of_our_name_gets_no_key_that_it_does_not_know() -> None:
    theirs = {**transfer(), "kv_connector_module_path": "their.module"}
    ours = {**transfer(), "kv_connector_module_path": "vllm_graft.hicache.connector"}
    for given, stamped in ((theirs, False), (ours, True)):
        for whole in (given, _multi(given)):
            config = SimpleNamespace(**{"kv_connector_module_path": None, **whole})
            holder: Any = SimpleNamespace(kv_transfer_config=config)
            stamp(holder)
            assert (holder.kv_transfer_config is not config) == stamped


@pytest.mark.parametrize("value", ["0123", None])
def test_a_nonce_that_a_user_writes_is_refused(value: Any) -> None:
    for given in (transfer(**{KEY: value}), _multi(transfer(**{KEY: value}))):
        with pytest.raises(ConfigError, match=f"{KEY}"):
            _config(given)


def test_a_shared_region_without_a_nonce_is_refused() -> None:
    config = _config(transfer())
    config.kv_transfer_config.kv_connector_extra_config = {"host_bytes": "32MiB"}
    with pytest.raises(ConfigError, match="configuration of this engine was made without"):
        _name(config)


def test_nothing_that_vllm_hashes_depends_on_the_nonce() -> None:
    one, other = _config(transfer()), _config(transfer())
    assert nonce_of(_extra(one)) != nonce_of(_extra(other))
    assert one.compute_hash() == other.compute_hash()
    assert _config(None).kv_transfer_config is None
