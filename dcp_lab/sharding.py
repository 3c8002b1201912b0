"""Which rank of a DCP group holds which token of a request's KV cache."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

IntOrTensor = TypeVar("IntOrTensor", int, torch.Tensor)


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
        Every method takes an int or an integer tensor and returns the same kind. None of them
        reads a device value on the host, so all are safe under graph capture.
    """

    rank: int
    size: int
    interleave_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"Shard: size: expected an int >= 1, got {self.size!r}")
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.size:
            raise ValueError(
                f"Shard: rank: expected an int in [0, size={self.size}), got {self.rank!r}"
            )
        if not isinstance(self.interleave_size, int) or self.interleave_size < 1:
            raise ValueError(
                f"Shard: interleave_size: expected an int >= 1, got {self.interleave_size!r}"
            )

    def owner(self, position: IntOrTensor) -> IntOrTensor:
        """Return the rank that holds the token at this global position."""
        return (position // self.interleave_size) % self.size

    def local_position(self, position: IntOrTensor) -> IntOrTensor:
        """Return where the owner keeps the token at this global position."""
        cycle = self.interleave_size * self.size
        return position // cycle * self.interleave_size + position % self.interleave_size

    def global_position(self, local_position: IntOrTensor) -> IntOrTensor:
        """Return the global position of this rank's token at this local position."""
        turn = local_position // self.interleave_size
        start = (turn * self.size + self.rank) * self.interleave_size
        return start + local_position % self.interleave_size

    def local_seq_lens(self, global_seq_lens: torch.Tensor) -> torch.Tensor:
        """Return how many of each request's first global_seq_lens tokens live on this rank.

        Args:
            global_seq_lens: Integer tensor of any shape, tokens of the whole request, >= 0.

        Returns:
            int32 tensor of the same shape on the same device; no device sync.
        """
        cycle = self.interleave_size * self.size
        rest = global_seq_lens % cycle - self.rank * self.interleave_size
        full = global_seq_lens // cycle * self.interleave_size
        return (full + rest.clamp(0, self.interleave_size)).to(torch.int32)
