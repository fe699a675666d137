"""A real engine records what it served, beside what a preset decides."""

import json
import time
from pathlib import Path

import pytest

from tests.support.answers.metrics_page import metrics_page
from tests.support.engines.pairs import Pair, Request, answer_all
from vllm_graft.metrics.server_info import total
from vllm_graft.testing import spec_metrics

pytestmark = pytest.mark.engine


def test_an_engine_records_what_it_served(
    pair: Pair, samples: list[Request], tmp_path: Path
) -> None:
    traffic = tmp_path / "traffic"
    graft = {"preset": "auto", "learn": {"record": str(traffic)}}
    salted = [Request({"prompt": "secret", "cache_salt": "tenant"}, {"max_tokens": 4})]
    with pair.engine(additional_config={"graft": graft}) as llm:
        answers = answer_all(llm, samples)
        # The page tells a second later, with another step; nobody records these.
        end = time.monotonic() + 30
        recorded = 0.0
        while recorded < len(samples) and time.monotonic() < end:
            answer_all(llm, salted)
            recorded = total(metrics_page(), "vllm:graft_learn_recorded_requests_total")
        assert spec_metrics(llm).drafts > 0
        encode = llm.get_tokenizer().encode
        served = [
            {"prompt_token_ids": encode(asked.prompt), "token_ids": answer.tokens[0]}
            for asked, answer in zip(samples, answers)
        ]
    [file] = traffic.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert recorded == len(samples)
    assert sorted(map(repr, rows)) == sorted(map(repr, served))
