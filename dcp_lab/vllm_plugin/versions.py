"""What differs between vLLM 0.23 and 0.33, found by looking at vLLM, never at its version."""

from __future__ import annotations

from typing import Any

import torch

from dcp_lab.ops.checks import fail


def kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """Return the shape that vLLM up to 0.25 asks the backend for: K and V side by side."""
    return (num_blocks, 2, block_size, num_kv_heads, head_dim)


def split_kv_cache(
    kv_cache: torch.Tensor, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of K and V, each [P, page, Hkv, D], of what vLLM hands to a layer.

    Args:
        kv_cache: [P, 2, page, Hkv, D] (up to 0.25, as kv_cache_shape says) or [P, Hkv, page, 2 D]
            (0.32 on, whatever its order in memory).
        head_dim: D.
        dtype: Of the elements; vLLM hands fp8 as bytes.
    """
    if kv_cache.dtype != dtype:
        kv_cache = kv_cache.view(dtype)
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:
        k_cache, v_cache = kv_cache.unbind(1)
        return k_cache, v_cache
    if kv_cache.dim() == 4 and kv_cache.shape[-1] == 2 * head_dim:
        k_cache, v_cache = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
        return k_cache, v_cache
    fail(
        "kv_cache",
        f"[blocks, 2, block_size, kv_heads, {head_dim}] or "
        f"[blocks, kv_heads, block_size, {2 * head_dim}]",
        kv_cache,
    )


def current_config() -> Any | None:
    """Return the VllmConfig that is being used to build a model, None outside of that."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def model_device() -> torch.device:
    """Return where this process runs the model."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def dcp_group() -> Any:
    """Return vLLM's coordinator of this rank's DCP group."""
    from vllm.distributed.parallel_state import get_dcp_group

    return get_dcp_group()


def layers_of(vllm_config: Any, layer_names: list[str]) -> list[Any]:
    """Return these attention layers of the model."""
    context = vllm_config.compilation_config.static_forward_context
    return [context[name] for name in layer_names]


def cache_tokens(vllm_config: Any) -> int:
    """Return the tokens that a layer's cache on this rank holds, as far as vLLM knows by now."""
    cache = vllm_config.cache_config
    blocks = cache.num_gpu_blocks or cache.num_gpu_blocks_override
    return blocks * cache.block_size if blocks else 1 << 62


def decode_split(common: Any, decode_query_len: int) -> tuple[int, int]:
    """Return (decodes, their tokens) of a batch that vLLM has put decodes first in."""
    from vllm.v1.attention.backends.utils import split_decodes_and_prefills

    num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(
        common, decode_threshold=decode_query_len
    )
    return num_decodes, num_decode_tokens
