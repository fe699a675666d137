"""The draft's output head: its best tokens, found in the draft's own (hot) vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_graft.base.decision import decline_or_raise
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.heads import fp8_head
from vllm_graft.spec_decode.heads.fp8_head import Fp8Head, Fp8Rows, PlainRows, take_rows
from vllm_graft.spec_decode.heads.hot_tokens import FLAG, load_hot_tokens
from vllm_graft.spec_decode.heads.hot_vocabulary import HotVocabulary
from vllm_graft.spec_decode.kernels.topk import Noise, topk_logprobs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_graft.spec_decode.config.tree_config import TreeConfig

Project = Callable[[torch.Tensor], torch.Tensor]
"""Computes logits ``[num_rows, any]`` of states ``[num_rows, hidden]`` that need no more norm."""


class OutputHead:
    """The output head of a draft, whose rows drafts may be chosen from in another way.

    EAGLE heads have an ``lm_head`` and a logits processor of their own. Modules for one token more
    (MTP) keep the processor one level deeper, and some have rows and a norm of their own, such as
    GLM-4.5's ``shared_head``. There a stand-in replaces the processor, and the draft computes
    logits once, so that the stand-in sees which rows it is passed. Raises `AttributeError` if the
    draft has no logits processor in either place.
    """

    def __init__(self, draft: Any) -> None:
        self._draft = draft
        self._stand_in: _StandIn | None = None
        if hasattr(draft, "logits_processor"):
            self.rows, self.processor = draft.lm_head, draft.logits_processor
            return
        found = draft.model.logits_processor
        if not isinstance(found, _StandIn):
            found = draft.model.logits_processor = _StandIn(found)
            token = torch.zeros(1, dtype=torch.int32, device=next(draft.parameters()).device)
            with torch.inference_mode():
                # Any states do: which rows they are multiplied by is all that is asked.
                draft.compute_logits(draft.model.embed_tokens(token))
        self._stand_in, self.rows, self.processor = found, found.rows, found.processor

    def logits(self, hidden: torch.Tensor, project: Project) -> torch.Tensor:
        """Compute logits by ``project`` of states behind the draft's own norm. Capturable."""
        if self._stand_in is None:
            return project(hidden)
        self._stand_in.project = project
        try:
            logits: torch.Tensor = self._draft.compute_logits(hidden)
        finally:
            self._stand_in.project = None
        return logits


class _StandIn(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor: Any = processor
        self.project: Project | None = None
        self.rows: Any = None

    def forward(self, rows: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.project is not None:
            return self.project(states)
        if self.rows is None:
            # Not as a part of this module, because the rows are the draft's.
            object.__setattr__(self, "rows", rows)
        return self.processor(rows, states, *args, **kwargs)


SHARPNESS = 1.12
"""Factor by which a draft's logits are multiplied before its tokens are ranked and scored. A draft
averages over contexts that it can't tell apart. The target emits its largest logit, which is the
draft's best token more often, and an unlikely one less often, than the draft's softmax says."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class DraftHead:
    """Top-k of a draft's next-token distribution.

    The k best are taken in the draft vocabulary and mapped to target ids afterwards. The draft
    vocabulary is EAGLE-3's own (``d2t``) or the whole vocabulary, cut to the tokens of a hot-token
    file if there is one (FR-Spec, Zhao et al. 2025; SGLang's token map). Raises `ConfigError` if
    the draft or its head can't have what is asked for.

    Args:
        topk: how many tokens `top` returns by default.
        hot_tokens: a file of the tokens to draft from, or how many tokens to learn while serving.
        vocab_size: size of the target's vocabulary; None takes that of the draft's output head.
        fp8: whether to keep the head's rows in FP8 for drafting.

    Attributes:
        target_ids: int64 ``[draft_vocab]``, the target's id of each draft token; None if both
            vocabularies are the same.
        hot_weight: ``[draft_vocab, hidden]``, the head's rows of a hot-token file; None without a
            file, and where `fp8` holds them.
    """

    def __init__(
        self,
        draft: nn.Module,
        topk: int,
        hot_tokens: str | int | None = None,
        vocab_size: int | None = None,
        *,
        fp8: bool = False,
    ) -> None:
        self.draft: Any = draft
        self.topk = topk
        self.target_ids: torch.Tensor | None = None
        self.hot_weight: torch.Tensor | None = None
        self._hot_rows: torch.Tensor | None = None
        self.learned: HotVocabulary | None = None
        offsets = getattr(draft, "draft_id_to_target_id", None)
        if offsets is not None:
            self.target_ids = torch.arange(offsets.shape[0], device=offsets.device) + offsets
        self.fp8: Fp8Head | None = None
        if hot_tokens is not None:
            self._check_head(FLAG)
        if isinstance(hot_tokens, str):
            self._cut(hot_tokens, vocab_size or self._draft_vocab)
        if fp8:
            self._quantize()
        if isinstance(hot_tokens, int):
            # Behind the head in FP8, of which the rows are copies.
            self._learn(hot_tokens, vocab_size or self._draft_vocab)

    @classmethod
    def asked(
        cls,
        draft: nn.Module,
        topk: int,
        vocab_size: int,
        config: TreeConfig,
        engine_config: VllmConfig,
    ) -> DraftHead:
        """The head that a configuration asks for; what a preset alone wants may be left out. Raises
        `ConfigError` if somebody asked for what the draft's head can't have."""
        make = functools.partial(cls, draft, topk, vocab_size=vocab_size)
        fp8, hot = config.head_dtype == "fp8", config.hot_tokens
        # What a preset adds is not what somebody asked for.
        if fp8:
            try:
                return make(hot, fp8=True)
            except ConfigError as refused:
                decline_or_raise("tree.head_dtype", refused, engine_config)
        try:
            return make(hot)
        except ConfigError as refused:
            if hot is None:
                raise
            decline_or_raise("tree.hot_tokens", refused, engine_config)
            return make()

    @functools.cached_property
    def output(self) -> OutputHead:
        """The draft's own head; it is looked for only where something takes its place."""
        return OutputHead(self.draft)

    @property
    def _draft_vocab(self) -> int:
        size: int = self.output.processor.org_vocab_size
        return size

    def _check_head(self, flag: str) -> None:
        """Refuse an output head whose rows can't be taken."""
        try:
            head = self.output.rows
        except AttributeError as missing:
            raise ConfigError(
                f"{flag} needs a draft with vLLM's logits processor, but {missing}: remove the flag"
            ) from missing
        weight: torch.Tensor | None = getattr(head, "weight", None)
        if weight is None or weight.dtype not in _FLOATS or weight.dim() != 2:
            raise ConfigError(
                f"{flag} needs an unquantised output head, but this one is "
                f"{type(getattr(head, 'quant_method', head)).__name__}: remove the flag"
            )
        if getattr(head, "bias", None) is not None:
            raise ConfigError(f"{flag} needs an output head without bias: remove the flag")

    def _quantize(self) -> None:
        self._check_head(fp8_head.FLAG)
        head = self.output.rows
        dtype, computed = head.weight.dtype, self.output.processor.head_dtype
        if computed not in (None, dtype):
            raise ConfigError(
                f"{fp8_head.FLAG} is 'fp8', but --hf-overrides says that output heads compute in "
                f"{computed}: remove one of them"
            )
        if self.hot_weight is not None:
            self.fp8, self.hot_weight = Fp8Head(self.hot_weight), None
        else:
            self.fp8 = Fp8Head(head.weight, head.tp_size)

    def _cut(self, path: str, vocab_size: int) -> None:
        head = self.output.rows
        ids = load_hot_tokens(path, vocab_size).to(head.weight.device)
        rows, known = ids, ""
        if self.target_ids is not None:
            rows = torch.isin(self.target_ids, ids).nonzero().flatten()
            ids = self.target_ids[rows]
            known = f" of the {len(self.target_ids)} that this draft can propose (EAGLE-3's d2t)"
        if len(ids) < self.topk:
            raise ConfigError(
                f"{FLAG}: {path!r} lists {len(ids)} tokens{known}, fewer than "
                f"--additional-config.graft.tree.topk {self.topk}: list more tokens"
            )
        self.target_ids = ids
        self._hot_rows = rows
        self.hot_weight = take_rows(head, rows)

    def _learn(self, size: int, vocab_size: int) -> None:
        draft_vocab = self._draft_vocab
        if not self.topk <= size < draft_vocab:
            raise ConfigError(
                f"{FLAG} is {size}, but must be at least --additional-config.graft.tree.topk "
                f"{self.topk} and less than the draft's vocabulary of {draft_vocab} tokens: choose "
                "a quarter of it, say, or remove the flag"
            )
        head, ids = self.output.rows, self.target_ids
        if ids is None:
            ids = torch.arange(draft_vocab, device=head.weight.device)
        rows = PlainRows(head, size) if self.fp8 is None else Fp8Rows(self.fp8, head, size)
        self.learned = HotVocabulary(size, ids, vocab_size, rows)

    def renew(self) -> None:
        """Copy rows of the draft's head again, whose weights have changed; on all ranks at once."""
        rows = self._hot_rows
        if self.hot_weight is not None and rows is not None:
            take_rows(self.output.rows, rows, out=self.hot_weight)
        if self.fp8 is not None:
            head = self.output.rows
            self.fp8.renew(head.weight if rows is None else take_rows(head, rows))
        if self.learned is not None:
            self.learned.renew()

    def logits(self, hidden: torch.Tensor, *, narrow: bool = False) -> torch.Tensor:
        """Return logits ``[num_rows, draft_vocab]``; `narrow` leaves the learned vocabulary's."""
        if (multiply := self._product_of_some(narrow)) is not None:
            return self.output.logits(hidden, functools.partial(self._cut_logits, multiply))
        if self.fp8 is not None:
            processor = self.output.processor
            return self.output.logits(hidden, functools.partial(processor, self.fp8))
        draft = self.draft
        if self.target_ids is not None:
            return draft.logits_processor(draft.lm_head, hidden)
        return draft.compute_logits(hidden)

    def _product_of_some(self, narrow: bool) -> Project | None:
        if narrow:
            assert self.learned is not None
            return self.learned.rows.multiply
        weight = self.hot_weight
        return None if weight is None else lambda states: states @ weight.t()

    def _cut_logits(self, multiply: Project, states: torch.Tensor) -> torch.Tensor:
        # The projection is cut; scale and soft cap are those of vLLM's logits processor.
        processor, logits = self.output.processor, multiply(states)
        if processor.soft_cap is not None:
            logits = torch.tanh(logits / processor.soft_cap) * processor.soft_cap
        return logits if processor.scale == 1.0 else logits * processor.scale

    def top(
        self,
        hidden: torch.Tensor,
        topk: int | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        noise: Noise | None = None,
        *,
        narrow: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best tokens of each row of `hidden` ``[num_rows, hidden]``, best first.
        Returns log-probabilities float32 ``[num_rows, topk]`` within the draft vocabulary,
        sharpened by `SHARPNESS`, and target token ids int64 ``[num_rows, topk]``.

        Args:
            out: receives what is returned.
            noise: the noise that the target will draw with at these rows; None ranks without.
            narrow: whether to choose among the learned vocabulary's tokens only.
        """
        logits = self.logits(hidden, narrow=narrow)
        ids = self.learned.target_ids if narrow and self.learned else self.target_ids
        return topk_logprobs(logits, topk or self.topk, ids, out, noise, SHARPNESS)
