"""Engines of each kind of drafter and target, for tests of several ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.answers.text_requests import COMPACT, greedy, seeded, structured_requests
from tests.support.engines.block_engines import FROM_LAST
from tests.support.engines.pairs import Answer, Pair, Request
from tests.support.models.block_drafts import DEPTH, write_block_target, write_dspark
from tests.support.models.latent_models import write_target
from tests.support.models.lora_adapters import write_adapter
from tests.support.models.mtp_targets import write_glm4_moe
from tests.support.models.served_qwen import image_request, write_served_qwen3_5, write_text_qwen3_5
from tests.support.models.window_models import BLOCK, windowed_pair, write_gpt_oss
from vllm_graft.spec_decode.trees.text_state import KEY
from vllm_graft.testing import write_eagle3

NODES, TOKENS = 15, 32
TREE = {"topk": 4, "steps": 4}
PROMPTS: list[Any] = [
    {"prompt_token_ids": ids}
    for ids in ([7, 3, 9, 30, 2], [5] * 40, list(range(1, 90)), [11, 12, 13, 14])
]


@dataclass
class Family:
    """An engine with trees, and requests to it.

    Attributes:
        options: of ``vllm.LLM``, for the target alone, too.
        near: the largest gap of near ties in 16 bits; 0 where answers have to be equal.
        accepts: whether the draft predicts anything.
        predicted: whether half of the requests are to have their answer as a prediction.
    """

    target: str | Path
    speculative: dict[str, Any]
    requests: list[Request]
    options: dict[str, Any] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=lambda: dict(TREE))
    graft: dict[str, Any] = field(default_factory=dict)
    near: float = 0.0
    accepts: bool = True
    predicted: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """The options that ask for trees, beside those of the target alone."""
        graft = {"graft": {"tree": self.tree, **self.graft}}
        given = {**self.options.get("additional_config", {}), **graft}
        return {"speculative_config": self.speculative, "additional_config": given}

    def predict(self, answers: list[Answer]) -> list[Request]:
        """The requests that were answered, half of them with a prediction if that is wanted."""
        asked = self.requests[: len(answers)]
        if self.predicted:
            for place in range(1, len(asked), 2):
                more = {"extra_args": {KEY: answers[place].tokens[0]}}
                asked[place] = replace(asked[place], params=asked[place].params | more)
        return asked


def eagle(draft: str | Path, nodes: int = NODES) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(draft), "num_speculative_tokens": nodes}


def mtp(target: str | Path, **more: Any) -> dict[str, Any]:
    return {"method": "mtp", "model": str(target), "num_speculative_tokens": NODES, **more}


def greedily(prompts: list[Any], **params: Any) -> list[Request]:
    asked = {"max_tokens": TOKENS, "temperature": 0, "logprobs": 5, **params}
    return [Request(prompt, dict(asked)) for prompt in prompts]


def eagle3(folder: Path, pair: Pair) -> Family:
    requests = greedy(TOKENS, pair.prompts[:4]) + seeded(TOKENS, pair.prompts[:4])
    return Family(pair.target, eagle(pair.draft), requests)


def experts(folder: Path, pair: Pair) -> Family:
    target = write_glm4_moe(folder, from_states=0.2)
    return Family(target, mtp(target), greedy(TOKENS) + seeded(TOKENS))


def parallel_experts(folder: Path, pair: Pair) -> Family:
    family = experts(folder, pair)
    family.options["enable_expert_parallel"] = True
    return family


def dspark(folder: Path, pair: Pair) -> Family:
    target = write_block_target(folder / "target", from_last=FROM_LAST)
    draft = write_dspark(folder / "draft", from_last=FROM_LAST, error=0.3, causal=True)
    speculative = {"method": "dspark", "model": str(draft), "num_speculative_tokens": NODES}
    tree = {"topk": 4, "steps": DEPTH - 1}
    return Family(target, speculative, greedy(TOKENS) + seeded(TOKENS), tree=tree)


def latents(folder: Path, pair: Pair) -> Family:
    target = write_target(folder, 16)
    options = {
        "dtype": "float16",
        "attention_backend": "TRITON_MLA",
        "block_size": 64,
        "skip_tokenizer_init": True,
    }
    return Family(target, mtp(target), greedily(PROMPTS), options, near=0.05)


def delta_rule(folder: Path, pair: Pair) -> Family:
    target = write_text_qwen3_5(folder, heads=(2, 4), head=128, hidden=256)
    options = {
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": "float32",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 2**30,
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    tree = {**TREE, "recurrent": True}
    return Family(target, mtp(target), greedily(PROMPTS), options, tree, near=0.5)


def windows(folder: Path, pair: Pair) -> Family:
    narrow = windowed_pair(folder)
    requests = greedy(TOKENS, narrow.prompts[:4]) + seeded(TOKENS, narrow.prompts[:4])
    return Family(narrow.target, eagle(narrow.draft), requests, {"block_size": BLOCK})


def sinks(folder: Path, pair: Pair) -> Family:
    """Windows, sinks and experts; the head is random."""
    # VLLM's gpt-oss has no copies of K/V heads, so that each rank needs one of its own.
    target = write_gpt_oss(folder / "target", num_key_value_heads=2)
    draft = write_eagle3(folder / "draft")
    requests = greedily(PROMPTS, logprobs=None)
    options = {"block_size": BLOCK, "skip_tokenizer_init": True}
    return Family(target, eagle(draft), requests, options, accepts=False)


def grammars(folder: Path, pair: Pair) -> Family:
    requests = structured_requests(pair, TOKENS)
    return Family(pair.target, eagle(pair.draft), requests, dict(COMPACT))


def adapters(folder: Path, pair: Pair) -> Family:
    """Two adapters, one of the output head as well, and the target itself in one batch."""
    folder.mkdir()
    given = [
        write_adapter(folder / "head", pair.target, 0, head=True),
        write_adapter(folder / "attention", pair.target, 1, head=False),
        None,
    ]
    asked = greedily(pair.prompts[:2])
    requests = [Request(each.prompt, each.params, adapter) for each in asked for adapter in given]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float16"}
    return Family(pair.target, eagle(pair.draft), requests, options, near=0.1)


def ngrams(folder: Path, pair: Pair) -> Family:
    """Return `eagle3` with n-grams beside the head."""
    family = eagle3(folder, pair)
    family.tree["ngram"], family.predicted = True, True
    return family


def ngrams_alone(folder: Path, pair: Pair) -> Family:
    texts = [text * 2 for text in pair.prompts[:4]]
    speculative = {
        "method": "ngram_gpu",
        "num_speculative_tokens": NODES,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    requests = greedy(TOKENS, texts) + seeded(TOKENS, texts)
    return Family(pair.target, speculative, requests, {"max_model_len": 512})


def draft_model(folder: Path, pair: Pair) -> Family:
    speculative = {"method": "draft_model", "model": pair.target, "num_speculative_tokens": 3}
    requests = greedy(TOKENS, pair.prompts[:4]) + seeded(TOKENS, pair.prompts[:4])
    return Family(pair.target, speculative, requests, tree={"topk": 3, "nodes": 7})


def images(folder: Path, pair: Pair) -> Family:
    """Each rank has a part of the tower's weights."""
    target = write_served_qwen3_5(folder, heads=(2, 4), head=128, hidden=256)
    family = delta_rule(folder.with_name("text"), pair)
    del family.options["skip_tokenizer_init"]
    sizes = [[(64, 64)], [(96, 64), (64, 128)]]
    prompts = [image_request("what is it", each, seed) for seed, each in enumerate(sizes)]
    family.target, family.speculative = target, mtp(target)
    family.requests, family.graft = greedily(prompts), {"vit": {"memory": 64}}
    family.options["mm_encoder_tp_mode"] = "weights"
    return family


def spread_images(folder: Path, pair: Pair) -> Family:
    """Each rank has the whole tower, and some of the images."""
    family = images(folder, pair)
    family.options["mm_encoder_tp_mode"] = "data"
    return family
