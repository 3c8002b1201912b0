"""torch's scaled_dot_product_attention on KV that is contiguous already: a yardstick, no LSE."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dcp_lab.peers.base import DecodeInputs, Peer, PeerCall


def why_absent() -> str | None:
    """Return None: it is a part of torch."""
    return None


def _call(x: DecodeInputs) -> PeerCall:
    _, requests, num_q_heads, head_dim = x.q.shape
    num_kv_heads = x.kv.shape[4]

    def contiguous(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The layer's memory, read as if K and V of all requests lay one behind the other.
        rows = x.kv[layer].view(2, requests, -1, num_kv_heads, head_dim)
        return rows[0], rows[1]

    def run(layer: int) -> None:
        k, v = (rows.transpose(1, 2) for rows in contiguous(layer))
        out = torch.nn.functional.scaled_dot_product_attention(
            x.q[layer].unsqueeze(2), k, v, enable_gqa=num_q_heads != num_kv_heads
        )
        x.out[layer].copy_(out.squeeze(2))

    return PeerCall(run=run, lse=None, contiguous=contiguous)


def calls(x: DecodeInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return it for equal lengths of whole pages, K and V in q's dtype; it knows no others."""
    page_size = x.kv.shape[3]
    if x.kv.dtype != x.q.dtype or len(set(x.lens)) != 1 or x.lens[0] % page_size:
        return {}
    return {"contiguous": lambda: _call(x)}


PEER = Peer("sdpa", "torch 2.6 and newer (enable_gqa)", why_absent, calls)
