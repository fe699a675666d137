"""A head learns from the states that an engine hands out, and the engine accepts its drafts."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.plugin.train.small_runs import answered, begun, job_of, one_thread, weights
from tests.support.models.window_models import write_gemma4, write_gpt_oss
from vllm_graft.base.errors import ConfigError
from vllm_graft.testing import cpu_engine, greedy, spec_metrics
from vllm_graft.testing.models.llama import write_tokenizer
from vllm_graft.train import states
from vllm_graft.train.draft_head import Agreement, Head, agreement, read_head, save_head
from vllm_graft.train.job import BEFORE, REPORT, Job
from vllm_graft.train.lessons import batches
from vllm_graft.train.output_layers import FORMS
from vllm_graft.train.target_answers import answer_all, engine_options
from vllm_graft.train.training import CHECKPOINT, Training, begin_like_the_target

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job whose questions are answered."""
    made = job_of(tmp_path_factory.mktemp("run"))
    answered(made)
    return made


@pytest.fixture(scope="module")
def trained(job: Job) -> Training:
    """A run without an interruption."""
    with one_thread():
        training = begun(job, Path(job.out))
        assert training.run()
        training.finish()
    return training


def test_states_are_those_of_transformers(job: Job) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    folder, entries = Path(job.states), states.read_entries(Path(job.states))
    kinds = {(each.temperature, each.held_out) for each in entries}
    assert kinds >= {(0.0, True), (1.0, True), (0.0, False), (0.6, False), (1.0, False)}
    assert (-1.0, False) in kinds
    layers = job.target.aux
    for entry in (entries[0], entries[-1]):
        taken, tokens = states.load(folder, entry)
        assert taken.shape == (entry.tokens, len(layers) + 1, 128)
        with torch.no_grad():
            found = model(tokens[None], output_hidden_states=True)
        for place, layer in enumerate(layers):
            torch.testing.assert_close(
                taken[:, place], found.hidden_states[layer][0], rtol=1e-3, atol=1e-3
            )
        if entry.temperature == 0:
            best = found.logits[0].argmax(-1)
            assert torch.equal(best[entry.prompt - 1 : -1], tokens[entry.prompt :])


def test_the_target_s_logits_are_made_of_its_last_states(job: Job) -> None:
    """Negative control: what is put together wrongly gives other tokens, and is refused."""
    training = begun(job, Path(job.out).with_name("logits"))
    layers, entries = training.lessons.layers, training.shown
    layers.find_form(Path(job.states), entries)
    assert layers.form == FORMS[0]
    layers.norm = layers.norm - 1
    layers.find_form(Path(job.states), entries)
    assert layers.form == FORMS[1]
    layers.output = layers.output.roll(1, 0)
    with pytest.raises(ConfigError, match="of its own greedy tokens"):
        layers.find_form(Path(job.states), entries)


def drafting(head: Path, tokens: int, tree: dict[str, int] | None) -> dict[str, Any]:
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": tokens}
    graft = {"graft": {"tree": tree}} if tree else {}
    return {"speculative_config": spec, "additional_config": graft}


def write_qwen3_moe(folder: Path) -> None:
    """Write a random target with experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 1, "vocab_size": 512, "initializer_range": 0.15,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).to(torch.bfloat16).save_pretrained(folder)


def on_learned(training: Training) -> Agreement:
    """How a head does on greedy answers that it has learned: held-out ones are few here."""
    greedy = [each for each in training.learned if each.temperature == 0][:16]
    found = training.lessons.each(iter(batches(greedy, 512, 0)))
    return agreement(training.head, found, training.job.passes)


def test_training_lowers_the_loss_and_raises_acceptance(job: Job, trained: Training) -> None:
    assert len(trained.losses) == job.steps
    assert sum(trained.losses[-5:]) < 0.6 * sum(trained.losses[:5]), trained.losses
    before, after = begun(job, Path(job.out).with_name("before")), on_learned(trained)
    assert after.agree[0] > 0.3, after
    assert after.length > on_learned(before).length + 0.3
    report = json.loads((Path(job.out) / REPORT).read_text())
    unseen = report["held out"]["temperature 0"]["length"]
    assert unseen > before.measured().length + 0.1
    assert unseen == trained.measured().length
    assert report["share of answers that it covers"] > 0.8


def test_a_saved_head_computes_the_same(trained: Training, job: Job) -> None:
    head, ids = read_head(Path(job.out))
    assert torch.equal(ids, trained.lessons.ids)
    torch.manual_seed(1)
    aux, embeds = torch.randn(1, 9, 3 * 128), torch.randn(1, 9, 128)
    with torch.no_grad():
        for old, new in zip(trained.head(aux, embeds, 3), head(aux, embeds, 3), strict=True):
            torch.testing.assert_close(old, new, rtol=0.05, atol=0.05)


def test_a_run_that_was_stopped_ends_as_one_that_was_not(job: Job, trained: Training) -> None:
    out, looks = Path(job.out).with_name("stopped"), iter(range(100))
    with one_thread():
        first = begun(job, out)
        assert not first.run(stopped=lambda: next(looks) == 23)
        assert first.step == 23
        second = begun(job, out)
        assert second.step == 23
        assert second.run()
    assert second.step == trained.step
    whole = weights(trained)
    assert all(torch.equal(each, whole[name]) for name, each in weights(second).items())
    # Negative control: before it went on, it was another head.
    assert not torch.equal(weights(first)["fc.weight"], whole["fc.weight"])


def test_a_run_goes_on_with_a_head(job: Job, trained: Training) -> None:
    out = Path(job.out).with_name("on")
    on = dataclasses.replace(job, start_from=job.out, draft_vocab=50, steps=30)
    with one_thread():
        training = begun(on, out)
        assert torch.equal(training.lessons.ids, trained.lessons.ids)
        begins = training.measured()
        assert begins.length == pytest.approx(trained.measured().length, abs=0.05)
        assert training.run()
        training.finish()
    assert sum(training.losses[:5]) < 0.7 * sum(trained.losses[:5])
    report = json.loads((out / REPORT).read_text())
    assert report[BEFORE]["temperature 0"] == dataclasses.asdict(begins)
    assert report["held out"]["temperature 0"] == dataclasses.asdict(training.measured())
    assert not torch.equal(*(read_head(Path(each))[0].fc.weight for each in (out, job.out)))


def test_a_head_that_is_no_number_is_not_written(job: Job) -> None:
    training = begun(job, Path(job.out).with_name("infinite"))
    training.head.fc.weight.data[0, 0] = float("inf")
    with pytest.raises(ConfigError, match="the head became infinite or no number"):
        training.finish()
    assert not (Path(job.out).with_name("infinite") / REPORT).exists()


@pytest.mark.slow
def test_a_killed_process_goes_on_and_ends_as_one_that_was_not(job: Job, trained: Training) -> None:
    out = Path(job.out).with_name("killed")
    begun(dataclasses.replace(job, save_seconds=0.0), out)
    work = out / ".train"
    until = str(time.time() + 1e9)
    command = [sys.executable, "-m", "vllm_graft.train.training", str(work), until]
    process = subprocess.Popen(command)
    while not (work / CHECKPOINT).exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    state = torch.load(work / CHECKPOINT, weights_only=True)
    assert 0 < state["step"] < job.steps
    assert subprocess.run(command, timeout=200).returncode == 0
    ours, whole = (load_file(each / "model.safetensors") for each in (out, Path(job.out)))
    assert all(torch.equal(ours[name], each) for name, each in whole.items())


@pytest.mark.slow
def test_two_ranks_train_one_head(job: Job) -> None:
    out = Path(job.out).with_name("ranks")
    begun(dataclasses.replace(job, steps=12), out)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *launcher, "-m", "vllm_graft.train.training"]
    work, until = str(out / ".train"), str(time.time() + 1e9)
    assert subprocess.run([*command, work, until], timeout=300).returncode == 0
    report = json.loads((out / REPORT).read_text())
    assert (report["devices"], report["steps"]) == (2, 12)
    assert report["losses"][-1] < 0.9 * report["losses"][0]


def test_trees_of_it_are_accepted_more_than_of_an_untrained_head(
    job: Job, trained: Training
) -> None:
    from vllm import SamplingParams

    untrained = Path(job.out).with_name("untrained")
    torch.manual_seed(5)
    save_head(Head(trained.head.config), trained.lessons.ids, untrained)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    folder = Path(job.states)
    asked = [
        {"prompt_token_ids": states.tokens(folder, each)[: each.prompt].tolist()}
        for each in trained.learned
        if each.temperature == 0
    ][:12]
    lengths, said = {}, []
    for name, head, tree in (
        ("chain", Path(job.out), None),
        ("tree", Path(job.out), {"topk": 3, "steps": 3}),
        ("untrained", untrained, {"topk": 3, "steps": 3}),
    ):
        with cpu_engine(job.model, **drafting(head, 9 if tree else 3, tree)) as llm:
            found = llm.generate(asked, params, use_tqdm=False)
            said.append([each.outputs[0].token_ids for each in found])
            lengths[name] = spec_metrics(llm).acceptance_length
    assert said[0] == said[1] == said[2]
    # A chain's steps begin at other places than all, so that the means differ a little.
    foretold = on_learned(trained).length
    assert lengths["chain"] == pytest.approx(foretold, rel=0.2), lengths
    assert lengths["tree"] >= lengths["chain"] > 1.3, lengths
    assert lengths["untrained"] < lengths["tree"] - 0.3, lengths


def test_answers_go_on_and_a_lack_of_room_ends_them(job: Job, tmp_path: Path) -> None:
    token_bytes = 4 * 128 * 2
    small = dataclasses.replace(
        job, states=str(tmp_path), disk_bytes=300 * token_bytes, answer_minutes=1.0
    )
    with cpu_engine(job.model, **engine_options(small)) as llm:
        answer_all(llm, small)
        first = states.read_entries(tmp_path)
        answer_all(llm, small)
        assert states.read_entries(tmp_path) == first
        answer_all(llm, dataclasses.replace(small, disk_bytes=600 * token_bytes))
        second = states.read_entries(tmp_path)
    assert 0 < len(first) < len(second) < len(states.read_entries(Path(job.states)))
    assert second[: len(first)] == first


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss", "gemma4"])
def test_other_families_give_states_and_learn(kind: str, tmp_path: Path) -> None:
    """Experts, sinks and windows, layers of different sizes, and a soft cap of logits."""
    model = tmp_path / "target"
    if kind == "gpt-oss":
        write_gpt_oss(model)
    elif kind == "gemma4":
        write_gemma4(model)
    else:
        write_qwen3_moe(model)
    write_tokenizer(model)
    small = {"answer_minutes": 0.02, "max_tokens": 12, "longest": 240, "steps": 24}
    job = job_of(tmp_path, model, **small)
    answered(job)
    training = begun(job, tmp_path / "head")
    assert training.lessons.layers.form == FORMS[0]
    with one_thread():
        assert training.run()
    assert sum(training.losses[-6:]) < sum(training.losses[:6])
    training.finish()
    with cpu_engine(job.model, **drafting(tmp_path / "head", 2, None)) as llm:
        assert len(greedy(llm, ["def f(x):"], 6)[0]) == 6


def test_a_head_begins_like_its_target(job: Job) -> None:
    training = begun(job, Path(job.out).with_name("begins"))
    head = Head(training.head.config)
    begin_like_the_target(head, training.lessons.layers, training.lessons.ids)
    assert torch.equal(head.lm_head.weight, training.lessons.layers.output[training.lessons.ids])
