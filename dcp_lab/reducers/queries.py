"""Gathering the query heads of a group: every rank attends its shard with all of them."""

from __future__ import annotations

import abc
import math
from typing import ClassVar

import torch
import torch.distributed as dist

from dcp_lab.kernels.exchange import ExchangeConfig, launch_gather
from dcp_lab.kernels.launch import KnownCalls, call_key
from dcp_lab.ops.checks import FLOAT_DTYPES, check_positive_int, check_tensor, dtype_name, fail
from dcp_lab.ops.device import device_of
from dcp_lab.reducers.ag_rs import all_gather
from dcp_lab.reducers.base import _check_device, _check_group
from dcp_lab.reducers.direct import (
    DEFAULT_TIMEOUT_S,
    Link,
    check_peer_memory,
    check_timeout,
)

QUERY_GATHER_NAMES = ("nccl", "direct")


class QueryGather(abc.ABC):
    """Puts the query heads of all ranks together, in rank order, on every rank.

    Rank r holds heads [r Hq / size, (r + 1) Hq / size) of q; gather(q [T, Hq / size, D]) returns
    q [T, Hq, D], bit for bit (of a NaN only that it is one).

    Args:
        group: Process group of the ranks, in head order. None is the default group.
        max_tokens: Largest T of a call; the buffers are made for it once, here.
        num_q_heads_local: Hq / size, heads of the q given.
        head_dim: D.
        dtype: Of q: torch.float32, torch.float16 or torch.bfloat16.
        device: Where q is, of a type that the group's backend serves.

    Raises:
        ValueError: At construction or in a call, an argument breaks the contract; the message
            names it, what was expected and what was given. T > max_tokens is refused, never cut.

    Notes:
        All ranks make a call together, with the same T. The result stays valid until the next
        call, which overwrites it; q is never changed. Graph capture: safe; call once before it.
        Host: a call with the q of an earlier one, in place and shape, is not checked again.
    """

    name: ClassVar[str]

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None,
        max_tokens: int,
        num_q_heads_local: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | int,
    ) -> None:
        self.group = _check_group(group)
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        self.num_q_heads_local = check_positive_int("num_q_heads_local", num_q_heads_local)
        self.head_dim = check_positive_int("head_dim", head_dim)
        if dtype not in FLOAT_DTYPES:
            fail("dtype", " or ".join(f"torch.{dtype_name(d)}" for d in FLOAT_DTYPES), dtype)
        self.dtype = dtype
        self.device = _check_device(device, self.group)
        self._buffers: list[torch.Tensor] = []
        # Where the results of calls go, whose arguments were checked.
        self._known = KnownCalls()
        self._gathered = self._buffer((max_tokens, self.size * num_q_heads_local, head_dim))
        self._exchanges = self.size > 1
        if self._exchanges:
            self._allocate()

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """Return every rank's heads, [T, Hq, D], contiguous.

        Args:
            q: This rank's heads [T, Hq / size, D] in `dtype`, last dim contiguous, any other
                strides; T <= max_tokens, the same on all ranks. T = 0 returns an empty q without
                any communication.
        """
        key = call_key(q)
        gathered = self._known.get(key)
        if gathered is None:
            gathered = self._gathered[: self._check_q(q)]
            if len(gathered):
                self._known.put(key, gathered)
        if len(gathered) == 0:
            return gathered
        if not self._exchanges:
            return gathered.copy_(q)
        self._gather(q, gathered)
        return gathered

    def _check_q(self, q: torch.Tensor) -> int:
        """Return T of a q that fits this gather."""
        shape = ("T", self.num_q_heads_local, self.head_dim)
        check_tensor(
            "q", q, dtypes=(self.dtype,), shape=shape, device=self.device, last_contiguous=True
        )
        num_tokens = q.shape[0]
        if num_tokens > self.max_tokens:
            fail(
                "q",
                f"at most max_tokens={self.max_tokens} tokens (for more, make a gather with a "
                "larger max_tokens)",
                q,
            )
        return num_tokens

    def exchange_alone(self) -> None:
        """Let a group of one make the calls of a larger one; see Reducer.exchange_alone."""
        if not self._exchanges:
            self._allocate()
            self._exchanges = True

    def memory_bytes(self) -> int:
        """Return the bytes of device memory this gather holds, its result included."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @abc.abstractmethod
    def _allocate(self) -> None:
        """Make the exchange buffers; not for a group of one, unless it exchanges alone."""

    @abc.abstractmethod
    def _gather(self, q: torch.Tensor, gathered: torch.Tensor) -> None:
        """Fill gathered with T >= 1 tokens."""

    def _buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new buffer, counted by memory_bytes."""
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._buffers.append(buffer)
        return buffer


class CollectiveQueryGather(QueryGather):
    """Gather by one all-gather and one copy that moves ranks behind tokens: 2 launches.

    A third launch copies a q that is not contiguous. NCCL, RCCL or gloo: the group's backend.
    """

    name: ClassVar[str] = "nccl"

    def _allocate(self) -> None:
        elements = self.max_tokens * self.num_q_heads_local * self.head_dim
        self._own = self._buffer((elements,))
        self._received = self._buffer((self.size * elements,))
        self._views_of: int | None = None

    def _gather(self, q: torch.Tensor, gathered: torch.Tensor) -> None:
        if self._views_of != len(q):
            # Views cost the host microseconds; the layers of a step share them.
            self._views = self._make_views(gathered)
            self._views_of = len(q)
        own, received, ranks_behind, result = self._views
        all_gather(received, q if q.is_contiguous() else own.copy_(q), group=self.group)
        result.copy_(ranks_behind)

    def _make_views(self, gathered: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return room for a contiguous q, for all ranks', and those and gathered [T, R, H, D]."""
        shape = (len(gathered), self.num_q_heads_local, self.head_dim)
        own = self._own[: math.prod(shape)].view(shape)
        received = self._received[: self.size * own.numel()].view(self.size, *shape)
        result = gathered.view(shape[0], self.size, *shape[1:])
        return own, received.flatten(0, 1), received.transpose(0, 1), result


class DirectQueryGather(QueryGather):
    """Gather by writing into the peers' memory: 1 launch, no collective, no flag.

    As dcp_lab.reducers.direct.DirectReducer, whose Raises and Notes hold here too; check() raises
    when a peer was silent. A rank sends (size - 1) T (Hq / size) D itemsize bytes and holds
    2 size max_tokens (Hq / size) D itemsize bytes of slots. What arrives is copied from the slots
    into the result, which stays at one address, as a graph needs.

    Args:
        timeout_s: How long a call waits for its peers. Default: 20.
        config: Launch knobs. Default: by the size of the call.
    """

    name: ClassVar[str] = "direct"

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None,
        max_tokens: int,
        num_q_heads_local: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        config: ExchangeConfig | None = None,
    ) -> None:
        check_peer_memory("direct", device)
        self.timeout_s = check_timeout(timeout_s)
        self.config = config
        self._link: Link | None = None
        super().__init__(
            group=group,
            max_tokens=max_tokens,
            num_q_heads_local=num_q_heads_local,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )

    def check(self) -> None:
        """Raise RuntimeError when a peer was silent, as far as this host knows by now."""
        if self._link is not None:
            self._link.check()

    def memory_bytes(self) -> int:
        """Return the bytes of device memory this gather holds, mailbox and result included."""
        return super().memory_bytes() + (0 if self._link is None else self._link.memory_bytes())

    def _allocate(self) -> None:
        elements = self.max_tokens * self.num_q_heads_local * self.head_dim
        self._link = Link.connect(
            self.group,
            self.device,
            [elements * self.dtype.itemsize],
            timeout_s=self.timeout_s,
            agreed={
                "max_tokens": self.max_tokens,
                "num_q_heads_local": self.num_q_heads_local,
                "head_dim": self.head_dim,
                "dtype": str(self.dtype),
            },
        )
        self._num_sms = device_of(self.device).num_sms

    def _gather(self, q: torch.Tensor, gathered: torch.Tensor) -> None:
        self._link.check()
        config = self.config
        if config is None:
            config = ExchangeConfig.from_payload(q.nbytes, self._num_sms)
        launch_gather(self._link.mailbox, q=q, gathered=gathered, config=config)


def make_query_gather(
    name: str,
    *,
    group: dist.ProcessGroup | None,
    max_tokens: int,
    num_q_heads_local: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str | int,
) -> QueryGather:
    """Return the query gather of this name, its buffers made.

    Args:
        name: "nccl" (the group's collective, gloo too, and a copy) or "direct" (written into the
            peers' memory in one launch, GPUs only).
        group: Process group of the ranks, in head order. None is the default group.
        max_tokens: Largest T of a call.
        num_q_heads_local: Query heads of each rank.
        head_dim: D of q.
        dtype: Of q: torch.float32, torch.float16 or torch.bfloat16.
        device: Where q is.

    Returns:
        gather(q [T, Hq / size, D]) -> q [T, Hq, D], heads in rank order; see QueryGather.

    Raises:
        ValueError: The name is unknown, or an argument breaks QueryGather's contract.
        NotImplementedError: "direct" on a device that is no GPU.

    Notes:
        Under graph capture: make it before capture, call it inside.
    """
    kinds = {kind.name: kind for kind in (CollectiveQueryGather, DirectQueryGather)}
    if name not in kinds:
        fail("name", " or ".join(map(repr, QUERY_GATHER_NAMES)), name)
    return kinds[name](
        group=group,
        max_tokens=max_tokens,
        num_q_heads_local=num_q_heads_local,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
