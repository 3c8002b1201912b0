"""paged_decode against the float64 oracle: every branch of its kernels, on the CPU or on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from dcp_lab import AttnState, BoundDecode, DecodeWorkspace, Shard, merge_states, paged_decode
from dcp_lab.ops.workspace import DecodeConfig
from dcp_lab.reference import eager_decode, reference_attention, reference_decode
from dcp_lab.testing import PagedCase, assert_within_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16
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
        sinks = torch.tensor([-math.inf, 0.0, 3.0, 30.0], device=DEVICE)
        # Under a shard a sink counts once: on rank 0.
        if not rank:
            model["sinks"] = sinks
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
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for query_lens in (None, (1, 1)):
            case = build((2, 8), num_q_heads=2, head_dim=16, dtype=dtype, query_lens=query_lens)
            case.q.zero_()
            for num_splits in (None, 1, 2, 5):
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
    workspace = DecodeWorkspace(8, 4, 2, 32, max_items=24, device=DEVICE)
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
    workspace = DecodeWorkspace(4, 4, 2, 32, max_items=max_items, max_query_len=3, device=DEVICE)
    workspace.prepare(case.seq_lens)
    check(case, workspace=workspace)


def test_workspace_is_shared_by_layers_and_steps():
    """One workspace serves layers and steps of fewer requests; its buffers never move."""
    workspace = DecodeWorkspace(8, 4, 2, 32, device=DEVICE)
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
        workspace = DecodeWorkspace(2, 4, 2, 32, max_items=16, config=config, device=DEVICE)
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
    make = lambda *sizes, **more: DecodeWorkspace(*sizes, device=DEVICE, **more)  # noqa: E731
    with pytest.raises(ValueError, match="workspace: expected one made for num_q_heads=4"):
        call(make(2, 8, 2, 32))
    with pytest.raises(ValueError, match="workspace: expected one made for head_dim=32"):
        call(make(2, 4, 2, 64))
    fresh = make(4, 4, 2, 32, max_items=6)
    with pytest.raises(ValueError, match=r"workspace: expected a prepared one.*prepare\(seq_lens"):
        call(fresh)
    fresh.prepare(case.seq_lens[:1])
    with pytest.raises(ValueError, match="workspace: expected one prepared for this call's 2"):
        call(fresh)
    with pytest.raises(ValueError, match="max_items >= num_requests"):
        call(fresh, num_splits=4)
    many = build((5, 40), query_lens=(2, 1))
    with pytest.raises(ValueError, match="max_query_len >= 2"):
        paged_decode(*many.tensors, **many.options(), workspace=fresh)
    fresh.prepare(case.seq_lens)
    with pytest.raises(ValueError, match="workspace: expected one prepared for sliding_window=3"):
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


def test_a_bound_call_follows_its_buffers():
    """A bound call gives what paged_decode gives, also after its buffers changed in place."""
    case = build((200, 3))
    workspace = DecodeWorkspace(2, 4, 2, 32, max_items=8, device=DEVICE)
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
