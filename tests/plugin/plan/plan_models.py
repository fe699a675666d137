"""What `plan` says of the models of `models.json`, beside what vLLM's frontend decides of them.

Run as a program, because a process keeps the platform that vLLM has chosen in it:
``python -P plan_models.py FOLDER CASE...`` prints a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
PRESET = "auto"
NAMED = {"tree": {"nodes": 7, "topk": 4, "fallback": "refuse"}}
CHAIN = {"tree": {"nodes": 7, "topk": 4, "fallback": "chain"}}


def write_models(folder: Path) -> None:
    """Write each model's configuration, and that of a draft."""
    draft = {**MODELS["llama-3"], "architectures": ["LlamaForCausalLMEagle3"]}
    draft |= {"num_hidden_layers": 1, "draft_vocab_size": 512, "rope_scaling": None}
    draft |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    for name, config in {**MODELS, "draft": draft}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def speculative(folder: Path) -> dict[str, Any]:
    draft = str(folder / "draft")
    return {"method": "eagle3", "model": draft, "num_speculative_tokens": 4}


def flags(folder: Path, name: str, graft: Any) -> list[str]:
    """Return what follows `vllm serve`."""
    found = [str(folder / name), "--skip-tokenizer-init"]
    found += ["--speculative-config", json.dumps(speculative(folder))]
    return [*found, "--additional-config", json.dumps({"graft": graft})]


def planned(folder: Path, name: str, graft: Any) -> dict[str, Any]:
    from vllm_graft.plan.plan_report import as_dict
    from vllm_graft.plan.planning import make_plan
    from vllm_graft.plan.request import Request

    plan = as_dict(make_plan(Request.parse(flags(folder, name, graft)), "test"))
    return json.loads(json.dumps(plan))  # type: ignore[no-any-return]


def decided(folder: Path, name: str, graft: Any) -> dict[str, Any]:
    """Return what the frontend decides, built without any code of `plan`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments = EngineArgs(
        model=str(folder / name),
        skip_tokenizer_init=True,
        additional_config={"graft": graft},
        speculative_config=speculative(folder),
    )
    try:
        config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    sections = config.additional_config["graft"]
    told = sections.get("decided", {})
    return {
        "error": "",
        "on": sorted({*sections} - {"decided"}),
        "off": told.get("off", {}),
        "tokens": getattr(config.speculative_config, "num_speculative_tokens", None),
        "topk": sections.get("tree", {}).get("topk"),
    }


CASES = {"preset": PRESET, "tree": NAMED, "chain": CHAIN}
"""What is asked for, by name."""


def main() -> None:
    # Little of what is imported becomes garbage, and looking for it is a sixth of the time.
    gc.set_threshold(100_000, 50, 50)
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1"}
    from vllm_graft.testing.interpreter import install

    install.install()
    from vllm.model_executor.models import registry

    # A child process for each class takes many seconds.
    registry._run_in_subprocess = lambda function: function()
    found = {}
    for name in MODELS:
        for case in cases:
            one = (folder, name, CASES[case])
            found[f"{name} {case}"] = planned(*one), decided(*one)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
