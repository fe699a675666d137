"""A wide pair that serves contexts of 4k, and the same pair with windows in half of its layers.

    python -m benchmarks.windowed_pair PAIR WIDE WINDOWED

PAIR holds `target/`, `eagle3/` and `prompts.json` of a small Llama; WIDE gets it in the shapes of
an 8B model, as `benchmarks.real_pair widen` does. What comes on top:

- Rotations are stretched by YaRN (arXiv:2309.00071), in target and draft: a pair that was trained
  with contexts of 1k predicts text of 4k as well, which it does not without.
- Prompts have 3.6k tokens. Each is one of the pair's own, with others of them before it. There are
  16 of them, so that a cache of prefixes holds them all, and answers can be timed without them.

WINDOWED gets the same pair, whose weights are links, with a window in half of the target's layers:
in the last ones. Those of a wide pair have no effect on its hidden states. So both pairs compute
the same function, accept the same drafts, and differ by what their steps cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_pair import widening

WIDE = widening.Shape()


def stretched(config: dict[str, Any], context: int, trained: int) -> dict[str, Any]:
    """A configuration whose rotations serve `context` tokens, by YaRN.

    Args:
        config: of a Llama whose rotations are plain.
        context: tokens that it is to serve.
        trained: tokens that it was trained with.
    """
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    kept = {name: value for name, value in config.items() if name != "rope_theta"}
    rotations = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": context / trained,
        "original_max_position_embeddings": trained,
    }
    return kept | {"max_position_embeddings": context, "rope_parameters": rotations}


def with_windows(config: dict[str, Any], window: int, effective: int) -> dict[str, Any]:
    """A target's configuration with a window in the last half of its layers.

    Args:
        config: of a Llama.
        window: positions that a row sees, its own among them.
        effective: the first so many layers have an effect.

    Raises:
        ValueError: some of the last half have an effect.
    """
    layers = config["num_hidden_layers"]
    half = layers // 2
    if effective > layers - half:
        raise ValueError(
            f"{effective} of {layers} layers have an effect: with windows in the last {half} "
            "the pair would compute another function"
        )
    kinds = ["full_attention"] * (layers - half) + ["sliding_attention"] * half
    return config | {"sliding_window": window, "layer_types": kinds}


def long_prompts(
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    tokens: int,
    most: int,
) -> list[str]:
    """Texts, each with others before it, cut at its beginning to so many tokens at most.

    Args:
        texts: at least one.
        encode: makes tokens of a text.
        decode: makes a text of tokens.
        tokens: most tokens of a prompt.
        most: make so many prompts at most, of the first texts.
    """
    encoded = [encode(text) for text in texts]
    found = []
    for last in range(min(len(texts), most)):
        joined: list[int] = []
        place = last
        while len(joined) < tokens:
            joined = encoded[place % len(texts)] + joined
            place -= 1
        found.append(_cut(joined, encode, decode, tokens))
    return found


def _cut(
    joined: list[int],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    tokens: int,
) -> str:
    """The last tokens as a text. Where pieces meet it may be encoded otherwise, and be longer."""
    kept = tokens
    while True:
        text = decode(joined[-kept:])
        excess = len(encode(text)) - tokens
        if excess <= 0:
            return text
        kept -= excess


def edit_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the configuration of a checkpoint."""
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text())), indent=1) + "\n")


def link(source: Path, folder: Path) -> None:
    """Fill a folder with links to another one's files; the configuration is a copy."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        place = folder / file.name
        place.unlink(missing_ok=True)
        if file.name == "config.json":
            place.write_text(file.read_text())
        else:
            place.symlink_to(file.resolve())


def write_wide(arguments: argparse.Namespace, device: torch.device) -> None:
    """Write the pair in the wide shape, with stretched rotations and long prompts."""
    from transformers import AutoTokenizer

    pair, wide = arguments.pair, arguments.wide
    widening.widen_target(pair, wide, WIDE, device)
    widening.widen_draft(pair, wide, WIDE, device)
    for part in ("target", "eagle3"):
        edit_config(
            wide / part, lambda config: stretched(config, arguments.context, arguments.trained)
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(str(pair / "target"))
    prompts = long_prompts(
        json.loads((pair / "prompts.json").read_text()),
        lambda text: list(tokenizer(text)["input_ids"]),
        tokenizer.decode,
        arguments.prompt_tokens,
        arguments.prompts,
    )
    (wide / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")


def write_windowed(wide: Path, folder: Path, window: int, effective: int) -> None:
    """Write a pair's copy with windows; see `with_windows`."""
    link(wide / "target", folder / "target")
    edit_config(folder / "target", lambda config: with_windows(config, window, effective))
    link(wide / "eagle3", folder / "eagle3")
    (folder / "prompts.json").write_text((wide / "prompts.json").read_text())


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.windowed_pair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("pair", "wide", "windowed"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--context", type=int, default=4096, help="tokens that both serve")
    parser.add_argument("--trained", type=int, default=1024, help="tokens of the pair's training")
    parser.add_argument("--prompt-tokens", type=int, default=3600)
    parser.add_argument("--prompts", type=int, default=16, help="most prompts")
    arguments = parser.parse_args(given)
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_wide(arguments, device)
    small = json.loads((arguments.pair / "target" / "config.json").read_text())
    write_windowed(arguments.wide, arguments.windowed, arguments.window, small["num_hidden_layers"])
    print(f"both pairs were written in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
