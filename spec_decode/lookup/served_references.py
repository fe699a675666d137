"""The references of an engine's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.tokenizers.registry import cached_tokenizer_from_config

from vllm_graft.base.log import info_once
from vllm_graft.spec_decode.lookup.references import References, styles_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_graft.spec_decode.config.ngram_config import NgramConfig


def served_references(vllm_config: VllmConfig, config: NgramConfig) -> References | None:
    """What makes references, with the tokenizer that the engine serves; None without room for any.

    The tokenizer is read here, so that no request waits for it.
    """
    model = vllm_config.model_config
    room = config.room(model.max_model_len)
    if not room:
        return None
    tokenizer = cached_tokenizer_from_config(model)
    if tokenizer is None:
        info_once(
            "--skip-tokenizer-init: n-grams are looked for in predictions of token ids, but not in "
            "texts and schemas"
        )
    compact = vllm_config.structured_outputs_config.disable_any_whitespace
    return References(
        tokenizer,
        room=room,
        opening=config.max,
        vocab_size=model.get_vocab_size(),
        styles=styles_of(any_whitespace=not compact),
    )
