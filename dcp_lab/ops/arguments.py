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
MAX_HEAD_DIM = 256
MAX_LORA_RANK = 512
MAX_PAGE_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class KVCacheArguments:
    """A checked pair of paged caches.

    Attributes:
        k_cache: [P, page, Hkv, D] (NHD) or [P, Hkv, page, D] (HND), as given.
        v_cache: The same with Dv.
        kv_layout: "NHD" or "HND".
        num_pages: P.
        page_size: Tokens a page.
        num_kv_heads: Hkv.
        head_dim: D.
        head_dim_v: Dv.
        k_strides: Elements from one (page, token, head) of K to the next, in that order whatever
            the layout; the last dimension has stride 1.
        v_strides: The same of V.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_layout: str
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]


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
        sliding_window: As given, an int >= 1 or None.
        softcap: Positive finite float or None.
        sinks: fp32 [Hq] or None.
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
        k_cache: [P, page, Hkv, D] (NHD) or [P, Hkv, page, D] (HND), fp32, fp16 or bf16, any
            strides with a contiguous last dimension.
        v_cache: The same with Dv, same dtype and device.
        kv_layout: "NHD" or "HND".
        k_scale: None.
        v_scale: None.
        device: Where the caches have to be. Default: k_cache's device.

    Raises:
        ValueError: Something does not fit.
        NotImplementedError: kv_layout "SHUFFLE", an fp8 cache or a scale.
    """
    if kv_layout not in KV_LAYOUTS:
        fail("kv_layout", f"one of {', '.join(map(repr, KV_LAYOUTS))}", kv_layout)
    if kv_layout == "SHUFFLE":
        unsupported("kv_layout", kv_layout, "use an NHD or HND cache")
    page_axis, head_axis = (1, 2) if kv_layout == "NHD" else (2, 1)
    shape = ["P", "page", "Hkv", "D"] if kv_layout == "NHD" else ["P", "Hkv", "page", "D"]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if isinstance(cache, torch.Tensor) and cache.dtype in FP8_DTYPES:
            unsupported(name, cache, "use a cache in fp32, fp16 or bf16")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            unsupported(name, scale, "leave it None; only an fp8 cache has a scale")
    check_tensor(
        "k_cache", k_cache, dtypes=FLOAT_DTYPES, shape=shape, device=device, last_contiguous=True
    )
    page_size = check_positive_int(
        "page_size (of k_cache)", k_cache.shape[page_axis], at_most=MAX_PAGE_SIZE
    )
    num_kv_heads = check_positive_int("num_kv_heads (of k_cache)", k_cache.shape[head_axis])
    head_dim = check_positive_int("head_dim (of k_cache)", k_cache.shape[3], at_most=MAX_HEAD_DIM)
    shape[0] = ("P", k_cache.shape[0])
    shape[page_axis] = ("page", page_size)
    shape[head_axis] = ("Hkv", num_kv_heads)
    shape[3] = "Dv"
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
    return KVCacheArguments(
        k_cache=k_cache,
        v_cache=v_cache,
        kv_layout=kv_layout,
        num_pages=k_cache.shape[0],
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        k_strides=(k_cache.stride(0), k_cache.stride(page_axis), k_cache.stride(head_axis)),
        v_strides=(v_cache.stride(0), v_cache.stride(page_axis), v_cache.stride(head_axis)),
    )


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


def _check_finite(argument: str, value: object, *, positive: bool = False) -> float:
    """Return value as a float if it is a finite real number (and > 0)."""
    kind = "a finite number > 0" if positive else "a finite number"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail(argument, kind, value)
    if not math.isfinite(value) or (positive and value <= 0):
        fail(argument, kind, value)
    return float(value)


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
        k_cache: See check_kv_cache; q's dtype.
        v_cache: See check_kv_cache.
        block_table: int32 [B, max_pages].
        seq_lens: int32 [B].
        softmax_scale: Finite. Default: D ** -0.5.
        kv_layout: "NHD" or "HND".
        k_scale: None.
        v_scale: None.
        sliding_window: int >= 1. Default: none.
        softcap: Finite, > 0. Default: none.
        sinks: fp32 [Hq]. Default: none.
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
        NotImplementedError: kv_layout "SHUFFLE", an fp8 cache, k_scale or v_scale.
    """
    check_tensor("q", q, dtypes=FLOAT_DTYPES, shape=["T", "Hq", "D"], last_contiguous=True)
    head_dim = q.shape[2]
    cache = check_kv_cache(
        k_cache, v_cache, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale, device=q.device
    )
    if k_cache.dtype != q.dtype:
        fail("k_cache", f"q's dtype {dtype_name(q.dtype)}", k_cache)
    _check_head_dim("head_dim (of q)", head_dim)
    if cache.head_dim != head_dim:
        fail("k_cache", f"q's head_dim {head_dim} as last dimension", k_cache)
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
    strides = (kv_cache.stride(0), kv_cache.stride(1), 0)
    cache = KVCacheArguments(
        k_cache=k_cache,
        v_cache=k_cache[..., :kv_lora_rank],
        kv_layout="NHD",
        num_pages=kv_cache.shape[0],
        page_size=kv_cache.shape[1],
        num_kv_heads=1,
        head_dim=q.shape[2],
        head_dim_v=kv_lora_rank,
        k_strides=strides,
        v_strides=strides,
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
        _check_finite("kv_scale", kv_scale, positive=True)


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

    softmax_scale = _check_finite("softmax_scale", softmax_scale)
    if sliding_window is not None:
        check_positive_int("sliding_window", sliding_window)
    if softcap is not None:
        softcap = _check_finite("softcap", softcap, positive=True)
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

    if shard is not None and not isinstance(shard, Shard):
        fail("shard", "a dcp_lab.Shard or None", shard)
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
        )
    if lse is not None:
        check_tensor(
            "lse",
            lse,
            dtypes=(torch.float32,),
            shape=[("T", num_tokens), ("Hq", num_q_heads)],
            device=q.device,
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
