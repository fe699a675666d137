"""Launches of kernels as a few operations of torch, where a program for each row takes long."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_graft.spec_decode.kernels import candidates as growth
from vllm_graft.spec_decode.kernels import topk

Given = dict[str, Any]
"""A launch's arguments by name."""

LOW = 0xFFFFFFFF
NONE = topk.NONE.value


def rows_of(tensor: torch.Tensor, rows: int, columns: int, stride: int) -> torch.Tensor:
    """What a kernel reads of a tensor from its first element on: f32 ``[rows, columns]``."""
    return tensor.as_strided((rows, columns), (stride, 1)).float()


def hashed(seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The 32 bits of `topk._hashed`, and of vLLM's own function, as int64."""
    state: Any = 0
    for word in (seed, seed >> 32, position, token):
        mixed = (word & LOW) * 0xCC9E2D51 & LOW
        state = state ^ ((mixed << 15 | mixed >> 17) & LOW) * 0x1B873593 & LOW
        state = ((state << 13 | state >> 19) & LOW) * 5 + 0xE6546B64 & LOW
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & LOW
    return torch.as_tensor(state ^ state >> 16)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    return (bits >> 16).float() * 1.52587890625e-05 + (
        (bits & 0xFFFF).float() + 0.5
    ) * 2.3283064365386963e-10


def drafted_noise(bits: torch.Tensor) -> torch.Tensor:
    """The noise of `topk.gumbel_noise`."""
    drawn = uniform(bits)
    series = drawn * (1.0 + drawn * (0.5 + drawn * 0.33333334))
    direct = -(1.0 - drawn).clamp(min=5.9604645e-08).log()
    return -torch.where(drawn < 0.001, series, direct).log()


def drawn_noise(bits: torch.Tensor) -> torch.Tensor:
    """The noise of vLLM's sampler."""
    drawn = uniform(bits)
    series = torch.full_like(drawn, 1.0 / 8.0)
    for number in range(7, 0, -1):
        series = 1.0 / number + drawn * series
    direct = (1.0 - drawn).clamp(min=5.960464477539063e-08).log()
    return -(-torch.where(drawn < 0.25, -drawn * series, direct)).log()


def heats(given: Given, slots: torch.Tensor, name: str) -> torch.Tensor:
    """The temperature of each row, f32; 0 where there is no request."""
    return torch.where(slots >= 0, given[name][slots.clamp(min=0)].float(), 0.0)


def ordered(numbers: torch.Tensor) -> torch.Tensor:
    bits = (numbers + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def unordered(orders: torch.Tensor) -> torch.Tensor:
    return (orders ^ ((orders >> 31) & 0x7FFFFFFF)).view(torch.float32)


def best_of(
    orders: torch.Tensor, places: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `topk.best_of` returns for each row, int32; of places, ``[..., n]``, none is twice."""
    # Larger is better: both numbers have 31 bits and a sign, and no place is negative.
    best = ((orders.long() << 31) - places).topk(count).values
    values = -(-best >> 31)
    return values.int(), ((values << 31) - best).int()


def block(given: Given, grid: tuple[int, ...]) -> bool:
    """`topk._block_kernel`."""
    group, nodes, vocab = (given[name] for name in ("GROUP", "NODES", "vocab_size"))
    blocks, width, count = (given[name] for name in ("BLOCKS", "BLOCK", "TOPK"))
    if given["FP64"]:
        return False
    rows = grid[0] * group
    logits = rows_of(given["logits"], rows // nodes, vocab, given["logits_stride"])
    logits = logits.repeat_interleave(nodes, 0)
    if given["biases"] is not None:
        logits = logits + rows_of(given["biases"], rows, vocab, given["bias_stride"])
    logits = torch.where(logits.isnan(), float("-inf"), logits) * given["sharpness"]
    if given["NOISY"]:
        logits = with_noise(given, logits)
    padded = torch.nn.functional.pad(logits, (0, blocks * width - vocab), value=float("-inf"))
    padded = padded.unflatten(1, (blocks, width))
    token = torch.arange(blocks * width).view(blocks, width)
    order = torch.where(token < vocab, ordered(padded), NONE)
    floor = unordered(order.amax(-1)).clamp(min=-3.0e38)
    best, chosen = best_of(order, token, count)
    given["peaks"].copy_(floor)
    given["sums"].copy_((padded - floor[..., None]).exp().sum(-1))
    given["best_orders"].copy_(best)
    given["best_tokens"].copy_(torch.where(best == NONE, token[:, :1], chosen))
    return True


def with_noise(given: Given, logits: torch.Tensor) -> torch.Tensor:
    """Logits of rows with a temperature, divided by it, plus the noise of their group's first."""
    first = torch.arange(len(logits)) // given["GROUP"] * given["GROUP"]
    slots = given["idx_mapping"][first // given["ROWS"]].long()
    heat = heats(given, slots, "temperature")
    [drawn] = (heat > 0).nonzero(as_tuple=True)
    key = torch.arange(logits.shape[1])
    if given["MAPPED"]:
        key = given["target_ids"][key]
    seed, position = given["seeds"][slots[drawn]], given["positions"][first[drawn]]
    bits = hashed(seed[:, None], position[:, None] + given["OFFSET"], key)
    found = logits.clone()
    found[drawn] = logits[drawn] / heat[drawn, None] + drafted_noise(bits)
    return found


def merge(given: Given, grid: tuple[int, ...]) -> bool:
    """`topk._merge_kernel`."""
    count, shape = given["TOPK"], (grid[0], given["BLOCKS"] * given["TOPK"])
    orders, tokens = (given[name].view(shape) for name in ("best_orders", "best_tokens"))
    peaks, highest = given["peaks"], given["peaks"].amax(1, keepdim=True)
    norm = highest + (given["sums"] * (peaks - highest).exp()).sum(1, keepdim=True).log()
    best, chosen = best_of(orders, tokens, count)
    number = unordered(best)
    given["logp"].copy_(torch.where(number > float("-inf"), number - norm, number))
    found = chosen.long()
    given["tokens"].copy_(given["target_ids"][found] if given["MAPPED"] else found)
    return True


def grow(given: Given, grid: tuple[int, ...]) -> bool:
    """`candidates._expand_kernel`."""
    rows, count, level = grid[0], given["TOPK"], given["level"]
    children = rows, count, count
    logp, ids = (
        given[f"child_{name}"].as_strided(
            children, (given[f"{stride}_stride"], given[f"{stride}_node_stride"], 1)
        )
        for name, stride in (("logp", "logp"), ("tokens", "token"))
    )
    frontier, candidates = (given[f"frontier_{name}"][:rows] for name in ("scores", "candidates"))
    score = (frontier[..., None] + logp).flatten(1)
    first = count + (level - 1) * count**2
    level_of = slice(first, first + count**2)
    given["scores"][:rows, level_of] = score
    given["tokens"][:rows, level_of] = ids.flatten(1)
    given["parents"][:rows, level_of] = candidates.repeat_interleave(count, 1)
    best, chosen = (each.long() for each in best_of(ordered(score), torch.arange(count**2), count))
    parent, ancestors = chosen // count, given["ancestors"][:rows]
    lines = ancestors[torch.arange(rows)[:, None], parent]
    lines[..., level] = level * count + torch.arange(count, dtype=torch.int32)
    ancestors[..., : level + 1] = lines[..., : level + 1]
    frontier.copy_(unordered(best.int()))
    candidates.copy_(first + chosen)
    most = rows * count
    given["next_tokens"][:most] = ids.flatten(1).gather(1, chosen).flatten()
    given["parent_rows"][:most] = (torch.arange(rows)[:, None] * count + parent).flatten()
    return True


def draw(given: Given, grid: tuple[int, ...]) -> bool:
    """vLLM's `_gumbel_sample_kernel`, where it stores no logits."""
    if given["USE_FP64"] or given["logits_cache_ptr"] is not None:
        return False
    rows, blocks, width, vocab = *grid[:2], given["BLOCK_SIZE"], given["vocab_size"]
    logits = rows_of(given["logits_ptr"], rows, vocab, given["logits_stride"])
    slots = given["expanded_idx_mapping_ptr"][:rows].long()
    heat = heats(given, slots, "temp_ptr")
    [drawn] = (heat != 0).nonzero(as_tuple=True)
    if len(drawn):
        mine = logits[drawn]
        if given["APPLY_TEMPERATURE"]:
            mine = mine / heat[drawn, None]
        seed = given["seeds_ptr"][slots[drawn]]
        position = given["pos_ptr"][drawn] + (given["IS_DRAFTING"] << 30)
        bits = hashed(seed[:, None], position[:, None], torch.arange(vocab))
        logits = logits.clone()
        logits[drawn] = mine + drawn_noise(bits)
    padded = torch.nn.functional.pad(logits, (0, blocks * width - vocab), value=float("-inf"))
    best, place = padded.unflatten(1, (blocks, width)).max(-1)
    given["local_max_ptr"].copy_(best)
    given["local_argmax_ptr"].copy_(place + torch.arange(blocks) * width)
    return True


def score(given: Given, grid: tuple[int, ...]) -> bool:
    """vLLM's `_topk_log_softmax_kernel`."""
    logits = rows_of(given["logits_ptr"], grid[0], given["vocab_size"], given["logits_stride"])
    logits = logits - logits.amax(1, keepdim=True)
    norm = logits.exp().sum(1, keepdim=True, dtype=torch.float64).log().float()
    given["output_ptr"].copy_(logits.gather(1, given["topk_ids_ptr"]) - norm)
    return True


def count_better(given: Given, grid: tuple[int, ...]) -> bool:
    """vLLM's `_ranks_kernel`."""
    logits = rows_of(given["logits_ptr"], grid[0], given["vocab_size"], given["logits_stride"])
    chosen = logits.gather(1, given["token_ids_ptr"][: grid[0], None])
    given["output_ptr"].copy_((logits >= chosen).sum(1))
    return True


SAMPLING = "vllm.v1.worker.gpu.sample"
LAUNCHES: dict[tuple[str, str], Callable[[Given, tuple[int, ...]], bool]] = {
    (topk.__name__, "_block_kernel"): block,
    (topk.__name__, "_merge_kernel"): merge,
    (growth.__name__, "_expand_kernel"): grow,
    (f"{SAMPLING}.gumbel", "_gumbel_sample_kernel"): draw,
    (f"{SAMPLING}.logprob", "_topk_log_softmax_kernel"): score,
    (f"{SAMPLING}.logprob", "_ranks_kernel"): count_better,
}
"""By module and name: does what a launch would do, or returns False and does nothing."""


def quick(stock: Callable[..., None]) -> Callable[..., None]:
    """`GridExecutor.__call__` of Triton's interpreter, with these launches."""

    def call(executor: Any, *args: Any, **kwargs: Any) -> None:
        function = executor.fn
        at_once = LAUNCHES.get((function.__module__, function.__name__))
        given = {**dict(zip(executor.arg_names, args)), **kwargs}
        if at_once is None or not at_once(given, executor.grid):
            stock(executor, *args, **kwargs)

    return call
