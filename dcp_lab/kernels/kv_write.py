"""Write new tokens' K and V into their slots of a paged cache.

    cache[slot // page_size, slot % page_size, h] = new[t, h] / scale,  slot = slot_mapping[t] >= 0

Each program copies a tile of rows, a row being one head of one token. The scale is 1 unless the
cache is fp8. Written here; the slot rule is that of vLLM's reshape_and_cache_flash.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_lab.kernels.rows import k_columns, move_rows, scale_of, v_columns, v_token


@triton.jit
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_scale,
    v_scale,
    num_rows,
    num_slots,
    stride_key_t,
    stride_key_h,
    stride_value_t,
    stride_value_h,
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
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    FP8_BIAS: tl.constexpr,
    K_SCALE_ON_DEVICE: tl.constexpr,
    V_SCALE_ON_DEVICE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Grid (tokens x KV heads / BLOCK_R,): copy BLOCK_R rows of K and of V.

    With CHUNK (0: NHD or HND) the caches are SHUFFLE; with FP8_BIAS (0: none) they are bytes.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = row // NUM_KV_HEADS
    head = row % NUM_KV_HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=row < num_rows, other=-1)
    used = (slot >= 0) & (slot < num_slots)
    slot = tl.where(used, slot, 0)
    page = slot // PAGE_SIZE
    in_page = slot % PAGE_SIZE
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    move_rows(
        key_ptr + token * stride_key_t + head * stride_key_h,
        k_cache_ptr + page * stride_k_p + in_page * stride_k_t + head * stride_k_h,
        used,
        offs_d,
        k_columns(offs_d, stride_k_c, CHUNK),
        scale_of(k_scale, k_scale_ptr, stride_k_scale, head, K_SCALE_ON_DEVICE),
        DECODE_BIAS=0,
        ENCODE_BIAS=FP8_BIAS,
        HEAD_DIM=HEAD_DIM,
    )
    move_rows(
        value_ptr + token * stride_value_t + head * stride_value_h,
        v_cache_ptr + page * stride_v_p + v_token(in_page, stride_v_t, CHUNK) + head * stride_v_h,
        used,
        offs_dv,
        v_columns(offs_dv, stride_v_d, CHUNK),
        scale_of(v_scale, v_scale_ptr, stride_v_scale, head, V_SCALE_ON_DEVICE),
        DECODE_BIAS=0,
        ENCODE_BIAS=FP8_BIAS,
        HEAD_DIM=HEAD_DIM_V,
    )
