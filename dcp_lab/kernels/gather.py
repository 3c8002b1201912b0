"""Gather a paged KV cache into contiguous K and V, in a plan and one of three copies.

    k[cu_seqlens[b] + i] = scale k_cache[block_table[b, p // page_size], p % page_size]
    p = seq_starts[b] + i, scale 1 unless the cache is fp8

`_plan_gather_kernel` decides which request's tokens lie where in the result, once a step for all
layers. `_gather_tokens_kernel` copies single tokens and is two gathers by its grid: the published
study's, no more programs than compute units, which loop, so that each waits for one token's pages
before it asks for the next one's; and the later one of vLLM on ROCm, one program for each token
and head. `_gather_per_page_kernel` is the best we know: one program copies a whole page (several,
where they are small) of all heads, so that what lies together in memory moves together.

Source: the grids of `_gather_tokens_kernel` are those of cp_mha_gather_cache_kernel in
vllm/v1/attention/backends/rocm_aiter_fa.py (Apache-2.0): in the version with class
AiterFlashAttentionDcpMetadata (vLLM PR 29502) and in vLLM 0.33.0. Written here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_lab.kernels.rows import k_columns, move_rows, scale_of, v_columns, v_token


@triton.jit
def _plan_gather_kernel(
    seq_lens_ptr,
    seq_starts_ptr,
    cu_seqlens_ptr,
    cu_units_ptr,
    unit_requests_ptr,
    counts_ptr,
    num_requests,
    num_rows,
    num_units,
    table_tokens,
    UNIT: tl.constexpr,
    HAS_SEQ_STARTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Grid (units / BLOCK_U,): name each unit's request, -1 where there is none.

    A unit is UNIT tokens of a request that start at a multiple of UNIT. cu_seqlens and cu_units
    hold the tokens, num_rows at most, and the units of all requests before each; counts how many
    rows each request has.
    """
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    # Requests whose units end at or before this one, so the index of its own.
    request = tl.zeros([BLOCK_U], tl.int32)
    # int64: lengths that the table or the rows cut off later may add up to more than 2^31.
    tokens = tl.zeros([1], tl.int64)
    units = tl.zeros([1], tl.int64)
    if tl.program_id(0) == 0:
        tl.store(cu_seqlens_ptr, 0)
        tl.store(cu_units_ptr, 0)
    for b0 in range(0, num_requests, BLOCK_B):
        b = b0 + tl.arange(0, BLOCK_B)
        mask_b = b < num_requests
        count = tl.load(seq_lens_ptr + b, mask=mask_b, other=0).to(tl.int64)
        start = tl.zeros([BLOCK_B], tl.int64)
        if HAS_SEQ_STARTS:
            start = tl.load(seq_starts_ptr + b, mask=mask_b, other=0).to(tl.int64)
            start = tl.maximum(start, 0)
        count = tl.maximum(tl.minimum(count, table_tokens - start), 0)
        ends = tokens + tl.cumsum(count, 0)
        tokens += tl.sum(count, 0)
        used = tl.where(count > 0, (start + count - 1) // UNIT - start // UNIT + 1, 0)
        unit_ends = units + tl.cumsum(used, 0)
        units += tl.sum(used, 0)
        if tl.program_id(0) == 0:
            rows = tl.minimum(ends, num_rows).to(tl.int32)
            tl.store(cu_seqlens_ptr + 1 + b, rows, mask=mask_b)
            first = tl.minimum(ends - count, num_rows).to(tl.int32)
            tl.store(counts_ptr + b, rows - first, mask=mask_b)
            tl.store(cu_units_ptr + 1 + b, unit_ends.to(tl.int32), mask=mask_b)
        before = (unit_ends[None, :] <= unit[:, None]) & mask_b[None, :]
        request += tl.sum(before.to(tl.int32), 1)
    request = tl.where(request < num_requests, request, -1)
    tl.store(unit_requests_ptr + unit, request, mask=unit < num_units)


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_tokens_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    block_table_ptr,
    seq_starts_ptr,
    cu_seqlens_ptr,
    unit_requests_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_scale,
    v_scale,
    num_tokens,
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
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    FP8_BIAS: tl.constexpr,
    K_SCALE_ON_DEVICE: tl.constexpr,
    V_SCALE_ON_DEVICE: tl.constexpr,
    HAS_SEQ_STARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Copy one head of one token at a time: grid (tokens, KV heads) or a smaller one, which loops.

    With grid (min(tokens, compute units), 1) this is the published gather, whose inner loop takes
    blocks of next_power_of_2(head_dim) elements; num_tokens is what its host has to read.
    """
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    for index in tl.range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = tl.zeros([1], tl.int64) + index
        request = tl.load(unit_requests_ptr + token).to(tl.int64)
        # -1 behind the last request's tokens.
        used = request >= 0
        request = tl.maximum(request, 0)
        position = token - tl.load(cu_seqlens_ptr + request)
        if HAS_SEQ_STARTS:
            position += tl.maximum(tl.load(seq_starts_ptr + request), 0)
        entry = block_table_ptr + request * stride_bt + position // PAGE_SIZE
        page = tl.load(entry, mask=used, other=0).to(tl.int64)
        in_page = position % PAGE_SIZE
        k_page = k_cache_ptr + page * stride_k_p + in_page * stride_k_t
        v_page = v_cache_ptr + page * stride_v_p + v_token(in_page, stride_v_t, CHUNK)
        for h in range(tl.program_id(1), NUM_KV_HEADS, tl.num_programs(1)):
            head = tl.zeros([1], tl.int64) + h
            target = token * NUM_KV_HEADS + head
            move_rows(
                k_page + head * stride_k_h,
                k_ptr + target * HEAD_DIM,
                used,
                k_columns(offs_d, stride_k_c, CHUNK),
                offs_d,
                scale_of(k_scale, k_scale_ptr, stride_k_scale, head, K_SCALE_ON_DEVICE),
                DECODE_BIAS=FP8_BIAS,
                ENCODE_BIAS=0,
                HEAD_DIM=HEAD_DIM,
            )
            move_rows(
                v_page + head * stride_v_h,
                v_ptr + target * HEAD_DIM_V,
                used,
                v_columns(offs_dv, stride_v_d, CHUNK),
                offs_dv,
                scale_of(v_scale, v_scale_ptr, stride_v_scale, head, V_SCALE_ON_DEVICE),
                DECODE_BIAS=FP8_BIAS,
                ENCODE_BIAS=0,
                HEAD_DIM=HEAD_DIM_V,
            )


@triton.jit
def _gather_per_page_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    block_table_ptr,
    seq_starts_ptr,
    cu_seqlens_ptr,
    cu_units_ptr,
    unit_requests_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_scale,
    v_scale,
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
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    FP8_BIAS: tl.constexpr,
    K_SCALE_ON_DEVICE: tl.constexpr,
    V_SCALE_ON_DEVICE: tl.constexpr,
    HAS_SEQ_STARTS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Grid (units, rows of a unit / BLOCK_R): copy BLOCK_R rows, heads fastest, of one unit."""
    unit = tl.program_id(0)
    request = tl.load(unit_requests_ptr + unit).to(tl.int64)
    if request < 0:
        return
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = (row % NUM_KV_HEADS).to(tl.int64)
    first = tl.load(cu_seqlens_ptr + request)
    count = tl.load(cu_seqlens_ptr + request + 1) - first
    start = 0
    if HAS_SEQ_STARTS:
        start = tl.maximum(tl.load(seq_starts_ptr + request), 0)
    index = start // UNIT + unit - tl.load(cu_units_ptr + request)
    position = index * UNIT + row // NUM_KV_HEADS
    used = (row < UNIT * NUM_KV_HEADS) & (position >= start) & (position - start < count)
    table = block_table_ptr + request * stride_bt
    page = tl.load(table + position // PAGE_SIZE, mask=used, other=0).to(tl.int64)
    in_page = (position % PAGE_SIZE).to(tl.int64)
    target = (first + position - start).to(tl.int64) * NUM_KV_HEADS + head
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    move_rows(
        k_cache_ptr + page * stride_k_p + in_page * stride_k_t + head * stride_k_h,
        k_ptr + target * HEAD_DIM,
        used,
        k_columns(offs_d, stride_k_c, CHUNK),
        offs_d,
        scale_of(k_scale, k_scale_ptr, stride_k_scale, head, K_SCALE_ON_DEVICE),
        DECODE_BIAS=FP8_BIAS,
        ENCODE_BIAS=0,
        HEAD_DIM=HEAD_DIM,
    )
    move_rows(
        v_cache_ptr + page * stride_v_p + v_token(in_page, stride_v_t, CHUNK) + head * stride_v_h,
        v_ptr + target * HEAD_DIM_V,
        used,
        v_columns(offs_dv, stride_v_d, CHUNK),
        offs_dv,
        scale_of(v_scale, v_scale_ptr, stride_v_scale, head, V_SCALE_ON_DEVICE),
        DECODE_BIAS=FP8_BIAS,
        ENCODE_BIAS=0,
        HEAD_DIM=HEAD_DIM_V,
    )
