"""Attention of query rows to contiguous K and V with cu_seqlens, as a prefill or a decode kernel.

    out[t, h] = sum_s softmax_s(score[t, h, s]) v[s, h // G]
    lse[t, h] = ln sum_s exp(score[t, h, s]),  score = softmax_scale q[t, h] . k[s, h // G]

One kernel, two shapes of work. With PACK 1 and one split it is the varlen attention that a
gathering decode path calls after its gather (AITER's flash_attn_varlen_func on ROCm): a tile holds
BLOCK_M query rows of one query head, and a program walks over all keys of its request. So the one
row of a decode step fills 1/BLOCK_M of a tile, each query head of a KV head reads K and V again,
and no request is split: what such a kernel costs when it is given decode work. With PACK = G and
several splits it is what one would write for decode: the heads of a KV head share a tile, and the
pieces of a request are merged by `_reduce_kernel` of dcp_lab/kernels/decode.py.

Source: FlashAttention-2's forward loop (arXiv:2307.08691), flash-decoding. Written here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_lab.kernels.primitives import (
    LN2,
    LOG2E,
    merge_step,
    soft_cap,
    softmax_update,
    split_tiles,
    visible_end,
    visible_start,
)


@triton.jit
def _varlen_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cu_seqlens_ptr,
    counts_ptr,
    total_lens_ptr,
    query_start_loc_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    softmax_scale,
    softcap,
    num_requests,
    num_tokens,
    num_splits,
    partial_query_len,
    stride_q_t,
    stride_q_h,
    stride_k_n,
    stride_k_h,
    stride_v_n,
    stride_v_h,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HAS_QUERY_START_LOC: tl.constexpr,
    HAS_PARTIALS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARD_RANK: tl.constexpr,
    SHARD_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY_LAUNCH: tl.constexpr,
):
    """Grid (query heads / PACK, row blocks x splits, requests), row blocks faster than splits.

    Rows are the PACK heads of a query token, then those of the next. With query_start_loc one more
    step on the last axis writes the rows of no request.
    """
    if EARLY_LAUNCH:
        # The reduce kernel may start now; it waits itself.
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    row_blocks = tl.num_programs(1) // num_splits
    row_block = tl.program_id(1) % row_blocks
    split = tl.program_id(1) // row_blocks
    request = tl.program_id(2)
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    j = row // PACK
    head = (tile * PACK + row % PACK).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)

    # The outer condition is decided by the compiler, the inner one by the program.
    if HAS_QUERY_START_LOC:  # noqa: SIM102
        if request == num_requests:
            used_tokens = tl.load(query_start_loc_ptr + num_requests)
            padding = (num_tokens - used_tokens) * PACK
            for r0 in range(tl.program_id(1) * BLOCK_M, padding, tl.num_programs(1) * BLOCK_M):
                r = r0 + tl.arange(0, BLOCK_M)
                mask_r = r < padding
                pad_token = (used_tokens + r // PACK).to(tl.int64)
                pad_head = (tile * PACK + r % PACK).to(tl.int64)
                pad_out = out_ptr + pad_token * stride_out_t + pad_head * stride_out_h
                tl.store(
                    pad_out[:, None] + offs_dv[None, :],
                    tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty),
                    mask=mask_r[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
                )
                pad_lse = lse_ptr + pad_token * stride_lse_t + pad_head * stride_lse_h
                tl.store(pad_lse, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=mask_r)
            return

    query_start = request
    query_len = 1
    if HAS_QUERY_START_LOC:
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    if row_block * BLOCK_M >= query_len * PACK:
        return
    first = tl.load(cu_seqlens_ptr + request)
    count = tl.load(counts_ptr + request)
    total_len = count
    if CAUSAL or WINDOW > 0:
        total_len = tl.load(total_lens_ptr + request)

    # This piece, cut as the reduce kernel takes it to be: `per` tiles from the first seen one on.
    begin = 0
    if WINDOW > 0:
        begin = visible_start(total_len, query_len, 0, WINDOW, SHARD_RANK, SHARD_SIZE, INTERLEAVE)
        begin = tl.minimum(begin, count) // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(count - begin, BLOCK_N)
    per = split_tiles(tiles, num_splits)
    splits = tl.maximum(tl.cdiv(tiles, per), 1)
    if split >= splits:
        return
    begin += split * per * BLOCK_N
    end = tl.minimum(begin + per * BLOCK_N, count)

    # Rows that see less than all of it, and the range that any row of this block sees.
    row_end = count
    row_start = 0
    if CAUSAL:
        row_end = visible_end(count, total_len, query_len, j, SHARD_RANK, SHARD_SIZE, INTERLEAVE)
        last_j = tl.minimum((row_block * BLOCK_M + BLOCK_M - 1) // PACK, query_len - 1)
        block_end = visible_end(
            count, total_len, query_len, last_j, SHARD_RANK, SHARD_SIZE, INTERLEAVE
        )
        end = tl.minimum(end, block_end)
    if WINDOW > 0:
        row_start = visible_start(
            total_len, query_len, j, WINDOW, SHARD_RANK, SHARD_SIZE, INTERLEAVE
        )
        block_start = visible_start(
            total_len, query_len, row_block * BLOCK_M // PACK, WINDOW, SHARD_RANK, SHARD_SIZE,
            INTERLEAVE,
        )  # fmt: skip
        begin = tl.maximum(begin, block_start // BLOCK_N * BLOCK_N)

    mask_m = j < query_len
    token = (query_start + j).to(tl.int64)
    q_row = q_ptr + token * stride_q_t + head * stride_q_h
    q = tl.load(
        q_row[:, None] + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    kv_head = (tile * PACK // GROUP).to(tl.int64)
    k_head = k_ptr + kv_head * stride_k_h
    v_head = v_ptr + kv_head * stride_v_h
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_tile = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for n0 in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = n0 + tl.arange(0, BLOCK_N)
        mask_n = position < end
        n = (first + position).to(tl.int64)
        k = tl.load(
            k_head + n[:, None] * stride_k_n + offs_d[None, :],
            mask=mask_n[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        )
        v = tl.load(
            v_head + n[:, None] * stride_v_n + offs_dv[None, :],
            mask=mask_n[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SOFTCAP:
            scores = soft_cap(scores * softmax_scale, softcap) * LOG2E
        else:
            scores *= softmax_scale * LOG2E
        visible = mask_n[None, :]
        if CAUSAL:
            visible = visible & (position[None, :] < row_end[:, None])
        if WINDOW > 0:
            visible = visible & (position[None, :] >= row_start[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        p, alpha, m_i, l_tile = softmax_update(
            scores, m_i, l_tile, MAY_BE_EMPTY=CAUSAL or WINDOW > 0
        )
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    l_i = tl.sum(l_tile, 1)
    write_result = splits == 1
    if HAS_SINKS:  # noqa: SIM102 - a constexpr branch around one of the device
        if write_result:
            sink = tl.load(sinks_ptr + head, mask=mask_m, other=float("-inf")) * LOG2E
            _, alpha, m_i, l_i = merge_step(sink, m_i, l_i, BASE_2=True)
            acc = acc * alpha[:, None]
    seen = l_i > 0.0
    total = tl.where(seen, l_i, 1.0)
    acc = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
    lse2 = tl.where(seen, m_i + tl.log2(total), float("-inf"))
    mask_out = mask_m[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    if write_result:
        out_row = out_ptr + token * stride_out_t + head * stride_out_h
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_row[:, None] + offs_dv[None, :], out, mask=mask_out)
        tl.store(lse_ptr + token * stride_lse_t + head * stride_lse_h, lse2 * LN2, mask=mask_m)
    elif HAS_PARTIALS:
        if HAS_QUERY_START_LOC:
            # A request with more query tokens than max_query_len may not write into its neighbour.
            mask_m &= j < partial_query_len
            mask_out &= mask_m[:, None]
        slot = (request * num_splits + split).to(tl.int64)
        partial = (slot * partial_query_len + j) * NUM_Q_HEADS + head
        partial_row = partial_out_ptr + partial * HEAD_DIM_V
        tl.store(partial_row[:, None] + offs_dv[None, :], acc, mask=mask_out)
        tl.store(partial_lse_ptr + partial, lse2, mask=mask_m)
