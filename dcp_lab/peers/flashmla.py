"""FlashMLA from vLLM's wheel: what vLLM runs for MLA decode on Hopper; dense decode at 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dcp_lab.peers.base import (
    MlaInputs,
    Peer,
    PeerCall,
    is_fp8,
    module_missing,
    needs_hopper,
)

# The only page size of its latent cache.
PAGE_SIZE = 64


def why_absent() -> str | None:
    """Return None when FlashMLA can run here."""
    return needs_hopper() or module_missing(
        "vllm.third_party.flashmla.flash_mla_interface", "pip install vllm==0.25.1"
    )


def _call(x: MlaInputs) -> PeerCall:
    from vllm.third_party.flashmla.flash_mla_interface import (
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

    # Filled by the first call; it has to outlive the graph.
    plan, _ = get_mla_metadata()
    lses: dict[int, torch.Tensor] = {}

    def run(layer: int) -> None:
        _, lses[layer] = flash_mla_with_kvcache(
            x.q[layer].unsqueeze(1),
            x.kv[layer].unsqueeze(2),
            x.block_table,
            x.seq_lens,
            x.out.shape[-1],
            plan,
            softmax_scale=x.softmax_scale,
            causal=True,
            out=x.out[layer].unsqueeze(1),
        )

    return PeerCall(run=run, lse=lambda layer: lses[layer][:, :, 0])


def calls(x: MlaInputs) -> dict[str, Callable[[], PeerCall]]:
    """Return it for pages of 64 tokens at 16 bits; it knows no others."""
    fits = x.kv.shape[2] == PAGE_SIZE and not is_fp8(x)
    return {"auto": lambda: _call(x)} if fits else {}


PEER = Peer("flashmla", "vllm 0.25.1 (its third_party/flashmla)", why_absent, calls)
