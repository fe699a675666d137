"""The rule of the start with a made-up vLLM 0.34: what a proof stands in for, and what not."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.base.errors import SeamError
from vllm_graft.base.log import info_once, warning_once
from vllm_graft.seams import compare, permission, proofs, versions
from vllm_graft.seams.compare import Kind, Seam
from vllm_graft.seams.form import normalized_hash
from vllm_graft.seams.permission import admit, proving, refused, require_seams
from vllm_graft.seams.proofs import Machine, Proof

COPY = '''
def copy(blocks, slots):
    """Moves blocks."""
    return blocks
'''
OTHER_TEXT = COPY.replace("return blocks", "moved = blocks\n    return moved")
STORE = "\n\ndef store(key, value):\n    return key\n"


class MadeUp:
    """Files of a vLLM, and the ledger's rows for it."""

    def __init__(self, root: Path) -> None:
        self.root = root / "vllm"
        self.root.mkdir()
        (self.root / "platforms.py").write_text(
            "class current_platform:\n"
            "    @staticmethod\n"
            "    def get_device_name():\n        return 'paper'\n"
        )
        (self.root / "envs.py").write_text(
            "def compile_factors():\n    return {'VLLM_USE_SOMETHING': False}\n"
        )

    def write(self, thing: str = COPY + STORE, version: str = "0.34.0") -> None:
        """Install it with such a module."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        (self.root / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (self.root / "thing.py").write_text(thing)
        importlib.invalidate_caches()
        sys.dont_write_bytecode = True
        versions.differing.cache_clear()
        for told in (info_once, warning_once):
            told.cache_clear()


def _row(path: str, kind: Kind, expected: str) -> Seam:
    return Seam("tree", path, kind, expected, "why", "until")


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeUp]:
    """Put a made-up vLLM in the place of the installed one, with a ledger that fits it."""
    held = {name: each for name, each in sys.modules.items() if name.partition(".")[0] == "vllm"}
    written = sys.dont_write_bytecode
    rows = (
        _row("thing.copy", "source", normalized_hash(COPY)),
        _row("thing.store", "call", "key, value"),
    )
    monkeypatch.setattr(compare, "LEDGER", rows)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["/bin/vllm", "serve", "llama 8b", "--seed", "1"])
    monkeypatch.syspath_prepend(tmp_path)
    made = MadeUp(tmp_path)
    made.write()
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(held)
    sys.dont_write_bytecode = written
    versions.differing.cache_clear()


@pytest.fixture
def config() -> Any:
    return make_config()


def make_config(model: str = "llama 8b", **sections: Any) -> Any:
    target = SimpleNamespace(
        model=model, dtype="torch.bfloat16", enforce_eager=False, architectures=["Llama"]
    )
    draft = SimpleNamespace(model="eagle")
    return SimpleNamespace(
        model_config=target,
        speculative_config=SimpleNamespace(
            method="eagle3", draft_model_config=draft, target_model_config=target
        ),
        additional_config={"graft": {"tree": {"topk": 4}, **sections}},
        kv_transfer_config=None,
        lora_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode="FULL"),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        attention_config=SimpleNamespace(backend=None),
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=16, user_specified_block_size=False
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            worker_extension_cls="",
        ),
    )


def proof_of(config: Any, rows: dict[str, str], *differences: str) -> Proof:
    flags = proofs.flags_of(config)
    return Proof(
        Machine.here(), flags, ["tree"], rows, list(differences), {}, "", "2026-11-28", 1.0
    )


def found() -> dict[str, str]:
    """The rows that differ, as a proof that runs now sees them."""
    with proving() as seen:
        require_seams("tree")
    return seen.rows


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="vllm.graft")
    return lambda: [record.getMessage() for record in caplog.records]


def test_all_as_expected_starts_and_says_how_to_prove_it(
    vllm: MadeUp, config: Any, lines: Callable[[], list[str]]
) -> None:
    admit(["tree"], config)
    require_seams("tree")
    [line] = lines()
    assert "vLLM 0.34.0 was not tested" in line
    assert "vllm-graft prove 'llama 8b' --seed 1`" in line


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("llama --api-key a b --seed 1", "llama --seed 1"),
        ("llama --api_key=a --seed 1 --hf-token b", "llama --seed 1"),
        ("llama --api-keys a --seed 1", "llama --api-keys a --seed 1"),
    ],
)
def test_secrets_are_not_shown(given: str, shown: str) -> None:
    assert proofs.command_of(given.split()) == f"vllm-graft prove {shown}"


def test_another_text_needs_a_proof(
    vllm: MadeUp, config: Any, lines: Callable[[], list[str]]
) -> None:
    vllm.write(OTHER_TEXT + STORE)
    with pytest.raises(SeamError, match=r"thing.copy.*Run `vllm-graft prove 'llama 8b' --seed 1`"):
        admit(["tree"], config)
    with pytest.raises(SeamError, match=r"vllm\.thing\.copy: expected"):
        require_seams("tree")
    rows = found()
    assert list(rows) == ["thing.copy"]
    proof_of(config, rows).keep()
    admit(["tree"], config)
    require_seams("tree")
    [line] = lines()
    assert "but tree were proven on this paper at 2026-11-28" in line
    assert "1 symbols have another text" in line
    # Parts that need other rooms are not concerned.
    admit(["hicache"], make_config("other"))


def test_a_failed_proof_is_told(vllm: MadeUp, config: Any) -> None:
    for text in (OTHER_TEXT, COPY):
        vllm.write(text + STORE)
        proof_of(config, found(), "prompts, request 1: token 3 is 5").keep()
        with pytest.raises(SeamError, match="prompts, request 1: token 3 is 5"):
            admit(["tree"], config)
    vllm.write(OTHER_TEXT + STORE)
    with pytest.raises(SeamError):
        require_seams("tree")


def test_a_proof_is_void_when_a_symbol_changes_again(vllm: MadeUp, config: Any) -> None:
    vllm.write(OTHER_TEXT + STORE)
    proof_of(config, found()).keep()
    vllm.write(OTHER_TEXT.replace("moved", "again") + STORE)
    with pytest.raises(SeamError, match="the one that is kept has not seen these"):
        admit(["tree"], config)
    with pytest.raises(SeamError, match=r"thing\.copy"):
        require_seams("tree")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (OTHER_TEXT + STORE.replace("key, value", "key, values"), "store: expected value, found v"),
        (OTHER_TEXT, "thing.store: .*found nothing"),
        (STORE, "thing.copy: .*found nothing"),
    ],
)
def test_a_proof_never_stands_for_what_is_missing(
    vllm: MadeUp, config: Any, text: str, says: str
) -> None:
    vllm.write(OTHER_TEXT + STORE)
    rows = found()
    vllm.write(text)
    proof_of(config, {**rows, "thing.store": "key, values", "thing.copy": "nothing"}).keep()
    with pytest.raises(SeamError, match=says):
        admit(["tree"], config)
    with pytest.raises(SeamError, match=says):
        require_seams("tree")
    # Nor does it run.
    with proving(), pytest.raises(SeamError, match=says):
        require_seams("tree")
    with proving():
        assert "not what tree were written for" in refused(["tree"], config)


def test_a_proof_is_bound_to_flags_device_and_versions(vllm: MadeUp, config: Any) -> None:
    vllm.write(OTHER_TEXT + STORE)
    proof = proof_of(config, found())
    here = proof.machine
    others = [
        replace(proof, machine=replace(here, device="stone")),
        replace(proof, machine=replace(here, vllm="0.34.1")),
        replace(proof, machine=replace(here, graft="0.1")),
        replace(proof, machine=replace(here, driver="550")),
        replace(proof, machine=replace(here, plugins="towers 1.1")),
    ]
    for other in others:
        other.keep()
        assert refused(["tree"], config)
        with pytest.raises(SeamError):
            require_seams("tree")
    proof.keep()
    assert not refused(["tree"], config)
    for flags in (make_config("llama 70b"), make_config(tree={"topk": 8}), make_config(vit={})):
        assert "none of these flags is kept" in refused(["tree"], flags)


def test_packages_that_add_to_ours_are_of_the_machine(
    vllm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Machine.here()
    info = tmp_path / "towers-1.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: towers\nVersion: 1.1\n")
    (info / "entry_points.txt").write_text("[vllm_graft]\na = towers:a\nb = towers:b\n")
    importlib.invalidate_caches()
    assert "towers" not in before.plugins
    assert "towers 1.1" in Machine.here().plugins.split(", ")


def test_a_tested_version_takes_no_proof(vllm: MadeUp, config: Any) -> None:
    vllm.write(OTHER_TEXT + STORE, version="0.33.1")
    proof_of(config, {"thing.copy": normalized_hash(OTHER_TEXT)}).keep()
    assert "thing.copy" in refused(["tree"], config)
    with pytest.raises(SeamError, match=r"thing\.copy"):
        require_seams("tree")
    # The worker says so, as ever.
    admit(["tree"], config)


@pytest.mark.parametrize("version", ["0.33.1.dev212+g0a1b2c3d", "0.34.0rc1", "0.34.0.dev1+cpu"])
def test_a_build_between_releases_may_be_proven(vllm: MadeUp, config: Any, version: str) -> None:
    vllm.write(OTHER_TEXT + STORE, version=version)
    with pytest.raises(SeamError, match=r"none of these flags is kept.*vllm-graft prove"):
        admit(["tree"], config)
    proof_of(config, found()).keep()
    admit(["tree"], config)
    require_seams("tree")


@pytest.mark.parametrize("version", ["0.33.0", "0.32.7", "0.33.0+cpu", "0.33.0rc2", "0.33.1.post1"])
def test_a_tested_version_looks_for_no_proof(
    vllm: MadeUp, config: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.write(version=version)
    for name in ("find", "of_this_machine", "folder", "flags_of"):
        monkeypatch.setattr(proofs, name, lambda *_: pytest.fail("it looked"))
    monkeypatch.setattr(compare, "check_seams", _counted(compare.check_seams, checks := []))
    admit(["tree"], config)
    require_seams("tree")
    assert refused(["tree"], config) == ""
    assert len(checks) == 1


def _counted(original: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    return counting


def test_what_is_no_proof_is_none(vllm: MadeUp, config: Any) -> None:
    file = proof_of(config, {}).keep()
    assert proofs.find(config) is not None
    whole = file.read_text()
    texts = ["", "[]", "{}", '{"machine": {}}', "null", '"text"', "[" * 100_000, whole[:-9]]
    texts += [whole.replace('"rows"', '"row"'), whole.replace('"rows": {}', '"rows": []')]
    texts += [whole.replace('"differences": []', '"differences": null')]
    assert whole not in texts
    for text in texts:
        file.write_text(text)
        assert proofs.find(config) is None
        assert list(proofs.of_this_machine()) == []


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("model_config", {"enforce_eager": True}),
        ("model_config", {"architectures": ["Mamba"]}),
        ("cache_config", {"cache_dtype": "fp8"}),
        ("cache_config", {"user_specified_block_size": True}),
        ("parallel_config", {"data_parallel_size": 2}),
        ("compilation_config", {"cudagraph_mode": "PIECEWISE"}),
        ("scheduler_config", {"async_scheduling": False}),
        ("", {"lora_config": SimpleNamespace(max_lora_rank=16)}),
        ("", {"additional_config": {"graft": {"tree": {"topk": 4}}, "gdn_prefill_backend": "x"}}),
    ],
)
def test_what_the_engines_of_a_proof_were_given_is_no_other(
    vllm: MadeUp, config: Any, section: str, changes: dict[str, Any]
) -> None:
    vllm.write(OTHER_TEXT + STORE)
    proof_of(config, found()).keep()
    assert not refused(["tree"], config)
    vars(getattr(config, section) if section else config).update(changes)
    assert "none of these flags is kept" in refused(["tree"], config)


@pytest.mark.parametrize("name", ["VLLM_USE_SOMETHING", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_X"])
def test_variables_that_change_kernels_are_of_the_flags(
    vllm: MadeUp, config: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.write(OTHER_TEXT + STORE)
    rows = found()
    proof_of(config, rows).keep()
    monkeypatch.setitem(proofs.STARTED_WITH, name, "1")
    with pytest.raises(SeamError, match="none of these flags is kept"):
        admit(["tree"], config)
    proof_of(config, rows).keep()
    admit(["tree"], config)
    # What vLLM sets itself for a model, or is for logs, is no flag.
    monkeypatch.setenv(name, "2")
    monkeypatch.setitem(proofs.STARTED_WITH, "VLLM_LOGGING_LEVEL", "DEBUG")
    admit(["tree"], config)


def test_what_is_made_of_an_admitted_configuration_looks_for_no_proof(
    vllm: MadeUp, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.write(OTHER_TEXT + STORE)
    monkeypatch.setattr(permission, "parent_process", lambda: object())
    for _ in range(2):
        # An engine may be a child of somebody's, too.
        with pytest.raises(SeamError):
            admit(["tree"], config)
        monkeypatch.setattr(permission, "parent_process", lambda: None)
        config.parallel_config.worker_extension_cls = "vllm_graft.WorkerExtension"
    monkeypatch.setattr(permission, "parent_process", lambda: object())
    admit(["tree"], config)
    monkeypatch.setattr(permission, "parent_process", lambda: None)
    config.model_config = config.speculative_config.draft_model_config
    admit(["tree"], config)


def test_a_block_size_that_vllm_chose_is_no_flag(vllm: MadeUp, config: Any) -> None:
    before = proofs.flags_of(config)
    config.cache_config.block_size = 64
    assert proofs.flags_of(config) == before


def test_a_proof_of_another_user_or_name_is_none(
    vllm: MadeUp, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = proof_of(config, {}).keep()
    assert proofs.find(config) is not None
    moved = file.rename(proof_of(make_config("other"), {}).file)
    assert proofs.find(make_config("other")) is None
    moved.rename(file)
    assert proofs.find(config) is not None
    owner = file.stat().st_uid
    if owner != 0:
        monkeypatch.setattr(proofs.os, "geteuid", lambda: owner + 1)
    else:
        os.chown(file, 12345, -1)
    assert proofs.find(config) is None


def test_a_user_without_a_home_has_no_proofs(
    vllm: MadeUp, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(RuntimeError):
        Path.home()
    admit(["tree"], config)


def test_sizes_of_a_host_cache_are_no_other_flags(vllm: MadeUp, config: Any) -> None:
    def with_cache(**extra: Any) -> dict[str, Any]:
        config.kv_transfer_config = SimpleNamespace(
            kv_connector="HiCacheConnector", kv_connector_extra_config=extra
        )
        return proofs.flags_of(config)

    one = with_cache(host_bytes="1GiB", storage={"path": "/a"})
    assert with_cache(host_bytes="2GiB", storage={"path": "/b"}) == one
    assert with_cache(host_bytes="1GiB", storage={"path": "/a"}, _graft_nonce="a") == one
    assert with_cache(host_bytes="1GiB") != one
    assert with_cache(host_bytes="1GiB", storage={"path": "/a"}, load="layerwise") != one
    several = [with_cache(connectors=[{"host_bytes": size}, {"x": 1}]) for size in "12"]
    assert several[0] == several[1] != with_cache(connectors=[{"host_bytes": "1"}, {"x": 2}])
