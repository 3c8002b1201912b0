"""Write new tokens' K and V into their slots of a paged cache.

    cache[slot // page_size, slot % page_size, h] = new[t, h],  slot = slot_mapping[t] >= 0

Each program copies a tile of rows, a row being one head of one token. Written here; the slot rule
is that of vLLM's reshape_and_cache_flash.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_lab.kernels.rows import copy_rows


@triton.jit
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    num_rows,
    num_slots,
    stride_key_t,
    stride_key_h,
    stride_value_t,
    stride_value_h,
    stride_k_p,
    stride_k_t,
    stride_k_h,
    stride_v_p,
    stride_v_t,
    stride_v_h,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Grid (tokens x KV heads / BLOCK_R,): copy BLOCK_R rows of K and of V."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = row // NUM_KV_HEADS
    head = row % NUM_KV_HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=row < num_rows, other=-1)
    used = (slot >= 0) & (slot < num_slots)
    slot = tl.where(used, slot, 0)
    page = slot // PAGE_SIZE
    in_page = slot % PAGE_SIZE
    copy_rows(
        key_ptr + token * stride_key_t + head * stride_key_h,
        k_cache_ptr + page * stride_k_p + in_page * stride_k_t + head * stride_k_h,
        used,
        HEAD_DIM=HEAD_DIM,
        BLOCK_D=BLOCK_D,
    )
    copy_rows(
        value_ptr + token * stride_value_t + head * stride_value_h,
        v_cache_ptr + page * stride_v_p + in_page * stride_v_t + head * stride_v_h,
        used,
        HEAD_DIM=HEAD_DIM_V,
        BLOCK_D=BLOCK_DV,
    )
