"""mla_paged_decode and write_mla_kv: multi-head latent attention over a paged latent cache."""

from __future__ import annotations

import functools

import torch
import triton

from dcp_lab.kernels import INTERPRETED, interpreter_safe
from dcp_lab.kernels import mla as kernels
from dcp_lab.kernels.launch import BoundCalls, Launch, call_key
from dcp_lab.ops.arguments import (
    DecodeArguments,
    check_mla_arguments,
    check_mla_cache,
    check_mla_scale,
)
from dcp_lab.ops.checks import FLOAT_DTYPES, FP8_DTYPES, check_tensor, fail
from dcp_lab.ops.copies import FP8_BIAS, choose_copy_config
from dcp_lab.ops.device import current_device
from dcp_lab.ops.split_kv import plan_reduce, repeated_call, run_split_call, split_call
from dcp_lab.ops.workspace import DecodeWorkspace
from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState

_FP16_BIAS = 15

_WRITES = BoundCalls()


def mla_paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    kv_scale: float | torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = 1,
    shard: Shard | None = None,
    global_seq_lens: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: DecodeWorkspace | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttnState:
    """Attend each request's query tokens to its paged MLA latents, in place; return (out, lse).

    latent[s] = (c[s], r[s]), kv_lora_rank and rope elements, the same for all heads
    out[t, h] = sum_s softmax_s(score[t, h, s]) c[s]
    lse[t, h] = ln sum_s exp(score[t, h, s]),  score = softmax_scale q[t, h] . latent[s]

    This is the absorbed form: q has been multiplied by the key up-projection, and out is still to
    be multiplied by the value up-projection. Each latent is read once, as key and as value.

    Args:
        q: [T, Hq, kv_lora_rank + rope] fp32, fp16 or bf16, last dim contiguous, any other strides.
        kv_cache: Pages [P, page, kv_lora_rank + rope] in q's dtype or fp8 (e4m3fn, e4m3fnuz); last
            dim contiguous, any other strides (even ones for fp8).
        block_table: int32 [B, max_pages], physical page of each logical one. Entries past
            ceil(seq_lens / page) are never read.
        seq_lens: int32 [B], tokens in this cache (this rank's count under DCP), the tokens being
            decoded included: KV is written first.
        softmax_scale: Multiplies q . latent; by the model's own head dim, which q does not show.
        kv_lora_rank: Elements of c, a multiple of 16 up to 512; rope is a multiple of 16 from 16
            to 256. Default: 512.
        kv_scale: Of an fp8 cache, latent = stored * kv_scale: a float or a 1-element fp32 tensor,
            read on the device. Default: 1.
        query_start_loc: int32 [B + 1], request b owns rows [b] to [b + 1]; rows past the last
            entry are padding (out 0, lse -inf). Default: one token a request, T = B.
        max_query_len: Most query tokens of a request. Default: 1.
        shard: This rank's share of the tokens. Default: the cache holds whole requests.
        global_seq_lens: int32 [B], tokens of the whole request; needed with shard when
            max_query_len > 1. Query j of n sees global positions <= global_seq_lens - n + j.
        num_splits: Pieces each request is cut into. Default: chosen on the device by the
            workspace's plan, from seq_lens.
        workspace: A DecodeWorkspace of num_kv_heads 1, head_dim kv_lora_rank + rope and head_dim_v
            kv_lora_rank, prepared with this step's seq_lens. Default: made and prepared by the
            call (one launch more, and allocations).
        out: [T, Hq, kv_lora_rank] in q's dtype, written in place. Default: allocated.
        lse: [T, Hq] fp32, written in place. Default: allocated.

    Returns:
        AttnState(out, lse). A row that sees no key (empty request, empty shard, padding) gives
        out = 0 and lse = -inf.

    Raises:
        ValueError: An argument breaks the contract; the message says which, what was expected and
            what was given. Raised before any launch and without a device sync.
        NotImplementedError: An fp8 kv_cache with an odd stride or storage offset.

    Notes:
        Launches: 2 with a prepared workspace or with num_splits > 1, 1 with num_splits = 1.
        Host: a call with the arguments of an earlier one is not checked and planned again, see
            paged_decode.
        Graph capture: safe with workspace (or num_splits), out and lse given; seq_lens,
            block_table, q and a kv_scale tensor are read on the device, so they may change in
            place between replays. Accumulates in fp32. The same inputs give the same bits; another
            num_splits does not.
        fp8: multiplied as fp16, exact for the cache and for 11 bits of q; out and lse are as right
            as with the same latents in 16 bits. An fp8 NaN in a slot in use counts as a number.
        CPU: runs through Triton's interpreter; bf16 is computed in fp32 and rounded once.

    Source:
        The absorbed form of MLA (DeepSeek-V2, arXiv 2405.04434) with split KV. Written here.
    """
    calls, key = repeated_call(
        workspace,
        num_splits,
        out,
        lse,
        (q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank, kv_scale),
        (query_start_loc, max_query_len, shard, global_seq_lens),
    )
    if calls.again(key):
        return AttnState(out, lse)
    a = check_mla_arguments(
        q=q,
        kv_cache=kv_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        softmax_scale=softmax_scale,
        kv_lora_rank=kv_lora_rank,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        shard=shard,
        global_seq_lens=global_seq_lens,
        num_splits=num_splits,
        out=out,
        lse=lse,
    )
    check_mla_scale(kv_scale, kv_cache)
    plan = functools.partial(_plan, kv_cache=kv_cache, kv_scale=kv_scale)
    return run_split_call(a, plan, workspace=workspace, out=out, lse=lse, calls=calls, key=key)


def _plan(
    a: DecodeArguments,
    *,
    kv_cache: torch.Tensor,
    kv_scale: float | torch.Tensor | None,
    workspace: DecodeWorkspace | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> list[Launch]:
    """Return the launch of the MLA kernel and, where a request can be split, of the reduce."""
    split = split_call(a, workspace=workspace, out=out, lse=lse)
    config = split.config
    q, latents = interpreter_safe(a.q), interpreter_safe(kv_cache)
    fp8 = kv_cache.dtype in FP8_DTYPES
    on_device = isinstance(kv_scale, torch.Tensor)
    scale = 1.0 if kv_scale is None or on_device else float(kv_scale)
    if fp8:
        # The kernel reads fp8 as fp16 of the same exponent bits.
        latents = kv_cache.view(torch.int16)
        scale *= 2.0 ** (_FP16_BIAS - FP8_BIAS[kv_cache.dtype])
    decode = dict(
        q_ptr=q,
        kv_ptr=latents,
        kv_scale_ptr=kv_scale if on_device else lse,
        block_table_ptr=a.block_table,
        items_ptr=split.items,
        softmax_scale=a.softmax_scale,
        kv_scale=scale,
        num_requests=a.num_requests,
        num_tokens=a.num_tokens,
        row_blocks=split.row_blocks,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_kv_p=latents.stride(0),
        stride_kv_t=latents.stride(1),
        stride_bt=a.block_table.stride(0),
        NUM_Q_HEADS=a.num_q_heads,
        ROPE_DIM=a.head_dim - a.head_dim_v,
        PAGE_SIZE=a.page_size,
        FP8=fp8,
        SCALE_ON_DEVICE=on_device,
        CAUSAL=a.max_query_len > 1,
        HAS_PARTIALS=split.num_reduced > 0,
        BLOCK_M=split.block_m,
        BLOCK_N=config.block_n,
        # tl.dot wants 16 columns of each part at least.
        BLOCK_C=max(32, triton.next_power_of_2(a.head_dim_v)),
        BLOCK_R=max(32, triton.next_power_of_2(a.head_dim - a.head_dim_v)),
        STAGES=config.num_stages,
        WAIT_LAUNCH=split.overlap_entry,
        EARLY_LAUNCH=split.overlap_reduce,
        **split.arguments,
    )
    options = {"num_warps": config.num_warps}
    if split.overlap_entry:
        options["launch_pdl"] = True
    grid = (split.num_items * split.row_blocks,)
    return [Launch(kernels._mla_decode_kernel, grid, decode, options), *plan_reduce(a, split)]


def write_mla_kv(
    latent: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
) -> None:
    """Write each token's MLA latent into its slot of the paged cache, in place.

    kv_cache[slot // page, slot % page] = latent[t] / kv_scale,  slot = slot_mapping[t], skipped
    where it is -1

    Args:
        latent: [T, kv_lora_rank + rope] fp32, fp16 or bf16, last dim contiguous; cast to the
            cache's dtype.
        kv_cache: [P, page, kv_lora_rank + rope] fp32, fp16, bf16 or fp8 (e4m3fn, e4m3fnuz), last
            dim contiguous, any other strides (even ones for fp8).
        slot_mapping: int64 [T], page * page_size + place in the page; -1 skips the token.
        kv_scale: Of an fp8 cache: a float or a 1-element fp32 tensor, read on the device.
            Default: 1.

    Raises:
        ValueError: An argument breaks the contract; the message names it, what was expected and
            what was given.
        NotImplementedError: An fp8 kv_cache with an odd stride or storage offset.

    Notes:
        One launch, no sync, no allocation: safe under graph capture.
        fp8 is rounded to nearest, ties to even; what is over the format's largest value (448, or
        240 for e4m3fnuz) becomes it, NaN stays NaN.
        Slots cannot be checked without a sync. One outside the cache (below 0, or
        P * page_size and above) writes nothing; of two tokens with the same slot either may win.
        CPU: runs through Triton's interpreter; casts that touch bf16 are done by torch there.

    Source:
        Written here; slots as in vLLM's concat_and_cache_mla (Apache-2.0).
    """
    call = call_key(latent, kv_cache, slot_mapping, kv_scale)
    if _WRITES.again(call):
        return
    check_tensor(
        "latent",
        latent,
        dtypes=FLOAT_DTYPES,
        shape=["T", "kv_lora_rank+rope"],
        last_contiguous=True,
    )
    num_tokens, width = latent.shape
    if width < 1:
        fail("latent", "at least one element a token", latent)
    check_mla_cache(kv_cache, width=width, device=latent.device)
    check_mla_scale(kv_scale, kv_cache)
    check_tensor(
        "slot_mapping",
        slot_mapping,
        dtypes=(torch.int64,),
        shape=[("T", num_tokens)],
        device=latent.device,
        last_contiguous=True,
    )
    if num_tokens == 0:
        return
    num_pages, page_size, _ = kv_cache.shape
    fp8_bias = FP8_BIAS.get(kv_cache.dtype, 0)
    target = kv_cache
    if fp8_bias:
        latent, target = interpreter_safe(latent), kv_cache.view(torch.uint8)
    elif INTERPRETED and torch.bfloat16 in (latent.dtype, kv_cache.dtype):
        # The interpreter truncates where a cast to bf16 should round: torch casts there.
        latent = latent.to(kv_cache.dtype)
    on_device = isinstance(kv_scale, torch.Tensor)
    config = choose_copy_config(num_tokens, width, latent.device)
    write = dict(  # noqa: C408 - read beside the kernel's keyword arguments
        latent_ptr=latent,
        kv_ptr=target,
        kv_scale_ptr=kv_scale if on_device else slot_mapping,
        slot_mapping_ptr=slot_mapping,
        kv_scale=1.0 if kv_scale is None or on_device else float(kv_scale),
        num_tokens=num_tokens,
        num_slots=num_pages * page_size,
        stride_latent_t=latent.stride(0),
        stride_kv_p=target.stride(0),
        stride_kv_t=target.stride(1),
        HEAD_DIM=width,
        PAGE_SIZE=page_size,
        FP8_BIAS=fp8_bias,
        SCALE_ON_DEVICE=on_device,
        BLOCK_T=config.block_rows,
        BLOCK_D=triton.next_power_of_2(width),
    )
    grid = (triton.cdiv(num_tokens, config.block_rows),)
    options = {"num_warps": config.num_warps}
    with current_device(latent.device):
        _WRITES.first(call, [Launch(kernels._write_mla_kv_kernel, grid, write, options)])
