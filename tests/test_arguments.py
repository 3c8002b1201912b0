"""check_decode_arguments: what paged_decode and gather_decode refuse, and what they are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dcp_lab import Shard
from dcp_lab.ops.arguments import check_decode_arguments

# 3 requests, 5 rows, 4 query heads on 2 KV heads of 32 (V: 16), pages of 8.
INT32 = torch.int32


def arguments(**changes: Any) -> dict[str, Any]:
    """Return arguments of a decode of several query tokens that are all right, with changes."""
    right = {
        "q": torch.zeros(5, 4, 32),
        "k_cache": torch.zeros(6, 8, 2, 32),
        "v_cache": torch.zeros(6, 8, 2, 16),
        "block_table": torch.zeros(3, 2, dtype=INT32),
        "seq_lens": torch.zeros(3, dtype=INT32),
        "query_start_loc": torch.tensor([0, 1, 3, 4], dtype=INT32),
        "max_query_len": 2,
    }
    return {**right, **changes}


def single(**changes: Any) -> dict[str, Any]:
    """Return arguments of a decode of one query token a request, with changes."""
    return arguments(q=torch.zeros(3, 4, 32), query_start_loc=None, max_query_len=1, **changes)


def test_sizes_and_defaults() -> None:
    """Sizes are read off the tensors and defaults filled in."""
    a = check_decode_arguments(**arguments())
    assert (a.num_requests, a.num_tokens, a.max_pages, a.num_pages) == (3, 5, 2, 6)
    assert (a.num_q_heads, a.num_kv_heads, a.head_dim, a.head_dim_v) == (4, 2, 32, 16)
    assert (a.page_size, a.kv_layout, a.max_query_len) == (8, "NHD", 2)
    assert a.softmax_scale == 32**-0.5
    assert a.total_lens is a.seq_lens
    assert a.shard is a.num_splits is a.softcap is a.sliding_window is a.sinks is None


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_strides_are_of_page_token_and_head(layout: str) -> None:
    """Strides come in one order whatever the layout, also of views."""
    memory = torch.zeros(6, 8, 2, 48)
    k_cache, v_cache = memory[..., :32], memory[..., 32:]
    if layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    changes = {"k_cache": k_cache, "v_cache": v_cache, "kv_layout": layout}
    a = check_decode_arguments(**arguments(**changes))
    assert a.k_strides[:3] == a.v_strides[:3] == (8 * 2 * 48, 2 * 48, 48)
    assert (a.page_size, a.num_kv_heads) == (8, 2)


def test_what_is_given_is_kept() -> None:
    """Explicit values arrive, numbers as Python floats."""
    total = torch.full((3,), 9, dtype=INT32)
    a = check_decode_arguments(
        **arguments(),
        softmax_scale=np.float32(0.5),
        sliding_window=7,
        softcap=30,
        sinks=torch.zeros(4),
        shard=Shard(1, 2),
        global_seq_lens=total,
        num_splits=3,
        out=torch.zeros(5, 4, 16),
        lse=torch.zeros(4, 5).T,
    )
    assert (a.softmax_scale, a.sliding_window, a.softcap, a.num_splits) == (0.5, 7, 30.0, 3)
    assert type(a.softmax_scale) is type(a.softcap) is float
    assert a.total_lens is total and a.shard == Shard(1, 2)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(single(shard=Shard(1, 2)), id="one-token-needs-no-global-lengths"),
        pytest.param(arguments(shard=Shard(0, 1)), id="one-rank-needs-no-global-lengths"),
        pytest.param(arguments(max_query_len=1), id="query_start_loc-with-max_query_len-1"),
        pytest.param(single(block_table=torch.zeros(3, 0, dtype=INT32)), id="table-of-no-pages"),
        pytest.param(
            single(k_cache=torch.zeros(0, 8, 2, 32), v_cache=torch.zeros(0, 8, 2, 16)),
            id="cache-of-no-pages",
        ),
        pytest.param(arguments(q=torch.zeros(0, 4, 32)), id="no-rows"),
    ],
)
def test_corners_are_accepted(given: dict[str, Any]) -> None:
    """What is unusual but right passes."""
    check_decode_arguments(**given)


BAD = [
    ("q", None, r"q: expected a tensor \[T, Hq, D\], got None"),
    ("q", torch.zeros(5, 4), r"q: .* \[T, Hq, D\], got float32 \[5, 4\] on cpu"),
    (
        "q",
        torch.zeros(5, 4, 32).int(),
        r"q: expected float32 or float16 or bfloat16 .*, got int32",
    ),
    ("q", torch.zeros(5, 32, 4).mT, r"q: expected a contiguous last dimension"),
    (
        "q",
        torch.zeros(5, 3, 32),
        r"q: expected a number of heads divisible by num_kv_heads=2, got",
    ),
    (
        "q",
        torch.zeros(5, 0, 32),
        r"q: expected a number of heads divisible by num_kv_heads=2, got",
    ),
    (
        "q",
        torch.zeros(5, 4, 24),
        r"head_dim \(of q\): expected a multiple of 16 up to 256, got 24",
    ),
    ("q", torch.zeros(5, 4, 64), r"k_cache: expected q's head_dim 64 as last dimension, got"),
    (
        "q",
        torch.zeros(5, 4, 32).half(),
        r"k_cache: expected q's dtype float16 or fp8, got float32",
    ),
    ("k_cache", torch.zeros(6, 8, 2), r"k_cache: .* \[P, page, Hkv, D\], got float32 \[6, 8, 2\]"),
    ("k_cache", torch.zeros(6, 8, 2, 272), r"head_dim \(of k_cache\): .* <= 256, got 272"),
    ("k_cache", torch.zeros(6, 1025, 2, 32), r"page_size \(of k_cache\): .* <= 1024, got 1025"),
    (
        "k_cache",
        torch.zeros(6, 0, 2, 32),
        r"page_size \(of k_cache\): expected an int >= 1 .*got 0",
    ),
    ("k_cache", torch.zeros(6, 8, 0, 32), r"num_kv_heads \(of k_cache\): expected an int >= 1"),
    (
        "k_cache",
        torch.zeros(6, 8, 2, 32, device="meta"),
        r"k_cache: expected a tensor on cpu, got",
    ),
    ("v_cache", torch.zeros(5, 8, 2, 16), r"v_cache: .* \[P=6, page=8, Hkv=2, Dv\], got float32"),
    ("v_cache", torch.zeros(6, 8, 2, 16).half(), r"v_cache: expected float32 .*, got float16"),
    ("v_cache", torch.zeros(6, 8, 2, 24), r"head_dim \(of v_cache\): .*multiple of 16.*, got 24"),
    ("v_cache", torch.zeros(6, 8, 2, 272), r"head_dim \(of v_cache\): .* <= 256, got 272"),
    ("v_cache", torch.zeros(6, 8, 16, 2).mT, r"v_cache: expected a contiguous last dimension"),
    ("kv_layout", "NDH", r"kv_layout: expected one of 'NHD', 'HND', 'SHUFFLE', got 'NDH'"),
    ("kv_layout", None, r"kv_layout: expected one of 'NHD', 'HND', 'SHUFFLE', got None"),
    (
        "block_table",
        torch.zeros(3, 2),
        r"block_table: expected int32 \[B, max_pages\], got float32",
    ),
    (
        "block_table",
        torch.zeros(3, 2).long(),
        r"block_table: expected int32 .*, got int64 \[3, 2\]",
    ),
    ("block_table", torch.zeros(2, 3).int().T, r"block_table: expected a contiguous last dim"),
    ("seq_lens", torch.zeros(3).long(), r"seq_lens: expected int32 \[B=3\], got int64 \[3\]"),
    ("seq_lens", torch.zeros(4).int(), r"seq_lens: expected int32 \[B=3\], got int32 \[4\]"),
    ("seq_lens", torch.zeros(6).int()[::2], r"seq_lens: expected a contiguous last dimension"),
    ("softmax_scale", float("nan"), r"softmax_scale: expected a finite number, got nan"),
    ("softmax_scale", float("inf"), r"softmax_scale: expected a finite number, got inf"),
    ("softmax_scale", True, r"softmax_scale: expected a finite number, got True"),
    (
        "softmax_scale",
        torch.ones(()),
        r"softmax_scale: expected a finite number, got float32 \[\]",
    ),
    ("sliding_window", 0, r"sliding_window: expected an int >= 1, got 0"),
    ("sliding_window", 2.0, r"sliding_window: expected an int >= 1, got 2.0"),
    ("softmax_scale", 1e39, r"softmax_scale: .* that fp32 can hold .*, got 1e\+39"),
    ("softmax_scale", -1e-39, r"softmax_scale: .* that fp32 can hold .*, got -1e-39"),
    ("softcap", 1e39, r"softcap: expected a finite number > 0 that fp32 can hold .*, got 1e\+39"),
    ("softcap", 1e-39, r"softcap: .* that fp32 can hold .*, got 1e-39"),
    ("softcap", 0.0, r"softcap: expected a finite number > 0, got 0.0"),
    ("softcap", float("inf"), r"softcap: expected a finite number > 0, got inf"),
    ("sinks", torch.zeros(3), r"sinks: expected float32 \[Hq=4\], got float32 \[3\]"),
    ("sinks", torch.zeros(4).half(), r"sinks: expected float32 \[Hq=4\], got float16"),
    (
        "query_start_loc",
        None,
        r"query_start_loc: expected int32 \[B\+1=4\] with max_query_len > 1",
    ),
    ("query_start_loc", torch.zeros(3).int(), r"query_start_loc: expected int32 \[B\+1=4\], got"),
    ("query_start_loc", torch.zeros(4).long(), r"query_start_loc: expected int32 .*, got int64"),
    ("max_query_len", 0, r"max_query_len: expected an int >= 1, got 0"),
    ("max_query_len", torch.ones(()), r"max_query_len: expected an int >= 1, got float32"),
    ("shard", (0, 2), r"shard: expected a dcp_lab.Shard or None, got \(0, 2\)"),
    (
        "shard",
        Shard(0, 2),
        r"global_seq_lens: expected int32 \[B=3\] with shard and max_query_len > 1",
    ),
    (
        "global_seq_lens",
        torch.zeros(3).long(),
        r"global_seq_lens: expected int32 \[B=3\], got int64",
    ),
    (
        "global_seq_lens",
        torch.zeros(4).int(),
        r"global_seq_lens: expected int32 \[B=3\], got int32",
    ),
    ("num_splits", 0, r"num_splits: expected an int >= 1, got 0"),
    ("num_splits", True, r"num_splits: expected an int >= 1, got True"),
    ("out", torch.zeros(5, 4, 32), r"out: expected float32 \[T=5, Hq=4, Dv=16\], got float32"),
    ("out", torch.zeros(5, 4, 16).half(), r"out: expected float32 .*, got float16"),
    ("out", torch.zeros(5, 16, 4).mT, r"out: expected a contiguous last dimension"),
    ("out", torch.zeros(5, 1, 16).expand(5, 4, 16), r"out: expected elements that do not share"),
    ("out", torch.zeros(200).as_strided((5, 4, 16), (16, 8, 1)), r"out: .*strides \(16, 8, 1\)"),
    ("lse", torch.zeros(5, 1).expand(5, 4), r"lse: expected elements that do not share memory"),
    ("lse", torch.zeros(4, 5), r"lse: expected float32 \[T=5, Hq=4\], got float32 \[4, 5\]"),
    ("lse", torch.zeros(5, 4).double(), r"lse: expected float32 \[T=5, Hq=4\], got float64"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_arguments_are_refused(name: str, value: object, message: str) -> None:
    """A bad argument is named, with what was expected and what was given."""
    with pytest.raises(ValueError, match=message):
        check_decode_arguments(**arguments(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("out", torch.zeros(5, 8, 32)[:, ::2, :16]),
        ("out", torch.zeros(4, 5, 16).transpose(0, 1)),
        ("lse", torch.zeros(4, 5).T),
        ("lse", torch.zeros(5, 9)[:, ::2][:, :4]),
    ],
)
def test_gaps_and_other_orders_are_taken(name: str, value: torch.Tensor) -> None:
    """A result may be part of a larger tensor, or lie heads first."""
    check_decode_arguments(**arguments(**{name: value}))


def test_one_row_a_request_without_query_start_loc() -> None:
    """Without query_start_loc there are as many rows as requests."""
    given = {**single(), "q": torch.zeros(5, 4, 32)}
    with pytest.raises(ValueError, match=r"q: expected one token a request, T = B = 3, without q"):
        check_decode_arguments(**given)


def test_a_window_under_a_shard_needs_global_lengths() -> None:
    """A window counts global positions, so one query token needs global_seq_lens too."""
    with pytest.raises(
        ValueError, match=r"global_seq_lens: .* with shard and sliding_window, got"
    ):
        check_decode_arguments(**single(shard=Shard(0, 2)), sliding_window=4)


FP8 = {
    "k_cache": torch.zeros(6, 8, 2, 32).to(torch.float8_e4m3fn),
    "v_cache": torch.zeros(6, 8, 2, 16).to(torch.float8_e4m3fn),
}
SHUFFLED = {
    "kv_layout": "SHUFFLE",
    "k_cache": torch.zeros(6, 2, 8, 8, 4),
    "v_cache": torch.zeros(6, 2, 2, 16, 4),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": 0.5}, r"k_scale: expected None with a float32 cache, got 0.5"),
        ({**FP8, "v_scale": 0.0}, r"v_scale: expected a finite number > 0, got 0.0"),
        ({**FP8, "k_scale": torch.ones(3)}, r"k_scale: .* 1 element or \[Hkv=2\], got float32"),
        ({**FP8, "k_scale": torch.ones(2).half()}, r"k_scale: expected float32, got float16"),
        ({**FP8, "v_cache": torch.zeros(6, 8, 2, 16)}, r"v_cache: expected float8_e4m3fn .*"),
        ({**SHUFFLED, "k_cache": torch.zeros(6, 8, 2, 32)}, r"k_cache: .*\[P, Hkv, D/x, page, x"),
        ({**SHUFFLED, "k_cache": torch.zeros(6, 2, 4, 8, 8)}, r"k_cache: expected x = .* = 4 as"),
        ({**SHUFFLED, "k_cache": torch.zeros(6, 2, 8, 6, 4)}, r"page_size .* multiple of x=4"),
        ({**SHUFFLED, "k_cache": torch.zeros(6, 2, 4, 8, 4)}, r"head_dim 32 as D/x \* x, got"),
        ({**SHUFFLED, "v_cache": torch.zeros(6, 2, 8, 2, 4)}, r"v_cache: .*page/x=2, Dv, x=4\]"),
    ],
)
def test_fp8_and_shuffled_caches_are_checked(changes: dict, message: str) -> None:
    """A scale belongs to an fp8 cache, and SHUFFLE has its own shapes."""
    with pytest.raises(ValueError, match=message):
        check_decode_arguments(**arguments(**changes))


def test_sizes_of_a_shuffled_cache() -> None:
    """Sizes and strides of SHUFFLE are those of the tokens it holds."""
    a = check_decode_arguments(**arguments(**SHUFFLED))
    assert (a.num_kv_heads, a.page_size, a.head_dim, a.head_dim_v, a.chunk) == (2, 8, 32, 16, 4)
    assert a.k_strides == (512, 4, 256, 32) and a.v_strides == (256, 64, 128, 4)


def test_sinks_count_on_rank_0() -> None:
    """Every rank is given the sinks; a rank other than 0 has none."""
    given = {**single(), "sinks": torch.zeros(4)}
    assert check_decode_arguments(**given).sinks is given["sinks"]
    assert check_decode_arguments(**given, shard=Shard(0, 2)).sinks is given["sinks"]
    assert check_decode_arguments(**given, shard=Shard(1, 2)).sinks is None
    with pytest.raises(ValueError, match="sinks: expected float32"):
        check_decode_arguments(**{**given, "sinks": torch.zeros(3)}, shard=Shard(1, 2))


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
def test_a_window_longer_than_any_request_is_none(window: int) -> None:
    """What int32 cannot count bounds nothing, so a shard needs no global lengths for it."""
    a = check_decode_arguments(**single(shard=Shard(0, 2)), sliding_window=window)
    assert a.sliding_window is None
    assert check_decode_arguments(**single(), sliding_window=2**31 - 2).sliding_window == 2**31 - 2


def test_no_device_value_is_read() -> None:
    """On the meta device, whose tensors have no values, everything is checked all the same."""
    given = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in arguments().items()
    }
    a = check_decode_arguments(**given)
    assert a.num_tokens == 5
