"""The argument checks that several ops share. Metadata only: nothing here reads a device value."""

from __future__ import annotations

import dataclasses
import math
import numbers

import torch

from dcp_lab.ops.checks import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_positive_int,
    check_tensor,
    dtype_name,
    fail,
    unsupported,
)
from dcp_lab.sharding import Shard

KV_LAYOUTS = ("NHD", "HND", "SHUFFLE")
CACHE_DTYPES = FLOAT_DTYPES + FP8_DTYPES
MAX_HEAD_DIM = 256
MAX_LORA_RANK = 512
MAX_PAGE_SIZE = 1024
MAX_LEN = 2**31 - 1
FP32 = torch.finfo(torch.float32)


@dataclasses.dataclass(frozen=True)
class KVCacheArguments:
    """A checked pair of paged caches.

    Attributes:
        k_cache: As given, see check_kv_cache.
        v_cache: As given.
        kv_layout: "NHD", "HND" or "SHUFFLE".
        num_pages: P.
        page_size: Tokens a page.
        num_kv_heads: Hkv.
        head_dim: D.
        head_dim_v: Dv.
        k_strides: Elements from one (page, token, head) of K to the next, in that order whatever
            the layout, and from a run of chunk dims to the next; inside one the stride is 1.
        v_strides: Elements from one (page, token, head, dim) of V to the next. Under SHUFFLE the
            second is from a run of chunk tokens to the next; inside one the stride is 1.
        chunk: x = 16 / itemsize under SHUFFLE, else 0.
        k_scale, v_scale: As given: value = stored * scale. None unless the cache is fp8.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_layout: str
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    k_strides: tuple[int, int, int, int]
    v_strides: tuple[int, int, int, int]
    chunk: int
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class DecodeArguments(KVCacheArguments):
    """The checked arguments of a decode call, with every size it has and every default filled in.

    Attributes (beside those of KVCacheArguments):
        q: [T, Hq, D], last dimension contiguous.
        block_table: int32 [B, max_pages], last dimension contiguous.
        seq_lens: int32 [B].
        total_lens: int32 [B], tokens of the whole request: global_seq_lens if given, else
            seq_lens.
        softmax_scale: Finite float.
        num_requests: B.
        num_tokens: T.
        max_pages: Columns of block_table.
        num_q_heads: Hq, a multiple of num_kv_heads.
        query_start_loc: int32 [B+1] or None.
        max_query_len: Upper bound of the query tokens of a request, as promised by the caller.
        shard: As given.
        global_seq_lens: As given.
        sliding_window: An int >= 1 and < 2^31 - 1, or None.
        softcap: Positive finite float or None.
        sinks: fp32 [Hq], or None: where there are none and on every rank of a shard but 0.
        num_splits: As given, an int >= 1 or None.
    """

    q: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    total_lens: torch.Tensor
    softmax_scale: float
    num_requests: int
    num_tokens: int
    max_pages: int
    num_q_heads: int
    query_start_loc: torch.Tensor | None
    max_query_len: int
    shard: Shard | None
    global_seq_lens: torch.Tensor | None
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    num_splits: int | None


def check_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    device: torch.device | None = None,
) -> KVCacheArguments:
    """Check a pair of paged caches and return it with its sizes.

    Args:
        k_cache: [P, page, Hkv, D] (NHD), [P, Hkv, page, D] (HND) or [P, Hkv, D/x, page, x]
            (SHUFFLE, x = 16 / itemsize), fp32, fp16, bf16 or fp8 (e4m3fn, e4m3fnuz), any strides
            with a contiguous last dimension.
        v_cache: The same with Dv, or [P, Hkv, page/x, Dv, x] (SHUFFLE); same dtype and device.
        kv_layout: "NHD", "HND" or "SHUFFLE".
        k_scale: Of an fp8 cache, key = stored * k_scale: a finite float > 0 or an fp32 tensor of 1
            or of Hkv elements. Default: 1.
        v_scale: The same of V.
        device: Where the caches have to be. Default: k_cache's device.

    Raises:
        ValueError: Something does not fit.
    """
    if kv_layout not in KV_LAYOUTS:
        fail("kv_layout", f"one of {', '.join(map(repr, KV_LAYOUTS))}", kv_layout)
    shuffled = kv_layout == "SHUFFLE"
    page_axis, head_axis = {"NHD": (1, 2), "HND": (2, 1), "SHUFFLE": (3, 1)}[kv_layout]
    names = {
        "NHD": ["P", "page", "Hkv", "D"],
        "HND": ["P", "Hkv", "page", "D"],
        "SHUFFLE": ["P", "Hkv", "D/x", "page", "x"],
    }
    shape = names[kv_layout]
    check_tensor(
        "k_cache",
        k_cache,
        dtypes=CACHE_DTYPES,
        shape=shape,
        device=device,
        last_contiguous=True,
    )
    page_size = check_positive_int(
        "page_size (of k_cache)", k_cache.shape[page_axis], at_most=MAX_PAGE_SIZE
    )
    num_kv_heads = check_positive_int("num_kv_heads (of k_cache)", k_cache.shape[head_axis])
    chunk = 0
    head_dim = k_cache.shape[3]
    if shuffled:
        chunk = 16 // k_cache.dtype.itemsize
        if k_cache.shape[4] != chunk:
            fail("k_cache", f"x = 16 / itemsize = {chunk} as last dimension", k_cache)
        if page_size % chunk:
            fail("page_size (of k_cache)", f"a multiple of x={chunk} under SHUFFLE", page_size)
        head_dim = k_cache.shape[2] * chunk
    check_positive_int("head_dim (of k_cache)", head_dim, at_most=MAX_HEAD_DIM)
    if shuffled:
        shape = ["P", "Hkv", ("page/x", page_size // chunk), "Dv", ("x", chunk)]
    else:
        shape[page_axis] = ("page", page_size)
        shape[3] = "Dv"
    shape[0] = ("P", k_cache.shape[0])
    shape[head_axis] = ("Hkv", num_kv_heads)
    check_tensor(
        "v_cache",
        v_cache,
        dtypes=(k_cache.dtype,),
        shape=shape,
        device=k_cache.device,
        last_contiguous=True,
    )
    head_dim_v = check_positive_int(
        "head_dim (of v_cache)", v_cache.shape[3], at_most=MAX_HEAD_DIM
    )
    k_strides, v_strides = kv_strides(k_cache, v_cache, kv_layout)
    return KVCacheArguments(
        k_cache=k_cache,
        v_cache=v_cache,
        kv_layout=kv_layout,
        num_pages=k_cache.shape[0],
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        k_strides=k_strides,
        v_strides=v_strides,
        chunk=chunk,
        k_scale=_check_scale("k_scale", k_scale, k_cache, num_kv_heads),
        v_scale=_check_scale("v_scale", v_scale, v_cache, num_kv_heads),
    )


def kv_strides(
    k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Return k_strides and v_strides of a KVCacheArguments."""
    k, v = k_cache.stride(), v_cache.stride()
    if kv_layout == "SHUFFLE":
        return (k[0], k[3], k[1], k[2]), (v[0], v[2], v[1], v[3])
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    return (k[0], k[token], k[head], 0), (v[0], v[token], v[head], 1)


def _check_scale(
    argument: str, scale: float | torch.Tensor | None, cache: torch.Tensor, num_kv_heads: int
) -> float | torch.Tensor | None:
    """Return the scale of an fp8 cache."""
    if scale is None:
        return None
    if cache.dtype not in FP8_DTYPES:
        fail(argument, f"None with a {dtype_name(cache.dtype)} cache", scale)
    if not isinstance(scale, torch.Tensor):
        return check_finite(argument, scale, positive=True)
    check_tensor(argument, scale, dtypes=(torch.float32,), device=cache.device)
    if scale.numel() != 1 and scale.shape != (num_kv_heads,):
        fail(argument, f"a float or fp32 of 1 element or [Hkv={num_kv_heads}]", scale)
    return scale


def check_block_table(
    block_table: torch.Tensor, seq_lens: torch.Tensor, *, device: torch.device
) -> tuple[int, int]:
    """Check block_table int32 [B, max_pages] and seq_lens int32 [B]; return (B, max_pages)."""
    check_tensor(
        "block_table",
        block_table,
        dtypes=(torch.int32,),
        shape=["B", "max_pages"],
        device=device,
        last_contiguous=True,
    )
    num_requests, max_pages = block_table.shape
    check_tensor(
        "seq_lens",
        seq_lens,
        dtypes=(torch.int32,),
        shape=[("B", num_requests)],
        device=device,
        last_contiguous=True,
    )
    return num_requests, max_pages


def check_finite(argument: str, value: object, *, positive: bool = False) -> float:
    """Return value as a float if it is a finite real number (and > 0) that fp32 can hold."""
    kind = "a finite number > 0" if positive else "a finite number"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail(argument, kind, value)
    if not math.isfinite(value) or (positive and value <= 0):
        fail(argument, kind, value)
    # Kernels take it as fp32, in which a larger one is inf and a smaller one 0 or nearly so.
    if value and not FP32.tiny <= abs(value) <= FP32.max:
        fail(argument, f"{kind} that fp32 can hold ({FP32.tiny:.3g} to {FP32.max:.3g})", value)
    return float(value)


def check_shard(shard: object) -> None:
    """Check that a shard is one, or None."""
    if shard is not None and not isinstance(shard, Shard):
        fail("shard", "a dcp_lab.Shard or None", shard)


def check_sliding_window(sliding_window: object) -> int | None:
    """Return a window that bounds anything: an int >= 1, None where it is longer than int32."""
    if sliding_window is None:
        return None
    check_positive_int("sliding_window", sliding_window)
    # No request is longer; as an int32 in a kernel it would wrap.
    return sliding_window if sliding_window < MAX_LEN else None


def _check_head_dim(argument: str, value: int) -> None:
    if value % 16:
        fail(argument, f"a multiple of 16 up to {MAX_HEAD_DIM}", value)


def check_decode_arguments(
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
    max_query_len: int = 1,
    shard: Shard | None = None,
    global_seq_lens: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> DecodeArguments:
    """Check the arguments of a decode call, with no device sync, and return them with their sizes.

    What only the device knows is not checked: that seq_lens fit the table, that table entries in
    use name pages of the cache, that query_start_loc rises by at most max_query_len and ends at T
    or before.

    Args:
        q: [T, Hq, D] fp32, fp16 or bf16, last dimension contiguous.
        k_cache: See check_kv_cache; q's dtype or fp8.
        v_cache: See check_kv_cache.
        block_table: int32 [B, max_pages].
        seq_lens: int32 [B].
        softmax_scale: Finite. Default: D ** -0.5.
        kv_layout: "NHD", "HND" or "SHUFFLE".
        k_scale, v_scale: See check_kv_cache.
        sliding_window: int >= 1. Default: none.
        softcap: Finite, > 0. Default: none.
        sinks: fp32 [Hq], the same on every rank of a shard. Default: none.
        query_start_loc: int32 [B+1]. Default: one token a request, T = B.
        max_query_len: int >= 1; 1 without query_start_loc.
        shard: Shard. Default: the cache holds whole requests.
        global_seq_lens: int32 [B]. Needed when shard has more than one rank and there is more
            than one query token or a sliding window. Default: seq_lens.
        num_splits: int >= 1. Default: None.
        out: [T, Hq, Dv] in q's dtype, last dimension contiguous. Default: None.
        lse: fp32 [T, Hq]. Default: None.

    Raises:
        ValueError: An argument does not fit; the message names it, what was expected and what
            was given.
    """
    check_tensor("q", q, dtypes=FLOAT_DTYPES, shape=["T", "Hq", "D"], last_contiguous=True)
    head_dim = q.shape[2]
    cache = check_kv_cache(
        k_cache, v_cache, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale, device=q.device
    )
    if k_cache.dtype not in (q.dtype, *FP8_DTYPES):
        fail("k_cache", f"q's dtype {dtype_name(q.dtype)} or fp8", k_cache)
    _check_head_dim("head_dim (of q)", head_dim)
    if cache.head_dim != head_dim:
        last = "D/x * x" if cache.chunk else "last dimension"
        fail("k_cache", f"q's head_dim {head_dim} as {last}", k_cache)
    _check_head_dim("head_dim (of v_cache)", cache.head_dim_v)
    return _check_call(
        cache,
        q=q,
        block_table=block_table,
        seq_lens=seq_lens,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        shard=shard,
        global_seq_lens=global_seq_lens,
        num_splits=num_splits,
        out=out,
        lse=lse,
    )


def check_mla_arguments(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = 1,
    shard: Shard | None = None,
    global_seq_lens: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> DecodeArguments:
    """Check the arguments of an MLA decode call and return them as those of one KV head.

    K is the latent, V its first kv_lora_rank elements: k_cache and v_cache of what is returned are
    views of kv_cache.

    Args:
        q: [T, Hq, kv_lora_rank + rope] fp32, fp16 or bf16, last dimension contiguous.
        kv_cache: [P, page, kv_lora_rank + rope] in q's dtype or fp8 (e4m3fn, e4m3fnuz).
        block_table: int32 [B, max_pages].
        seq_lens: int32 [B].
        softmax_scale: Finite.
        kv_lora_rank: A multiple of 16 up to 512; rope, what is left of q's last dimension, one
            from 16 to 256. Default: 512.
        query_start_loc: See check_decode_arguments.
        max_query_len: See check_decode_arguments.
        shard: See check_decode_arguments.
        global_seq_lens: See check_decode_arguments.
        num_splits: See check_decode_arguments.
        out: [T, Hq, kv_lora_rank]. Default: None.
        lse: See check_decode_arguments.

    Raises:
        ValueError: An argument does not fit; the message names it, what was expected and what
            was given.
    """
    check_tensor(
        "q", q, dtypes=FLOAT_DTYPES, shape=["T", "Hq", "kv_lora_rank+rope"], last_contiguous=True
    )
    check_positive_int("kv_lora_rank", kv_lora_rank)
    if kv_lora_rank % 16 or kv_lora_rank > MAX_LORA_RANK:
        fail("kv_lora_rank", f"a multiple of 16 up to {MAX_LORA_RANK}", kv_lora_rank)
    rope = q.shape[2] - kv_lora_rank
    if rope % 16 or not 16 <= rope <= MAX_HEAD_DIM:
        wanted = f"kv_lora_rank={kv_lora_rank} + rope, a multiple of 16 from 16 to {MAX_HEAD_DIM}"
        fail("q", f"a last dimension of {wanted}", q)
    check_mla_cache(kv_cache, width=q.shape[2], device=q.device)
    if kv_cache.dtype not in (q.dtype, *FP8_DTYPES):
        fail("kv_cache", f"q's dtype {dtype_name(q.dtype)} or fp8", kv_cache)
    k_cache = kv_cache.unsqueeze(2)
    places = (kv_cache.stride(0), kv_cache.stride(1), 0)
    cache = KVCacheArguments(
        k_cache=k_cache,
        v_cache=k_cache[..., :kv_lora_rank],
        kv_layout="NHD",
        num_pages=kv_cache.shape[0],
        page_size=kv_cache.shape[1],
        num_kv_heads=1,
        head_dim=q.shape[2],
        head_dim_v=kv_lora_rank,
        k_strides=(*places, 0),
        v_strides=(*places, 1),
        chunk=0,
        k_scale=None,
        v_scale=None,
    )
    return _check_call(
        cache,
        q=q,
        block_table=block_table,
        seq_lens=seq_lens,
        softmax_scale=softmax_scale,
        sliding_window=None,
        softcap=None,
        sinks=None,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        shard=shard,
        global_seq_lens=global_seq_lens,
        num_splits=num_splits,
        out=out,
        lse=lse,
    )


def check_mla_cache(
    kv_cache: torch.Tensor, *, width: int, device: torch.device | None = None
) -> None:
    """Check kv_cache [P, page, width], fp32, fp16, bf16 or fp8, last dimension contiguous.

    An fp8 cache is read two elements at a time, so its strides and offset have to be even.
    """
    check_tensor(
        "kv_cache",
        kv_cache,
        dtypes=FLOAT_DTYPES + FP8_DTYPES,
        shape=["P", "page", ("kv_lora_rank+rope", width)],
        device=device,
        last_contiguous=True,
    )
    check_positive_int("page_size (of kv_cache)", kv_cache.shape[1], at_most=MAX_PAGE_SIZE)
    if kv_cache.dtype in FP8_DTYPES:
        places = (kv_cache.storage_offset(), kv_cache.stride(0), kv_cache.stride(1))
        if any(place % 2 for place in places):
            needed = f"fp8 needs an even offset and even strides, this one has {places}"
            unsupported("kv_cache", kv_cache, needed)


def check_mla_scale(kv_scale: float | torch.Tensor | None, kv_cache: torch.Tensor) -> None:
    """Check kv_scale: None, or with an fp8 cache a finite float > 0 or a 1-element fp32 tensor."""
    if kv_scale is None:
        return
    if kv_cache.dtype not in FP8_DTYPES:
        fail("kv_scale", f"None with a {dtype_name(kv_cache.dtype)} cache", kv_scale)
    if isinstance(kv_scale, torch.Tensor):
        check_tensor("kv_scale", kv_scale, dtypes=(torch.float32,), device=kv_cache.device)
        if kv_scale.numel() != 1:
            fail("kv_scale", "a float or a tensor of 1 element", kv_scale)
    else:
        check_finite("kv_scale", kv_scale, positive=True)


def _check_call(
    cache: KVCacheArguments,
    *,
    q: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    max_query_len: int,
    shard: Shard | None,
    global_seq_lens: torch.Tensor | None,
    num_splits: int | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> DecodeArguments:
    """Check all of a decode call but q's last dimension and the cache, which are right."""
    num_tokens, num_q_heads = q.shape[:2]
    if num_q_heads < 1 or num_q_heads % cache.num_kv_heads:
        fail("q", f"a number of heads divisible by num_kv_heads={cache.num_kv_heads}", q)
    num_requests, max_pages = check_block_table(block_table, seq_lens, device=q.device)

    softmax_scale = check_finite("softmax_scale", softmax_scale)
    sliding_window = check_sliding_window(sliding_window)
    if softcap is not None:
        softcap = check_finite("softcap", softcap, positive=True)
    if sinks is not None:
        check_tensor(
            "sinks",
            sinks,
            dtypes=(torch.float32,),
            shape=[("Hq", num_q_heads)],
            device=q.device,
            last_contiguous=True,
        )

    check_positive_int("max_query_len", max_query_len)
    if query_start_loc is None:
        if max_query_len > 1:
            fail("query_start_loc", f"int32 [B+1={num_requests + 1}] with max_query_len > 1", None)
        if num_tokens != num_requests:
            fail("q", f"one token a request, T = B = {num_requests}, without query_start_loc", q)
    else:
        check_tensor(
            "query_start_loc",
            query_start_loc,
            dtypes=(torch.int32,),
            shape=[("B+1", num_requests + 1)],
            device=q.device,
            last_contiguous=True,
        )

    check_shard(shard)
    if shard is not None and shard.rank > 0:
        # Every rank is given the sinks; they count once.
        sinks = None
    if global_seq_lens is not None:
        check_tensor(
            "global_seq_lens",
            global_seq_lens,
            dtypes=(torch.int32,),
            shape=[("B", num_requests)],
            device=q.device,
            last_contiguous=True,
        )
    elif shard is not None and shard.size > 1 and (max_query_len > 1 or sliding_window):
        reason = "max_query_len > 1" if max_query_len > 1 else "sliding_window"
        fail("global_seq_lens", f"int32 [B={num_requests}] with shard and {reason}", None)

    if num_splits is not None:
        check_positive_int("num_splits", num_splits)
    if out is not None:
        check_tensor(
            "out",
            out,
            dtypes=(q.dtype,),
            shape=[("T", num_tokens), ("Hq", num_q_heads), ("Dv", cache.head_dim_v)],
            device=q.device,
            last_contiguous=True,
            distinct=True,
        )
    if lse is not None:
        check_tensor(
            "lse",
            lse,
            dtypes=(torch.float32,),
            shape=[("T", num_tokens), ("Hq", num_q_heads)],
            device=q.device,
            distinct=True,
        )
    return DecodeArguments(
        **vars(cache),
        q=q,
        block_table=block_table,
        seq_lens=seq_lens,
        total_lens=seq_lens if global_seq_lens is None else global_seq_lens,
        softmax_scale=softmax_scale,
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_pages=max_pages,
        num_q_heads=num_q_heads,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        shard=shard,
        global_seq_lens=global_seq_lens,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        num_splits=num_splits,
    )
