"""Peers: the kernels that this lab's are measured beside, one adapter each.

Every adapter says which versions it knows and why its peer is absent; nothing of a peer is
imported before it is asked for.
"""

from __future__ import annotations

from dcp_lab.peers import fa3, flashinfer, vllm_triton
from dcp_lab.peers.base import DecodeInputs, Peer, PeerCall

DECODE_PEERS = (fa3.PEER, flashinfer.PEER, vllm_triton.DECODE, vllm_triton.UNIFIED)

__all__ = ["DECODE_PEERS", "DecodeInputs", "Peer", "PeerCall"]
