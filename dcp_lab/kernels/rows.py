"""Device functions of the kernels that only move K and V: rows of one tile, in any layout.

A row is one head of one token. In NHD and HND its elements lie together. In SHUFFLE (AITER), with
CHUNK = 16 / itemsize, K's lie in runs of CHUNK and V's are a stride apart, tokens being fastest:

    K [P, Hkv, D/x, page, x]    V [P, Hkv, page/x, Dv, x]
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_lab.kernels.fp8 import decode_fp8, encode_fp8


@triton.jit
def k_columns(offs_d, stride_chunk, CHUNK: tl.constexpr):
    """Return where the elements of a row of K lie behind its first."""
    columns = offs_d
    if CHUNK > 0:
        columns = (offs_d // CHUNK).to(tl.int64) * stride_chunk + offs_d % CHUNK
    return columns


@triton.jit
def v_columns(offs_d, stride_d, CHUNK: tl.constexpr):
    """Return where the elements of a row of V lie behind its first."""
    columns = offs_d
    if CHUNK > 0:
        columns = offs_d.to(tl.int64) * stride_d
    return columns


@triton.jit
def v_token(in_page, stride_t, CHUNK: tl.constexpr):
    """Return where a token's row of V starts in its page; in_page is int64."""
    run, rest = in_page, 0
    if CHUNK > 0:
        run, rest = in_page // CHUNK, in_page % CHUNK
    return run * stride_t + rest


@triton.jit
def scale_of(scale, scale_ptr, stride, head, ON_DEVICE: tl.constexpr):
    """Return the scale of each head: the number itself, or one read from the device."""
    scales = tl.zeros(head.shape, tl.float32) + scale
    if ON_DEVICE:
        scales = tl.load(scale_ptr + head * stride)
    return scales


@triton.jit
def move_rows(
    source,
    target,
    mask_row,
    source_columns,
    target_columns,
    scale,
    DECODE_BIAS: tl.constexpr,
    ENCODE_BIAS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Move HEAD_DIM elements of each row [R] from source to target, cast to its type.

    With DECODE_BIAS source is fp8 bytes and target gets stored * scale, rounded to fp32 and then
    to its type; with ENCODE_BIAS target is bytes and gets source / scale. scale [R] or a number.
    """
    BLOCK_D: tl.constexpr = source_columns.shape[0]
    mask = mask_row[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    row = tl.load(source[:, None] + source_columns[None, :], mask=mask, other=0)
    if DECODE_BIAS > 0:
        row = decode_fp8(row, DECODE_BIAS) * scale[:, None]
    if ENCODE_BIAS > 0:
        # div_rn: the quotient itself, rounded once; `/` may be off by 2 ulp.
        divisor = tl.zeros(row.shape, tl.float32) + scale[:, None]
        row = encode_fp8(tl.div_rn(row.to(tl.float32), divisor), ENCODE_BIAS)
    else:
        row = row.to(target.dtype.element_ty)
    tl.store(target[:, None] + target_columns[None, :], row, mask=mask)
