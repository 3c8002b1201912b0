"""The oracle against cases worked by hand, and against properties that attention has."""

from __future__ import annotations

import math

import pytest
import torch

from dcp_lab import AttnState, Shard
from dcp_lab.reference import (
    eager_decode,
    reference_attention,
    reference_decode,
    reference_merge,
)
from dcp_lab.testing import PagedCase, assert_within_budget

LAYOUTS = ["NHD", "HND", "SHUFFLE"]
# 0, 1, page - 1, page, page + 1 and several pages, for pages of 16.
LENS = [0, 1, 15, 16, 17, 50]


def decode(case: PagedCase, **options: object):
    """Run the oracle on a case."""
    return reference_decode(*case.tensors, **case.reference_options(), **options)


def two_tokens(scores: tuple[float, float], values: tuple[float, float]) -> dict:
    """One head, D=1, q = 1, so that a key is its own score (softmax_scale 1)."""
    return {
        "q": torch.ones(1, 1, 1),
        "k": torch.tensor(scores).reshape(2, 1, 1),
        "v": torch.tensor(values).reshape(2, 1, 1),
        "softmax_scale": 1.0,
    }


def test_two_tokens_by_hand() -> None:
    """Scores ln 2 and ln 8 weigh 0.2 and 0.8, and their LSE is ln 10."""
    out, lse = reference_attention(**two_tokens((math.log(2), math.log(8)), (0.0, 1.0)))
    assert out.item() == pytest.approx(0.8, abs=1e-7)
    assert lse.item() == pytest.approx(math.log(10), abs=1e-7)
    assert out.dtype == lse.dtype == torch.float64


def test_softcap_by_hand() -> None:
    """Scores are capped before the softmax: 2 tanh(s / 2)."""
    out, lse = reference_attention(**two_tokens((1.0, 3.0), (0.0, 1.0)), softcap=2.0)
    a, b = 2 * math.tanh(0.5), 2 * math.tanh(1.5)
    assert lse.item() == pytest.approx(math.log(math.exp(a) + math.exp(b)), abs=1e-12)
    assert out.item() == pytest.approx(1 / (1 + math.exp(a - b)), abs=1e-12)


def test_softcap_comes_before_masking() -> None:
    """A masked score stays -inf: capped after masking it would be -softcap and be seen."""
    arguments = two_tokens((1.0, 3.0), (5.0, 1.0))
    _, lse = reference_attention(**arguments, softcap=2.0, sliding_window=1)
    assert lse.item() == pytest.approx(2 * math.tanh(1.5), abs=1e-12)


def test_sink_by_hand() -> None:
    """A sink of ln 10 beside scores ln 2 and ln 8 halves the output and doubles the sum."""
    sinks = torch.tensor([math.log(10)], dtype=torch.float64)
    arguments = two_tokens((math.log(2), math.log(8)), (0.0, 1.0))
    out, lse = reference_attention(**arguments, sinks=sinks)
    assert out.item() == pytest.approx(0.4, abs=1e-7)
    assert lse.item() == pytest.approx(math.log(20), abs=1e-7)


def test_sliding_window_by_hand() -> None:
    """A window of 1 sees the query's own key only; one of 2 the key before it too."""
    arguments = two_tokens((math.log(2), math.log(8)), (3.0, 1.0))
    out, lse = reference_attention(**arguments, sliding_window=1)
    assert (out.item(), lse.item()) == pytest.approx((1.0, math.log(8)), abs=1e-6)
    out, lse = reference_attention(**arguments, sliding_window=2)
    assert (out.item(), lse.item()) == pytest.approx((1.4, math.log(10)), abs=1e-6)


def test_causal_by_hand() -> None:
    """Of two query rows over two keys the first sees one key and the second sees both."""
    arguments = two_tokens((math.log(2), math.log(8)), (3.0, 1.0))
    arguments["q"] = torch.ones(2, 1, 1)
    out, lse = reference_attention(**arguments)
    assert out.flatten().tolist() == pytest.approx([3.0, 1.4], abs=1e-6)
    assert lse.flatten().tolist() == pytest.approx([math.log(2), math.log(10)], abs=1e-6)


def test_query_heads_share_kv_heads_in_order() -> None:
    """Query head h reads KV head h // (Hq // Hkv)."""
    v = torch.tensor([10.0, 20.0]).reshape(1, 2, 1)
    out, _ = reference_attention(torch.ones(1, 6, 1), torch.ones(1, 2, 1), v)
    assert out.flatten().tolist() == [10, 10, 10, 20, 20, 20]


def test_adding_to_every_score_moves_only_the_lse() -> None:
    """One more dimension with q = 1 and k = c adds c to all scores: lse + c, out unchanged."""
    q, k, v = torch.randn(3, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 5)
    plain = reference_attention(q, k, v, softmax_scale=0.5)
    q = torch.cat([q, torch.ones(3, 4, 1)], -1)
    k = torch.cat([k, torch.full((9, 2, 1), 6.0)], -1)
    moved = reference_attention(q, k, v, softmax_scale=0.5)
    torch.testing.assert_close(moved.out, plain.out)
    torch.testing.assert_close(moved.lse, plain.lse + 3.0)


@pytest.mark.parametrize(
    ("layout", "page_size"),
    # SHUFFLE pages hold a multiple of 16 / itemsize tokens.
    [(layout, p) for layout in LAYOUTS for p in (1, 16, 48) if layout != "SHUFFLE" or p > 1],
)
def test_pages_do_not_matter(layout: str, page_size: int) -> None:
    """Through any pages and layout the result is that of each request's contiguous keys."""
    lens = [1, page_size, page_size + 1, 50]
    case = PagedCase.build(lens, page_size=page_size, kv_layout=layout, head_dim_v=16)
    out, lse = decode(case)
    for b in range(len(lens)):
        alone = reference_attention(case.q[b : b + 1], case.keys[b], case.values[b])
        torch.testing.assert_close(out[b : b + 1], alone.out)
        torch.testing.assert_close(lse[b : b + 1], alone.lse)


@pytest.mark.parametrize("fused", ["pages", "dims"])
def test_views_into_one_tensor_do_not_matter(fused: str) -> None:
    """Strided views of a fused cache give what two caches give."""
    plain, views = PagedCase.build(LENS), PagedCase.build(LENS, fused=fused)
    assert not views.k_cache.is_contiguous()
    assert torch.equal(decode(plain).out, decode(views).out)
    assert torch.equal(decode(plain).lse, decode(views).lse)


def test_nothing_seen_is_zero_and_minus_infinity() -> None:
    """Empty requests and padding rows have out 0 and lse -inf, in any request order."""
    case = PagedCase.build([0, 3, 0], query_lens=[1, 1, 2], padding_rows=2)
    out, lse = decode(case)
    empty = torch.tensor([True, False, True, True, True, True])
    assert torch.equal(lse == -torch.inf, empty[:, None].expand_as(lse))
    assert (out[empty] == 0).all() and not out.isnan().any()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("interleave", [1, 3, 16])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"sliding_window": 7}, id="window"),
        pytest.param({"softcap": 1.5}, id="softcap"),
        pytest.param({"sinks": torch.tensor([0.0, 3.0, -torch.inf, 30.0])}, id="sinks"),
    ],
)
def test_merged_ranks_equal_the_whole(size: int, interleave: int, options: dict) -> None:
    """All ranks' states, merged, are the whole request's: causal bounds, windows and sinks too."""
    whole = PagedCase.build(LENS, query_lens=[1, 1, 3, 0, 2, 4], padding_rows=2)
    ranks = [whole.on_rank(Shard(rank, size, interleave)) for rank in range(size)]
    states = [decode(case, **options) for case in ranks]
    merged = reference_merge([s.out for s in states], [s.lse for s in states])
    expected = decode(whole, **options)
    torch.testing.assert_close(merged.out, expected.out)
    torch.testing.assert_close(merged.lse, expected.lse)


def test_sharded_bounds_of_case_10() -> None:
    """Case 10: with all scores 0 the LSE is the log of how many local tokens a row sees."""
    whole = PagedCase.build([9], query_lens=[4])
    seen = []
    for rank in range(4):
        case = whole.on_rank(Shard(rank, 4))
        lse = decode(case, softmax_scale=0.0).lse
        seen.append([round(math.exp(x)) for x in lse[:, 0].tolist()])
    assert seen == [[2, 2, 2, 3], [2, 2, 2, 2], [1, 2, 2, 2], [1, 1, 2, 2]]


def test_sink_is_something_seen_but_not_by_padding() -> None:
    """Case 12: without keys, a request has out 0 and on rank 0 lse = sink; padding stays -inf."""
    sinks = torch.tensor([-torch.inf, 0.0, 30.0, 1.0])
    whole = PagedCase.build([0, 5], query_lens=[1, 1], padding_rows=1)
    for rank in range(4):
        out, lse = decode(whole.on_rank(Shard(rank, 4)), sinks=sinks)
        expected = sinks if rank == 0 else torch.full((4,), -torch.inf)
        assert torch.equal(lse[0], expected.double())
        assert (out[0] == 0).all()
        assert (lse[2] == -torch.inf).all() and (out[2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize(
    "per_head", [pytest.param(False, id="float"), pytest.param(True, id="per-head")]
)
def test_fp8_scales(dtype: torch.dtype, per_head: bool) -> None:
    """Case 9: value = stored * scale; k_scale moves the LSE, v_scale only out."""
    case = PagedCase.build([20])
    k_scale, v_scale = 0.5, 2.0
    k8, v8 = (case.k_cache / k_scale).to(dtype), (case.v_cache / v_scale).to(dtype)
    if per_head:
        k_scale, v_scale = torch.tensor([0.5, 0.25]), torch.tensor([2.0, 4.0])
    stored = (case.q, k8, v8, case.block_table, case.seq_lens)
    got = reference_decode(*stored, k_scale=k_scale, v_scale=v_scale)
    heads = torch.as_tensor(k_scale).reshape(-1, 1), torch.as_tensor(v_scale).reshape(-1, 1)
    plain = (case.q, k8.float() * heads[0], v8.float() * heads[1], case.block_table, case.seq_lens)
    expected = reference_decode(*plain)
    torch.testing.assert_close(got, expected)
    without = reference_decode(*stored, k_scale=k_scale)
    assert torch.equal(got.lse, without.lse) and not torch.equal(got.out, without.out)
    assert not torch.equal(got.lse, reference_decode(*stored).lse)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_eager_is_near_and_has_the_right_dtypes(dtype: torch.dtype, seed: int) -> None:
    """The yardstick computes the same thing, with an error of the size of its dtype's rounding."""
    case = PagedCase.build(LENS, query_lens=[1, 1, 3, 0, 2, 4], dtype=dtype, seed=seed)
    eager = eager_decode(*case.tensors, **case.reference_options())
    exact = decode(case)
    assert eager.out.dtype == dtype and eager.lse.dtype == torch.float32
    assert torch.equal(eager.lse.isinf(), exact.lse.isinf())
    eps = torch.finfo(dtype).eps
    assert (eager.out - exact.out).abs().max() < 4 * eps
    finite = exact.lse.isfinite()
    assert (eager.lse - exact.lse)[finite].abs().max() < 4 * eps


def test_merge_of_case_1() -> None:
    """Case 1: out 0 and 1 with lse ln 2 and ln 8 merge to 0.8 and ln 10."""
    outs = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1)
    lses = torch.tensor([math.log(2), math.log(8)]).reshape(2, 1, 1)
    out, lse = reference_merge(outs, lses)
    assert out.item() == pytest.approx(0.8, abs=1e-6)
    assert lse.item() == pytest.approx(2.302585, abs=1e-6)


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("junk", [0.0, 7.0, torch.nan, torch.inf], ids=str)
def test_merge_takes_every_mark_of_an_empty_set(empty: float, junk: float) -> None:
    """Case 2: -inf, +inf and NaN in lse mean empty, and out beside them does not count."""
    outs, lses = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)
    expected = reference_merge(outs[[0, 2]], lses[[0, 2]])
    outs[1], lses[1] = junk, empty
    torch.testing.assert_close(reference_merge(outs, lses), expected)
    outs[:], lses[:] = junk, empty
    out, lse = reference_merge(list(outs), list(lses))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_merge_order_does_not_matter() -> None:
    """Merging is a sum: any order and any grouping give the same."""
    outs, lses = torch.randn(4, 2, 3, 5).double(), 10 * torch.randn(4, 2, 3).double()
    all_at_once = reference_merge(outs, lses)
    left, right = reference_merge(outs[:2], lses[:2]), reference_merge(outs[2:], lses[2:])
    grouped = reference_merge([right.out, left.out], [right.lse, left.lse])
    torch.testing.assert_close(grouped, all_at_once)


def test_bad_arguments_are_refused() -> None:
    """The oracle names what it cannot do without."""
    case = PagedCase.build([9], query_lens=[4], shard=Shard(0, 2))
    options = case.reference_options()
    with pytest.raises(ValueError, match="kv_layout: expected one of .*, got 'NDH'"):
        reference_decode(*case.tensors, **{**options, "kv_layout": "NDH"})
    del options["global_seq_lens"]
    with pytest.raises(ValueError, match=r"global_seq_lens: expected integer \[B\] with shard"):
        reference_decode(*case.tensors, **options)


class TestPagedCase:
    """The builder sets the traps that its users rely on."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_unused_slot_is_nan(self, layout: str) -> None:
        """As many numbers are not NaN as the tokens have, and unused table entries are garbage."""
        case = PagedCase.build(LENS, kv_layout=layout, head_dim_v=16)
        tokens = int(case.seq_lens.sum())
        assert int((~case.k_cache.isnan()).sum()) == tokens * 2 * 32
        assert int((~case.v_cache.isnan()).sum()) == tokens * 2 * 16
        used = -(-case.seq_lens // case.page_size)
        unused = torch.arange(case.block_table.shape[1])[None, :] >= used[:, None]
        entries, pages = case.block_table[unused], case.k_cache.shape[0]
        assert ((entries < 0) | (entries >= pages)).all() and unused.any(1).all()
        in_use = case.block_table[~unused]
        assert len(in_use.unique()) == len(in_use) and not torch.equal(in_use, in_use.sort()[0])

    def test_same_tokens_whatever_the_pages(self) -> None:
        """Layout, page size and shard leave q, keys and values as they are."""
        plain = PagedCase.build(LENS, dtype=torch.float16)
        options = {"dtype": torch.float16, "page_size": 4, "kv_layout": "HND"}
        other = PagedCase.build(LENS, shard=Shard(1, 3), **options)
        for a, b in zip([plain.q, *plain.keys], [other.q, *other.keys], strict=True):
            assert torch.equal(a, b)
        assert other.seq_lens.tolist() == Shard(1, 3).local_seq_lens(torch.tensor(LENS)).tolist()

    def test_slot_mapping_finds_the_tokens(self) -> None:
        """Slot s of NHD pages laid end to end holds the token that it names."""
        case = PagedCase.build([5, 0, 20], page_size=4, shard=Shard(1, 2))
        rows = case.k_cache.flatten(0, 1)[case.slot_mapping()]
        held = [k[p] for k, p in zip(case.keys, case.positions, strict=True)]
        assert torch.equal(rows, torch.cat(held))

    def test_bad_arguments_are_refused(self) -> None:
        """The builder names what it cannot build."""
        with pytest.raises(ValueError, match="query_lens: expected with padding_rows=1, got None"):
            PagedCase.build([1], padding_rows=1)
        with pytest.raises(ValueError, match="kv_layout: expected 'NHD', .*, got 'NDH'"):
            PagedCase.build([1], kv_layout="NDH")
        with pytest.raises(ValueError, match="fused: expected 'pages', 'dims' or None, got 'kv'"):
            PagedCase.build([1], fused="kv")


class TestBudget:
    """assert_within_budget fails where it should."""

    @staticmethod
    def states():
        """Reference and eager of a small case with an empty request."""
        case = PagedCase.build([0, 5, 50], dtype=torch.float16)
        eager = eager_decode(*case.tensors)
        return decode(case), eager

    def test_passes_on_eager_and_fails_past_twice_its_error(self) -> None:
        """The yardstick passes, a result further away than the budget does not."""
        reference, eager = self.states()
        assert_within_budget("op", eager, reference, eager)
        eps = torch.finfo(torch.float16).eps
        with pytest.raises(AssertionError, match=r"op: out: error"):
            assert_within_budget("op", eager._replace(out=eager.out + 6 * eps), reference, eager)
        # Small beside the largest value, 1.6 in a short request, but not beside this row's.
        out = eager.out.clone()
        out[2] += 3 * eps
        with pytest.raises(AssertionError, match=r"op: rows of out: error"):
            assert_within_budget("op", eager._replace(out=out), reference, eager)
        wrong = eager._replace(lse=eager.lse + 0.01)
        with pytest.raises(AssertionError, match=r"op: lse: error 0.01"):
            assert_within_budget("op", wrong, reference, eager)

    def test_an_empty_row_has_to_be_empty(self) -> None:
        """-inf has to be -inf, and only where the reference has it; out beside it exactly 0."""
        reference, eager = self.states()
        for row, value in ((0, 0.0), (0, torch.inf), (1, -torch.inf)):
            lse = eager.lse.clone()
            lse[row, 0] = value
            with pytest.raises(AssertionError, match="op: lse: got: 1 infinities not as in ref"):
                assert_within_budget("op", eager._replace(lse=lse), reference, eager)
        out = eager.out.clone()
        out[0, 0, 0] = 1e-6
        with pytest.raises(AssertionError, match="op: rows of out: error"):
            assert_within_budget("op", eager._replace(out=out), reference, eager)

    def test_nan_shape_dtype_and_a_broken_yardstick_fail(self) -> None:
        """NaN, another shape or dtype, and an eager result with infinities never pass."""
        reference, eager = self.states()
        nan = eager.out.clone()
        nan[2, 0, 0] = torch.nan
        inf = eager.out.clone()
        inf[2, 0, 0] = torch.inf
        for got, yardstick, message in (
            (nan, eager.out, "x: 1 of .* are NaN"),
            (eager.out[:2], eager.out, "x: shape"),
            (eager.out.float(), eager.out, "x: torch.float32, eager is torch.float16"),
            (eager.out, inf, "x: eager: 1 infinities"),
        ):
            with pytest.raises(AssertionError, match=message):
                assert_within_budget("x", got, reference.out, yardstick)
        with pytest.raises(AssertionError, match="x: the reference holds NaN"):
            assert_within_budget("x", eager.out, nan.double(), eager.out)

    def test_an_lse_near_zero_has_the_rounding_of_one(self) -> None:
        """An error in lse is a relative error of exp(lse), so eps counts in full near lse = 0."""
        out, eps = torch.zeros(1, 1, 1), torch.finfo(torch.float32).eps
        reference = AttnState(out.double(), torch.full((1, 1), 1e-3).double())
        eager = AttnState(out, torch.full((1, 1), 1e-3))
        near, far = (eager._replace(lse=eager.lse + n * eps) for n in (1.5, 3))
        assert_within_budget("op", near, reference, eager)
        with pytest.raises(AssertionError, match="op: lse: error"):
            assert_within_budget("op", far, reference, eager)

    def test_all_infinite_is_fine(self) -> None:
        """A tensor of nothing but -inf has no error to bound."""
        lse = torch.full((2, 2), -torch.inf)
        assert_within_budget("lse", lse, lse.double(), lse)
