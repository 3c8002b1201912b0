"""gather_kv copies the tokens that were asked for, in order, and reads nothing else."""

from __future__ import annotations

import pytest
import torch

from dcp_lab import Shard, gather_kv, write_kv
from dcp_lab.ops.arguments import check_kv_cache
from dcp_lab.ops.gather import GatherWorkspace
from dcp_lab.testing import PagedCase, _to_layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATHERS = ["per_page", "per_token"]
ALL_GATHERS = [*GATHERS, "published"]
FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
SCALES = [
    pytest.param(None, id="none"),
    pytest.param(0.37, id="float"),
    pytest.param((0.37,), id="tensor"),
    pytest.param((0.37, 2.5), id="per-head"),
]
# 0, 1, page - 1, page, page + 1 and several pages, for pages of 8.
LENS = [0, 1, 7, 8, 0, 9, 20]


def ints(*values: int) -> torch.Tensor:
    """Return an int32 tensor on the tests' device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def held(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of every token in the case's cache, one request after the other."""
    keys = [k[p] for k, p in zip(case.keys, case.positions, strict=True)]
    values = [v[p] for v, p in zip(case.values, case.positions, strict=True)]
    return torch.cat(keys), torch.cat(values)


def check(case: PagedCase, **options: object) -> None:
    """Gather all of a case and compare bit for bit."""
    tensors = (case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    k, v, cu_seqlens = gather_kv(*tensors, kv_layout=case.kv_layout, **options)
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, *case.seq_lens.cumsum(0).tolist()]
    expected_k, expected_v = held(case)
    total = len(expected_k)
    assert torch.equal(k[:total], expected_k) and torch.equal(v[:total], expected_v)


@pytest.mark.parametrize(
    ("dtype", "fused"),
    [
        pytest.param(torch.float32, None, id="fp32"),
        pytest.param(torch.float16, None, id="fp16"),
        pytest.param(torch.bfloat16, None, id="bf16"),
        pytest.param(torch.bfloat16, "pages", id="bf16-fused-pages"),
        pytest.param(torch.float16, "dims", id="fp16-fused-dims"),
    ],
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("gather", GATHERS)
def test_gathers_every_token(
    gather: str, dtype: torch.dtype, layout: str, fused: str | None
) -> None:
    """Any dtype, layout and strides give the tokens bit for bit, among NaN and garbage."""
    case = PagedCase.build(
        LENS,
        page_size=8,
        dtype=dtype,
        kv_layout=layout,
        fused=fused,
        head_dim=80,
        head_dim_v=48,
        device=DEVICE,
    )
    check(case, gather=gather, total_tokens=sum(LENS))


def scale_of(given: float | tuple[float, ...] | None) -> float | torch.Tensor | None:
    """Return a scale as it is passed: a tuple is a tensor."""
    return torch.tensor(given, device=DEVICE) if isinstance(given, tuple) else given


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gather", ALL_GATHERS)
def test_shuffled_caches(gather: str, dtype: torch.dtype) -> None:
    """AITER's SHUFFLE layout gives the tokens bit for bit, views of a fused cache too."""
    for fused, page_size in ((None, 8), ("pages", 48)):
        case = PagedCase.build(
            LENS,
            page_size=page_size,
            dtype=dtype,
            kv_layout="SHUFFLE",
            fused=fused,
            head_dim=80,
            head_dim_v=48,
            device=DEVICE,
        )
        check(case, gather=gather, total_tokens=sum(LENS))


@pytest.mark.parametrize("given", SCALES)
@pytest.mark.parametrize("layout", ["NHD", "HND", "SHUFFLE"])
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_fp8_caches(fp8: torch.dtype, layout: str, given: float | tuple | None) -> None:
    """An fp8 cache gives stored * scale, in bf16 unless asked otherwise."""
    case = PagedCase.build([0, 1, 17, 3], page_size=16, device=DEVICE)
    caches = [cache.to(fp8) for cache in (case.k_cache, case.v_cache)]
    expected = [rows.to(fp8).float() for rows in held(case)]
    scale = scale_of(given)
    if scale is not None:
        factor = scale.reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale
        expected = [rows * factor for rows in expected]
    for gather, out_dtype in zip(ALL_GATHERS, (None, torch.float32, torch.float16), strict=True):
        k, v, _ = gather_kv(
            *_to_layout(*caches, layout),
            case.block_table,
            case.seq_lens,
            kv_layout=layout,
            k_scale=scale,
            v_scale=scale,
            out_dtype=out_dtype,
            total_tokens=21,
            gather=gather,
        )
        wanted = out_dtype or torch.bfloat16
        assert k.dtype == v.dtype == wanted
        assert torch.equal(k, expected[0].to(wanted))
        assert torch.equal(v, expected[1].to(wanted))


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_every_fp8_code(fp8: torch.dtype) -> None:
    """All 256 codes become what torch makes of them, NaN too."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).reshape(1, 16, 1, 16)
    cache = codes.view(fp8)
    k, v, _ = gather_kv(cache, cache, ints(0)[None], ints(16), out_dtype=torch.float32)
    expected = cache.float().flatten(0, 1)
    for got in (k, v):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))


def test_the_published_gather_reads_the_total_or_is_told() -> None:
    """Without total_tokens it finds the step's tokens itself, on the host; with it, it stops."""
    case = PagedCase.build([5, 0, 20], device=DEVICE)
    check(case, gather="published")
    workspace = GatherWorkspace(
        3, 40, 2, 32, 16, dtype=torch.float32, gather="published", device=DEVICE
    )
    workspace.prepare(case.seq_lens, max_pages=case.block_table.shape[1])
    expected_k, _ = held(case)
    for total_tokens, copied in ((None, 25), (25, 25), (40, 25), (7, 7), (0, 0)):
        workspace.k.fill_(7)
        workspace.copy(
            check_kv_cache(case.k_cache, case.v_cache), case.block_table, total_tokens=total_tokens
        )
        assert torch.equal(workspace.k[:copied], expected_k[:copied])
        assert (workspace.k[copied:] == 7).all()


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("page_size", [1, 3, 48, 1024])
def test_page_sizes(page_size: int, gather: str) -> None:
    """Any page size up to 1,024 works, with num_kv_heads that is no power of two."""
    case = PagedCase.build(
        [5, 0, 50], page_size=page_size, num_q_heads=3, num_kv_heads=3, device=DEVICE
    )
    check(case, gather=gather, total_tokens=55)


@pytest.mark.parametrize("gather", GATHERS)
def test_without_total_tokens_there_is_room_for_all_the_table_holds(gather: str) -> None:
    """N defaults to B * max_pages * page, known without a sync."""
    case = PagedCase.build([3, 9], page_size=4, num_kv_heads=1, spare_columns=1, device=DEVICE)
    check(case, gather=gather)
    k, v, _ = gather_kv(case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    assert k.shape == (2 * 4 * 4, 1, 32) and v.shape == (2 * 4 * 4, 1, 32)


@pytest.mark.parametrize("gather", GATHERS)
def test_many_requests(gather: str) -> None:
    """More requests than the plan handles at once, most of them empty."""
    lens = [b % 3 if b % 50 == 1 or b > 295 else 0 for b in range(300)]
    case = PagedCase.build(lens, page_size=2, num_kv_heads=1, num_q_heads=1, device=DEVICE)
    check(case, gather=gather, total_tokens=sum(lens))


@pytest.mark.parametrize("gather", GATHERS)
def test_a_shard_gathers_what_it_holds(gather: str) -> None:
    """A rank's cache gives the rank's tokens in order of their position."""
    case = PagedCase.build(LENS, page_size=8, shard=Shard(1, 3, 2), device=DEVICE)
    check(case, gather=gather, total_tokens=20)


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("starts", [(0, 0, 0), (5, 16, 0), (16, 31, 49), (1, 17, 33)], ids=str)
def test_seq_starts(starts: tuple[int, ...], gather: str) -> None:
    """A request's tokens start at seq_starts, in the middle of a page or not."""
    lens = [20, 40, 50]
    case = PagedCase.build(lens, device=DEVICE)
    asked = [min(3 + 9 * b, n - s) for b, (n, s) in enumerate(zip(lens, starts, strict=True))]
    k, v, cu_seqlens = gather_kv(
        case.k_cache,
        case.v_cache,
        case.block_table,
        ints(*asked),
        seq_starts=ints(*starts),
        gather=gather,
        total_tokens=sum(asked),
    )
    spans = list(zip(starts, asked, strict=True))
    expected_k = torch.cat([x[s : s + n] for x, (s, n) in zip(case.keys, spans, strict=True)])
    expected_v = torch.cat([x[s : s + n] for x, (s, n) in zip(case.values, spans, strict=True)])
    assert torch.equal(k, expected_k) and torch.equal(v, expected_v)
    assert cu_seqlens.diff().tolist() == asked


def table_then_poison(rows: int, columns: int) -> torch.Tensor:
    """Return a table of page 0 whose every neighbour in memory names page 1, the poison."""
    memory = torch.ones(rows + 2, columns, dtype=torch.int32, device=DEVICE)
    memory[1:-1] = 0
    return memory[1:-1]


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize(
    ("table", "page_size", "start", "asked", "expected"),
    [
        pytest.param((998, 1024), 16, 15_967, 834, 417, id="vllm-45462"),
        pytest.param((1, 2), 64, 128, 834, 0, id="vllm-49427"),
        pytest.param((2, 2), 64, 127, 5, 1, id="last-token"),
        pytest.param((2, 2), 64, 2**31 - 1, 2**31 - 1, 0, id="int32-limit"),
        pytest.param((2, 2), 64, 0, 2**31 - 1, 128, id="all-of-it"),
    ],
)
def test_nothing_is_gathered_past_the_table(
    table: tuple[int, int], page_size: int, start: int, asked: int, expected: int, gather: str
) -> None:
    """Case 8: past the table there is nothing to gather, whatever lies behind it in memory."""
    block_table = table_then_poison(*table)
    k_cache = torch.ones(2, page_size, 1, 16, device=DEVICE)
    k_cache[1] = torch.nan
    seq_lens, seq_starts = ints(*[0] * table[0]), ints(*[0] * table[0])
    seq_lens[-1], seq_starts[-1] = asked, start
    k, v, cu_seqlens = gather_kv(
        k_cache,
        k_cache,
        block_table,
        seq_lens,
        seq_starts=seq_starts,
        total_tokens=min(asked, 500),
        gather=gather,
    )
    assert cu_seqlens.tolist() == [0] * table[0] + [expected]
    assert (k[:expected] == 1).all() and (v[:expected] == 1).all()


@pytest.mark.parametrize("gather", GATHERS)
def test_too_small_a_total_cuts_off_the_end(gather: str) -> None:
    """Nothing is written past N; cu_seqlens says what is there."""
    case = PagedCase.build([3, 4, 5], page_size=2, device=DEVICE)
    workspace = GatherWorkspace(3, 9, 2, 32, 2, dtype=torch.float32, gather=gather, device=DEVICE)
    behind_k, behind_v = torch.full((2, 12, 2, 32), 7.0, device=DEVICE).unbind()
    workspace.k, workspace.v = behind_k[:9], behind_v[:9]
    workspace.prepare(case.seq_lens, max_pages=case.block_table.shape[1])
    workspace.copy(check_kv_cache(case.k_cache, case.v_cache), case.block_table)
    assert workspace.cu_seqlens.tolist() == [0, 3, 7, 9]
    expected_k, expected_v = held(case)
    for got, expected in ((behind_k, expected_k), (behind_v, expected_v)):
        assert torch.equal(got[:9], expected[:9]) and (got[9:] == 7).all()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gather", GATHERS)
def test_out_dtype(gather: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Another out_dtype is rounded as torch rounds it."""
    case = PagedCase.build([5, 20], dtype=dtype, device=DEVICE)
    k, v, _ = gather_kv(
        case.k_cache,
        case.v_cache,
        case.block_table,
        case.seq_lens,
        total_tokens=25,
        out_dtype=out_dtype,
        gather=gather,
    )
    expected_k, expected_v = held(case)
    assert torch.equal(k, expected_k.to(out_dtype)) and torch.equal(v, expected_v.to(out_dtype))


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("lens", [[], [0], [0, 0, 0]], ids=str)
def test_nothing_to_gather(lens: list[int], gather: str) -> None:
    """No requests, or only empty ones, with and without room, give cu_seqlens of zeros."""
    case = PagedCase.build(lens, device=DEVICE)
    for total_tokens in (None, 0, 5):
        k, _, cu_seqlens = gather_kv(
            case.k_cache,
            case.v_cache,
            case.block_table,
            case.seq_lens,
            total_tokens=total_tokens,
            gather=gather,
        )
        assert cu_seqlens.tolist() == [0] * (len(lens) + 1)
        assert total_tokens is None or len(k) == total_tokens


PAGE_STRIDE = 1_039_680
FAR_PAGES = range(2064, 2071)


def far_cache(page: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache [2071, page, heads, dim] whose last pages lie past 2^31 elements.

    Most of it is memory that is reserved and never touched. The view starts 2^31 elements into it,
    so that an offset that wraps to a negative 32-bit number stays inside: there it finds NaN, and
    what it writes there is seen in the second tensor, which holds just those places.
    """
    size = page * heads * dim
    storage = torch.empty(2**31 + 2070 * PAGE_STRIDE + size, dtype=torch.float16, device=DEVICE)
    cache = storage.as_strided(
        (2071, page, heads, dim), (PAGE_STRIDE, heads * dim, dim, 1), storage_offset=2**31
    )
    wrapped = []
    for p in FAR_PAGES:
        cache[p] = torch.nan
        if p * PAGE_STRIDE >= 2**31:
            # 2^31 + (offset - 2^32)
            start = p * PAGE_STRIDE - 2**31
            wrapped.append(storage[start : start + size])
    for place in wrapped:
        place.fill_(torch.nan)
    assert len(wrapped) == 5
    return cache, wrapped[0]


@pytest.mark.parametrize("gather", GATHERS)
def test_page_offsets_past_32_bits(gather: str) -> None:
    """Case 11: pages 2064 ... 2070 of a page stride of 1,039,680 elements wrap from 2066 on."""
    page, heads, dim = 4, 2, 16
    k_cache, k_wrapped = far_cache(page, heads, dim)
    v_cache, v_wrapped = far_cache(page, heads, dim)
    pages = list(FAR_PAGES)
    tokens = page * len(pages)
    key = torch.randn(tokens, heads, dim, device=DEVICE).half()
    value = torch.randn(tokens, heads, dim, device=DEVICE).half()
    slots = [p * page + i for p in pages for i in range(page)]
    write_kv(key, value, k_cache, v_cache, torch.tensor(slots, device=DEVICE))
    assert torch.equal(torch.cat([k_cache[p] for p in pages]), key)
    assert torch.equal(torch.cat([v_cache[p] for p in pages]), value)
    assert k_wrapped.isnan().all() and v_wrapped.isnan().all()
    k, v, cu_seqlens = gather_kv(
        k_cache, v_cache, ints(*pages)[None], ints(tokens), total_tokens=tokens, gather=gather
    )
    assert cu_seqlens.tolist() == [0, tokens]
    assert torch.equal(k, key) and torch.equal(v, value)


def test_destination_offsets_past_32_bits() -> None:
    """Case 11: rows of the result past 2^31 elements are written where they belong."""
    heads, dim, page = 8, 256, 16
    rows = 2**31 // (heads * dim) + 16
    case = PagedCase.build(
        [16], num_q_heads=8, num_kv_heads=8, head_dim=256, dtype=torch.float16, device=DEVICE
    )
    # One request whose tokens come after 2^31 elements of others. Reserved, hardly touched.
    workspace = GatherWorkspace(1, 16, heads, dim, page, dtype=torch.float16, gather="per_page")
    workspace.prepare(case.seq_lens, max_pages=1)
    workspace.cu_seqlens += rows - 16
    results = []
    for name in ("k", "v"):
        storage = torch.empty((2**31 + rows * heads * dim,), dtype=torch.float16, device=DEVICE)
        result = storage[2**31 :].view(rows, heads, dim)
        result[-16:] = torch.nan
        setattr(workspace, name, result)
        results.append(result)
    workspace.copy(check_kv_cache(case.k_cache, case.v_cache), case.block_table)
    assert torch.equal(results[0][-16:], case.keys[0])
    assert torch.equal(results[1][-16:], case.values[0])


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.skipif(DEVICE == "cpu", reason="a million programs need a GPU")
@pytest.mark.parametrize("gather", GATHERS)
def test_a_result_past_32_bits(gather: str) -> None:
    """Case 11: a gathered K of more than 2^31 elements is right at its end."""
    rows = 2**31 // 2048 + 100
    cache = torch.randn(1, 1024, 8, 256, device=DEVICE, dtype=torch.float16)
    max_pages = -(-rows // 1024)
    table = torch.zeros(1, max_pages, dtype=torch.int32, device=DEVICE)
    k, v, _ = gather_kv(cache, cache, table, ints(rows), total_tokens=rows, gather=gather)
    index = torch.arange(rows - 2000, rows, device=DEVICE) % 1024
    assert torch.equal(k[-2000:], cache[0, index]) and torch.equal(v[-2000:], cache[0, index])


class TestWorkspace:
    """A GatherWorkspace plans once and copies for many layers."""

    @pytest.mark.parametrize("gather", GATHERS)
    def test_one_plan_many_layers(self, gather: str) -> None:
        """Two layers with one plan, then a step with fewer and longer requests."""
        workspace = GatherWorkspace(
            3, 70, 2, 32, 16, dtype=torch.float32, gather=gather, device=DEVICE
        )
        for lens in ([5, 0, 20], [50, 18]):
            layers = [PagedCase.build(lens, seed=seed, device=DEVICE) for seed in (0, 1)]
            table = layers[0].block_table
            workspace.prepare(layers[0].seq_lens, max_pages=table.shape[1])
            for case in layers:
                cache = check_kv_cache(case.k_cache, case.v_cache)
                workspace.copy(cache, case.block_table)
                expected_k, expected_v = held(case)
                total = sum(lens)
                assert torch.equal(workspace.k[:total], expected_k)
                assert torch.equal(workspace.v[:total], expected_v)

    def test_memory_bytes(self) -> None:
        """K, V, cu_seqlens, cu_units, a unit's request and counts, counted by hand."""
        workspace = GatherWorkspace(3, 70, 2, 32, 16, head_dim_v=16, gather="per_token")
        assert workspace.memory_bytes() == 70 * 2 * (32 + 16) * 2 + (4 + 4 + 70 + 3) * 4

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("max_requests", 0, "max_requests: expected an int >= 1, got 0"),
            ("max_tokens", -1, "max_tokens: expected an int from 0 to 2147483647, got -1"),
            ("num_kv_heads", 0, "num_kv_heads: expected an int >= 1, got 0"),
            ("head_dim", 1.5, "head_dim: expected an int >= 1, got 1.5"),
            ("head_dim_v", 0, "head_dim_v: expected an int >= 1, got 0"),
            ("page_size", 0, "page_size: expected an int >= 1, got 0"),
            ("dtype", torch.int8, "dtype: expected torch.float32, .*, got torch.int8"),
            (
                "gather",
                "fast",
                "gather: expected one of 'per_token', 'per_page', 'published', got 'fast'",
            ),
        ],
    )
    def test_bad_sizes_are_refused(self, name: str, value: object, message: str) -> None:
        """A size that makes no sense is named."""
        sizes = {"max_requests": 3, "max_tokens": 9, "num_kv_heads": 2, "head_dim": 32}
        with pytest.raises(ValueError, match=message):
            GatherWorkspace(**{**sizes, "page_size": 16, name: value})

    def test_bad_steps_are_refused(self) -> None:
        """prepare names what does not fit."""
        workspace = GatherWorkspace(3, 70, 2, 32, 16, device=DEVICE)
        with pytest.raises(ValueError, match=r"seq_lens: expected at most max_requests=3"):
            workspace.prepare(ints(1, 2, 3, 4), max_pages=2)
        with pytest.raises(ValueError, match=r"seq_lens: expected int32 \[B\], got int64"):
            workspace.prepare(ints(1, 2).long(), max_pages=2)
        with pytest.raises(
            ValueError, match=r"seq_starts: expected int32 \[B=2\], got int32 \[1\]"
        ):
            workspace.prepare(ints(1, 2), max_pages=2, seq_starts=ints(1))
        with pytest.raises(ValueError, match=r"max_pages: expected an int from 0 to .*, got -1"):
            workspace.prepare(ints(1, 2), max_pages=-1)


def arguments() -> dict:
    """Return arguments that are all right."""
    return {
        "k_cache": torch.zeros(4, 8, 2, 16),
        "v_cache": torch.zeros(4, 8, 2, 32),
        "block_table": torch.zeros(3, 2, dtype=torch.int32),
        "seq_lens": torch.zeros(3, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k_cache", torch.zeros(4, 8, 2), r"k_cache: .* \[P, page, Hkv, D\], got float32"),
        ("v_cache", torch.zeros(4, 9, 2, 32), r"v_cache: .* \[P=4, page=8, Hkv=2, Dv\], got"),
        ("block_table", torch.zeros(3, 2), r"block_table: expected int32 .*, got float32"),
        ("block_table", torch.zeros(3).int(), r"block_table: .* \[B, max_pages\], got int32"),
        ("block_table", torch.zeros(2, 3).int().T, r"block_table: expected a contiguous last dim"),
        ("seq_lens", torch.zeros(3).long(), r"seq_lens: expected int32 \[B=3\], got int64 \[3\]"),
        ("seq_lens", torch.zeros(2).int(), r"seq_lens: expected int32 \[B=3\], got int32 \[2\]"),
        ("seq_starts", torch.zeros(3), r"seq_starts: expected int32 \[B=3\], got float32 \[3\]"),
        ("seq_starts", torch.zeros(2).int(), r"seq_starts: expected int32 \[B=3\], got int32"),
        ("total_tokens", -1, r"total_tokens: expected an int from 0 to 2147483647, got -1"),
        ("total_tokens", 2**31, r"total_tokens: expected an int .*, got 2147483648"),
        ("total_tokens", 1.5, r"total_tokens: expected an int .*, got 1.5"),
        ("total_tokens", torch.tensor(3), r"total_tokens: expected an int .*, got int64 \[\]"),
        ("out_dtype", torch.int8, r"out_dtype: expected torch.float32, .*, got torch.int8"),
        (
            "gather",
            "fast",
            r"gather: expected one of 'per_token', 'per_page', 'published', got 'fast'",
        ),
        ("kv_layout", "NDH", r"kv_layout: expected one of 'NHD', 'HND', 'SHUFFLE', got 'NDH'"),
    ],
)
def test_bad_arguments_are_refused(name: str, value: object, message: str) -> None:
    """A bad argument is named, with what was expected and what was given."""
    with pytest.raises(ValueError, match=message):
        gather_kv(**{**arguments(), name: value})
