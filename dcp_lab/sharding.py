"""Which rank of a DCP group holds which token of a request's KV cache."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

IntOrTensor = TypeVar("IntOrTensor", int, torch.Tensor)

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Shard:
    """One rank's share of every request's tokens.

    Token i of a request lives on rank (i // interleave_size) % size. A rank keeps its tokens
    densely, in order: they have local positions 0, 1, 2, ...

    Args:
        rank: This rank, 0 <= rank < size.
        size: Ranks in the group, >= 1.
        interleave_size: Consecutive tokens a rank takes before the next rank's turn. Default: 1.

    Raises:
        ValueError: An argument is out of range.

    Notes:
        Every method takes an int or an integer tensor and returns the same kind: an int, or a
        tensor of the same dtype where that is int32 or int64, int64 for a narrower one, which
        could not hold the results. None of them reads a device value on the host, so all are safe
        under graph capture. ValueError for anything else, floating point and bool among them.
    """

    rank: int
    size: int
    interleave_size: int = 1

    def __post_init__(self) -> None:
        if not _is_int(self.size) or self.size < 1:
            raise ValueError(f"Shard: size: expected an int >= 1, got {self.size!r}")
        if not _is_int(self.rank) or not 0 <= self.rank < self.size:
            raise ValueError(
                f"Shard: rank: expected an int in [0, size={self.size}), got {self.rank!r}"
            )
        if not _is_int(self.interleave_size) or self.interleave_size < 1:
            raise ValueError(
                f"Shard: interleave_size: expected an int >= 1, got {self.interleave_size!r}"
            )

    def owner(self, position: IntOrTensor) -> IntOrTensor:
        """Return the rank that holds the token at this global position."""
        position = self._counted("position", position)
        return (position // self.interleave_size) % self.size

    def local_position(self, position: IntOrTensor) -> IntOrTensor:
        """Return where the owner keeps the token at this global position."""
        position = self._counted("position", position)
        cycle = self.interleave_size * self.size
        return position // cycle * self.interleave_size + position % self.interleave_size

    def global_position(self, local_position: IntOrTensor) -> IntOrTensor:
        """Return the global position of this rank's token at this local position."""
        local_position = self._counted("local_position", local_position)
        turn = local_position // self.interleave_size
        start = (turn * self.size + self.rank) * self.interleave_size
        return start + local_position % self.interleave_size

    def local_seq_lens(self, global_seq_lens: torch.Tensor) -> torch.Tensor:
        """Return how many of each request's first global_seq_lens tokens live on this rank.

        Args:
            global_seq_lens: Integer tensor of any shape, tokens of the whole request, >= 0.

        Returns:
            int32 tensor of the same shape on the same device; no device sync.

        Raises:
            ValueError: global_seq_lens is no integer tensor.
        """
        if not isinstance(global_seq_lens, torch.Tensor):
            raise ValueError(
                f"global_seq_lens: expected an integer tensor, got {global_seq_lens!r}"
            )
        global_seq_lens = self._counted("global_seq_lens", global_seq_lens)
        cycle = self.interleave_size * self.size
        rest = global_seq_lens % cycle - self.rank * self.interleave_size
        full = global_seq_lens // cycle * self.interleave_size
        return (full + rest.clamp(0, self.interleave_size)).to(torch.int32)

    def _counted(self, argument: str, value: IntOrTensor) -> IntOrTensor:
        """Return value in a dtype that can hold a whole turn of the dealing."""
        if not isinstance(value, torch.Tensor):
            if not _is_int(value):
                raise ValueError(
                    f"{argument}: expected an int or an integer tensor, got {value!r}"
                )
            return value
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            raise ValueError(f"{argument}: expected an integer tensor, got {value.dtype}")
        fits = self.interleave_size * self.size <= _INT32_MAX
        if value.dtype == torch.int64 or (value.dtype == torch.int32 and fits):
            return value
        return value.to(torch.int64)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
