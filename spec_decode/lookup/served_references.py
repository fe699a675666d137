"""Gives the references of an engine's requests to its workers, with the requests. The engine core
makes them where it takes requests in, in a thread of its own beside the steps, and before they are
scheduled: all ranks get the same one at the same step, and no step waits for it."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.tokenizers.registry import cached_tokenizer_from_config

from vllm_graft.base.log import MOST, info_once, warning_once
from vllm_graft.base.options import did_you_mean
from vllm_graft.base.values import shown
from vllm_graft.seams.wrap import around
from vllm_graft.spec_decode.config.tree_config import lengths_of
from vllm_graft.spec_decode.lookup.corpora import Corpora
from vllm_graft.spec_decode.lookup.ngrams import add_corpus, erase_corpus
from vllm_graft.spec_decode.lookup.references import References, styles_of
from vllm_graft.spec_decode.models.drafts import has_model
from vllm_graft.spec_decode.trees.text_state import KEY, NONE, UNREAD, Owner, Reference

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    from vllm_graft.spec_decode.config.tree_config import MemoryConfig, TreeConfig


class Owners:
    """Numbers the owners of texts by a hash, whose key is this process's own and is kept nowhere.

    The engine core asks for them where it takes requests in, so that all ranks get the same ones
    and no step hashes a prompt. `scope`: ``tenant`` for requests of one ``cache_salt`` and adapter,
    ``server`` for all."""

    def __init__(self, scope: str) -> None:
        self._by_tenant, self._key = scope == "tenant", os.urandom(16)

    def of(self, request: Request) -> Owner:
        adapter = request.lora_request
        scope = self._name(request.cache_salt, None if adapter is None else adapter.lora_name)
        prompt = array("q", request.prompt_token_ids or ()).tobytes()
        return Owner(self._number(scope), self._number(scope + b"\0" + prompt))

    def scope(self, salt: str | None, adapter: str | None) -> int:
        """The scope of requests with this ``cache_salt`` and adapter."""
        return self._number(self._name(salt, adapter))

    def _name(self, salt: str | None, adapter: str | None) -> bytes:
        tenant = (salt, adapter) if self._by_tenant else "server"
        return repr(tenant).encode("utf-8", "surrogatepass")

    def _number(self, text: bytes) -> int:
        found = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
        # The first bit would be a sign, and 0 is nobody's.
        return int.from_bytes(found) >> 1 or 1


_WORD = re.compile("(vllm.?)?graft", re.IGNORECASE)
"""How keys of requests begin that are meant for us."""


def served_references(tree: TreeConfig, vllm_config: VllmConfig) -> References | None:
    """The maker of references for a tokenizer, read before any request; None without room."""
    speculative = vllm_config.speculative_config
    ngram = tree.ngram if has_model(tree, speculative) else lengths_of(tree, speculative)
    model = vllm_config.model_config
    if ngram is None or not (room := ngram.room(model.max_model_len)):
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
        opening=ngram.max,
        vocab_size=model.get_vocab_size(),
        styles=styles_of(any_whitespace=not compact),
    )


def carry(
    request: Request,
    references: References | None,
    *,
    learn_salted: bool = True,
    owners: Owners | None = None,
) -> None:
    """Put a request's reference into its parameters, in the place of what it predicts, which goes
    no further, however long it is. The parameters are copied, as others may share them.

    Args:
        request: vLLM's, which is not scheduled yet.
        references: makes them; None where nothing reads them.
        learn_salted: whether the text of a request with a ``cache_salt`` may be learned from.
        owners: tells whose text it is in a memory; None without one.
    """
    params = request.sampling_params
    if params is None:
        return
    given = params.extra_args or {}
    _name_misspelt(given)
    found: Reference = UNREAD if KEY in given else NONE
    if references is not None:
        found = references.of(params, request.prompt_token_ids)
    if not learn_salted and request.cache_salt is not None:
        found = found._replace(teaches=False)
    if owners is not None:
        found = found._replace(owner=owners.of(request))
    if found is NONE and KEY not in given:
        return
    request.sampling_params = copy.copy(params)
    request.sampling_params.extra_args = {**given, KEY: found}


def _name_misspelt(given: Mapping[object, object]) -> None:
    """Warn, once for each name, of keys of a request that are meant for us and aren't ours."""
    wrong = (key for key in given if key != KEY and isinstance(key, str) and _WORD.match(key))
    for key in itertools.islice(wrong, MOST):
        warning_once(
            f"vllm_xargs.{shown(key)} of a request is not read by vllm-graft."
            f"{did_you_mean(key[:80], (KEY,))}"
        )


def carry_references(engine: EngineCore, tree: TreeConfig, vllm_config: VllmConfig) -> None:
    """Let an engine core, before it takes requests in, carry their references to its workers."""
    references = served_references(tree, vllm_config)
    owners = None
    if tree.memory is not None:
        owners = Owners(tree.memory.scope)
        serve_corpora(engine, tree.memory, vllm_config, owners)

    # Only this engine is changed: others in the process may have other configurations.
    @around(engine, "preprocess_add_request")
    def then_carry(original: Any, request: Any) -> tuple[Request, int]:
        made: tuple[Request, int] = original(request)
        carry(made[0], references, learn_salted=tree.learn_salted, owners=owners)
        return made


def serve_corpora(
    engine: EngineCore, memory: MemoryConfig, vllm_config: VllmConfig, owners: Owners
) -> None:
    """Let an engine core add the corpora of its configuration, and answer what is asked of them."""

    def write(*corpus: object) -> None:
        engine.collective_rpc(add_corpus, args=corpus)

    def erase(places: Sequence[int]) -> None:
        engine.collective_rpc(erase_corpus, args=(places,))

    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    corpora = Corpora(memory, tokenizer, owners, write, erase)
    for path in memory.corpora:
        corpora.asked(add=path)
    around(engine, "collective_rpc")(corpora.answer)
