"""Train the pair that the tests and `make demo` run: a tiny Llama target and its EAGLE-3 head.

The only corpus is the source of the Python standard library that runs this script, without its
tests and without site-packages. One file in twenty is held out; the prompts come from those.

    python tests/pair/train.py --device cuda --target-seconds 100 --head-seconds 60

writes, beside this file, `target/`, `eagle3/` and `prompts.json` in the formats vLLM 0.32 loads.
The seeds fix the data, the order and the initial weights; the schedules follow the clock, so two
runs give weights of the same quality, not the same weights.

The head is trained as in EAGLE-3 (arXiv 2503.01840): it reads three hidden states of the frozen
target, and its loss runs through several passes that consume the head's own output
("training-time test"), as it does when it drafts.
"""

import argparse
import json
import math
import random
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
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

DRAFT_VOCAB = 1024
# Hidden state k is the one that enters layer k. vLLM's default layers (2, L // 2, L - 3) are only
# two distinct ones at six layers, so the head's configuration has to name them.
AUX_LAYERS = [1, 3, 5]
TTT_PASSES = 5
TTT_DECAY = 0.8

NUM_PROMPTS = 64
PROMPT_TOKENS = (20, 120)
EVAL_CROPS = 64


@dataclass(frozen=True)
class Run:
    """Settings of one stage: `seconds` of steps of `batch` random crops of `length` tokens."""

    device: torch.device
    batch: int
    length: int
    seconds: float
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Corpus:
    """Token streams on the training device (int64, files joined by EOS) and the prompts."""

    tokenizer: Tokenizer
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


def build_corpus(device: torch.device) -> Corpus:
    train, heldout = read_stdlib()
    tokenizer = train_tokenizer(train)

    def stream(texts: list[str]) -> Tensor:
        ids = [i for e in tokenizer.encode_batch(texts) for i in (*e.ids, EOS)]
        return torch.tensor(ids, device=device)

    corpus = Corpus(tokenizer, stream(train), stream(heldout), cut_prompts(tokenizer, heldout))
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


def optimise(
    name: str,
    parameters: list[nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    corpus: Corpus,
    run: Run,
) -> None:
    """Minimise `loss_of(crops)` by AdamW until the time is up, with a cosine schedule over it."""
    heldout = even_crops(corpus.heldout, run.length)
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
            loss = loss_of(crops)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if time.monotonic() - reported > 5:
            reported = time.monotonic()
            rate = (step + 1) * run.batch * run.length / (reported - begin)
            with torch.no_grad():
                unseen = loss_of(heldout).item()
            log(
                f"{name}: {done:4.0%}, step {step + 1}, {rate:.0f} tok/s, "
                f"loss {loss.item():.3f}, held out {unseen:.3f}"
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
    optimise("target", list(target.parameters()), lambda x: next_token_loss(target, x), corpus, run)
    return target.eval()


# --- the head -----------------------------------------------------------------------------------


def rotate(x: Tensor) -> Tensor:
    """Apply rotary embedding to `[batch, heads, length, HEAD_DIM]` at positions 0, 1, ..."""
    half = HEAD_DIM // 2
    frequency = ROPE_THETA ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[2], device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def shift(x: Tensor, count: int) -> Tensor:
    """Move `[..., length, dim]` `count` positions later; zeros enter at the front."""
    return F.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :]


class Attention(nn.Module):
    """Attention of one pass over the keys that the same step of a real draft would see."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(2 * HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(2 * HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend from `x` `[batch, length, 2 * HIDDEN]`; append this pass's K and V to `past`.

        The query at index i of pass p belongs to a draft that began at index i - p. It sees the
        keys of pass 0 up to there, and then one key of each later pass: pass r at i - p + r.
        """
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        past.append((rotate(k), v))
        number = len(past) - 1
        q = rotate(q) / math.sqrt(HEAD_DIM)
        key, value = past[0]
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-number)
        scores = [(q @ key.transpose(-1, -2)).masked_fill(~seen, -1e4)]
        drafted = [
            (shift(k, number - r), shift(v, number - r)) for r, (k, v) in enumerate(past) if r
        ]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in drafted]
        weights = torch.cat(scores, -1).softmax(-1).to(value.dtype)
        out = weights[..., :length] @ value
        for r, (_, v) in enumerate(drafted):
            out = out + weights[..., length + r, None] * v
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.hidden_norm = nn.RMSNorm(HIDDEN, EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)

    def forward(self, embeds: Tensor, hidden: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(x, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """The EAGLE-3 head; parameters have the names that vLLM's `LlamaForCausalLMEagle3` loads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(len(AUX_LAYERS) * HIDDEN, HIDDEN, bias=False)
        self.midlayer = DecoderLayer()
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        self.lm_head = nn.Linear(HIDDEN, DRAFT_VOCAB, bias=False)

    def forward(self, aux: Tensor, embeds: Tensor) -> list[Tensor]:
        """Return each pass's logits, `[batch, length, DRAFT_VOCAB]`.

        `aux` `[batch, length, 3 * HIDDEN]` holds the target's states at index i, `embeds`
        `[batch, length, HIDDEN]` the token after it; logits at i are for the token after that.
        """
        # Autocast would keep the residual stream in bfloat16.
        hidden = self.fc(aux).float()
        past: list[tuple[Tensor, Tensor]] = []
        logits = []
        for _ in range(TTT_PASSES):
            hidden = self.midlayer(embeds, hidden, past)
            logits.append(self.lm_head(self.norm(hidden)))
            hidden = shift(hidden, 1)
        return logits


def draft(target: LlamaForCausalLM, head: Eagle3Head, crops: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the target's logits (float32) and the head's of each pass, for the same tokens."""
    with torch.no_grad():
        out = target(crops, output_hidden_states=True, use_cache=False)
        aux = torch.cat([out.hidden_states[k][:, :-1] for k in AUX_LAYERS], -1)
        embeds = target.get_input_embeddings()(crops[:, 1:])
    return out.logits[:, 1:].float(), head(aux.float(), embeds)


def head_loss(target: LlamaForCausalLM, head: Eagle3Head, hot: Tensor, crops: Tensor) -> Tensor:
    """Cross-entropy with the target's distribution over the draft vocabulary, over all passes."""
    wanted, drafted = draft(target, head, crops)
    # No draft is accepted where the target's choice is outside the draft vocabulary.
    learnable = torch.isin(wanted.argmax(-1), hot)
    probs = wanted[..., hot].softmax(-1)
    loss = torch.zeros((), device=crops.device)
    for number, logits in enumerate(drafted):
        entropy = -(probs * logits.float().log_softmax(-1)).sum(-1)
        counted = learnable[:, number:]
        mean = (entropy[:, number:] * counted).sum() / counted.sum()
        loss = loss + TTT_DECAY**number * mean
    return loss


@torch.no_grad()
def agreement(
    target: LlamaForCausalLM, head: Eagle3Head, hot: Tensor, crops: Tensor
) -> tuple[list[float], list[float]]:
    """Return the share of argmax agreement per pass, teacher-forced.

    The first list is over all places, the second over those whose earlier passes agreed."""
    wanted, drafted = draft(target, head, crops)
    choice = wanted.argmax(-1)
    every, given = [], []
    before = torch.ones_like(choice, dtype=torch.bool)
    for number, logits in enumerate(drafted):
        same = hot[logits.argmax(-1)] == choice
        every.append(same[:, number:].float().mean().item())
        given.append((same & before).sum().item() / max(1, int(before.sum())))
        before = F.pad((same & before)[:, :-1], (1, 0))
    return every, given


def train_head(target: LlamaForCausalLM, corpus: Corpus, run: Run) -> tuple[Eagle3Head, Tensor]:
    """Return the head and the target ids of its vocabulary, int64 `[DRAFT_VOCAB]`, ascending."""
    torch.manual_seed(SEED)
    counts = torch.bincount(corpus.train, minlength=VOCAB)
    hot = counts.topk(DRAFT_VOCAB).indices.sort().values
    log(f"draft vocabulary covers {counts[hot].sum() / counts.sum():.1%} of the training tokens")
    head = Eagle3Head().to(run.device)
    head.lm_head.weight.data.copy_(target.lm_head.weight[hot])
    log(f"head: {sum(p.numel() for p in head.parameters())} parameters")
    target.requires_grad_(False)
    optimise(
        "head", list(head.parameters()), lambda x: head_loss(target, head, hot, x), corpus, run
    )
    return head.eval(), hot


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


def save_head(head: Eagle3Head, hot: Tensor, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.bfloat16().cpu().contiguous() for k, v in head.state_dict().items()}
    hot = hot.cpu()
    weights["d2t"] = hot - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.isin(torch.arange(VOCAB), hot)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "bfloat16",
    }
    write_json(folder / "config.json", config)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


# --- command ------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train tests/pair from the standard library.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target-seconds", type=float, default=100)
    parser.add_argument("--head-seconds", type=float, default=60)
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
    crops = even_crops(corpus.heldout, length)

    run = Run(device, batch, length, args.target_seconds, lr=3e-3, weight_decay=0.1)
    target = train_target(corpus, run)
    with torch.no_grad():
        log(f"target: held-out loss {next_token_loss(target, crops):.4f} nats in memory")
    save_target(target, corpus.tokenizer, args.out / "target")
    # The head learns from the target as users load it, rounding included.
    target = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.float32).to(device)
    with torch.no_grad():
        loss = next_token_loss(target.eval(), crops)

    run = Run(device, batch, length, args.head_seconds, lr=2e-3, weight_decay=0.0)
    head, hot = train_head(target, corpus, run)
    every, given = agreement(target, head, hot, crops)
    save_head(head, hot, args.out / "eagle3")
    write_json(args.out / "prompts.json", corpus.prompts)

    log(f"target: held-out loss {loss:.4f} nats (stored bf16 weights, loaded as float32)")
    log("head: held-out top-1 agreement a step " + " ".join(f"{a:.3f}" for a in every))
    log("head: the same, earlier steps agreeing " + " ".join(f"{a:.3f}" for a in given))


if __name__ == "__main__":
    main()
