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
def softmax_update(scores, m_i, l_i, MAY_BE_EMPTY: tl.constexpr):
    """One online-softmax step in base 2: return (p, alpha, m_new, l_new) for scores [M, N].

    MAY_BE_EMPTY guards rows that have seen no key so far (maximum still -inf), which would give
    NaN.
    """
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    base = m_new
    if MAY_BE_EMPTY:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - base[:, None])
    alpha = tl.exp2(m_i - base)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def merge_weight(lse2, lse2_max):
    """Return exp2(lse2 - lse2_max), 0 where there is nothing to weigh (all -inf)."""
    base = tl.where(lse2_max == float("-inf"), 0.0, lse2_max)
    return tl.exp2(lse2 - base)
