"""Attention of query rows to contiguous K and V with cu_seqlens, built like a prefill kernel.

    out[t, h] = sum_s softmax_s(score[t, h, s]) v[s, h // G]
    lse[t, h] = ln sum_s exp(score[t, h, s]),  score = softmax_scale q[t, h] . k[s, h // G]

It stands for the varlen attention that a gathering decode path calls after its gather (AITER's
flash_attn_varlen_func on ROCm): a tile holds BLOCK_M query rows of one query head, and a program
walks over all keys of its request. So the one row of a decode step fills 1/BLOCK_M of a tile, each
query head of a KV head reads K and V again, and no request is split: what such a kernel costs when
it is given decode work.

Source: FlashAttention-2's forward loop (arXiv:2307.08691). Written here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_lab.kernels.primitives import LN2, LOG2E, softmax_update, visible_end


@triton.jit
def _varlen_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cu_seqlens_ptr,
    total_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    lse_ptr,
    softmax_scale,
    num_requests,
    num_tokens,
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HAS_QUERY_START_LOC: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHARD_RANK: tl.constexpr,
    SHARD_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (query heads, row blocks, requests): BLOCK_M query rows of one head against all keys.

    With query_start_loc one more step on the last axis writes the rows of no request.
    """
    head = tl.program_id(0).to(tl.int64)
    row_block = tl.program_id(1)
    request = tl.program_id(2)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    out_head = out_ptr + head * stride_out_h
    lse_head = lse_ptr + head * stride_lse_h

    # The outer condition is decided by the compiler, the inner one by the program.
    if HAS_QUERY_START_LOC:  # noqa: SIM102
        if request == num_requests:
            used_tokens = tl.load(query_start_loc_ptr + num_requests)
            step = tl.num_programs(1) * BLOCK_M
            for t0 in range(used_tokens + row_block * BLOCK_M, num_tokens, step):
                token = (t0 + offs_m).to(tl.int64)
                mask_m = token < num_tokens
                tl.store(
                    out_head + token[:, None] * stride_out_t + offs_dv[None, :],
                    tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty),
                    mask=mask_m[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
                )
                minus_inf = tl.full([BLOCK_M], float("-inf"), tl.float32)
                tl.store(lse_head + token * stride_lse_t, minus_inf, mask=mask_m)
            return

    query_start = request
    query_len = 1
    if HAS_QUERY_START_LOC:
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    if row_block * BLOCK_M >= query_len:
        return
    first = tl.load(cu_seqlens_ptr + request)
    count = tl.load(cu_seqlens_ptr + request + 1) - first
    j = row_block * BLOCK_M + offs_m
    end = count
    row_end = count
    if CAUSAL:
        total_len = tl.load(total_lens_ptr + request)
        row_end = visible_end(count, total_len, query_len, j, SHARD_RANK, SHARD_SIZE, INTERLEAVE)
        last_j = tl.minimum(row_block * BLOCK_M + BLOCK_M, query_len) - 1
        end = visible_end(count, total_len, query_len, last_j, SHARD_RANK, SHARD_SIZE, INTERLEAVE)

    mask_m = j < query_len
    token = (query_start + j).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * stride_q_t + head * stride_q_h + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    k_head = k_ptr + head // GROUP * stride_k_h
    v_head = v_ptr + head // GROUP * stride_v_h
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for n0 in tl.range(0, end, BLOCK_N, num_stages=STAGES):
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
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (softmax_scale * LOG2E)
        visible = mask_n[None, :]
        if CAUSAL:
            visible = visible & (position[None, :] < row_end[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        p, alpha, m_i, l_i = softmax_update(scores, m_i, l_i, MAY_BE_EMPTY=CAUSAL)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    seen = l_i > 0.0
    total = tl.where(seen, l_i, 1.0)
    acc = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
    lse = tl.where(seen, (m_i + tl.log2(total)) * LN2, float("-inf"))
    tl.store(
        out_head + token[:, None] * stride_out_t + offs_dv[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
    )
    tl.store(lse_head + token * stride_lse_t, lse, mask=mask_m)
