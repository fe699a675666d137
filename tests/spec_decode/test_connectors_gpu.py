"""Trees on a device beside vLLM's own connectors: what they saved comes back, for the draft too."""

import importlib.util
import time
from typing import Any

import pytest

from tests.support.engines.pairs import Answer, Pair, Request, answer_all, counter, differing
from vllm_graft.testing import spec_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

BYTES = {"cpu_bytes_to_use": 2**28}
CONNECTORS: dict[str, dict[str, Any]] = {
    "OffloadingConnector": {**BYTES, "offload_prompt_only": False},
    "SimpleCPUOffloadConnector": BYTES,
    "LMCacheConnectorV1": {},
}


def is_forgotten(llm: Any, other: Request) -> bool:
    """Empty the prefix cache, whose blocks a connector holds until a step finds them saved."""
    for _ in range(50):
        if llm.reset_prefix_cache():
            return True
        answer_all(llm, [Request(other.prompt[:4], {"max_tokens": 1})])
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("name", CONNECTORS)
def test_k_v_comes_back(pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn of a dialogue finds its prompt and the answer to it, drafts among them."""
    if name.startswith("LMCache"):
        if importlib.util.find_spec("lmcache") is None:
            pytest.skip("needs lmcache")
        monkeypatch.setenv("LMCACHE_LOCAL_CPU", "True")
        monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "16")
        monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "0.3")
        monkeypatch.setenv("LMCACHE_SAVE_DECODE_CACHE", "True")
    params = {"temperature": 0, "max_tokens": 48}
    first = [Request(prompt, params) for prompt in pair.prompts[:4]]

    def second(answers: list[Answer]) -> list[Request]:
        texts = (asked.prompt + answer.texts[0] for asked, answer in zip(first, answers))
        return [Request(text + "\n" + pair.prompts[4][:40], params) for text in texts]

    with pair.on("cuda").engine() as llm:
        expected = answer_all(llm, first)
        then = answer_all(llm, second(expected))
    transfer = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": CONNECTORS[name],
    }
    lengths, foreign = [], []
    for given in (None, transfer):
        with pair.on("cuda").engine(nodes=15, kv_transfer_config=given) as llm:
            answers = answer_all(llm, first)
            assert not differing(answers, expected)
            if given is not None:
                assert is_forgotten(llm, first[0])
            assert not differing(answer_all(llm, second(answers)), then)
            lengths.append(spec_metrics(llm).acceptance_length)
            foreign.append(counter(llm, "vllm:external_prefix_cache_hits"))
    assert foreign[0] == 0 < foreign[1]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.05)
