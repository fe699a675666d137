"""Drafters against plain loops, training, files, and the shapes of a larger model."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.lab_heads import files, learning, sources, target_states, wide
from benchmarks.lab_heads.dspark_head import MASK, DSparkHead, DSparkLesson, rotated
from benchmarks.lab_heads.mtp_module import MtpLesson, MtpModule
from benchmarks.lab_heads.target_states import Read, Target
from benchmarks.lab_heads.tests import small_drafters
from benchmarks.lab_heads.tests.small_drafters import AUX, SMALL, WIDE
from benchmarks.real_pair.head import HeadSizes
from benchmarks.real_pair.texts import Text

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, with both drafters beside it."""
    work = tmp_path_factory.mktemp("drafters")
    small_drafters.write_target(work / "target")
    files.save_module(small_drafters.random_module(work / "target"), work / "mtp")
    files.save_head(small_drafters.random_head(work / "target"), work / "dspark")
    return work


def target_of(folder: Path, aux: tuple[int, ...] = AUX) -> Target:
    return Target(LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32), aux)


def read_of(target: Target, texts: int = 3, length: int = 20) -> Read:
    torch.manual_seed(5)
    tokens = torch.randint(1, SMALL.vocab, (texts, length))
    found: Read = target.read(tokens, torch.ones_like(tokens, dtype=torch.bool))
    return found


# --- the target ---------------------------------------------------------------------------------


def test_reads_are_the_target_s_own_states(folder: Path) -> None:
    target = target_of(folder / "target")
    read = read_of(target)
    with torch.no_grad():
        found = target.model(read.tokens, output_hidden_states=True)
    inner = torch.cat([found.hidden_states[layer] for layer in AUX], -1)
    torch.testing.assert_close(read.inner, inner)
    wanted = target.wanted(read.last.flatten(0, 1))
    torch.testing.assert_close(wanted, found.logits.softmax(-1).flatten(0, 1))
    # Control: the last states are not normed yet.
    assert (read.last - found.hidden_states[-1]).abs().max() > 0.1


def test_texts_are_put_side_by_side_once_each() -> None:
    texts = [Text(torch.arange(10 * i, 10 * i + 4 + i % 5), 2 + i % 3) for i in range(30)]
    order = torch.Generator().manual_seed(0)
    found = list(target_states.groups(texts, 24, 6, order))
    assert sorted(int(text.tokens[0]) for group in found for text in group) == [
        10 * i for i in range(30)
    ]
    tokens, counted = target_states.side_by_side(texts[:3], 6)
    assert tokens.tolist() == [[0, 1, 2, 3, 0, 0], [10, 11, 12, 13, 14, 0], list(range(20, 26))]
    assert counted.int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]


def test_reads_that_are_kept_come_again(folder: Path) -> None:
    target = target_of(folder / "target")
    texts = [Text(torch.arange(1, 9) + i, 1) for i in range(6)]
    given = target_states.reads(target, texts, 16, 8, kept=2, seed=0)
    first = [next(given) for _ in range(2)]
    again = {id(next(given)) for _ in range(4)}
    assert again == {id(each) for each in first}
    endless = target_states.reads(target, texts, 16, 8, kept=0, seed=0)
    assert len({id(next(endless)) for _ in range(5)}) > 2


# --- MTP ----------------------------------------------------------------------------------------


def attended(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query ``[heads, head]`` over its keys, K/V heads repeated as in grouped attention."""
    k, v = torch.stack(keys, 1), torch.stack(values, 1)
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    weights = (k @ q[..., None]).squeeze(-1) / math.sqrt(q.shape[-1])
    return (weights.softmax(-1)[:, None] @ v).squeeze(1).flatten()


def plain_chain(module: MtpModule, last: Tensor, embeds: Tensor, start: int, depth: int) -> Tensor:
    """What drafting computes: rows of the text up to `start`, then each depth's own row."""
    sizes, attn = module.sizes, module.self_attn
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def row(state: Tensor, place: int) -> Tensor:
        embed = torch.zeros_like(embeds[0]) if place == 0 else embeds[place]
        both = torch.cat((module.hidden_layernorm(state), module.token_layernorm(embed)))
        found = module.input_proj(both)
        normed = module.input_layernorm(found)
        at = torch.tensor([[place]])
        q, k, v = (
            proj(normed).view(1, -1, 1, sizes.head)
            for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        keys.append(rotated(k, at, sizes.theta)[0, :, 0])
        values.append(v[0, :, 0])
        out = attended(rotated(q, at, sizes.theta)[0, :, 0], keys, values)
        found = found + attn.o_proj(out)
        found = found + module.mlp(module.post_attention_layernorm(found))
        return module.final_layernorm(found)

    states = [row(last[place], place) for place in range(start + 1)][-1:]
    for number in range(1, depth):
        states.append(row(states[-1], start + number))
    return torch.stack(states)


@torch.no_grad()
def test_passes_over_a_text_are_its_chains(folder: Path) -> None:
    module, target = files.load_module(folder / "mtp"), target_of(folder / "target", ())
    read = read_of(target)
    embeds = target.embed(read.tokens[:, 1:-1])
    found = module.passes(read.last[:, :-2], embeds, 3)
    for text, start in ((0, 0), (1, 7), (2, 15)):
        wanted = plain_chain(module, read.last[text], embeds[text], start, 3)
        for number, states in enumerate(found):
            torch.testing.assert_close(
                states[text, start + number], wanted[number], rtol=1e-4, atol=1e-4
            )
            # Control: another chain's row is another state.
            assert (states[text, start + number - 1] - wanted[number]).abs().max() > 0.1


def test_a_module_s_first_weights_and_steps_make_it_better(folder: Path) -> None:
    target = target_of(folder / "target", ())
    texts = greedy_texts(target)
    module = small_drafters.random_module(folder / "target")
    lesson = MtpLesson(module, target, 2)
    random = learning.acceptance(lesson, target, texts, 400, 40)
    given = target_states.reads(target, texts, 200, 40, 0, 0)
    first, given = learning.beginning(given, 4)
    lesson.begin(first)
    begun = learning.acceptance(lesson, target, texts, 400, 40)
    losses = learning.learn(lesson, given, learning.Run(CPU, 1000, 40, 1e-2))
    learned = learning.acceptance(lesson, target, texts, 400, 40)
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert random.agree[0] < begun.agree[0] < learned.agree[0]
    assert learned.length > random.length + 0.2
    assert learned.chains == random.chains > 200


# --- DSpark -------------------------------------------------------------------------------------


@torch.no_grad()
def plain_block(head: DSparkHead, target: Target, read: Read, text: int, anchor: int) -> Tensor:
    """One block by itself: its queries see the context before the anchor, and each other."""
    sizes, depth = head.sizes, head.depth
    context = head.hidden_norm(head.fc(read.inner[text, :anchor]))
    tokens = torch.tensor([int(read.tokens[text, anchor])] + [MASK] * (depth - 1))
    states = target.embed(tokens)
    for layer in head.layers:
        attn: Any = layer.self_attn
        normed = layer.input_layernorm(states)
        both = torch.cat((context, normed))
        at = torch.arange(anchor + depth)[None]

        def parts(proj: Any, given: Tensor) -> Tensor:
            return proj(given).view(len(given), -1, sizes.head).transpose(0, 1)[None]

        k = rotated(attn.k_norm(parts(attn.k_proj, both)), at, sizes.theta)[0]
        v = parts(attn.v_proj, both)[0]
        q = rotated(attn.q_norm(parts(attn.q_proj, normed)), at[:, anchor:], sizes.theta)[0]
        out = [attended(q[:, i], list(k.unbind(1)), list(v.unbind(1))) for i in range(depth)]
        states = states + attn.o_proj(torch.stack(out))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
    return head.norm(states)


@torch.no_grad()
def test_blocks_of_a_text_do_not_see_each_other(folder: Path) -> None:
    head, target = files.load_head(folder / "dspark"), target_of(folder / "target")
    read = read_of(target)
    anchors = torch.tensor([[1, 9, 4], [3, 12, 2], [16, 5, 6]])
    embeds = target.embed(read.tokens.gather(1, anchors))
    mask = target.embed(torch.tensor(MASK))
    found = head(read.inner, embeds, mask, anchors)
    for text, block in ((0, 0), (1, 1), (2, 0)):
        wanted = plain_block(head, target, read, text, int(anchors[text, block]))
        torch.testing.assert_close(found[text, block], wanted, rtol=1e-4, atol=1e-4)
        # Control: a context that ends one place earlier makes another block.
        other = plain_block(head, target, read, text, int(anchors[text, block]) + 1)
        assert (found[text, block] - other).abs().max() > 0.1


def test_a_head_learns_positions_and_the_token_before(folder: Path) -> None:
    target = target_of(folder / "target")
    texts = greedy_texts(target)
    lesson = DSparkLesson(small_drafters.random_head(folder / "target", 3), target, 6)
    given = target_states.reads(target, texts, 400, 40, 0, 0)
    first, given = learning.beginning(given, 1)
    lesson.begin(first)
    before = learning.acceptance(lesson, target, texts, 400, 40)
    losses = learning.learn(lesson, given, learning.Run(CPU, 1000, 40, 5e-3))
    after = learning.acceptance(lesson, target, texts, 400, 40)
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert after.length > before.length + 0.2
    # Control: with the tokens' biases mixed up it is worse.
    w1 = lesson.drafter.markov_head.markov_w1.weight
    w1.data = w1.data.roll(1, 0)
    mixed = learning.acceptance(lesson, target, texts, 400, 40)
    assert sum(mixed.overlap) < sum(after.overlap)


def test_anchors_have_a_context_and_lie_in_the_answer(folder: Path) -> None:
    target = target_of(folder / "target")
    head = files.load_head(folder / "dspark")
    counted = torch.zeros(2, 12, dtype=torch.bool)
    counted[0] = True
    counted[1, 5:9] = True
    read = replace(read_of(target, 2, 12), counted=counted)
    anchors, real = DSparkLesson(head, target, 30)._anchors(read, 30)
    found = [sorted(anchors[row][real[row]].tolist()) for row in range(2)]
    # Four positions, the last of them with a state of the target.
    assert found == [list(range(1, 9)), [5]]


def greedy_texts(target: Target) -> list[Text]:
    """What the target writes greedily; texts are few, so that they can be learned soon."""
    torch.manual_seed(3)
    begun = torch.randint(1, SMALL.vocab, (12, 4))
    drawn = target.model.generate(
        begun, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [Text(each.to(torch.int32), 4, 0.0) for each in drawn]


# --- files and shapes ---------------------------------------------------------------------------


def test_drafters_come_back_from_files(folder: Path, tmp_path: Path) -> None:
    module, head = files.load_module(folder / "mtp"), files.load_head(folder / "dspark")
    assert (head.depth, len(head.layers), head.sizes.aux) == (4, 2, AUX)
    for drafter, name in ((module, "mtp"), (head, "dspark")):
        stored = load_file(folder / name / "model.safetensors")
        assert {each.dtype for each in stored.values()} == {torch.bfloat16}
        for key, each in drafter.named_parameters():
            assert torch.equal(each, stored[key].float())
        files.add_noise(folder / name, tmp_path / name)
        noisy = load_file(tmp_path / name / "model.safetensors")
        assert noisy.keys() == stored.keys()
        key = "input_proj.weight" if name == "mtp" else "fc.weight"
        assert (noisy[key].float() - stored[key].float()).std() > stored[key].float().std()


def test_a_mimo_has_the_llama_s_weights_and_no_biases(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "llama"
    shutil.copytree(folder / "target", source)
    # vLLM's Qwen2 divides the hidden states by the number of heads, whatever their size is.
    with pytest.raises(ValueError, match=r"heads of 16 need hidden states .*\(6\), not 48"):
        files.write_mimo(source, folder / "mtp", tmp_path)
    files.write_config(source, files.read_config(source) | {"head_dim": 8})
    files.write_mimo(source, folder / "mtp", tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    llama: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        llama |= load_file(file)
    for name, each in llama.items():
        assert torch.equal(found[name], each)
    biases = {name: each for name, each in found.items() if name.endswith(".bias")}
    assert len(biases) == 3 * (SMALL.layers + 1)
    assert not any(each.any() for each in biases.values())
    config = files.read_config(tmp_path)
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 1)
    with pytest.raises(ValueError, match="biases"):
        files.mimo_config({**config, "attention_bias": True})


@torch.no_grad()
def drafted(target: Target, module: MtpModule, head: DSparkHead, read: Read) -> list[Tensor]:
    """Logits of both drafters at all depths, of the places that a chain reaches there."""
    outputs, embeds = target.outputs, target.embed(read.tokens[:, 1:-1])
    passes = enumerate(module.passes(read.last[:, :-2], embeds, 3))
    found = [F.linear(states[:, number:], outputs) for number, states in passes]
    anchors = torch.tensor([[1, 5], [8, 3], [14, 11]])
    embeds = target.embed(read.tokens.gather(1, anchors))
    states = head(read.inner, embeds, target.embed(torch.tensor(MASK)), anchors)
    bias = head.markov_head(read.tokens.gather(1, anchors))
    return [*found, F.linear(states, outputs) + bias[:, :, None]]


def wide_logits(folder: Path, tokens: Tensor) -> list[Tensor]:
    """Logits of the wide drafters in `folder`, whose MiMo is a Llama with a module behind."""
    weights = {
        name: each
        for file in (folder / "mtp" / "target").glob("*.safetensors")
        for name, each in load_file(file).items()
    }
    module = MtpModule(small_drafters.sizes_of(folder / "mtp" / "target", (0,)))
    parts = {
        name.removeprefix(files.MODULE): each
        for name, each in weights.items()
        if name.startswith(files.MODULE) and not name.endswith(".bias")
    }
    module.load_state_dict(parts)
    target = target_of(folder / "dspark" / "target")
    # Both targets have the same weights, so that one stands for both.
    outputs = weights["lm_head.weight"]
    assert torch.equal(outputs, target.outputs)
    read = target.read(tokens, torch.ones_like(tokens, dtype=torch.bool))
    found: list[Tensor] = drafted(
        target, module, files.load_head(folder / "dspark" / "dspark"), read
    )
    return found


def test_wide_drafters_compute_what_the_small_ones_do(folder: Path, tmp_path: Path) -> None:
    source = folder / "target"
    wide.widen_mtp(source, folder / "mtp", tmp_path / "mtp", WIDE, CPU, torch.float32)
    wide.widen_dspark(source, folder / "dspark", tmp_path / "dspark", WIDE, CPU, torch.float32)
    target = target_of(source)
    read = read_of(target)
    small = drafted(
        target, files.load_module(folder / "mtp"), files.load_head(folder / "dspark"), read
    )
    large = wide_logits(tmp_path, read.tokens)
    for old, new in zip(small, large, strict=True):
        difference = (new[..., : SMALL.vocab] - old).abs().max() / old.std()
        assert difference < 2e-3, difference
        # Added tokens are never drafted, at the first position neither, where it is nearest.
        assert new[..., SMALL.vocab :].max() < old.min() - 10
    # Control: other rotations show.
    config = files.read_config(tmp_path / "dspark" / "dspark")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    files.write_config(tmp_path / "dspark" / "dspark", config | {"rope_parameters": rope})
    spoiled = wide_logits(tmp_path, read.tokens)[-1][..., : SMALL.vocab]
    assert (spoiled - small[-1]).abs().max() / small[-1].std() > 0.02


def test_a_wide_head_keeps_the_size_of_its_heads(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="heads of attention with norms"):
        wide.widen_dspark(
            folder / "target", folder / "dspark", tmp_path, replace(WIDE, head=32), CPU
        )


# --- sources ------------------------------------------------------------------------------------


def test_sources_are_split_by_file_and_leave_tests_out(tmp_path: Path) -> None:
    found = sources.standard_library()
    assert len(found) > 300
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in found)
    held_out = [file for file in found if sources.is_held_out(file)]
    assert 0.02 < len(held_out) / len(found) < 0.1
    (tmp_path / "a.py").write_text("x = 1\n" * 100)
    (tmp_path / "small.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 100)

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) for each in text]}

    names = [tmp_path / name for name in ("a.py", "small.py", "latin.py")]
    [(held, tokens)] = sources.tokenized(names, tokenizer)
    assert held is sources.is_held_out(tmp_path / "a.py")
    pieces = sources.written_texts([(held, tokens)], 128)
    assert [len(each.tokens) for each in pieces] == [128, 128, 128, 128, 88]


def test_turns_are_of_one_side_and_take_temperatures_in_turn() -> None:
    found = [(True, list(range(1000, 1400))), (False, list(range(200))), (False, [5, 6])]
    turns = sources.turns(found, (0.0, 1.0), 20, held_out=False)
    assert [temperature for _, temperature in turns] == [0.0, 1.0] * 10
    for tokens, _ in turns:
        assert sources.PROMPT[0] <= len(tokens) <= sources.PROMPT[1]
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert tokens[-1] < 200
    assert all(t[0] >= 1000 for t, _ in sources.turns(found, (0.0,), 9, held_out=True))


def test_sizes_are_those_of_the_target(folder: Path) -> None:
    sizes = small_drafters.sizes_of(folder / "target")
    assert isinstance(sizes, HeadSizes)
    assert (sizes.hidden, sizes.vocab, sizes.head) == (SMALL.hidden, SMALL.vocab, SMALL.head)
