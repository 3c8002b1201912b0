"""gather_decode against the float64 oracle, within the error budget."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from dcp_lab import AttnState, Shard, gather_decode
from dcp_lab.kernels.launch import Launch
from dcp_lab.ops.gather import GatherWorkspace
from dcp_lab.reference import eager_decode, reference_decode, reference_merge
from dcp_lab.testing import PagedCase, _to_layout, assert_within_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GATHERS = ["per_page", "per_token"]
FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
# What the oracle is told too.
MODEL = ("k_scale", "v_scale", "sliding_window", "softcap", "sinks")
# How the gathered KV is attended.
ATTENDS = [
    pytest.param({"attend": "prefill"}, id="prefill"),
    pytest.param({"attend": "split"}, id="split"),
    pytest.param({"num_splits": 1}, id="1split"),
    pytest.param({"num_splits": 3}, id="3splits"),
]


def lens_for(page_size: int) -> list[int]:
    """Return 0, 1, page - 1, page, page + 1 and more than one tile of 64 keys."""
    return [0, 1, page_size - 1, page_size, page_size + 1, 70]


def check(case: PagedCase, **options: Any) -> AttnState:
    """Run gather_decode on a case with as many rows as it has tokens, and check it."""
    options.setdefault("total_tokens", int(case.seq_lens.sum()))
    model = {name: options[name] for name in MODEL if name in options}
    got = gather_decode(*case.tensors, **case.options(), **options)
    reference = reference_decode(*case.tensors, **case.reference_options(), **model)
    eager = eager_decode(*case.tensors, **case.reference_options(), **model)
    assert got.out.dtype == case.q.dtype and got.lse.dtype == torch.float32
    assert_within_budget("gather_decode", got, reference, eager)
    assert (got.out[(reference.out == 0).all(-1)] == 0).all()
    return got


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gather", GATHERS)
def test_dtypes_and_layouts(gather: str, dtype: torch.dtype, layout: str) -> None:
    """Every dtype and layout is within the budget; an empty request has out 0 and lse -inf."""
    lens = lens_for(8)
    case = PagedCase.build(lens, page_size=8, dtype=dtype, kv_layout=layout, device=DEVICE)
    check(case, gather=gather)


@pytest.mark.parametrize("attend", ATTENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ways_to_attend(dtype: torch.dtype, attend: dict) -> None:
    """Whole, in any number of pieces or by a prefill kernel; with padding and several queries."""
    lens = [0, 1, 70, 150]
    check(PagedCase.build(lens, dtype=dtype, device=DEVICE), gather="per_page", **attend)
    case = PagedCase.build(
        lens, query_lens=[2, 1, 3, 0], padding_rows=3, dtype=dtype, device=DEVICE
    )
    got = check(case, gather="per_page", **attend)
    assert (got.lse[-3:] == -torch.inf).all() and (got.out[-3:] == 0).all()


@pytest.mark.parametrize("attend", ATTENDS)
@pytest.mark.parametrize("query_lens", [None, [2, 1, 3, 1]], ids=["single", "multi"])
def test_window_softcap_and_sinks(query_lens: list[int] | None, attend: dict) -> None:
    """Each alone and all together; windows count global positions, sinks are rank 0's."""
    whole = PagedCase.build([0, 1, 70, 150], query_lens=query_lens, device=DEVICE)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE)
    options = {"sliding_window": 20, "softcap": 1.5, "sinks": sinks}
    cases = [whole, whole.on_rank(Shard(0, 2, 4)), whole.on_rank(Shard(1, 2, 4))]
    for name, value in options.items():
        check(whole, gather="per_page", **{name: value}, **attend)
    for case in cases:
        got = check(case, gather="per_page", **options, **attend)
        if case.shard is None or case.shard.rank == 0:
            torch.testing.assert_close(got.lse[0], sinks)


@pytest.mark.parametrize("window", [1, 64, 65, 1000])
def test_windows_around_a_tile(window: int) -> None:
    """A window as long as a tile, one more, a single key, or longer than the request."""
    case = PagedCase.build([1, 64, 65, 150], device=DEVICE)
    for attend in ({"attend": "prefill"}, {"num_splits": 3}):
        check(case, gather="per_page", sliding_window=window, **attend)


@pytest.mark.parametrize("attend", ATTENDS[::3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_fp8(fp8: torch.dtype, dtype: torch.dtype, attend: dict) -> None:
    """fp8 caches in every layout: k_scale is in the LSE, v_scale is not, heads have their own."""
    case = PagedCase.build([0, 1, 17, 70], dtype=dtype, device=DEVICE)
    caches = [cache.to(fp8) for cache in (case.k_cache, case.v_cache)]
    scales = {"k_scale": torch.tensor([0.5, 0.3], device=DEVICE), "v_scale": 0.7}
    for layout in ("NHD", "HND", "SHUFFLE"):
        k_cache, v_cache = _to_layout(*caches, layout)
        stored = dataclasses.replace(case, k_cache=k_cache, v_cache=v_cache, kv_layout=layout)
        check(stored, gather="per_page", **scales, **attend)


@pytest.mark.parametrize("given", [None, 79, 100])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "workspace"])
def test_published(shared: bool, given: int | None) -> None:
    """The published path attends the same, whether it reads the total itself or is told."""
    case = PagedCase.build([0, 9, 70], dtype=torch.float16, device=DEVICE)
    workspace = None
    if shared:
        workspace = GatherWorkspace(
            3, 120, 2, 32, 16, dtype=torch.float16, gather="published", device=DEVICE
        )
        workspace.prepare(case.seq_lens, max_pages=case.block_table.shape[1])
    check(case, gather="published", workspace=workspace, total_tokens=given)


def test_only_the_published_gather_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the total once a call, and never when told; the others never read anything."""
    case = PagedCase.build([9, 20], num_q_heads=2, num_kv_heads=1, spare_columns=0, device=DEVICE)
    reads: list[int] = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda x: (reads.append(1), item(x))[1])
    for options, expected in (
        ({"gather": "published"}, 1),
        ({"gather": "published", "total_tokens": 29}, 0),
        ({"gather": "per_token", "total_tokens": 29}, 0),
        ({"gather": "per_page"}, 0),
    ):
        reads.clear()
        gather_decode(*case.tensors, **options)
        assert len(reads) == expected, options


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="graph capture needs a GPU")
def test_the_published_gather_is_captured_only_when_told_the_total() -> None:
    """Inside a capture the total cannot be read: the error says what to give."""
    case = PagedCase.build([9, 20], dtype=torch.float16, device=DEVICE)
    gather_decode(*case.tensors, gather="published", total_tokens=29)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="total_tokens: expected an int under graph capture"):
            gather_decode(*case.tensors, gather="published")
        got = gather_decode(*case.tensors, gather="published", total_tokens=29)
    graph.replay()
    assert torch.equal(got.out, gather_decode(*case.tensors, gather="published").out)


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan, gather, then one launch unsplit or as a prefill kernel, two split."""
    counts: list[int] = []
    run = Launch.run
    # What run returns is what a bound call launches again.
    monkeypatch.setattr(Launch, "run", lambda launch: counts.append(1) or run(launch))
    case = PagedCase.build([70, 20], num_q_heads=2, num_kv_heads=1, device=DEVICE)
    for options, expected in (
        ({"attend": "prefill"}, 3),
        ({"gather": "published", "total_tokens": 90}, 3),
        ({"num_splits": 1}, 3),
        ({"num_splits": 2}, 4),
        ({}, 4),
    ):
        counts.clear()
        gather_decode(*case.tensors, **{"gather": "per_page", **options})
        assert len(counts) == expected, options


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "head_dim_v"),
    [
        pytest.param(3, 3, 16, 16, id="MHA-16"),
        pytest.param(6, 2, 80, 80, id="GQA3-80"),
        pytest.param(8, 1, 96, 64, id="MQA-96-64"),
        pytest.param(4, 2, 112, 128, id="GQA2-112-128"),
        pytest.param(2, 1, 192, 192, id="MQA-192"),
        pytest.param(2, 1, 256, 256, id="MQA-256"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads(
    dtype: torch.dtype, num_q_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int
) -> None:
    """Any group size and any head_dim that is a multiple of 16, also with another one for V."""
    case = PagedCase.build(
        [0, 7, 70],
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        device=DEVICE,
    )
    check(case, gather="per_page")


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_page_sizes(page_size: int, gather: str) -> None:
    """Any page size, powers of two or not."""
    lens = lens_for(page_size)
    case = PagedCase.build(lens, page_size=page_size, num_kv_heads=1, device=DEVICE)
    check(case, gather=gather)


@pytest.mark.parametrize("fused", ["pages", "dims"])
@pytest.mark.parametrize("gather", GATHERS)
def test_views_of_a_fused_cache(gather: str, fused: str) -> None:
    """Strided views of one K/V tensor need no copy."""
    case = PagedCase.build([5, 0, 40], dtype=torch.float16, fused=fused, device=DEVICE)
    check(case, gather=gather)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_query_tokens(dtype: torch.dtype) -> None:
    """Query j of n sees n - 1 - j keys less than all; requests without queries and padding too."""
    case = PagedCase.build(
        [5, 0, 70, 9, 3],
        query_lens=[3, 2, 5, 0, 3],
        padding_rows=3,
        dtype=dtype,
        device=DEVICE,
    )
    got = check(case, gather="per_page")
    assert (got.lse[-3:] == -torch.inf).all() and (got.out[-3:] == 0).all()


def test_more_query_tokens_than_a_tile_holds() -> None:
    """130 query tokens of one request take three tiles of 64 rows; padding fills more than one."""
    case = PagedCase.build(
        [150, 10], query_lens=[130, 1], padding_rows=200, num_q_heads=2, device=DEVICE
    )
    check(case, gather="per_page")


def test_more_query_tokens_than_keys() -> None:
    """Rows that come before the first key see nothing: they are empty, not NaN."""
    case = PagedCase.build([2, 3], query_lens=[5, 1], device=DEVICE)
    got = check(case, gather="per_page")
    assert (got.lse[:3] == -torch.inf).all() and got.lse[3:].isfinite().all()


@pytest.mark.parametrize("query_lens", [None, [1, 3, 2, 0]], ids=["single", "multi"])
@pytest.mark.parametrize(
    ("size", "interleave"),
    [
        pytest.param(1, 1, id="R1"),
        pytest.param(2, 1, id="R2"),
        pytest.param(3, 4, id="R3-S4"),
        pytest.param(4, 16, id="R4-S16"),
    ],
)
def test_ranks_merge_to_the_whole(
    size: int, interleave: int, query_lens: list[int] | None
) -> None:
    """Every rank is within the budget, and merged they are the whole request's result."""
    whole = PagedCase.build([0, 3, 70, 33], query_lens=query_lens, page_size=8, device=DEVICE)
    parts = [whole.on_rank(Shard(rank, size, interleave)) for rank in range(size)]
    states = [check(part, gather="per_page") for part in parts]
    merged = reference_merge([s.out for s in states], [s.lse for s in states])
    expected = reference_decode(*whole.tensors, **whole.reference_options())
    eager = eager_decode(*whole.tensors, **whole.reference_options())
    got = AttnState(merged.out.float(), merged.lse.float())
    assert_within_budget("merged ranks", got, expected, eager)


def test_bounds_of_case_10() -> None:
    """Case 10: with all scores 0 the LSE is the log of how many local tokens a row sees."""
    whole = PagedCase.build([9], query_lens=[4], page_size=2, device=DEVICE)
    seen = []
    for rank in range(4):
        case = whole.on_rank(Shard(rank, 4))
        lse = gather_decode(*case.tensors, **case.options(), softmax_scale=0.0).lse
        seen.append([round(math.exp(x)) for x in lse[:, 0].tolist()])
    assert seen == [[2, 2, 2, 3], [2, 2, 2, 2], [1, 2, 2, 2], [1, 1, 2, 2]]


@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_softmax_scale(scale: float) -> None:
    """The scale is the caller's, and the LSE is natural and of the scaled scores."""
    case = PagedCase.build([1, 20], device=DEVICE)
    got = gather_decode(*case.tensors, softmax_scale=scale)
    reference = reference_decode(*case.tensors, softmax_scale=scale)
    eager = eager_decode(*case.tensors, softmax_scale=scale)
    assert_within_budget("gather_decode", got, reference, eager)
    score = scale * (case.q[0, 0].double() @ case.keys[0][0, 0].double())
    assert got.lse[0, 0].item() == pytest.approx(score.item(), abs=1e-5)


@pytest.mark.parametrize("num_tokens", [4, 3], ids=["T==H", "T!=H"])
def test_given_out_and_lse_of_any_strides(num_tokens: int) -> None:
    """Case 3: results go to the rows and heads they belong to, and nowhere else."""
    case = PagedCase.build([0, 9, 20, 3][:num_tokens], device=DEVICE)
    memory = torch.full((num_tokens, 6, 48), torch.nan, device=DEVICE)
    out = memory[:, 1:5, 8:40]
    lse_memory = torch.full((6, num_tokens), torch.nan, device=DEVICE)
    lse = lse_memory[1:5].T
    got = check(case, out=out, lse=lse)
    assert got.out.data_ptr() == out.data_ptr() and got.lse.data_ptr() == lse.data_ptr()
    assert int((~memory.isnan()).sum()) == out.numel()
    assert int((~lse_memory.isnan()).sum()) == lse.numel()


def test_bf16_out_given() -> None:
    """A bf16 out that was given is written too, not only returned."""
    case = PagedCase.build([9, 20], dtype=torch.bfloat16, device=DEVICE)
    out = torch.full_like(case.q, torch.nan)
    got = check(case, out=out)
    assert got.out is out and not out.isnan().any()


def test_strided_q_and_table() -> None:
    """q may be a slice of a fused QKV, block_table the rows of a wider one."""
    case = PagedCase.build([9, 20], device=DEVICE)
    qkv = torch.full((2, 8, 32), torch.nan, device=DEVICE)
    qkv[:, :4] = case.q
    table = torch.full((2, 40), -7, dtype=torch.int32, device=DEVICE)
    table[:, : case.block_table.shape[1]] = case.block_table
    _, k_cache, v_cache, block_table, seq_lens = case.tensors
    got = gather_decode(qkv[:, :4], k_cache, v_cache, table[:, : block_table.shape[1]], seq_lens)
    assert torch.equal(got.out, gather_decode(*case.tensors).out)
    assert torch.equal(got.lse, gather_decode(*case.tensors).lse)


@pytest.mark.parametrize("gather", GATHERS)
def test_room_does_not_matter(gather: str) -> None:
    """Exact, more than enough and default rows give the same bits, and no input changes."""
    case = PagedCase.build([0, 9, 20], page_size=8, dtype=torch.float16, device=DEVICE)
    before = [t.clone() for t in case.tensors]
    exact = check(case, gather=gather, total_tokens=29)
    for total_tokens in (40, None):
        got = check(case, gather=gather, total_tokens=total_tokens)
        assert torch.equal(got.out, exact.out) and torch.equal(got.lse, exact.lse)
    for tensor, copy in zip(case.tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7), copy.nan_to_num(7))


def test_too_few_rows_attend_to_what_is_there() -> None:
    """total_tokens below the truth cuts the last request short, within bounds."""
    case = PagedCase.build([9, 20], device=DEVICE)
    got = gather_decode(*case.tensors, total_tokens=15)
    shorter = torch.tensor([9, 6], dtype=torch.int32, device=DEVICE)
    expected = reference_decode(*case.tensors[:4], shorter)
    eager = eager_decode(*case.tensors[:4], shorter)
    assert_within_budget("gather_decode", got, expected, eager)


@pytest.mark.parametrize("rows", [0, 3])
def test_no_requests(rows: int) -> None:
    """No requests at all: every row is padding."""
    case = PagedCase.build([], query_lens=[], padding_rows=rows, device=DEVICE)
    got = gather_decode(*case.tensors, query_start_loc=case.query_start_loc)
    assert got.out.shape == (rows, 4, 32) and got.lse.shape == (rows, 4)
    assert (got.out == 0).all() and (got.lse == -torch.inf).all()


def test_longer_than_the_table() -> None:
    """seq_lens past the table read the table's tokens only."""
    case = PagedCase.build([32], spare_columns=0, device=DEVICE)
    too_long = torch.tensor([99], dtype=torch.int32, device=DEVICE)
    got = gather_decode(*case.tensors[:4], too_long)
    exact = gather_decode(*case.tensors)
    assert torch.equal(got.out, exact.out) and torch.equal(got.lse, exact.lse)


@pytest.mark.parametrize("gather", GATHERS)
def test_workspace_is_prepared_once_for_all_layers(gather: str) -> None:
    """One prepare serves every layer of a step; the next step may have other requests."""
    workspace = GatherWorkspace(
        3, 70, 2, 32, 16, dtype=torch.float16, gather=gather, device=DEVICE
    )
    for lens in ([5, 0, 20], [50, 18]):
        layers = [
            PagedCase.build(lens, seed=seed, dtype=torch.float16, device=DEVICE) for seed in (0, 1)
        ]
        workspace.prepare(layers[0].seq_lens, max_pages=layers[0].block_table.shape[1])
        for case in layers:
            check(case, gather=gather, workspace=workspace, total_tokens=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gather": "per_page"}, "workspace: expected one made for gather=per_token, got .*page"),
        ({"num_kv_heads": 1}, "workspace: expected one made for num_kv_heads=2, got .*=1"),
        ({"head_dim": 64, "head_dim_v": 32}, "workspace: expected one made for head_dim=32"),
        ({"head_dim_v": 64}, "workspace: expected one made for head_dim_v=32"),
        ({"page_size": 8}, "workspace: expected one made for page_size=16, got 'page_size=8'"),
        ({"dtype": torch.float16}, "workspace: expected one made for dtype float32, got float16"),
    ],
)
def test_a_workspace_that_does_not_fit_is_refused(change: dict, message: str) -> None:
    """A workspace made for something else is named with what differs."""
    case = PagedCase.build([5, 20], device=DEVICE)
    sizes = {"num_kv_heads": 2, "head_dim": 32, "page_size": 16, "dtype": torch.float32}
    workspace = GatherWorkspace(2, 25, device=DEVICE, **{**sizes, **change})
    workspace.prepare(case.seq_lens, max_pages=2)
    with pytest.raises(ValueError, match=message):
        gather_decode(*case.tensors, workspace=workspace)


def test_an_unprepared_workspace_is_refused() -> None:
    """prepare comes first, for this step's requests; total_tokens is the workspace's business."""
    case = PagedCase.build([5, 20], device=DEVICE)
    workspace = GatherWorkspace(2, 25, 2, 32, 16, dtype=torch.float32, device=DEVICE)
    with pytest.raises(ValueError, match="workspace: expected a prepared one.*got 'unprepared'"):
        gather_decode(*case.tensors, workspace=workspace)
    max_pages = case.block_table.shape[1]
    for requests, pages, starts in (
        (1, max_pages, None),
        (2, max_pages + 1, None),
        (2, max_pages, torch.zeros(2, dtype=torch.int32, device=DEVICE)),
    ):
        workspace.prepare(case.seq_lens[:requests], max_pages=pages, seq_starts=starts)
        with pytest.raises(ValueError, match="prepared for this call: 2 requests, .* got '"):
            gather_decode(*case.tensors, workspace=workspace)
    with pytest.raises(ValueError, match="total_tokens: expected None with workspace"):
        gather_decode(*case.tensors, workspace=workspace, total_tokens=25)
    with pytest.raises(ValueError, match="num_splits: expected None or 1 with attend='prefill'"):
        gather_decode(*case.tensors, attend="prefill", num_splits=2)
    published = GatherWorkspace(
        2, 25, 2, 32, 16, dtype=torch.float32, gather="published", device=DEVICE
    )
    with pytest.raises(ValueError, match="total_tokens: expected at most the workspace's 25"):
        gather_decode(*case.tensors, workspace=published, gather="published", total_tokens=26)
    with pytest.raises(ValueError, match="workspace: expected a GatherWorkspace or None"):
        gather_decode(*case.tensors, workspace=object())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "gather",
            "fast",
            "gather: expected one of 'per_token', 'per_page', 'published', got 'fast'",
        ),
        ("gather", None, "gather: expected one of 'per_token', 'per_page', 'published', got None"),
        ("total_tokens", -1, "total_tokens: expected an int from 0 to 2147483647, got -1"),
        ("num_splits", 0, "num_splits: expected an int >= 1, got 0"),
        ("attend", "fast", "attend: expected 'split', 'prefill' or None, got 'fast'"),
        ("k_scale", 0.5, "k_scale: expected None with a float32 cache, got 0.5"),
        ("max_query_len", 2, r"query_start_loc: expected int32 \[B\+1=3\] with max_query_len > 1"),
    ],
)
def test_bad_arguments_are_refused(name: str, value: object, message: str) -> None:
    """Its own arguments are checked too; tests/test_arguments.py has those of every decode."""
    case = PagedCase.build([5, 20], device=DEVICE)
    with pytest.raises(ValueError, match=message):
        gather_decode(*case.tensors, **{name: value})
