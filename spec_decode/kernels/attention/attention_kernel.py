"""Triton code of tree and draft attention (flash-decoding over pages, arXiv:2311.01282)."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.attention.e4m3 import PRODUCTS, load_rows
from vllm_graft.spec_decode.kernels.kernel_launch import Kernel

_PRODUCTS = tl.constexpr(PRODUCTS)

_SUMMED = tl.constexpr(64)
"""Most products of e4m3 numbers that a tensor core of sm_90 adds by itself, with about 14 bits. The
sums of a head's parts are added in float32. Triton's default is the whole head."""


@triton.jit
def _key_value_scales(scale, k_scale, v_scale, FP8: tl.constexpr):
    """Factors of logits and values; those of an fp8 cache have scales."""
    value_scale = 1.0
    if FP8:
        if k_scale is not None:
            scale = scale * tl.load(k_scale)
        if v_scale is not None:
            value_scale = value_scale * tl.load(v_scale)
    return scale, value_scale


@triton.jit
def _logits(
    q, k, scale, soft_cap,
    HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr = False,
):  # fmt: skip
    """Logits in units of log 2, for ``exp2``. With FOLDED, the scale is in these units."""
    if q.dtype == tl.float8e4nv:
        summed: tl.constexpr = _SUMMED if q.shape[1] > _SUMMED else q.shape[1]
        logits = tl.dot(q, tl.trans(k), max_num_imprecise_acc=summed) * scale
    else:
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_CAP:
        # tanh(x) without overflow: exp(2x) may be inf, and 2 / inf is 0.
        logits = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * logits / soft_cap) + 1.0))
    if not FOLDED:
        logits *= 1.4426950408889634
    return logits


@triton.jit
def _accumulate(logits, v, acc, peak, total, PRECISION: tl.constexpr):
    """One step of the online softmax. Rows that have seen no key keep ``peak`` -inf, no NaN."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_peak, total


@triton.jit
def _tree_rows(query_start_loc, num_rows, req, MOST: tl.constexpr):
    """How many of a request's last rows belong to its tree, and the first of these rows. In a dummy
    run the number may be left over from an earlier batch, so it is cut to the query's rows."""
    end = tl.load(query_start_loc + req + 1).to(tl.int64)
    width = (end - tl.load(query_start_loc + req)).to(tl.int32)
    rows = tl.minimum(tl.load(num_rows + req), tl.minimum(width, MOST))
    return rows, end - rows


@triton.jit
def _first_key(
    kv_len, rows, level, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, DRAFT: tl.constexpr
):
    first = 0
    if WINDOW > 0:
        if DRAFT:
            # All rows of a level have one position, so that they see the same keys of the prefix.
            first = tl.maximum(kv_len + level - WINDOW + 1, 0)
        elif CHUNKED:
            first = tl.maximum(kv_len - rows, 0) // WINDOW * WINDOW
        else:
            first = tl.maximum(kv_len - rows - WINDOW + 1, 0)
    return first


@triton.jit
def _split_length(keys, num_splits, BLOCK_N: tl.constexpr):
    return tl.cdiv(tl.cdiv(keys, num_splits), BLOCK_N) * BLOCK_N


@Kernel
@triton.jit(do_not_specialize=["level", "num_splits", "soft_cap", "ancestors_stride"])
def split_kernel(
    query, kv_cache, out, partial_acc, partial_peak, partial_total,
    query_start_loc, kv_lens, block_table, row_masks, row_depths, num_rows,
    scratch, ancestors, sinks, q_scale, k_scale, v_scale, scale, soft_cap, level, num_splits,
    query_row_stride, query_head_stride, out_row_stride, out_head_stride,
    cache_block_stride, cache_head_stride, cache_slot_stride, table_stride,
    scratch_req_stride, scratch_slot_stride, scratch_head_stride, ancestors_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PARTIAL_ROWS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DRAFT: tl.constexpr, TOPK: tl.constexpr,
    FP8: tl.constexpr, HAS_CAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, EDGES: tl.constexpr,
    SKIP_EMPTY: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """One tile, of a request's rows x the heads of one KV head, over one split of its keys. With a
    window, a row at position p sees keys after p - WINDOW; with chunks, keys from the last multiple
    of WINDOW on that is at most p. Blocks before the first key that any row sees may be the null
    block, whose contents are arbitrary: they are not read."""
    if OVERLAPPED:
        # The kernel that combines may start; it waits for what this one writes.
        tl.extra.cuda.gdc_launch_dependents()
    req = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    kv_len = tl.load(kv_lens + req)
    pages = block_table + req * table_stride
    ahead = tl.arange(0, BLOCK_N)
    if AHEAD and not SPLIT and WINDOW == 0:
        # These page numbers are known to be needed before the number of keys is.
        page = tl.load(pages + ahead // BLOCK_SIZE, mask=ahead < table_stride * BLOCK_SIZE, other=0)
    if DRAFT:
        rows = TOPK
        first_row = req * TOPK
    else:
        rows, first_row = _tree_rows(query_start_loc, num_rows, req, PARTIAL_ROWS)
    tile = (tl.program_id(0) % TILES) * BLOCK_M
    if tile >= rows * GROUP:
        return
    first_key = _first_key(kv_len, rows, level, WINDOW, CHUNKED, DRAFT)
    split_len = _split_length(kv_len - first_key, num_splits, BLOCK_N)
    begin = first_key + split * split_len
    end = tl.minimum(begin + split_len, kv_len)
    if SKIP_EMPTY:
        # The first split has a sink, and a draft's last program has the scratch.
        last = split == tl.num_programs(2) - 1 if DRAFT else False
        if (begin >= end) & (split > 0) & (last == 0):
            return
    if AHEAD and (SPLIT or WINDOW > 0):
        page = tl.load(pages + (begin + ahead) // BLOCK_SIZE, mask=begin + ahead < end, other=0)

    m = tile + tl.arange(0, BLOCK_M)
    inside = m < rows * GROUP
    row = m // GROUP
    q_head = head * GROUP + m % GROUP
    d = tl.arange(0, HEAD_PAD)
    in_head = d < HEAD
    q_at = (first_row + row) * query_row_stride + q_head * query_head_stride
    element = inside[:, None] & in_head[None, :]
    q = tl.load(query + q_at[:, None] + d[None, :], mask=element, other=0.0)
    value_type: tl.constexpr = tl.float16 if FP8 == _PRODUCTS else q.dtype
    if q_scale is not None:
        scale = scale * tl.load(q_scale)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        # A sink is a logit without a value. The first split alone has it.
        sink = tl.load(sinks + q_head, mask=inside & (split == 0), other=float("-inf"))
        peak = sink.to(tl.float32) * 1.4426950408889634
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
    cache_scale, value_scale = _key_value_scales(scale, k_scale, v_scale, FP8)
    folded: tl.constexpr = FP8 == _PRODUCTS and not HAS_CAP
    if folded:
        cache_scale *= 1.4426950408889634
    if DRAFT:
        own_first = kv_len
        mask = tl.zeros([BLOCK_M], tl.int64)
    else:
        own_first = kv_len - rows
        mask = tl.load(row_masks + first_row + row, mask=inside, other=0)
    if WINDOW > 0 and not DRAFT:
        # Positions count from the root's, as depths do.
        depth = tl.load(row_depths + first_row + row, mask=inside, other=0)
        edge = depth - WINDOW + 1
        if CHUNKED:
            edge = (own_first + depth) // WINDOW * WINDOW - own_first
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < end
        if AHEAD:
            after = n + BLOCK_N
            next_page = tl.load(pages + after // BLOCK_SIZE, mask=after < end, other=0)
        else:
            page = tl.load(pages + n // BLOCK_SIZE, mask=exists, other=0)
        at = page.to(tl.int64) * cache_block_stride + head * cache_head_stride
        at += (n % BLOCK_SIZE) * cache_slot_stride
        loaded = exists[:, None] & in_head[None, :]
        pointers = kv_cache + at[:, None] + d[None, :]
        k = load_rows(pointers, loaded, q.dtype, FP8)
        v = load_rows(pointers + HEAD, loaded, value_type, FP8)
        logits = _logits(q, k, cache_scale, soft_cap, HAS_CAP, PRECISION, folded)
        own = n - own_first
        if start + BLOCK_N > own_first:
            bit = (mask[:, None] >> tl.minimum(tl.maximum(own, 0), 63)[None, :].to(tl.int64)) & 1
            visible = (own < 0)[None, :] | ((bit != 0) & exists[None, :])
            logits = tl.where(visible, logits, float("-inf"))
        if WINDOW > 0 and not DRAFT:
            near = True
            if EDGES and not CHUNKED:
                # The windows of all rows begin within so many keys: all see what lies between.
                near = (start < first_key + PARTIAL_ROWS) | (start + BLOCK_N > own_first)
            if near:
                # A row's position is that of its depth, whatever slot it has.
                of_tree = (own >= 0) & exists
                key_depth = tl.load(row_depths + first_row + own, mask=of_tree, other=0)
                position = tl.where(own < 0, own, key_depth)
                logits = tl.where(position[None, :] >= edge[:, None], logits, float("-inf"))
        acc, peak, total = _accumulate(logits, v, acc, peak, total, PRECISION)
        if AHEAD:
            page = next_page
    acc = acc * value_scale

    if DRAFT:
        # All splits of a request have one scratch, which the last program computes. Where there are
        # splits, that program has no keys of the prefix.
        if FP8 == _PRODUCTS:
            q = q.to(scratch.dtype.element_ty)
        slots = tl.where(split == tl.num_programs(2) - 1, (level + 1) * TOPK, 0)
        for start in range(0, slots, BLOCK_N):
            slot = start + tl.arange(0, BLOCK_N)
            exists = slot < slots
            at = req * scratch_req_stride + slot * scratch_slot_stride + head * scratch_head_stride
            loaded = exists[:, None] & in_head[None, :]
            pointers = scratch + at[:, None] + d[None, :]
            k = load_rows(pointers, loaded, q.dtype, False)
            v = load_rows(pointers + HEAD, loaded, q.dtype, False)
            logits = _logits(q, k, scale, soft_cap, HAS_CAP, PRECISION)
            ancestor = tl.load(
                ancestors + (first_row + row)[:, None] * ancestors_stride + (slot // TOPK)[None, :],
                mask=inside[:, None] & exists[None, :],
                other=-1,
            )
            logits = tl.where(ancestor == slot[None, :], logits, float("-inf"))
            acc, peak, total = _accumulate(logits, v, acc, peak, total, PRECISION)

    if SPLIT:
        place = ((req * tl.num_programs(2) + split) * PARTIAL_ROWS + row) * HEADS + q_head
        tl.store(partial_peak + place, peak, mask=inside)
        tl.store(partial_total + place, total, mask=inside)
        seen = element & (total > 0)[:, None]
        tl.store(partial_acc + place[:, None] * HEAD + d[None, :], acc, mask=seen)
    else:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = (first_row + row) * out_row_stride + q_head * out_head_stride
        tl.store(out + out_at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=element)


@Kernel
@triton.jit(do_not_specialize=["num_splits", "level"])
def combine_kernel(
    out, partial_acc, partial_peak, partial_total, query_start_loc, num_rows, kv_lens, num_parts,
    level, out_row_stride, out_head_stride,
    HEADS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, PARTIAL_ROWS: tl.constexpr,
    PARTS_PAD: tl.constexpr, DRAFT: tl.constexpr, TOPK: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Combine the parts of WIDTH numbers of one row and head into the output. With ``kv_lens`` only
    those that have keys are read, which are the first ones of the prefix."""
    req = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    pieces = tl.cdiv(HEAD, WIDTH)
    head = tl.program_id(2) // pieces
    if DRAFT:
        rows = TOPK
        first_row = req * TOPK
    else:
        rows, first_row = _tree_rows(query_start_loc, num_rows, req, PARTIAL_ROWS)
    part = tl.arange(0, PARTS_PAD)
    exists = part < num_parts
    if kv_lens is not None:
        kv_len = tl.load(kv_lens + req)
        first_key = _first_key(kv_len, rows, level, WINDOW, CHUNKED, DRAFT)
        splits = num_parts - 1 if DRAFT else num_parts
        length = _split_length(kv_len - first_key, splits, BLOCK_N)
        written = (part == 0) | (first_key + part * length < kv_len)
        if DRAFT:
            written = (written & (part < splits)) | (part == splits)
        exists = exists & written
    if OVERLAPPED:
        # What is loaded before was complete before the splits began. Programs without a row wait,
        # too, so that what follows this kernel follows the splits.
        tl.extra.cuda.gdc_wait()
    if row >= rows:
        return
    place = ((req * num_parts + part) * PARTIAL_ROWS + row) * HEADS + head
    d = tl.program_id(2) % pieces * WIDTH + tl.arange(0, WIDTH)
    in_head = d < HEAD
    # All loads are issued at once: loads that wait for one another would take the time.
    peak = tl.load(partial_peak + place, mask=exists, other=float("-inf"))
    sums = tl.load(partial_total + place, mask=exists, other=0.0)
    acc = tl.load(
        partial_acc + place[:, None] * HEAD + d[None, :],
        mask=exists[:, None] & in_head[None, :],
        other=0.0,
    )
    top = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight * sums, 0)
    # A split without visible keys has stored no accumulator: what lies there may be NaN.
    acc = tl.where((weight > 0)[:, None], acc, 0.0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_at = out + (first_row + row) * out_row_stride + head * out_head_stride
    tl.store(out_at + d, result.to(out.dtype.element_ty), mask=in_head)
