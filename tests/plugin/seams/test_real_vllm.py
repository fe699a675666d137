"""The installed vLLM: the ledger, the entry point, and refusals before any model is loaded.

All of it happens in two fresh processes: vLLM's modules, once imported, would decide for the other
tests of this process whether Triton is interpreted.
"""

import importlib.util
import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.checkpoints import write_configs

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

# Without this a CUDA build of torchvision does not import beside a CPU build of torch.
MEND = """
from importlib.util import find_spec
if find_spec("vllm_graft.testing.torchvision_import"):
    from vllm_graft.testing import torchvision_import
    torchvision_import.install()
"""

# With the interpreter, Model Runner V2 is there on a machine without a GPU.
INTERPRETER = """
if find_spec("vllm_graft.testing.interpreter.install"):
    from vllm_graft.testing.interpreter import install
    install.install()
"""

LOOK = """
import importlib, os, sys
from vllm import plugins

answers = {}
plugins.load_general_plugins()
from vllm.platforms import current_platform
from vllm_graft import activation
from vllm_graft.seams import wrap as hooking
from vllm_graft.spec_decode.tree_part import TREES
EAGLE = "vllm.v1.worker.gpu.spec_decode.eagle.speculator"

hooked = current_platform.check_and_update_config
answers["registered"] = [activation._registered, hasattr(hooked, hooking.MARK)]
answers["early"] = [name in sys.modules for name in (EAGLE,)]
stock = importlib.import_module(EAGLE).EagleSpeculator
wrapper = importlib.import_module(activation._WORKER_MODULE).WorkerWrapperBase
answers["late"] = ["__new__" in vars(stock), hasattr(wrapper.initialize_from_config, "_vllm_graft")]

from types import SimpleNamespace
from unittest import mock
from vllm_graft.seams.sources import Sources
read = Sources.text
def moved(sources, module):
    return read(sources, module).replace(
        "def get_max_chunk_logits(vocab_size", "def get_max_chunk_logits(vocab, width"
    )
asked = SimpleNamespace(
    additional_config={"graft": {"tree": {}}},
    speculative_config=SimpleNamespace(method="eagle3"),
)
answers["proposer"] = TREES.speculator_class(stock, asked).__name__
from vllm_graft.seams import compare
compare._installed.cache_clear()
try:
    with mock.patch.object(Sources, "text", moved):
        TREES.speculator_class(stock, asked)
except Exception as error:
    answers["doctored"] = f"{type(error).__name__}: {error}"
import torch
answers["cuda"] = torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    os._exit(0 if "__new__" in vars(stock) and activation._registered else 1)
answers["forked"] = os.waitpid(child, 0)[1]
from vllm.utils.import_utils import resolve_obj_by_qualname
answers["extension"] = resolve_obj_by_qualname(activation.EXTENSION).__module__

from vllm.engine.arg_utils import EngineArgs
spec = {"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 7}
def built(**given):
    try:
        config = EngineArgs(model=TARGET, **given).create_engine_config()
        return "built " + repr(config.parallel_config.worker_extension_cls)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def create(additional, v2=None):
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if v2 is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = v2
    return built(speculative_config=spec, additional_config=additional)

answers["typo"] = create({"graft": {"tree": {"topkk": 8}}})
answers["dotted"] = create({"graft.tree.topk": 4})
answers["beside"] = create({"graft": {"tree": {}}, "graft_vit": {}})
answers["v1"] = create({"graft": {"tree": {}}}, "0")
answers["none"] = create({"other": 1})
from vllm.triton_utils import HAS_TRITON
answers["good"] = create({"graft": {"tree": {"topk": "4"}}}) if HAS_TRITON else None

from vllm.config import KVTransferConfig
def transfer(connector, extra):
    given = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return built(kv_transfer_config=KVTransferConfig(**given))

good = {"host_bytes": "64MiB"}
answers["backend"] = transfer("HiCacheConnector", {**good, "storage": {"backend": "segment"}})
answers["exabyte"] = transfer("HiCacheConnector", {"host_bytes": "1EB"})
answers["cache"] = transfer("HiCacheConnector", good)
child = {"kv_connector": "HiCacheConnector", "kv_role": "kv_both"}
children = [{**child, "kv_connector_extra_config": extra} for extra in (good, {"host_bytes": 1})]
answers["children"] = transfer("MultiConnector", {"connectors": children[:1] * 2})
answers["child"] = transfer("MultiConnector", {"connectors": children})
answers["cuda_after"] = torch.cuda.is_initialized()
import json
print("ANSWERS", json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, run_python: RunPython) -> dict[str, Any]:
    """Run one process with the installed vLLM and models without weights; return what it saw."""
    target, draft = write_configs(tmp_path_factory.mktemp("models"))
    names = f"TARGET, DRAFT = {str(target)!r}, {str(draft)!r}\n"
    done = run_python(MEND + INTERPRETER + names + LOOK, HF_HUB_OFFLINE="1")
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    answers: dict[str, Any] = json.loads(found[0].removeprefix("ANSWERS "))
    return answers


def test_a_symbol_that_moved_stops_the_worker(answers: dict[str, Any]) -> None:
    assert answers["proposer"] == "EagleTrees"
    message = answers["doctored"]
    assert message.startswith("SeamError: vLLM 0.32.")
    assert message.endswith(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler.get_max_chunk_logits: "
        "expected vocab_size, found vocab, width"
    )
    assert len(message.splitlines()) == 2


def test_vllm_calls_register(answers: dict[str, Any]) -> None:
    assert answers["registered"] == [True, True]
    assert answers["cuda"] is False
    assert answers["early"] == [False]
    assert answers["late"] == [True, True]
    assert answers["forked"] == 0
    assert answers["extension"] == "vllm_graft.extension"


def test_a_misspelt_key_stops_the_frontend(answers: dict[str, Any]) -> None:
    assert answers["typo"] == (
        "ConfigError: --additional-config.graft.tree.topkk: unknown key. Did you mean 'topk'?"
    )


def test_an_unsupported_combination_stops_the_frontend(answers: dict[str, Any]) -> None:
    assert answers["v1"].startswith("ConfigError: --additional-config.graft.tree asks for tree")
    assert "vLLM chose Model Runner V1" in answers["v1"]


def test_misplaced_keys_stop_the_frontend(answers: dict[str, Any]) -> None:
    for name, key, path in (
        ("dotted", "graft.tree.topk", "tree.topk"),
        ("beside", "graft_vit", "vit"),
    ):
        assert answers[name] == (
            f"ConfigError: --additional-config.graft: the key {key!r} of --additional-config is "
            f"not read. Write --additional-config.graft.{path}."
        )


def test_the_host_cache_s_keys_stop_the_frontend(answers: dict[str, Any]) -> None:
    flag = "--kv-transfer-config.kv_connector_extra_config"
    assert answers["backend"].startswith(f"EntryError: {flag}.storage.backend: no graft_storage_")
    child = f"{flag}.connectors[1].kv_connector_extra_config"
    for name, found in (
        ("exabyte", f"{flag}.host_bytes is 888.2 PiB"),
        ("child", f"{child}.host_bytes is 1"),
    ):
        assert answers[name].startswith("ConfigError: ")
        assert found in answers[name]
    for name in ("cache", "children"):
        assert answers[name] == "built 'vllm_graft.WorkerExtension'"
    assert answers["cuda_after"] is False


def test_without_our_key_stock_vllm_is_configured(answers: dict[str, Any]) -> None:
    assert answers["none"] == "built ''"


def test_a_good_key_extends_the_worker(answers: dict[str, Any]) -> None:
    if answers["good"] is None:
        pytest.skip("vLLM sees no Triton here, hence no Model Runner V2")
    assert answers["good"] == "built 'vllm_graft.WorkerExtension'"


def test_a_blocked_extension_is_loud(run_python: RunPython) -> None:
    code = """
from vllm import plugins
from vllm.utils.import_utils import resolve_obj_by_qualname
plugins.load_general_plugins()
from vllm_graft import activation
print("registered:", activation._registered)
resolve_obj_by_qualname("vllm_graft.WorkerExtension")
"""
    done = run_python(MEND + code, VLLM_PLUGINS="other")
    assert done.returncode == 1
    assert "registered: False" in done.stdout
    assert "NotActiveError: vllm_graft.WorkerExtension was asked for" in done.stderr
    assert "VLLM_PLUGINS='other' leaves out 'graft'" in done.stderr
