"""write_kv: put new tokens' K and V into a paged cache."""

from __future__ import annotations

import torch
import triton

from dcp_lab.kernels import INTERPRETED, interpreter_safe
from dcp_lab.kernels import kv_write as kernels
from dcp_lab.kernels.launch import BoundCalls, Launch, call_key
from dcp_lab.ops.arguments import check_kv_cache
from dcp_lab.ops.checks import FLOAT_DTYPES, check_tensor
from dcp_lab.ops.copies import FP8_BIAS, cache_arguments, choose_copy_config
from dcp_lab.ops.device import current_device

_CALLS = BoundCalls()


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> None:
    """Write each token's K and V into its slot of the paged caches, in place.

    k_cache[slot // page, slot % page] = key[t] / k_scale,  slot = slot_mapping[t], skipped where
    it is -1

    Args:
        key: [T, Hkv, D] fp32, fp16 or bf16, last dimension contiguous; cast to the cache's dtype.
        value: [T, Hkv, Dv] in key's dtype.
        k_cache: [P, page, Hkv, D] (NHD), [P, Hkv, page, D] (HND) or [P, Hkv, D/x, page, x]
            (SHUFFLE), x = 16 / itemsize; fp32, fp16, bf16 or fp8 (e4m3fn, e4m3fnuz), any strides
            with a contiguous last dimension.
        v_cache: The same with Dv, [P, Hkv, page/x, Dv, x] under SHUFFLE.
        slot_mapping: int64 [T], page * page_size + place in the page; -1 skips the token.
        kv_layout: 'NHD', 'HND' or 'SHUFFLE'. Default: 'NHD'.
        k_scale, v_scale: Of an fp8 cache: a float, or an fp32 tensor of 1 element or [Hkv], read
            on the device. Default: 1.

    Raises:
        ValueError: An argument breaks the contract; the message names it, what was expected and
            what was given.

    Notes:
        One launch, no sync, no allocation: safe under graph capture. A call with the arguments of
        an earlier one (the same memory and shapes) is not checked again.
        fp8 is rounded to nearest, ties to even; what is over the format's largest value (448, or
        240 for e4m3fnuz) becomes it, NaN stays NaN.
        Slots cannot be checked without a sync. One outside the cache (below 0, or
        P * page_size and above) writes nothing; of two tokens with the same slot either may win.
        CPU: runs through Triton's interpreter; casts that touch bf16 are done by torch there.

    Source:
        Written here; slots as in vLLM's reshape_and_cache_flash (Apache-2.0).
    """
    call = call_key(key, value, k_cache, v_cache, slot_mapping, kv_layout, k_scale, v_scale)
    if _CALLS.again(call):
        return
    cache = check_kv_cache(k_cache, v_cache, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale)
    device, heads = k_cache.device, cache.num_kv_heads
    check_tensor(
        "key",
        key,
        dtypes=FLOAT_DTYPES,
        shape=["T", ("Hkv", heads), ("D", cache.head_dim)],
        device=device,
        last_contiguous=True,
    )
    num_tokens = key.shape[0]
    check_tensor(
        "value",
        value,
        dtypes=(key.dtype,),
        shape=[("T", num_tokens), ("Hkv", heads), ("Dv", cache.head_dim_v)],
        device=device,
        last_contiguous=True,
    )
    check_tensor(
        "slot_mapping",
        slot_mapping,
        dtypes=(torch.int64,),
        shape=[("T", num_tokens)],
        device=device,
        last_contiguous=True,
    )
    if num_tokens == 0:
        return
    if cache.k_cache.dtype in FP8_BIAS:
        key, value = interpreter_safe(key), interpreter_safe(value)
    elif INTERPRETED and torch.bfloat16 in (key.dtype, k_cache.dtype):
        # The interpreter truncates where a cast to bf16 should round: torch casts there.
        key, value = key.to(k_cache.dtype), value.to(k_cache.dtype)
    num_rows = num_tokens * heads
    config = choose_copy_config(num_rows, max(cache.head_dim, cache.head_dim_v), device)
    write = dict(
        key_ptr=key,
        value_ptr=value,
        slot_mapping_ptr=slot_mapping,
        num_rows=num_rows,
        num_slots=cache.num_pages * cache.page_size,
        stride_key_t=key.stride(0),
        stride_key_h=key.stride(1),
        stride_value_t=value.stride(0),
        stride_value_h=value.stride(1),
        BLOCK_R=config.block_rows,
        **cache_arguments(cache, spare=slot_mapping),
    )
    grid = (triton.cdiv(num_rows, config.block_rows),)
    options = {"num_warps": config.num_warps}
    with current_device(device):
        _CALLS.first(call, [Launch(kernels._write_kv_kernel, grid, write, options)])
