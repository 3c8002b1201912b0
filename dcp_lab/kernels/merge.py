"""Merging attention states by their LSE, and what the reducers do before and after the wire.

    lse = ln sum_n exp(lse_n),  out = sum_n exp(lse_n - lse) out_n

`_merge_kernel` computes this for N stacked states. `_pack_kernel` writes a rank's heads, bit for
bit, into the chunks that an all-to-all sends; `_rescale_kernel` multiplies a rank's out by its
weight exp(lse_n - lse), after which a plain sum over ranks is the merge. In all three an LSE of
NaN or +inf marks an empty shard, as -inf does, and whatever stands in out beside it counts as
nothing.

Every program handles a block of (token, head) rows and goes through the ranks in order, so the
same inputs give the same bits.

Source: the merge of online softmax (Milakov and Gimelshein, arXiv 1805.02867). Written here.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from dcp_lab.kernels import INTERPRETED, interpreter_safe
from dcp_lab.kernels.launch import BoundCalls, Launch, call_key
from dcp_lab.kernels.primitives import merge_step, or_zero


@triton.jit
def clean_lse(lse):
    """Return lse with NaN and +inf, which mark an empty shard, as -inf."""
    return tl.where(lse < float("inf"), lse, float("-inf"))


@triton.jit
def merged_lse(lse_max, weight_sum):
    """Return (merged LSE, divisor for out): (-inf, 1) when all shards are empty."""
    divisor = tl.where(weight_sum > 0.0, weight_sum, 1.0)
    return lse_max + tl.log(divisor), divisor


@triton.jit
def _merge_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    stride_outs_n,
    stride_outs_t,
    stride_outs_h,
    stride_lses_n,
    stride_lses_t,
    stride_lses_h,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    num_rows,
    NUM_STATES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (cdiv(T * H, BLOCK_ROWS),): merge NUM_STATES states of a block of (token, head)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    t, h = row // NUM_HEADS, row % NUM_HEADS
    offs_d = tl.arange(0, BLOCK_D)
    mask_row = row < num_rows
    mask = mask_row[:, None] & (offs_d < HEAD_DIM)[None, :]
    # [BLOCK_ROWS], [BLOCK_ROWS, BLOCK_D]; moved by one state a turn: no product wraps in 32 bits.
    lses_ptrs = lses_ptr + t * stride_lses_t + h * stride_lses_h
    outs_ptrs = outs_ptr + (t * stride_outs_t + h * stride_outs_h)[:, None] + offs_d[None, :]

    lse_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    # Unrolled so that the loads of up to 8 states are in flight together.
    for _ in tl.range(NUM_STATES, loop_unroll_factor=8):
        state_lse = clean_lse(tl.load(lses_ptrs, mask=mask_row, other=float("-inf")))
        # Not masked by emptiness: the load need not wait for the LSE.
        state_out = tl.load(outs_ptrs, mask=mask, other=0.0).to(tl.float32)
        state_out = tl.where((state_lse == float("-inf"))[:, None], 0.0, state_out)
        weight, factor, lse_max, weight_sum = merge_step(
            state_lse, lse_max, weight_sum, BASE_2=False
        )
        # As a fused multiply-add, so that every kernel that merges gives the same bits.
        acc = tl.fma(acc, factor[:, None], state_out * weight[:, None])
        lses_ptrs += stride_lses_n
        outs_ptrs += stride_outs_n
    lse, divisor = merged_lse(lse_max, weight_sum)
    acc = acc / divisor[:, None]

    out_ptrs = out_ptr + (t * stride_out_t + h * stride_out_h)[:, None] + offs_d[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + t * stride_lse_t + h * stride_lse_h, lse, mask=mask_row)


@triton.jit
def _pack_kernel(
    out_ptr,
    lse_ptr,
    send_out_ptr,
    send_lse_ptr,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    stride_send_out_r,
    stride_send_out_t,
    stride_send_lse_r,
    stride_send_lse_t,
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_RANK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (cdiv(T * H, BLOCK_ROWS),): copy (token, head) rows into their owners' chunks."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    t, h = row // NUM_HEADS, row % NUM_HEADS
    owner, local_h = h // HEADS_PER_RANK, h % HEADS_PER_RANK
    offs_d = tl.arange(0, BLOCK_D)
    mask_row = row < num_rows
    mask = mask_row[:, None] & (offs_d < HEAD_DIM)[None, :]

    lse_ptrs = lse_ptr + t * stride_lse_t + h * stride_lse_h
    lse = clean_lse(tl.load(lse_ptrs, mask=mask_row, other=float("-inf")))
    send_lse_ptrs = send_lse_ptr + owner * stride_send_lse_r + t * stride_send_lse_t + local_h
    tl.store(send_lse_ptrs, lse, mask=mask_row)
    # out travels as integers of its width: a copy of the bits, in the interpreter too.
    out_ptrs = out_ptr + (t * stride_out_t + h * stride_out_h)[:, None] + offs_d[None, :]
    send_row = owner * stride_send_out_r + t * stride_send_out_t + local_h * HEAD_DIM
    send_out_ptrs = send_out_ptr + send_row[:, None] + offs_d[None, :]
    tl.store(send_out_ptrs, tl.load(out_ptrs, mask=mask, other=0), mask=mask)


@triton.jit
def _rescale_kernel(
    out_ptr,
    lses_ptr,
    send_ptr,
    lse_ptr,
    rank,
    stride_out_t,
    stride_out_h,
    stride_lses_n,
    stride_lses_t,
    stride_send_r,
    stride_send_t,
    stride_lse_t,
    num_rows,
    NUM_RANKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_RANK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (cdiv(T * H, BLOCK_ROWS),): weigh out by exp(lse_rank - lse), store own heads' lse."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    t, h = row // NUM_HEADS, row % NUM_HEADS
    owner, local_h = h // HEADS_PER_RANK, h % HEADS_PER_RANK
    offs_d = tl.arange(0, BLOCK_D)
    mask_row = row < num_rows
    mask = mask_row[:, None] & (offs_d < HEAD_DIM)[None, :]

    # [BLOCK_ROWS]
    lses_ptrs = lses_ptr + t * stride_lses_t + h
    lse_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    own_lse = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for n in tl.range(NUM_RANKS, loop_unroll_factor=8):
        rank_lse = clean_lse(tl.load(lses_ptrs, mask=mask_row, other=float("-inf")))
        own_lse = tl.where(rank == n, rank_lse, own_lse)
        _, _, lse_max, weight_sum = merge_step(rank_lse, lse_max, weight_sum, BASE_2=False)
        lses_ptrs += stride_lses_n
    lse, divisor = merged_lse(lse_max, weight_sum)
    weight = tl.exp(own_lse - or_zero(lse_max)) / divisor

    # [BLOCK_ROWS, BLOCK_D]
    out_ptrs = out_ptr + (t * stride_out_t + h * stride_out_h)[:, None] + offs_d[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    out = tl.where((own_lse == float("-inf"))[:, None], 0.0, out * weight[:, None])
    send_row = owner * stride_send_r + t * stride_send_t + local_h * HEAD_DIM
    send_ptrs = send_ptr + send_row[:, None] + offs_d[None, :]
    tl.store(send_ptrs, out.to(send_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + t * stride_lse_t + local_h, lse, mask=mask_row & (owner == rank))


_CALLS = BoundCalls()


@dataclasses.dataclass(frozen=True)
class MergeConfig:
    """Launch knobs of merge, pack and rescale; none changes a bit of the result.

    Attributes:
        block_rows: (token, head) rows a program handles, a power of two.
        num_warps: Warps a program.
    """

    block_rows: int = 1
    num_warps: int = 1

    @classmethod
    def from_rows(cls, num_rows: int) -> MergeConfig:
        """Return the config for this many (token, head) rows.

        One row and one warp a program: a kernel of the same work, the reduction of split-KV decode
        at 16 requests x 2,000 tokens on an H200, took 10.5, 10.9, 11.3 and 12.9 us with its decode
        kernel for 1, 2, 4 and 8 warps. The interpreter pays by the program, 12 ms for a merge of 4
        states whatever it holds, so there a program takes all rows.
        """
        if not INTERPRETED:
            return cls()
        return cls(block_rows=min(triton.next_power_of_2(num_rows), 1024))


def merge_again(
    outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> bool:
    """Do what launch_merge did for these tensors, if it is known; return whether it is."""
    return _CALLS.again(call_key("merge", outs, lses, out, lse))


def launch_merge(
    *, outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge outs [N, T, H, D] and lses [N, T, H] into out [T, H, D] and lse [T, H]; one launch."""
    if merge_again(outs, lses, out, lse):
        return
    num_states, num_tokens, num_heads, head_dim = outs.shape
    num_rows = num_tokens * num_heads
    config = MergeConfig.from_rows(num_rows)
    outs, rounded = interpreter_safe(outs), interpreter_safe(out)
    arguments = dict(  # noqa: C408 - read beside the kernel's keyword arguments
        outs_ptr=outs,
        lses_ptr=lses,
        out_ptr=rounded,
        lse_ptr=lse,
        stride_outs_n=outs.stride(0),
        stride_outs_t=outs.stride(1),
        stride_outs_h=outs.stride(2),
        stride_lses_n=lses.stride(0),
        stride_lses_t=lses.stride(1),
        stride_lses_h=lses.stride(2),
        stride_out_t=rounded.stride(0),
        stride_out_h=rounded.stride(1),
        stride_lse_t=lse.stride(0),
        stride_lse_h=lse.stride(1),
        num_rows=num_rows,
        NUM_STATES=num_states,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=config.block_rows,
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
    launch = Launch(
        _merge_kernel,
        (triton.cdiv(num_rows, config.block_rows),),
        arguments,
        {"num_warps": config.num_warps},
    )
    with torch.cuda.device_of(outs):
        _CALLS.first(call_key("merge", outs, lses, out, lse), [launch])
    if rounded is not out:
        out.copy_(rounded)


def launch_pack(
    *, out: torch.Tensor, lse: torch.Tensor, send_out: torch.Tensor, send_lse: torch.Tensor
) -> None:
    """Copy out [T, R * H, D] and lse [T, R * H] into send_out [R, T, H, D] and send_lse [R, T, H].

    Inside a chunk send_out and send_lse are dense. One launch.
    """
    key = call_key("pack", out, lse, send_out, send_lse)
    if _CALLS.again(key):
        return
    _, num_tokens, heads_per_rank, head_dim = send_out.shape
    num_heads = out.shape[1]
    num_rows = num_tokens * num_heads
    config = MergeConfig.from_rows(num_rows)
    bits = torch.int32 if out.element_size() == 4 else torch.int16
    arguments = dict(  # noqa: C408 - read beside the kernel's keyword arguments
        out_ptr=out.view(bits),
        lse_ptr=lse,
        send_out_ptr=send_out.view(bits),
        send_lse_ptr=send_lse,
        stride_out_t=out.stride(0),
        stride_out_h=out.stride(1),
        stride_lse_t=lse.stride(0),
        stride_lse_h=lse.stride(1),
        stride_send_out_r=send_out.stride(0),
        stride_send_out_t=send_out.stride(1),
        stride_send_lse_r=send_lse.stride(0),
        stride_send_lse_t=send_lse.stride(1),
        num_rows=num_rows,
        NUM_HEADS=num_heads,
        HEADS_PER_RANK=heads_per_rank,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=config.block_rows,
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
    launch = Launch(
        _pack_kernel,
        (triton.cdiv(num_rows, config.block_rows),),
        arguments,
        {"num_warps": config.num_warps},
    )
    with torch.cuda.device_of(out):
        _CALLS.first(key, [launch])


def launch_rescale(
    *, rank: int, out: torch.Tensor, lses: torch.Tensor, send: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write this rank's weighted out into send [R, T, H, D], the LSE of its heads into lse [T, H].

    out is [T, R * H, D]; lses [R, T, R * H], dense in the last dim, holds every rank's. One
    launch.
    """
    key = call_key("rescale", rank, out, lses, send, lse)
    if _CALLS.again(key):
        return
    num_ranks, num_tokens, heads_per_rank, head_dim = send.shape
    num_heads = out.shape[1]
    num_rows = num_tokens * num_heads
    config = MergeConfig.from_rows(num_rows)
    out, rounded = interpreter_safe(out), interpreter_safe(send)
    arguments = dict(  # noqa: C408 - read beside the kernel's keyword arguments
        out_ptr=out,
        lses_ptr=lses,
        send_ptr=rounded,
        lse_ptr=lse,
        rank=rank,
        stride_out_t=out.stride(0),
        stride_out_h=out.stride(1),
        stride_lses_n=lses.stride(0),
        stride_lses_t=lses.stride(1),
        stride_send_r=rounded.stride(0),
        stride_send_t=rounded.stride(1),
        stride_lse_t=lse.stride(0),
        num_rows=num_rows,
        NUM_RANKS=num_ranks,
        NUM_HEADS=num_heads,
        HEADS_PER_RANK=heads_per_rank,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=config.block_rows,
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
    launch = Launch(
        _rescale_kernel,
        (triton.cdiv(num_rows, config.block_rows),),
        arguments,
        {"num_warps": config.num_warps},
    )
    with torch.cuda.device_of(out):
        _CALLS.first(key, [launch])
    if rounded is not send:
        send.copy_(rounded)
