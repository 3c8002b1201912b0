"""Peers: the kernels that this lab's are measured beside, one adapter each.

Every adapter says which versions it knows and why its peer is absent; nothing of a peer is
imported before it is asked for.
"""

from __future__ import annotations

from dcp_lab.peers import aiter, fa3, flashinfer, flashmla, sdpa, vllm_triton
from dcp_lab.peers.base import DecodeInputs, MlaInputs, Peer, PeerCall

# A yardstick rather than a peer: it attends KV that is contiguous already, and is always here.
SDPA = sdpa.PEER
DECODE_PEERS = (
    fa3.PEER,
    flashinfer.PEER,
    vllm_triton.DECODE,
    vllm_triton.UNIFIED,
    aiter.PAGED_V1,
    aiter.GATHERED,
    aiter.PERSISTENT,
)
# Their calls take MlaInputs.
MLA_PEERS = (flashmla.PEER, fa3.MLA, flashinfer.MLA, vllm_triton.MLA, aiter.MLA)

__all__ = ["DECODE_PEERS", "MLA_PEERS", "SDPA", "DecodeInputs", "MlaInputs", "Peer", "PeerCall"]
