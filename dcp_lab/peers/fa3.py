"""FlashAttention 3 on the paged cache, from vLLM's wheel: what vLLM runs on Hopper.

On an fp8 cache its queries are fp8 too, and it rounds the softmax's weights to fp8. Its MLA path
attends the rotary part as a head of 64 and the latent as q_v and v of 512; at 16 bits only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dcp_lab.peers.base import (
    DecodeInputs,
    MlaInputs,
    Peer,
    PeerCall,
    is_fp8,
    module_missing,
    needs_hopper,
)


def why_absent() -> str | None:
    """Return None when FA3 can run here."""
    return needs_hopper() or module_missing(
        "vllm.vllm_flash_attn.flash_attn_interface", "pip install vllm==0.25.1"
    )


def _call(x: DecodeInputs, *, metadata: bool, num_splits: int) -> PeerCall:
    from vllm.vllm_flash_attn.flash_attn_interface import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    _, requests, num_q_heads, head_dim = x.q.shape
    k_cache, _ = x.caches(0)
    fp8 = is_fp8(x)
    q = x.q.to(k_cache.dtype) if fp8 else x.q
    scales = {}
    if fp8:
        one = torch.ones(1, device=q.device).expand(requests, k_cache.shape[2])
        scales = {"q_descale": one, "k_descale": one, "v_descale": one}
    starts = torch.arange(requests + 1, dtype=torch.int32, device=x.q.device)
    shared = {"max_seqlen_q": 1, "max_seqlen_k": max(x.lens), "causal": True}
    plan = None
    if metadata:
        # Made once a step for all layers, as vLLM does; not in the rows.
        plan = get_scheduler_metadata(
            batch_size=requests,
            num_heads_q=num_q_heads,
            num_heads_kv=k_cache.shape[2],
            headdim=head_dim,
            cache_seqlens=x.seq_lens,
            qkv_dtype=k_cache.dtype,
            cu_seqlens_q=starts,
            page_size=k_cache.shape[1],
            num_splits=num_splits,
            **shared,
        )
    lses: dict[int, torch.Tensor] = {}

    def run(layer: int) -> None:
        k, v = x.caches(layer)
        _, lses[layer] = flash_attn_varlen_func(
            q=q[layer],
            k=k,
            v=v,
            out=x.out[layer],
            cu_seqlens_q=starts,
            seqused_k=x.seq_lens,
            softmax_scale=head_dim**-0.5,
            block_table=x.block_table,
            scheduler_metadata=plan,
            num_splits=num_splits,
            fa_version=3,
            return_softmax_lse=True,
            **shared,
            **scales,
        )

    queries = (lambda layer: q[layer]) if fp8 else None
    return PeerCall(run=run, lse=lambda layer: lses[layer].T, queries=queries, fp8_weights=fp8)


def _mla(x: MlaInputs, *, metadata: bool, num_splits: int) -> PeerCall:
    from vllm.vllm_flash_attn.flash_attn_interface import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    _, requests, num_q_heads, head_dim = x.q.shape
    rank = x.out.shape[-1]
    starts = torch.arange(requests + 1, dtype=torch.int32, device=x.q.device)
    shared = {"max_seqlen_q": 1, "max_seqlen_k": max(x.lens), "causal": True}
    plan = None
    if metadata:
        plan = get_scheduler_metadata(
            batch_size=requests,
            num_heads_q=num_q_heads,
            num_heads_kv=1,
            headdim=head_dim - rank,
            headdim_v=rank,
            cache_seqlens=x.seq_lens,
            qkv_dtype=x.q.dtype,
            cu_seqlens_q=starts,
            page_size=x.kv.shape[2],
            num_splits=num_splits,
            **shared,
        )
    lses: dict[int, torch.Tensor] = {}

    def run(layer: int) -> None:
        latents = x.kv[layer]
        _, lses[layer] = flash_attn_varlen_func(
            q=x.q[layer][..., rank:],
            q_v=x.q[layer][..., :rank],
            k=latents[..., rank:].unsqueeze(-2),
            v=latents[..., :rank].unsqueeze(-2),
            out=x.out[layer],
            cu_seqlens_q=starts,
            seqused_k=x.seq_lens,
            softmax_scale=x.softmax_scale,
            block_table=x.block_table,
            scheduler_metadata=plan,
            num_splits=num_splits,
            fa_version=3,
            return_softmax_lse=True,
            **shared,
        )

    return PeerCall(run=run, lse=lambda layer: lses[layer].T)


def mla_calls(x: MlaInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return its MLA path with its own heuristic and with scheduler metadata, at 16 bits."""
    if is_fp8(x):
        return {}
    return {
        "auto": lambda: _mla(x, metadata=False, num_splits=0),
        "metadata": lambda: _mla(x, metadata=True, num_splits=0),
        # vLLM's setting under graphs.
        "metadata max 32 splits": lambda: _mla(x, metadata=True, num_splits=32),
    }


def calls(x: DecodeInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return FA3 with its own heuristic, with scheduler metadata, and at fixed split counts."""
    found = {
        "auto": lambda: _call(x, metadata=False, num_splits=0),
        "metadata": lambda: _call(x, metadata=True, num_splits=0),
        # vLLM's setting under graphs.
        "metadata max 32 splits": lambda: _call(x, metadata=True, num_splits=32),
    }
    for splits in (1, 4, 16):
        found[f"{splits} splits"] = lambda s=splits: _call(x, metadata=False, num_splits=s)
    return found


PACKAGE = "vllm 0.25.1 (its vllm_flash_attn, FlashAttention 3)"
PEER = Peer("fa3", PACKAGE, why_absent, calls)
MLA = Peer("fa3_mla", PACKAGE, why_absent, mla_calls)
