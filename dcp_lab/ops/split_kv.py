"""What paged_decode and mla_paged_decode share: a call cut into items, and merged again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping

import torch
import triton

from dcp_lab.kernels import INTERPRETED, interpreter_safe
from dcp_lab.kernels import decode as kernels
from dcp_lab.kernels.launch import BoundCalls, Launch, call_key
from dcp_lab.ops.arguments import DecodeArguments
from dcp_lab.ops.checks import dtype_name, fail
from dcp_lab.ops.device import current_device, device_of
from dcp_lab.ops.workspace import (
    DecodeConfig,
    DecodeWorkspace,
    PreparedDecode,
    choose_config,
    most_query_rows,
    query_rows,
)
from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState


@dataclasses.dataclass(frozen=True)
class SplitCall:
    """How one decode call is cut into items.

    Attributes:
        config: Launch knobs.
        block_m, row_blocks: Rows of a query tile, and tiles that hold one KV head's rows.
        num_items: Items, of which a request has one or more.
        num_reduced: Requests that may have more than one, so that partials need merging.
        items: The workspace's work table; any tensor when num_splits is fixed.
        split_requests: The workspace's table of split requests; likewise.
        overlap_entry: Whether the first kernel may start while its predecessor drains.
        overlap_reduce: Whether the reduce kernel may start while the first one drains.
        arguments: What the attention kernel and the reduce kernel are both given.
    """

    config: DecodeConfig
    block_m: int
    row_blocks: int
    num_items: int
    num_reduced: int
    items: torch.Tensor
    split_requests: torch.Tensor
    overlap_entry: bool
    overlap_reduce: bool
    arguments: Mapping[str, object]


# Calls without a workspace, whose launches need nothing but what they are given.
_CALLS = BoundCalls()


def repeated_call(
    workspace: DecodeWorkspace | None,
    num_splits: int | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    *arguments: tuple[object, ...],
) -> tuple[BoundCalls, Hashable]:
    """Return (the calls that are remembered with this one, its key or None).

    Args:
        workspace, num_splits, out, lse: As given.
        arguments: All others, in groups.
    """
    if out is None or lse is None:
        # Allocated by the call.
        return _CALLS, None
    if isinstance(workspace, DecodeWorkspace):
        calls, prepared = workspace.calls, workspace.prepared
    elif workspace is None and isinstance(num_splits, int) and num_splits == 1:
        calls, prepared = _CALLS, None
    else:
        return _CALLS, None
    rest = itertools.chain.from_iterable(arguments)
    return calls, call_key(out, lse, num_splits, prepared, *rest)


def run_split_call(
    a: DecodeArguments,
    plan: Callable[..., list[Launch]],
    *,
    workspace: DecodeWorkspace | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    calls: BoundCalls = _CALLS,
    key: Hashable = None,
) -> AttnState:
    """Make what was not given, launch plan(a, workspace=, out=, lse=), and remember it by key."""
    if workspace is not None:
        check_workspace(workspace, a)
    q = a.q
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
    if workspace is None and a.num_splits is None:
        workspace = DecodeWorkspace(
            a.num_requests,
            a.num_q_heads,
            a.num_kv_heads,
            a.head_dim,
            head_dim_v=a.head_dim_v,
            max_query_len=a.max_query_len,
            kv_dtype=_kernel_dtype(a),
            max_seq_len=max(1, a.max_pages * a.page_size),
            device=q.device,
        )
        workspace.prepare(
            a.seq_lens,
            global_seq_lens=a.global_seq_lens,
            query_start_loc=a.query_start_loc,
            sliding_window=a.sliding_window,
            shard=a.shard,
        )
    rounded = interpreter_safe(out)
    with current_device(q.device):
        calls.first(key, plan(a, workspace=workspace, out=rounded, lse=lse))
    if rounded is not out:
        out.copy_(rounded)
    return AttnState(out, lse)


def _kernel_dtype(a: DecodeArguments) -> torch.dtype:
    """Return the cache's dtype; fp32 queries make it an fp32 kernel, whatever the cache holds."""
    return a.q.dtype if a.q.dtype == torch.float32 else a.k_cache.dtype


def check_workspace(workspace: DecodeWorkspace, a: DecodeArguments) -> None:
    """Raise unless the workspace fits the call and, where its table is used, is prepared."""
    if not isinstance(workspace, DecodeWorkspace):
        fail("workspace", "a DecodeWorkspace or None", workspace)
    wanted = {
        "num_q_heads": a.num_q_heads,
        "num_kv_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "head_dim_v": a.head_dim_v,
        "device": a.q.device,
    }
    for name, value in wanted.items():
        if getattr(workspace, name) != value:
            fail("workspace", f"one made for {name}={value}", f"{name}={getattr(workspace, name)}")
    kv_dtype = _kernel_dtype(a)
    if workspace.kv_dtype.itemsize != kv_dtype.itemsize:
        # Tile shapes follow from it.
        fail(
            "workspace",
            f"one made for kv_dtype={dtype_name(kv_dtype)}",
            f"kv_dtype={dtype_name(workspace.kv_dtype)}",
        )
    if workspace.max_query_len < a.max_query_len:
        fail(
            "workspace",
            f"one made for max_query_len >= {a.max_query_len}",
            f"max_query_len={workspace.max_query_len}",
        )
    if a.num_splits is not None:
        if a.num_requests * a.num_splits > workspace.max_items:
            fail(
                "workspace",
                f"max_items >= num_requests * num_splits = {a.num_requests * a.num_splits}",
                f"max_items={workspace.max_items}",
            )
        return
    if workspace.prepared is None:
        fail(
            "workspace",
            "a prepared one: call workspace.prepare(seq_lens) once a step",
            "unprepared",
        )
    step = PreparedDecode.of(
        a.num_requests, a.sliding_window, a.query_start_loc, a.global_seq_lens, a.shard
    )
    if workspace.prepared != step:
        fail("workspace", f"one prepared for this call: {step}", str(workspace.prepared))


def split_call(
    a: DecodeArguments,
    *,
    workspace: DecodeWorkspace | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    partials: Callable[[int, int, int, int], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> SplitCall:
    """Return how the call is cut: by the workspace's table, or into a.num_splits pieces each.

    Args:
        a: The call.
        workspace: Its own, or None.
        out, lse: Where the result goes.
        partials: (items, query tokens, Hq, Dv) -> fp32 out [items, query tokens, Hq, Dv] and lse,
            used without a workspace. Default: allocated.
    """
    num_splits = a.num_splits
    device = device_of(a.q.device)
    group = a.num_q_heads // a.num_kv_heads
    itemsize = 4 if INTERPRETED else _kernel_dtype(a).itemsize
    block_m = query_rows(group, a.max_query_len, most_query_rows(a.head_dim, itemsize, device))
    row_blocks = triton.cdiv(group * a.max_query_len, block_m)
    if workspace is not None:
        config, partial_query_len = workspace.config, workspace.max_query_len
    else:
        partial_query_len = a.max_query_len
        # block_table's width stands for lengths.
        config = choose_config(
            head_dim=a.head_dim,
            head_dim_v=a.head_dim_v,
            itemsize=itemsize,
            rows=block_m,
            num_programs=a.num_requests * a.num_kv_heads * row_blocks,
            max_tokens=a.num_requests * a.max_pages * a.page_size * a.num_kv_heads,
            num_splits_hint=num_splits,
            device=device,
        )
    has_items = num_splits is None
    if has_items:
        num_items = workspace.items_for(a.num_requests)
        num_reduced = workspace.split_requests_for(a.num_requests)
    else:
        num_items = a.num_requests * num_splits
        num_reduced = a.num_requests if num_splits > 1 else 0
    partial_out, partial_lse = out, lse
    if num_reduced and workspace is not None:
        partial_out, partial_lse = workspace.partial_out, workspace.partial_lse
    elif num_reduced:
        rows = (num_items, partial_query_len, a.num_q_heads)
        if partials is not None:
            partial_out, partial_lse = partials(*rows, a.head_dim_v)
        else:
            partial_out = torch.empty(*rows, a.head_dim_v, dtype=torch.float32, device=a.q.device)
            partial_lse = torch.empty(*rows, dtype=torch.float32, device=a.q.device)
    shard = a.shard if a.shard is not None else Shard(0, 1)
    arguments = dict(  # noqa: C408 - read beside the kernels' keyword arguments
        seq_lens_ptr=a.seq_lens,
        total_lens_ptr=a.total_lens,
        query_start_loc_ptr=a.seq_lens if a.query_start_loc is None else a.query_start_loc,
        out_ptr=out,
        lse_ptr=lse,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        num_splits=num_splits or 0,
        partial_query_len=partial_query_len,
        stride_out_t=out.stride(0),
        stride_out_h=out.stride(1),
        stride_lse_t=lse.stride(0),
        stride_lse_h=lse.stride(1),
        HEAD_DIM_V=a.head_dim_v,
        HAS_ITEMS=has_items,
        HAS_QUERY_START_LOC=a.query_start_loc is not None,
        SHARD_RANK=shard.rank,
        SHARD_SIZE=shard.size,
        INTERLEAVE=shard.interleave_size,
    )
    return SplitCall(
        config=config,
        block_m=block_m,
        row_blocks=row_blocks,
        num_items=num_items,
        num_reduced=num_reduced,
        items=workspace.items if has_items else a.seq_lens,
        split_requests=workspace.split_requests if has_items else a.seq_lens,
        overlap_entry=device.dependent_launch and config.overlap_entry,
        overlap_reduce=device.dependent_launch and num_reduced > 0,
        arguments=arguments,
    )


def plan_reduce(a: DecodeArguments, split: SplitCall) -> list[Launch]:
    """Return the launch that merges the partials, none where no request can be split."""
    if not split.num_reduced:
        return []
    config = split.config
    columns = min(config.reduce_columns, triton.next_power_of_2(a.head_dim_v))
    grid = (
        split.num_reduced * a.max_query_len,
        a.num_q_heads,
        triton.cdiv(a.head_dim_v, columns),
    )
    reduce = dict(
        split_requests_ptr=split.split_requests,
        sinks_ptr=a.seq_lens if a.sinks is None else a.sinks,
        max_query_len=a.max_query_len,
        NUM_Q_HEADS=a.num_q_heads,
        HAS_SINKS=a.sinks is not None,
        WINDOW=a.sliding_window or 0,
        TILE=config.block_n,
        BLOCK_S=config.reduce_splits,
        BLOCK_C=columns,
        WAIT_LAUNCH=split.overlap_reduce,
        EARLY_LAUNCH=split.overlap_entry,
        **split.arguments,
    )
    options = {"num_warps": config.reduce_warps}
    if split.overlap_reduce:
        options["launch_pdl"] = True
    return [Launch(kernels._reduce_kernel, grid, reduce, options)]
