"""What every reducer has in common: its contract, its checks, and the buffers it returns."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
import torch.distributed as dist

from dcp_lab.kernels.launch import KnownCalls, call_key
from dcp_lab.kernels.merge import launch_merge
from dcp_lab.ops.checks import (
    FLOAT_DTYPES,
    check_positive_int,
    check_tensor,
    dtype_name,
    fail,
)
from dcp_lab.ops.merge import check_merge_device, check_merge_head_dim
from dcp_lab.state import AttnState


class Reducer(abc.ABC):
    """Merges one attention state a rank, over all heads, into the state of each rank's own heads.

    Every rank of the group attends its shard of the KV with all Hq query heads and calls the
    reducer with the result. Rank r gets back, over the whole context, the state of the heads
    [r Hq / size, (r + 1) Hq / size):

        lse[t, h] = ln sum_n exp(lse_n[t, h])
        out[t, h] = sum_n exp(lse_n[t, h] - lse[t, h]) out_n[t, h]

    An LSE of -inf, NaN or +inf says that the rank saw no key of that row, and what its out holds
    there counts as nothing. A row that no rank saw a key of gives out = 0 and lse = -inf.

    Args:
        group: Process group of the ranks, in shard order. None is the default group.
        max_tokens: Largest T of a call; the buffers are made for it once, here.
        num_q_heads: Hq, heads of the states given, divisible by the group's size.
        head_dim: D of out (the value head_dim), 1 to 512.
        dtype: Of out: torch.float32, torch.float16 or torch.bfloat16.
        device: Where the states are, of a type that the group's backend serves.

    Attributes:
        group, size, rank: The process group, its number of ranks, and this one's place in it.
        max_tokens, num_q_heads, head_dim, dtype, device: As given.
        heads_per_rank: Hq / size, heads of the result.

    Raises:
        ValueError: At construction or in a call, an argument breaks the contract; the message
            names it, what was expected and what was given. T > max_tokens is refused, never cut.
        NotImplementedError: head_dim > 512.

    Notes:
        All ranks make a call together, with the same T. Ranks that disagree on T, or a rank that
        does not come, are found by the backend only: the call ends with its error, or with its
        timeout (`timeout` of init_process_group or new_group) under gloo; under NCCL and RCCL the
        watchdog ends the process after that time. Replays of a graph are not watched.
        The result stays valid until the reducer's next call, which overwrites it; inputs are never
        changed. Several reducers may be alive at once: they share no buffer.
        Host: a call with the buffers of an earlier one, of the same shapes, is not checked again.
        Graph capture: safe. A call allocates nothing and reads no device value; make the reducer
        and call it once before capture, so that kernels are compiled and the backend is connected.
        Graphs of any T <= max_tokens and eager calls may share one reducer.
        CPU: gloo, and the kernels through Triton's interpreter; bf16 is computed in fp32 there,
        which allocates.
    """

    name: ClassVar[str]

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None,
        max_tokens: int,
        num_q_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | int,
    ) -> None:
        self.group = _check_group(group)
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        self.num_q_heads = check_positive_int("num_q_heads", num_q_heads)
        if num_q_heads % self.size:
            fail("num_q_heads", f"a multiple of the group's {self.size} ranks", num_q_heads)
        self.heads_per_rank = num_q_heads // self.size
        self.head_dim = check_positive_int("head_dim", head_dim)
        check_merge_head_dim("head_dim", head_dim)
        if dtype not in FLOAT_DTYPES:
            fail("dtype", " or ".join(f"torch.{dtype_name(d)}" for d in FLOAT_DTYPES), dtype)
        self.dtype = dtype
        self.device = _check_device(device, self.group)
        self._buffers: list[torch.Tensor] = []
        # Where the results of calls go, whose arguments were checked.
        self._known = KnownCalls()
        self._out = self._buffer((max_tokens, self.heads_per_rank, head_dim), dtype)
        self._lse = self._buffer((max_tokens, self.heads_per_rank), torch.float32)
        self._exchanges = self.size > 1
        if self._exchanges:
            self._allocate()

    def __call__(self, state: AttnState, *, out: torch.Tensor | None = None) -> AttnState:
        """Return this rank's heads, merged: out [T, Hq / size, D], lse fp32 [T, Hq / size].

        Args:
            state: This rank's out [T, Hq, D] in `dtype`, last dim contiguous, any other strides,
                and lse fp32 [T, Hq], any strides; T <= max_tokens, the same on all ranks. T = 0
                returns an empty state without any communication.
            out: [T, Hq / size, D] in `dtype`, contiguous, written in place of the reducer's own.
                Default: the reducer's own, or what write_to set.
        """
        key = call_key(*state, out) if isinstance(state, AttnState) else None
        own = self._known.get(key)
        if own is None:
            num_tokens = self._check_call(state, out)
            own = AttnState(self._out[:num_tokens], self._lse[:num_tokens])
            if num_tokens:
                self._known.put(key, own)
        theirs, lse = state
        merged = own if out is None else AttnState(out, own.lse)
        if len(theirs) == 0:
            return merged
        if not self._exchanges:
            # Not the input itself: an empty row is cleaned and the result has one owner at any
            # size.
            launch_merge(outs=theirs[None], lses=lse[None], out=merged.out, lse=merged.lse)
        else:
            self._reduce(theirs, lse, merged)
        return merged

    def write_to(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Put the results of all later calls into these tensors, instead of the reducer's own.

        Saves the copy to where the next kernel reads. Call it before graphs are captured.

        Args:
            out: [max_tokens, Hq / size, D] in `dtype`, contiguous.
            lse: fp32 [max_tokens, Hq / size], contiguous.

        Raises:
            ValueError: One has another shape, dtype, device or strides.
        """
        shape = (self.max_tokens, self.heads_per_rank, self.head_dim)
        check_tensor("out", out, dtypes=(self.dtype,), shape=shape, device=self.device)
        check_tensor("lse", lse, dtypes=(torch.float32,), shape=shape[:2], device=self.device)
        for name, tensor in (("out", out), ("lse", lse)):
            if not tensor.is_contiguous():
                fail(name, "a contiguous tensor", f"stride {tensor.stride()}")
        mine = (id(self._out), id(self._lse))
        self._buffers = [b for b in self._buffers if id(b) not in mine] + [out, lse]
        self._out, self._lse = out, lse
        self._known.forget()

    def exchange_alone(self) -> None:
        """Let a group of one make the calls of a larger one, which it can do without.

        For traces on one GPU: the host's calls are the same, what a peer would do is missing.
        """
        if not self._exchanges:
            self._allocate()
            self._exchanges = True

    def memory_bytes(self) -> int:
        """Return the bytes of device memory this reducer holds, its result included.

        What the backend keeps for its own channels is not in it.
        """
        return sum(buffer.nbytes for buffer in self._buffers)

    @abc.abstractmethod
    def _allocate(self) -> None:
        """Make the exchange buffers; not for a group of one, unless it exchanges alone."""

    @abc.abstractmethod
    def _reduce(self, out: torch.Tensor, lse: torch.Tensor, merged: AttnState) -> None:
        """Exchange and merge T >= 1 tokens, into merged."""

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new buffer, counted by memory_bytes."""
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        self._buffers.append(buffer)
        return buffer

    def _check_call(self, state: AttnState, merged_out: torch.Tensor | None) -> int:
        """Return T of a call that fits this reducer."""
        if not isinstance(state, tuple) or len(state) != 2:
            fail("state", "AttnState(out, lse)", state)
        out = check_tensor(
            "state.out",
            state[0],
            dtypes=(self.dtype,),
            shape=("T", self.num_q_heads, self.head_dim),
            device=self.device,
            last_contiguous=True,
        )
        num_tokens = out.shape[0]
        check_tensor(
            "state.lse",
            state[1],
            dtypes=(torch.float32,),
            shape=(("T", num_tokens), self.num_q_heads),
            device=self.device,
        )
        if num_tokens > self.max_tokens:
            fail(
                "state.out",
                f"at most max_tokens={self.max_tokens} tokens (for more, make a reducer with a "
                "larger max_tokens)",
                out,
            )
        if merged_out is None:
            return num_tokens
        shape = (num_tokens, self.heads_per_rank, self.head_dim)
        check_tensor("out", merged_out, dtypes=(self.dtype,), shape=shape, device=self.device)
        if not merged_out.is_contiguous():
            fail("out", "a contiguous tensor", f"stride {merged_out.stride()}")
        return num_tokens


def _check_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group, the default one for None."""
    if not dist.is_available() or not dist.is_initialized():
        fail("group", "a process group: call torch.distributed.init_process_group first", group)
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        fail("group", "a torch.distributed process group that this rank is in, or None", group)
    return group


def _check_device(device: torch.device | str | int, group: dist.ProcessGroup) -> torch.device:
    """Return the device with its index, if the group's backend serves its type."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # "cpu:gloo,cuda:nccl" for a group that serves both.
    config = dist.get_backend_config(group)
    served = [entry.split(":")[0] for entry in config.split(",")]
    if device.type not in served:
        fail("device", f"a type that the group's backend serves ({config})", str(device))
    check_merge_device("device", device)
    return device
