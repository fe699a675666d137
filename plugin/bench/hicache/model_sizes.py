"""The amount of work of each part of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The amount of work; lengths are in tokens, times in seconds."""

    vocab: int = 8000
    """Prompts are random token ids in [16, vocab)."""
    block: int = 16
    gpu_tokens: int = 28_672
    """Tokens that the KV cache of the device holds."""
    host_gib: float = 16.0
    max_model_len: int = 10_240
    max_batched_tokens: int = 8192
    max_num_seqs: int = 64
    capture: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256, 384, 512)
    """vLLM's own sizes go to 512 as well, where ``max_num_seqs`` is left at its default."""

    prefix: int = 8192
    suffix: int = 512
    ttft_repeats: int = 9

    decode_requests: int = 32
    decode_prompt: int = 512
    decode_tokens: int = 256
    decode_rounds: int = 3

    load_rounds: int = 2
    sessions: int = 64
    turns: int = 4
    turn_tokens: int = 384
    """Tokens of the user per turn; the session ends at turns * (turn_tokens + reply) tokens."""
    reply: int = 64

    race_prompts: int = 48
    race_prompt: int = 513
    """It is a multiple of `block` plus 1: a full hit leaves one token, which is a decode."""
    race_batch: int = 8
    race_tokens: int = 4
    race_gpu_tokens: int = 8192
    race_delay_ms: float = 2.0
    race_host_gib: float = 2.0

    @property
    def gpu_blocks(self) -> int:
        """Blocks of the device's KV cache; block 0 is never used."""
        return self.gpu_tokens // self.block + 1

    @property
    def session_tokens(self) -> int:
        """Tokens of all sessions at their end."""
        return self.sessions * self.turns * (self.turn_tokens + self.reply)


TINY = Sizes(
    vocab=500,
    block=32,
    gpu_tokens=1024,
    host_gib=0.0625,
    max_model_len=512,
    max_batched_tokens=256,
    max_num_seqs=8,
    capture=(1, 4, 8),
    prefix=256,
    suffix=32,
    ttft_repeats=3,
    decode_requests=4,
    decode_prompt=64,
    decode_tokens=8,
    decode_rounds=2,
    load_rounds=1,
    sessions=8,
    turns=2,
    turn_tokens=96,
    reply=8,
    race_prompts=6,
    race_prompt=129,
    race_batch=2,
    race_gpu_tokens=512,
    race_delay_ms=1.0,
    race_host_gib=0.0625,
)
