"""Graphs of adapted models answer as the models do: vLLM's own code with tiny random towers."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.support.vision import towers
from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner
from vllm_graft.graph_runners.vision.towers.adapter import VisionAdapter, attach
from vllm_graft.hooks.manager import manager

HIDDEN = 32


def _empty(cls: Any, **attributes: Any) -> Any:
    """An instance of a model's class, without its language model."""
    model = cls.__new__(cls)
    nn.Module.__init__(model)
    for name, value in attributes.items():
        setattr(model, name, value)
    return towers._randomised(model)


def _sizes_of(width: int, inner: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    return dict(zip(names, (width, inner, heads, 2), strict=True))


def _pixtral(merge: bool, width: int) -> Any:
    from vllm.model_executor.models import pixtral

    args = pixtral.VisionEncoderArgs(
        **_sizes_of(width, 64, 4),
        num_channels=3,
        image_size=64,
        patch_size=4,
        rope_theta=10000.0,
        image_token_id=10,
        spatial_merge_size=2,
        mm_projector_id=pixtral.PATCH_MERGE if merge else "",
        add_pre_mm_projector_layer_norm=merge,
    )
    return _empty(
        pixtral.PixtralForConditionalGeneration,
        vision_args=args,
        vision_encoder=pixtral.VisionTransformer(args),
        pre_mm_projector_norm=pixtral.RMSNorm(width, eps=1e-5) if merge else None,
        patch_merger=pixtral.PatchMerger(width, 2) if merge else None,
        vision_language_adapter=pixtral.VisionLanguageAdapter(args, HIDDEN),
    )


def _mistral3(normalise: bool, width: int) -> Any:
    from transformers import PixtralVisionConfig
    from vllm.model_executor.models import mistral3

    vision = PixtralVisionConfig(
        **_sizes_of(width, 64, 4),
        image_size=64,
        patch_size=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config = SimpleNamespace(
        vision_config=vision, spatial_merge_size=2, vision_feature_layer=-1, text_config=None
    )
    projector = mistral3.Mistral3MultiModalProjector(width, HIDDEN, 2, 4, "gelu", False)
    norm = _Halve() if normalise else None
    return _empty(
        mistral3.Mistral3ForConditionalGeneration,
        config=config,
        vision_tower=mistral3.PixtralHFVisionModel(vision, input_norm=norm),
        multi_modal_projector=projector,
    )


class _Halve(nn.Module):
    """A stand-in for the norm that vLLM moves to the device: it takes bytes and returns floats."""

    def forward(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return pixels.to(dtype) / 127.5 - 1


def _paligemma(width: int) -> Any:
    from transformers import SiglipVisionConfig
    from vllm.model_executor.models import paligemma

    vision = SiglipVisionConfig(
        **_sizes_of(width, 64, 4), image_size=16, patch_size=4, vision_use_head=False
    )
    return _empty(
        paligemma.PaliGemmaForConditionalGeneration,
        config=SimpleNamespace(vision_config=vision),
        vision_tower=paligemma.SiglipVisionModel(vision),
        multi_modal_projector=paligemma.PaliGemmaMultiModalProjector(width, HIDDEN),
    )


MODELS: dict[str, Callable[[int], Any]] = {
    "pixtral": partial(_pixtral, False),
    "pixtral, merging": partial(_pixtral, True),
    "mistral3": partial(_mistral3, False),
    "mistral3, bytes": partial(_mistral3, True),
    "paligemma": _paligemma,
}
ANY_SIZE = [name for name in MODELS if name != "paligemma"]


def _adapter(model: Any) -> type[VisionAdapter]:
    name = type(model).__name__
    found: type[VisionAdapter] = (
        manager().choose("graft_vision_adapters", name, "--flag").entry.resolve()
    )
    assert found.refuses(model) is None
    return found


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, rank: None) -> Any:
    torch.manual_seed(0)
    return _made(request.param, _config())


def _made(name: str, config: Any) -> Any:
    """A model with its adapter attached."""
    found = MODELS[name](48)
    found.name = name
    attach(found, _adapter(found)(found, config))
    return found


def _config(dtype: torch.dtype = torch.float32) -> Any:
    config = towers.make_config()
    config.model_config.dtype = dtype
    return config


@pytest.fixture
def runner(model: Any) -> Iterator[ViTCudaGraphRunner]:
    found = towers.make_runner(model, {"capture_share": 1.0})
    yield found
    assert found.stats.failures == []
    found.clear()


def _images(model: Any, *sizes: tuple[int, int], seed: int = 0) -> dict[str, Any]:
    """Images as the engine gives them: stacked if they have one size."""
    generator = torch.Generator().manual_seed(seed)
    name = "images" if model.name.startswith("pixtral") else "pixel_values"
    images: Any = [torch.randn(3, *size, generator=generator) for size in sizes]
    if model.name == "mistral3, bytes":
        images = [(255 * image.sigmoid()).to(torch.uint8) for image in images]
    if len(set(sizes)) == 1:
        images = torch.stack(images)
    return {name: images}


_right = partial(towers.right, exact=True)


def _sizes(model: Any) -> list[tuple[int, int]]:
    return [(16, 16)] if model.name == "paligemma" else [(16, 24), (24, 16), (8, 48), (64, 8)]


def test_every_size_is_bit_identical(model: Any, runner: Any) -> None:
    for size in _sizes(model):
        towers.prewarm(runner, _images(model, size))
        for seed in (1, 2):
            assert _right(runner, _images(model, size, seed=seed))
    assert runner.stats.replays["exact"] == 2 * len(_sizes(model))
    assert runner.stats.replays["bucket"] == 0


@pytest.mark.parametrize("model", ANY_SIZE, indirect=True)
def test_sizes_of_equal_length_have_graphs_of_their_own(model: Any, runner: Any) -> None:
    for size in ((16, 24), (24, 16), (8, 48)):
        towers.prewarm(runner, _images(model, size))
    assert len(runner.store.exact) == 3
    assert all(_right(runner, _images(model, size, seed=3)) for size in ((16, 24), (24, 16)))


def test_batches_are_cut(model: Any, runner: Any) -> None:
    sizes = _sizes(model)[:2] * 3
    towers.prewarm(runner, _images(model, *sizes))
    inputs = _images(model, *sizes, seed=4)
    found = runner.execute(inputs)
    # Three images of one size are served by a graph of two and a graph of one.
    assert runner.stats.replays["exact"] == 2 * len(set(sizes))
    torch.testing.assert_close(found, towers.eager(model, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["paligemma"], indirect=True)
def test_a_size_that_is_known_has_its_graph_before(model: Any, runner: Any) -> None:
    assert runner.stats.captures["exact"] == 4
    assert _right(runner, _images(model, *[(16, 16)] * 8))
    assert runner.stats.replays["exact"] == 1


@pytest.mark.parametrize("model", ANY_SIZE, indirect=True)
def test_a_size_gets_its_graph_when_it_comes_back(model: Any, runner: Any) -> None:
    size = _sizes(model)[0]
    answers = [runner.execute(_images(model, size, seed=seed)) for seed in range(4)]
    assert answers[0] is None
    assert runner.stats.captures["exact"] == 1
    assert runner.stats.replays["exact"] == 2
    for seed, answer in enumerate(answers[1:], start=1):
        expected = towers.eager(model, _images(model, size, seed=seed))
        assert towers.agree(answer, expected, exact=True)


@pytest.mark.parametrize(("name", "obstacle"), [("mistral3", True), ("paligemma", False)])
def test_a_tower_that_ranks_share(name: str, obstacle: bool, rank: None, monkeypatch: Any) -> None:
    config = _config()
    model = _made(name, config)
    config.parallel_config.tensor_parallel_size = 2
    runner = towers.runner_of(model, config)
    monkeypatch.setattr(runner.startup, "agree", bool)
    runner.capture("pool")
    for seed in range(3):
        inputs = _images(model, _sizes(model)[0], seed=seed)
        assert runner.execute(inputs) is None if obstacle else _right(runner, inputs)
    reasons = {"sharded_tower_without_buckets": 3} if obstacle else {}
    assert runner.report()["declines"] == reasons
    assert runner.report()["graphs"]["exact"] == (0 if obstacle else 4)


@pytest.mark.parametrize("name", ANY_SIZE)
def test_what_is_no_image_is_left_to_the_model(name: str, rank: None) -> None:
    model = MODELS[name](48)
    adapter: Any = _adapter(model)(model, _config())
    for shape, reason in {
        (3, 16, 24): None,
        (16, 24): "not_images",
        (3, 16, 22): "ragged",
        (3, 16, 128): "too_wide" if name.startswith("pixtral") else None,
    }.items():
        assert adapter.decline({adapter.pixels: [torch.zeros(shape)]}) == reason
    assert adapter.decline({adapter.pixels: []}) == "not_images"
    assert adapter.decline({"image_embeds": torch.zeros(4, HIDDEN)}) == "precomputed"


def test_positions_may_be_made_where_the_patches_are(rank: None, monkeypatch: Any) -> None:
    """vLLM 0.33 makes them there; 0.32 always makes them on the host."""
    from vllm_graft.graph_runners.vision.towers.adapters import pixtral

    stock, devices = pixtral.position_ids_in_meshgrid, []

    def on_the_patches_device(patches: list[torch.Tensor], max_width: int) -> torch.Tensor:
        devices.append(patches[0].device)
        return stock(patches, max_width).to(patches[0].device)

    monkeypatch.setattr(pixtral, "position_ids_in_meshgrid", on_the_patches_device)
    model = MODELS["mistral3"](48)
    adapter = _adapter(model)(model, _config())
    tables: Any = adapter.positions([(4, 6), (2, 2)])  # type: ignore[attr-defined]
    assert devices == [torch.device("cpu")]
    assert tables["cosines"].shape == tables["sines"].shape == (28, 12)
    assert (tables["cosines"] ** 2 + tables["sines"] ** 2 - 1).abs().max() < 1e-5


def test_the_check_can_fail(rank: None) -> None:
    """Negative control: a graph with the positions of another size gives another answer."""
    model = MODELS["pixtral"](48)
    model.name = "pixtral"

    class Wrong(_adapter(model)):  # type: ignore[misc]
        def positions(self, grids: Any) -> Any:
            return super().positions([(columns, rows) for rows, columns in grids])

    attach(model, Wrong(model, _config()))
    runner = towers.make_runner(model, {"verify": False})
    towers.prewarm(runner, _images(model, (16, 24)))
    inputs = _images(model, (16, 24), seed=1)
    assert not _right(runner, inputs)
    assert runner.stats.replays["exact"] > 0
    # The runner's own check notices it, too.
    runner = towers.make_runner(model, {"verify": True})
    assert list(towers.prewarm(runner, inputs).values()) == ["mismatch"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_true_graphs_are_bit_identical(name: str, rank: None) -> None:
    dtype, device = torch.bfloat16, torch.device("cuda")
    with set_default_torch_dtype(dtype), device:
        model = MODELS[name](256)
    model.name = name
    config = _config(dtype)
    attach(model, _adapter(model)(model, config))
    runner = ViTCudaGraphRunner(config, device, dtype, model)
    runner.store.rules.timing = False  # Speed is not tested here, and others may use the device.
    runner.capture(None)
    cases = [_images(model, *[size] * n) for size in _sizes(model) for n in (1, 2)]
    for case in cases:
        inputs = {
            key: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for key, value in case.items()
        }
        towers.prewarm(runner, inputs)
        assert _right(runner, inputs), runner.report()
    assert runner.stats.replays["exact"] == len(cases)
    assert runner.stats.failures == []
    runner.clear()
