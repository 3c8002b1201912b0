"""What write_kv and gather_kv share: tiles, and how the caches reach a kernel."""

from __future__ import annotations

import dataclasses

import torch
import triton

from dcp_lab.ops.arguments import KVCacheArguments
from dcp_lab.ops.device import device_of

# Exponent bias of each fp8 format.
FP8_BIAS = {torch.float8_e4m3fn: 7, torch.float8_e4m3fnuz: 8}


@dataclasses.dataclass(frozen=True)
class CopyConfig:
    """Launch knobs of a kernel that copies rows of one head of one token.

    Attributes:
        block_rows: Rows a program copies at once, a power of two.
        num_warps: Of a program.
    """

    block_rows: int
    num_warps: int


def choose_copy_config(num_rows: int, head_dim: int, device: torch.device) -> CopyConfig:
    """Return tiles of 2,048 elements: 16 bytes a lane at 16 bits with 256 lanes (4 waves on AMD).

    The interpreter runs programs one after the other, so there it gets few large ones.
    """
    elements = 65536 if device_of(device).arch == "interpreter" else 2048
    most = max(1, elements // triton.next_power_of_2(head_dim))
    return CopyConfig(block_rows=min(most, triton.next_power_of_2(num_rows)), num_warps=4)


def cache_arguments(cache: KVCacheArguments, spare: torch.Tensor) -> dict[str, object]:
    """Return what a copying kernel is told of the caches; spare stands for a scale it has not."""
    bias = FP8_BIAS.get(cache.k_cache.dtype, 0)
    bits = torch.uint8 if bias else cache.k_cache.dtype
    found: dict[str, object] = {
        "k_cache_ptr": cache.k_cache.view(bits),
        "v_cache_ptr": cache.v_cache.view(bits),
        "CHUNK": cache.chunk,
        "FP8_BIAS": bias,
        "PAGE_SIZE": cache.page_size,
        "NUM_KV_HEADS": cache.num_kv_heads,
        "HEAD_DIM": cache.head_dim,
        "HEAD_DIM_V": cache.head_dim_v,
        "BLOCK_D": triton.next_power_of_2(cache.head_dim),
        "BLOCK_DV": triton.next_power_of_2(cache.head_dim_v),
    }
    for name, strides, letters in (("k", cache.k_strides, "pthc"), ("v", cache.v_strides, "pthd")):
        for letter, stride in zip(letters, strides, strict=True):
            found[f"stride_{name}_{letter}"] = stride
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        on_device = isinstance(scale, torch.Tensor)
        found[f"{name}_ptr"] = scale if on_device else spare
        found[name] = 1.0 if scale is None or on_device else float(scale)
        found[f"stride_{name}"] = scale.stride(0) if on_device and scale.numel() > 1 else 0
        found[f"{name.upper()}_ON_DEVICE"] = on_device
    return found
