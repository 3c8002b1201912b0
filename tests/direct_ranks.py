"""What each gloo rank does for test_direct.py."""

from __future__ import annotations

import torch

from dcp_lab.reducers import make_query_gather


def gather_queries(rank: int, size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (this rank's q, what the gather gave) of calls of different T and strides."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        gather = make_query_gather(
            "nccl",
            group=None,
            max_tokens=7,
            num_q_heads_local=2,
            head_dim=24,
            dtype=dtype,
            device="cpu",
        )
        for num_tokens in (7, 1, 0, 5):
            generator = torch.Generator().manual_seed(10 * num_tokens + rank)
            q = torch.randn(num_tokens, 2, 24, generator=generator).to(dtype)
            found[f"{dtype} {num_tokens}"] = (q, gather(q).clone())
            wide = torch.randn(2, num_tokens, 30, generator=generator).to(dtype)
            strided = wide.transpose(0, 1)[..., 3:27]
            found[f"{dtype} {num_tokens} strided"] = (strided.clone(), gather(strided).clone())
        # The all-gather's target and a copy of q, beside the result.
        assert gather.memory_bytes() == (1 + 2 * size) * 7 * 2 * 24 * dtype.itemsize
    return found
