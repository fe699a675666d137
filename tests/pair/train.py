"""Train the target of the pair that the tests and `make demo` run: a tiny Llama.

The only corpus is the source of the Python standard library that runs this script, without its
tests and without site-packages. One file in twenty is held out; the prompts come from those.

    python tests/pair/train.py --device cuda --seconds 100 --texts texts.json
    vllm-graft train tests/pair/target --texts texts.json --draft-vocab 1024 --out tests/pair/eagle3

writes, beside this file, `target/` and `prompts.json` in the formats vLLM 0.32 loads, and then the
EAGLE-3 head `eagle3/`. The head that lies there was trained by an earlier version of this script:
git has it at commit c14d4c55.

The seeds fix the data, the order and the initial weights; the schedule follows the clock, so two
runs give weights of the same quality, not the same weights.
"""

import argparse
import json
import math
import random
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 0
BOS, EOS = 0, 1
VOCAB = 2048
HIDDEN = 128
LAYERS = 6
HEADS = 2
KV_HEADS = 1
HEAD_DIM = 64
FFN = 448
MAX_LEN = 2048
EPS = 1e-5
ROPE_THETA = 10000.0

NUM_PROMPTS = 64
PROMPT_TOKENS = (20, 120)
EVAL_CROPS = 64


@dataclass(frozen=True)
class Run:
    """Settings: `seconds` of steps of `batch` random crops of `length` tokens."""

    device: torch.device
    batch: int
    length: int
    seconds: float
    lr: float = 3e-3
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Corpus:
    """Token streams on the training device (int64, files joined by EOS), their texts, prompts."""

    tokenizer: Tokenizer
    texts: list[str]
    train: Tensor
    heldout: Tensor
    prompts: list[str]


# --- corpus -------------------------------------------------------------------------------------


def read_stdlib() -> tuple[list[str], list[str]]:
    """Return the texts of the training files and of the held-out ones."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    train, heldout = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped.isdisjoint(name.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            # A checksum of the name keeps a file on its side whatever else the library holds.
            (train if zlib.crc32(name.as_posix().encode()) % 20 else heldout).append(text)
    return train, heldout


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def cut_prompts(tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    """Cut `NUM_PROMPTS` texts that start at a line and encode to `PROMPT_TOKENS` tokens."""
    rng = random.Random(SEED)
    low, high = PROMPT_TOKENS
    prompts: list[str] = []
    while len(prompts) < NUM_PROMPTS:
        lines = rng.choice(texts).splitlines(keepends=True)
        start = rng.randrange(max(1, len(lines) - 10))
        ids = tokenizer.encode("".join(lines[start : start + 60])).ids[: rng.randint(low, high)]
        prompt = tokenizer.decode(ids)
        # A cut inside a character or a merge can change how the text encodes.
        if prompt.isascii() and prompt.strip() and low <= len(tokenizer.encode(prompt).ids) <= high:
            prompts.append(prompt)
    return prompts


def pieces(text: str, lines: int = 30) -> list[str]:
    """The text in pieces, as `vllm-graft train` asks no long question."""
    found = text.splitlines(keepends=True)
    return ["".join(found[start : start + lines]) for start in range(0, len(found), lines)]


def build_corpus(device: torch.device) -> Corpus:
    train, heldout = read_stdlib()
    tokenizer = train_tokenizer(train)

    def stream(texts: list[str]) -> Tensor:
        ids = [i for e in tokenizer.encode_batch(texts) for i in (*e.ids, EOS)]
        return torch.tensor(ids, device=device)

    prompts = cut_prompts(tokenizer, heldout)
    corpus = Corpus(tokenizer, train, stream(train), stream(heldout), prompts)
    log(f"{len(train)} files, {len(corpus.train)} tokens; held out: {len(corpus.heldout)}")
    return corpus


# --- training -----------------------------------------------------------------------------------

STARTED = time.monotonic()


def log(message: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {message}", flush=True)


def random_crops(stream: Tensor, run: Run) -> Iterator[Tensor]:
    """Yield crops int64 `[batch, length + 1]`, indexed out of `stream` on its device for ever."""
    generator = torch.Generator(stream.device).manual_seed(SEED)
    offsets = torch.arange(run.length + 1, device=stream.device)
    last = len(stream) - run.length - 1
    while True:
        starts = torch.randint(last, (run.batch, 1), generator=generator, device=stream.device)
        yield stream[starts + offsets]


def even_crops(stream: Tensor, length: int) -> Tensor:
    """Return crops int64 `[EVAL_CROPS, length + 1]`, evenly spread over `stream`."""
    starts = torch.linspace(0, len(stream) - length - 2, EVAL_CROPS, device=stream.device).long()
    return stream[starts[:, None] + torch.arange(length + 1, device=stream.device)]


def optimise(target: LlamaForCausalLM, corpus: Corpus, run: Run) -> None:
    """Minimise the loss of next tokens by AdamW until the time is up, with a cosine schedule."""
    heldout, parameters = even_crops(corpus.heldout, run.length), list(target.parameters())
    optimizer = torch.optim.AdamW(
        parameters,
        lr=run.lr,
        betas=(0.9, 0.95),
        weight_decay=run.weight_decay,
        fused=run.device.type == "cuda",
    )
    begin = reported = time.monotonic()
    for step, crops in enumerate(random_crops(corpus.train, run)):
        done = (time.monotonic() - begin) / run.seconds
        if done >= 1:
            break
        warm = min(1.0, (step + 1) / 50)
        for group in optimizer.param_groups:
            group["lr"] = run.lr * warm * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * done)))
        with torch.autocast(run.device.type, torch.bfloat16):
            loss = next_token_loss(target, crops)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if time.monotonic() - reported > 5:
            reported = time.monotonic()
            rate = (step + 1) * run.batch * run.length / (reported - begin)
            with torch.no_grad():
                unseen = next_token_loss(target, heldout).item()
            log(
                f"{done:4.0%}, step {step + 1}, {rate:.0f} tok/s, loss {loss.item():.3f}, "
                f"held out {unseen:.3f}"
            )


def next_token_loss(target: LlamaForCausalLM, crops: Tensor) -> Tensor:
    logits = target(crops[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), crops[:, 1:].flatten())


def train_target(corpus: Corpus, run: Run) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    target = LlamaForCausalLM(config).to(run.device)
    log(f"target: {sum(p.numel() for p in target.parameters())} parameters")
    optimise(target, corpus, run)
    return target.eval()


# --- files --------------------------------------------------------------------------------------


def save_target(target: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    target.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LEN,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


# --- command ------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train tests/pair/target.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--texts", type=Path, help="file for the texts that a head is trained on")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    batch, length = (64, 512) if device.type == "cuda" else (16, 128)
    corpus = build_corpus(device)

    target = train_target(corpus, Run(device, batch, length, args.seconds))
    save_target(target, corpus.tokenizer, args.out / "target")
    target = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.float32).to(device)
    with torch.no_grad():
        loss = next_token_loss(target.eval(), even_crops(corpus.heldout, length))
    log(f"held-out loss {loss:.4f} nats (stored bf16 weights, loaded as float32)")
    write_json(args.out / "prompts.json", corpus.prompts)
    if args.texts:
        write_json(args.texts, [piece for text in corpus.texts for piece in pieces(text)])


if __name__ == "__main__":
    main()
