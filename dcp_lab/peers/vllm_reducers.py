"""vLLM's exchanges of attention states: dcp_a2a_lse_reduce and cp_lse_ag_out_rs.

They are called as vLLM calls them, on an object that stands for its GroupCoordinator: the
collectives are those of vLLM's own communicator (NCCL through its PyNccl) where it can be made,
else those of its base class, which are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dcp_lab.peers.base import module_missing
from dcp_lab.state import AttnState

INSTALL = "pip install vllm==0.25.1"
NAMES = ("a2a", "ag_rs")


def absent() -> str | None:
    """Return None when vLLM's functions can run here, else why not."""
    if not torch.cuda.is_available():
        return "it needs GPUs"
    for module in ("dcp_alltoall", "common"):
        if missing := module_missing(f"vllm.v1.attention.ops.{module}", INSTALL):
            return missing
    try:
        from vllm import config  # noqa: F401
        from vllm.distributed import parallel_state  # noqa: F401
        from vllm.v1.attention.ops import common, dcp_alltoall  # noqa: F401
    except ImportError as error:
        return f"vLLM is there but does not import: {error}; {INSTALL}"
    return None


class _Group:
    """What of vLLM's GroupCoordinator the two functions use."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device_group = group
        self.world_size = dist.get_world_size(group)
        self.rank_in_group = dist.get_rank(group)
        ranks = dist.get_process_group_ranks(group)
        self._communicator, self.kind = _communicator(
            dist.new_group(ranks, backend="gloo"), group, device
        )

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return self._communicator.all_gather(tensor, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return self._communicator.reduce_scatter(tensor, dim)


def _communicator(
    cpu_group: dist.ProcessGroup, group: dist.ProcessGroup, device: torch.device
) -> tuple[Any, str]:
    """Return (vLLM's communicator, "pynccl" or "torch"), the same kind on all ranks."""
    arguments = {"cpu_group": cpu_group, "device": device, "device_group": group}
    own = None
    try:
        from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    except (ImportError, AttributeError, OSError, RuntimeError):
        pass
    else:
        own = CudaCommunicator
    found: list[object] = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(found, own is not None, group=cpu_group)
    if all(found):
        return own(**arguments, unique_name="dcp"), "pynccl"
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )

    return DeviceCommunicatorBase(**arguments, unique_name="dcp"), "torch"


def make(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[dict[str, Callable[[AttnState], AttnState]], str]:
    """Return ({"a2a": ..., "ag_rs": ...}, "pynccl" or "torch"). Collective.

    Each takes a state over all heads and returns this rank's heads, as the lab's reducers do.
    `ag_rs` multiplies the out that it is given in place: give it one that may change.
    """
    from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
    from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce

    coordinator = _Group(group, device)

    def a2a(state: AttnState) -> AttnState:
        return AttnState(*dcp_a2a_lse_reduce(*state, coordinator, return_lse=True))

    def ag_rs(state: AttnState) -> AttnState:
        # Without a context, as vLLM's engine calls it: a CPTritonContext launches the binary of
        # its first call again, which Triton 3.6 refuses ("takes exactly 27 arguments (24 given)").
        return AttnState(*cp_lse_ag_out_rs(*state, coordinator, return_lse=True))

    return {"a2a": a2a, "ag_rs": ag_rs}, coordinator.kind
