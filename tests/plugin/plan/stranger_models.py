"""What `plan` says of models that people serve, and of the commands that it prints for them."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("strangers.json").read_text()
)
LLAMA = "Llama-3.1-8B-Instruct"
GLM_LAYERS = '{"num_hidden_layers": 20}'
HOST = [
    "--kv-transfer-config",
    '{"kv_connector": "HiCacheConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"host_bytes": "64TiB"}}',
]
"""More than the machine that plans has."""


def drafting(method: str, tokens: int, **more: Any) -> list[str]:
    found = {"method": method, "num_speculative_tokens": tokens, **more}
    return ["--speculative-config", json.dumps(found)]


EAGLE = drafting("eagle3", 7, model="EAGLE3-LLaMA3.1-Instruct-8B")
CASES = {
    "llama": [LLAMA],
    "llama-eagle3-host": [LLAMA, *EAGLE, *HOST],
    "llama-host-replicas": [LLAMA, *HOST, "--data-parallel-size", "2"],
    "llama-lora": [LLAMA, *EAGLE, "--enable-lora"],
    "qwen3-ngram": ["Qwen3-32B", *drafting("ngram", 5, prompt_lookup_max=4)],
    "qwen3-long": ["Qwen3-32B", "--gpu-memory-utilization", "0.8"],
    "qwen3-large": ["Qwen3-32B", "--gpu-memory-utilization", "0.5"],
    "qwen3.5": ["Qwen3.5-9B"],
    "glm": ["GLM-4.6-FP8", "--tensor-parallel-size", "8", "--hf-overrides", GLM_LAYERS],
    "hy": ["HY3", "--tensor-parallel-size", "8", "--hf-overrides", '{"num_hidden_layers": 6}'],
    "gemma-3": ["gemma-3-27b-it"],
    "gemma-4": ["gemma-4-31B-it"],
    "gpt-oss": ["gpt-oss-20b"],
    "quantized": ["Qwen3-0.6B", "--quantization", "fp8"],
}


MISTRAL = [
    f"--{each}-{how}=mistral"
    for each, how in (("config", "format"), ("load", "format"), ("tokenizer", "mode"))
]


def write_models(folder: Path) -> None:
    for name, config in MODELS.items():
        (folder / name).mkdir()
        # Mistral's own format has other keys.
        file = "params.json" if "dim" in config else "config.json"
        (folder / name / file).write_text(json.dumps(config))


def planned(arguments: list[str]) -> dict[str, Any]:
    from vllm_graft.plan.planning import as_dict, make_plan
    from vllm_graft.plan.request import Request

    return as_dict(make_plan(Request.parse(arguments), "test"))


def plans(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The plan of each case, and those of its commands, given to `plan` again."""
    folder.mkdir()
    write_models(folder)
    os.chdir(folder)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, arguments in CASES.items():
        plan = planned([*arguments, "--skip-tokenizer-init"])
        commands = filter(None, (plan["command"], *plan["better"][1:]))
        found[name] = [plan, *(planned(shlex.split(each)[2:]) for each in commands)]
    return found
