"""What differs between vLLM 0.23 and 0.33, found by looking at vLLM, never at its version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dcp_lab.ops.checks import fail
from dcp_lab.state import AttnState


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


def prefill_context(common: Any, num_decodes: int) -> bool:
    """Return whether a prefill of this batch may have tokens from before it; no sync.

    vLLM's bound of the lengths on the host is exact for prefills.
    """
    bound = getattr(common, "seq_lens_cpu_upper_bound", None)
    if bound is None:
        return True
    queries = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
    return bool((bound[: common.num_reqs] > queries)[num_decodes:].any())


def flash_attention_3() -> Callable[..., Any] | None:
    """Return vLLM's flash_attn_varlen_func where it has FlashAttention 3 for this GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    try:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )
    except ImportError:
        return None
    return flash_attn_varlen_func if get_flash_attn_version() == 3 else None


def why_no_flash(
    *,
    head_dim: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    sliding_window: int | None,
    sinks: bool,
    shares_cache: bool,
    dcp_size: int,
) -> str | None:
    """Return why FlashAttention 3 cannot attend this layer's prefills, None when it can."""
    if q_dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {q_dtype}"
    if kv_dtype != q_dtype:
        return f"the cache is {kv_dtype}, the queries are {q_dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"it takes head sizes that are multiples of 8 up to 256, not {head_dim}"
    if sinks:
        return "the layer has sinks"
    if shares_cache and dcp_size > 1:
        return "the layer reads another one's cache and has no keys of its own"
    if sliding_window is not None and dcp_size > 1:
        return "the layer has a sliding window, whose keys are dealt out over the DCP ranks"
    return None


def flash_attention(function: Callable[..., Any]) -> Callable[..., None]:
    """Return what attend calls: FlashAttention on pages or on the step's own keys, into a state.

    Args:
        function: vLLM's flash_attn_varlen_func.
    """

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: AttnState,
        *,
        query_start_loc: torch.Tensor,
        max_query_len: int,
        softmax_scale: float,
        softcap: float | None,
        sliding_window: int | None,
        seq_lens: torch.Tensor | None = None,
        max_seq_len: int = 0,
        block_table: torch.Tensor | None = None,
        causal: bool = True,
    ) -> None:
        """Write state.out [T, H, D], and state.lse fp32 [T, H], natural log, unless it is None.

        k and v are pages [P, page, Hkv, D] with block_table and seq_lens, or [T, Hkv, D] without.
        The mask, where causal, ends at each request's last key.
        """
        keys: dict[str, Any]
        if block_table is None:
            keys = {"cu_seqlens_k": query_start_loc, "max_seqlen_k": max_query_len}
        else:
            keys = {
                "seqused_k": seq_lens,
                "max_seqlen_k": max_seq_len,
                "block_table": block_table,
            }
        window = [-1, -1] if sliding_window is None else [sliding_window - 1, 0]
        found = function(
            q=q,
            k=aligned(k),
            v=aligned(v),
            out=state.out,
            cu_seqlens_q=query_start_loc,
            max_seqlen_q=max_query_len,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window,
            softcap=softcap or 0.0,
            return_softmax_lse=state.lse is not None,
            fa_version=3,
            **keys,
        )
        if state.lse is not None:
            # [H, T]. Where it saw no key it may say +inf, which every merge takes for no key.
            state.lse.copy_(found[1].T)

    return attend


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the strides that a dense one would have where a dimension is 1.

    FlashAttention 3 loads by TMA, which refuses a stride of less than 16 bytes even there.
    """
    strides = list(tensor.stride())
    for dim in reversed(range(tensor.dim() - 1)):
        if tensor.shape[dim] == 1:
            strides[dim] = strides[dim + 1] * tensor.shape[dim + 1]
    if strides == list(tensor.stride()):
        return tensor
    return tensor.as_strided(tensor.shape, strides)
