"""What each rank does for test_graphs.py and test_graphs_gpu.py."""

from __future__ import annotations

import torch

from dcp_lab import AttnState, make_reducer
from dcp_lab.graphs import audit


def audit_reducers(rank: int, size: int, device: str) -> dict[str, tuple[list[str], str]]:
    """Audit each reducer; return its causes and report."""
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for name in ("a2a", "ag_rs"):
        reducer = make_reducer(
            name,
            group=None,
            max_tokens=4,
            num_q_heads=4,
            head_dim=16,
            dtype=torch.float32,
            device=device,
        )
        out, lse = torch.zeros(4, 4, 16, device=device), torch.zeros(4, 4, device=device)

        def mutate(round_: int, out: torch.Tensor = out, lse: torch.Tensor = lse) -> None:
            out.copy_(torch.randn(out.shape, generator=generator))
            lse.copy_(torch.randn(lse.shape, generator=generator))
            lse[round_ % 4] = -torch.inf

        state = AttnState(out, lse)
        report = audit(
            lambda reducer=reducer, state=state: reducer(state),
            mutate,
            forbid_allocations=True,
            device=device,
        )
        found[name] = (sorted(report.causes), str(report))
    return found
