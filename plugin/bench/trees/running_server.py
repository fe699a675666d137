"""A server that runs already, under a closed loop of requests: its own counters tell what came."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from vllm_graft.base.values import reason_of
from vllm_graft.bench.common.closed_loop import Case, Measured, Request, Waiting
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.metrics.server_info import total

if TYPE_CHECKING:
    import aiohttp

COUNTED = {
    "tokens": "vllm:generation_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
"""Counters that stock vLLM has, too."""


class RunningServer:
    """The server at an address, which is asked what it serves. It answers as an arm's pipe does.
    Raises `BenchmarkError` if no vLLM server answers there."""

    def __init__(self, url: str) -> None:
        self.url, self.prompts = url.rstrip("/"), list[Request]()
        try:
            (card, *_) = asyncio.run(self._get("/v1/models"))["data"]
            self.model, self.longest = str(card["id"]), int(card["max_model_len"])
        except Exception as error:  # Of the client, and of an answer that has another form.
            raise BenchmarkError(
                f"--url {url}: no vLLM server answers there ({reason_of(error)}). Give the address "
                "of a running `vllm serve`, for example http://127.0.0.1:8000."
            ) from None
        self.root = str(card.get("root") or self.model)
        self._case: Case | None = None

    def tokenizer(self, model: str | None) -> Any:
        """The tokenizer of the served or the named model; a BenchmarkError if it is not here."""
        from vllm.tokenizers import get_tokenizer

        name = model or self.root
        try:
            return get_tokenizer(name)
        except Exception as error:  # Of the Hub's client, and of transformers.
            raise BenchmarkError(
                f"--url {self.url}: the tokenizer of {name} can't be read here "
                f"({reason_of(error)}): name the model in front, as a folder of this machine."
            ) from None

    def send(self, case: Case) -> None:
        """Take a case, which `recv` runs."""
        self._case = case

    def recv(self) -> Measured:
        """Run the case until a sender finds no request; a BenchmarkError if one is refused."""
        assert self._case is not None
        return asyncio.run(self._measure(self._case))

    async def _measure(self, case: Case) -> Measured:
        numbers = range(case.first, case.first + case.requests)
        waiting = Waiting((self.prompts[each % len(self.prompts)], each) for each in numbers)
        begun = [waiting.take() for _ in range(case.batch)]
        if None in begun:
            raise BenchmarkError(
                f"--requests-in-flight {case.batch}: no more than {begun.index(None)} of the "
                "dataset's sessions can be in flight at a time: lower it, or give more sessions."
            )
        async with _session() as session:

            async def send_on(taken: tuple[Request, int] | None) -> None:
                while taken is not None:
                    await self._ask(session, case, *taken)
                    waiting.end(taken[0])
                    taken = waiting.take()

            before, began = await self._counted(session), time.perf_counter()
            senders = [asyncio.create_task(send_on(taken)) for taken in begun]
            done, rest = await asyncio.wait(senders, return_when=asyncio.FIRST_COMPLETED)
            after, seconds = await self._counted(session), time.perf_counter() - began
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            for task in done:
                task.result()
        more = {name: after[name] - before[name] for name in after}
        drafts = more["drafts"]
        length = 1 + more["accepted"] / drafts if drafts else 1.0
        return Measured(more["tokens"] / seconds, length)

    async def _ask(
        self, session: aiohttp.ClientSession, case: Case, request: Request, number: int
    ) -> None:
        told = dict(request.prompt)
        body = {
            "model": self.model,
            "prompt": told.pop("prompt_token_ids"),
            "temperature": case.temperature,
            "seed": number,
            **told,
            **request.body(case.max_tokens),
        }
        async with session.post(f"{self.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                text = (await reply.text())[:300]
                raise BenchmarkError(f"--url {self.url}: a request got {reply.status}: {text}")
            await reply.read()

    async def _counted(self, session: aiohttp.ClientSession) -> dict[str, float]:
        async with session.get(f"{self.url}/metrics") as page:
            text = await page.text()
        return {name: total(text, series) for name, series in COUNTED.items()}

    async def _get(self, path: str) -> Any:
        async with _session() as session, session.get(self.url + path) as reply:
            return await reply.json()


def _session() -> aiohttp.ClientSession:
    import aiohttp

    # An answer takes as long as it takes; connections are as many as requests in flight.
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        connector=aiohttp.TCPConnector(limit=0),
        trust_env=True,
    )
