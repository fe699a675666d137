"""The benchmark of the host cache: its arms, sizes and turns, and its parts on a tiny engine."""

import argparse
import json
import pickle
import re
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.bench.common.arm import Arm, advice, table
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.serve_flags import Serving
from vllm_graft.bench.hicache import command
from vllm_graft.bench.hicache.cache_parts import Parts, Sizes, read_sizes, read_talks
from vllm_graft.bench.hicache.prompt_driver import random_prompt
from vllm_graft.bench.hicache.sessions import OpenLoad, length_between
from vllm_graft.testing import cpu_engine, write_llama

SMALL = Sizes(
    vocab=500, block=32, gpu_tokens=1024, host_gib=2**-6, suffix=32, requests=2, prompt=64,
    tokens=4, sessions=2, turns=2, turn_tokens=64, reply=4, rate=50.0, history=64, history_max=128,
)  # fmt: skip


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(words)
    arguments.output = arguments.plot = None
    return arguments


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_llama(tmp_path_factory.mktemp("models") / "model"))


def serving(model: str, *flags: str) -> Serving:
    return Serving.read([model, "--skip-tokenizer-init", *flags])


def connector(arm: Arm) -> tuple[str, dict[str, Any]]:
    found = arm.options["kv_transfer_config"]
    return found.kv_connector, dict(found.kv_connector_extra_config)


def test_arms_differ_in_their_connector_only(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: usage(2**34))
    sizes, plain = Sizes(host_gib=2**-6), serving(model)
    none, native = (command.read_arm(name, sizes, plain) for name in ("none", "native"))
    assert "kv_transfer_config" not in none.options
    assert connector(native) == ("OffloadingConnector", {"cpu_bytes_to_use": 2**24})
    ours = command.read_arm('ours:{"load": "async"}', sizes, plain)
    assert connector(ours) == ("HiCacheConnector", {"host_bytes": 2**24, "load": "async"})
    for arm in (native, ours):
        assert {**arm.options, "kv_transfer_config": 0} == {**none.options, "kv_transfer_config": 0}
        # They go to a process of the arm's own.
        assert pickle.loads(pickle.dumps(arm.options)) == arm.options
    for name, words in (
        ("theirs", "say none, native, lmcache or ours"),
        ("ours:{", "no JSON"),
        ("lmcache", "LMCache is not there, pip install lmcache"),
    ):
        with pytest.raises(BenchmarkError, match=words):
            command.read_arm(name, sizes, plain)
    with pytest.raises(BenchmarkError, match=r"host_byte: unknown key\. Did you mean 'host_bytes'"):
        command.read_arm('ours:{"host_byte": 1}', sizes, plain)
    # A CPU's attention takes no blocks of 16.
    assert none.options["block_size"] % 32 == 0
    assert none.options["num_gpu_blocks_override"] == 28_672 // none.options["block_size"] + 1
    assert command.read_arm("none", replace(sizes, block=64), plain).options["block_size"] == 64
    assert none.options["max_num_seqs"] == 64
    # What a server is told has nothing of the little K/V on the device.
    assert none.commands == {"none": f"vllm serve {model} --skip-tokenizer-init"}


def test_ours_has_the_keys_of_the_flags(model: str) -> None:
    mine = {"kv_connector": "HiCacheConnector", "kv_role": "kv_both"}
    keys = {"kv_connector_extra_config": {"host_bytes": 2**25, "load": "async"}}
    given = serving(model, "--kv-transfer-config", json.dumps({**mine, **keys}))
    ours = command.read_arm("ours", SMALL, given)
    assert connector(ours) == ("HiCacheConnector", {"host_bytes": 2**25, "load": "async"})
    assert "kv_transfer_config" not in command.read_arm("none", SMALL, given).options


def test_native_memory_where_shm_is_too_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: usage(1000))
    assert command._native(1 << 30)["spec_name"] == "PrivateMemorySpec"
    assert "/dev/shm is too small" in capsys.readouterr().out


def test_users_say_what_a_file_has(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = tmp_path / "talks.json"
    turns = [("human", "one two"), ("gpt", "x"), ("human", "three four five six")]
    said = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    file.write_text(json.dumps([said, {"conversations": []}]))
    tokenizer = AutoTokenizer.from_pretrained(str(SHIPPED / "target"))
    given: Any = SimpleNamespace(tokenizer=tokenizer)
    sizes = replace(SMALL, turn_tokens=3)
    [talk] = read_talks(file, given, sizes)
    assert [len(turn) for turn in talk] == [2, 3]
    llm: Any = SimpleNamespace(llm_engine=None)
    parts = Parts(llm, sizes, [talk])
    asked = ((0, 0), (5, 1), (0, 2))
    assert [parts._said(1, False, session, turn) for session, turn in asked] == [
        talk[0],
        talk[1],
        talk[0],
    ]
    assert read_talks(None, given, sizes) == []
    for text, words in (("{", "can't be read"), ("[]", "no conversation")):
        file.write_text(text)
        with pytest.raises(BenchmarkError, match=words):
            read_talks(file, given, sizes)


def test_sizes_are_flags() -> None:
    sizes = read_sizes(given("--sessions", "8", "--host-gib", "1", "--turn-tokens", "96"))
    assert sizes == Sizes(sessions=8, host_gib=1.0, turn_tokens=96)
    assert read_sizes(given()) == Sizes()
    # Sessions hold four times as much as the device, and the host holds all of them.
    default = Sizes()
    held = default.sessions * default.turns * (default.turn_tokens + default.reply)
    assert held == 4 * default.gpu_tokens
    assert held * 131072 < default.host_gib * 2**30
    assert default.requests * (default.prompt + default.tokens) < default.gpu_tokens


def test_a_history_has_to_fit_into_the_device(model: str) -> None:
    plain = [model, "--skip-tokenizer-init"]
    with pytest.raises(BenchmarkError, match=r"may have 34176 tokens, .* room for \d+: raise"):
        command.run(given("--load", "open"), plain)


def test_turns_of_an_open_load_come_whatever_is_in_flight() -> None:
    load = OpenLoad(1000, rate=100.0, sticky=0.5, seed="a")
    assert list(load.due(5.0)) == [], "the clock starts with the first call"
    came = [time for time, _ in load.due(9.0)]
    assert came == sorted(came)
    assert came[0] > 5.0
    assert came[-1] <= 9.0
    assert 320 < len(came) < 480
    assert list(load.due(9.0)) == []
    again = OpenLoad(1000, 100.0, 0.5, "a")
    assert [*again.due(5.0), *again.due(9.0)] != []
    assert [time for time, _ in again.due(10.0)] == [time for time, _ in load.due(10.0)]


@pytest.mark.parametrize("sticky", [0.0, 1.0])
def test_a_sticky_turn_is_of_the_session_that_was_answered_last(sticky: float) -> None:
    load, seen = OpenLoad(8, 1000.0, sticky, "b"), []
    list(load.due(0.0))
    for step in range(1, 200):
        for _, session in load.due(float(step)):
            seen.append(session)
            load.ready(session)
            break
    assert set(seen) == ({7} if sticky else set(range(8)))


def test_a_turn_without_a_session_waits_and_that_counts() -> None:
    load = OpenLoad(1, 10.0, 0.0, "c")
    list(load.due(0.0))
    [(first, session)] = load.due(1.0)
    assert list(load.due(2.0)) == []
    load.ready(session)
    [(second, _)] = load.due(3.0)
    assert first < second < 1.0


def test_lengths_are_spread_by_octaves() -> None:
    lengths = [length_between(8192, 32_768, str(seed)) for seed in range(2000)]
    assert min(lengths) >= 8192
    assert max(lengths) <= 32_768
    assert 0.45 < sum(length < 16_384 for length in lengths) / 2000 < 0.55
    assert length_between(5, 5, "x") == 5


def test_no_round_says_what_another_has_said() -> None:
    llm: Any = SimpleNamespace(llm_engine=None)
    parts = Parts(llm, SMALL)
    texts = [parts._said(number, opens, 0, 0) for number in (1, 2) for opens in (False, True)]
    assert texts[0] != texts[2]
    assert texts[1] != texts[3]
    assert [len(text) for text in texts[::2]] == [64, 64]
    assert all(64 <= len(text) <= 128 for text in texts[1::2])


def test_prompts_depend_on_their_seed() -> None:
    assert random_prompt("a", 50, 500) == random_prompt("a", 50, 500)
    assert random_prompt("a", 50, 500) != random_prompt("b", 50, 500)


class Engine:
    """A stand-in for an arm's process, which takes longer from round to round."""

    def __init__(self, milliseconds: float, order: list[str], name: str) -> None:
        self._milliseconds, self._order, self._name = milliseconds, order, name
        self._wish: Any = None

    def send(self, wish: Any) -> None:
        self._wish = wish
        if wish:
            self._order.append(self._name)

    def recv(self) -> Any:
        part, number, _ = self._wish
        value = self._milliseconds + number
        if part == "first_token":
            return {"first_token_ms": value, "cached": 8192.0}
        if part == "decode":
            return {"tokens_per_second": 1000 / value}
        tail = {"first_token_p99_ms": 2 * value, "hit_rate": 0.5, "errors": 0.0}
        return {"turns_per_second": 100 / value, **tail}


def test_arms_take_turns_and_a_first_round_warms_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[str] = []
    names = {"none": 98.0, "native": 18.0, "ours": 8.0}
    pipes = {Arm(name): Engine(ms, order, name) for name, ms in names.items()}
    monkeypatch.setattr(command.arm_processes, "start", lambda *_: pipes)
    arguments = given("--prefix", "2048", "8192")
    arguments.output = str(tmp_path / "rows.json")
    arms: Any = [*pipes]
    rows = command.compare(arms, SimpleNamespace(model="model"), Sizes(), arguments)  # type: ignore[arg-type]
    assert order[:6] == ["none", "native", "ours", "ours", "native", "none"]
    assert [re.sub("  +", " | ", line) for line in table(rows, command.cell).splitlines()[1:]] == [
        "first token of a host hit, ms | 2048 | 100.0 (8192 cached) | 20.0 (8192 cached) | "
        "10.0 (8192 cached) | 2.00",
        "first token of a host hit, ms | 8192 | 100.0 (8192 cached) | 20.0 (8192 cached) | "
        "10.0 (8192 cached) | 2.00",
        "decoding, tokens per second | 32 | 10 | 50 | 100 | 2.00",
        "load, turns per second | 64 | 1.00 (50% hits) | 5.00 (50% hits) | 10.00 (50% hits) | 2.00",
        "load, p99 of first tokens, ms | 64 | 200 | 40 | 20 | 2.00",
    ]
    assert len(json.loads(Path(arguments.output).read_text())) == 15
    commands = {name: f"vllm serve {name}" for name in names}
    assert advice(rows, commands).startswith("use this command: vllm serve ours (2.00 x stock's")


def test_an_arm_that_no_cpu_has_is_refused_before_an_engine_starts(model: str) -> None:
    for arms in ([], ["--arms", "ours", 'native:{"a": 1}']):
        with pytest.raises(BenchmarkError, match=r"runs on no CPU: leave it away \(--arms"):
            command.run(given(*arms), [model, "--skip-tokenizer-init"])


@pytest.mark.engine
def test_the_parts_of_a_tiny_engine(model: str) -> None:
    arm = command.read_arm("ours", SMALL, serving(model, "--max-model-len", "512"))
    options = {key: value for key, value in arm.options.items() if key != "skip_tokenizer_init"}
    with cpu_engine(model, **options) as llm:
        parts = Parts(llm, SMALL)
        hit = parts(("first_token", 1, 256))
        decode, load = parts(("decode", 1, 2)), parts(("load", 1, 2))
        opened = parts(("open_load", 1, 2))
        del parts
    assert hit["cached"] == 256
    assert hit["first_token_ms"] > 0
    assert hit["loads_layerwise"] + hit["loads_async"] + hit["recomputed"] >= 1
    assert decode["tokens_per_second"] > 0
    assert load["turns_per_second"] > 0
    assert opened["first_token_p99_ms"] >= opened["first_token_ms"] > 0
    for each in (load, opened):
        assert each["errors"] == 0
        assert 0 < each["hit_rate"] < 1
        assert each["tokens_per_second"] > 0
