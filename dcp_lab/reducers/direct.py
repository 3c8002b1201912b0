"""direct: each rank writes into its peers' memory, one kernel sends, waits and merges."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dcp_lab.kernels.exchange import (
    MAX_RANKS,
    ExchangeConfig,
    Failure,
    Mailbox,
    launch_reduce,
)
from dcp_lab.ops.checks import fail, unsupported
from dcp_lab.ops.device import device_of
from dcp_lab.reducers.base import Reducer
from dcp_lab.state import AttnState

DEFAULT_TIMEOUT_S = 20.0


class DirectReducer(Reducer):
    """Reduce by writing into the peers' memory: 1 launch, no collective, no flag.

    Each rank holds a mailbox in torch's symmetric memory: two parities of one slot a source rank,
    a slot being [token][local head][D] of `dtype`, and the same of fp32 LSE bits. A call stores
    every peer's heads into the peer's slot, waits until the peers' parts of its own heads are
    there, and merges them in rank order, accumulating in fp32 and rounding once, so the same
    inputs give the same bits, in a graph too. A word that has not arrived is all ones: each word
    is its own flag (dcp_lab.kernels.exchange says why that is enough, and why two parities are).

    A rank sends (size - 1) * (T Hq / size) * (D itemsize + 4) bytes a call, like a2a, and holds
    2 size max_tokens (Hq / size) (D itemsize + 4) bytes of slots.

    Args:
        group, max_tokens, num_q_heads, head_dim, dtype, device: As of Reducer; the same on all
            ranks. 1 to 16 ranks, GPUs that reach each other's memory (one NVLink domain).
        timeout_s: How long a call waits for its peers. Default: 20.
        config: Launch knobs. Default: by the size of the call.

    Raises:
        ValueError, NotImplementedError: As of Reducer; too many ranks; a device that is no GPU;
            arguments that differ between ranks.
        RuntimeError: At construction, symmetric memory cannot be had. In a call or in check(), a
            peer was silent for timeout_s.

    Notes:
        A peer that is silent for timeout_s (it died, it is stuck, it made no call or one of fewer
        tokens) fails the reducer on all ranks: the call that waited returns NaN, later ones return
        NaN without waiting, and check() raises an error that names the silent rank. A call checks
        what is known by then; after replays of a graph call check() yourself, once a step. The
        process, other reducers and the graph stay usable; make a new reducer to go on.
        The calls of one reducer must follow each other on the device: one stream, or events
        between them; never two of them in parallel branches of a graph.
        Making one is collective and syncs the device. Graph capture of calls: safe, see Reducer.
        CPU: not supported, there is no peer memory; 'a2a' and 'ag_rs' are.
        ROCm: builds for gfx942 and gfx950; never run. DIRECT.md beside this file says what to
        expect and what to change.

    Source:
        Written here, see dcp_lab.kernels.exchange. Peers: vLLM's DirectDCPA2AWorkspace.
    """

    name: ClassVar[str] = "direct"

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None,
        max_tokens: int,
        num_q_heads: int,
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
            num_q_heads=num_q_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )

    def check(self) -> None:
        """Raise when a peer was silent, as far as this host knows by now.

        Raises:
            RuntimeError: It was; the message names the silent rank.

        Notes:
            Reads one word of host memory: no sync. After synchronising with the device it speaks
            of all calls before.
        """
        if self._link is not None:
            self._link.check()

    def memory_bytes(self) -> int:
        """Return the bytes of device memory this reducer holds, mailbox and result included."""
        return super().memory_bytes() + (0 if self._link is None else self._link.memory_bytes())

    def _allocate(self) -> None:
        rows = self.max_tokens * self.heads_per_rank
        self._link = Link.connect(
            self.group,
            self.device,
            [rows * self.head_dim * self.dtype.itemsize, rows * 4],
            timeout_s=self.timeout_s,
            agreed={
                "max_tokens": self.max_tokens,
                "num_q_heads": self.num_q_heads,
                "head_dim": self.head_dim,
                "dtype": str(self.dtype),
            },
        )
        self._num_sms = device_of(self.device).num_sms

    def _reduce(self, out: torch.Tensor, lse: torch.Tensor, merged: AttnState) -> None:
        self._link.check()
        config = self.config
        if config is None:
            rows = out.shape[0] * self.heads_per_rank
            payload = rows * self.head_dim * self.dtype.itemsize
            config = ExchangeConfig.from_payload(payload, self._num_sms)
        launch_reduce(
            self._link.mailbox,
            out=out,
            lse=lse,
            merged_out=merged.out,
            merged_lse=merged.lse,
            config=config,
        )


@dataclasses.dataclass(frozen=True)
class Link:
    """A mailbox in symmetric memory whose peers can be reached, and what keeps it there.

    Attributes:
        mailbox: For the launches.
        handle: torch's, which owns the mappings of the peers' memory.
        timeout_s: Of the mailbox.
        failed: The mailbox's record as this host sees it, one word.
    """

    mailbox: Mailbox
    handle: Any
    timeout_s: float
    failed: Any

    @classmethod
    def connect(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        payload_bytes: Sequence[int],
        *,
        timeout_s: float,
        agreed: Mapping[str, object],
    ) -> Link:
        """Return this rank's end, when every rank of the group has made its own.

        Args:
            group: At most 16 ranks.
            device: This rank's GPU.
            payload_bytes: What a slot of each region has to hold.
            timeout_s: How long a call waits.
            agreed: Arguments, by name, that must be the same on all ranks.

        Raises:
            ValueError: They are not, or there are too many ranks.
            RuntimeError: Symmetric memory cannot be had.
        """
        size = dist.get_world_size(group)
        if size > MAX_RANKS:
            fail("group", f"at most {MAX_RANKS} ranks", f"{size} ranks")
        with torch.cuda.device(device):
            _check_agreed(agreed, group, size)
            offsets, slots, total = Mailbox.layout(size, payload_bytes)
            memory, handle = symmetric_buffer(total, device, group)
            Mailbox.clear(memory)
            rank = dist.get_rank(group)
            addresses = _addresses(handle, size, memory, rank)
            record = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            mailbox = Mailbox(
                rank=rank,
                size=size,
                memory=memory,
                addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
                record=record,
                offsets=tuple(offsets),
                slot_bytes=tuple(slots),
                timeout_ns=int(timeout_s * 1e9),
                arch=device_of(device).arch,
            )
            # No peer may write before every mailbox is clear.
            torch.cuda.synchronize()
            _everybody(group, size, True)
        return cls(mailbox, handle, timeout_s, record.numpy())

    def check(self) -> None:
        """Raise RuntimeError when the record says that a peer was silent."""
        failure = Failure.decode(int(self.failed[0]))
        if failure is None:
            return
        ranks = "rank " + ", rank ".join(map(str, failure.silent))
        raise RuntimeError(
            f"direct: {ranks} of {self.mailbox.size} sent nothing, or not all, for "
            f"{self.timeout_s:g} s in call {failure.call}, on which rank {failure.noticed_by} "
            f"waited (this is rank {self.mailbox.rank}). It died, is stuck, or made another call "
            "than its peers (another T, or none). Results since then are NaN. Mend that rank, "
            "then make the reducer anew; timeout_s sets how long a call waits"
        )

    def memory_bytes(self) -> int:
        """Return the bytes of the mailbox and of the table of its peers."""
        return self.mailbox.memory.nbytes + self.mailbox.addresses.nbytes


def check_peer_memory(name: str, device: torch.device | str | int) -> None:
    """Raise NotImplementedError unless the device can be one whose memory peers reach."""
    kind = torch.device(device).type
    if kind != "cuda":
        unsupported(
            "name",
            name,
            f"it writes into the memory of other GPUs, and device is {kind}; use 'a2a' or 'ag_rs' "
            "('nccl' for queries) there",
        )


def check_timeout(timeout_s: float) -> float:
    """Return timeout_s if it is a time that a wait can take."""
    good = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not good or not 0 < timeout_s <= 3600:
        fail("timeout_s", "seconds, more than 0 and at most 3600", timeout_s)
    return float(timeout_s)


def _everybody(group: dist.ProcessGroup, size: int, value: object) -> list[object]:
    """Return every rank's value, in rank order, when all have come here."""
    values: list[object] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def _check_agreed(agreed: Mapping[str, object], group: dist.ProcessGroup, size: int) -> None:
    """Raise the same ValueError on all ranks when they were given different arguments."""
    everybody = _everybody(group, size, dict(agreed))
    for name in agreed:
        given = [theirs.get(name) for theirs in everybody]
        if any(value != given[0] for value in given):
            fail(name, "the same on all ranks", given)


def symmetric_buffer(
    nbytes: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[torch.Tensor, Any]:
    """Return (this rank's uint8 buffer, torch's handle of all ranks' buffers). Collective.

    Raises:
        RuntimeError: There is no symmetric memory over this group.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    try:
        with _without_multicast():
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            return memory, symmetric_memory.rendezvous(memory, group.group_name)
    except RuntimeError as error:
        raise RuntimeError(
            "direct: no symmetric memory over this group: every rank needs a GPU that reaches the "
            f"others' memory (one machine or one NVLink domain); use 'a2a'. torch says: {error}"
        ) from error


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Let torch make no multicast object: nothing here uses one, and not every machine may."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _addresses(handle: Any, size: int, memory: torch.Tensor, rank: int) -> list[int]:
    """Return where each rank's buffer lies for this process."""
    # get_remote_tensor, where there is one, minds a buffer that does not start its allocation.
    view = getattr(handle, "get_remote_tensor", handle.get_buffer)
    found = [view(peer, tuple(memory.shape), torch.uint8).data_ptr() for peer in range(size)]
    if found[rank] != memory.data_ptr():
        raise RuntimeError(
            "direct: torch's symmetric memory gives another address for this rank's own buffer "
            f"({found[rank]:#x}, allocated at {memory.data_ptr():#x}): this torch release is not "
            "understood; use 'a2a'"
        )
    return found
