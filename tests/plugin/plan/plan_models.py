"""What `plan` says of the models of `models.json`, beside what vLLM's frontend decides of them.

Run as a program, because a process keeps the platform that vLLM has chosen in it:
``python -P -m tests.plugin.plan.plan_models cpu|gpu FOLDER [MODEL ...]`` prints a line of JSON, in
which a GPU has the plans of `stranger_models` beside these.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.plugin.plan import stranger_models

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
GPU = "H100"
PRESET = "auto"
NAMED = {"tree": {"nodes": 7, "topk": 4, "fallback": "refuse"}}
CHAIN = {"tree": {"nodes": 7, "topk": 4, "fallback": "chain"}}
VISION = {"vit": {"memory": 64}}


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


def flags(folder: Path, name: str, graft: Any, *, drafts: bool) -> list[str]:
    """Return what follows `vllm serve`."""
    found = [str(folder / name), "--skip-tokenizer-init"]
    if drafts:
        found += ["--speculative-config", json.dumps(speculative(folder))]
    return [*found, "--additional-config", json.dumps({"graft": graft})]


def planned(folder: Path, name: str, graft: Any, *, drafts: bool) -> dict[str, Any]:
    from vllm_graft.plan.planning import as_dict, make_plan
    from vllm_graft.plan.request import Request

    plan = as_dict(make_plan(Request.parse(flags(folder, name, graft, drafts=drafts)), "test"))
    return json.loads(json.dumps(plan))  # type: ignore[no-any-return]


def decided(folder: Path, name: str, graft: Any, *, drafts: bool) -> dict[str, Any]:
    """Return what the frontend decides, built without any code of `plan`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    options: dict[str, Any] = {"speculative_config": speculative(folder)} if drafts else {}
    arguments = EngineArgs(
        model=str(folder / name),
        skip_tokenizer_init=True,
        additional_config={"graft": graft},
        **options,
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


def cases(platform: str) -> dict[str, tuple[Any, bool]]:
    """Return what is asked for, and whether there is a draft, by name."""
    if platform == "gpu":
        return {"preset": (PRESET, True), "vision": (VISION, False)}
    return {"preset": (PRESET, True), "tree": (NAMED, True), "chain": (CHAIN, True)}


def main() -> None:
    # Little of what is imported becomes garbage, and looking for it is a sixth of the time.
    gc.set_threshold(100_000, 50, 50)
    platform, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or [*MODELS]
    os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1"}
    from vllm_graft.plan.gpu import Gpu, pretend
    from vllm_graft.plan.request import inspecting

    if platform == "gpu":
        pretend(Gpu.parse(GPU))
    else:
        from vllm_graft.testing.interpreter import install

        install.install()
    found = {}
    with inspecting():
        for name in names:
            for case, (graft, drafts) in cases(platform).items():
                if case == "vision" and "vision_config" not in MODELS[name]:
                    continue
                one = (folder, name, graft)
                both = planned(*one, drafts=drafts), decided(*one, drafts=drafts)
                found[f"{name} {case}"] = both
        strangers = stranger_models.plans(folder / "strangers") if platform == "gpu" else {}
    print(json.dumps([found, strangers]), flush=True)
    os._exit(0)  # To tidy up takes a quarter of the time.


if __name__ == "__main__":
    main()
