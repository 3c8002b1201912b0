"""Reducers: from a rank's state over all heads to the merged state of its own heads."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dcp_lab.ops.checks import fail
from dcp_lab.reducers.a2a import A2AReducer
from dcp_lab.reducers.ag_rs import AllGatherReduceScatterReducer
from dcp_lab.reducers.base import Reducer
from dcp_lab.reducers.direct import DirectReducer
from dcp_lab.reducers.queries import QueryGather, make_query_gather

__all__ = ["QueryGather", "Reducer", "make_query_gather", "make_reducer"]

REDUCER_NAMES = ("ag_rs", "a2a", "direct")


def make_reducer(
    name: str,
    *,
    group: dist.ProcessGroup | None,
    max_tokens: int,
    num_q_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str | int,
) -> Reducer:
    """Return the reducer of this name, its buffers made.

    Args:
        name: "ag_rs" (all-gather the LSE, weigh, reduce-scatter out), "a2a" (one all-to-all of out
            and LSE, then merge) or "direct" (written into the peers' memory and merged in one
            launch; GPUs that reach each other's memory).
        group: Process group of the ranks, in shard order. None is the default group.
        max_tokens: Largest T of a call.
        num_q_heads: Hq, heads of the states given, divisible by the group's size.
        head_dim: D of out, 1 to 512.
        dtype: Of out: torch.float32, torch.float16 or torch.bfloat16.
        device: Where the states are.

    Returns:
        reducer(AttnState over all Hq heads) -> AttnState of this rank's Hq / size heads; see
        Reducer.

    Raises:
        ValueError: The name is unknown, or an argument breaks Reducer's contract.
        NotImplementedError: head_dim > 512, or "direct" on a device that is no GPU.
        RuntimeError: "direct" finds no symmetric memory.

    Notes:
        Under graph capture: make it before capture, call it inside.

    Source:
        Written here. The first two exchanges are those of vLLM's cp_lse_ag_out_rs and
        dcp_a2a_lse_reduce.
    """
    kinds = {
        kind.name: kind for kind in (AllGatherReduceScatterReducer, A2AReducer, DirectReducer)
    }
    if name not in kinds:
        fail("name", " or ".join(map(repr, REDUCER_NAMES)), name)
    return kinds[name](
        group=group,
        max_tokens=max_tokens,
        num_q_heads=num_q_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
