"""The oracle: what every attention op of the lab has to return, in plain torch and float64.

This file is the specification. It counts in global coordinates: it lists the tokens that a rank
holds, finds each of them through the block table, and compares its position in the whole request
with the query's. It shares no index arithmetic with the kernels, and it may read device values on
the host, which they may not.

For query row t of head h, over the keys s it may see,

    score[t, h, s] = softmax_scale q[t, h] . k[s, h // G],  then soft-capped, then masked
    lse[t, h]      = ln (sum_s exp(score[t, h, s]) + exp(sink[h]))
    out[t, h]      = sum_s exp(score[t, h, s] - lse[t, h]) v[s, h // G]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
) -> AttnState:
    """Attend n query rows of one request to its contiguous keys, in float64.

    Args:
        q: [n, Hq, D], query rows.
        k: [S, Hkv, D], keys. Query head h reads KV head h // (Hq // Hkv).
        v: [S, Hkv, Dv], values.
        softmax_scale: Multiplies q.k. Default: D ** -0.5.
        sliding_window: A query sees this many keys at most, the one at its own position included.
            Default: all up to its own.
        softcap: score becomes softcap * tanh(score / softcap), before masking. Default: none.
        sinks: [Hq], one more logit a head in the denominator. Default: none.
        query_positions: Integer [n], position of each query row in the request. Default: the last
            n of S, so row j sees keys 0 ... S - n + j.
        key_positions: Integer [S], position of each key in the request. Default: 0 ... S - 1.

    Returns:
        AttnState(out [n, Hq, Dv], lse [n, Hq]), both float64. A row that sees nothing has out 0
        and lse -inf; one that sees only its sink has out 0 and lse = sink.
    """
    return _attend(
        q.double(),
        k.double(),
        v.double(),
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        query_positions=query_positions,
        key_positions=key_positions,
    )


def reference_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    kv_layout: str = "NHD",
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    shard: Shard | None = None,
    global_seq_lens: torch.Tensor | None = None,
) -> AttnState:
    """Attend every query row to its request's keys in this paged cache, in float64.

    Args:
        q: [T, Hq, D].
        k_cache: NHD [P, page, Hkv, D], HND [P, Hkv, page, D] or SHUFFLE [P, Hkv, D/x, page, x],
            x = 16 / itemsize.
        v_cache: NHD [P, page, Hkv, Dv], HND [P, Hkv, page, Dv] or SHUFFLE [P, Hkv, page/x, Dv, x].
        block_table: Integer [B, max_pages]: which page holds a request's tokens
            [i * page, (i + 1) * page). Entries past the last page in use may hold anything.
        seq_lens: Integer [B], tokens of each request in this cache.
        softmax_scale: Multiplies q.k. Default: D ** -0.5.
        kv_layout: "NHD", "HND" or "SHUFFLE".
        k_scale: key = stored * k_scale; a float, a 1-element or a [Hkv] tensor. Default: 1.
        v_scale: value = stored * v_scale. Default: 1.
        sliding_window: A query sees the last sliding_window keys of the whole request, its own
            included. Default: all up to its own.
        softcap: score becomes softcap * tanh(score / softcap), before masking. Default: none.
        sinks: [Hq], one more logit a head; with a shard it counts on rank 0 only. Default: none.
        query_start_loc: Integer [B+1], rows query_start_loc[b] ... query_start_loc[b+1] - 1 belong
            to request b, rows past the last entry to none. Default: row b to request b.
        shard: Which tokens of the request this cache holds. Default: all.
        global_seq_lens: Integer [B], tokens of each whole request; query j of n has position
            global_seq_lens - n + j. Default: seq_lens without a shard; with one, a lone query sees
            all that is held.

    Returns:
        AttnState(out [T, Hq, Dv], lse [T, Hq]), both float64. A row that sees nothing, and a row
        of no request, has out 0 and lse -inf.

    Raises:
        ValueError: kv_layout is unknown, or global_seq_lens is missing where it is needed.
    """
    return _decode(
        torch.float64,
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        softmax_scale=softmax_scale,
        kv_layout=kv_layout,
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        query_start_loc=query_start_loc,
        shard=shard,
        global_seq_lens=global_seq_lens,
    )


def eager_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    kv_layout: str = "NHD",
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    shard: Shard | None = None,
    global_seq_lens: torch.Tensor | None = None,
) -> AttnState:
    """Do what reference_decode does in q's own dtype: the yardstick for a kernel's rounding error.

    Both products run in q's dtype, and so scores, probabilities and out are rounded to it; the
    softmax between them runs in fp32 (float64 for a float64 q).

    Args:
        q: [T, Hq, D].
        k_cache: See reference_decode, as for all that follow.
        v_cache: See reference_decode.
        block_table: See reference_decode.
        seq_lens: See reference_decode.
        softmax_scale: See reference_decode.
        kv_layout: See reference_decode.
        k_scale: See reference_decode.
        v_scale: See reference_decode.
        sliding_window: See reference_decode.
        softcap: See reference_decode.
        sinks: See reference_decode.
        query_start_loc: See reference_decode.
        shard: See reference_decode.
        global_seq_lens: See reference_decode.

    Returns:
        AttnState(out [T, Hq, Dv] in q's dtype, lse [T, Hq] fp32).
    """
    return _decode(
        q.dtype,
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        softmax_scale=softmax_scale,
        kv_layout=kv_layout,
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        query_start_loc=query_start_loc,
        shard=shard,
        global_seq_lens=global_seq_lens,
    )


def reference_mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    kv_scale: float | torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    shard: Shard | None = None,
    global_seq_lens: torch.Tensor | None = None,
) -> AttnState:
    """Attend every query row to its request's MLA latents in this paged cache, in float64.

    What reference_decode does for one KV head whose key is the latent and whose value is the
    latent's first kv_lora_rank elements.

    Args:
        q: [T, Hq, kv_lora_rank + rope].
        kv_cache: [P, page, kv_lora_rank + rope].
        block_table: Integer [B, max_pages].
        seq_lens: Integer [B], tokens of each request in this cache.
        softmax_scale: Multiplies q . latent.
        kv_lora_rank: Elements of the latent that are the value. Default: 512.
        kv_scale: latent = stored * kv_scale; a float or a 1-element tensor. Default: 1.
        query_start_loc: See reference_decode.
        shard: See reference_decode.
        global_seq_lens: See reference_decode.

    Returns:
        AttnState(out [T, Hq, kv_lora_rank], lse [T, Hq]), both float64.
    """
    return _mla_decode(
        torch.float64,
        q,
        kv_cache,
        block_table,
        seq_lens,
        softmax_scale=softmax_scale,
        kv_lora_rank=kv_lora_rank,
        kv_scale=kv_scale,
        query_start_loc=query_start_loc,
        shard=shard,
        global_seq_lens=global_seq_lens,
    )


def eager_mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    kv_scale: float | torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    shard: Shard | None = None,
    global_seq_lens: torch.Tensor | None = None,
) -> AttnState:
    """Do what reference_mla_decode does in q's own dtype, as eager_decode for reference_decode.

    Args:
        q: See reference_mla_decode, as for all that follow.
        kv_cache: See reference_mla_decode.
        block_table: See reference_mla_decode.
        seq_lens: See reference_mla_decode.
        softmax_scale: See reference_mla_decode.
        kv_lora_rank: See reference_mla_decode.
        kv_scale: See reference_mla_decode.
        query_start_loc: See reference_mla_decode.
        shard: See reference_mla_decode.
        global_seq_lens: See reference_mla_decode.

    Returns:
        AttnState(out [T, Hq, kv_lora_rank] in q's dtype, lse [T, Hq] fp32).
    """
    return _mla_decode(
        q.dtype,
        q,
        kv_cache,
        block_table,
        seq_lens,
        softmax_scale=softmax_scale,
        kv_lora_rank=kv_lora_rank,
        kv_scale=kv_scale,
        query_start_loc=query_start_loc,
        shard=shard,
        global_seq_lens=global_seq_lens,
    )


def _mla_decode(
    dtype: torch.dtype,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    **options: object,
) -> AttnState:
    """Do the work of reference_mla_decode in dtype."""
    # [P, page, 1, kv_lora_rank + rope]
    k_cache = kv_cache.unsqueeze(2)
    return _decode(
        dtype,
        q,
        k_cache,
        k_cache[..., :kv_lora_rank],
        block_table,
        seq_lens,
        kv_layout="NHD",
        k_scale=kv_scale,
        v_scale=kv_scale,
        sliding_window=None,
        softcap=None,
        sinks=None,
        **options,
    )


def reference_merge(
    outs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> AttnState:
    """Merge the partial results of disjoint sets of keys, in float64.

    lse = ln sum_r exp(lses[r]),  out = sum_r exp(lses[r] - lse) outs[r]

    Args:
        outs: [N, T, H, D], or N tensors [T, H, D].
        lses: [N, T, H], or N tensors [T, H], natural logarithm. NaN, +inf and -inf mean that the
            set was empty, and then out beside it may hold anything.

    Returns:
        AttnState(out [T, H, D], lse [T, H]), both float64; out 0 and lse -inf where all are empty.
    """
    outs = outs if isinstance(outs, torch.Tensor) else torch.stack(list(outs))
    lses = lses if isinstance(lses, torch.Tensor) else torch.stack(list(lses))
    outs, lses = outs.double(), lses.double()
    lses = torch.where(lses.isfinite(), lses, -torch.inf)
    lse = torch.logsumexp(lses, dim=0)
    weight = torch.where(lses.isfinite(), torch.exp(lses - lse), 0.0)
    # where, not only a weight of 0: 0 * NaN is NaN.
    parts = torch.where(lses.isfinite()[..., None], outs, 0.0) * weight[..., None]
    return AttnState(parts.sum(dim=0), lse)


# Where each layout keeps the token of a page.
_TOKEN_AXIS = {"NHD": 1, "HND": 2, "SHUFFLE": 3}


def _held_positions(count: int, shard: Shard, device: torch.device) -> torch.Tensor:
    """Return the global positions of the first count tokens that this rank holds, in order."""
    enough = (count + shard.interleave_size) * shard.size
    positions = torch.arange(enough, device=device)
    return positions[(positions // shard.interleave_size) % shard.size == shard.rank][:count]


def _read_tokens(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    kv_layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored k [S, Hkv, D] and v [S, Hkv, Dv] of S tokens, by page and slot in it."""
    if kv_layout == "NHD":
        return k_cache[pages, slots], v_cache[pages, slots]
    if kv_layout == "HND":
        return k_cache[pages, :, slots], v_cache[pages, :, slots]
    x = k_cache.shape[-1]
    # [S, Hkv, D/x, x] and [S, Hkv, Dv]
    k = k_cache[pages, :, :, slots]
    v = v_cache[pages, :, slots // x, :, slots % x]
    return k.flatten(-2), v


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    query_positions: torch.Tensor | None,
    key_positions: torch.Tensor | None,
) -> AttnState:
    """Do the work of reference_attention in the dtype of q, k and v."""
    num_rows, num_q_heads, head_dim = q.shape
    num_keys, num_kv_heads, head_dim_v = v.shape
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    if key_positions is None:
        key_positions = torch.arange(num_keys, device=q.device)
    if query_positions is None:
        query_positions = num_keys - num_rows + torch.arange(num_rows, device=q.device)

    # Head h = kv_head * G + g, so a reshape pairs it with KV head h // G. [n, Hkv, G, S]
    q = q.reshape(num_rows, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    scores = torch.einsum("nkgd,skd->nkgs", q, k) * softmax_scale
    # [n, Hq, S]
    scores = scores.reshape(num_rows, num_q_heads, num_keys)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = query_positions[:, None] - key_positions[None, :]
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    scores = torch.where(visible[:, None, :], scores, -torch.inf)

    logits = scores
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None].expand(num_rows, -1, -1)
        logits = torch.cat([scores, sink], dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.where(visible[:, None, :], torch.exp(scores - lse[..., None]), 0.0)
    weights = weights.to(v.dtype).reshape(*q.shape[:3], num_keys)
    out = torch.einsum("nkgs,skd->nkgd", weights, v)
    return AttnState(out.reshape(num_rows, num_q_heads, head_dim_v), lse)


def _apply_scale(
    stored: torch.Tensor, scale: float | torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return stored [S, Hkv, D] * scale, rounded once to dtype."""
    if scale is None:
        return stored.to(dtype)
    values = stored.to(torch.float64)
    if isinstance(scale, torch.Tensor):
        # 1 element or one a KV head.
        scale = scale.to(torch.float64).reshape(-1)[None, :, None]
    return (values * scale).to(dtype)


def _decode(
    dtype: torch.dtype,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float | None,
    kv_layout: str,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    shard: Shard | None,
    global_seq_lens: torch.Tensor | None,
) -> AttnState:
    """Do the work of reference_decode in dtype."""
    if kv_layout not in _TOKEN_AXIS:
        raise ValueError(f"kv_layout: expected one of {list(_TOKEN_AXIS)}, got {kv_layout!r}")
    num_requests = block_table.shape[0]
    page_size = k_cache.shape[_TOKEN_AXIS[kv_layout]]
    head_dim_v = v_cache.shape[-2 if kv_layout == "SHUFFLE" else -1]
    starts = range(num_requests + 1) if query_start_loc is None else query_start_loc.tolist()
    lens = seq_lens.tolist()
    whole = shard is None or shard.size == 1
    if global_seq_lens is not None:
        total_lens = global_seq_lens.tolist()
    else:
        total_lens = lens if whole else None
    shard = Shard(0, 1) if shard is None else shard
    if shard.rank != 0:
        sinks = None

    num_tokens, num_q_heads = q.shape[:2]
    out = torch.zeros(num_tokens, num_q_heads, head_dim_v, dtype=dtype, device=q.device)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    lse = torch.full((num_tokens, num_q_heads), -torch.inf, dtype=lse_dtype, device=q.device)
    for b in range(num_requests):
        first, last = starts[b], starts[b + 1]
        num_queries = last - first
        if num_queries == 0:
            continue
        tokens = torch.arange(lens[b], device=q.device)
        pages = block_table[b, tokens // page_size].long()
        k, v = _read_tokens(k_cache, v_cache, pages, tokens % page_size, kv_layout)
        key_positions = _held_positions(lens[b], shard, q.device)
        if total_lens is not None:
            end = total_lens[b]
        elif num_queries == 1 and sliding_window is None:
            # The query is the request's last token: it sees all that is held.
            end = int(key_positions[-1]) + 1 if lens[b] else 0
        else:
            raise ValueError(
                "global_seq_lens: expected integer [B] with shard and several query tokens or a "
                "sliding_window, got None"
            )
        query_positions = end - num_queries + torch.arange(num_queries, device=q.device)
        state = _attend(
            q[first:last].to(dtype),
            _apply_scale(k, k_scale, dtype),
            _apply_scale(v, v_scale, dtype),
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            query_positions=query_positions,
            key_positions=key_positions,
        )
        out[first:last], lse[first:last] = state
    return AttnState(out, lse)
