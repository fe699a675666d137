"""Requests with an image, one at a time, and how long an engine looks at it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vllm_graft.bench.common.answers import Answer

QUESTION = "What is it?"


@dataclass(frozen=True)
class Look:
    """A request of `tokens` with one image of noise, of `size` pixels by edge."""

    size: int
    seed: int
    tokens: int


@dataclass(frozen=True)
class Seen:
    """One answer, and milliseconds: in the encoder, with a wait for the device, and in all."""

    answer: Answer
    encoder_ms: float
    request_ms: float


class Looking:
    """Answers each `Look` with a `Seen`, and ``"counters"`` with those of our graphs.

    Args:
        llm: a ``vllm.LLM`` with ``enable_mm_processor_stats``.
        prompt: a text with the model's placeholder of an image; None asks by the chat template.
    """

    def __init__(self, llm: Any, prompt: str | None) -> None:
        self._llm, self._prompt = llm, prompt

    def __call__(self, wish: Look | str) -> Any:
        return self.look(wish) if isinstance(wish, Look) else self.counters()

    def look(self, wish: Look) -> Seen:
        """Ask about one image, with no other request in flight."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=wish.tokens, ignore_eos=True, logprobs=2)
        image = noise(wish.size, wish.seed)
        self._llm.collective_rpc("get_encoder_timing_stats")  # Reading them forgets them.
        began = time.perf_counter()
        (output,) = self._ask(image, params)
        seconds = time.perf_counter() - began
        (stats,) = self._llm.collective_rpc("get_encoder_timing_stats")
        encoder = sum(each["encoder_forward_secs"] for each in stats.values())
        return Seen(Answer.of(output.outputs[0]), 1e3 * encoder, 1e3 * seconds)

    def counters(self) -> dict[str, Any]:
        """Counters of our graphs."""
        (report,) = self._llm.collective_rpc("graft_info")
        found: dict[str, Any] = report["counters"].get("vit", {})
        return found

    def _ask(self, image: Any, params: Any) -> Any:
        if self._prompt is not None:
            request = {"prompt": self._prompt, "multi_modal_data": {"image": image}}
            return self._llm.generate([request], params, use_tqdm=False)
        content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": QUESTION}]
        return self._llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)


def noise(size: int, seed: int) -> Any:
    """A square PIL image of random pixels."""
    import numpy
    from PIL import Image

    pixels = numpy.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype="uint8")
    return Image.fromarray(pixels)
