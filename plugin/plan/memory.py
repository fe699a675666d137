"""The memory of an engine by part, per rank, as far as a configuration tells."""

import copy
import importlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_graft.base.values import human, reason_of
from vllm_graft.graph_runners.vision.vision_config import VitConfig
from vllm_graft.hicache.cache_refusals import parse_connectors
from vllm_graft.plan.building import Built, build
from vllm_graft.spec_decode.config.tree_config import TreeConfig, lengths_of
from vllm_graft.spec_decode.lookup.corpora import room_of
from vllm_graft.spec_decode.models.drafts import draft_vocabulary, has_model, is_assistant, is_block
from vllm_graft.spec_decode.presets.tree_preset import text_bytes
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import can_keep_inputs

RANK, TOKEN, REQUEST, HOST = "rank", "token", "request", "host"
ROOM, GRAPHS = "room for K/V", "CUDA graphs"


@dataclass(frozen=True)
class Memory:
    """What one thing takes: `num_bytes`, None if they are not known before the start, `per`
    ``rank`` (one device), ``token`` or ``request`` of one rank, or ``host``. It `says` where the
    number is from, or why there is none."""

    what: str
    num_bytes: int | None
    per: str
    says: str


def _layers(count: int) -> str:
    return f"{count} layer" + ("s" if count > 1 else "")


def memory_of(vllm_config: Any) -> tuple[list[Memory], str]:
    """Memory by part, of a configuration that vLLM has completed. Returns the rows, and why one
    request does not fit into the device; empty if it does, or if that can't be told."""
    planned: Any = copy.copy(vllm_config)
    for name in ("cache_config", "compilation_config"):
        # Building a model writes into these.
        setattr(planned, name, copy.copy(getattr(planned, name)))
    target, rows = _model_rows("the target", planned.model_config, planned, None)
    specs = dict(target.specs) if target is not None else None
    layers = 0
    if (draft := _draft_of(planned)) is not None:
        built, more = _model_rows("the draft", draft, planned, target)
        rows += more
        # Of an MTP module, configurations may have the target's number.
        layers = len(built.specs) if built is not None else draft.get_total_num_hidden_layers()
        specs = {**specs, **built.specs} if specs is not None and built is not None else None
    mambas = [each for each in (target.specs if target else {}).values() if _is_state(each)]
    rows += [*_tree_rows(planned, mambas, layers), *_vision_rows(planned), _graphs(planned)]
    replicas = planned.parallel_config.data_parallel_size
    each = f", of each of {replicas} replicas" if replicas > 1 else ""
    rows += [
        Memory(
            "host pool",
            size := int(cache.host_bytes),
            HOST,
            f"host_bytes, for all {'servers that share it' if cache.shared else 'ranks'} together"
            + ("" if cache.shared else each)
            + ("" if cache.host_dtype else _host_tokens(size, specs, planned)),
        )
        for _, cache in parse_connectors(planned)
    ]
    room, lacks = _room(rows, specs, planned)
    return rows + room, lacks


def _draft_of(vllm_config: Any) -> Any:
    """The draft's configuration; None without a draft model, as where n-grams alone draft."""
    speculative = vllm_config.speculative_config
    tree = TreeConfig.from_vllm(vllm_config)
    if speculative is None or (tree is not None and not has_model(tree, speculative)):
        return None
    draft = speculative.draft_model_config
    # Methods without a model have the target's here.
    return None if draft is speculative.target_model_config else draft


def _model_rows(
    who: str, model: Any, vllm_config: Any, target: Built | None
) -> tuple[Built | None, list[Memory]]:
    """A model as vLLM builds it, and its rows; ``target`` is that of a draft."""
    try:
        built = build(model, vllm_config)
    except Exception as error:  # Classes that this process can't import, files that aren't here.
        why = f"vLLM's class can't be built here, and perhaps not on a server: {reason_of(error)}"
        return None, [
            Memory(f"weights of {who}", *_file_bytes(model, vllm_config.parallel_config)),
            Memory(f"K/V of {who}", None, TOKEN, why),
        ]
    alone = target is None or vllm_config.speculative_config.method == "draft_model"
    says = "as vLLM builds it" + ("" if alone else ", without what it shares with the target")
    rows = [Memory(f"weights of {who}", built.num_bytes(None if alone else target), RANK, says)]
    if not is_assistant(model):
        rows += _cache_rows(who, built.specs.values(), vllm_config)
    return built, rows


def _file_bytes(model: Any, parallel: Any) -> tuple[int | None, str, str]:
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    folder = Path(str(model.model))
    # Mistral's format has a copy of the same weights beside.
    shards = [*folder.glob("model*.safetensors")] or [*folder.glob("*.safetensors")]
    if not (held := sum(file.stat().st_size for file in shards)):
        return None, RANK, "neither its class nor its files can tell"
    return held // ranks, RANK, f"from the size of its files, over {ranks} ranks"


def _host_tokens(size: int, specs: dict[str, Any] | None, vllm_config: Any) -> str:
    """The tokens that a host pool holds, if each layer keeps all of them. Replicas count once."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    kept = [*(specs or {}).values()]
    limits = ("sliding_window", "attention_chunk_size")
    if not kept or any(
        not isinstance(spec, FullAttentionSpec) or any(getattr(spec, name) for name in limits)
        for spec in kept
    ):
        return ""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    replicas = math.gcd(ranks, *(ranks // min(ranks, spec.max_tp_shards or ranks) for spec in kept))
    held = sum(spec.page_size_bytes // spec.block_size for spec in kept) * ranks // replicas
    return f"; {size // held} tokens"


def _is_state(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec)


def _cache_rows(who: str, specs: Iterable[Any], vllm_config: Any) -> Iterator[Memory]:
    """K/V of each token, and the state of each request."""
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    states: Counter[tuple[int, int]] = Counter()
    windows: dict[int | None, Counter[int]] = {}
    for spec in specs:
        if _is_state(spec):
            each = sum(math.prod(a) * b.itemsize for a, b in zip(spec.shapes, spec.dtypes))
            states[each, 1 + spec.num_speculative_blocks] += 1
        elif isinstance(spec, CrossAttentionSpec):
            what, held = f"K/V of {who} for its encoder", spec.max_memory_usage_bytes(vllm_config)
            yield Memory(what, held, REQUEST, "one layer")
        else:
            window = getattr(spec, "sliding_window", None)
            window = window or getattr(spec, "attention_chunk_size", None)
            each = spec.page_size_bytes // spec.block_size
            windows.setdefault(window, Counter())[each] += 1
    for window, layers in sorted(windows.items(), key=lambda item: item[0] or 0):
        held = sum(each * count for each, count in layers.items())
        says = " and ".join(f"{_layers(count)} of {human(each)}" for each, count in layers.items())
        what = f"K/V of {who}" + (" in windows" if window else "")
        yield Memory(
            what, held, TOKEN, says + (f", for the last {window} tokens" if window else "")
        )
    for (each, rows), count in states.items():
        says = f"{_layers(count)} of {human(each)}"
        says += f", {rows} states: one per verified row" if rows > 1 else ""
        yield Memory(f"recurrent state of {who}", rows * count * each, REQUEST, says)


def _tree_rows(vllm_config: Any, states: list[Any], layers: int) -> Iterator[Memory]:
    """What a tree keeps beside vLLM's cache: made as the worker makes it, on no device. `states`
    are specs of the target's recurrent layers, `layers` of the draft's with K/V."""
    tree, speculative = TreeConfig.from_vllm(vllm_config), vllm_config.speculative_config
    if tree is None or speculative is None:
        return
    import torch

    from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
    from vllm_graft.spec_decode.trees.text_state import MemoryState

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
            yield _kept_inputs(requests * (nodes + 1), states, vllm_config)
    if in_block:
        yield Memory("candidates of the tree", _candidates(tree, vllm_config), RANK, "of a block")
    elif draft is not None:
        yield Memory(
            "scratch of the tree's K/V", _scratch(tree, layers, vllm_config), RANK, "of the draft"
        )
        if tree.draft_window is not None:
            yield _window_tables(tree.draft_window, layers, vllm_config)
    alone = not has_model(tree, speculative)
    ngram = lengths_of(tree, speculative) if alone else tree.ngram
    memory = None
    if tree.memory is not None:
        kept, corpora = tree.memory.bytes, tree.memory.corpora_bytes
        memory = MemoryState.allocate(kept, requests, torch.device("meta"), corpora)
        says = f"of {memory.tokens.numel()} tokens, in which n-grams are looked for"
        says += f", {room_of(tree.memory)} of them of corpora" if corpora else ""
        yield Memory("texts of other requests", memory.num_bytes, RANK, says)
    if ngram is not None:
        room = ngram.room(vllm_config.model_config.max_model_len)
        says = f"for n-grams, with references of {room} tokens"
        yield Memory(
            "texts of the requests",
            text_bytes(ngram, vllm_config, matches=tree.topk if alone else 1, memory=memory),
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


def _window_tables(window: int, layers: int, vllm_config: Any) -> Memory:
    """Block tables of what the draft reads. K/V is kept as without a window."""
    from vllm_graft.spec_decode.kernels.kernel_launch import cdiv
    from vllm_graft.spec_decode.targets.dense.window import table_width

    block = vllm_config.cache_config.block_size
    width = table_width(window, max_rows=0, block_size=block)
    width = min(width, cdiv(vllm_config.model_config.max_model_len, block))
    # A request's row of the table, and its number of keys.
    held = layers * vllm_config.scheduler_config.max_num_seqs * (width + 1) * 4
    says = f"{_layers(layers)}, {width} blocks; K/V of the draft is kept of all tokens as ever"
    return Memory("tables of the draft's window", held, RANK, says)


def _kept_inputs(rows: int, states: list[Any], vllm_config: Any) -> Memory:
    """What recurrent layers keep of the rows of trees, in place of states."""
    from vllm_graft.spec_decode.targets.recurrent.recurrent_features import kept_bytes

    model = vllm_config.model_config
    rows = min(rows, vllm_config.scheduler_config.max_num_batched_tokens)
    held = sum(kept_bytes(rows, model, *spec.shapes) for spec in states)
    says = f"{_layers(len(states))}, {rows} rows" if states else "the target can't be built here"
    return Memory("inputs of tree rows", held if states else None, RANK, says)


def _candidates(tree: TreeConfig, vllm_config: Any) -> int:
    import torch

    from vllm_graft.spec_decode.drafters.block.block_trees import BlockGrowth
    from vllm_graft.spec_decode.tuning.scheduling import plan_shapes, tree_policy

    policy = tree_policy(tree, vllm_config.speculative_config)
    shapes = plan_shapes(policy, tree, vllm_config)
    extra = max(shape.num_nodes for shape in shapes) if tree.ngram is not None else 0
    requests, device = vllm_config.scheduler_config.max_num_seqs, torch.device("meta")
    # Shapes of the same width and depth share a table.
    tables = {(shape.topk, shape.steps): shape for shape in shapes}.values()
    return sum(BlockGrowth(shape, requests, device, extra=extra).num_bytes for shape in tables)


def _scratch(tree: TreeConfig, layers: int, vllm_config: Any) -> int:
    import torch

    from vllm_graft.spec_decode.drafters.levels import LevelMemory
    from vllm_graft.spec_decode.trees.tree import TreeShape

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
        {str(number): layer for number in range(layers)},
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
        return Memory(GRAPHS, 0, RANK, "none are captured")
    says = f"{mode}, {len(sizes)} sizes up to {max(sizes)} rows; known when they are captured"
    return Memory(GRAPHS, None, RANK, says)


def _room(
    rows: list[Memory], specs: dict[str, Any] | None, vllm_config: Any
) -> tuple[list[Memory], str]:
    """What is left of a GPU for K/V, and why that is too little; both only where it can be told."""
    from vllm.platforms import current_platform

    known = [row.num_bytes for row in rows if row.per == RANK and row.what != GRAPHS]
    offload = vllm_config.offload_config
    on_host = offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size
    if not current_platform.is_cuda() or None in known or on_host:
        return [], ""
    taken, device = sum(filter(None, known)), current_platform.get_device_total_memory()
    share = vllm_config.cache_config.gpu_memory_utilization
    left = int(device * share) - taken
    needed, tokens = _tokens(max(left, 0), specs, vllm_config) if specs else (0, None)
    if left < needed or left <= 0:
        longest = vllm_config.model_config.max_model_len
        kv = f", and {human(needed)} for K/V of one request of {longest} tokens" if needed else ""
        needs = f"{human(taken + needed)} ({human(taken)} for weights and their like{kv})"
        return [], (
            f"It does not fit: each GPU needs {needs}, and has {human(int(device * share))} "
            f"(--gpu-memory-utilization {share:g} of {human(device)}). Use more GPUs "
            "(--tensor-parallel-size), larger ones, or a quantized model"
            + (", or lower --max-model-len." if needed and left > 0 else ".")
        )
    says = f"left of {share:g} of the device, before activations and CUDA graphs"
    says += f"; {tokens} tokens" if tokens else ""
    return [Memory(ROOM, left, RANK, says)], ""


def _tokens(left: int, specs: dict[str, Any], vllm_config: Any) -> tuple[int, int | None]:
    """Bytes of one request's K/V, and the tokens for which some bytes have room, as vLLM counts."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    cache, much = vllm_config.cache_config, 1 << 50
    # The engine's core resolves it, by backends; blocks take as much in any.
    cache.kv_cache_layout = cache.kv_cache_layout or "LBHNC"
    # From 0.33 on, it has a module of its own.
    name = "vllm.v1.core.kv_cache_planning"
    planning = importlib.import_module(
        name if find_spec(name) else get_kv_cache_capacity.__module__
    )
    try:
        groups = planning.get_kv_cache_groups(vllm_config, dict(specs))
        made = planning.get_kv_cache_config_from_groups(vllm_config, groups, much)
        tokens, requests = get_kv_cache_capacity(vllm_config, made)
    except Exception:  # Layers that vLLM puts into no groups here, or none at all.
        return 0, None
    return int(much / requests), int(tokens * left / much)
