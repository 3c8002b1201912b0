"""ag_rs: all-gather the LSE, weigh out, reduce-scatter it."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from dcp_lab.kernels.merge import launch_rescale
from dcp_lab.reducers.base import Reducer
from dcp_lab.state import AttnState

# torch 2.13 renamed both and warns at the old names; torch 2.11 has only those.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGatherReduceScatterReducer(Reducer):
    """Reduce by all-gather of the LSE, rescale, reduce-scatter of out: 3 launches.

    A fourth launch copies an lse that is not contiguous. Every rank learns all LSEs, so each
    weighs its own out by exp(lse_rank - lse), which makes the merge a plain sum over ranks.

    out is weighed in fp32 and travels in `dtype`, as in the servers that this is compared with:
    each of the size terms is rounded before the sum and the sum is the backend's, in its own
    order and mostly in `dtype`. So expect up to 2 size - 1 roundings where a2a has one. Equal
    inputs gave equal bits wherever the backend keeps its algorithm, which NCCL does for one size
    on one topology; a2a does not depend on that.

    A rank sends (size - 1) * T Hq * 4 bytes of LSE and (size - 1) * (T Hq / size) * D itemsize of
    out a call with ring algorithms. It holds the gathered LSEs [size, T, Hq], its own [T, Hq] and
    the weighed out [size, T, Hq / size, D].

    The rest of the contract is Reducer's.
    """

    name: ClassVar[str] = "ag_rs"

    def _allocate(self) -> None:
        rows = self.max_tokens * self.num_q_heads
        self._own_lse = self._buffer((rows,), torch.float32)
        self._lses = self._buffer((self.size * rows,), torch.float32)
        self._weighed = self._buffer((rows * self.head_dim,), self.dtype)
        self._views_of: int | None = None

    def _reduce(self, out: torch.Tensor, lse: torch.Tensor, merged: AttnState) -> None:
        num_tokens = out.shape[0]
        if self._views_of != num_tokens:
            # Views cost the host microseconds; the layers of a step share them.
            self._views = self._make_views(num_tokens)
            self._views_of = num_tokens
        own_lse, lses, received, weighed, sent = self._views
        if not lse.is_contiguous():
            lse = own_lse.copy_(lse)
        all_gather(received, lse, group=self.group)
        launch_rescale(rank=self.rank, out=out, lses=lses, send=weighed, lse=merged.lse)
        reduce_scatter(merged.out, sent, group=self.group)

    def _make_views(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return room for a contiguous lse, then what is gathered, then what is scattered.

        These in two shapes: ranks apart, as the kernel takes them, and along the first dimension,
        the form that gloo takes too.
        """
        rows = num_tokens * self.num_q_heads
        lses = self._lses[: self.size * rows].view(self.size, num_tokens, self.num_q_heads)
        weighed = self._weighed[: rows * self.head_dim].view(
            self.size, num_tokens, self.heads_per_rank, self.head_dim
        )
        own_lse = self._own_lse[:rows].view(num_tokens, self.num_q_heads)
        return own_lse, lses, lses.flatten(0, 1), weighed, weighed.flatten(0, 1)
