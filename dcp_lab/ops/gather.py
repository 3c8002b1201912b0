"""gather_kv and gather_decode: copy the pages into contiguous K and V first, then attend those."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
import triton

from dcp_lab.kernels import INTERPRETED, interpreter_safe
from dcp_lab.kernels import gather as kernels
from dcp_lab.kernels.launch import Bindable, BoundCalls, Launch, address, call_key
from dcp_lab.kernels.varlen import _varlen_kernel
from dcp_lab.ops.arguments import (
    DecodeArguments,
    KVCacheArguments,
    check_block_table,
    check_decode_arguments,
    check_kv_cache,
)
from dcp_lab.ops.checks import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_positive_int,
    check_tensor,
    dtype_name,
    fail,
)
from dcp_lab.ops.copies import cache_arguments, choose_copy_config
from dcp_lab.ops.device import Device, current_device, device_of, is_here
from dcp_lab.ops.split_kv import plan_reduce, split_call
from dcp_lab.ops.workspace import DecodeConfig
from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState

GATHERS = ("per_token", "per_page", "published")
ATTENDS = ("split", "prefill")
MAX_TOKENS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class VarlenConfig:
    """Launch knobs of `_varlen_kernel`.

    Attributes:
        block_m: Query rows of one head a tile holds; 64 is the smallest of a prefill kernel.
        block_n: Keys a tile holds.
        num_warps, num_stages: Of a program and of its software pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_varlen_config(head_dim: int, head_dim_v: int, itemsize: int) -> VarlenConfig:
    """Return a prefill kernel's tile: 64 rows by 64 keys, fewer where K and V would not fit.

    Not swept: it stands for a kernel that was not made for one query row.
    """
    width = triton.next_power_of_2(head_dim) + triton.next_power_of_2(head_dim_v)
    # At most 32 KB of K and V a stage: CDNA3 has 64 KB of LDS.
    keys = max(16, min(64, 32768 // (width * itemsize)))
    # A power of two: where K and V differ in width the quotient is none.
    block_n = 1 << (keys.bit_length() - 1)
    return VarlenConfig(block_m=64, block_n=block_n, num_warps=4, num_stages=2)


def choose_num_splits(a: DecodeArguments, device: Device) -> int:
    """Return into how many pieces each request is cut when the caller does not say.

    As many as give two programs a multiprocessor, which was best or within 2 % for reading pages
    (dcp_lab/ops/workspace.py), but none shorter than 64 tokens. From sizes that the host knows, so
    the same at every step; not swept for contiguous KV.
    """
    programs = a.num_requests * a.num_kv_heads
    longest = triton.cdiv(a.max_pages * a.page_size, 64)
    return max(1, min(2 * device.num_sms // programs, longest))


@dataclasses.dataclass(frozen=True)
class PreparedGather:
    """What a GatherWorkspace is prepared for: requests, columns of block_table, first tokens."""

    num_requests: int
    max_pages: int
    seq_starts: torch.Tensor | None = None

    def __str__(self) -> str:
        """Describe it without reading the tensor, which may live on a device."""
        starts = "without" if self.seq_starts is None else "with"
        return f"{self.num_requests} requests, max_pages={self.max_pages}, {starts} seq_starts"


class CountedLaunch:
    """The published gather's launch, of as many tokens as the host waits for the device to say.

    Run and bound like a Launch. How many there are, and with them the grid, may differ from one
    launch to the next; all else is fixed.

    Args:
        count: int32 [], on the device, the tokens.
        arguments: Of `_gather_tokens_kernel`, but for num_tokens.
        most_programs: Of the grid.
    """

    def __init__(
        self, count: torch.Tensor, arguments: Mapping[str, object], most_programs: int
    ) -> None:
        self._count, self._arguments, self._most = count, arguments, most_programs

    def run(self) -> object:
        """Wait, then launch, if there is any token; return the compiled kernel."""
        num_tokens = _read_total(self._count)
        return self._launch(num_tokens).run() if num_tokens else None

    def bind(self, *, keep: bool = True) -> Callable[[], object]:
        """Wait and launch once, and return what does it again for less host time.

        Args:
            keep: As of Launch.bind; count, which belongs to the workspace, is kept in any case.
        """
        # Without a token too: there is no other way to the compiled kernel, which num_tokens does
        # not specialise.
        first = self._launch(_read_total(self._count))
        compiled = first.run()
        if INTERPRETED:
            return self.run
        names = first.kernel.arg_names
        ordered = [first.arguments[name] for name in names]
        if not keep:
            ordered = list(map(address, ordered))
        place, count, most = names.index("num_tokens"), self._count, self._most

        def launch() -> None:
            num_tokens = _read_total(count)
            if num_tokens:
                ordered[place] = num_tokens
                with current_device(count.device):
                    compiled[min(num_tokens, most), 1, 1](*ordered)

        return launch

    def _launch(self, num_tokens: int) -> Launch:
        grid = (max(1, min(num_tokens, self._most)), 1)
        arguments = {**self._arguments, "num_tokens": num_tokens}
        return Launch(kernels._gather_tokens_kernel, grid, arguments, {"num_warps": 4})


def _read_total(count: torch.Tensor) -> int:
    """Return this step's tokens as the published path does: by waiting for the device."""
    if count.is_cuda and torch.cuda.is_current_stream_capturing():
        fail(
            "total_tokens",
            "an int under graph capture, where gather='published' cannot read it from the device",
            None,
        )
    return int(count.item())


class GatherWorkspace:
    """Buffers and plan of a gather, made once and shared by all layers.

    Sized for the largest step; nothing moves or is freed afterwards, so a captured graph may point
    to it. Only room for the partial results of attend='split' is added later, by the first call
    that needs so much, for all layers. `prepare` decides on the device which row of the result
    belongs to which request: one launch a step, all layers use the same plan, as vLLM's metadata
    builder does.

    Args:
        max_requests: Most requests of a step.
        max_tokens: Most tokens of a step, all requests together; what is over is cut off.
        num_kv_heads, head_dim: Of the cache.
        page_size: Of the cache.
        head_dim_v: Default: head_dim.
        dtype: Of the gathered K and V. Default: bf16.
        gather: 'per_token', 'per_page' or 'published', see gather_decode. Default: 'per_token'.
        device: Default: the current GPU, or the CPU under the interpreter.

    Attributes:
        k: [max_tokens, Hkv, D], K of all requests one after the other.
        v: [max_tokens, Hkv, Dv].
        cu_seqlens: int32 [max_requests + 1], first row of each request.
        counts: int32 [max_requests], rows of each request.

    Raises:
        ValueError: A size is not an int >= 1 (max_tokens: >= 0), dtype or gather is unknown.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        gather: str = "per_token",
        device: torch.device | str | None = None,
    ) -> None:
        self.max_requests = check_positive_int("max_requests", max_requests)
        self.max_tokens = _check_tokens("max_tokens", max_tokens)
        self.num_kv_heads = check_positive_int("num_kv_heads", num_kv_heads)
        self.head_dim = check_positive_int("head_dim", head_dim)
        self.head_dim_v = check_positive_int(
            "head_dim_v", head_dim if head_dim_v is None else head_dim_v
        )
        self.page_size = check_positive_int("page_size", page_size)
        if dtype not in FLOAT_DTYPES:
            fail("dtype", "torch.float32, torch.float16 or torch.bfloat16", dtype)
        self.gather = _check_gather(gather)
        if device is None:
            device = "cpu" if INTERPRETED else torch.device("cuda", torch.cuda.current_device())
        # Small pages are copied several at a time, so that a program has 16 tokens at least.
        pages = 16 // page_size or 1
        self._unit_tokens = page_size * pages if gather == "per_page" else 1
        most_units = max_tokens
        if gather == "per_page":
            # A request that starts and ends inside a unit touches one more than its tokens fill.
            most_units = min(max_tokens, max_tokens // self._unit_tokens + 2 * max_requests)
        self._num_units = most_units
        self.k = torch.empty(max_tokens, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(max_tokens, num_kv_heads, self.head_dim_v, dtype=dtype, device=device)
        self.device = self.k.device
        sizes = (max_requests + 1, max_requests + 1, most_units, max_requests)
        self.cu_seqlens, self._cu_units, self._unit_requests, self.counts = (
            torch.empty(n, dtype=torch.int32, device=device) for n in sizes
        )
        self.prepared: PreparedGather | None = None
        self.calls = BoundCalls()
        self._prepares = BoundCalls()
        self._scratch: dict[int, torch.Tensor] = {}

    def memory_bytes(self) -> int:
        """Return the device memory this workspace holds."""
        plan = (self.cu_seqlens, self._cu_units, self._unit_requests, self.counts)
        tensors = (self.k, self.v, *plan, *self._scratch.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    def prepare(
        self,
        seq_lens: torch.Tensor,
        *,
        max_pages: int,
        seq_starts: torch.Tensor | None = None,
    ) -> None:
        """Lay out this step's requests one after the other: one launch, for all layers.

        Args:
            seq_lens: int32 [B], tokens to gather of each request, B <= max_requests.
            max_pages: Columns of block_table; no request has tokens past them.
            seq_starts: int32 [B], first token to gather; `copy` reads it again. Default: 0.

        Raises:
            ValueError: A tensor is not int32 [B] on this device, B > max_requests, or max_pages is
                not an int >= 0.

        Notes:
            Safe under graph capture; no sync, no allocation. With the arguments of an earlier call
            (the same memory, shapes and options) nothing is checked and planned again.
        """
        key = call_key(seq_lens, max_pages, seq_starts)
        if self._prepares.again(key):
            self.prepared = PreparedGather(seq_lens.shape[0], max_pages, seq_starts)
            return
        check_tensor(
            "seq_lens",
            seq_lens,
            dtypes=(torch.int32,),
            shape=["B"],
            device=self.device,
            last_contiguous=True,
        )
        num_requests = seq_lens.shape[0]
        if num_requests > self.max_requests:
            fail("seq_lens", f"at most max_requests={self.max_requests} requests", seq_lens)
        if seq_starts is not None:
            check_tensor(
                "seq_starts",
                seq_starts,
                dtypes=(torch.int32,),
                shape=[("B", num_requests)],
                device=self.device,
                last_contiguous=True,
            )
        _check_tokens("max_pages", max_pages)
        block_b = max(2, min(128, triton.next_power_of_2(num_requests)))
        block_u = max(2, min(2048 // block_b, triton.next_power_of_2(self._num_units)))
        plan = dict(  # noqa: C408 - read beside the kernel's keyword arguments
            seq_lens_ptr=seq_lens,
            seq_starts_ptr=seq_lens if seq_starts is None else seq_starts,
            cu_seqlens_ptr=self.cu_seqlens,
            cu_units_ptr=self._cu_units,
            unit_requests_ptr=self._unit_requests,
            counts_ptr=self.counts,
            num_requests=num_requests,
            num_rows=self.max_tokens,
            num_units=self._num_units,
            table_tokens=max_pages * self.page_size,
            UNIT=self._unit_tokens,
            HAS_SEQ_STARTS=seq_starts is not None,
            BLOCK_B=block_b,
            BLOCK_U=block_u,
        )
        grid = (max(1, triton.cdiv(self._num_units, block_u)),)
        launch = Launch(kernels._plan_gather_kernel, grid, plan, {"num_warps": 4})
        with current_device(self.device):
            self._prepares.first(key, [launch])
        # Not before: a launch that fails leaves the plan that was there.
        self.prepared = PreparedGather(num_requests, max_pages, seq_starts)

    def copy(
        self,
        cache: KVCacheArguments,
        block_table: torch.Tensor,
        *,
        total_tokens: int | None = None,
    ) -> None:
        """Copy one layer's K and V into this workspace: one launch, after `prepare`.

        total_tokens is for gather='published' alone: the tokens to copy, or more, up to
        max_tokens. Default: read from the device, which waits for all that was launched before.
        """
        k, v = self.k, self.v
        if INTERPRETED and k.dtype == torch.bfloat16 and k.dtype != cache.k_cache.dtype:
            # The interpreter truncates where a cast to bf16 should round: torch casts there.
            k, v = k.float(), v.float()
        with current_device(self.device):
            for launch in self._plan_copy(cache, block_table, k, v, total_tokens):
                launch.run()
        if k is not self.k:
            self.k.copy_(k)
            self.v.copy_(v)

    def _plan_copy(
        self,
        cache: KVCacheArguments,
        block_table: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        total_tokens: int | None,
    ) -> list[Bindable]:
        """Return the launch that copies into k and v, none where there is nothing to copy."""
        if self._num_units == 0 or total_tokens == 0:
            return []
        seq_starts = self.prepared.seq_starts
        arguments = dict(
            k_ptr=k,
            v_ptr=v,
            block_table_ptr=block_table,
            seq_starts_ptr=block_table if seq_starts is None else seq_starts,
            cu_seqlens_ptr=self.cu_seqlens,
            unit_requests_ptr=self._unit_requests,
            stride_bt=block_table.stride(0),
            HAS_SEQ_STARTS=seq_starts is not None,
            **cache_arguments(cache, spare=block_table),
        )
        if self.gather == "per_page":
            rows = self._unit_tokens * self.num_kv_heads
            config = choose_copy_config(rows, max(self.head_dim, self.head_dim_v), self.device)
            arguments |= {
                "cu_units_ptr": self._cu_units,
                "UNIT": self._unit_tokens,
                "BLOCK_R": config.block_rows,
            }
            grid = (self._num_units, triton.cdiv(rows, config.block_rows))
            options = {"num_warps": config.num_warps}
            return [Launch(kernels._gather_per_page_kernel, grid, arguments, options)]
        if self.gather == "per_token":
            total_tokens, grid = self._num_units, (self._num_units, self.num_kv_heads)
        elif total_tokens is not None or not is_here():
            # Not here: kernels are built for another device, nothing is run.
            total_tokens = self._num_units if total_tokens is None else total_tokens
            grid = (min(total_tokens, device_of(self.device).num_sms), 1)
        else:
            last = self.cu_seqlens[self.prepared.num_requests]
            return [CountedLaunch(last, arguments, device_of(self.device).num_sms)]
        arguments["num_tokens"] = total_tokens
        return [Launch(kernels._gather_tokens_kernel, grid, arguments, {"num_warps": 4})]

    def partials(
        self, num_items: int, query_len: int, num_q_heads: int, head_dim_v: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return fp32 out [items, query_len, Hq, Dv] and lse [items, query_len, Hq] of a split.

        In a buffer shared by all calls that need as much, up to the next power of two. A call that
        needs more has another one and leaves this one alone, to which a captured graph may point;
        all together are at most four times the largest need.
        """
        rows = (num_items, query_len, num_q_heads)
        num_rows = math.prod(rows)
        elements = triton.next_power_of_2(num_rows * (head_dim_v + 1))
        if elements not in self._scratch:
            self._scratch[elements] = torch.empty(
                elements, dtype=torch.float32, device=self.device
            )
        out, lse, _ = self._scratch[elements].split(
            [num_rows * head_dim_v, num_rows, elements - num_rows * (head_dim_v + 1)]
        )
        return out.view(*rows, head_dim_v), lse.view(rows)


def gather_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    total_tokens: int | None = None,
    out_dtype: torch.dtype | None = None,
    gather: str = "per_page",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy tokens of paged requests into contiguous K and V, one request after the other.

    k[cu_seqlens[b] + i] = k_scale * token seq_starts[b] + i of request b,  i < seq_lens[b]

    Args:
        k_cache: [P, page, Hkv, D] (NHD), [P, Hkv, page, D] (HND) or [P, Hkv, D/x, page, x]
            (SHUFFLE), x = 16 / itemsize; fp32, fp16, bf16 or fp8 (e4m3fn, e4m3fnuz), any strides
            with a contiguous last dimension.
        v_cache: The same with Dv, [P, Hkv, page/x, Dv, x] under SHUFFLE.
        block_table: int32 [B, max_pages], physical page of each logical one. Only entries that
            hold gathered tokens are read.
        seq_lens: int32 [B], tokens to gather of each request, counted from seq_starts.
        kv_layout: 'NHD', 'HND' or 'SHUFFLE'. Default: 'NHD'.
        k_scale, v_scale: Of an fp8 cache, value = stored * scale: a float, or an fp32 tensor of
            1 element or [Hkv], read on the device. Default: 1.
        seq_starts: int32 [B], first token to gather of each request. Tokens that block_table has
            no page for are left out, so a start past the table gathers nothing. Default: 0.
        total_tokens: N, rows of the result. Default: B * max_pages * page, all the table can hold,
            since the true total is known to the device only. If it is smaller than the true total
            the last tokens are cut off and cu_seqlens says what is there; nothing is written past
            N.
        out_dtype: fp32, fp16 or bf16. Default: bf16 for an fp8 cache, else the cache's.
        gather: 'per_page', 'per_token' or 'published', how it is copied: see gather_decode.
            Default: 'per_page'.

    Returns:
        k [N, Hkv, D], v [N, Hkv, Dv] and cu_seqlens int32 [B + 1]: request b's tokens are rows
        cu_seqlens[b] to cu_seqlens[b + 1]. Rows past cu_seqlens[-1] are undefined.

    Raises:
        ValueError: An argument breaks the contract; the message names it, what was expected and
            what was given.

    Notes:
        Two launches (plan, copy), no sync (gather='published': one, unless total_tokens is
        given). A GatherWorkspace shares the plan between layers.
        Graph capture: safe (gather='published': with total_tokens); the results are allocated in
        the graph's pool.
        Reads N * Hkv * (D + Dv) elements of the cache and writes as many of out_dtype.
        fp8: stored * scale in fp32, then rounded to out_dtype; NaN stays NaN.

    Source:
        The grids of 'per_token' and 'published' are those of vLLM's cp_mha_gather_cache_kernel
        (Apache-2.0); written here.
    """
    cache = check_kv_cache(k_cache, v_cache, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale)
    num_requests, max_pages = check_block_table(block_table, seq_lens, device=k_cache.device)
    if out_dtype is not None and out_dtype not in FLOAT_DTYPES:
        fail("out_dtype", "torch.float32, torch.float16, torch.bfloat16 or None", out_dtype)
    fp8 = k_cache.dtype in FP8_DTYPES
    if out_dtype is None:
        out_dtype = torch.bfloat16 if fp8 else k_cache.dtype
    # The interpreter truncates where a cast to bf16 should round: torch casts there.
    cast_after = INTERPRETED and torch.bfloat16 in (out_dtype, k_cache.dtype) and not fp8
    workspace = _make_workspace(
        cache,
        num_requests=num_requests,
        max_pages=max_pages,
        total_tokens=total_tokens,
        dtype=k_cache.dtype if cast_after else out_dtype,
        gather=gather,
    )
    workspace.prepare(seq_lens, max_pages=max_pages, seq_starts=seq_starts)
    workspace.copy(cache, block_table, total_tokens=total_tokens)
    cu_seqlens = workspace.cu_seqlens[: num_requests + 1]
    return workspace.k.to(out_dtype), workspace.v.to(out_dtype), cu_seqlens


def gather_decode(
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
    workspace: GatherWorkspace | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    gather: str = "per_token",
    total_tokens: int | None = None,
    attend: str | None = None,
) -> AttnState:
    """Do what paged_decode does by gathering the paged KV first: the path study 1 blames.

    out[t, h] = sum_s softmax_s(score[t, h, s]) v[s, h // G],  G = Hq // Hkv
    lse[t, h] = ln sum_s exp(score[t, h, s]),  score = softmax_scale q[t, h] . k[s, h // G]

    A plan, a gather into contiguous K and V, and an attention over those with cu_seqlens.

    Args:
        q: [T, Hq, D] fp32, fp16 or bf16, last dimension contiguous, any other strides.
        k_cache, v_cache: Pages in q's dtype or fp8 (e4m3fn, e4m3fnuz), [P, page, Hkv, D] (NHD) or
            [P, Hkv, page, D] (HND), V with Dv in D's place; or K [P, Hkv, D/x, page, x] and V
            [P, Hkv, page/x, Dv, x] (SHUFFLE), x = 16 / itemsize. Last dimension contiguous, any
            other strides.
        block_table: int32 [B, max_pages], physical page of each logical one. Entries past
            ceil(seq_lens / page) are never read.
        seq_lens: int32 [B], tokens in this cache (this rank's count under DCP), the tokens being
            decoded included: KV is written first.
        softmax_scale: Multiplies q . k. Default: D ** -0.5.
        kv_layout: 'NHD', 'HND' or 'SHUFFLE'. Default: 'NHD'.
        k_scale, v_scale: Of an fp8 cache, value = stored * scale: a float, or an fp32 tensor of
            1 element or [Hkv], read on the device. Default: 1.
        sliding_window: Only the last so many keys are seen, the query's own included; all are
            gathered. Default: all.
        softcap: Scores become softcap * tanh(score / softcap), before masking. Default: none.
        sinks: fp32 [Hq], one more logit a head in the denominator; under a shard on rank 0 only. A
            row with a sink and no key has out 0 and lse = sink. Default: none.
        query_start_loc: int32 [B + 1], request b owns rows [b] to [b + 1]; rows past the last
            entry are padding (out 0, lse -inf). Default: one token a request, T = B.
        max_query_len: Most query tokens of a request. Default: 1.
        shard: This rank's share of the tokens. Default: the cache holds whole requests.
        global_seq_lens: int32 [B], tokens of the whole request; needed with shard when
            max_query_len > 1 or with sliding_window. Query j of n sees global positions
            <= global_seq_lens - n + j.
        num_splits: Pieces each request is cut into by attend='split'. Default: as many as give two
            programs a multiprocessor, from B, Hkv and the width of block_table.
        workspace: A GatherWorkspace in q's dtype, prepared with this step's seq_lens. Default:
            made and prepared by the call (one launch more, and allocations).
        out: [T, Hq, Dv] in q's dtype, written in place. Default: allocated.
        lse: [T, Hq] fp32, written in place. Default: allocated.
        gather: How the pages are copied. Default: 'per_token'.
            'per_token': one program copies one head of one token, as vLLM 0.33 does on ROCm.
            'per_page': one program copies a page of all heads, the best we know.
            'published': study 1's own. The host waits for the device to learn how many tokens
            there are (`cu_seqlens[-1].item()`, in every call, so in every layer), and
            min(tokens, compute units) programs loop over them.
        total_tokens: Tokens of all requests together, if the host knows: sizes the gathered
            buffers and grid. Smaller than the true total it cuts the last tokens off. Default:
            B * max_pages * page, which needs no sync. Not with workspace, which has its own size,
            but for gather='published', which then need not wait for the device.
        attend: What follows the gather. 'split': a decode kernel, the heads of a KV head in one
            tile and each request in num_splits pieces. 'prefill': the tiles of a prefill kernel,
            64 rows of one query head, no split, as the published path's varlen attention is made
            for. Default: 'prefill' for gather='published', else 'split'.

    Returns:
        AttnState(out, lse). A row that sees no key (empty request, empty shard, padding) gives
        out = 0 and lse = -inf.

    Raises:
        ValueError: An argument breaks the contract; the message says which, what was expected and
            what was given. Raised before any launch and without a device sync. Also when
            gather='published' would have to read the total inside a graph capture.

    Notes:
        Launches with a prepared workspace: 2 (gather, attention), 3 with attend='split' and more
            than one split (and merge); one more to plan without a workspace.
        Host: with workspace, out and lse given, a call with the arguments of an earlier one (the
            same memory, shapes and options, total_tokens too) is not checked and planned again.
        Scratch of attend='split': B * num_splits * max_query_len * Hq * (Dv + 1) fp32, kept by the
            workspace.
        Host syncs: none; gather='published' without total_tokens: 1.
        Graph capture: safe (gather='published': with total_tokens); what is not given comes from
            the graph's pool. seq_lens, block_table, q and scale tensors are read on the device, so
            they may change in place between replays. Accumulates in fp32. The same inputs give
            the same bits; another num_splits does not.
        An fp8 cache is gathered as stored * scale in q's dtype, rounded once.
        Not here, since it is the layer around it and not the gather: what study 1's path does
            with it under DCP. It attends the cached tokens without the new one, all-gathers q
            before, reduces by ag_rs after, attends the new token in a second call and merges the
            two. And once a step its metadata builder syncs twice more, for the same total and for
            the rows' requests (torch.where over tokens x requests), where this plan is one launch.
        CPU: runs through Triton's interpreter; bf16 is computed in fp32 and rounded once.

    Source:
        Written here after the decode path of vLLM's ROCM_AITER_FA backend (Apache-2.0);
        'published' after its version with class AiterFlashAttentionDcpMetadata (vLLM PR 29502).
    """
    key = None
    if out is not None and lse is not None and isinstance(workspace, GatherWorkspace):
        key = call_key(
            *(workspace.prepared, workspace.k, workspace.v),
            *(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, kv_layout),
            *(k_scale, v_scale, sliding_window, softcap, sinks, query_start_loc, max_query_len),
            *(shard, global_seq_lens, num_splits, out, lse, gather, total_tokens, attend),
        )
        if workspace.calls.again(key):
            return AttnState(out, lse)
    _check_gather(gather)
    if attend is None:
        attend = "prefill" if gather == "published" else "split"
    if attend not in ATTENDS:
        fail("attend", "'split', 'prefill' or None", attend)
    a = check_decode_arguments(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        softmax_scale=softmax_scale,
        kv_layout=kv_layout,
        k_scale=k_scale,
        v_scale=v_scale,
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
    if attend == "prefill" and num_splits not in (None, 1):
        fail("num_splits", "None or 1 with attend='prefill', which splits nothing", num_splits)
    if workspace is not None:
        _check_workspace(workspace, a, gather=gather, total_tokens=total_tokens)
    else:
        workspace = _make_workspace(
            a,
            num_requests=a.num_requests,
            max_pages=a.max_pages,
            total_tokens=total_tokens,
            dtype=q.dtype,
            gather=gather,
        )
        workspace.prepare(seq_lens, max_pages=a.max_pages)
    if out is None:
        out = torch.empty(
            a.num_tokens, a.num_q_heads, a.head_dim_v, dtype=q.dtype, device=q.device
        )
    if lse is None:
        lse = torch.empty(a.num_tokens, a.num_q_heads, dtype=torch.float32, device=q.device)
    if a.num_tokens == 0:
        return AttnState(out, lse)
    if a.num_requests == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return AttnState(out, lse)
    launches: list[Bindable] = []
    if key is None:
        workspace.copy(a, block_table, total_tokens=total_tokens)
    else:
        launches += workspace._plan_copy(a, block_table, workspace.k, workspace.v, total_tokens)
    rounded = interpreter_safe(out)
    launches += _plan_attention(a, workspace=workspace, attend=attend, out=rounded, lse=lse)
    with current_device(q.device):
        workspace.calls.first(key, launches)
    if rounded is not out:
        out.copy_(rounded)
    return AttnState(out, lse)


def _check_gather(gather: object) -> str:
    """Return gather if it names a kernel that copies."""
    if gather not in GATHERS:
        fail("gather", f"one of {', '.join(map(repr, GATHERS))}", gather)
    return gather


def _check_tokens(argument: str, value: object) -> int:
    """Return value if it is a number of rows that int32 can count."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        fail(argument, f"an int from 0 to {MAX_TOKENS}", value)
    return value


def _make_workspace(
    cache: KVCacheArguments,
    *,
    num_requests: int,
    max_pages: int,
    total_tokens: int | None,
    dtype: torch.dtype,
    gather: str,
) -> GatherWorkspace:
    """Return a workspace for one call, with total_tokens rows or all the table can hold."""
    if total_tokens is None:
        total_tokens = num_requests * max_pages * cache.page_size
    return GatherWorkspace(
        max(1, num_requests),
        _check_tokens("total_tokens", total_tokens),
        cache.num_kv_heads,
        cache.head_dim,
        cache.page_size,
        head_dim_v=cache.head_dim_v,
        dtype=dtype,
        gather=gather,
        device=cache.k_cache.device,
    )


def _check_workspace(
    workspace: GatherWorkspace, a: DecodeArguments, *, gather: str, total_tokens: int | None
) -> None:
    """Raise unless the workspace fits the call and is prepared for as many requests."""
    if not isinstance(workspace, GatherWorkspace):
        fail("workspace", "a GatherWorkspace or None", workspace)
    if total_tokens is not None:
        if gather != "published":
            fail("total_tokens", "None with workspace, which has its own max_tokens", total_tokens)
        if _check_tokens("total_tokens", total_tokens) > workspace.max_tokens:
            fail("total_tokens", f"at most the workspace's {workspace.max_tokens}", total_tokens)
    wanted = {
        "gather": gather,
        "num_kv_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "head_dim_v": a.head_dim_v,
        "page_size": a.page_size,
        "device": a.q.device,
    }
    for name, value in wanted.items():
        if getattr(workspace, name) != value:
            fail("workspace", f"one made for {name}={value}", f"{name}={getattr(workspace, name)}")
    if workspace.k.dtype != a.q.dtype:
        fail("workspace", f"one made for dtype {dtype_name(a.q.dtype)}", workspace.k)
    if workspace.prepared is None:
        fail("workspace", "a prepared one: call workspace.prepare once a step", "unprepared")
    step = PreparedGather(a.num_requests, a.max_pages)
    if workspace.prepared != step:
        fail("workspace", f"one prepared for this call: {step}", str(workspace.prepared))


def _plan_attention(
    a: DecodeArguments,
    *,
    workspace: GatherWorkspace,
    attend: str,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> list[Launch]:
    """Return the launch of the attention over the gathered K and V and, if split, of the merge."""
    q, k, v = map(interpreter_safe, (a.q, workspace.k, workspace.v))
    group = a.num_q_heads // a.num_kv_heads
    num_splits = a.num_splits or 1
    device = device_of(a.q.device)
    if attend == "split" and a.num_splits is None:
        num_splits = choose_num_splits(a, device)
    # The same call over one page that holds all requests, so that the split scheme is decode's.
    whole = dataclasses.replace(
        a,
        k_cache=workspace.k[None],
        v_cache=workspace.v[None],
        seq_lens=workspace.counts[: a.num_requests],
        num_splits=num_splits,
    )
    split = split_call(whole, workspace=None, out=out, lse=lse, partials=workspace.partials)
    config: DecodeConfig | VarlenConfig = split.config
    pack, block_m, row_blocks = group, split.block_m, split.row_blocks
    if attend == "prefill":
        config = choose_varlen_config(a.head_dim, a.head_dim_v, k.element_size())
        pack, block_m = 1, config.block_m
        row_blocks = triton.cdiv(a.max_query_len, block_m)
    if device.arch == "hip" and (a.sliding_window or a.max_query_len > 1):
        # The masks of rows that see less take scalar registers: with all keys of a tile 6 to 21
        # spill, with half none, but with a window and 64 rows still 9, with a window and a soft
        # cap 1 (`dcp-lab amd-report`). Built, never run here.
        fewer = 4 if a.sliding_window and (block_m == 64 or a.softcap) else 2
        config = dataclasses.replace(config, block_n=max(16, config.block_n // fewer))
    ragged = a.query_start_loc is not None
    grid = (a.num_q_heads // pack, row_blocks * num_splits, a.num_requests + ragged)
    shared = split.arguments
    attention = dict(  # noqa: C408 - read beside the kernel's keyword arguments
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        cu_seqlens_ptr=workspace.cu_seqlens,
        counts_ptr=workspace.counts,
        total_lens_ptr=a.total_lens,
        query_start_loc_ptr=a.query_start_loc if ragged else a.seq_lens,
        sinks_ptr=a.seq_lens if a.sinks is None else a.sinks,
        out_ptr=out,
        lse_ptr=lse,
        partial_out_ptr=shared["partial_out_ptr"],
        partial_lse_ptr=shared["partial_lse_ptr"],
        softmax_scale=a.softmax_scale,
        softcap=a.softcap or 0.0,
        num_requests=a.num_requests,
        num_tokens=a.num_tokens,
        num_splits=num_splits,
        partial_query_len=shared["partial_query_len"],
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_k_n=k.stride(0),
        stride_k_h=k.stride(1),
        stride_v_n=v.stride(0),
        stride_v_h=v.stride(1),
        stride_out_t=out.stride(0),
        stride_out_h=out.stride(1),
        stride_lse_t=lse.stride(0),
        stride_lse_h=lse.stride(1),
        NUM_Q_HEADS=a.num_q_heads,
        GROUP=group,
        PACK=pack,
        HEAD_DIM=a.head_dim,
        HEAD_DIM_V=a.head_dim_v,
        HAS_QUERY_START_LOC=ragged,
        HAS_PARTIALS=num_splits > 1,
        HAS_SOFTCAP=a.softcap is not None,
        HAS_SINKS=a.sinks is not None,
        CAUSAL=a.max_query_len > 1,
        WINDOW=a.sliding_window or 0,
        SHARD_RANK=shared["SHARD_RANK"],
        SHARD_SIZE=shared["SHARD_SIZE"],
        INTERLEAVE=shared["INTERLEAVE"],
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(a.head_dim),
        BLOCK_DV=triton.next_power_of_2(a.head_dim_v),
        STAGES=config.num_stages,
        EARLY_LAUNCH=split.overlap_reduce,
    )
    options = {"num_warps": config.num_warps}
    launches = [Launch(_varlen_kernel, grid, attention, options)]
    if num_splits > 1:
        # It counts the same tiles, and nothing after it may start early: the next gather does not
        # wait.
        cut = dataclasses.replace(split, config=config, overlap_entry=False)
        launches += plan_reduce(whole, cut)
    return launches
