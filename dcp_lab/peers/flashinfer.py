"""FlashInfer's paged decode, on tensor cores and on CUDA cores, and its MLA decode.

At 16 bits. Its modules are compiled at first use; those for an fp8 cache are not asked for here.
"""

from __future__ import annotations

import math
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

# FlashInfer's own recommendation: 128 MB; its graph mode may want more.
WORKSPACE_BYTES = 1 << 29
# Group sizes that its CUDA-core decode is built for (batch_decode.cu of 0.6.13).
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)


def why_absent() -> str | None:
    """Return None when FlashInfer can run here."""
    return needs_hopper() or module_missing(
        "flashinfer.decode", "pip install flashinfer-python==0.6.13"
    )


def _pages(x: DecodeInputs | MlaInputs, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (pages before each request [B + 1], their ids one request behind the other)."""
    counts = [math.ceil(n / page_size) for n in x.lens]
    starts = torch.tensor([0, *counts]).cumsum(0).to(device=x.q.device, dtype=torch.int32)
    return starts, torch.cat([x.block_table[b, :count] for b, count in enumerate(counts)])


def _call(x: DecodeInputs, *, tensor_cores: bool, graph: bool) -> PeerCall:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    device = x.q.device
    _, requests, num_q_heads, head_dim = x.q.shape
    k_cache, _ = x.caches(0)
    page_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    ends, ids = _pages(x, page_size)
    last = torch.tensor([(n - 1) % page_size + 1 for n in x.lens], dtype=torch.int32)
    last = last.to(device)
    buffers = {}
    if graph:
        buffers = {
            "paged_kv_indptr_buffer": ends.clone(),
            "paged_kv_indices_buffer": ids.clone(),
            "paged_kv_last_page_len_buffer": last.clone(),
        }
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=graph,
        use_tensor_cores=tensor_cores,
        **buffers,
    )
    wrapper.plan(
        ends,
        ids,
        last,
        num_q_heads,
        num_kv_heads,
        head_dim,
        page_size,
        q_data_type=x.q.dtype,
        kv_data_type=k_cache.dtype,
        sm_scale=head_dim**-0.5,
    )

    def run(layer: int) -> None:
        wrapper.run(x.q[layer], x.kv[layer], out=x.out[layer], lse=x.lse[layer], return_lse=True)

    # FlashInfer's LSE is in base 2.
    return PeerCall(run=run, lse=lambda layer: x.lse[layer] * math.log(2))


def calls(x: DecodeInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return tensor cores planned with and without graph padding, and CUDA cores."""
    if is_fp8(x):
        return {}
    found = {
        "tensor cores": lambda: _call(x, tensor_cores=True, graph=True),
        "tensor cores, no graph padding": lambda: _call(x, tensor_cores=True, graph=False),
    }
    if x.q.shape[2] // x.caches(0)[0].shape[2] in CUDA_CORE_GROUPS:
        found["CUDA cores"] = lambda: _call(x, tensor_cores=False, graph=True)
        found["CUDA cores, no graph padding"] = lambda: _call(x, tensor_cores=False, graph=False)
    return found


def _mla(x: MlaInputs) -> PeerCall:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    _, requests, num_q_heads, head_dim = x.q.shape
    rank, page_size = x.out.shape[-1], x.kv.shape[2]
    queries = torch.arange(requests + 1, dtype=torch.int32, device=x.q.device)
    starts, ids = _pages(x, page_size)
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.zeros(2 * WORKSPACE_BYTES, dtype=torch.uint8, device=x.q.device),
        use_cuda_graph=True,
        qo_indptr=queries.clone(),
        kv_indptr=starts.clone(),
        kv_indices=ids.clone(),
        kv_len_arr=x.seq_lens.clone(),
        backend="fa3",
    )
    # Not causal: a request's one query sees all of its latents.
    wrapper.plan(
        queries,
        starts,
        ids,
        x.seq_lens,
        num_q_heads,
        rank,
        head_dim - rank,
        page_size,
        False,
        x.softmax_scale,
        x.q.dtype,
        x.kv.dtype,
    )

    def run(layer: int) -> None:
        q, latents = x.q[layer], x.kv[layer]
        wrapper.run(
            q[..., :rank],
            q[..., rank:],
            latents[..., :rank],
            latents[..., rank:],
            out=x.out[layer],
            lse=x.lse[layer],
            return_lse=True,
            return_lse_base_on_e=True,
        )

    return PeerCall(run=run, lse=lambda layer: x.lse[layer])


def mla_calls(x: MlaInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return its MLA decode for Hopper, at 16 bits."""
    return {} if is_fp8(x) else {"fa3": lambda: _mla(x)}


def mla_absent() -> str | None:
    """Return None when FlashInfer's MLA decode can run here."""
    return needs_hopper() or module_missing(
        "flashinfer.mla", "pip install flashinfer-python==0.6.13"
    )


PEER = Peer("flashinfer", "flashinfer-python 0.6.13", why_absent, calls)
MLA = Peer("flashinfer_mla", "flashinfer-python 0.6.13", mla_absent, mla_calls)
