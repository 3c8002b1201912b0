"""Device function of the kernels that only move K and V: copy rows of one tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_rows(source, target, mask_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copy HEAD_DIM elements from each pointer of source [R] to target [R], cast to its type."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = mask_row[:, None] & (offs_d < HEAD_DIM)[None, :]
    row = tl.load(source[:, None] + offs_d[None, :], mask=mask, other=0.0)
    tl.store(target[:, None] + offs_d[None, :], row.to(target.dtype.element_ty), mask=mask)
