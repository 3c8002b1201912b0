"""paged_decode: attend a paged KV cache in place and return (out, lse)."""

from __future__ import annotations

import functools

import torch
import triton

from dcp_lab.kernels import INTERPRETED, interpreter_safe
from dcp_lab.kernels import decode as kernels
from dcp_lab.ops.arguments import DecodeArguments, check_decode_arguments
from dcp_lab.ops.checks import dtype_name, fail, unsupported
from dcp_lab.ops.launch import Launch
from dcp_lab.ops.split_kv import plan_reduce, run_split_call, split_call
from dcp_lab.ops.workspace import DecodeWorkspace
from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState


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

    Args:
        q: [T, Hq, D] fp32, fp16 or bf16, last dim contiguous, any other strides.
        k_cache, v_cache: Pages in q's dtype, [P, page, Hkv, D] (NHD) or [P, Hkv, page, D] (HND), V
            with Dv in D's place; last dim contiguous, any other strides.
        block_table: int32 [B, max_pages], physical page of each logical one. Entries past
            ceil(seq_lens / page) are never read.
        seq_lens: int32 [B], tokens in this cache (this rank's count under DCP), the tokens being
            decoded included: KV is written first.
        softmax_scale: Multiplies q . k. Default: D ** -0.5.
        kv_layout: 'NHD' or 'HND'. Default: 'NHD'.
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
        sinks: fp32 [Hq], one more logit a head in the denominator; under a shard on rank 0 only. A
            row with a sink and no key has out 0 and lse = sink. Default: none.
        k_scale, v_scale: Not supported yet.

    Returns:
        AttnState(out, lse). A row that sees no key (empty request, empty shard, padding) gives
        out = 0 and lse = -inf.

    Raises:
        ValueError: An argument breaks the contract; the message says which, what was expected and
            what was given. Raised before any launch and without a device sync.
        NotImplementedError: kv_layout='SHUFFLE', an fp8 cache, k_scale or v_scale.

    Notes:
        Launches: 2 with a prepared workspace or with num_splits > 1, 1 with num_splits = 1.
        Graph capture: safe with workspace (or num_splits), out and lse given; seq_lens,
            block_table and q are read on the device, so they may change in place between replays.
            Accumulates in fp32. The same inputs give the same bits; another num_splits does not.
        CPU: runs through Triton's interpreter; bf16 is computed in fp32 and rounded once.

    Source:
        Flash-decoding (split KV, merge by LSE). Written here.
    """
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
    if a.chunk:
        unsupported("kv_layout", kv_layout, "use an NHD or HND cache")
    if a.k_cache.dtype != q.dtype:
        unsupported("k_cache", k_cache, f"use a cache in q's dtype {dtype_name(q.dtype)}")
    return run_split_call(a, _plan, workspace=workspace, out=out, lse=lse)


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
    k_strides, v_strides = _strides(k_cache, a.kv_layout), _strides(v_cache, a.kv_layout)
    decode = dict(
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        block_table_ptr=a.block_table,
        items_ptr=split.items,
        sinks_ptr=a.seq_lens if a.sinks is None else a.sinks,
        softmax_scale=a.softmax_scale,
        softcap=a.softcap or 0.0,
        num_requests=a.num_requests,
        num_tokens=a.num_tokens,
        head_blocks=a.num_kv_heads * split.row_blocks,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_k_p=k_strides[0],
        stride_k_t=k_strides[1],
        stride_k_h=k_strides[2],
        stride_v_p=v_strides[0],
        stride_v_t=v_strides[1],
        stride_v_h=v_strides[2],
        stride_bt=a.block_table.stride(0),
        NUM_KV_HEADS=a.num_kv_heads,
        GROUP=a.num_q_heads // a.num_kv_heads,
        HEAD_DIM=a.head_dim,
        PAGE_SIZE=a.page_size,
        CAUSAL=a.max_query_len > 1,
        HAS_PARTIALS=split.num_reduced > 0,
        HAS_SOFTCAP=a.softcap is not None,
        HAS_SINKS=a.sinks is not None,
        WINDOW=a.sliding_window or 0,
        BLOCK_M=split.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(a.head_dim),
        BLOCK_DV=triton.next_power_of_2(a.head_dim_v),
        STAGES=config.num_stages,
        WAIT_LAUNCH=split.overlap_entry,
        EARLY_LAUNCH=split.overlap_reduce,
        **split.arguments,
    )
    options = {"num_warps": config.num_warps}
    if split.overlap_entry:
        options["launch_pdl"] = True
    grid = (split.num_items * a.num_kv_heads * split.row_blocks,)
    return [Launch(kernels._decode_kernel, grid, decode, options), *plan_reduce(a, split)]


def _strides(cache: torch.Tensor, kv_layout: str) -> tuple[int, int, int]:
    """Return the strides of a page, a token and a head (of the copy the interpreter may use)."""
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    return cache.stride(0), cache.stride(token), cache.stride(head)
