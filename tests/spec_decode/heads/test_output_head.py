"""Output heads that are kept beside the draft, and weights that are loaded again."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.engines.pairs import Pair
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.heads import hot_vocabulary
from vllm_graft.spec_decode.heads.fp8_head import quantize
from vllm_graft.spec_decode.heads.head import SHARPNESS, DraftHead
from vllm_graft.spec_decode.worker_mends import follow_weights
from vllm_graft.testing import model_runner

VOCAB, HIDDEN, TOPK, SCALE = 61, 8, 3, 0.5
HOT = [1, 5, 8, 40, 41, 60]


class Processor(nn.Module):
    """Has the attributes of vLLM's logits processor, and calls heads as it does."""

    def __init__(self) -> None:
        super().__init__()
        self.org_vocab_size, self.scale, self.soft_cap = VOCAB, SCALE, None
        self.head_dtype: Any = None

    def forward(self, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        return head.quant_method.apply(head, hidden) * self.scale


class Rows(nn.Module):
    """An output head, unquantised."""

    tp_size = 1

    def __init__(self, seed: int) -> None:
        super().__init__()
        weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(weight, requires_grad=False)

    @property
    def quant_method(self) -> Any:
        return self

    def apply(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hidden @ layer.weight.t()


class Module(nn.Module):
    """A draft of one token more. Rows and norm of its own are GLM-4.5's way, none are MiMo's.

    Both have an `lm_head` beside the module: GLM's is the target's, and the wrong one here.
    """

    def __init__(self, *, shared_head: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.logits_processor = Processor()
        self.model.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.lm_head = Rows(1)
        self.shared_head = Rows(2) if shared_head else None

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.shared_head is None:
            return hidden
        return torch.tensor([3.0] + [1.0] * (HIDDEN - 1)) * nn.functional.rms_norm(hidden, [HIDDEN])

    def compute_logits(self, hidden: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        head = self.lm_head if self.shared_head is None else self.shared_head
        return self.model.logits_processor(head, self.normed(hidden))


@pytest.fixture(params=[True, False], ids=["glm", "mimo"])
def draft(request: Any) -> Module:
    return Module(shared_head=request.param)


def states() -> torch.Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3)) * 4


def best(logits: torch.Tensor, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    logp, places = (logits.double() * SHARPNESS).log_softmax(-1).topk(TOPK)
    return logp.float(), torch.tensor(ids)[places]


def check(found: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor, ids: list[int]) -> None:
    logp, tokens = best(logits, ids)
    assert found[1].tolist() == tokens.tolist()
    torch.testing.assert_close(found[0], logp, rtol=1e-4, atol=1e-4)


def hot_file(folder: Path) -> str:
    (folder / "hot.json").write_text(json.dumps(HOT))
    return str(folder / "hot.json")


def test_a_head_that_nothing_replaces_is_left_alone(draft: Module) -> None:
    head = DraftHead(draft, TOPK)
    assert type(draft.model.logits_processor) is Processor
    check(head.top(states()), draft.compute_logits(states()), list(range(VOCAB)))


def test_hot_tokens_of_a_file(draft: Module, tmp_path: Path) -> None:
    whole = draft.compute_logits(states())
    head = DraftHead(draft, TOPK, hot_file(tmp_path))
    check(head.top(states()), whole[:, HOT], HOT)
    # The draft's own way is as it was.
    assert torch.equal(draft.compute_logits(states()), whole)


def test_hot_tokens_that_are_learned(draft: Module) -> None:
    whole = draft.compute_logits(states())
    head = DraftHead(draft, TOPK, len(HOT), VOCAB)
    assert head.learned is not None
    head.learned.emitted[HOT] = 1
    for _ in range(hot_vocabulary.PERIOD):
        head.learned.step()
    check(head.top(states()), whole, list(range(VOCAB)))
    check(head.top(states(), narrow=True), whole[:, HOT], HOT)


def test_rows_in_fp8(draft: Module) -> None:
    normed = draft.normed(states())
    head = DraftHead(draft, TOPK, fp8=True)
    rows = draft.lm_head if draft.shared_head is None else draft.shared_head
    (numbers, scale), (weight, of_row) = quantize(normed), quantize(rows.weight)
    logits = (numbers.float() * scale) @ (weight.float() * of_row).t() * SCALE
    check(head.top(states()), logits, list(range(VOCAB)))


def test_hot_tokens_in_fp8(draft: Module, tmp_path: Path) -> None:
    head = DraftHead(draft, TOPK, hot_file(tmp_path), fp8=True)
    assert head.fp8 is not None
    assert head.fp8.weight.shape == (len(HOT), HIDDEN)
    found = head.logits(states())
    exact = draft.compute_logits(states())[:, HOT]
    assert (found - exact).abs().max() < 0.1 * exact.abs().max()
    assert not torch.equal(found, exact)


def test_states_without_the_norm_are_told_apart(tmp_path: Path) -> None:
    """Negative control: what `test_hot_tokens_of_a_file` compares with does depend on the norm."""
    draft = Module(shared_head=True)
    head = DraftHead(draft, TOPK, hot_file(tmp_path))
    assert head.hot_weight is not None
    with pytest.raises(AssertionError):
        check(head.top(states()), states() @ head.hot_weight.t() * SCALE, HOT)


def test_a_head_may_be_made_again(draft: Module) -> None:
    """A preset's FP8 that is refused leaves a draft whose head is made once more."""
    whole = draft.compute_logits(states())
    draft.model.logits_processor.head_dtype = torch.float64
    with pytest.raises(ConfigError, match="output heads compute in"):
        DraftHead(draft, TOPK, fp8=True)
    head = DraftHead(draft, TOPK, len(HOT), VOCAB)
    assert type(head.output.processor) is Processor
    check(head.top(states()), whole, list(range(VOCAB)))


def test_a_draft_without_a_logits_processor() -> None:
    draft = nn.Module()
    draft.model = nn.Module()
    with pytest.raises(ConfigError) as caught:
        DraftHead(draft, TOPK, fp8=True)
    message = str(caught.value)
    assert message.startswith("--additional-config.graft.tree.head_dtype needs a draft with vLLM's")
    assert message.endswith("has no attribute 'logits_processor': remove the flag")


class Worker:
    """A worker of vLLM's with a head of ours, and what happens to both, in order."""

    def __init__(self, **speculator: Any) -> None:
        self.events: list[str] = []
        ours = {"head": SimpleNamespace(renew=lambda: self.events.append("renew"))}
        self.model_runner = SimpleNamespace(
            speculator=SimpleNamespace(**(speculator or ours)), reload_weights=self._reload
        )

    def _reload(self, path: str) -> str:
        self.events.append(path)
        return "done"

    def finish_weight_update(self) -> None:
        self.events.append("finish")


def test_copies_are_renewed_after_the_weights() -> None:
    worker: Any = Worker()
    for _ in range(2):
        follow_weights(worker)
    assert worker.model_runner.reload_weights("weights") == "done"
    worker.finish_weight_update()
    assert worker.events == ["weights", "renew", "finish", "renew"]


@pytest.mark.parametrize("speculator", [{"head": SimpleNamespace()}, {"other": None}])
def test_a_drafter_without_copies_changes_nothing(speculator: dict[str, Any]) -> None:
    worker: Any = Worker(**speculator)
    reload_weights = worker.model_runner.reload_weights
    follow_weights(worker)
    assert worker.model_runner.reload_weights is reload_weights


def test_weights_that_fail_to_load_leave_the_copies() -> None:
    worker: Any = Worker()

    def fail(path: str) -> None:
        raise ValueError(path)

    worker.model_runner.reload_weights = fail
    follow_weights(worker)
    with pytest.raises(ValueError, match="gone"):
        worker.model_runner.reload_weights("gone")
    assert worker.events == []


KINDS = [
    *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp8", "learned", "fp8 and file")),
    "fp8 and learned",
    "file",
]


@pytest.fixture(scope="module")
def updated_hot_file(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Path:
    file = tmp_path_factory.mktemp("hot") / "hot.txt"
    file.write_text("\n".join(map(str, range(0, 1000, 2))))
    return file


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_loads_its_weights_again(
    pair: Pair, updated_hot_file: Path, kind: str
) -> None:
    """Reloading fills copies that were spoilt with what the weights say, at the same addresses."""
    tree: dict[str, Any] = {"head_dtype": "fp8"} if "fp8" in kind else {}
    if "learned" in kind:
        tree["hot_tokens"] = 256
    if "file" in kind:
        tree["hot_tokens"] = str(updated_hot_file)
    with pair.engine(nodes=7, tree=tree, max_num_seqs=2) as llm:
        head = model_runner(llm).speculator.head
        copies = copies_of(head)
        assert len(copies) == {"fp8": 2, "learned": 1, "fp8 and learned": 4, "file": 1}.get(kind, 2)
        before = [each.clone() for each in copies]
        for each in copies:
            each.zero_()
        llm.collective_rpc("reload_weights")
        found = copies_of(head)
        assert [each.data_ptr() for each in found] == [each.data_ptr() for each in copies]
        for each, expected in zip(found, before, strict=True):
            assert expected.any()
            assert torch.equal(each, expected)


def copies_of(head: Any) -> list[torch.Tensor]:
    """Return all copies of rows that a head has, those in FP8 as bytes."""
    found: list[torch.Tensor] = []
    if head.hot_weight is not None:
        found.append(head.hot_weight)
    if head.fp8 is not None:
        found += [head.fp8.weight.view(torch.uint8), head.fp8.scale]
    if head.learned is not None:
        rows = head.learned.rows
        if head.fp8 is None:
            found.append(rows.weight)
        else:
            found += [rows.rows.weight.view(torch.uint8), rows.rows.scale]
    return found
