"""The memory of an engine by part, per rank, as far as a configuration tells."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm_graft.graph_runners.vision.vision_config import VitConfig
from vllm_graft.hicache.cache_refusals import parse_connectors
from vllm_graft.plan.layer_counts import LayerCounts
from vllm_graft.plan.weight_bytes import weight_bytes
from vllm_graft.spec_decode.config.ngram_config import lengths_of
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.chosen import has_model, is_block
from vllm_graft.spec_decode.models.draft_facts import draft_vocabulary, is_assistant
from vllm_graft.spec_decode.presets.ngram_preset import text_bytes
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import can_keep_inputs

RANK, TOKEN, REQUEST, HOST = "rank", "token", "request", "host"


@dataclass(frozen=True)
class Memory:
    """What one thing takes.

    Attributes:
        what: the thing.
        num_bytes: its bytes; None if they are not known before the start.
        per: ``rank`` (one device), ``token`` or ``request`` of one rank, or ``host``.
        says: where the number is from, or why there is none.
    """

    what: str
    num_bytes: int | None
    per: str
    says: str


def memory_of(vllm_config: Any) -> list[Memory]:
    """Memory by part, of a configuration that vLLM has completed."""
    rows = [*_model_rows("the target", vllm_config.model_config, vllm_config)]
    if (draft := _draft_of(vllm_config)) is not None:
        rows += _model_rows("the draft", draft, vllm_config)
    rows += [*_tree_rows(vllm_config), *_vision_rows(vllm_config), _graphs(vllm_config)]
    rows += [
        Memory("host pool", int(cache.host_bytes), HOST, "host_bytes, for all ranks together")
        for _, cache in parse_connectors(vllm_config)
    ]
    return rows + ([room] if (room := _room(rows, vllm_config)) else [])


def _draft_of(vllm_config: Any) -> Any:
    """The draft's configuration; None without a draft model, as where n-grams alone draft."""
    speculative = vllm_config.speculative_config
    tree = TreeConfig.from_vllm(vllm_config)
    if speculative is None or (tree is not None and not has_model(tree, speculative)):
        return None
    return speculative.draft_model_config


def _model_rows(who: str, model: Any, vllm_config: Any) -> Iterator[Memory]:
    found, says = weight_bytes(model)
    parallel = vllm_config.parallel_config
    if found is not None:
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        found, says = found // ranks, says + (f", over {ranks} ranks" if ranks > 1 else "")
    yield Memory(f"weights of {who}", found, RANK, says)
    if not is_assistant(model):
        yield from _cache_rows(who, model, vllm_config)


def _cache_rows(who: str, model: Any, vllm_config: Any) -> Iterator[Memory]:
    """K/V of each token, and the state of each request."""
    parallel = vllm_config.parallel_config
    try:
        layers, recurrent = LayerCounts.of(model, parallel)
        each = _layer_bytes(model, vllm_config)
    except Exception as error:  # Of some hybrids the configuration doesn't say it.
        yield Memory(f"K/V of {who}", None, TOKEN, f"vLLM can't tell: {error}")
        return
    layers -= min(layers, getattr(model.hf_text_config, "num_kv_shared_layers", None) or 0)
    windowed, window = _windowed(model, layers)
    if full := layers - windowed:
        yield Memory(f"K/V of {who}", full * each, TOKEN, f"{full} layers of {each} bytes")
    if windowed:
        says = f"{windowed} layers of {each} bytes, for the last {window} tokens"
        yield Memory(f"K/V of {who} in windows", windowed * each, TOKEN, says)
    if model.is_hybrid or model.is_attention_free:
        yield _state(who, model, recurrent, vllm_config)


def _layer_bytes(model: Any, vllm_config: Any) -> int:
    """Bytes of one layer's K/V of one token, on one rank."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    dtype = kv_cache_dtype_str_to_dtype(str(vllm_config.cache_config.cache_dtype), model)
    heads = 1 if model.use_mla else 2 * model.get_num_kv_heads(vllm_config.parallel_config)
    return int(heads * model.get_head_size() * dtype.itemsize)


def _windowed(model: Any, layers: int) -> tuple[int, int | None]:
    """How many layers keep a window only, and its tokens."""
    text = model.hf_text_config
    window = getattr(text, "sliding_window", None)
    if not window or model.disable_sliding_window:
        return 0, None
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return layers, window
    return sum("sliding" in kind for kind in kinds[:layers]), window


def _state(who: str, model: Any, layers: int, vllm_config: Any) -> Memory:
    """Recurrent states of one request: one, or one for each row that drafts are verified in."""
    from vllm.model_executor.models import registry

    drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", 0)

    what = f"recurrent state of {who}"
    try:
        # The class is asked where it can be imported, as vLLM itself inspects it.
        each = registry._run_in_subprocess(functools.partial(_state_bytes, model, vllm_config))
    except Exception as error:
        return Memory(what, None, REQUEST, f"vLLM can't tell: {error}")
    says = f"{layers} layers of {each} bytes"
    if drafts:
        says += f", {1 + drafts} states: one per verified row"
    return Memory(what, (1 + drafts) * layers * each, REQUEST, says)


def _state_bytes(model: Any, vllm_config: Any) -> int:
    """Bytes of one layer's state."""
    made = _class_of(model)
    shapes = made.get_mamba_state_shape_from_config(vllm_config)
    dtypes = made.get_mamba_state_dtype_from_config(vllm_config)
    return sum(math.prod(shape) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes))


def _class_of(model: Any) -> Any:
    """The class of a model, which can't be imported on every machine."""
    from vllm.model_executor.models import ModelRegistry

    return ModelRegistry.resolve_model_cls(model.architectures, model)[0]


def _tree_rows(vllm_config: Any) -> Iterator[Memory]:
    """What a tree keeps beside vLLM's cache: made as the worker makes it, on no device."""
    tree, speculative = TreeConfig.from_vllm(vllm_config), vllm_config.speculative_config
    if tree is None or speculative is None:
        return
    import torch

    from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace

    requests, nodes = vllm_config.scheduler_config.max_num_seqs, speculative.num_speculative_tokens
    parallel = vllm_config.parallel_config
    draft = _draft_of(vllm_config)
    in_block = is_block(tree, speculative)
    if draft is not None:
        yield from _head_rows(tree, draft, vllm_config)
    # A block drafter's own layers see no tree.
    models = [vllm_config.model_config, *([] if draft is None or in_block else [draft])]
    if tree.topk > 1:
        made = AttentionWorkspace.allocate(
            requests,
            max(nodes + 1, tree.topk),
            max(each.get_num_attention_heads(parallel) for each in models),
            max(each.get_head_size() for each in models),
            max_splits=64,
            device=torch.device("meta"),
        )
        held = sum(each.nbytes for each in (made.acc, made.peak, made.total))
        yield Memory("workspace of tree attention", held, RANK, "partial results, about")
        if tree.recurrent_form != "states" and can_keep_inputs(vllm_config.model_config):
            yield _kept_inputs(requests * (nodes + 1), vllm_config)
    if in_block:
        yield Memory("candidates of the tree", _candidates(tree, vllm_config), RANK, "of a block")
    elif draft is not None:
        yield Memory("scratch of the tree's K/V", _scratch(tree, vllm_config), RANK, "of the draft")
        if tree.draft_window is not None:
            yield _window_tables(tree.draft_window, draft, vllm_config)
    alone = not has_model(tree, speculative)
    ngram = lengths_of(tree, speculative) if alone else tree.ngram
    if ngram is not None:
        room = ngram.room(vllm_config.model_config.max_model_len)
        says = f"for n-grams, with references of {room} tokens"
        yield Memory(
            "texts of the requests",
            text_bytes(ngram, vllm_config, matches=tree.topk if alone else 1),
            RANK,
            says,
        )


def _head_rows(tree: TreeConfig, draft: Any, vllm_config: Any) -> Iterator[Memory]:
    """Copies of the draft's output head: in FP8, and of the hot tokens."""
    hidden, hot, fp8 = draft.get_hidden_size(), tree.hot_tokens, tree.head_dtype == "fp8"
    # In FP8 a row has a scale in 32 bits.
    each = hidden + 4 if fp8 else hidden * draft.dtype.itemsize
    if fp8 and not isinstance(hot, str):
        held = draft_vocabulary(vllm_config) * each
        held //= vllm_config.parallel_config.tensor_parallel_size
        yield Memory("output head in FP8", held, RANK, "a copy, which drafts are chosen by")
    if isinstance(hot, int):
        says = f"{hot} tokens, all of them on each rank"
        yield Memory("rows of hot tokens", hot * each, RANK, says)


def _window_tables(window: int, draft: Any, vllm_config: Any) -> Memory:
    """Block tables of what the draft reads. K/V is kept as without a window."""
    from vllm_graft.spec_decode.kernels.attention.windowed_table import table_width
    from vllm_graft.spec_decode.kernels.sizes import cdiv

    block = vllm_config.cache_config.block_size
    width = table_width(window, max_rows=0, block_size=block)
    width = min(width, cdiv(vllm_config.model_config.max_model_len, block))
    layers = draft.get_total_num_hidden_layers()
    # A request's row of the table, and its number of keys.
    held = layers * vllm_config.scheduler_config.max_num_seqs * (width + 1) * 4
    says = f"{layers} layers, {width} blocks; K/V of the draft is kept of all tokens as ever"
    return Memory("tables of the draft's window", held, RANK, says)


def _kept_inputs(rows: int, vllm_config: Any) -> Memory:
    """What recurrent layers keep of the rows of trees, in place of states."""
    from vllm.model_executor.models import registry

    model, what = vllm_config.model_config, "inputs of tree rows"
    rows = min(rows, vllm_config.scheduler_config.max_num_batched_tokens)
    try:
        each = registry._run_in_subprocess(functools.partial(_kept_bytes, rows, model, vllm_config))
        layers = LayerCounts.of(model, vllm_config.parallel_config).recurrent
    except Exception as error:
        return Memory(what, None, RANK, f"vLLM can't tell: {error}")
    return Memory(what, layers * each, RANK, f"{layers} layers, {rows} rows")


def _kept_bytes(rows: int, model: Any, vllm_config: Any) -> int:
    """Bytes of one layer's inputs."""
    from vllm_graft.spec_decode.targets.recurrent.state_room import kept_bytes

    window, state = _class_of(model).get_mamba_state_shape_from_config(vllm_config)
    return kept_bytes(rows, model, window, state)


def _candidates(tree: TreeConfig, vllm_config: Any) -> int:
    import torch

    from vllm_graft.spec_decode.drafters.block.lattice import BlockGrowth
    from vllm_graft.spec_decode.tuning.plan import plan_shapes
    from vllm_graft.spec_decode.tuning.scheduling import tree_policy

    policy = tree_policy(tree, vllm_config.speculative_config)
    shapes = plan_shapes(policy, tree, vllm_config)
    extra = max(shape.num_nodes for shape in shapes) if tree.ngram is not None else 0
    requests, device = vllm_config.scheduler_config.max_num_seqs, torch.device("meta")
    # Shapes of the same width and depth share a table.
    tables = {(shape.topk, shape.steps): shape for shape in shapes}.values()
    return sum(BlockGrowth(shape, requests, device, extra=extra).num_bytes for shape in tables)


def _scratch(tree: TreeConfig, vllm_config: Any) -> int:
    import torch

    from vllm_graft.spec_decode.trees.level_memory import LevelMemory
    from vllm_graft.spec_decode.trees.shape import TreeShape

    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    draft = speculative.draft_model_config
    size = draft.get_head_size()
    layer = SimpleNamespace(
        num_kv_heads=draft.get_num_kv_heads(parallel),
        head_size=size,
        # Any number but 0 says that the layer keeps latents.
        kv_lora_rank=size if draft.use_mla else 0,
        kv_sharing_target_layer_name="a layer of the target" if is_assistant(draft) else None,
    )
    shape = TreeShape(tree.topk, tree.steps, speculative.num_speculative_tokens)
    memory = LevelMemory(
        [shape],
        {str(number): layer for number in range(draft.get_total_num_hidden_layers())},
        max_reqs=vllm_config.scheduler_config.max_num_seqs,
        dtype=draft.dtype,
        device=torch.device("meta"),
    )
    return memory.num_bytes


def _vision_rows(vllm_config: Any) -> Iterator[Memory]:
    vit = VitConfig.from_vllm(vllm_config)
    if vit is not None:
        yield Memory("vision graphs", vit.memory << 20, RANK, "at most, graft.vit.memory")


def _graphs(vllm_config: Any) -> Memory:
    compilation = vllm_config.compilation_config
    sizes = compilation.cudagraph_capture_sizes or []
    mode = getattr(compilation.cudagraph_mode, "name", "NONE")
    if mode == "NONE" or not sizes:
        return Memory("CUDA graphs", 0, RANK, "none are captured")
    says = f"{mode}, {len(sizes)} sizes up to {max(sizes)} rows; known when they are captured"
    return Memory("CUDA graphs", None, RANK, says)


def _room(rows: list[Memory], vllm_config: Any) -> Memory | None:
    """What is left of a GPU for K/V; None where that can't be told."""
    from vllm.platforms import current_platform

    known = [row.num_bytes for row in rows if row.per == RANK and row.what != "CUDA graphs"]
    if not current_platform.is_cuda() or None in known:
        return None
    share = vllm_config.cache_config.gpu_memory_utilization
    left = int(current_platform.get_device_total_memory() * share) - sum(filter(None, known))
    says = f"left of {share:g} of the device, before activations and CUDA graphs"
    token = sum(row.num_bytes or 0 for row in rows if row.per == TOKEN)
    if left > 0 and token:
        says += f"; about {left // token} tokens"
    return Memory("room for K/V", left, RANK, says)
