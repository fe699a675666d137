"""Trees that are grown without an engine equal those of an engine."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import tree_lengths
from benchmarks.coarse_weights import coarse, read_format
from benchmarks.pair_models import Head, Llama, read_weights, write
from tests.support.shipped_pair import SHIPPED
from vllm_graft.spec_decode.heads.head import SHARPNESS
from vllm_graft.testing.pairs import Pair

TEXTS, PROMPT, TOKENS = 3, 24, 40


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_lengths_are_an_engines() -> None:
    from vllm import SamplingParams

    from vllm_graft.testing import spec_metrics

    with torch.inference_mode():
        target, draft = Llama(SHIPPED), read_weights(SHIPPED / "eagle3")
        prompts = tree_lengths.read_prompts(SHIPPED, TEXTS, PROMPT)
        # Trees at the end of a text see tokens that the engine does not reach.
        texts = write(target, prompts, TOKENS + 8, 0.0)
        steps = accepted = 0
        for text in texts:
            [lengths] = tree_lengths.measure(Head(draft, target, text), [(4, 4, 9)], 0.0, SHARPNESS)
            # The first token comes from the step that computes the prompt.
            place = 0
            while place + 1 < TOKENS:
                steps, accepted = steps + 1, accepted + lengths[place] - 1
                place += lengths[place]
    pair = Pair.load(SHIPPED)
    with pair.engine(nodes=9, topk=4, steps=4, disable_log_stats=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
        outputs = llm.generate(asked, params, use_tqdm=False)
        found = spec_metrics(llm)
    written = [text.tokens[PROMPT : PROMPT + TOKENS].tolist() for text in texts]
    assert [list(output.outputs[0].token_ids) for output in outputs] == written
    assert found.drafts == steps
    # The last tree may hold more tokens than the request still wants.
    assert accepted - 4 * TEXTS <= found.accepted_tokens <= accepted
    assert accepted > steps


def test_shapes_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert tree_lengths.read_shape("4,7,7") == (4, 7, 7)
    with pytest.raises(SystemExit):
        tree_lengths.main([str(SHIPPED), "--shapes", "2,2,7"])
    assert "2,2,7: no such tree has 7 nodes" in capsys.readouterr().err
    assert tree_lengths.main([str(SHIPPED), "--prompt", "100000"]) == 1
    assert "--prompt 100000: no prompt" in capsys.readouterr().err


def test_each_tree_grows_where_the_one_before_ended() -> None:
    # 3 from place 0, 1 from place 3, 2 from place 4: places between are never a root.
    assert tree_lengths.mean_length([3, 9, 9, 1, 2, 9]) == 2.0


def test_of_equal_scores_the_earlier_candidate_is_kept() -> None:
    # A chain of 40 sure nodes, all of which are right: the first n are kept, and all count.
    chain = tree_lengths.Candidates(torch.zeros(3, 40), torch.arange(40).expand(3, -1) < 20)
    for nodes in range(1, 21):
        assert chain.lengths(nodes) == [1 + nodes] * 3
    assert chain.lengths(30) == [21] * 3


def test_sampled_texts_and_trees_know_the_same_noise(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--texts", "2", "--prompt", "16", "--tokens", "30", "--shapes", "1,1,1", "4,3,9"]
    given += ["--temperature", "1", "--sharpness", "1"]
    assert tree_lengths.main([str(SHIPPED), *given]) == 0
    *_, row = capsys.readouterr().out.strip().splitlines()
    _, temperature, weights, sharpness, narrow, wide, _ = (cell.strip() for cell in row.split("|"))
    assert (temperature, weights, sharpness) == ("1", "as-loaded", "1")
    # Without the noise a single draft would be right a fifth of the time.
    assert 1.3 < float(narrow) <= 2 < float(wide) <= 4


def test_weights_of_few_bits_are_near_and_no_nearer_than_their_steps() -> None:
    weight = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    errors = {}
    for name in ("fp8", "int4:8", "int4:32", "int4-search:8"):
        _, rounding = read_format(name)
        errors[name] = float((rounding(weight) - weight).square().mean())
    assert 0 < errors["fp8"] < errors["int4-search:8"] < errors["int4:8"] < errors["int4:32"]
    _, rounding = read_format("int4:8")
    found = rounding(weight)
    for row, group in ((0, slice(0, 8)), (5, slice(16, 20))):
        step = weight[row, group].abs().max() / 7
        counts = found[row, group] / step
        torch.testing.assert_close(counts, counts.round(), atol=1e-4, rtol=0)
        assert (found[row, group] - weight[row, group]).abs().max() <= step / 2 + 1e-6
    assert len((found[0, :8] / (weight[0, :8].abs().max() / 7)).round().unique()) <= 15


def test_only_matrices_of_products_are_rounded() -> None:
    loaded = {
        "embed_tokens.weight": torch.rand(4, 4),
        "norm.weight": torch.rand(4),
        "fc.weight": torch.rand(4, 4),
    }
    found = coarse(loaded, read_format("int4:4")[1])
    changed = [name for name in loaded if not torch.equal(found[name], loaded[name])]
    assert changed == ["fc.weight"]


@pytest.mark.parametrize("text", ["int4", "int4:0", "int8:4", "fp4"])
def test_other_formats_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="int4:GROUP"):
        read_format(text)
