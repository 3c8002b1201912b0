"""The tiles of write_kv and gather_kv."""

from __future__ import annotations

import dataclasses

import torch
import triton

from dcp_lab.ops.device import device_of


@dataclasses.dataclass(frozen=True)
class CopyConfig:
    """Launch knobs of a kernel that copies rows of one head of one token.

    Attributes:
        block_rows: Rows a program copies at once, a power of two.
        num_warps: Of a program.
    """

    block_rows: int
    num_warps: int


def choose_copy_config(num_rows: int, head_dim: int, device: torch.device) -> CopyConfig:
    """Return tiles of 2,048 elements: 16 bytes a lane at 16 bits with 256 lanes (4 waves on AMD).

    The interpreter runs programs one after the other, so there it gets few large ones.
    """
    elements = 65536 if device_of(device).arch == "interpreter" else 2048
    most = max(1, elements // triton.next_power_of_2(head_dim))
    return CopyConfig(block_rows=min(most, triton.next_power_of_2(num_rows)), num_warps=4)
