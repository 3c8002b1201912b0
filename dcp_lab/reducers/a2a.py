"""a2a: one all-to-all carries out and the LSE together, the receiver merges."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from dcp_lab.kernels.merge import launch_merge, launch_pack
from dcp_lab.reducers.base import Reducer
from dcp_lab.state import AttnState

# A chunk's parts start at multiples of this many bytes, so that kernels and NCCL move whole
# vectors.
ALIGNMENT = 16


def chunk_bytes(
    num_tokens: int, heads_per_rank: int, head_dim: int, itemsize: int
) -> tuple[int, int]:
    """Return (bytes of out, bytes of out and LSE) in what one rank sends another for T tokens.

    Both parts are padded to 16 bytes.
    """
    out = num_tokens * heads_per_rank * head_dim * itemsize
    lse = num_tokens * heads_per_rank * 4
    out, lse = (-(-part // ALIGNMENT) * ALIGNMENT for part in (out, lse))
    return out, out + lse


class A2AReducer(Reducer):
    """Reduce by pack, one all-to-all of out with its fp32 LSE, and merge: 3 launches.

    What rank r gets of rank n is one chunk: out [T, Hq / size, D] in `dtype`, then lse
    [T, Hq / size] as the fp32 bits that were given. The merge takes the ranks in order,
    accumulates in fp32 and rounds once, so the same inputs give the same bits, in a graph too.

    A rank sends (size - 1) * (T Hq / size) * (D itemsize + 4) bytes a call, up to padding. It
    holds a send and a receive buffer of size chunks.

    The rest of the contract is Reducer's.
    """

    name: ClassVar[str] = "a2a"

    def _allocate(self) -> None:
        self._send = self._buffer((self.size * self._chunk(self.max_tokens)[1],), torch.uint8)
        self._recv = self._buffer((self.size * self._chunk(self.max_tokens)[1],), torch.uint8)
        self._views_of: int | None = None

    def _reduce(self, out: torch.Tensor, lse: torch.Tensor, merged: AttnState) -> None:
        num_tokens = out.shape[0]
        if self._views_of != num_tokens:
            # Views cost the host microseconds; the layers of a step share them.
            self._send_views = self._views(self._send, num_tokens)
            self._recv_views = self._views(self._recv, num_tokens)
            self._views_of = num_tokens
        send, send_out, send_lse = self._send_views
        recv, recv_out, recv_lse = self._recv_views
        launch_pack(out=out, lse=lse, send_out=send_out, send_lse=send_lse)
        dist.all_to_all_single(recv, send, group=self.group)
        launch_merge(outs=recv_out, lses=recv_lse, out=merged.out, lse=merged.lse)

    def _chunk(self, num_tokens: int) -> tuple[int, int]:
        return chunk_bytes(num_tokens, self.heads_per_rank, self.head_dim, self.dtype.itemsize)

    def _views(
        self, buffer: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the bytes in use for T tokens, their out [size, T, H, D] and lse [size, T, H]."""
        out_bytes, size_bytes = self._chunk(num_tokens)
        num_rows = num_tokens * self.heads_per_rank
        used = buffer[: self.size * size_bytes]
        chunks = used.view(self.size, size_bytes)
        out = chunks.view(self.dtype)[:, : num_rows * self.head_dim]
        lse = chunks[:, out_bytes:].view(torch.float32)[:, :num_rows]
        return (
            used,
            out.unflatten(1, (num_tokens, self.heads_per_rank, self.head_dim)),
            lse.unflatten(1, (num_tokens, self.heads_per_rank)),
        )
