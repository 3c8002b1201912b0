"""Gather a paged KV cache into contiguous K and V, in a plan and one of two copies.

    k[cu_seqlens[b] + i] = k_cache[block_table[b, p // page_size], p % page_size]
    p = seq_starts[b] + i

`_plan_gather_kernel` decides which request's tokens lie where in the result, once a step for all
layers. `_gather_per_token_kernel` is the gather that vLLM runs on ROCm: one program for each token
and head. `_gather_per_page_kernel` is the best we know: one program copies a whole page (several,
where they are small) of all heads, so that what lies together in memory moves together.

Source: `_gather_per_token_kernel` after cp_mha_gather_cache_kernel of vLLM 0.33.0,
vllm/v1/attention/backends/rocm_aiter_fa.py (Apache-2.0). The others are written here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_lab.kernels.rows import copy_rows


@triton.jit
def _plan_gather_kernel(
    seq_lens_ptr,
    seq_starts_ptr,
    cu_seqlens_ptr,
    cu_units_ptr,
    unit_requests_ptr,
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
    hold the tokens, num_rows at most, and the units of all requests before each.
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
            tl.store(cu_units_ptr + 1 + b, unit_ends.to(tl.int32), mask=mask_b)
        before = (unit_ends[None, :] <= unit[:, None]) & mask_b[None, :]
        request += tl.sum(before.to(tl.int32), 1)
    request = tl.where(request < num_requests, request, -1)
    tl.store(unit_requests_ptr + unit, request, mask=unit < num_units)


@triton.jit
def _gather_per_token_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    block_table_ptr,
    seq_starts_ptr,
    cu_seqlens_ptr,
    unit_requests_ptr,
    stride_k_p,
    stride_k_t,
    stride_k_h,
    stride_v_p,
    stride_v_t,
    stride_v_h,
    stride_bt,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SEQ_STARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Grid (tokens, KV heads): copy one head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    request = tl.load(unit_requests_ptr + token).to(tl.int64)
    if request < 0:
        return
    position = token - tl.load(cu_seqlens_ptr + request)
    if HAS_SEQ_STARTS:
        position += tl.maximum(tl.load(seq_starts_ptr + request), 0)
    page = tl.load(block_table_ptr + request * stride_bt + position // PAGE_SIZE).to(tl.int64)
    in_page = position % PAGE_SIZE
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    k = tl.load(
        k_cache_ptr + page * stride_k_p + in_page * stride_k_t + head * stride_k_h + offs_d,
        mask=offs_d < HEAD_DIM,
        other=0.0,
    )
    v = tl.load(
        v_cache_ptr + page * stride_v_p + in_page * stride_v_t + head * stride_v_h + offs_dv,
        mask=offs_dv < HEAD_DIM_V,
        other=0.0,
    )
    row = token * NUM_KV_HEADS + head
    k_row = k_ptr + row * HEAD_DIM + offs_d
    v_row = v_ptr + row * HEAD_DIM_V + offs_dv
    tl.store(k_row, k.to(k_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)
    tl.store(v_row, v.to(v_ptr.dtype.element_ty), mask=offs_dv < HEAD_DIM_V)


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
    stride_k_p,
    stride_k_t,
    stride_k_h,
    stride_v_p,
    stride_v_t,
    stride_v_h,
    stride_bt,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_SEQ_STARTS: tl.constexpr,
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
    copy_rows(
        k_cache_ptr + page * stride_k_p + in_page * stride_k_t + head * stride_k_h,
        k_ptr + target * HEAD_DIM,
        used,
        HEAD_DIM=HEAD_DIM,
        BLOCK_D=BLOCK_D,
    )
    copy_rows(
        v_cache_ptr + page * stride_v_p + in_page * stride_v_t + head * stride_v_h,
        v_ptr + target * HEAD_DIM_V,
        used,
        HEAD_DIM=HEAD_DIM_V,
        BLOCK_D=BLOCK_DV,
    )
