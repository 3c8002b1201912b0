"""Bytes that a decode step moves and the least time they take. Every formula lives here, once.

A floor is bytes / bandwidth: no launch, no latency, nothing but the traffic. It answers "can this
traffic be the reason?", never "how long will it take?".

GB = 1e9 bytes. Times are in us for one layer and in ms for one step (one token for every request
through all layers).
"""

from __future__ import annotations

import numbers

LSE_BYTES = 4


def _positive(argument: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not value > 0:
        raise ValueError(f"{argument}: expected a number > 0, got {value!r}")
    return value


def _count(argument: str, value: int) -> int:
    """Counts may be fractional (a mean over a run) but not negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not value >= 0:
        raise ValueError(f"{argument}: expected a number >= 0, got {value!r}")
    return value


def kv_bytes(
    tokens: float,
    *,
    num_kv_heads: int,
    head_dim: int,
    kv_itemsize: int,
    head_dim_v: int | None = None,
) -> float:
    """Return the bytes of the keys and values of so many cached tokens, one layer, one rank.

    bytes = tokens * num_kv_heads * (head_dim + head_dim_v) * kv_itemsize

    Args:
        tokens: Cached tokens on this rank, summed over requests.
        num_kv_heads: KV heads on this rank.
        head_dim: Elements of one key.
        kv_itemsize: Bytes of one cached element: 2 for bf16, 1 for fp8.
        head_dim_v: Elements of one value; 0 where the value lies inside the key (MLA).
            Default: head_dim.

    Raises:
        ValueError: A count is negative or a size not positive.
    """
    if head_dim_v is None:
        head_dim_v = head_dim
    _count("tokens", tokens)
    _positive("num_kv_heads", num_kv_heads)
    _positive("head_dim", head_dim)
    _count("head_dim_v", head_dim_v)
    _positive("kv_itemsize", kv_itemsize)
    return tokens * num_kv_heads * (head_dim + head_dim_v) * kv_itemsize


def decode_bytes(
    tokens: float,
    *,
    query_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    kv_itemsize: int | None = None,
    head_dim_v: int | None = None,
) -> float:
    """Return the least bytes that decode attention moves for one layer on one rank.

    bytes = kv_bytes + query_tokens * num_q_heads * ((head_dim + head_dim_v) * itemsize + 4)

    Each key and value is read once, q is read once, out and the fp32 LSE are written once. Page
    tables, lengths and the partial results of splits are not counted.

    Args:
        tokens: Cached tokens on this rank, summed over requests.
        query_tokens: Query tokens in the batch (the requests, at one token each).
        num_q_heads: Query heads that attend on this rank.
        num_kv_heads: KV heads on this rank.
        head_dim: Elements of one query and key.
        itemsize: Bytes of one element of q and out.
        kv_itemsize: Bytes of one cached element. Default: itemsize.
        head_dim_v: Elements of one value and of one output row. Default: head_dim.

    Raises:
        ValueError: A count is negative or a size not positive.
    """
    if kv_itemsize is None:
        kv_itemsize = itemsize
    if head_dim_v is None:
        head_dim_v = head_dim
    _count("query_tokens", query_tokens)
    _positive("num_q_heads", num_q_heads)
    _positive("itemsize", itemsize)
    kv = kv_bytes(
        tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_itemsize=kv_itemsize,
        head_dim_v=head_dim_v,
    )
    rows = query_tokens * num_q_heads
    return kv + rows * ((head_dim + head_dim_v) * itemsize + LSE_BYTES)


def gather_bytes(
    tokens: float,
    *,
    num_kv_heads: int,
    head_dim: int,
    out_itemsize: int,
    head_dim_v: int | None = None,
) -> float:
    """Return the bytes that gathering adds to a decode that reads the pages itself, one layer.

    bytes = 2 * kv_bytes(at out_itemsize)

    A gather reads the pages (the paged decode reads them too: not counted), writes the contiguous
    copy, and the attention reads the copy back. Both are taken to reach HBM; a copy that stays in
    a cache costs less, so this is the larger figure.

    Args:
        tokens: Cached tokens on this rank, summed over requests.
        num_kv_heads: KV heads on this rank.
        head_dim: Elements of one key.
        out_itemsize: Bytes of one element of the contiguous copy.
        head_dim_v: Elements of one value; 0 where the value lies inside the key (MLA).
            Default: head_dim.

    Raises:
        ValueError: A count is negative or a size not positive.
    """
    return 2 * kv_bytes(
        tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_itemsize=out_itemsize,
        head_dim_v=head_dim_v,
    )


def _exchange(query_tokens: int, num_q_heads: int, ranks: int) -> None:
    _count("query_tokens", query_tokens)
    _positive("num_q_heads", num_q_heads)
    _positive("ranks", ranks)
    if num_q_heads % ranks:
        raise ValueError(f"num_q_heads: expected a multiple of ranks={ranks}, got {num_q_heads}")


def q_all_gather_bytes(
    query_tokens: int, *, num_q_heads: int, head_dim: int, itemsize: int, ranks: int
) -> float:
    """Return the bytes that one rank sends when the group gathers its queries, one layer.

    bytes = (ranks - 1) * query_tokens * num_q_heads / ranks * head_dim * itemsize

    Args:
        query_tokens: Query tokens in the batch.
        num_q_heads: Query heads of the whole group; each rank starts with num_q_heads / ranks.
        head_dim: Elements of one query.
        itemsize: Bytes of one element.
        ranks: Ranks in the group.

    Raises:
        ValueError: A count is negative, or num_q_heads is not a multiple of ranks.
    """
    _exchange(query_tokens, num_q_heads, ranks)
    return (ranks - 1) * query_tokens * (num_q_heads // ranks) * head_dim * itemsize


def a2a_bytes(
    query_tokens: int, *, num_q_heads: int, head_dim: int, itemsize: int, ranks: int
) -> float:
    """Return the bytes that one rank sends in the a2a reducer, one layer.

    bytes = (ranks - 1) * query_tokens * num_q_heads / ranks * (head_dim * itemsize + 4)

    Each peer gets its own heads' partial output and fp32 LSE.

    Args:
        query_tokens: Query tokens in the batch.
        num_q_heads: Query heads of the whole group.
        head_dim: Elements of one output row.
        itemsize: Bytes of one element of the output.
        ranks: Ranks in the group.

    Raises:
        ValueError: A count is negative, or num_q_heads is not a multiple of ranks.
    """
    _exchange(query_tokens, num_q_heads, ranks)
    per_peer = query_tokens * (num_q_heads // ranks) * (head_dim * itemsize + LSE_BYTES)
    return (ranks - 1) * per_peer


def ag_rs_bytes(
    query_tokens: int, *, num_q_heads: int, head_dim: int, itemsize: int, ranks: int
) -> float:
    """Return the bytes that one rank sends in the ag_rs reducer, one layer.

    lse bytes = (ranks - 1) * query_tokens * num_q_heads * 4
    out bytes = (ranks - 1) * query_tokens * num_q_heads / ranks * head_dim * itemsize

    An all-gather of every head's fp32 LSE, then a reduce-scatter of the rescaled output. A ring
    and a direct exchange send the same total.

    Args:
        query_tokens: Query tokens in the batch.
        num_q_heads: Query heads of the whole group.
        head_dim: Elements of one output row.
        itemsize: Bytes of one element of the output.
        ranks: Ranks in the group.

    Raises:
        ValueError: A count is negative, or num_q_heads is not a multiple of ranks.
    """
    _exchange(query_tokens, num_q_heads, ranks)
    gathered = query_tokens * num_q_heads * LSE_BYTES
    scattered = query_tokens * (num_q_heads // ranks) * head_dim * itemsize
    return (ranks - 1) * (gathered + scattered)


def floor_us(moved_bytes: float, gbps: float) -> float:
    """Return the least time in us that moving so many bytes takes at gbps GB/s.

    Raises:
        ValueError: moved_bytes is negative or gbps is not positive.
    """
    return _count("moved_bytes", moved_bytes) / _positive("gbps", gbps) / 1e3


def step_ms(layer_us: float, layers: int) -> float:
    """Return the ms of one step whose every layer takes layer_us.

    Raises:
        ValueError: layer_us is negative or layers is not positive.
    """
    return _count("layer_us", layer_us) * _positive("layers", layers) / 1e3


def gbps_needed(moved_bytes: float, ms: float) -> float:
    """Return the bandwidth in GB/s at which moving so many bytes takes ms.

    Raises:
        ValueError: moved_bytes is negative or ms is not positive.
    """
    return _count("moved_bytes", moved_bytes) / _positive("ms", ms) / 1e6
