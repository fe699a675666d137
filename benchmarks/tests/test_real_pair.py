"""The real pair's parts on tiny models: conversations, texts, training, widening."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.real_pair import conversations, training, widening
from benchmarks.real_pair.descent import Run
from benchmarks.real_pair.head import Head, HeadSizes, load_head, save_head
from benchmarks.real_pair.texts import Text, batches, padded, read_texts, write_texts
from benchmarks.tests.small_targets import with_norms, write_target
from tests.support.engines.shipped_pair import SHIPPED

CPU = torch.device("cpu")
PROMPTS = SHIPPED / "prompts.json"


def conversation(*values: str, first: str = "human", name: str = "a") -> dict[str, Any]:
    other = {"human": "gpt", "gpt": "human"}
    turns, speaker = [], first
    for value in values:
        turns.append({"from": speaker, "value": value})
        speaker = other[speaker]
    return {"id": name, "conversations": turns}


# --- conversations ------------------------------------------------------------------------------


def test_a_cut_file_is_read_up_to_its_last_whole_conversation() -> None:
    all_ = [conversation(f'question {i}, with "marks" and }}]', "an answer") for i in range(4)]
    text = json.dumps(all_, indent=1)
    assert list(conversations.whole(text)) == all_
    for cut in (1, 3, 40):
        assert list(conversations.whole(text[:-cut])) == all_[: 4 if cut == 1 else 3]
    assert list(conversations.whole("[")) == []
    with pytest.raises(ValueError, match="begins"):
        list(conversations.whole("{}"))


def test_turns_that_do_not_do_end_a_conversation() -> None:
    good = ("what is this?", "an answer it is")
    assert conversations.usable(conversation(*good)) == conversation(*good)
    # The part of a longer one begins with an answer; a question at the end has none.
    part = conversations.usable(conversation("the answer before", *good, "and then?", first="gpt"))
    assert part == conversation(*good)
    long = "x" * (conversations.MOST_CHARACTERS + 1)
    for bad in (long, "?", "\u4f60\u597d\u4f60\u597d\u4f60\u597d\u4f60\u597d", "\u0434\u0430" * 5):
        assert conversations.usable(conversation(bad, "an answer it is")) is None
        kept = conversations.usable(conversation(*good, "and another?", bad))
        assert kept == conversation(*good)
    assert conversations.usable(conversation("it\u2019s \u201cquoted\u201d", "an answer it is"))


def test_questions_come_once_and_on_one_side() -> None:
    all_ = [conversation(f"question {i % 300}", f"answer number {i}") for i in range(400)]
    train, held_out = conversations.split(json.dumps(all_), 10**6)
    asked = [conversations.first_prompt(each) for each in train + held_out]
    assert len(set(asked)) == len(asked) == 300
    assert 5 <= len(held_out) <= 40
    assert all(map(conversations.is_held_out, held_out))
    assert not any(map(conversations.is_held_out, train))
    fewer = conversations.split(json.dumps(all_), 100)
    assert len(fewer[0] + fewer[1]) == 100


# --- texts --------------------------------------------------------------------------------------


def some_texts(count: int, seed: int = 0) -> list[Text]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 40, (count,), generator=random).tolist()
    return [
        Text(torch.arange(100 * i, 100 * i + n, dtype=torch.int32), 3 + i % 4, i % 2, i % 5 == 0)
        for i, n in enumerate(lengths)
    ]


def test_texts_come_back_from_a_file(tmp_path: Path) -> None:
    texts = some_texts(7)
    write_texts(texts, tmp_path / "texts")
    for wrote, read in zip(texts, read_texts(tmp_path / "texts"), strict=True):
        assert torch.equal(wrote.tokens, read.tokens)
        assert replace(wrote, tokens=read.tokens) == read


def test_batches_hold_every_text_once_within_their_size() -> None:
    texts = some_texts(50)
    found = list(batches(texts, 160, 32, 2, 0))
    firsts = sorted(row[0].item() for batch in found for row in batch.tokens)
    assert firsts == [100 * i for i in range(50)]
    assert all(batch.tokens.numel() <= 160 for batch in found)
    again = list(batches(texts, 160, 32, 2, 1))
    assert [batch.tokens.shape for batch in found] != [batch.tokens.shape for batch in again]


def test_places_that_count_draft_the_answers_tokens() -> None:
    batch = padded([Text(torch.arange(10), 4), Text(torch.arange(6), 5)], 9, 2)
    assert batch.tokens.shape == (2, 9)
    # Place i drafts the token of place i + 2: the answer's first is the fourth, the last in the
    # batch the ninth of the first text and the sixth of the second.
    assert batch.counted.int().tolist() == [[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0, 0]]
    # Place i of pass p needs a place i - p.
    assert padded([Text(torch.arange(10), 1)], 9, 4).counted[0].int().tolist()[:4] == [0, 0, 0, 1]


# --- training -----------------------------------------------------------------------------------


def shipped_teacher(draft_vocab: int) -> tuple[training.Teacher, HeadSizes, list[Text]]:
    """The tests' own target, and texts that it writes greedily."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = str(SHIPPED / "target")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [tokenizer(each)["input_ids"] for each in json.loads(PROMPTS.read_text())]
    tokens = torch.tensor([each[:16] for each in asked if len(each) >= 16][:48])
    drawn = model.generate(tokens, max_new_tokens=40, do_sample=False, eos_token_id=None)
    texts = [Text(each.to(torch.int32), 16, 0.0) for each in drawn]
    config = json.loads((SHIPPED / "target" / "config.json").read_text())
    ids, covered = training.frequent_tokens(texts, config["vocab_size"], draft_vocab)
    assert covered > 0.9
    return training.Teacher(model, ids, (1, 3, 5)), HeadSizes.of(config, len(ids), (1, 3, 5)), texts


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(str(SHIPPED / "target"), dtype=torch.float32).eval()


def test_limited_lessons_come_again(target: Any) -> None:
    texts = [Text(torch.arange(5 * i, 5 * i + 20, dtype=torch.int32), 4) for i in range(12)]
    teacher = training.Teacher(target, torch.arange(50), (1, 3, 5))
    run = Run(CPU, 1000, tokens=64, longest=20, passes=2, reading=1e-9)
    first, second = islice(training.lessons(teacher, texts, run), 2)
    assert first is second
    assert first.wanted.shape == (first.rows.sum().item(), 50)
    unlimited = islice(training.lessons(teacher, texts, replace(run, reading=0)), 2)
    assert len({id(each) for each in unlimited}) == 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A head after some seconds of training, its losses, and how it does before and after."""
    folder: Path = tmp_path_factory.mktemp("pair")
    # Products this small are faster without threads, which wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    teacher, sizes, texts = shipped_teacher(400)
    run = Run(CPU, 1000, 60, tokens=512, longest=56, passes=3, rate=3e-3)
    torch.manual_seed(0)
    head = Head(sizes)
    before = training.acceptance(head, teacher, texts[:16], run)
    training.begin_like_the_target(head, teacher.model, teacher.ids)
    losses = training.train(head, teacher, texts, run)
    (folder / "target").symlink_to(SHIPPED / "target")
    (folder / "prompts.json").symlink_to(PROMPTS)
    save_head(head, teacher.ids, folder / "eagle3")
    after = training.acceptance(head, teacher, texts[:16], run)
    torch.set_num_threads(threads)
    return {
        "folder": folder,
        "head": head,
        "teacher": teacher,
        "losses": losses,
        "before": before,
        "after": after,
        "texts": texts,
        "run": run,
    }


@pytest.mark.nightly
def test_training_lowers_the_loss_at_every_depth(trained: dict[str, Any]) -> None:
    losses, before, after = trained["losses"], trained["before"], trained["after"]
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5]), losses
    # A head that knows nothing agrees by chance.
    assert max(before.agree) < 0.1
    assert min(after.agree) > 0.3, after
    assert min(after.overlap) > 0.25, after
    assert after.length > before.length + 0.4
    assert after.rows > 400


@pytest.mark.nightly
def test_a_saved_head_computes_the_same(trained: dict[str, Any]) -> None:
    head, ids = load_head(trained["folder"] / "eagle3")
    assert torch.equal(ids, trained["teacher"].ids)
    torch.manual_seed(1)
    aux, embeds = torch.randn(1, 9, 3 * head.sizes.hidden), torch.randn(1, 9, head.sizes.hidden)
    with torch.no_grad():
        for old, new in zip(trained["head"](aux, embeds, 3), head(aux, embeds, 3), strict=True):
            torch.testing.assert_close(old, new, rtol=0.05, atol=0.05)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_vllm_accepts_the_drafts_that_the_head_foretells(trained: dict[str, Any]) -> None:
    from vllm import SamplingParams

    from tests.support.engines.pairs import Pair
    from vllm_graft.testing import spec_metrics

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    asked = [{"prompt_token_ids": t.tokens[: t.prompt].tolist()} for t in trained["texts"][:16]]
    pair = Pair.load(trained["folder"])
    with pair.engine(chain=3, dtype="float32", disable_log_stats=False) as llm:
        llm.generate(asked, params, use_tqdm=False)
        found = spec_metrics(llm).acceptance_length
    # Steps begin at other places than all; so the two means differ a little.
    assert found == pytest.approx(trained["after"].length, rel=0.15), trained["after"]


# --- widening -----------------------------------------------------------------------------------

SMALL = widening.Shape(48, 80, 6, 2, 16, 6, 96, 40)
WIDE = widening.Shape(128, 192, 16, 4, 32, 7, 160, 64)


def small_pair(folder: Path) -> None:
    """A random target with tied embeddings, and a random head."""
    write_target(folder / "target", SMALL, tied=True)
    sizes = HeadSizes.of(json.loads((folder / "target/config.json").read_text()), SMALL.draft_vocab)
    head = Head(sizes)
    with_norms(head)
    save_head(head, torch.arange(0, 80, 2), folder / "eagle3")


def logits_of(folder: Path, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logits, its states that the head reads, and the head's logits of two passes."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(str(folder / "target"), dtype=torch.float32).eval()
    head, _ = load_head(folder / "eagle3")
    with torch.no_grad():
        found = model(tokens, output_hidden_states=True)
        aux = torch.cat([found.hidden_states[layer][:, :-1] for layer in (2, 3, 3)], -1)
        embeds = model.get_input_embeddings()(tokens[:, 1:])
        drafted = torch.stack([head.lm_head(states) for states in head(aux, embeds, 2)])
    return found.logits, aux, drafted


@pytest.fixture(scope="module")
def widened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    small, wide = (tmp_path_factory.mktemp(name) for name in ("small", "wide"))
    small_pair(small)
    # In bfloat16, which is what is served, scaled weights are rounded anew.
    widening.widen_target(small, wide, WIDE, CPU, torch.float32)
    widening.widen_draft(small, wide, WIDE, CPU, torch.float32)
    return small, wide


def test_a_wide_pair_computes_what_the_small_one_does(widened: tuple[Path, Path]) -> None:
    tokens = torch.randint(0, SMALL.vocab, (3, 24))
    (logits, _, drafted), (wide, _, wide_drafted) = (logits_of(each, tokens) for each in widened)
    for old, new, tokens_of in (
        (logits, wide, SMALL.vocab),
        (drafted, wide_drafted, SMALL.draft_vocab),
    ):
        difference = (new[..., :tokens_of] - old).abs().max() / old.std()
        assert difference < 1e-3, difference
        assert new[..., 1:, tokens_of:].max() < old.min() - 100
    assert torch.equal(logits.argmax(-1), wide.argmax(-1))


def test_the_wide_pair_is_compared_for_real(widened: tuple[Path, Path]) -> None:
    """The logits differ without the scale of queries, or with other rotations."""
    small, wide = widened
    tokens = torch.randint(0, SMALL.vocab, (3, 24))
    logits = logits_of(small, tokens)[0]
    config = json.loads((wide / "target/config.json").read_text())
    for key, value in (
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
        ("rms_norm_eps", 0.1),
    ):
        (wide / "target/config.json").write_text(json.dumps(config | {key: value}))
        spoiled = logits_of(wide, tokens)[0][..., : SMALL.vocab]
        assert (spoiled - logits).abs().max() / logits.std() > 0.2, key
    (wide / "target/config.json").write_text(json.dumps(config))


def test_added_tokens_of_the_draft_stand_for_added_tokens(widened: tuple[Path, Path]) -> None:
    small, ids = load_head(widened[0] / "eagle3")
    wide, wide_ids = load_head(widened[1] / "eagle3")
    assert torch.equal(wide_ids[: len(ids)], ids)
    added = wide_ids[len(ids) :].tolist()
    assert added == list(range(SMALL.vocab, SMALL.vocab + len(added)))
    assert (small.sizes.aux, wide.sizes.aux) == ((2, 3, 3), (2, 3, 3))
    assert wide.sizes.hidden == WIDE.hidden


def test_a_head_that_names_no_layers_reads_those_of_the_small_target(
    widened: tuple[Path, Path], tmp_path: Path
) -> None:
    for part in ("target", "eagle3"):
        shutil.copytree(widened[0] / part, tmp_path / "small" / part)
    file = tmp_path / "small/eagle3/config.json"
    config = json.loads(file.read_text())
    assert config.pop("eagle_aux_hidden_state_layer_ids") == [2, 3, 3]
    file.write_text(json.dumps(config))
    widening.widen_draft(tmp_path / "small", tmp_path / "wide", WIDE, CPU)
    found = json.loads((tmp_path / "wide/eagle3/config.json").read_text())
    # By the wide target's seven layers they would be 2, 3 and 4.
    assert found["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]


def test_a_shape_that_does_not_fit_is_refused() -> None:
    for wrong in (replace(WIDE, hidden=40), replace(WIDE, heads=8), replace(WIDE, head=24)):
        with pytest.raises(ValueError, match="can't be widened"):
            widening.Widening(SMALL, wrong, CPU)
