"""What one rank of a DCP group does in a decode step, small enough to start from a notebook.

run_ranks("dcp_lab.reducers.demo:decode_and_reduce", size, args=(calls,))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dcp_lab.ops.decode import paged_decode
from dcp_lab.reducers import make_reducer
from dcp_lab.state import AttnState

Call = tuple[Sequence[torch.Tensor], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank found, on the CPU.

    Attributes:
        partial: Attention over this rank's own tokens, all query heads.
        reduced: For each reducer, attention over all ranks' tokens, this rank's heads.
        memory_bytes: For each reducer, what it holds.
    """

    partial: AttnState
    reduced: dict[str, AttnState]
    memory_bytes: dict[str, int]


def decode_and_reduce(
    rank: int, size: int, calls: Sequence[Sequence[Call]], names: Sequence[str] = ("ag_rs", "a2a")
) -> list[RankResult]:
    """Attend this rank's share of each case with paged_decode, then reduce it over the group.

    Args:
        rank: This rank.
        size: Ranks in the group.
        calls: For each case, for each rank, the positional and keyword arguments of paged_decode.
        names: Reducers to use, one after the other.

    Returns:
        One result a case.
    """
    results = []
    for case in calls:
        tensors, options = case[rank]
        tensors, options = _on_this_device(tensors, options)
        partial = paged_decode(*tensors, **options)
        num_tokens, num_q_heads, head_dim = partial.out.shape
        reduced, memory_bytes = {}, {}
        for name in names:
            reducer = make_reducer(
                name,
                group=None,
                max_tokens=num_tokens,
                num_q_heads=num_q_heads,
                head_dim=head_dim,
                dtype=partial.out.dtype,
                device=partial.out.device,
            )
            # A copy: the next call of a reducer overwrites its result.
            reduced[name] = AttnState(*(part.clone().cpu() for part in reducer(partial)))
            memory_bytes[name] = reducer.memory_bytes()
        partial = AttnState(*(part.cpu() for part in partial))
        results.append(RankResult(partial, reduced, memory_bytes))
    return results


def _on_this_device(
    tensors: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the arguments with their tensors on this rank's GPU, if it has one."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    return [tensor.to(device) for tensor in tensors], moved
