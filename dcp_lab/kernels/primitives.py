"""Device functions that more than one kernel needs: each of these formulas stands here once."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def local_count(global_count, RANK: tl.constexpr, SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return how many of a request's first global_count tokens (at least 0) live on RANK."""
    count = tl.maximum(global_count, 0)
    if SIZE > 1:
        cycle = SIZE * INTERLEAVE
        rest = tl.minimum(tl.maximum(count % cycle - RANK * INTERLEAVE, 0), INTERLEAVE)
        count = count // cycle * INTERLEAVE + rest
    return count


@triton.jit
def visible_end(seq_len, total_len, query_len, j, RANK: tl.constexpr, SIZE: tl.constexpr,
                INTERLEAVE: tl.constexpr):  # fmt: skip
    """Return the local position one past the last key that query j of query_len may see.

    Query j sees global positions <= total_len - query_len + j; seq_len bounds what this cache
    holds.
    """
    seen = local_count(total_len - query_len + j + 1, RANK, SIZE, INTERLEAVE)
    return tl.minimum(seen, seq_len)


@triton.jit
def visible_start(total_len, query_len, j, WINDOW: tl.constexpr, RANK: tl.constexpr,
                  SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):  # fmt: skip
    """Return the local position of the first key inside the last WINDOW keys of query j."""
    return local_count(total_len - query_len + j + 1 - WINDOW, RANK, SIZE, INTERLEAVE)


@triton.jit
def split_tiles(num_tiles, num_splits):
    """Return how many tiles each of num_splits equal parts takes; the last parts may be empty."""
    return tl.maximum(tl.cdiv(num_tiles, num_splits), 1)


@triton.jit
def page_index(position, PAGE_SIZE: tl.constexpr):
    """Return which page of its request a position (at least 0) lies in.

    Unsigned: a signed division by a power of two is three instructions rather than a shift.
    """
    return position.to(tl.uint32) // PAGE_SIZE


@triton.jit
def or_zero(maximum):
    """Return a running maximum, 0 where nothing was seen (-inf): -inf - -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def softmax_update(scores, m_i, l_i, MAY_BE_EMPTY: tl.constexpr):
    """One online-softmax step in base 2: return (p, alpha, m_new, l_new) for scores [M, N].

    l_i [M, N] holds the sums of each column of the tiles: whoever needs a row's sum adds them up
    once, after the last tile, so that a tile reduces over its warps once, for the maximum.
    MAY_BE_EMPTY guards rows that have seen no key so far (maximum still -inf), which would give
    NaN.
    """
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    base = m_new
    if MAY_BE_EMPTY:
        base = or_zero(m_new)
    p = tl.exp2(scores - base[:, None])
    alpha = tl.exp2(m_i - base)
    return p, alpha, m_new, l_i * alpha[:, None] + p


@triton.jit
def merge_weight(lse2, lse2_max):
    """Return exp2(lse2 - lse2_max), 0 where there is nothing to weigh (all -inf)."""
    return tl.exp2(lse2 - or_zero(lse2_max))


@triton.jit
def merge_step(lse, lse_max, weight_sum, BASE_2: tl.constexpr):
    """Take one more LSE (or sink) into a running sum of weights over the running maximum.

    In base 2 or natural. Returns (weight of lse, factor for everything summed before, new maximum,
    new sum of weights).
    """
    new_max = tl.maximum(lse_max, lse)
    if BASE_2:
        weight = merge_weight(lse, new_max)
        factor = merge_weight(lse_max, new_max)
    else:
        base = or_zero(new_max)
        weight = tl.exp(lse - base)
        factor = tl.exp(lse_max - base)
    return weight, factor, new_max, weight_sum * factor + weight


@triton.jit
def soft_cap(scores, cap):
    """Return cap * tanh(scores / cap), as right as fp32 is whatever the two are.

    2 sigmoid(2 x) - 1 would cancel where the cap is large: an error of 1e-7 cap.
    """
    # tanh(20) is 1 in fp32.
    size = tl.minimum(tl.abs(scores) / cap, 20.0)
    # tanh(x) / x as a continued fraction, cut off with an error of 1e-10 at 1/2.
    square = size * size
    ratio = (945.0 + square * (105.0 + square)) / (945.0 + square * (420.0 + 15.0 * square))
    large = cap * (1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0))
    return tl.where(size < 0.5, scores * ratio, tl.where(scores < 0.0, -large, large))


@triton.jit
def row_max(x):
    """Return the largest |x| of each row, in fp32."""
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def power_of_two(x):
    """Return (2 ** -e, 2 ** e) of 2 ** e <= x < 2 ** (e + 1), e kept within -60 and 60."""
    bits = tl.clamp(x, 2.0**-60, 2.0**60).to(tl.int32, bitcast=True) & 0x7F800000
    return (0x7F000000 - bits).to(tl.float32, bitcast=True), bits.to(tl.float32, bitcast=True)


@triton.jit
def scaled_to_fp16(x, row_factor):
    """Return x [M, N] * row_factor [M] as fp16."""
    return (x.to(tl.float32) * row_factor[:, None]).to(tl.float16)
