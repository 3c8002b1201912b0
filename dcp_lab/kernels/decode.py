"""Split-KV paged decode attention with its LSE, in three kernels.

    out[t, h] = v_scale sum_s softmax_s(score[t, h, s]) v[s, h // G]
    lse[t, h] = ln sum_s exp(score[t, h, s]),  score = softmax_scale k_scale q[t, h] . k[s, h // G]

`_plan_kernel` runs once a step for all layers: it cuts the requests into work items of about equal
length, as many as the device has slots. `_decode_kernel` runs one program for each (item, KV head,
block of query rows): the query heads of one KV head and the query tokens of one request are the
rows of one tile, so K and V are read once for all of them. An item that is a whole request writes
its result; the others leave normalised fp32 partials, which `_reduce_kernel` merges.

An fp8 cache is multiplied as fp16, exactly. K is converted as it is. A V whose head dims lie
together is read as 16-bit words of two neighbours, which become the even and the odd columns of
two products (`unpack_fp8`): there is no transposed 8-bit read of shared memory, and byte by byte
it would be the slowest part of the kernel (64 x 8k on an H200: 42.5 us against 53.1). Under
SHUFFLE neighbours are tokens, the dimension that the product sums over: plain conversion there.

Source: flash-decoding (split KV, merge by LSE). Written here; what won and what lost is in the
launch configs of dcp_lab/ops/workspace.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_lab.kernels.fp8 import unpack_fp8
from dcp_lab.kernels.primitives import (
    LN2,
    LOG2E,
    merge_step,
    merge_weight,
    page_index,
    power_of_two,
    row_max,
    scaled_to_fp16,
    soft_cap,
    softmax_update,
    split_tiles,
    visible_end,
    visible_start,
)

# A work item is 4 int32: request (-1: nothing to do), first token, one past the last token, splits
# of its request. A split request is 4 int32: request (-1: none), first item, splits, unused.
ITEM_FIELDS = 4


@triton.jit
def _plan_kernel(
    seq_lens_ptr,
    total_lens_ptr,
    query_start_loc_ptr,
    items_ptr,
    split_requests_ptr,
    num_requests,
    num_items,
    num_split_requests,
    min_tiles,
    TILE: tl.constexpr,
    HAS_QUERY_START_LOC: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARD_RANK: tl.constexpr,
    SHARD_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    """Grid (1,): cut the requests into at most num_items pieces, the smallest that fit."""
    offs_b = tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_requests
    seq_len = tl.load(seq_lens_ptr + offs_b, mask=mask_b, other=0)
    start = tl.zeros([BLOCK_B], tl.int32)
    if WINDOW > 0:
        query_len = 1
        if HAS_QUERY_START_LOC:
            query_len = tl.load(query_start_loc_ptr + offs_b + 1, mask=mask_b, other=0)
            query_len -= tl.load(query_start_loc_ptr + offs_b, mask=mask_b, other=0)
        total_len = tl.load(total_lens_ptr + offs_b, mask=mask_b, other=0)
        start = visible_start(total_len, query_len, 0, WINDOW, SHARD_RANK, SHARD_SIZE, INTERLEAVE)
        start = tl.minimum(start, seq_len) // TILE * TILE
    tiles = tl.cdiv(seq_len - start, TILE)

    # The smallest piece (in tiles) with which all fits; a request without keys is one item too.
    low = tl.maximum(min_tiles, 1)
    high = tl.maximum(tl.max(tiles, 0), low)
    for _ in range(SEARCH_STEPS):
        piece = (low + high) // 2
        count = tl.sum(tl.where(mask_b, tl.maximum(tl.cdiv(tiles, piece), 1), 0), 0)
        fits = count <= num_items
        high = tl.where(fits, piece, high)
        low = tl.where(fits, low, tl.minimum(piece + 1, high))
    piece = high

    splits = tl.where(mask_b, tl.maximum(tl.cdiv(tiles, piece), 1), 0)
    # Even out: the last piece of a request should not be a crumb.
    per = split_tiles(tiles, tl.maximum(splits, 1))
    splits = tl.where(mask_b, tl.maximum(tl.cdiv(tiles, per), 1), 0)
    first = tl.cumsum(splits, 0) - splits
    used = tl.sum(splits, 0)

    most = tl.max(splits, 0)
    for s0 in range(0, most, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        mask = s[None, :] < splits[:, None]
        begin = start[:, None] + s[None, :] * (per * TILE)[:, None]
        end = tl.minimum(begin + (per * TILE)[:, None], seq_len[:, None])
        item = items_ptr + (first[:, None] + s[None, :]) * 4
        tl.store(item, offs_b[:, None] + tl.zeros([BLOCK_B, BLOCK_S], tl.int32), mask=mask)
        tl.store(item + 1, begin, mask=mask)
        tl.store(item + 2, end, mask=mask)
        tl.store(item + 3, splits[:, None] + tl.zeros([BLOCK_B, BLOCK_S], tl.int32), mask=mask)
    for i0 in range(used, num_items, BLOCK_S):
        i = i0 + tl.arange(0, BLOCK_S)
        tl.store(items_ptr + i * 4, tl.full([BLOCK_S], -1, tl.int32), mask=i < num_items)

    is_split = (splits > 1).to(tl.int32)
    place = tl.cumsum(is_split, 0) - is_split
    entry = split_requests_ptr + place * 4
    tl.store(entry, offs_b, mask=is_split > 0)
    tl.store(entry + 1, first, mask=is_split > 0)
    tl.store(entry + 2, splits, mask=is_split > 0)
    for i0 in range(tl.sum(is_split, 0), num_split_requests, BLOCK_S):
        i = i0 + tl.arange(0, BLOCK_S)
        tl.store(
            split_requests_ptr + i * 4,
            tl.full([BLOCK_S], -1, tl.int32),
            mask=i < num_split_requests,
        )


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    block_table_ptr,
    seq_lens_ptr,
    total_lens_ptr,
    query_start_loc_ptr,
    sinks_ptr,
    items_ptr,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    softmax_scale,
    v_scale,
    softcap,
    num_requests,
    num_tokens,
    num_splits,
    head_blocks,
    partial_query_len,
    stride_q_t,
    stride_q_h,
    stride_k_p,
    stride_k_t,
    stride_k_h,
    stride_k_c,
    stride_v_p,
    stride_v_t,
    stride_v_h,
    stride_v_d,
    stride_k_scale,
    stride_v_scale,
    stride_bt,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    DENSE: tl.constexpr,
    FP8: tl.constexpr,
    K_SCALE_ON_DEVICE: tl.constexpr,
    V_SCALE_ON_DEVICE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    HAS_PARTIALS: tl.constexpr,
    HAS_QUERY_START_LOC: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARD_RANK: tl.constexpr,
    SHARD_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
    WAIT_LAUNCH: tl.constexpr,
    EARLY_LAUNCH: tl.constexpr,
):
    """Grid (items x KV heads x row blocks,): a piece of a request's KV for one KV head's rows.

    KV heads vary fastest, then row blocks (head_blocks in all). Without items (a fixed num_splits)
    there is one item a request and split, requests faster.

    CHUNK is x under SHUFFLE, else 0: then stride_k_c is from x head dims of K to the next,
    stride_v_t from x tokens of V to the next; DENSE says that stride_k_t and stride_v_d are x and
    that each run of x tokens of V starts at a multiple of 16 bytes: 16-byte loads. With FP8 but
    without CHUNK v_ptr points to 16-bit words, and its strides count them.
    """
    if WAIT_LAUNCH:
        # Launched while the kernel before it drains: nothing of its results is read above this
        # line.
        tl.extra.cuda.gdc_wait()
    if EARLY_LAUNCH:
        # The reduce kernel may start now; it waits itself. At the first instruction: after the
        # loop it costs as much as a plain edge (16 x 2k on an H200: 11.3 us here, 12.3 after the
        # loop).
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0) % head_blocks % NUM_KV_HEADS
    row_block = tl.program_id(0) % head_blocks // NUM_KV_HEADS
    index = tl.program_id(0) // head_blocks
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    j = row // GROUP
    head = kv_head * GROUP + row % GROUP
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    # Where the elements of V lie, and how many columns of it an accumulator has.
    V_PAIRS: tl.constexpr = FP8 and CHUNK == 0
    V_COLUMNS: tl.constexpr = BLOCK_DV // 2 if V_PAIRS else BLOCK_DV
    V_WIDTH: tl.constexpr = HEAD_DIM_V // 2 if V_PAIRS else HEAD_DIM_V
    offs_v = tl.arange(0, V_COLUMNS)
    k_dims = offs_d
    v_dims = offs_v
    if CHUNK > 0:
        k_dims = tl.cast(offs_d // CHUNK, tl.int64) * stride_k_c + offs_d % CHUNK
        v_dims = tl.cast(offs_v, tl.int64) * (CHUNK if DENSE else stride_v_d)

    if HAS_QUERY_START_LOC:  # noqa: SIM102 - a constexpr branch around one of the device
        # Rows of no request: out 0, lse -inf. All programs share them.
        if row_block == 0:
            heads = kv_head * GROUP + tl.arange(0, BLOCK_M)
            for h0 in range(0, GROUP, BLOCK_M):
                in_group = h0 + tl.arange(0, BLOCK_M) < GROUP
                used_tokens = tl.load(query_start_loc_ptr + num_requests)
                for t in range(used_tokens + index, num_tokens, tl.num_programs(0) // head_blocks):
                    pad_out = out_ptr + tl.cast(t, tl.int64) * stride_out_t
                    pad_out += (
                        tl.cast(heads + h0, tl.int64)[:, None] * stride_out_h + offs_dv[None, :]
                    )
                    tl.store(
                        pad_out,
                        tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty),
                        mask=in_group[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
                    )
                    pad_lse = lse_ptr + tl.cast(t, tl.int64) * stride_lse_t
                    pad_lse += tl.cast(heads + h0, tl.int64) * stride_lse_h
                    tl.store(pad_lse, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=in_group)

    if HAS_ITEMS:
        # All four before the branch: behind it the last three would wait for the first.
        request = tl.load(items_ptr + index * 4)
        begin = tl.load(items_ptr + index * 4 + 1)
        end = tl.load(items_ptr + index * 4 + 2)
        splits = tl.load(items_ptr + index * 4 + 3)
        if request < 0:
            return
        slot = index
    else:
        request = index % num_requests
        begin = 0
        end = 0
        splits = 1
        slot = 0

    query_start = request
    query_len = 1
    if HAS_QUERY_START_LOC:
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        if row_block * BLOCK_M >= query_len * GROUP:
            return
    seq_len = tl.load(seq_lens_ptr + request)
    total_len = seq_len
    if CAUSAL or WINDOW > 0:
        total_len = tl.load(total_lens_ptr + request)

    if not HAS_ITEMS:
        split = index // num_requests
        first = 0
        if WINDOW > 0:
            first = visible_start(
                total_len, query_len, 0, WINDOW, SHARD_RANK, SHARD_SIZE, INTERLEAVE
            )
            first = tl.minimum(first, seq_len) // BLOCK_N * BLOCK_N
        tiles = tl.cdiv(seq_len - first, BLOCK_N)
        per = split_tiles(tiles, num_splits)
        splits = tl.maximum(tl.cdiv(tiles, per), 1)
        if split >= splits:
            return
        begin = first + split * per * BLOCK_N
        end = tl.minimum(begin + per * BLOCK_N, seq_len)
        slot = request * num_splits + split

    # Rows that see less than all of the cache, and the range that any row of this block sees.
    row_end = seq_len
    row_start = 0
    if CAUSAL:
        row_end = visible_end(seq_len, total_len, query_len, j, SHARD_RANK, SHARD_SIZE, INTERLEAVE)
        last_j = tl.minimum((row_block * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
        block_end = visible_end(
            seq_len, total_len, query_len, last_j, SHARD_RANK, SHARD_SIZE, INTERLEAVE
        )
        end = tl.minimum(end, block_end)
    if WINDOW > 0:
        row_start = visible_start(
            total_len, query_len, j, WINDOW, SHARD_RANK, SHARD_SIZE, INTERLEAVE
        )
        block_start = visible_start(
            total_len, query_len, row_block * BLOCK_M // GROUP, WINDOW, SHARD_RANK, SHARD_SIZE,
            INTERLEAVE,
        )  # fmt: skip
        begin = tl.maximum(begin, block_start // BLOCK_N * BLOCK_N)

    mask_row = j < query_len
    token = tl.cast(query_start + j, tl.int64)
    head64 = tl.cast(head, tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * stride_q_t + head64[:, None] * stride_q_h + offs_d[None, :],
        mask=mask_row[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    scale = softmax_scale
    if K_SCALE_ON_DEVICE:
        scale *= tl.load(k_scale_ptr + tl.cast(kv_head, tl.int64) * stride_k_scale)
    if V_SCALE_ON_DEVICE:
        v_scale *= tl.load(v_scale_ptr + tl.cast(kv_head, tl.int64) * stride_v_scale)
    # Scores in base 2, but for a soft cap, which is of natural ones.
    row_scale = scale if HAS_SOFTCAP else scale * LOG2E
    if FP8 and q_ptr.dtype.element_ty != tl.float32:
        # bf16 has a wider range than fp16: a power of two brings each row's largest value to
        # between 1 and 2, so that nothing overflows and what underflows is below 2 ** -24.
        down, up = power_of_two(row_max(q))
        q = scaled_to_fp16(q, down)
        row_scale = (row_scale * up)[:, None]
    # fp16 probabilities from 2 ** -24 up: lifted so that small ones keep their digits.
    LIFT: tl.constexpr = 32768.0 if q.dtype == tl.float16 else 1.0

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_tile = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, V_COLUMNS], tl.float32)
    if V_PAIRS:
        # Of the odd columns; acc has the even ones.
        acc1 = tl.zeros([BLOCK_M, V_COLUMNS], tl.float32)
    table = block_table_ptr + tl.cast(request, tl.int64) * stride_bt
    k_head = k_ptr + tl.cast(kv_head, tl.int64) * stride_k_h
    v_head = v_ptr + tl.cast(kv_head, tl.int64) * stride_v_h
    offs_n = tl.arange(0, BLOCK_N)
    # A tile starts at a multiple of BLOCK_N: it lies in one page, or takes whole ones, or (page
    # sizes that are no power of two) neither. In the first two a token's place in its page, but
    # for where the tile starts in it, is the same in every tile and belongs in front of the loop,
    # which else spends most of its instructions on addresses (sm_90, 64 tokens: 634, now 420).
    ONE_PAGE: tl.constexpr = CHUNK == 0 and PAGE_SIZE % BLOCK_N == 0
    FIXED_ROWS: tl.constexpr = CHUNK == 0 and (ONE_PAGE or BLOCK_N % PAGE_SIZE == 0)
    offs_p = tl.arange(0, 1) if ONE_PAGE else offs_n
    k_rows = k_head + k_dims[None, :]
    v_rows = v_head + v_dims[None, :]
    if FIXED_ROWS:
        fixed = tl.cast(offs_n % PAGE_SIZE, tl.int64)[:, None]
        k_rows += fixed * stride_k_t
        v_rows += fixed * stride_v_t
    if begin < end:
        # Page ids run one tile ahead: loaded in the same iteration as K and V they would cost the
        # pipeline a stage (16 x 2k on an H200: 11.3 us carried, 12.3 not). Clamped to the last
        # page in use, since entries past it may hold anything.
        page = tl.load(table + page_index(tl.minimum(begin + offs_p, end - 1), PAGE_SIZE))
        for n0 in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            next_page = tl.load(
                table + page_index(tl.minimum(n0 + BLOCK_N + offs_p, end - 1), PAGE_SIZE)
            )
            position = n0 + offs_n
            if CHUNK > 0:
                # Pieces start at a tile, so runs of CHUNK tokens are whole.
                position = tl.multiple_of(tl.max_contiguous(position, BLOCK_N), BLOCK_N)
            mask_n = position < end
            # Masked past the end so that whatever lies there, NaN too, weighs nothing.
            mask_k = mask_n[:, None]
            if BLOCK_D != HEAD_DIM:
                mask_k = mask_k & (offs_d < HEAD_DIM)[None, :]
            mask_v = mask_n[:, None]
            page64 = tl.cast(page, tl.int64)
            if CHUNK > 0:
                page64 = tl.max_constancy(page64, [CHUNK])
            k_tokens = page64 * stride_k_p
            v_tokens = page64 * stride_v_p
            if ONE_PAGE:
                start = tl.cast(n0 % PAGE_SIZE, tl.int64)
                k_tokens += start * stride_k_t
                v_tokens += start * stride_v_t
            elif not FIXED_ROWS:
                in_page = tl.cast(position % PAGE_SIZE, tl.int64)
                k_tokens += in_page * (CHUNK if DENSE else stride_k_t)
                if CHUNK > 0:
                    # A run of CHUNK tokens is one load of 16 bytes, if it is masked as a whole and
                    # the compiler sees that it is one: the sum's hint chooses the threads' layout,
                    # and AMD's buffer loads are told by the terms, since they add them up anew.
                    mask_v = (position // CHUNK * CHUNK < end)[:, None]
                    run = tl.max_constancy(in_page // CHUNK, [CHUNK])
                    place = tl.max_contiguous(tl.multiple_of(in_page % CHUNK, [CHUNK]), [CHUNK])
                    v_tokens = tl.max_contiguous(v_tokens + (run * stride_v_t + place), [CHUNK])
                else:
                    v_tokens += in_page * stride_v_t
            if V_COLUMNS != V_WIDTH:
                mask_v = mask_v & (offs_v < V_WIDTH)[None, :]
            k = tl.load(k_rows + k_tokens[:, None], mask=mask_k, other=0.0)
            v_at = v_rows + v_tokens[:, None]
            if DENSE:
                v_at = tl.max_contiguous(tl.multiple_of(v_at, [16, 1]), [CHUNK, 1])
            if V_PAIRS:
                v, v1 = unpack_fp8(tl.load(v_at, mask=mask_v, other=0), q.dtype)
            else:
                v = tl.load(v_at, mask=mask_v, other=0.0)
            if FP8:
                k = k.to(q.dtype)
                v = v.to(q.dtype)
            if CHUNK > 0:
                # What lies past the end in the last run.
                v = tl.where(mask_n[:, None], v, 0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * row_scale
            if HAS_SOFTCAP:
                scores = soft_cap(scores, softcap) * LOG2E
            visible = mask_n[None, :]
            if CAUSAL:
                visible = visible & (position[None, :] < row_end[:, None])
            if WINDOW > 0:
                visible = visible & (position[None, :] >= row_start[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            p, alpha, m_i, l_tile = softmax_update(
                scores, m_i, l_tile, MAY_BE_EMPTY=CAUSAL or WINDOW > 0
            )
            p = (p * LIFT).to(v.dtype)
            acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
            if V_PAIRS:
                acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision="ieee")
            page = next_page

    l_i = tl.sum(l_tile, 1)
    if V_PAIRS:
        acc = tl.join(acc, acc1).reshape(BLOCK_M, BLOCK_DV)

    write_result = splits == 1
    if HAS_SINKS:  # noqa: SIM102 - a constexpr branch around one of the device
        if write_result:
            sink = tl.load(sinks_ptr + head, mask=mask_row, other=float("-inf")) * LOG2E
            _, alpha, m_i, l_i = merge_step(sink, m_i, l_i, BASE_2=True)
            acc = acc * alpha[:, None]
    seen = l_i > 0.0
    acc = acc * tl.where(seen, v_scale / LIFT / tl.where(seen, l_i, 1.0), 0.0)[:, None]
    lse2 = tl.where(seen, m_i + tl.log2(tl.where(seen, l_i, 1.0)), float("-inf"))
    mask_out = mask_row[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    if write_result:
        out = out_ptr + token[:, None] * stride_out_t + head64[:, None] * stride_out_h
        tl.store(out + offs_dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask_out)
        tl.store(lse_ptr + token * stride_lse_t + head64 * stride_lse_h, lse2 * LN2, mask=mask_row)
    elif HAS_PARTIALS:
        if HAS_QUERY_START_LOC:
            # A request with more query tokens than max_query_len may not write into its neighbour.
            mask_row &= j < partial_query_len
            mask_out &= mask_row[:, None]
        partial = (tl.cast(slot, tl.int64) * partial_query_len + j) * (NUM_KV_HEADS * GROUP) + head
        tl.store(
            partial_out_ptr + partial[:, None] * HEAD_DIM_V + offs_dv[None, :], acc, mask=mask_out
        )
        tl.store(partial_lse_ptr + partial, lse2, mask=mask_row)


@triton.jit
def _reduce_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    seq_lens_ptr,
    total_lens_ptr,
    query_start_loc_ptr,
    sinks_ptr,
    split_requests_ptr,
    out_ptr,
    lse_ptr,
    num_splits,
    max_query_len,
    partial_query_len,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    HAS_QUERY_START_LOC: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARD_RANK: tl.constexpr,
    SHARD_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WAIT_LAUNCH: tl.constexpr,
    EARLY_LAUNCH: tl.constexpr,
):
    """Grid (split requests x query tokens, query heads, column blocks): merge a row's partials.

    Under dependent launch each program waits for the decode kernel, those with nothing to merge
    too: this kernel's end is all that the kernel after it waits for, and unsplit rows are the
    decode kernel's.
    """
    if EARLY_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    entry = tl.program_id(0) // max_query_len
    j = tl.program_id(0) % max_query_len
    head = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    if HAS_ITEMS:
        request = tl.load(split_requests_ptr + entry * 4)
        if request < 0:
            if WAIT_LAUNCH:
                tl.extra.cuda.gdc_wait()
            return
        first = tl.load(split_requests_ptr + entry * 4 + 1)
        splits = tl.load(split_requests_ptr + entry * 4 + 2)
    else:
        request = entry
        seq_len = tl.load(seq_lens_ptr + request)
        begin = 0
        if WINDOW > 0:
            query_len = 1
            if HAS_QUERY_START_LOC:
                query_len = tl.load(query_start_loc_ptr + request + 1)
                query_len -= tl.load(query_start_loc_ptr + request)
            total_len = tl.load(total_lens_ptr + request)
            begin = visible_start(
                total_len, query_len, 0, WINDOW, SHARD_RANK, SHARD_SIZE, INTERLEAVE
            )
            begin = tl.minimum(begin, seq_len) // TILE * TILE
        tiles = tl.cdiv(seq_len - begin, TILE)
        splits = tl.maximum(tl.cdiv(tiles, split_tiles(tiles, num_splits)), 1)
        if splits == 1:
            if WAIT_LAUNCH:
                tl.extra.cuda.gdc_wait()
            return
        first = request * num_splits
    query_start = request
    if HAS_QUERY_START_LOC:
        query_start = tl.load(query_start_loc_ptr + request)
        if j >= tl.load(query_start_loc_ptr + request + 1) - query_start:
            if WAIT_LAUNCH:
                tl.extra.cuda.gdc_wait()
            return
    if WAIT_LAUNCH:
        # Started beside the decode kernel: its partials are there only from here on.
        tl.extra.cuda.gdc_wait()

    offs_s = tl.arange(0, BLOCK_S)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_C], tl.float32)
    for s0 in range(0, splits, BLOCK_S):
        s = s0 + offs_s
        mask_s = s < splits
        partial = (tl.cast(first + s, tl.int64) * partial_query_len + j) * NUM_Q_HEADS + head
        lse2 = tl.load(partial_lse_ptr + partial, mask=mask_s, other=float("-inf"))
        part = tl.load(
            partial_out_ptr + partial[:, None] * HEAD_DIM_V + column[None, :],
            mask=mask_s[:, None] & (column < HEAD_DIM_V)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m_i, tl.max(lse2, 0))
        weight = merge_weight(lse2, m_new)
        alpha = merge_weight(m_i, m_new)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(weight, 0)
        m_i = m_new
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2E
        _, alpha, m_i, l_i = merge_step(sink, m_i, l_i, BASE_2=True)
        acc = acc * alpha
    seen = l_i > 0.0
    acc = acc * tl.where(seen, 1.0 / tl.where(seen, l_i, 1.0), 0.0)
    lse = tl.where(seen, (m_i + tl.log2(tl.where(seen, l_i, 1.0))) * LN2, float("-inf"))
    token = tl.cast(query_start + j, tl.int64)
    out = out_ptr + token * stride_out_t + tl.cast(head, tl.int64) * stride_out_h
    tl.store(out + column, acc.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM_V)
    if tl.program_id(2) == 0:
        lse_at = lse_ptr + token * stride_lse_t + tl.cast(head, tl.int64) * stride_lse_h
        tl.store(lse_at + tl.arange(0, 1), lse)
