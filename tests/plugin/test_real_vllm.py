"""Against the installed vLLM: the ledger, the entry point, and refusals before any model is loaded.

Each test is one fresh process: vLLM's modules, once imported, would decide for the other tests
whether Triton is interpreted.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

# A CUDA build of torchvision beside a CPU build of torch does not import without it.
MEND = """
import importlib.util
if importlib.util.find_spec("vllm_graft.testing.torchvision_import"):
    from vllm_graft.testing import torchvision_import
    torchvision_import.install()
"""

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}

CREATE = (
    MEND
    + """
import json, sys
from vllm.engine.arg_utils import EngineArgs
target, draft, graft, keys = json.loads(sys.stdin.read())
arguments = EngineArgs(
    model=target, skip_tokenizer_init=True, additional_config=graft,
    speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 7}, **keys,
)
try:
    config = arguments.create_engine_config()
    print("built", repr(config.parallel_config.worker_extension_cls))
except Exception as error:
    print(type(error).__name__, error)
"""
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Configurations of a target and an EAGLE-3 head, without weights."""
    draft = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    folders = []
    for name, config in (("target", LLAMA), ("draft", {**draft, "draft_vocab_size": 64})):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        folders.append(str(folder))
    return folders[0], folders[1]


def _create(
    run_python: RunPython, models: tuple[str, str], graft: dict[str, Any], **variables: str
) -> str:
    values = json.dumps([*models, graft, {}])
    code = f"import io, sys; sys.stdin = io.StringIO({values!r})\n" + CREATE
    done = run_python(code, VLLM_LOGGING_LEVEL="INFO", HF_HUB_OFFLINE="1", **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_ledger_fits(run_python: RunPython) -> None:
    code = """
import vllm_graft
vllm_graft.register()
from vllm_graft.seams import check_seams
reports = check_seams()
assert len(reports) > 30
print("moved:", [report.problem for report in reports if report.problem])
"""
    done = run_python(MEND + code)
    assert "moved: []" in done.stdout, done.stdout + done.stderr[-2000:]


def test_vllm_calls_register(run_python: RunPython) -> None:
    code = """
import os, sys
from vllm import plugins
plugins.load_general_plugins()
from vllm.platforms import current_platform
from vllm_graft import activation
hooked = current_platform.check_and_update_config
print("registered:", activation._registered, hasattr(hooked, activation._MARK))
if not activation._registered:
    raise SystemExit
import torch
print("cuda:", torch.cuda.is_initialized())
print("early:", activation._EAGLE_MODULE in sys.modules, activation._WORKER_MODULE in sys.modules)
import importlib
stock = importlib.import_module(activation._EAGLE_MODULE).EagleSpeculator
wrapper = importlib.import_module(activation._WORKER_MODULE).WorkerWrapperBase
print("late:", "__new__" in vars(stock), hasattr(wrapper.initialize_from_config, activation._MARK))
from vllm.utils.import_utils import resolve_obj_by_qualname
print("extension:", resolve_obj_by_qualname(activation.EXTENSION).__module__)
sys.stdout.flush()
if os.fork() == 0:
    print("forked:", "__new__" in vars(stock), activation._registered, flush=True)
    os._exit(0)
os.wait()
"""
    done = run_python(MEND + code)
    lines = [line for line in done.stdout.splitlines() if ": " in line]
    assert lines == [
        "registered: True True",
        "cuda: False",
        "early: False False",
        "late: True True",
        "extension: vllm_graft.worker",
        "forked: True True",
    ], done.stderr[-2000:]
    blocked = run_python(MEND + code, VLLM_PLUGINS="other")
    assert "registered: False False" in blocked.stdout, blocked.stderr[-2000:]


def test_a_blocked_extension_is_loud(run_python: RunPython) -> None:
    code = """
from vllm import plugins
from vllm.utils.import_utils import resolve_obj_by_qualname
plugins.load_general_plugins()
resolve_obj_by_qualname("vllm_graft.WorkerExtension")
"""
    done = run_python(MEND + code, VLLM_PLUGINS="other")
    assert done.returncode == 1
    assert "NotActiveError: vllm_graft.WorkerExtension was asked for" in done.stderr
    assert "VLLM_PLUGINS='other' leaves out 'graft'" in done.stderr


def test_a_misspelt_key_stops_the_frontend(run_python: RunPython, models: tuple[str, str]) -> None:
    answer = _create(run_python, models, {"graft": {"eagle": {"topkk": 8}}})
    assert answer.splitlines()[-1] == (
        "ConfigError --additional-config.graft.eagle.topkk: unknown key. Did you mean 'topk'?"
    )


def test_an_unsupported_combination_stops_the_frontend(
    run_python: RunPython, models: tuple[str, str]
) -> None:
    answer = _create(run_python, models, {"graft": {"eagle": {}}}, VLLM_USE_V2_MODEL_RUNNER="0")
    assert "ConfigError" in answer
    assert "vLLM chose Model Runner V1" in answer


def test_without_our_key_stock_vllm_is_configured(
    run_python: RunPython, models: tuple[str, str]
) -> None:
    assert "built ''" in _create(run_python, models, {"other": 1})


def test_a_good_key_extends_the_worker(run_python: RunPython, models: tuple[str, str]) -> None:
    graft = {"graft": {"eagle": {"topk": "4"}}}
    answer = _create(run_python, models, graft, VLLM_USE_V2_MODEL_RUNNER="1")
    assert "built 'vllm_graft.WorkerExtension'" in answer
    assert "EAGLE trees of 7 nodes (topk 4, steps 6); proposer tree (vllm-graft" in answer
