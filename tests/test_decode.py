"""paged_decode against the float64 oracle: every branch of its kernels, on the CPU or on a GPU."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch

from dcp_lab import AttnState, BoundDecode, DecodeWorkspace, Shard, merge_states, paged_decode
from dcp_lab.kernels import decode as kernels
from dcp_lab.kernels.launch import Launch
from dcp_lab.ops.device import Device, current_device, planning_for
from dcp_lab.ops.gather import GATHERS, GatherWorkspace, gather_decode, gather_kv
from dcp_lab.ops.kv_write import write_kv
from dcp_lab.ops.mla import mla_paged_decode, write_mla_kv
from dcp_lab.ops.workspace import DecodeConfig
from dcp_lab.reference import eager_decode, reference_attention, reference_decode
from dcp_lab.testing import PagedCase, assert_within_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16
FP8 = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz
NO_FNUZ = pytest.mark.skipif(
    DEVICE == "cuda" and torch.version.hip is None, reason="e4m3fnuz needs an AMD GPU"
)
# Around a page, around a tile, and long enough to be split.
LENS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 150)
SPLITS = [
    pytest.param(None, id="planned"),
    pytest.param(1, id="1split"),
    pytest.param(2, id="2splits"),
    pytest.param(7, id="7splits"),
]


def build(lens=LENS, **options) -> PagedCase:
    return PagedCase.build(lens, device=DEVICE, **options)


SCALES = {"k_scale": 0.5, "v_scale": torch.tensor([2.0, 0.3], device=DEVICE)}


def check(case: PagedCase, *, name: str = "paged_decode", **options) -> AttnState:
    """Run a case, hold it against the oracle within the budget, and return the result."""
    call = {k: v for k, v in options.items() if k in ("num_splits", "workspace", "out", "lse")}
    model = {k: v for k, v in options.items() if k not in call}
    got = paged_decode(*case.tensors, **case.options(), **model, **call)
    truth = reference_decode(*case.tensors, **case.reference_options(), **model)
    eager = eager_decode(*case.tensors, **case.reference_options(), **model)
    assert got.out.dtype == case.q.dtype and got.lse.dtype == torch.float32
    assert_within_budget(name, got, truth, eager)
    return got


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_splits(dtype, num_splits):
    """Each dtype is as right as plain torch in it, whole, split and planned on the device."""
    check(build(dtype=dtype), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", SPLITS[:2])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        pytest.param((4, 4), 64, id="mha-d64"),
        pytest.param((8, 2), 80, id="gqa4-d80"),
        pytest.param((6, 2), 96, id="gqa3-d96"),
        pytest.param((5, 1), 112, id="mqa5-d112"),
        pytest.param((16, 1), 128, id="mqa16-d128"),
        pytest.param((40, 2), 16, id="gqa20-d16"),
        pytest.param((72, 1), 48, id="mqa72-d48"),
        pytest.param((2, 1), 192, id="gqa2-d192"),
        pytest.param((2, 2), 256, id="mha-d256"),
    ],
)
def test_head_shapes(heads, head_dim, num_splits):
    """GQA, MQA and MHA, groups over a tile's rows, and head dims that are no power of two."""
    case = build((1, 33, 100), num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    check(case, num_splits=num_splits)


def test_value_head_dim_differs():
    """V may be narrower or wider than K."""
    check(build(head_dim=64, head_dim_v=32))
    check(build(head_dim=32, head_dim_v=80))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 32, 48, 128, 1024])
def test_pages_and_layouts(page_size, kv_layout):
    """Any page size and both layouts read the same tokens."""
    lens = (0, 1, max(1, page_size - 1), page_size, page_size + 1)
    check(build(lens, page_size=page_size, kv_layout=kv_layout))


@pytest.mark.parametrize("fused", ["pages", "dims"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_strided_caches(kv_layout, fused):
    """K and V may be views of one tensor; nothing is copied to make them contiguous."""
    case = build(fused=fused, kv_layout=kv_layout)
    assert not case.k_cache.is_contiguous() and not case.v_cache.is_contiguous()
    check(case)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_query_tokens(group, num_splits):
    """Several query tokens a request see a causal triangle; rows of no request are padding."""
    case = build(
        (4, 40, 0, 150, 2),
        num_q_heads=2 * group,
        query_lens=(3, 1, 0, 4, 2),
        padding_rows=3,
    )
    got = check(case, num_splits=num_splits)
    assert (got.out[-3:] == 0).all() and (got.lse[-3:] == -math.inf).all()


def test_a_broken_promise_of_query_tokens_stays_in_its_rows():
    """More query tokens than max_query_len write nothing past the partial results."""
    case = build((70, 33, 5, 200), query_lens=(3, 1, 2, 4))
    workspace = DecodeWorkspace(4, 4, 2, 32, kv_dtype=torch.float32, device=DEVICE)
    workspace.prepare(case.seq_lens)
    guards = []
    for name in ("partial_out", "partial_lse"):
        used = getattr(workspace, name)
        room = torch.full((2 * used.numel(),), 7.0, device=DEVICE)
        setattr(workspace, name, room[: used.numel()].view(used.shape))
        guards.append(room[used.numel() :])
    paged_decode(
        *case.tensors,
        query_start_loc=case.query_start_loc,
        max_query_len=1,
        workspace=workspace,
    )
    assert all((guard == 7.0).all() for guard in guards)


@pytest.mark.parametrize("num_splits", SPLITS[:3])
def test_long_query(num_splits):
    """A prefill-like chunk is more rows than one tile holds."""
    check(build((90, 33), query_lens=(40, 33), num_q_heads=4), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", SPLITS[:3])
@pytest.mark.parametrize("interleave_size", [1, 4, 16])
@pytest.mark.parametrize("size", [2, 3])
def test_shards_merge_to_the_whole(size, interleave_size, num_splits):
    """Every rank is right about its shard, and the merged ranks about the whole context."""
    whole = build((1, 5, 40, 130), query_lens=(1, 2, 3, 4))
    parts = []
    for rank in range(size):
        case = whole.on_rank(Shard(rank, size, interleave_size))
        parts.append(check(case, name=f"rank {rank}", num_splits=num_splits))
    merged = merge_states(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    truth = reference_decode(*whole.tensors, **whole.reference_options())
    eager = eager_decode(*whole.tensors, **whole.reference_options())
    assert_within_budget("merged", merged, truth, eager)


def test_one_token_needs_no_global_lengths():
    """A decode step of one token a request attends all of its shard: local lengths say it all."""
    whole = build((1, 5, 40))
    case = whole.on_rank(Shard(1, 4))
    with_lengths = paged_decode(*case.tensors, **case.options())
    without = paged_decode(*case.tensors, shard=case.shard)
    assert torch.equal(with_lengths.out, without.out) and torch.equal(
        with_lengths.lse, without.lse
    )


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"sliding_window": 1}, id="window1"),
        pytest.param({"sliding_window": 50}, id="window50"),
        pytest.param({"softcap": 1.5}, id="softcap"),
        pytest.param({"sinks": True}, id="sinks"),
        pytest.param({"sliding_window": 20, "softcap": 3.0, "sinks": True}, id="all"),
    ],
)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_window_softcap_sinks(rank, model, num_splits):
    """Windows, soft caps and sinks are in out and in the LSE, whole and under a shard."""
    model = dict(model)
    case = build((0, 1, 17, 150), query_lens=(0, 1, 2, 3), padding_rows=1)
    if model.pop("sinks", False):
        model["sinks"] = torch.tensor([-math.inf, 0.0, 3.0, 30.0], device=DEVICE)
    if rank is not None:
        case = case.on_rank(Shard(rank, 2, 4))
    check(case, num_splits=num_splits, **model)


def test_sink_without_keys():
    """A request that sees no key but a sink has out 0 and lse = sink; padding stays -inf."""
    sinks = torch.tensor([0.5, -1.0, -math.inf, 30.0], device=DEVICE)
    case = build((0, 3), query_lens=(1, 1), padding_rows=1)
    got = paged_decode(*case.tensors, **case.options(), sinks=sinks)
    assert (got.out[0] == 0).all() and torch.allclose(got.lse[0], sinks)
    assert (got.lse[2] == -math.inf).all()


@pytest.mark.parametrize("num_splits", SPLITS[:3])
def test_sinks_count_once_over_the_ranks(num_splits):
    """Given to each of 4 ranks, sinks are in the merged whole once, rank 0 empty or not."""
    whole = build((1, 5, 40, 0), num_q_heads=6, num_kv_heads=3, query_lens=(1, 2, 1, 1))
    sinks = torch.tensor([-math.inf, 0.0, 30.0, 1.0, -2.0, 7.0], device=DEVICE)
    for interleave_size in (1, 16):
        parts = []
        for rank in range(4):
            case = whole.on_rank(Shard(rank, 4, interleave_size))
            parts.append(check(case, name=f"rank {rank}", num_splits=num_splits, sinks=sinks))
        # The last request is empty everywhere: its sink alone, seen on rank 0 only.
        assert torch.allclose(parts[0].lse[-1], sinks)
        assert all((part.lse[-1] == -math.inf).all() for part in parts[1:])
        merged = merge_states(
            torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts])
        )
        truth = reference_decode(*whole.tensors, **whole.reference_options(), sinks=sinks)
        eager = eager_decode(*whole.tensors, **whole.reference_options(), sinks=sinks)
        assert_within_budget(f"interleave {interleave_size}", merged, truth, eager)


@pytest.mark.parametrize("num_splits", SPLITS[:3])
@pytest.mark.parametrize("softcap", [1e-30, 0.05, 50.0, 1e4, 3e8, 3e38])
def test_soft_caps_of_any_size(softcap, num_splits):
    """A cap far above the scores changes nothing, one far below gives equal weights."""
    check(build((1, 33, 100)), softcap=softcap, num_splits=num_splits)


def test_a_window_longer_than_int32():
    """A window longer than any request is no window."""
    case = build((0, 1, 40), query_lens=(0, 1, 3))
    expected = paged_decode(*case.tensors, **case.options())
    for window in (2**31 - 2, 2**31 - 1, 2**31, 2**40):
        got = check(case, sliding_window=window)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8])
@pytest.mark.parametrize("num_requests", [3, 4], ids=["T!=H", "T==H"])
def test_unused_splits_leave_the_lse_alone(num_requests, num_splits):
    """With fewer tokens than splits the LSE buffer, NaN before, holds the right values."""
    case = build((2, 1, 3, 5)[:num_requests], num_q_heads=4)
    out = torch.full((num_requests, 4, 32), math.nan, device=DEVICE)
    lse = torch.full((num_requests, 4), math.nan, device=DEVICE)
    got = check(case, num_splits=num_splits, out=out, lse=lse)
    assert got.out is out and got.lse is lse


def test_natural_logarithm_on_every_path():
    """Each path gives ln 2 and ln 8 for two and eight equal scores, and merges to 0.8."""
    expected = torch.tensor([2.0, 8.0], device=DEVICE).log()[:, None].expand(2, 2)
    for dtype, kv_dtype, kv_layout in (
        (torch.float32, None, "NHD"),
        (torch.float16, None, "SHUFFLE"),
        (torch.bfloat16, None, "HND"),
        (torch.float16, FP8, "NHD"),
        (torch.bfloat16, FP8, "SHUFFLE"),
    ):
        for query_lens in (None, (1, 1)):
            case = build(
                (2, 8), num_q_heads=2, head_dim=16, dtype=dtype, kv_dtype=kv_dtype,
                kv_layout=kv_layout, query_lens=query_lens,
            )  # fmt: skip
            case.q.zero_()
            for num_splits in (None, 1, 5):
                got = paged_decode(*case.tensors, **case.options(), num_splits=num_splits)
                torch.testing.assert_close(got.lse, expected)
    outs = torch.tensor([[[[0.0]]], [[[1.0]]]], device=DEVICE)
    lses = torch.tensor([2.0, 8.0], device=DEVICE).log().reshape(2, 1, 1)
    merged = merge_states(outs, lses)
    assert merged.out.item() == pytest.approx(0.8) and merged.lse.item() == pytest.approx(
        2.302585, abs=1e-6
    )


@pytest.mark.parametrize("num_splits", SPLITS[:3])
@pytest.mark.parametrize("rank", range(4))
def test_multi_token_bound_under_interleave(rank, num_splits):
    """Rows that end at global lengths 6 to 9 see the local tokens that the rank holds of them."""
    visible = [[2, 2, 2, 3], [2, 2, 2, 2], [1, 2, 2, 2], [1, 1, 2, 2]][rank]
    case = build((9,), query_lens=(4,), num_q_heads=1, num_kv_heads=1, shard=Shard(rank, 4))
    case.q.zero_()
    got = paged_decode(*case.tensors, **case.options(), num_splits=num_splits)
    expected = torch.tensor(visible, dtype=torch.float32, device=DEVICE).log()[:, None]
    torch.testing.assert_close(got.lse, expected)


def test_local_lengths_of_empty_shards():
    """Rows of empty shards are out 0 and lse -inf on each rank, and merge to the exact whole."""
    lens = (3, 1, 0, 33)
    whole = build(lens, query_lens=(1, 1, 0, 1), padding_rows=3)
    local = [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [9, 8, 8, 8]]
    parts = []
    for rank in range(4):
        case = whole.on_rank(Shard(rank, 4))
        assert case.seq_lens.tolist() == [row[rank] for row in local]
        part = check(case, name=f"rank {rank}")
        for row, request in ((0, 0), (1, 1), (2, 3)):
            if local[request][rank] == 0:
                assert (part.out[row] == 0).all() and (part.lse[row] == -math.inf).all()
        parts.append(part)
    outs, lses = torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts])
    truth = reference_decode(*whole.tensors, **whole.reference_options())
    eager = eager_decode(*whole.tensors, **whole.reference_options())
    for said in (-math.inf, 7.0, math.inf, math.nan):
        # The caller says that a shard is empty: by -inf, +inf or NaN. 7.0 would be a lie to merge.
        empty = lses == -math.inf
        told = torch.where(empty, -math.inf if said == 7.0 else said, lses)
        dirty = torch.where(empty[..., None], math.nan, outs)
        assert_within_budget(f"empty said by {said}", merge_states(dirty, told), truth, eager)


@pytest.mark.parametrize("lens", [(7, 300, 1, 64), (256, 256), (1000,)], ids=str)
def test_plan_covers_every_token_once(lens):
    """The work table cuts each request into pieces that cover it exactly, within the table."""
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    workspace = DecodeWorkspace(8, 4, 2, 32, max_items=24, kv_dtype=torch.float32, device=DEVICE)
    workspace.prepare(seq_lens)
    items = workspace.items[: workspace.items_for(len(lens))].tolist()
    pieces = [item for item in items if item[0] >= 0]
    for request, length in enumerate(lens):
        mine = [(begin, end) for r, begin, end, _ in pieces if r == request]
        assert mine[0][0] == 0 and mine[-1][1] == length
        assert all(left[1] == right[0] for left, right in zip(mine, mine[1:], strict=False))
        assert all(count == len(mine) for r, _, _, count in pieces if r == request)
    split = [row for row in workspace.split_requests.tolist() if row[0] >= 0][: len(lens)]
    assert {row[0] for row in split if row[0] < len(lens)} >= {
        r for r, _, _, count in pieces if count > 1
    }


@pytest.mark.parametrize("max_items", [4, 5, 9, 64])
def test_table_of_any_size(max_items):
    """With hardly more items than requests and with many, the result is the same."""
    case = build((300, 1, 0, 77))
    workspace = DecodeWorkspace(
        4, 4, 2, 32, max_items=max_items, max_query_len=3, kv_dtype=torch.float32, device=DEVICE
    )
    workspace.prepare(case.seq_lens)
    check(case, workspace=workspace)


def test_workspace_is_shared_by_layers_and_steps():
    """One workspace serves layers and steps of fewer requests; its buffers never move."""
    workspace = DecodeWorkspace(8, 4, 2, 32, kv_dtype=torch.float32, device=DEVICE)
    before = workspace.partial_out.data_ptr(), workspace.items.data_ptr()
    for lens in ((200, 3), (1, 0, 90, 64, 17, 33, 5, 2), (64,)):
        case = build(lens, seed=len(lens))
        workspace.prepare(case.seq_lens)
        for layer in range(2):
            check(case.on_rank(Shard(0, 1)), name=f"layer {layer}", workspace=workspace)
    assert before == (workspace.partial_out.data_ptr(), workspace.items.data_ptr())
    held = (
        workspace.items,
        workspace.split_requests,
        workspace.partial_out,
        workspace.partial_lse,
    )
    assert workspace.memory_bytes() == sum(t.nbytes for t in held)


def test_config_changes_nothing_but_speed():
    """Any tile and reduce shape gives a right result."""
    case = build((300, 2))
    for config in (
        DecodeConfig(16, 1, 2, reduce_splits=2, reduce_columns=16),
        DecodeConfig(128, 4, 2, min_split_tokens=16),
    ):
        workspace = DecodeWorkspace(
            2, 4, 2, 32, max_items=16, config=config, kv_dtype=torch.float32, device=DEVICE
        )
        workspace.prepare(case.seq_lens)
        check(case, workspace=workspace)


def test_same_inputs_same_bits():
    """Two calls give the same bits, and the inputs stay as they were."""
    case = build()
    before = [t.clone() for t in case.tensors]
    first, second = (paged_decode(*case.tensors, **case.options()) for _ in range(2))
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)
    for old, now in zip(before, case.tensors, strict=True):
        assert torch.equal(old.nan_to_num(), now.nan_to_num())


def test_scale_and_strided_queries():
    """softmax_scale multiplies the scores; q, out and lse may be strided."""
    case = build((40, 7))
    inputs = (torch.randn(2, 4, 3, 32, device=DEVICE)[:, :, 1], *case.tensors[1:])
    out = torch.zeros(2, 8, 32, device=DEVICE)[:, ::2]
    lse = torch.zeros(4, 2, device=DEVICE).T
    got = paged_decode(*inputs, softmax_scale=0.3, out=out, lse=lse)
    truth = reference_decode(*inputs, softmax_scale=0.3)
    assert_within_budget("scale", got, truth, eager_decode(*inputs, softmax_scale=0.3))


def test_whole_context_oracle():
    """The paged result equals attention over the request's own tokens, pages forgotten."""
    case = build((40,), num_q_heads=4)
    got = paged_decode(*case.tensors)
    truth = reference_attention(case.q, case.keys[0], case.values[0])
    torch.testing.assert_close(got.out, truth.out.float(), rtol=1e-5, atol=1e-5)


def test_nothing_to_do():
    """No tokens gives empty results; no requests gives padding only."""
    case = build((3,), query_lens=(0,))
    got = paged_decode(*case.tensors, **case.options())
    assert got.out.shape == (0, 4, 32) and got.lse.shape == (0, 4)
    q = torch.randn(2, 4, 32, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    start = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(0, 1, dtype=torch.int32, device=DEVICE)
    got = paged_decode(q, case.k_cache, case.v_cache, table, none, query_start_loc=start)
    assert (got.out == 0).all() and (got.lse == -math.inf).all()


def test_refusals():
    """Bad input is refused with the argument's name, before any launch."""
    case = build((5, 40))
    call = lambda **more: paged_decode(*case.tensors, **more)  # noqa: E731
    with pytest.raises(ValueError, match="k_scale: expected None"):
        call(k_scale=0.5)
    with pytest.raises(ValueError, match="num_splits: expected an int >= 1"):
        call(num_splits=0)
    with pytest.raises(ValueError, match=r"seq_lens: expected int32 \[B=2\]"):
        paged_decode(*case.tensors[:4], case.seq_lens.long())


def test_workspace_refusals():
    """A workspace of other sizes, or not prepared for this step, is refused."""
    case = build((5, 40))
    call = lambda workspace, **more: paged_decode(  # noqa: E731
        *case.tensors, workspace=workspace, **more
    )
    make = lambda *sizes, **more: DecodeWorkspace(  # noqa: E731
        *sizes, **{"kv_dtype": torch.float32, "device": DEVICE, **more}
    )
    with pytest.raises(ValueError, match="workspace: expected one made for num_q_heads=4"):
        call(make(2, 8, 2, 32))
    with pytest.raises(ValueError, match="workspace: expected one made for head_dim=32"):
        call(make(2, 4, 2, 64))
    fresh = make(4, 4, 2, 32, max_items=6)
    with pytest.raises(ValueError, match=r"workspace: expected a prepared one.*prepare\(seq_lens"):
        call(fresh)
    fresh.prepare(case.seq_lens[:1])
    with pytest.raises(ValueError, match="workspace: expected one prepared for this call: 2 req"):
        call(fresh)
    with pytest.raises(ValueError, match="max_items >= num_requests"):
        call(fresh, num_splits=4)
    many = build((5, 40), query_lens=(2, 1))
    with pytest.raises(ValueError, match="max_query_len >= 2"):
        paged_decode(*many.tensors, **many.options(), workspace=fresh)
    fresh.prepare(case.seq_lens)
    with pytest.raises(ValueError, match="workspace: expected .* sliding_window=3, .*window=None"):
        call(fresh, sliding_window=3)
    with pytest.raises(ValueError, match="seq_lens: expected at most max_requests=4"):
        fresh.prepare(torch.zeros(5, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="seq_lens: expected int32"):
        fresh.prepare(torch.zeros(2, device=DEVICE))
    with pytest.raises(ValueError, match="seq_lens: expected a contiguous"):
        fresh.prepare(torch.zeros(4, dtype=torch.int32, device=DEVICE)[::2])
    with pytest.raises(ValueError, match="max_items: expected an int >= max_requests=4"):
        make(4, 4, 2, 32, max_items=3)
    with pytest.raises(ValueError, match="num_q_heads: expected a multiple of num_kv_heads=3"):
        make(4, 4, 3, 32)
    with pytest.raises(ValueError, match="global_seq_lens: expected int32"):
        fresh.prepare(case.seq_lens, sliding_window=4, shard=Shard(0, 2))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "SHUFFLE"])
@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [
        (FP8, torch.float32),
        (FP8, torch.float16),
        (FP8, torch.bfloat16),
        pytest.param(FNUZ, torch.float16, marks=NO_FNUZ),
        (None, torch.float32),
        (None, torch.float16),
        (None, torch.bfloat16),
    ],
    ids=str,
)
def test_layouts_and_fp8(kv_dtype, dtype, kv_layout):
    """Each layout of each dtype is as right as the same K and V in plain torch."""
    if kv_dtype is None and kv_layout != "SHUFFLE":
        pytest.skip("test_dtypes_and_splits and test_pages_and_layouts have it")
    case = build(
        (0, 1, 15, 17, 150),
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
        query_lens=(0, 1, 2, 1, 3),
        padding_rows=1,
    )
    scales = {} if kv_dtype is None else SCALES
    for num_splits in (None, 1):
        check(case, name=f"splits {num_splits}", num_splits=num_splits, **scales)


@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLE"])
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["fp16", "fp8"])
@pytest.mark.parametrize("page_size", [1, 16, 48, 1024])
def test_pages_of_fp8_and_shuffle(page_size, kv_dtype, kv_layout):
    """Any page size that the layout can have; head dims and groups that fill no tile."""
    if kv_layout == "NHD" and kv_dtype is None:
        pytest.skip("test_pages_and_layouts has it")
    if kv_layout == "SHUFFLE" and page_size == 1:
        page_size = 8 if kv_dtype is None else 16
    case = build(
        (1, max(1, page_size - 1), page_size + 1),
        num_q_heads=6,
        head_dim=48,
        head_dim_v=16,
        page_size=page_size,
        dtype=torch.float16,
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
    )
    check(case)


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLE"])
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["fp16", "fp8"])
def test_window_softcap_sinks_of_fp8_and_shuffle(kv_dtype, kv_layout, rank):
    """Windows, caps, sinks, several query tokens and shards are the same in every layout."""
    if kv_layout == "NHD" and kv_dtype is None:
        pytest.skip("test_window_softcap_sinks has it")
    case = build(
        (0, 1, 17, 150),
        query_lens=(0, 1, 2, 3),
        padding_rows=1,
        dtype=torch.float16,
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
    )
    model = {} if kv_dtype is None else dict(SCALES)
    model |= {"sliding_window": 50, "softcap": 3.0}
    model["sinks"] = torch.tensor([-math.inf, 0.0, 3.0, 30.0], device=DEVICE)
    if rank is not None:
        case = case.on_rank(Shard(rank, 2, 4))
    for num_splits in (None, 2):
        check(case, num_splits=num_splits, **model)


@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLE"])
@pytest.mark.parametrize("kv_dtype", [FP8, pytest.param(FNUZ, marks=NO_FNUZ)], ids=str)
def test_every_fp8_value(kv_dtype, kv_layout):
    """A request of one token returns its value: every finite fp8 code comes out exactly."""
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(kv_dtype).float()
    values = torch.where(values.isnan(), 0.0, values)
    case = build((1, 1), num_q_heads=1, num_kv_heads=1, head_dim=256, kv_dtype=kv_dtype)
    # The second token in reverse: both elements of a 16-bit word take every value.
    rows = torch.stack([values, values.flip(0)])
    pages = case.block_table[:, 0].long()
    caches = []
    for cache in (case.k_cache, case.v_cache):
        filled = cache.float().nan_to_num()
        filled[pages, 0, 0] = rows
        filled = filled.to(kv_dtype)
        caches.append(filled)
    k_cache, v_cache = caches
    if kv_layout == "SHUFFLE":
        k_cache = k_cache.unflatten(3, (-1, 16)).permute(0, 2, 3, 1, 4).contiguous()
        v_cache = v_cache.unflatten(1, (-1, 16)).permute(0, 3, 1, 4, 2).contiguous()
    # One query coordinate at a time: the LSE is the key's value there.
    for column in (0, 7, 120, 126, 127, 128, 129, 200, 254):
        q = torch.zeros(2, 1, 256, device=DEVICE)
        q[:, :, column] = 1.0
        got = paged_decode(
            q, k_cache, v_cache, case.block_table, case.seq_lens, kv_layout=kv_layout,
            softmax_scale=1.0, num_splits=1,
        )  # fmt: skip
        assert torch.equal(got.out[:, 0], rows)
        torch.testing.assert_close(got.lse[:, 0], rows[:, column], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLE"])
@pytest.mark.parametrize("num_splits", SPLITS[:3])
def test_fp8_scales(num_splits, kv_layout):
    """Case 9: the LSE moves with k_scale and not with v_scale, a float, a tensor and per head."""
    case = build((40, 3), kv_dtype=FP8, kv_layout=kv_layout)
    plain = check(case, num_splits=num_splits)
    said = check(case, num_splits=num_splits, k_scale=0.5, v_scale=2.0)
    only_v = check(case, num_splits=num_splits, v_scale=2.0)
    assert torch.equal(only_v.lse, plain.lse) and torch.equal(only_v.out, 2 * plain.out)
    assert not torch.allclose(said.lse, plain.lse, atol=1e-3)
    for shape in ((), (1,), (1, 1), (2,)):
        k_scale, v_scale = (torch.full(shape, x, device=DEVICE) for x in (0.5, 2.0))
        got = check(case, num_splits=num_splits, k_scale=k_scale, v_scale=v_scale)
        torch.testing.assert_close(got, said, rtol=1e-6, atol=1e-6)
    # Per head, strided: the other head's scale moves nothing.
    k_scale = torch.tensor([0.5, 9.0, 3.0, 9.0], device=DEVICE)[::2]
    got = check(case, num_splits=num_splits, k_scale=k_scale, v_scale=2.0)
    assert torch.equal(got.lse[:, :2], said.lse[:, :2])
    assert not torch.allclose(got.lse[:, 2:], said.lse[:, 2:], atol=1e-3)


@pytest.mark.parametrize("down", [False, True], ids=["large", "small"])
def test_fp8_query_range(down):
    """q far from 1 gives what the same q near 1 gives, for softmax_scale takes it back."""
    case = build((40, 9), kv_dtype=FP8, dtype=torch.float16)
    # Few bits, so that no power of two takes fp16 below its smallest number.
    case.q.copy_((case.q * 16).round() / 16)
    expected = check(case)
    factor = 2.0 ** (-6 if down else 6)
    case.q.mul_(factor)
    got = check(case, softmax_scale=32**-0.5 / factor)
    assert torch.equal(got.out, expected.out)
    torch.testing.assert_close(got.lse, expected.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv_dtype", [torch.float16, FP8], ids=str)
def test_small_probabilities_keep_their_digits(kv_dtype):
    """Keys of probability 1e-7 add up to what they weigh, though fp16 has no such numbers."""
    k_cache = torch.zeros(257, 1, 1, 32, device=DEVICE)
    v_cache = torch.full((257, 1, 1, 32), 448.0, device=DEVICE)
    # One key far ahead with value 0, 256 behind it by 16.
    k_cache[0, 0, 0, 0] = 16.0
    v_cache[0] = 0.0
    q = torch.zeros(1, 1, 32, dtype=torch.float16, device=DEVICE)
    q[..., 0] = 1.0
    table = torch.arange(257, dtype=torch.int32, device=DEVICE)[None]
    lens = torch.full((1,), 257, dtype=torch.int32, device=DEVICE)
    caches = k_cache.to(kv_dtype), v_cache.to(kv_dtype)
    got = paged_decode(q, *caches, table, lens, softmax_scale=1.0)
    weight = 256 * math.exp(-16)
    expected = torch.full_like(got.out, 448 * weight / (1 + weight))
    torch.testing.assert_close(got.out, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["fp32", "fp8"])
@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLE"])
def test_strided_fp8_and_shuffle(kv_layout, kv_dtype):
    """Caches may be views: K and V of one page, or with gaps in every dimension but the last."""
    case = build(kv_dtype=kv_dtype, kv_layout=kv_layout)
    expected = check(case)
    fused = build(kv_dtype=kv_dtype, kv_layout=kv_layout, fused="pages")
    assert not fused.k_cache.is_contiguous()
    gaps = []
    for cache in (case.k_cache, case.v_cache):
        wide = torch.zeros([2 * n for n in cache.shape], dtype=cache.dtype, device=DEVICE)
        view = wide[tuple(slice(None, None, 2) for _ in cache.shape[:-1])]
        view = view[..., : cache.shape[-1]]
        view.copy_(cache)
        gaps.append(view)
    for strided in (fused, dataclasses.replace(case, k_cache=gaps[0], v_cache=gaps[1])):
        got = check(strided)
        assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)


# 2066 pages of this many elements lie behind 2 ** 31.
PAGE_STRIDE = 1_039_680


@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "SHUFFLE"])
@pytest.mark.parametrize("kv_dtype", [torch.float16, FP8], ids=str)
def test_offsets_past_int32(kv_dtype, kv_layout):
    """Case 11: pages behind 2 ** 31 elements are read, nothing where a wrapped offset lands."""
    near = build((48,), dtype=torch.float16, kv_dtype=kv_dtype, kv_layout=kv_layout, spare_pages=0)
    # fp8 V is read as 16-bit words: 2 ** 31 of them.
    stride = PAGE_STRIDE * 2 // kv_dtype.itemsize
    width = near.k_cache[0].numel()
    first = 2**31 * 2 // kv_dtype.itemsize
    # Memory that is not touched is not taken.
    storage = torch.empty(first + 2071 * stride, dtype=kv_dtype, device=DEVICE)
    bits = {1: torch.uint8, 2: torch.int16}[kv_dtype.itemsize]
    used = torch.tensor([2064, 2066, 2070], device=DEVICE)
    for unit in {1, 2 // kv_dtype.itemsize}:
        for p in used.tolist():
            wrapped = (p * stride // unit + 2**31) % 2**32 - 2**31
            start = first + wrapped * unit
            if wrapped * unit != p * stride and 0 <= start < len(storage) - 2 * width:
                storage[start : start + 2 * width] = math.nan
    caches = []
    for number, cache in enumerate((near.k_cache, near.v_cache)):
        shape, strides = (2071, *cache.shape[1:]), (stride, *cache.stride()[1:])
        far = storage.as_strided(shape, strides, first + number * width)
        far.view(bits)[used] = cache.view(bits)
        caches.append(far)
    table = used[near.block_table[:, :3].long()].int()
    got = paged_decode(near.q, *caches, table, near.seq_lens, kv_layout=kv_layout)
    expected = check(near)
    assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)


def test_fp8_refusals():
    """What the kernel cannot read is refused by name, before any launch."""
    case = build((5, 40), kv_dtype=FNUZ)
    with (
        planning_for(Device("cuda", 132)),
        pytest.raises(NotImplementedError, match="k_cache=float8_e4m3fnuz .* not supported"),
    ):
        paged_decode(*case.tensors)
    case = build((5, 40), kv_dtype=FP8)
    odd = torch.zeros(*case.v_cache.shape[:-1], 33, device=DEVICE).to(FP8)[..., :32]
    with pytest.raises(NotImplementedError, match="v_cache=.*even strides"):
        paged_decode(*dataclasses.replace(case, v_cache=odd).tensors)
    with pytest.raises(ValueError, match=r"softmax_scale \* k_scale: .* fp32 can hold"):
        paged_decode(*case.tensors, softmax_scale=1e30, k_scale=1e30)


WINDOW = 5


def test_a_table_of_another_step_is_refused():
    """A window's table depends on query_start_loc, shard and global_seq_lens: a call is held."""
    whole = build((5, 40), query_lens=(2, 1))
    case = whole.on_rank(Shard(1, 2))
    workspace = DecodeWorkspace(
        2, 4, 2, 32, kv_dtype=torch.float32, max_query_len=2, max_items=8, device=DEVICE
    )
    right = {
        "query_start_loc": case.query_start_loc,
        "global_seq_lens": case.global_seq_lens,
        "shard": case.shard,
    }
    call = lambda window: check(case, workspace=workspace, sliding_window=window)  # noqa: E731
    workspace.prepare(case.seq_lens, sliding_window=WINDOW, **right)
    call(WINDOW)
    for name, value in (
        ("query_start_loc", None),
        ("shard", Shard(0, 2)),
        ("shard", Shard(1, 2, 4)),
        ("shard", None),
    ):
        workspace.prepare(case.seq_lens, sliding_window=WINDOW, **{**right, name: value})
        with pytest.raises(ValueError, match="workspace: expected one prepared for this call: 2"):
            call(WINDOW)
    # Without a window the table is the lengths' alone.
    workspace.prepare(case.seq_lens)
    call(None)
    # A group of one rank holds whole requests: no global lengths needed, nor told apart.
    alone = {"query_start_loc": whole.query_start_loc, "sliding_window": WINDOW}
    workspace.prepare(whole.seq_lens, shard=Shard(0, 1), **alone)
    check(whole, workspace=workspace, sliding_window=WINDOW)
    workspace.prepare(whole.seq_lens, global_seq_lens=whole.global_seq_lens, **alone)
    with pytest.raises(ValueError, match="without global_seq_lens, got .* with global_seq_lens"):
        check(whole, workspace=workspace, sliding_window=WINDOW)


def _every_second(count):
    """Return a view with gaps, on the device: a copy to another one would close them."""
    return torch.zeros(count, dtype=torch.int32, device=DEVICE)[::2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_seq_lens": torch.zeros(2)}, r"global_seq_lens: expected int32 \[B=2\], got"),
        ({"global_seq_lens": torch.zeros(3).int()}, r"global_seq_lens: expected int32 \[B=2\]"),
        ({"query_start_loc": torch.zeros(2).int()}, r"query_start_loc: expected int32 \[B\+1=3\]"),
        ({"query_start_loc": torch.zeros(3).long()}, r"query_start_loc: expected int32 .*int64"),
        ({"query_start_loc": _every_second(6)}, "query_start_loc: expected a contiguous"),
        ({"sliding_window": 0}, "sliding_window: expected an int >= 1, got 0"),
        ({"sliding_window": 2.5}, "sliding_window: expected an int >= 1, got 2.5"),
        ({"shard": (0, 2)}, "shard: expected a dcp_lab.Shard or None"),
    ],
)
def test_prepare_refusals(options, message):
    """prepare refuses what paged_decode would refuse, before it is prepared for anything."""
    workspace = DecodeWorkspace(4, 4, 2, 32, device=DEVICE)
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with pytest.raises(ValueError, match=message):
        workspace.prepare(torch.ones(2, dtype=torch.int32, device=DEVICE), **options)
    assert workspace.prepared is None


def test_workspace_of_another_kind():
    """A workspace is a DecodeWorkspace, made for a cache of as many bytes."""
    case = build((5, 40), dtype=torch.float16)
    with pytest.raises(ValueError, match="workspace: expected a DecodeWorkspace or None, got 3"):
        paged_decode(*case.tensors, workspace=3)
    for kv_dtype in (torch.float32, FP8):
        workspace = DecodeWorkspace(2, 4, 2, 32, kv_dtype=kv_dtype, device=DEVICE)
        workspace.prepare(case.seq_lens)
        with pytest.raises(ValueError, match="one made for kv_dtype=float16, got"):
            paged_decode(*case.tensors, workspace=workspace)
    workspace = DecodeWorkspace(2, 4, 2, 32, max_items=4, device=DEVICE)
    workspace.prepare(case.seq_lens)
    check(case, workspace=workspace)
    with pytest.raises(ValueError, match="kv_dtype: expected a dtype of a cache"):
        DecodeWorkspace(2, 4, 2, 32, kv_dtype=torch.int8, device=DEVICE)


def test_every_way_out_of_the_reduce_kernel_waits():
    """Under dependent launch each return of the reduce kernel has a wait before it."""
    source = inspect.getsource(kernels._reduce_kernel.fn)
    before = source.split("return\n")[:-1]
    assert len(before) == 3
    for way_out in before:
        last = [line.strip() for line in way_out.strip().splitlines()[-2:]]
        assert last == ["if WAIT_LAUNCH:", "tl.extra.cuda.gdc_wait()"]


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA or ROCm GPU")
@pytest.mark.parametrize("num_splits", [None, 8])
def test_a_consumer_in_the_graph_sees_all_of_out(num_splits):
    """A kernel behind the call reads whole results, also of rows that need no reduce."""
    # One long request keeps the decode kernel busy while the short ones' reduce programs leave.
    lens = (60_000, *[40] * 63)
    case = build(
        lens, num_q_heads=16, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16, page_size=64
    )
    workspace = DecodeWorkspace(
        64, 16, 1, 128, max_items=None if num_splits is None else 512, device=DEVICE
    )
    out = torch.empty_like(case.q)
    lse = torch.empty(64, 16, device=DEVICE)
    seen = torch.empty_like(out)
    options = {"workspace": workspace, "num_splits": num_splits, "out": out, "lse": lse}
    workspace.prepare(case.seq_lens)
    expected = check(case, **options).out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            out.fill_(math.nan)
            paged_decode(*case.tensors, **options)
            seen.copy_(out)
    for _ in range(50):
        seen.fill_(math.nan)
        graph.replay()
        assert torch.equal(seen, expected)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_go_to_the_tensors_device():
    """Calls, bound calls and prepare work while another device is current."""
    case = PagedCase.build((200, 3), device="cuda:1")
    workspace = DecodeWorkspace(2, 4, 2, 32, kv_dtype=torch.float32, device="cuda:1")
    out, lse = torch.empty(2, 4, 32, device="cuda:1"), torch.empty(2, 4, device="cuda:1")
    with torch.cuda.device(0):
        workspace.prepare(case.seq_lens)
        bound = BoundDecode(*case.tensors, workspace=workspace, out=out, lse=lse)
        out.fill_(math.nan)
        got = bound()
        assert torch.cuda.current_device() == 0
        truth = reference_decode(*case.tensors)
        assert_within_budget("bound", got, truth, eager_decode(*case.tensors))


def every_op(device: str) -> None:
    """Call each public operation and each way to launch it once, in fp32 on the device."""
    case = PagedCase.build((20, 3), device=device)
    truth, plain = reference_decode(*case.tensors), eager_decode(*case.tensors)
    workspace = DecodeWorkspace(2, 4, 2, 32, kv_dtype=torch.float32, device=device)
    state = AttnState(torch.empty(2, 4, 32, device=device), torch.empty(2, 4, device=device))
    workspace.prepare(case.seq_lens)
    bound = BoundDecode(*case.tensors, workspace=workspace, out=state.out, lse=state.lse)
    state.out.fill_(math.nan)
    assert_within_budget("bound", bound(), truth, plain)
    assert_within_budget("split", paged_decode(*case.tensors, num_splits=2), truth, plain)
    for gather in GATHERS:
        got = gather_decode(*case.tensors, gather=gather)
        assert_within_budget(gather, got, truth, plain)
        gather_kv(*case.tensors[1:], gather=gather)
    pair = torch.stack([truth.out, truth.out]).float(), torch.stack([truth.lse] * 2).float()
    torch.testing.assert_close(merge_states(*pair).out, pair[0][0])
    slots = torch.arange(2, device=device)
    key, cache = torch.ones(2, 1, 48, device=device), torch.zeros(1, PAGE, 1, 48, device=device)
    write_kv(key, 2 * key, cache, cache.clone(), slots)
    latents = torch.zeros_like(cache[:, :, 0])
    write_mla_kv(key[:, 0], latents, slots)
    assert cache.sum() == latents.sum() == 96
    got = mla_paged_decode(
        torch.ones(1, 2, 48, device=device),
        latents,
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.full((1,), 2, dtype=torch.int32, device=device),
        softmax_scale=1.0,
        kv_lora_rank=32,
    )
    assert (got.out == 1).all()


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_op_works_while_another_device_is_current():
    """Tensors on cuda:1, cuda:0 current: results are right, and cuda:0 is current after."""
    with torch.cuda.device(0):
        every_op("cuda:1")
        assert torch.cuda.current_device() == 0


def test_every_launch_is_on_the_tensors_device(monkeypatch):
    """No operation launches a kernel without its tensors' device made current around it."""
    # Not before dcp_lab, which switches the interpreter on.
    from triton.runtime import KernelInterface

    around, launched, bare = [], set(), set()

    @contextmanager
    def made_current(where):
        around.append(where)
        yield
        around.pop()

    def launch(kernel, grid):
        launched.add(kernel.fn.__name__)
        if not around:
            bare.add(kernel.fn.__name__)
        return launcher(kernel, grid)

    launcher = KernelInterface.__getitem__
    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    monkeypatch.setattr(torch.cuda, "device_of", made_current)
    for name, module in list(sys.modules.items()):
        if name.startswith("dcp_lab.ops.") and hasattr(module, "current_device"):
            monkeypatch.setattr(module, "current_device", made_current)
    every_op(DEVICE)
    assert not bare and len(launched) >= 10


def test_another_device_is_made_current(monkeypatch):
    """The tensors' device is current for a launch, and none is switched to without need."""
    switched = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda d: switched.append(d) or nullcontext())
    for name in ("cpu", "cuda:0", "cuda:1"):
        with current_device(torch.device(name)):
            pass
    assert switched == [torch.device("cuda:1")]


@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLE"])
def test_a_bound_call_of_fp8(kv_layout):
    """A workspace and a bound call serve fp8; scales on the device may change in place."""
    case = build((200, 3), kv_dtype=FP8, dtype=torch.float16, kv_layout=kv_layout)
    workspace = DecodeWorkspace(2, 4, 2, 32, kv_dtype=FP8, max_items=8, device=DEVICE)
    out = torch.empty(2, 4, 32, dtype=torch.float16, device=DEVICE)
    lse = torch.empty(2, 4, device=DEVICE)
    scales = {"k_scale": torch.ones(2, device=DEVICE), "v_scale": torch.ones(1, device=DEVICE)}
    workspace.prepare(case.seq_lens)
    bound = BoundDecode(
        *case.tensors, **case.options(), **scales, workspace=workspace, out=out, lse=lse
    )
    for lens, factor in (((200, 3), 0.5), ((17, 2), 3.0)):
        case.seq_lens.copy_(torch.tensor(lens))
        scales["k_scale"].copy_(torch.tensor([factor, 1.0]))
        scales["v_scale"].fill_(factor)
        workspace.prepare(case.seq_lens)
        options = {**case.reference_options(), **scales}
        truth = reference_decode(*case.tensors, **options)
        assert_within_budget(f"{lens}", bound(), truth, eager_decode(*case.tensors, **options))


def test_a_bound_call_follows_its_buffers():
    """A bound call gives what paged_decode gives, also after its buffers changed in place."""
    case = build((200, 3))
    workspace = DecodeWorkspace(2, 4, 2, 32, max_items=8, kv_dtype=torch.float32, device=DEVICE)
    workspace.prepare(case.seq_lens)
    out, lse = torch.empty(2, 4, 32, device=DEVICE), torch.empty(2, 4, device=DEVICE)
    bound = BoundDecode(*case.tensors, workspace=workspace, out=out, lse=lse)
    for lens in ((200, 3), (17, 2), (0, 1)):
        case.q.normal_()
        case.seq_lens.copy_(torch.tensor(lens))
        workspace.prepare(case.seq_lens)
        out.fill_(math.nan)
        got = bound()
        assert got.out is out and got.lse is lse
        truth = reference_decode(*case.tensors)
        assert_within_budget(f"bound {lens}", got, truth, eager_decode(*case.tensors))
    with pytest.raises(ValueError, match="workspace: expected one given"):
        BoundDecode(*case.tensors, out=out, lse=lse)
    with pytest.raises(ValueError, match=r"seq_lens: expected int32"):
        BoundDecode(*case.tensors[:4], case.q, workspace=workspace, out=out, lse=lse)


@pytest.mark.parametrize("num_splits", [torch.tensor([1, 2]), torch.tensor(1), 1.0], ids=str)
def test_a_number_of_splits_is_an_int(num_splits):
    """Anything else is refused by its name, and no tensor is read to find out."""
    case = build((9,))
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], device=DEVICE)
    with pytest.raises(ValueError, match="num_splits: expected an int >= 1"):
        paged_decode(*case.tensors, num_splits=num_splits, out=out, lse=lse)


def test_a_prepare_that_fails_leaves_the_workspace_as_it_was(monkeypatch):
    """It is prepared for what its table holds: not for a step whose launch did not run."""
    case = build((9, 40))
    decode = DecodeWorkspace(2, 4, 2, 32, kv_dtype=torch.float32, device=DEVICE)
    gather = GatherWorkspace(2, 64, 2, 32, PAGE, dtype=torch.float32, device=DEVICE)

    def prepare(requests):
        for call in (
            lambda: decode.prepare(case.seq_lens[:requests]),
            lambda: gather.prepare(case.seq_lens[:requests], max_pages=5),
        ):
            try:
                call()
            except RuntimeError as error:
                assert str(error) == "out of memory"

    def fails(launch):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "run", fails)
        prepare(2)
        assert decode.prepared is gather.prepared is None
    prepare(2)
    before = decode.prepared, gather.prepared
    assert None not in before
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "run", fails)
        prepare(1)
        assert (decode.prepared, gather.prepared) == before
