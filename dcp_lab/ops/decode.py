"""paged_decode: attend a paged KV cache in place and return (out, lse)."""

from __future__ import annotations

import functools

import torch
import triton

from dcp_lab.kernels import INTERPRETED, interpreter_safe
from dcp_lab.kernels import decode as kernels
from dcp_lab.kernels.launch import Launch
from dcp_lab.ops.arguments import (
    DecodeArguments,
    check_decode_arguments,
    check_finite,
    kv_strides,
)
from dcp_lab.ops.checks import FP8_DTYPES, fail, unsupported
from dcp_lab.ops.copies import FP8_BIAS
from dcp_lab.ops.device import current_device, device_of
from dcp_lab.ops.split_kv import plan_reduce, repeated_call, run_split_call, split_call
from dcp_lab.ops.workspace import DecodeConfig, DecodeWorkspace
from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState

_FP16_BIAS = 15


def paged_decode(
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
    workspace: DecodeWorkspace | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttnState:
    """Attend each request's query tokens to its paged KV, in place, and return (out, lse).

    out[t, h] = sum_s softmax_s(score[t, h, s]) v[s, h // G],  G = Hq // Hkv
    lse[t, h] = ln sum_s exp(score[t, h, s]),  score = softmax_scale q[t, h] . k[s, h // G]

    k and v are what the cache holds, times k_scale and v_scale where it is fp8.

    Args:
        q: [T, Hq, D] fp32, fp16 or bf16, last dim contiguous, any other strides.
        k_cache, v_cache: Pages in q's dtype or in fp8 (e4m3fn; e4m3fnuz on AMD and on the CPU),
            [P, page, Hkv, D] (NHD) or [P, Hkv, page, D] (HND), V with Dv in D's place, or K
            [P, Hkv, D/x, page, x] and V [P, Hkv, page/x, Dv, x] (SHUFFLE, x = 16 / itemsize). Page
            sizes from 1 to 1,024 (SHUFFLE: multiples of x). Last dim contiguous, any other strides
            (even ones for V in fp8, but under SHUFFLE).
        block_table: int32 [B, max_pages], physical page of each logical one. Entries past
            ceil(seq_lens / page) are never read.
        seq_lens: int32 [B], tokens in this cache (this rank's count under DCP), the tokens being
            decoded included: KV is written first.
        softmax_scale: Multiplies q . k. Default: D ** -0.5.
        kv_layout: 'NHD', 'HND' or 'SHUFFLE'. Default: 'NHD'.
        query_start_loc: int32 [B + 1], request b owns rows [b] to [b + 1]; rows past the last
            entry are padding (out 0, lse -inf). Default: one token a request, T = B.
        max_query_len: Most query tokens of a request. Default: 1.
        shard: This rank's share of the tokens. Default: the cache holds whole requests.
        global_seq_lens: int32 [B], tokens of the whole request; needed with shard when
            max_query_len > 1. Query j of n sees global positions <= global_seq_lens - n + j.
        num_splits: Pieces each request is cut into. Default: chosen on the device by the
            workspace's plan, from seq_lens.
        workspace: A DecodeWorkspace prepared with this step's seq_lens. Default: made and prepared
            by the call (one launch more, and allocations).
        out: [T, Hq, Dv] in q's dtype, written in place. Default: allocated.
        lse: [T, Hq] fp32, written in place. Default: allocated.
        sliding_window: Only the last so many keys are seen, the query's own included. Default:
            all.
        softcap: Scores become softcap * tanh(score / softcap), before masking. Default: none.
        sinks: fp32 [Hq], one more logit a head in the denominator, finite or -inf (read on the
            device, so not checked). Under a shard every rank is given them and they count on rank
            0. A row with a sink and no key has out 0 and lse = sink. Default: none.
        k_scale, v_scale: Of an fp8 cache, value = stored * scale: a float > 0, or an fp32 tensor
            of 1 or of Hkv elements, read on the device. k_scale is in the LSE. Default: 1.

    Returns:
        AttnState(out, lse). A row that sees no key (empty request, empty shard, padding) gives
        out = 0 and lse = -inf.

    Raises:
        ValueError: An argument breaks the contract; the message says which, what was expected and
            what was given. Raised before any launch and without a device sync.
        NotImplementedError: An e4m3fnuz cache on NVIDIA, or an fp8 v_cache (not SHUFFLE) with an
            odd stride or storage offset.

    Notes:
        Launches: 2 with a prepared workspace or with num_splits > 1, 1 with num_splits = 1.
        Host: a call with the arguments of an earlier one (the same memory, shapes and options, out
            and lse given, and a workspace or num_splits = 1) is not checked and planned again.
        Graph capture: safe with workspace (or num_splits), out and lse given; seq_lens,
            block_table, q and scale tensors are read on the device, so they may change in place
            between replays. Accumulates in fp32. The same inputs give the same bits; another
            num_splits does not.
        fp8: multiplied as fp16, exact for the cache and for 11 bits of q (fp32 queries: in fp32);
            out and lse are as right as with the same K and V in 16 bits. An fp8 NaN in a slot in
            use may count as a number.
        CPU: runs through Triton's interpreter; bf16 is computed in fp32 and rounded once.

    Source:
        Flash-decoding (split KV, merge by LSE). Written here.
    """
    calls, key = repeated_call(
        workspace,
        num_splits,
        out,
        lse,
        (q, k_cache, v_cache, block_table, seq_lens, softmax_scale, kv_layout, k_scale, v_scale),
        (sliding_window, softcap, sinks, query_start_loc, max_query_len, shard, global_seq_lens),
    )
    if calls.again(key):
        return AttnState(out, lse)
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
    _check_fp8(a)
    return run_split_call(a, _plan, workspace=workspace, out=out, lse=lse, calls=calls, key=key)


class BoundDecode:
    """paged_decode bound once to its buffers: what a model's layer keeps and calls every step.

    Arguments are those of paged_decode, with workspace, out and lse required. They are checked and
    the launches prepared here, once; each call then only launches, on the current stream. The
    tensors are fixed, their contents may change between calls: q, the caches, block_table,
    seq_lens and what workspace.prepare wrote.

    Raises:
        ValueError, NotImplementedError: As paged_decode; also when workspace, out or lse is
            missing.

    Notes:
        Graph capture: bind before, call inside. No sync, no allocation.
        Binding launches once, so the workspace has to be prepared before.
        CPU: each call is a paged_decode of the same arguments.
    """

    def __init__(self, *tensors: torch.Tensor, **options: object) -> None:
        for name in ("workspace", "out", "lse"):
            if options.get(name) is None:
                fail(name, "one given, to bind a call to it", None)
        self.state = paged_decode(*tensors, **options)
        if INTERPRETED:
            self._launches = [functools.partial(paged_decode, *tensors, **options)]
            return
        workspace = options.pop("workspace")
        arguments = check_decode_arguments(*tensors, **options)
        planned = (
            _plan(arguments, workspace=workspace, out=self.state.out, lse=self.state.lse)
            if arguments.num_tokens and arguments.num_requests
            else []
        )
        with current_device(arguments.q.device):
            self._launches = [launch.bind() for launch in planned]

    def __call__(self) -> AttnState:
        """Launch; return the bound (out, lse)."""
        for launch in self._launches:
            launch()
        return self.state


def _plan(
    a: DecodeArguments,
    *,
    workspace: DecodeWorkspace | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> list[Launch]:
    """Return the launch of the decode kernel and, where a request can be split, of the reduce."""
    split = split_call(a, workspace=workspace, out=out, lse=lse)
    config = split.config
    q, k_cache, v_cache = map(interpreter_safe, (a.q, a.k_cache, a.v_cache))
    fp8 = k_cache.dtype in FP8_DTYPES
    # Of the copies that the interpreter may use.
    k_strides, v_strides = kv_strides(k_cache, v_cache, a.kv_layout)
    k_scale, k_scale_ptr, stride_k_scale = _scale(a.k_scale, spare=lse)
    v_scale, v_scale_ptr, stride_v_scale = _scale(a.v_scale, spare=lse)
    least_columns = 16
    if fp8 and not a.chunk:
        # 16-bit words of two elements, which the kernel reads as fp16 of the same exponent bits.
        v_cache, v_strides = v_cache.view(torch.int16), tuple(n // 2 for n in v_strides)
        v_scale *= 2.0 ** (_FP16_BIAS - FP8_BIAS[k_cache.dtype])
        # tl.dot wants 16 columns of each half at least.
        least_columns = 32
    decode = dict(
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        k_scale_ptr=k_scale_ptr,
        v_scale_ptr=v_scale_ptr,
        block_table_ptr=a.block_table,
        items_ptr=split.items,
        sinks_ptr=a.seq_lens if a.sinks is None else a.sinks,
        softmax_scale=a.softmax_scale * k_scale,
        v_scale=v_scale,
        softcap=a.softcap or 0.0,
        num_requests=a.num_requests,
        num_tokens=a.num_tokens,
        head_blocks=a.num_kv_heads * split.row_blocks,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_k_p=k_strides[0],
        stride_k_t=k_strides[1],
        stride_k_h=k_strides[2],
        stride_k_c=k_strides[3],
        stride_v_p=v_strides[0],
        stride_v_t=v_strides[1],
        stride_v_h=v_strides[2],
        stride_v_d=v_strides[3],
        stride_k_scale=stride_k_scale,
        stride_v_scale=stride_v_scale,
        stride_bt=a.block_table.stride(0),
        NUM_KV_HEADS=a.num_kv_heads,
        GROUP=a.num_q_heads // a.num_kv_heads,
        HEAD_DIM=a.head_dim,
        PAGE_SIZE=a.page_size,
        CHUNK=a.chunk,
        DENSE=a.chunk == k_strides[1] == v_strides[3] and _runs_are_aligned(v_cache, v_strides),
        FP8=fp8,
        K_SCALE_ON_DEVICE=k_scale_ptr is not lse,
        V_SCALE_ON_DEVICE=v_scale_ptr is not lse,
        CAUSAL=a.max_query_len > 1,
        HAS_PARTIALS=split.num_reduced > 0,
        HAS_SOFTCAP=a.softcap is not None,
        HAS_SINKS=a.sinks is not None,
        WINDOW=a.sliding_window or 0,
        BLOCK_M=split.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(a.head_dim),
        BLOCK_DV=max(least_columns, triton.next_power_of_2(a.head_dim_v)),
        STAGES=_num_stages(a, config),
        WAIT_LAUNCH=split.overlap_entry,
        EARLY_LAUNCH=split.overlap_reduce,
        **split.arguments,
    )
    options = {"num_warps": config.num_warps}
    if split.overlap_entry:
        options["launch_pdl"] = True
    grid = (split.num_items * a.num_kv_heads * split.row_blocks,)
    return [Launch(kernels._decode_kernel, grid, decode, options), *plan_reduce(a, split)]


def _runs_are_aligned(v_cache: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether every run of tokens of a SHUFFLE V starts at a multiple of 16 bytes."""
    steps = [stride * v_cache.element_size() for stride in strides[:3]]
    return all(step % 16 == 0 for step in (v_cache.data_ptr(), *steps))


def _num_stages(a: DecodeArguments, config: DecodeConfig) -> int:
    """Return the stages of the tile loop."""
    # With a window and a soft cap at once gfx942 spills two scalar registers with two stages, none
    # with one; gfx950 the other way round (`dcp-lab amd-report`). Built, never run here.
    if a.sliding_window and a.softcap and device_of(a.q.device).chip == "gfx942":
        return 1
    return config.num_stages


def _scale(
    scale: float | torch.Tensor | None, *, spare: torch.Tensor
) -> tuple[float, torch.Tensor, int]:
    """Return a scale's factor, where the device finds the rest, and from one head to the next."""
    if not isinstance(scale, torch.Tensor):
        return scale or 1.0, spare, 0
    return 1.0, scale, scale.stride(0) if scale.numel() > 1 else 0


def _check_fp8(a: DecodeArguments) -> None:
    """Raise for an fp8 cache that the kernel cannot read."""
    if a.k_cache.dtype not in FP8_DTYPES:
        return
    if a.k_cache.dtype == torch.float8_e4m3fnuz and device_of(a.q.device).arch == "cuda":
        unsupported("k_cache", a.k_cache, "NVIDIA GPUs have float8_e4m3fn")
    if not isinstance(a.k_scale, torch.Tensor):
        check_finite("softmax_scale * k_scale", a.softmax_scale * (a.k_scale or 1.0))
    places = (a.v_cache.storage_offset(), *a.v_cache.stride()[:-1])
    if not a.chunk and any(place % 2 for place in places):
        needed = f"fp8 needs an even offset and even strides, this one has {places}"
        unsupported("v_cache", a.v_cache, needed)
