"""Refusals of the host cache before a model loads: the flag is named, and no file is left."""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.host_cache import storage_writer
from tests.support.host_cache.third_stores import raising
from vllm_graft.activation import refuse
from vllm_graft.base import log
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache import cache_refusals
from vllm_graft.hicache.cache_part import CACHE
from vllm_graft.hicache.cache_refusals import parse_connectors
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.host import machine_memory as memory
from vllm_graft.hicache.host import region
from vllm_graft.hicache.pages import geometry, namespace
from vllm_graft.hicache.pages.pool_shape import PAGE, least_page_bytes
from vllm_graft.hicache.storage.backend import StorageBackend
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.hooks.entries import StorageBackend as Entry
from vllm_graft.hooks.manager import Offer, Provider, manager
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE

FLAG = "--kv-transfer-config.kv_connector_extra_config"
OURS = "HiCacheConnector"
GIB = 1 << 30


def _model(**given: Any) -> Any:
    return SimpleNamespace(
        use_mla=False,
        enable_sleep_mode=False,
        is_hybrid=False,
        is_attention_free=False,
        is_encoder_decoder=False,
        hf_text_config=SimpleNamespace(**given.pop("text", {})),
        dtype=torch.bfloat16,
        get_total_num_kv_heads=lambda: 8,
        get_head_size=lambda: 128,
        get_total_num_hidden_layers=lambda: 32,
        **given,
    )


def _engine(extra: Any, connector: str = OURS, **parallel: Any) -> Any:
    """Make a stand-in for a VllmConfig, with the fields that are read."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=connector, kv_connector_module_path=None, kv_connector_extra_config=extra
        ),
        model_config=_model(),
        speculative_config=None,
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=16, user_specified_block_size=True
        ),
        parallel_config=SimpleNamespace(
            **{
                "world_size": 1,
                "data_parallel_size": 1,
                "data_parallel_size_local": 1,
                "data_parallel_backend": "mp",
                "distributed_executor_backend": "mp",
                **parallel,
            }
        ),
    )


def _child(extra: Any, connector: str = OURS) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _accepted(vllm_config: Any) -> list[HiCacheConfig]:
    """Return our connectors' configurations; the part must refuse none of them."""
    asked = CACHE.section(None, vllm_config) or []
    refuse(CACHE, asked, vllm_config)
    return [config for _, config in asked]


def _refusal(extra: Any, connector: str = OURS, **parallel: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        _accepted(_engine(extra, connector, **parallel))
    return str(caught.value).rpartition("rules out:\n  ")[2]


def _stored(**storage: Any) -> dict[str, Any]:
    storage = {"backend": "segments", "max_bytes": "64MiB", **storage}
    return {"host_bytes": "64MiB", "storage": storage}


@pytest.fixture
def extra(tmp_path: Path) -> dict[str, Any]:
    return _stored(path=str(tmp_path))


def _multi(*children: Any) -> tuple[dict[str, Any], str]:
    return {"connectors": list(children)}, "MultiConnector"


def _tree(path: Path) -> list[tuple[Path, int]]:
    return [(file, file.lstat().st_mtime_ns) for file in sorted([path, *path.rglob("*")])]


def test_a_good_configuration_passes_and_leaves_nothing(tmp_path: Path) -> None:
    before = _tree(tmp_path)
    extra = _stored(path=str(tmp_path / "a" / "b"))
    [config] = _accepted(_engine(extra))
    assert config.host_bytes == 64 << 20
    assert _tree(tmp_path) == before


def test_connectors_below_a_multi_connector_are_named_by_their_place() -> None:
    children = [_child({"any": 1}, "OtherConnector"), _child({"host_byts": 1})]
    for below in (
        f"{FLAG}.connectors[1].kv_connector_extra_config.host_byts: unknown key",
        f"{FLAG}.connectors[1].kv_connector_extra_config.host_bytes is missing",
    ):
        assert below in _refusal(*_multi(*children))
    # Later checks, and those of a store's options, name the child in the same way.
    child = f"{FLAG}.connectors[0].kv_connector_extra_config"
    for extra, words in (
        ({"host_bytes": 1}, f"{child}.host_bytes is 1, but"),
        ({"host_bytes": GIB, "eviction": "fifo"}, f"{child}.eviction: no graft_eviction"),
        (_stored(path=""), f"{child}.storage.path: '' is refused"),
        (None, f"{child}: None is refused"),
    ):
        assert words in _refusal(*_multi(_child(extra)))
    # The next connector is named by its own place again.
    assert _refusal({"host_bytes": 1}).startswith(f"{FLAG}.host_bytes is 1")

    # One in another is looked into.
    inner = _child(*_multi(_child({"host_bytes": "x"})))
    words = f"{FLAG}.connectors[0].kv_connector_extra_config.connectors[0].kv_connector_extra_"
    assert words in _refusal(*_multi(inner))


def test_both_of_two_are_returned() -> None:
    children = [_child({"host_bytes": GIB}), _child({"host_bytes": 2 * GIB})]
    found = _accepted(_engine(*_multi(*children)))
    assert [config.host_bytes for config in found] == [GIB, 2 * GIB]


@pytest.mark.parametrize(
    ("extra", "connector"),
    [
        ({"host_byts": 1}, "OtherConnector"),
        _multi(_child({"any": 1}, "OtherConnector"), 5),
        ({"connectors": 5}, "MultiConnector"),
        (None, "MultiConnector"),
    ],
)
def test_other_connectors_are_not_ours_to_judge(extra: Any, connector: str) -> None:
    assert _accepted(_engine(extra, connector)) == []


def test_another_class_of_our_name_is_not_ours_to_judge() -> None:
    config = _engine({"any": 1})
    config.kv_transfer_config.kv_connector_module_path = "their.module"
    assert _accepted(config) == []
    config.kv_transfer_config.kv_connector_module_path = "vllm_graft.hicache.connector"
    with pytest.raises(ConfigError, match="any: unknown key"):
        _accepted(config)


def test_a_list_of_connectors_that_vllm_could_not_read_is_a_sentence() -> None:
    message = _refusal(*_multi(_child({"host_bytes": GIB}), 5))
    assert message.startswith(f"{FLAG}.connectors[1]: 5 is refused: a connector is a mapping")


def test_an_engine_id_below_a_multi_connector_is_refused() -> None:
    """vLLM hands each of them its own, as a second keyword of the same name."""
    child = {**_child({"host_bytes": GIB}), "engine_id": "mine"}
    message = _refusal(*_multi(child))
    assert message.startswith(f"{FLAG}.connectors[0].engine_id: 'mine' is refused: vLLM gives")
    theirs = {**_child({"any": 1}, "OtherConnector"), "engine_id": "mine"}
    assert _accepted(_engine(*_multi(theirs))) == []


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, f"{FLAG}.host_bytes is missing"),
        ({"host_bytes": True}, f"{FLAG}.host_bytes: True is refused"),
        ({"host_bytes": 0}, "greater than 0"),
        ({"host_bytes": 1, "staging_bytes": -1}, f"{FLAG}.staging_bytes: -1 is refused"),
        ({"host_byts": 1, "host_bytes": 1}, "host_byts: unknown key. Did you mean 'host_bytes'?"),
        ({"host_bytes": 1, "load": "lazy"}, f"{FLAG}.load: 'lazy' is refused"),
        (
            {"host_bytes": 1, "prefetch": {"polcy": "timeout"}},
            f"{FLAG}.prefetch.polcy: unknown key. Did you mean 'policy'?",
        ),
        ({"host_bytes": 1, "storage": {"path": "/x"}}, f"{FLAG}.storage.backend is missing"),
        (
            {"host_bytes": 1, "storage": {"backend": "segments", "path": "/x"}},
            f"{FLAG}.storage.max_bytes is missing: give it.",
        ),
        ({1: 2}, f"{FLAG}: the key 1 is refused: a key is a text"),
        ({None: 1}, f"{FLAG}: the key None is refused: a key is a text"),
        ({"host_bytes": GIB, "eviction": "fifo"}, f"{FLAG}.eviction: no graft_eviction_policies"),
        ({"host_bytes": float("inf")}, f"{FLAG}.host_bytes: inf is refused: it is no finite"),
        ({"host_bytes": "9" * 400}, f"{FLAG}.host_bytes: '999"),
        ({"host_bytes": "64 GiB of it"}, 'as in "64GiB"'),
        ({"host_bytes": "1e9"}, 'as in "64GiB"'),
        ({"host_bytes": "9EiB"}, "too large for a size"),
        ({"host_bytes": None}, f"{FLAG}.host_bytes: None is refused"),
        (
            {"host_bytes": GIB, "prefetch": {"base_seconds": "nan"}},
            f"{FLAG}.prefetch.base_seconds: 'nan'",
        ),
        (
            {"host_bytes": GIB, "prefetch": {"base_seconds": 1e300}},
            f"{FLAG}.prefetch.base_seconds: 1e+300",
        ),
        (_stored(backend="segment", path="/x"), "Did you mean 'segments'?"),
        (_stored(pth="/x"), f"{FLAG}.storage.pth: unknown key"),
        (_stored(), f"{FLAG}.storage.path is missing"),
        (_stored(path=3), f"{FLAG}.storage.path: 3 is refused"),
        (_stored(path="/x", io="aio"), f"{FLAG}.storage.io: unknown"),
        (_stored(path="/x", max_bytes=[]), f"{FLAG}.storage.max_bytes: []"),
        (_stored(path="/x", max_bytes="1kB"), "greater than or equal to 1048"),
    ],
)
def test_wrong_keys_and_values(extra: Any, words: str) -> None:
    message = _refusal(extra)
    assert words in message
    assert message.startswith(FLAG)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "'' is refused: name a directory."),
        ("  ", "name a directory"),
        ("a\0b", r"'a\x00b' is refused: name a directory"),
        ("~nobody-of-that-name/x", "Could not determine home directory"),
        ("file", "is no directory. Give a directory that the engine may write to."),
        ("file/below/it", "is no directory"),
        ("link", "is a link that leads nowhere"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("link").symlink_to("nowhere")
    before = _tree(tmp_path)
    message = _refusal(_stored(path=path))
    assert words in message
    assert message.startswith(f"{FLAG}.storage.path: ")
    assert _tree(tmp_path) == before


def test_a_directory_that_may_not_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run as root, which may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    message = _refusal(_stored(path=str(tmp_path / "new" / "one")))
    assert f"{tmp_path} may not be written to" in message


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
def test_a_file_system_without_new_directories() -> None:
    """By its mode the owner may write to ``/proc``, but nobody can create files there."""
    message = _refusal(_stored(path="/proc/x/y"))
    words = "cannot be used: no directory can be created in /proc ("
    assert words in message or "/proc may not be written to" in message


def test_more_than_the_file_system_has_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "one")
    there = shutil.disk_usage(tmp_path).total
    message = _refusal(_stored(path=path, max_bytes=there + 1))
    assert message.startswith(f"{FLAG}.storage.max_bytes is {there + 1}, but the file system of ")
    assert message.endswith(f"{str(tmp_path)!r} has {there} bytes: lower it.")
    assert _accepted(_engine(_stored(path=path, max_bytes=there)))


def test_a_lock_of_another_user_is_named_before_a_model_loads(
    extra: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SegmentsBackend(NAMESPACE, {"path": tmp_path, "max_bytes": "8MiB"}).close()
    assert _accepted(_engine(extra))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    words = f"{tmp_path / 'LOCK'} belongs to user {user}, and this process runs as {user + 1}. Give"
    assert f"{FLAG}.storage.path: {words}" in _refusal(extra)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("x", path)])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "LOCK")
    message = _refusal(_stored(path=str(tmp_path)))
    assert f"{tmp_path / 'LOCK'} is no regular file" in message


def test_a_directory_that_others_can_write_to_is_told(
    extra: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.warning_once.cache_clear()
    assert _accepted(_engine(extra))
    assert "can remove" not in caplog.text
    tmp_path.chmod(0o777)
    assert _accepted(_engine(extra))
    assert f"{str(tmp_path)!r} may be written to by others (mode 777): they can" in caplog.text


def test_the_home_directory_and_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    log.info_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="vllm.graft"):
        store = SegmentsBackend(NAMESPACE, {"path": "~/x", "max_bytes": "8MiB"})
        store.close()
        assert store.options.path == tmp_path / "home" / "x"
    assert caplog.text == ""
    assert not (tmp_path / "~").exists()
    with caplog.at_level(logging.INFO, logger="vllm.graft"):
        _accepted(_engine(_stored(path="here/x")))
    assert f"the relative path 'here/x' stands for {tmp_path}/here/x" in caplog.text


# --- a store that is open elsewhere -----------------------------------------------------------

Open = Callable[[bool], "subprocess.Popen[str]"]


@pytest.fixture
def open_elsewhere(tmp_path: Path) -> Iterator[Open]:
    """Open a store below the directory in another process, in a process group of its own or not."""
    running = []

    def start(own_group: bool) -> subprocess.Popen[str]:
        running.append(storage_writer.started(tmp_path, 0, 0, start_new_session=own_group))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the configuration the namespace of the other process's model."""
    monkeypatch.setattr(namespace, "namespace_start", lambda *given, **named: NAMESPACE[:8])


def test_a_store_that_another_server_has_open_is_refused(
    extra: dict[str, Any], open_elsewhere: Open, same_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = open_elsewhere(True)
    message = _refusal(extra)
    assert message.startswith(f"{FLAG}.storage.path: process {process.pid} has ")
    assert message.endswith("One engine at a time opens a store: give each engine its own path.")
    # A replica does not know its number yet.
    _accepted(_engine(extra, data_parallel_size=2))
    # Weights that are not on a disk yet have no namespace.
    monkeypatch.setattr(namespace, "namespace_start", raising(ConfigError("no weights")))
    _accepted(_engine(extra))
    # A store of another model does not conflict.
    monkeypatch.setattr(namespace, "namespace_start", lambda *given, **named: bytes(8))
    _accepted(_engine(extra))


def test_looking_takes_nothing_and_an_end_frees_it(
    extra: dict[str, Any], tmp_path: Path, open_elsewhere: Open, same_model: None
) -> None:
    process = open_elsewhere(True)
    assert "open" in _refusal(extra)
    process.kill()
    process.wait()
    before = _tree(tmp_path)
    _accepted(_engine(extra))
    assert _tree(tmp_path) == before
    SegmentsBackend(NAMESPACE, {"path": str(tmp_path), "max_bytes": "8MiB"}).close()


def test_a_process_of_this_server_is_no_stranger(
    extra: dict[str, Any], tmp_path: Path, open_elsewhere: Open, same_model: None
) -> None:
    """vLLM's frontends build the configuration again while the engine's process starts."""
    process = open_elsewhere(False)
    assert SegmentsBackend.open_elsewhere({"path": str(tmp_path), "max_bytes": "8MiB"}) == {
        NAMESPACE: process.pid
    }
    _accepted(_engine(extra))


def test_a_store_of_this_process_is_no_stranger(tmp_path: Path, same_model: None) -> None:
    options = {"path": str(tmp_path), "max_bytes": "8MiB"}
    store = SegmentsBackend(NAMESPACE, options)
    assert SegmentsBackend.open_elsewhere(options) == {NAMESPACE: os.getpid()}
    _accepted(_engine(_stored(path=str(tmp_path))))
    store.close()
    assert SegmentsBackend.open_elsewhere(options) == {}


def test_a_lock_without_a_process_tells_nothing(tmp_path: Path) -> None:
    options = {"path": str(tmp_path), "max_bytes": "8MiB"}
    store = SegmentsBackend(NAMESPACE, options)
    (tmp_path / NAMESPACE.hex() / "LOCK").write_text("")
    assert SegmentsBackend.open_elsewhere(options) == {}
    store.close()


class Tape(SegmentsBackend):
    seen: Mapping[str, Any] = {}
    error: BaseException | None = None
    too_small = StorageBackend.too_small
    open_elsewhere = StorageBackend.open_elsewhere

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        cls.seen = options
        if cls.error is not None:
            raise cls.error


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let an object be the storage backend ``tape`` of a third party."""

    def provide(found: Any, load: Any = None) -> None:
        entry = Offer(Entry("tape", load or (lambda: found), ""), Provider("acme", "1.0", "main"))
        stock = manager().offers

        def offers(hook: str) -> list[Offer]:
            return [entry] if hook == "graft_storage_backends" else stock(hook)

        plugins = SimpleNamespace(offers=offers, choose=lambda *given: offers(given[0])[0])
        monkeypatch.setattr(cache_refusals.manager, "manager", lambda: plugins)

    return provide


def test_a_third_party_s_store_is_asked_before_it_is_opened(
    offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(Tape)
    extra = {"host_bytes": GIB, "storage": {"backend": "tape", "reel": 3}}
    assert _accepted(_engine(extra))
    assert Tape.seen == {"reel": 3}
    monkeypatch.setattr(Tape, "error", ConfigError(f"{FLAG}.storage.reel: 3 is in use."))
    assert _refusal(extra) == f"{FLAG}.storage.reel: 3 is in use."
    for error in (TypeError("boom"), SystemExit("boom")):
        monkeypatch.setattr(Tape, "error", error)
        assert _refusal(extra) == (
            f"{FLAG}.storage: the backend 'tape' of acme 1.0 failed to check its options: "
            f"{type(error).__name__}: boom"
        )
    monkeypatch.setattr(Tape, "error", None)
    monkeypatch.setattr(Tape, "open_elsewhere", lambda options: [1])
    assert "of acme 1.0 failed to check its options: AttributeError" in _refusal(extra)
    monkeypatch.setattr(Tape, "error", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        _accepted(_engine(extra))


def test_a_function_that_makes_a_store_is_not_asked(offer: Callable[..., None]) -> None:
    offer(lambda space, options: pytest.fail("it was opened"))
    assert _accepted(_engine({"host_bytes": GIB, "storage": {"backend": "tape"}}))


def test_a_third_party_s_store_that_can_t_be_loaded_is_named(offer: Callable[..., None]) -> None:
    offer(None, load="no_such_module:Tape")
    message = _refusal({"host_bytes": GIB, "storage": {"backend": "tape"}})
    assert message.startswith(f"{FLAG}.storage.backend: StorageBackend 'tape' cannot be loaded")


def test_a_store_without_a_check_is_opened_late(offer: Callable[..., None]) -> None:
    class Plain(SegmentsBackend):
        check = StorageBackend.check
        too_small = StorageBackend.too_small
        open_elsewhere = StorageBackend.open_elsewhere

    offer(Plain)
    assert _accepted(_engine({"host_bytes": GIB, "storage": {"backend": "tape"}}))


# --- memory -----------------------------------------------------------------------------------

PAGE_OF_8B = 32 * 16 * 2 * 8 * 128 * 2


def test_storage_in_which_no_page_fits_is_refused(tmp_path: Path) -> None:
    """A store keeps a rank's part of a page; the bound is exact where that size is known."""
    needed = PAGE_OF_8B + 448
    small = _stored(path=str(tmp_path), segment_bytes=needed - 1)
    words = f"{FLAG}.storage.segment_bytes is {needed - 1}, so a segment has {needed - 1} bytes"
    assert words in _refusal(small)
    enough = {"path": str(tmp_path), "segment_bytes": needed}
    assert _accepted(_engine(_stored(**enough)))
    assert _accepted(_engine(small, world_size=2))
    segments = _stored(path=str(tmp_path), max_bytes="8MiB")
    assert f"{FLAG}.storage.max_bytes is 8388608, so a segment has 1048576" in _refusal(segments)
    assert _accepted(_engine(segments, world_size=4))
    assert not list(tmp_path.iterdir())


def test_less_than_a_page_is_refused() -> None:
    assert least_page_bytes(_engine({}), None) == PAGE_OF_8B
    message = _refusal({"host_bytes": PAGE_OF_8B - 1})
    assert f"{FLAG}.host_bytes is {PAGE_OF_8B - 1}, but a page of KV takes {PAGE_OF_8B} " in message
    assert _accepted(_engine({"host_bytes": PAGE_OF_8B}))
    # As fp8 it takes one byte per number.
    assert _accepted(_engine({"host_bytes": PAGE_OF_8B // 2, "host_dtype": "fp8"}))
    assert str(PAGE_OF_8B // 2) in _refusal({"host_bytes": 1, "host_dtype": "fp8"})


@pytest.mark.parametrize(
    "model",
    [
        None,
        _model(text={"sliding_window": 4096}),
        _model(text={"layer_types": ["full_attention", "sliding_attention"]}),
        _model(text={"num_kv_shared_layers": 2}),
        _model(text={"block_configs": [None]}),
    ],
)
def test_where_a_page_is_not_simple_a_page_of_memory_is_the_least(model: Any) -> None:
    config = _engine({"host_bytes": PAGE})
    config.model_config = model
    assert _accepted(config)
    config.kv_transfer_config.kv_connector_extra_config = {"host_bytes": PAGE - 1}
    with pytest.raises(ConfigError, match=rf"host_bytes is {PAGE - 1}, .* takes {PAGE} bytes"):
        _accepted(config)


@pytest.mark.parametrize("name", ["use_mla", "is_hybrid", "is_attention_free"])
def test_kinds_of_models_whose_pages_are_not_estimated(name: str) -> None:
    config = _engine({"host_bytes": PAGE})
    setattr(config.model_config, name, True)
    assert least_page_bytes(config, None) == 0


def test_a_block_that_vllm_still_chooses_is_taken_for_the_smallest() -> None:
    config = _engine({})
    config.cache_config.block_size = 128
    assert least_page_bytes(config, None) == 8 * PAGE_OF_8B
    config.cache_config.user_specified_block_size = False
    assert least_page_bytes(config, None) == PAGE_OF_8B
    for dtype, share in (("fp8", 2), ("bfloat16", 1), ("int4_per_token_head", None)):
        config.cache_config.cache_dtype = dtype
        assert least_page_bytes(config, None) == (PAGE_OF_8B // share if share else 0)


def test_a_configuration_of_the_draft_is_judged_by_its_target() -> None:
    config = _engine({})
    config.speculative_config = SimpleNamespace(target_model_config=config.model_config)
    config.model_config = _model(text={"sliding_window": 64})
    assert least_page_bytes(config, None) == PAGE_OF_8B


def test_what_leaves_vllm_no_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache_refusals, "machine_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(cache_refusals, "filesystem_bytes", lambda path: 16 * GIB)
    assert _accepted(_engine({"host_bytes": 60 * GIB}))
    assert _refusal({"host_bytes": "61GiB"}) == (
        f"{FLAG}.host_bytes is 61.0 GiB, but this machine (or container) has 64.0 GiB of memory, "
        "of which vLLM's own processes need 4.0 GiB. The memory is taken when the engine starts: "
        f"lower {FLAG}.host_bytes to 60GiB or less."
    )
    assert "host_bytes is 888.2 PiB, but" in _refusal({"host_bytes": "1EB"})
    refused = _refusal({"host_bytes": "30GiB"}, data_parallel_size=2, data_parallel_size_local=2)
    assert "for each of 2 data-parallel engines" in refused
    assert refused.endswith("to 29GiB or less.")
    # With several ranks, or with storage, memory is shared through a file.
    words = "/dev/shm has 16.0 GiB. The memory is taken when the engine starts: raise its size"
    assert words in _refusal({"host_bytes": "17GiB"}, world_size=2)
    stored = _stored(path=str(tmp_path)) | {"host_bytes": "17GiB"}
    assert words in _refusal(stored)
    monkeypatch.setattr(cache_refusals, "filesystem_bytes", lambda path: None)
    assert _accepted(_engine(stored))
    # Engines of other machines have other memory, and other disks.
    elsewhere = _stored(path="") | {"host_bytes": "65GiB"}
    assert _accepted(_engine(elsewhere, data_parallel_backend="ray"))
    assert _accepted(_engine(elsewhere, data_parallel_size_local=0))


def test_shared_memory_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_refusals, "machine_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(cache_refusals, "filesystem_bytes", lambda path: 48 * GIB)
    monkeypatch.setattr(geometry, "pool_prefix", lambda *_: "pool")
    monkeypatch.setattr(region, "pools", lambda prefix: [40 * GIB] if prefix == "pool" else [])
    both = {"data_parallel_size": 2, "data_parallel_size_local": 2}
    assert _refusal({"host_bytes": "40GiB"}, **both)
    shared = {"host_bytes": "40GiB", "shared": True}
    assert _accepted(_engine(shared, **both))
    assert "/dev/shm has 48.0 GiB" in _refusal(shared | {"host_bytes": "50GiB"}, **both)
    assert _refusal(shared | {"host_bytes": "41GiB"}) == (
        f"{FLAG}.host_bytes is {41 * GIB}, but servers that share host memory for this model have "
        f"{40 * GIB}. It is one region: give {FLAG}.host_bytes={40 * GIB}, or end them first."
    )
    assert _accepted(_engine(shared | {"host_bytes": "41GiB"}, data_parallel_backend="ray"))
    assert _accepted(_engine({"host_bytes": "41GiB"}))


def test_shared_memory_has_one_order_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "pool_prefix", lambda *_: "pool of nobody")
    shared = {"host_bytes": "64MiB", "shared": True}
    assert "eviction is arc, and shared memory has lru" in _refusal(shared | {"eviction": "arc"})
    trained = _engine(shared)
    trained.weight_transfer_config = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"--weight-transfer-config is given.*drop .*\.shared"):
        _accepted(trained)
    trained.kv_transfer_config.kv_connector_extra_config = {"host_bytes": "64MiB"}
    assert _accepted(trained)


@pytest.mark.parametrize(
    ("own", "root", "name"),
    [
        ("0::/job/step", "", "memory.max"),
        ("9:cpu:/x\n4:memory,hugetlb:/job/step\n", "memory", "memory.limit_in_bytes"),
    ],
)
def test_the_least_limit_of_a_group_and_those_above_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, root: str, name: str
) -> None:
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "_OWN", tmp_path / "own")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.machine_bytes() == whole
    (tmp_path / "own").write_text(own)
    job = tmp_path / "groups" / root / "job"
    (job / "step").mkdir(parents=True)
    (job / "step" / name).write_text("max\n")
    assert memory.machine_bytes() == whole
    (job / "step" / name).write_text(f"{3 << 20}\n")
    (job.parent / name).write_text(f"{1 << 20}\n")
    assert memory.machine_bytes() == 1 << 20
    (job.parent / name).write_text(f"{9 << 20}\n")
    assert memory.machine_bytes() == 3 << 20
    (job / name).write_text(f"{2 << 20}\n")
    assert memory.machine_bytes() == 2 << 20
    # A container may see its own group as the root, and its path outside as its own.
    (tmp_path / "own").write_text(own.replace("job", "gone"))
    (job.parent / name).write_text(f"{5 << 20}\n")
    assert memory.machine_bytes() == 5 << 20


def test_a_small_machine_keeps_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_refusals, "machine_bytes", lambda: 10 * GIB)
    assert _accepted(_engine({"host_bytes": 9 * GIB}))
    assert "has 10.0 GiB of memory, of which vLLM's own processes need 1.0 GiB" in _refusal(
        {"host_bytes": 9 * GIB + 1}
    )
    # What is advised is accepted.
    monkeypatch.setattr(cache_refusals, "machine_bytes", lambda: 25_276_502_016)
    advised = re.findall(r"to (\S+) or less", _refusal({"host_bytes": "23GiB"}))
    assert advised == ["21.1GiB"]
    assert _accepted(_engine({"host_bytes": advised[0]}))


@pytest.mark.parametrize(
    "name",
    ["HicacheConnector", "hicacheconnector", "HiCache_Connector", "HiCache", "HCacheConnector"],
)
def test_a_misspelt_connector_is_told_ours(name: str) -> None:
    config = _engine({"host_bytes": GIB}, name)
    told = f"{name!r} is no KV connector. Did you mean 'HiCacheConnector'?"
    with pytest.raises(ConfigError) as caught:
        CACHE.section(None, config)
    assert str(caught.value) == f"--kv-transfer-config.kv_connector: {told}"
    children, connector = _multi(_child({"host_bytes": GIB}, name))
    with pytest.raises(ConfigError, match=r"extra_config\.connectors\[0\]\.kv_connector: .*mean"):
        CACHE.section(None, _engine(children, connector))


def test_names_of_others_are_vllm_s_business() -> None:
    """One is registered, another is nearer to a registered one, a third has a module of its own."""
    for name in ("LMCacheConnectorV1", "LMCacheConnector", "ExampleConnector", "x" * 9_999):
        assert CACHE.section(None, _engine({}, name)) is None
    config = _engine({}, "HicacheConnector")
    config.kv_transfer_config.kv_connector_module_path = "somebody.s"
    assert CACHE.section(None, config) is None


def test_the_size_of_a_file_system(tmp_path: Path) -> None:
    assert memory.filesystem_bytes(tmp_path / "missing") is None
    found = memory.filesystem_bytes(tmp_path)
    assert found is not None
    assert found > 0


@pytest.mark.parametrize(
    "name",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"],
)
def test_parallelism_that_can_t_be_served_is_refused_early(name: str) -> None:
    parallel: dict[str, Any] = {name: 2}
    message, key = _refusal({"host_bytes": GIB}, **parallel), f"--{name.replace('_', '-')}"
    assert message.startswith(f"{key} is 2. Ranks share one region of host memory")
    assert message.endswith(f": set {key} to 1.")


def test_fp8_on_the_host_needs_plain_k_and_v() -> None:
    extra = {"host_bytes": GIB, "host_dtype": "fp8"}
    assert _accepted(_engine(extra))
    for part, name, value, words in (
        ("model_config", "use_mla", True, "the model uses MLA attention"),
        ("model_config", "is_hybrid", True, "the model has recurrent states"),
        ("cache_config", "cache_dtype", "fp8_e4m3", "the device's K/V is fp8_e4m3 already"),
    ):
        config = _engine(extra)
        setattr(getattr(config, part), name, value)
        with pytest.raises(
            ConfigError, match=rf"host_dtype is fp8, but {words}.*: drop .*host_dtype\."
        ):
            _accepted(config)


def test_packed_pages_need_bfloat16() -> None:
    extra = {"host_bytes": GIB, "host_dtype": "packed"}
    for dtype, cache_dtype, hybrid, words in (
        (torch.float16, "auto", False, "the device's K/V is float16 "),
        (torch.bfloat16, "fp8_e5m2", False, "the device's K/V is fp8_e5m2 already"),
        (torch.bfloat16, "auto", True, "the model has recurrent states"),
        (torch.bfloat16, "auto", False, ""),
        (torch.float16, "bfloat16", False, ""),
    ):
        config = _engine(extra)
        config.model_config.dtype, config.model_config.is_hybrid = dtype, hybrid
        config.model_config.use_mla = not hybrid
        config.cache_config.cache_dtype = cache_dtype
        if words:
            with pytest.raises(ConfigError, match=rf"host_dtype is packed, but {words}.*: drop "):
                _accepted(config)
        else:
            assert _accepted(config)
    config = _engine(extra)
    config.model_config.use_mla, config.model_config.hf_text_config.index_topk = True, 2048
    with pytest.raises(ConfigError, match="host_dtype is packed, but the model has an indexer"):
        _accepted(config)
    # A page of 8B has 99 bytes for 64 numbers.
    assert least_page_bytes(_engine({}), "packed") * 128 == PAGE_OF_8B * 99


def test_parsing_alone_looks_at_nothing_else() -> None:
    """Parsing runs before vLLM has completed its configuration."""
    config = _engine({"host_bytes": 1, "eviction": "fifo"})
    del config.model_config, config.parallel_config, config.cache_config
    assert len(parse_connectors(config)) == 1
