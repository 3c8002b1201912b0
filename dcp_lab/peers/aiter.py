"""AMD's AITER: its paged decode kernels, and study 1's own path over gathered KV.

None of these has run on an AMD GPU yet. tests/test_peers_aiter.py holds every call against the
signatures in tests/aiter_signatures.json, taken from AITER's source by tools/aiter_signatures.py;
that says the arguments fit, not that the results are right. The bench compares each with float64
before it times it.

PyPI's `aiter` is an unrelated package; AMD's is `amd-aiter`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import torch

from dcp_lab.peers.base import DecodeInputs, MlaInputs, Peer, PeerCall, is_fp8, module_missing

INSTALL = "it is in AMD's images (rocm/vllm), or pip install amd-aiter; never pip install aiter"
RELEASE = "amd-aiter 0.1.7.post2.dev18"
# Tokens of a partition in paged_attention_v1, its default.
PARTITION_TOKENS = 256


def _absent(module: str, function: str) -> str | None:
    """Return why a function of AITER cannot run here."""
    if not torch.version.hip or not torch.cuda.is_available():
        return "it needs an AMD GPU"
    if missing := module_missing(module, INSTALL):
        return missing
    try:
        there = hasattr(importlib.import_module(module), function)
    except (ImportError, OSError, RuntimeError) as reason:
        return f"{module} does not import here ({reason}); {INSTALL}"
    return None if there else f"this AITER has no {function}; a newer one has"


def _starts(lens: list[int], device: torch.device) -> torch.Tensor:
    """Return int32 [len(lens) + 1]: where each request's entries start, and their number."""
    return torch.tensor([0, *lens]).cumsum(0).to(device=device, dtype=torch.int32)


def _pages(x: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (pages before each request [B + 1], their ids one request behind the other)."""
    counts = [math.ceil(n / x.kv.shape[3]) for n in x.lens]
    ids = torch.cat([x.block_table[b, :count] for b, count in enumerate(counts)])
    return _starts(counts, x.q.device), ids


def _paged_v1(x: DecodeInputs) -> PeerCall:
    from aiter.ops.attention import paged_attention_v1

    layers, requests, num_q_heads, head_dim = x.q.shape
    device = x.q.device
    longest = max(x.lens)
    partials = requests * num_q_heads * math.ceil(longest / PARTITION_TOKENS)
    # Outputs of the partitions in out's dtype, then their sums and maxima in fp32.
    size = partials * (head_dim * x.out.element_size() + 2 * 4)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    one = torch.ones(1, device=device)
    # Its tests know contiguous caches only; the lab's are views of fused pages.
    caches = [tuple(part.contiguous() for part in x.caches(layer)) for layer in range(layers)]

    def run(layer: int) -> None:
        k_cache, v_cache = caches[layer]
        paged_attention_v1(
            out=x.out[layer],
            workspace_buffer=workspace,
            query=x.q[layer],
            key_cache=k_cache,
            value_cache=v_cache,
            scale=head_dim**-0.5,
            block_tables=x.block_table,
            cu_query_lens=None,
            context_lens=x.seq_lens,
            max_context_len=longest,
            alibi_slopes=None,
            kv_cache_dtype="auto",
            kv_cache_layout="NHD",
            logits_soft_cap=0.0,
            k_scale=one,
            v_scale=one,
            fp8_out_scale=None,
            partition_size=PARTITION_TOKENS,
        )

    # It returns no LSE: the reason why study 1 could not use it under DCP.
    return PeerCall(run=run, lse=None)


def _gathered(x: DecodeInputs, gather: str) -> PeerCall:
    from aiter.ops.mha import flash_attn_varlen_func

    from dcp_lab.ops.gather import gather_kv

    _, requests, _, head_dim = x.q.shape
    total, longest = sum(x.lens), max(x.lens)
    one_each = _starts([1] * requests, x.q.device)
    lses: dict[int, torch.Tensor] = {}

    def run(layer: int) -> None:
        k, v, starts = gather_kv(
            *x.caches(layer), x.block_table, x.seq_lens, total_tokens=total, gather=gather
        )
        _, lses[layer], *_ = flash_attn_varlen_func(
            q=x.q[layer],
            k=k,
            v=v,
            cu_seqlens_q=one_each,
            cu_seqlens_k=starts,
            max_seqlen_q=1,
            max_seqlen_k=longest,
            softmax_scale=head_dim**-0.5,
            causal=True,
            return_lse=True,
            out=x.out[layer],
        )

    return PeerCall(run=run, lse=lambda layer: lses[layer].T)


def _persistent(x: DecodeInputs) -> PeerCall:
    from aiter import dtypes
    from aiter.ops.attention import (
        get_pa_metadata_info_v1,
        get_pa_metadata_v1,
        pa_persistent_fwd,
    )

    layers, requests, num_q_heads, head_dim = x.q.shape
    device = x.q.device
    pages, _, page_size, num_kv_heads, _ = x.caches(0)[0].unsqueeze(1).shape
    one_each = _starts([1] * requests, device)
    page_starts, page_ids = _pages(x)
    shapes = get_pa_metadata_info_v1(batch_size=requests, num_head_k=num_kv_heads)
    plan = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in shapes]
    names = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map")
    buffers = dict(zip((*names, "reduce_partial_map"), plan[1:], strict=True))
    # Made once a step for all layers; not in the rows.
    get_pa_metadata_v1(
        seqlens_qo_indptr=one_each,
        pages_kv_indptr=page_starts,
        context_lens=x.seq_lens,
        num_heads_per_head_k=num_q_heads // num_kv_heads,
        num_heads_k=num_kv_heads,
        is_causal=True,
        work_metadata_ptrs=plan[0],
        **buffers,
        kv_granularity=max(page_size, 16),
        block_size=page_size,
        max_seqlen_qo=1,
        uni_seqlen_qo=1,
        fast_mode=True,
    )
    # The caches are fp8 already, with scale 1: one scale for each token is what it takes.
    scale = torch.ones(pages, num_kv_heads, page_size, device=device)
    per = 16 // x.kv.element_size()

    def shuffled(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (part.view(dtypes.fp8) for part in x.caches(layer))
        # [P, page, Hkv, D] -> K [P, Hkv, D/x, page, x], V [P, Hkv, page/x, D, x]
        k = k.unflatten(3, (-1, per)).permute(0, 2, 3, 1, 4).contiguous()
        v = v.unflatten(1, (-1, per)).permute(0, 3, 1, 4, 2).contiguous()
        return k, v

    caches = [shuffled(layer) for layer in range(layers)]
    lses: dict[int, torch.Tensor] = {}

    def run(layer: int) -> None:
        k, v = caches[layer]
        _, lses[layer] = pa_persistent_fwd(
            Q=x.q[layer],
            K=k,
            V=v,
            output=x.out[layer],
            max_qlen=1,
            qo_indptr=one_each,
            kv_indptr=page_starts,
            kv_indices=page_ids,
            context_lens=x.seq_lens,
            **buffers,
            K_QScale=scale,
            V_QScale=scale,
            softmax_scale=head_dim**-0.5,
            mask=1,
        )

    return PeerCall(run=run, lse=lambda layer: lses[layer])


def mla_call(x: MlaInputs) -> PeerCall:
    """Return mla_decode_fwd under a plan, which is where it fills the LSE that it returns.

    Its plan counts tokens, so the latent cache is handed over as pages of one token.
    """
    from aiter.mla import mla_decode_fwd
    from aiter.ops.attention import get_mla_metadata_info_v1, get_mla_metadata_v1

    _, requests, num_q_heads, _ = x.q.shape
    device, page_size = x.q.device, x.kv.shape[2]
    one_each, token_starts = _starts([1] * requests, device), _starts(x.lens, device)
    tokens = [torch.arange(n, device=device) for n in x.lens]
    slots = torch.cat(
        [
            x.block_table[b, t // page_size].int() * page_size + (t % page_size).int()
            for b, t in enumerate(tokens)
        ]
    )
    shapes = get_mla_metadata_info_v1(
        batch_size=requests,
        max_seqlen_qo=1,
        num_head_qo=num_q_heads,
        q_dtype=x.q.dtype,
        kv_dtype=x.kv.dtype,
        is_sparse=False,
    )
    plan = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in shapes]
    maps = dict(
        zip(("reduce_indptr", "reduce_final_map", "reduce_partial_map"), plan[3:], strict=True)
    )
    get_mla_metadata_v1(
        seqlens_qo_indptr=one_each,
        seqlens_kv_indptr=token_starts,
        num_heads_per_head_k=num_q_heads,
        num_heads_k=1,
        is_causal=True,
        work_metadata_ptrs=plan[0],
        work_indptr=plan[1],
        work_info=plan[2],
        **maps,
        max_seqlen_qo=1,
        uni_seqlen_qo=1,
        fast_mode=True,
    )
    last = torch.ones(requests, dtype=torch.int32, device=device)
    lses: dict[int, torch.Tensor] = {}

    def run(layer: int) -> None:
        _, lse = mla_decode_fwd(
            q=x.q[layer],
            kv_buffer=x.kv[layer].reshape(-1, 1, 1, x.kv.shape[3]),
            o=x.out[layer],
            qo_indptr=one_each,
            kv_indptr=token_starts,
            kv_indices=slots,
            kv_last_page_lens=last,
            max_seqlen_q=1,
            sm_scale=x.softmax_scale,
            work_meta_data=plan[0],
            work_indptr=plan[1],
            work_info_set=plan[2],
            **maps,
        )
        # More than 16 heads go in as tokens of 16.
        lses[layer] = lse.view(requests, num_q_heads)

    return PeerCall(run=run, lse=lambda layer: lses[layer])


def _persistent_calls(x: DecodeInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return it for fp8 caches, the only ones that its own test knows."""
    return {"auto": lambda: _persistent(x)} if is_fp8(x) else {}


PAGED_V1 = Peer(
    "aiter_paged_attention_v1",
    f"{RELEASE}, aiter.ops.attention",
    lambda: _absent("aiter.ops.attention", "paged_attention_v1"),
    # Its fp8 caches have a name of their own, which nothing here has tried.
    lambda x: {} if is_fp8(x) else {"auto": lambda: _paged_v1(x)},
)
GATHERED = Peer(
    "aiter_gather_then_flash_attn",
    f"{RELEASE}, aiter.ops.mha",
    lambda: _absent("aiter.ops.mha", "flash_attn_varlen_func"),
    lambda x: {g: lambda g=g: _gathered(x, g) for g in ("per_token", "per_page")},
)
PERSISTENT = Peer(
    "aiter_pa_persistent",
    f"ROCm/aiter after {RELEASE}, which lacks it; aiter.ops.attention",
    lambda: _absent("aiter.ops.attention", "pa_persistent_fwd"),
    _persistent_calls,
)
MLA = Peer(
    "aiter_mla_decode",
    f"{RELEASE}, aiter.mla",
    lambda: _absent("aiter.mla", "mla_decode_fwd"),
    lambda x: {"planned": lambda: mla_call(x)},
)
