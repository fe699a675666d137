"""vLLM's engines accept exactly the drafts that the drafters of plain torch foretell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lab_heads import accepting, files, learning, making, target_states
from benchmarks.lab_heads.dspark_head import MASK, DSparkHead
from benchmarks.lab_heads.mtp_module import MtpModule
from benchmarks.lab_heads.target_states import Read, Target
from benchmarks.real_pair.texts import Text
from tests.support.emitted import emitted
from tests.support.shipped_pair import SHIPPED
from vllm_graft.testing.pairs import Request, answer_all

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CPU = torch.device("cpu")
TOKENS = 28
DEPTH = {"mtp": 3, "dspark": 5}


def some_texts(target: Target) -> list[Text]:
    """What the target writes greedily, to learn from for a moment."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(SHIPPED / "target"))
    prompts = json.loads((SHIPPED / "prompts.json").read_text())
    asked = [tokenizer(each)["input_ids"] for each in prompts]
    tokens = torch.tensor([each[:16] for each in asked if len(each) >= 16][:32])
    drawn = target.model.generate(tokens, max_new_tokens=40, do_sample=False, eos_token_id=None)
    return [Text(each.to(torch.int32), 16, 0.0) for each in drawn]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafters of the tests' own target, which learned for a few seconds."""
    folder: Path = tmp_path_factory.mktemp("work")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    texts: list[Text] = []
    for kind, steps in (("mtp", 25), ("dspark", 60)):
        torch.manual_seed(0)
        sizes = making.Sizes(DEPTH[kind], layers=2, rank=32, blocks=6)
        made = making.MAKERS[kind](SHIPPED, CPU, sizes)
        texts = texts or some_texts(made.target)
        given = target_states.reads(made.target, texts, 500, 56, 4, 0)
        first, given = learning.beginning(given, 2)
        made.lesson.begin(first)
        learning.learn(made.lesson, given, learning.Run(CPU, 1000, steps, 3e-3))
        made.save(folder / kind)
    torch.set_num_threads(threads)
    return folder


@torch.no_grad()
def mtp_drafts(module: MtpModule, target: Target, read: Read, last: int) -> Tensor:
    """Drafts behind the token at `last`, if each one is right: int64 ``[depth]``."""
    embeds = target.embed(read.tokens[:, 1:])
    found = module.passes(read.last[:, :-1], embeds, DEPTH["mtp"])
    states = torch.stack([each[0, last - 1 + number] for number, each in enumerate(found)])
    return F.linear(states, target.outputs).argmax(-1)


@torch.no_grad()
def dspark_drafts(head: DSparkHead, target: Target, read: Read, last: int) -> Tensor:
    """Drafts behind the token at `last`, if each one is right: int64 ``[depth]``."""
    anchors = torch.tensor([[last]])
    embeds = target.embed(read.tokens[:, last : last + 1])
    states = head(read.inner, embeds, target.embed(torch.tensor(MASK)), anchors)[0, 0]
    logits = F.linear(states, target.outputs)
    before = read.tokens[0, last : last + DEPTH["dspark"]]
    return (logits + head.markov_head(before)).argmax(-1)


def foretold(kind: str, drafter: Any, target: Target, tokens: list[int], prompt: int) -> list[int]:
    """How many tokens each step emits, the prompt's own first; the last step has been cut off."""
    drafts = {"mtp": mtp_drafts, "dspark": dspark_drafts}[kind]
    padded = torch.tensor([tokens + [MASK] * (DEPTH[kind] + 1)])
    read = target.read(padded, torch.ones_like(padded, dtype=torch.bool))
    found, last = [1], prompt
    while last < len(tokens) - 1:
        wanted = padded[0, last + 1 : last + 1 + DEPTH[kind]]
        right = drafts(drafter, target, read, last) == wanted
        accepted = int(right.int().cumprod(0).sum())
        found.append(accepted + 1)
        last += found[-1]
    return found[:-1]


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_engines_accept_what_is_foretold(work: Path, kind: str, tmp_path: Path) -> None:
    pair = accepting.pair_of(SHIPPED, work / kind, kind, tmp_path)
    params = {"max_tokens": TOKENS, "temperature": 0}
    asked = [Request(text[:120], params) for text in pair.prompts[:3]]
    with accepting.engine(pair, kind, f"chain:{DEPTH[kind]}") as llm, emitted(llm) as found:
        answers = answer_all(llm, asked)
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer(request.prompt)["input_ids"] for request in asked]
    drafter: Any = {"mtp": files.load_module, "dspark": files.load_head}[kind](work / kind)
    target = making.target_of(SHIPPED, CPU, drafter.sizes.aux if kind == "dspark" else ())

    def steps() -> list[list[int]]:
        return [
            foretold(kind, drafter, target, prompt + answer.tokens[0], len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    expected = steps()
    emissions = [found[number][:-1] for number in sorted(found, key=int)]
    assert emissions == expected
    # Some drafts are right and some wrong, at the first depth and below it.
    assert {1, 2, 3} <= {length for each in expected for length in each[1:-1]}
    # Control: a drafter with other weights foretells something else.
    with torch.no_grad():
        for each in drafter.parameters():
            each.mul_(0.8)
    assert emissions != steps()
