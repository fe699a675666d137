"""Requests about images of noise, as the served model's own processor makes them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import GraftError
from vllm_graft.base.values import reason_of
from vllm_graft.proof.tiny_config import TEXT_TOKENS

LENGTH = 4096
"""Most tokens of a request: some towers make a thousand of any image."""

EDGES = (224, 288)
"""Pixels of the sides of an image: of two layouts, and two of the first are encoded in a step."""

_PROCESSOR = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "tekken*")
"""Files beside a model's weights."""

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {
        "image": {"count": 2, "width": EDGES[-1], "height": EDGES[-1]},
        "video": 0,
        "audio": 0,
    },
    # A tower of random weights would be run on as many images as a step may hold.
    "skip_mm_profiling": True,
    "mm_processor_cache_gb": 0,
}
"""Options of ``vllm.LLM`` for an engine that takes images."""


def link_processor(model: Any, folder: Path) -> None:
    """Put a model's files but for its weights and configuration into a folder. Raises `GraftError`
    if they are neither here nor to be had."""
    from huggingface_hub import snapshot_download

    source = Path(model.model)
    try:
        if not source.is_dir():
            wanted = {"allow_patterns": list(_PROCESSOR), "revision": model.revision}
            source = Path(snapshot_download(model.model, **wanted))
    except Exception as error:  # Of a network or of a cache.
        raise GraftError(
            f"The files of {model.model}'s processor, which images need, can't be had: "
            f"{reason_of(error)}"
        ) from None
    for file in (file for pattern in _PROCESSOR for file in source.glob(pattern)):
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())


class Looking:
    """Makes requests to the configuration that is served; see `vllm_graft.proof.questions.Look`.
    `sees` says whether the model takes images, and not sounds alone. Raises `GraftError` if vLLM
    can't make the model's processor."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.renderers import renderer_from_config

        try:
            self._renderer = renderer_from_config(vllm_config)
            self._processor = self._renderer.get_mm_processor()
        except Exception as error:  # Of vLLM's, or of the processor's own code.
            raise GraftError(
                f"Images can't be proven without a processor: {reason_of(error)}"
            ) from None
        self.sees = "image" in self._processor.info.supported_mm_limits

    def __call__(
        self, prompt: tuple[int, ...], size: int, count: int, number: int
    ) -> dict[str, Any]:
        import numpy
        from PIL import Image

        # An image that came before would not be encoded.
        noise = numpy.random.default_rng((number, size, count))
        shape = (count, EDGES[size], EDGES[size], 3)
        images = [Image.fromarray(each) for each in noise.integers(0, 255, shape, dtype="uint8")]
        text = self._processor.dummy_inputs.get_dummy_text({"image": count})
        given = {"prompt": text, "multi_modal_data": {"image": images}}
        (made,) = self._renderer.render_cmpl([given], skip_mm_cache=True)
        # Embeddings take the places of images, whatever the tokens there are.
        tokens = [TEXT_TOKENS[token % len(TEXT_TOKENS)] for token in made["prompt_token_ids"]]
        places = {
            kind: [replace(place, offset=place.offset + len(prompt)) for place in found]
            for kind, found in made["mm_placeholders"].items()
        }
        return {**made, "prompt_token_ids": [*prompt, *tokens], "mm_placeholders": places}
