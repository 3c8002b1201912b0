"""vLLM's Triton kernels: the decode kernel, with an LSE, and the unified one, without.

Both read fp8 caches. The decode kernel attends MLA latents too; the unified one also takes fp8
queries, and rounds the softmax's weights to fp8 then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dcp_lab.peers.base import DecodeInputs, MlaInputs, Peer, PeerCall, is_fp8, module_missing

INSTALL = "pip install vllm==0.25.1"
# vLLM's own segments and the launch-grid size below which it splits (its triton_attn.py, 0.25.1).
SEGMENTS = 16
MIN_GRID = 128


def _no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "it needs a GPU"


def decode_absent() -> str | None:
    """Return None when vLLM's Triton decode kernel can run here."""
    return _no_gpu() or module_missing("vllm.v1.attention.ops.triton_decode_attention", INSTALL)


def unified_absent() -> str | None:
    """Return None when vLLM's unified kernel can run here."""
    return _no_gpu() or module_missing("vllm.v1.attention.ops.triton_unified_attention", INSTALL)


def _decode(x: DecodeInputs, splits: int) -> PeerCall:
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    _, requests, num_q_heads, head_dim = x.q.shape
    k_cache, v_cache = x.caches(0)
    device = x.q.device
    partials = torch.empty(requests, num_q_heads, splits, v_cache.shape[-1] + 1, device=device)
    one = torch.ones(1, device=device)

    def run(layer: int) -> None:
        k, v = x.caches(layer)
        decode_attention_fwd(
            x.q[layer],
            k,
            v,
            x.out[layer],
            x.lse[layer],
            x.block_table,
            x.seq_lens,
            partials,
            splits,
            head_dim**-0.5,
            k_cache.shape[1],
            k_scale=one,
            v_scale=one,
        )

    return PeerCall(run=run, lse=lambda layer: x.lse[layer])


def _mla(x: MlaInputs, splits: int) -> PeerCall:
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    _, requests, num_q_heads, _ = x.q.shape
    rank, page_size, device = x.out.shape[-1], x.kv.shape[2], x.q.device
    partials = torch.empty(requests, num_q_heads, splits, rank + 1, device=device)
    one = torch.ones(1, device=device)

    def run(layer: int) -> None:
        # [P, page, 1, 576]
        latents = x.kv[layer].unsqueeze(2)
        decode_attention_fwd(
            x.q[layer],
            latents,
            latents[..., :rank],
            x.out[layer],
            x.lse[layer],
            x.block_table,
            x.seq_lens,
            partials,
            splits,
            x.softmax_scale,
            page_size,
            k_scale=one,
            v_scale=one,
            is_mla=True,
        )

    return PeerCall(run=run, lse=lambda layer: x.lse[layer])


def _unified(x: DecodeInputs, *, fp8_queries: bool = False) -> PeerCall:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    _, requests, num_q_heads, head_dim = x.q.shape
    num_kv_heads = x.caches(0)[0].shape[2]
    device = x.q.device
    threshold = MIN_GRID // num_kv_heads
    rows = (max(1, threshold), num_q_heads, SEGMENTS)
    out = torch.empty(*rows, head_dim, device=device)
    largest, total = torch.empty(*rows, device=device), torch.empty(*rows, device=device)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    scale = one.expand(requests, num_kv_heads)
    q = x.q.to(x.kv.dtype) if fp8_queries else x.q
    quantised = {}
    if is_fp8(x):
        from vllm.v1.kv_cache_interface import KVQuantMode

        quantised = {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}

    def run(layer: int) -> None:
        k, v = x.caches(layer)
        unified_attention(
            q=q[layer],
            k=k,
            v=v,
            out=x.out[layer],
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=x.seq_lens,
            max_seqlen_k=max(x.lens),
            softmax_scale=head_dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=x.block_table,
            softcap=0,
            q_descale=one if fp8_queries else None,
            k_descale=scale,
            v_descale=scale,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=out,
            softmax_segm_max=largest,
            softmax_segm_expsum=total,
            **quantised,
        )

    queries = (lambda layer: q[layer]) if fp8_queries else None
    return PeerCall(run=run, lse=None, queries=queries, fp8_weights=fp8_queries)


def decode_calls(x: DecodeInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return split counts that fill the chip once and four times, and vLLM's rule for MLA."""
    counts = _split_counts(x, x.caches(0)[0].shape[2])
    return {f"{n} splits": lambda n=n: _decode(x, n) for n in counts}


def _split_counts(x: DecodeInputs | MlaInputs, num_kv_heads: int) -> list[int]:
    _, requests, num_q_heads, _ = x.q.shape
    longest = max(x.lens)
    programs = requests * num_kv_heads * -(-(num_q_heads // num_kv_heads) // 16)
    multiprocessors = torch.cuda.get_device_properties(x.q.device).multi_processor_count

    def power_of_two(value: float, at_most: int) -> int:
        return max(1, min(at_most, 1 << max(0, int(value).bit_length() - 1)))

    cap = power_of_two(longest / 64, 256)
    fill = power_of_two(2 * multiprocessors / programs, cap)
    return sorted({power_of_two(longest / 512, 256), fill, min(cap, 4 * fill)})


def mla_calls(x: MlaInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return the decode kernel over latents, at the same choice of split counts."""
    return {f"{n} splits": lambda n=n: _mla(x, n) for n in _split_counts(x, 1)}


def unified_calls(x: DecodeInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return the kernel with vLLM's own settings; on an fp8 cache with fp8 queries too."""
    found = {"auto": lambda: _unified(x)}
    if is_fp8(x):
        found["fp8 queries"] = lambda: _unified(x, fp8_queries=True)
    return found


DECODE = Peer("vllm_triton_decode", "vllm 0.25.1", decode_absent, decode_calls)
MLA = Peer("vllm_triton_decode", "vllm 0.25.1", decode_absent, mla_calls)
UNIFIED = Peer("vllm_triton_unified", "vllm 0.25.1", unified_absent, unified_calls)
