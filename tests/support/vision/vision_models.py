"""Tiny random checkpoints of models with a vision encoder; no network is used."""

import json
from pathlib import Path
from typing import Any

from vllm_graft.testing.models.llama import write_tokenizer

VOCAB_SIZE = 640
_QWEN_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 128,
    "out_hidden_size": 128,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
    "hidden_act": "gelu_pytorch_tanh",
}
QWEN_PROMPT = "<|vision_start|><|image_pad|><|vision_end|>What is it?"
LLAVA_PROMPT = "<image>What is it?"


def write_qwen3_vl(
    folder: Path,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    weights: bool = True,
) -> Path:
    """A random Qwen3-VL of 3 vision and 2 text layers. Returns ``folder``."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = _tokenizer(folder, _QWEN_TOKENS)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
    rope_parameters = {"rope_parameters": {**rope, "mrope_interleaved": True}}
    config = Qwen3VLConfig(
        text_config=_text(ids) | rope_parameters | (text or {}),
        vision_config=_QWEN3_VISION | (vision or {}),
        tie_word_embeddings=False,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    if weights:
        torch.manual_seed(seed)
        _save(Qwen3VLForConditionalGeneration(config), folder)
    else:
        config.architectures = ["Qwen3VLForConditionalGeneration"]
        config.save_pretrained(str(folder))
    largest = 64 if weights else 4096
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * largest},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    _write(folder / "preprocessor_config.json", processor)
    video = {**processor, "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    _write(folder / "video_preprocessor_config.json", video)
    return folder


def write_llava(folder: Path, seed: int = 0) -> Path:
    """A random LLaVA 1.5 of a CLIP tower of 32 by 32 pixels. Returns ``folder``."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    ids = _tokenizer(folder, ("<image>", "<pad>"))
    config = LlavaConfig(
        text_config=_text(ids) | {"model_type": "llama"},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "projection_dim": 64,
        },
        image_token_index=ids["<image>"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(seed)
    _save(LlavaForConditionalGeneration(config), folder)
    # transformers 5 leaves out a level that checkpoints have, and vLLM expects.
    _rename(folder, "vision_tower.", "vision_tower.vision_model.")
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            "do_center_crop": True,
        },
    )
    _write(
        folder / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    )
    return folder


def noise_image(height: int, width: int, seed: int = 0) -> Any:
    """A PIL image of random pixels."""
    import numpy
    from PIL import Image

    pixels = numpy.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype="uint8")
    return Image.fromarray(pixels)


def _text(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }


def _tokenizer(folder: Path, special: tuple[str, ...]) -> dict[str, int]:
    """The project's byte-level tokenizer with more special tokens, whose ids are returned."""
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(str(folder))
    return {token: int(tokenizer.convert_tokens_to_ids(token)) for token in special}


def _save(model: Any, folder: Path) -> None:
    import torch

    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    model.float().save_pretrained(str(folder))


def _rename(folder: Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    file = str(folder / "model.safetensors")
    weights = {name.replace(old, new, 1): weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
