"""The head of a draft: its kinds, combined states, and drawn tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.heads import hot_tokens, hot_vocabulary
from vllm_graft.spec_decode.heads.fp8_head import quantize_by_kernel
from vllm_graft.spec_decode.heads.head import SHARPNESS, DraftHead, load_hot_tokens
from vllm_graft.spec_decode.heads.hot_tokens import check_draft_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, HIDDEN, TOPK = 97, 8, 4
FLAG = "--additional-config.graft.tree.hot_tokens"


class Processor:
    def __init__(self, rows: int, scale: float = 1.0, soft_cap: float | None = None) -> None:
        self.org_vocab_size, self.scale, self.soft_cap = rows, scale, soft_cap

    def __call__(self, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = hidden @ head.weight.t()
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits * self.scale


def make_draft(rows: int = VOCAB, offsets: torch.Tensor | None = None, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, HIDDEN, generator=generator).to(DEVICE)
    head = SimpleNamespace(weight=weight, tp_size=1)
    processor = Processor(rows, **options)
    draft = SimpleNamespace(lm_head=head, logits_processor=processor)
    draft.compute_logits = lambda hidden: processor(head, hidden)
    if offsets is not None:
        draft.draft_id_to_target_id = offsets.to(DEVICE)
    return draft


def states(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def best(logits: torch.Tensor, ids: list[int]) -> list[list[tuple[int, float]]]:
    """Return the best (target id, log-probability) of each row, by sorting all of them."""
    logp = (logits.double() * SHARPNESS).log_softmax(-1)
    rows = [sorted(zip(ids, row), key=lambda pair: -pair[1]) for row in logp.tolist()]
    return [row[:TOPK] for row in rows]


def check(
    found: tuple[torch.Tensor, torch.Tensor], expected: list[list[tuple[int, float]]]
) -> None:
    logp, tokens = found
    assert tokens.dtype == torch.int64
    assert logp.dtype == torch.float32
    assert tokens.tolist() == [[token for token, _ in row] for row in expected]
    wanted = torch.tensor([[p for _, p in row] for row in expected])
    torch.testing.assert_close(logp.cpu(), wanted)


def hot_file(folder: Path, ids: list[int]) -> str:
    file = folder / "hot.json"
    file.write_text(json.dumps(ids))
    return str(file)


class Widths(TorchDispatchMode):
    """Collect the sizes of all tensors that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.seen.update(tensor.shape)
        return result


def test_the_whole_vocabulary() -> None:
    draft = make_draft()
    check(
        DraftHead(draft, TOPK).top(states()),
        best(draft.compute_logits(states()), list(range(VOCAB))),
    )


def test_a_reduced_vocabulary_is_mapped_after_the_choice() -> None:
    targets = [3 * i + 2 for i in range(20)]
    draft = make_draft(20, torch.tensor(targets) - torch.arange(20))
    # vLLM's own `compute_logits` scatters into the target's vocabulary.
    draft.compute_logits = None
    logits = draft.logits_processor(draft.lm_head, states())
    found = DraftHead(draft, TOPK).top(states())
    check(found, best(logits, targets))
    # Negative control: without the map the ids are wrong.
    with pytest.raises(AssertionError):
        check(found, best(logits, list(range(20))))


@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.5}, {"soft_cap": 2.0}, {"scale": 3.0, "soft_cap": 1.5}]
)
def test_hot_tokens_cut_the_head(tmp_path: Path, options: dict[str, float]) -> None:
    ids = [1, 5, 8, 40, 41, 96]
    draft = make_draft(**options)
    head = DraftHead(draft, TOPK, hot_file(tmp_path, ids))
    check(head.top(states()), best(draft.compute_logits(states())[:, ids], ids))
    assert head.hot_weight is not None
    assert head.hot_weight.shape == (len(ids), HIDDEN)


def test_nothing_of_the_target_s_vocabulary_is_made(tmp_path: Path) -> None:
    ids = list(range(0, 60, 3))
    reduced = DraftHead(make_draft(20, torch.arange(20)), TOPK)
    hot = DraftHead(make_draft(), TOPK, hot_file(tmp_path, ids))
    whole = DraftHead(make_draft(), TOPK)
    for head, wide in ((reduced, False), (hot, False), (whole, True)):
        with Widths() as widths:
            head.top(states())
        assert (VOCAB in widths.seen) is wide
        assert widths.seen >= {TOPK}


def write_json(file: Path, ids: list[int]) -> None:
    file.write_text(json.dumps(ids))


def write_lines(file: Path, ids: list[int]) -> None:
    file.write_text("\n".join(map(str, ids)) + "\n")


def write_torch(file: Path, ids: list[int]) -> None:
    torch.save(torch.tensor(ids, dtype=torch.int32), file)


def write_list(file: Path, ids: list[int]) -> None:
    torch.save(ids, file)


def write_safetensors(file: Path, ids: list[int]) -> None:
    from safetensors.torch import save_file

    save_file({"ids": torch.tensor(ids)}, file)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("hot.json", write_json),
        ("hot.txt", write_lines),
        ("hot.pt", write_torch),
        ("hot.pt", write_list),
        ("hot.safetensors", write_safetensors),
    ],
)
def test_formats_of_hot_token_files(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    file = tmp_path / name
    write(file, [7, 3, 96, 3, 0])
    ids = load_hot_tokens(str(file), VOCAB)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [0, 3, 7, 96]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("hot.json", "[1, 2", "can't read"),
        ("hot.json", '{"a": 1}', "can't read"),
        ("hot.json", "[1.5, 2.0]", "not integers"),
        ("hot.json", "[true]", "not integers"),
        ("hot.json", "[]", "holds no token"),
        (
            "hot.json",
            "[3, 97]",
            "holds ids from 3 to 97, but the target's vocabulary has ids 0 to 96",
        ),
        ("hot.json", "[-1, 3]", "holds ids from -1 to 3"),
        ("hot.txt", "1 two 3", "can't read"),
        ("hot.pt", "not a pickle", "can't read"),
        ("hot.safetensors", "no header", "can't read"),
        ("hot.bin", "1", "unknown ending '.bin'"),
    ],
)
def test_refused_hot_token_files(tmp_path: Path, name: str, content: str, words: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_hot_tokens(str(file), VOCAB)
    message = str(caught.value)
    assert message.startswith(FLAG)
    assert repr(str(file)) in message
    assert words in message


def test_a_missing_hot_token_file() -> None:
    with pytest.raises(ConfigError, match=r"can't read '/nowhere/hot\.json': .*No such file"):
        load_hot_tokens("/nowhere/hot.json", VOCAB)


def refusal(draft: Any, file: str) -> str:
    with pytest.raises(ConfigError) as caught:
        DraftHead(draft, TOPK, file)
    return str(caught.value)


def test_fewer_hot_tokens_than_topk(tmp_path: Path) -> None:
    message = refusal(make_draft(), hot_file(tmp_path, [1, 2, 3]))
    assert "lists 3 tokens, fewer than --additional-config.graft.tree.topk 4" in message


def test_hot_tokens_cut_a_vocabulary_of_the_draft_s_own(tmp_path: Path) -> None:
    targets = [3 * i + 2 for i in range(20)]
    draft = make_draft(20, torch.tensor(targets) - torch.arange(20))
    kept = [targets[row] for row in (1, 4, 6, 7, 19)]
    # 3 and 96 are not in the draft's vocabulary.
    head = DraftHead(draft, TOPK, hot_file(tmp_path, [*kept, 3, 96]), VOCAB)
    rows = [1, 4, 6, 7, 19]
    logits = draft.logits_processor(draft.lm_head, states())[:, rows]
    check(head.top(states()), best(logits, kept))


def test_hot_tokens_that_a_draft_hardly_knows(tmp_path: Path) -> None:
    file = hot_file(tmp_path, [1, 2, 3, 90, 91, 92])
    with pytest.raises(ConfigError) as caught:
        DraftHead(make_draft(20, torch.arange(20) * 2), TOPK, file, VOCAB)
    assert "lists 1 tokens of the 20 that this draft can propose (EAGLE-3's d2t)" in str(
        caught.value
    )


@pytest.mark.parametrize("size", [TOPK - 1, VOCAB, VOCAB + 1])
def test_how_many_tokens_can_be_learned(size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        DraftHead(make_draft(), TOPK, size, VOCAB)
    message = str(caught.value)
    assert f"{FLAG} is {size}, but must be at least" in message
    assert f"less than the draft's vocabulary of {VOCAB} tokens" in message


@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "soft_cap": 2.0}])
def test_a_learned_vocabulary_narrows_where_it_is_asked_to(options: dict[str, float]) -> None:
    draft = make_draft(**options)
    head = DraftHead(draft, TOPK, 6, VOCAB)
    assert head.learned is not None
    assert not head.learned.narrows(3, 1)
    ids = [1, 5, 8, 40, 41, 96]
    head.learned.emitted[ids] = 1
    for _ in range(hot_vocabulary.PERIOD):
        head.learned.step()
    whole = draft.compute_logits(states())
    check(head.top(states()), best(whole, list(range(VOCAB))))
    check(head.top(states(), narrow=True), best(whole[:, ids], ids))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("weight", None, "unquantised output head"),
        ("weight", torch.zeros(VOCAB, HIDDEN, dtype=torch.int8), "unquantised output head"),
        ("weight", torch.zeros(VOCAB), "unquantised output head"),
        ("bias", torch.zeros(VOCAB), "without bias"),
    ],
)
def test_hot_tokens_need_a_plain_head(tmp_path: Path, name: str, value: Any, words: str) -> None:
    draft = make_draft()
    setattr(draft.lm_head, name, value)
    assert words in refusal(draft, hot_file(tmp_path, [1, 2, 3, 4]))


def test_a_quantised_fc_uses_the_kernel() -> None:
    op = SimpleNamespace(_forward_method="compiled", forward_cuda="kernel")
    method = SimpleNamespace(fp8_linear=SimpleNamespace(quant_fp8=op))
    fc = SimpleNamespace(quant_method=method)
    assert quantize_by_kernel(SimpleNamespace(model=SimpleNamespace(fc=fc)))
    assert op._forward_method == "kernel"


def test_other_drafts_stay_as_they_are() -> None:
    plain = SimpleNamespace(fc=SimpleNamespace(quant_method=object()))
    for draft in (SimpleNamespace(), SimpleNamespace(model=SimpleNamespace()), plain):
        assert not quantize_by_kernel(draft)
    assert not quantize_by_kernel(SimpleNamespace(model=plain))


DRAWN_VOCAB = 100


def draft(offsets: list[int] | None) -> SimpleNamespace:
    tensor = None if offsets is None else torch.tensor(offsets)
    return SimpleNamespace(draft_id_to_target_id=tensor)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(hot_tokens, "warning_once", found.append)
    return found


@pytest.mark.parametrize(
    ("offsets", "names"),
    [
        ([0, 99, 0], "leads from 1 of the draft's 3 tokens .*, token 1 to 100, .* 0 to 99"),
        ([0, 5, -3], "token 2 to -1"),
        ([9000, 9000, 1], "leads from 2 of the draft's 3 tokens .*, token 0 to 9000"),
    ],
)
def test_ids_out_of_the_vocabulary_are_refused(offsets: list[int], names: str) -> None:
    with pytest.raises(ConfigError, match=names) as refused:
        check_draft_tokens(draft(offsets), DRAWN_VOCAB, "/some/head")
    assert str(refused.value).startswith("--speculative-config.model: d2t of '/some/head'")
    assert "\n" not in str(refused.value)


def test_ids_within_the_vocabulary_are_fine(said: list[str]) -> None:
    check_draft_tokens(draft([0, 98, 97]), DRAWN_VOCAB, "head")
    check_draft_tokens(draft(None), DRAWN_VOCAB, "head")
    check_draft_tokens(draft([0] * DRAWN_VOCAB), DRAWN_VOCAB, "head")
    check_draft_tokens(SimpleNamespace(), DRAWN_VOCAB, "head")
    assert not said


def test_a_small_vocabulary_without_d2t_is_told(said: list[str]) -> None:
    check_draft_tokens(draft([0, 0, 0]), DRAWN_VOCAB, "head")
    (line,) = said
    assert "drafts 3 of the target's 100 tokens and has no d2t" in line


def test_a_drafter_checks_its_draft() -> None:
    """Before it makes anything of the draft's head."""
    drafter: Any = SimpleNamespace(
        model=draft([9000, 0]),
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: DRAWN_VOCAB)
        ),
        draft_model_config=SimpleNamespace(model="/some/head"),
    )
    with pytest.raises(ConfigError, match="d2t of '/some/head' leads from 1"):
        TreeDrafting.make_head(drafter)
