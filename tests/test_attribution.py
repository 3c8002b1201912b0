"""The account of the 4x: headline numbers from the tables, and each formula on made-up numbers."""

from __future__ import annotations

import pandas as pd
import pytest

from dcp_lab.analysis import attribution, tables
from dcp_lab.bench.hardware import H200, MI300X, MI355X, Accelerator, Figure

STUDY1 = attribution.Step()


@pytest.fixture(scope="module")
def serve() -> pd.DataFrame:
    """Study 1."""
    return tables.published_serve()


@pytest.fixture(scope="module")
def vllm() -> pd.DataFrame:
    """The H200 engine runs."""
    return tables.measured_vllm()


@pytest.fixture(scope="module")
def peers() -> pd.DataFrame:
    """The peers' gather group, side by side."""
    return attribution.peer_paths(tables.measured_peers())


def made_up_serve(tpot: dict[tuple[int, str], float]) -> pd.DataFrame:
    """A table like study 1's, with these TPOTs and ITLs the same."""
    lengths = {1: (2000, 1000), 2: (1000, 4000)}
    return pd.DataFrame(
        [
            {
                "setting": setting,
                "input_len": lengths[setting][0],
                "output_len": lengths[setting][1],
                "variant": variant,
                "metric": name,
                "value": value,
            }
            for (setting, variant), value in tpot.items()
            for name in (attribution.MEAN_TPOT, attribution.MEDIAN_ITL)
        ]
    )


@pytest.mark.parametrize(
    ("input_len", "output_len", "mean"), [(2000, 1000, 2500), (1000, 4000, 3000)]
)
def test_mean_context_is_half_way_through_the_output(input_len, output_len, mean):
    """The mean over a request's steps, counted step by step, within one token."""
    steps = [input_len + done for done in range(output_len)]
    assert attribution.mean_decode_context(input_len, output_len) == mean
    assert sum(steps) / len(steps) == pytest.approx(mean, abs=1)


def test_added_time_of_study_1(serve):
    """63.1 ms at a mean context of 2,500 and 62.8 ms at 3,000: 4.1x and 4.2x."""
    added = attribution.added_time(serve)
    assert added.context_tokens.tolist() == [2500, 3000]
    assert added.added_ms.tolist() == pytest.approx([63.12, 62.76])
    assert added.ratio.tolist() == pytest.approx([4.12, 4.20], abs=0.005)


def test_added_time_takes_any_metric_and_baseline(serve):
    """Median ITL against DCP 1 under PIECEWISE tells the same."""
    added = attribution.added_time(serve, name=attribution.MEDIAN_ITL, baseline="dcp1_piecewise")
    assert added.added_ms.tolist() == pytest.approx([82.46 - 19.19, 81.90 - 19.20])


def test_unknown_metric_is_refused_with_the_known_ones(serve):
    """A metric that the study did not report is named, with those it did."""
    with pytest.raises(ValueError, match=r"expected one of .*Mean TPOT \(ms\).*got 'TPOT'"):
        attribution.metric(serve, "TPOT")


def test_allowance_is_the_largest_gap_between_the_dcp_1_runs(serve):
    """19.44 against 19.20 ms of median ITL: 1.23 %."""
    assert attribution.run_allowance(serve) == pytest.approx((19.44 - 19.20) / 19.44)


def test_study_1_does_not_grow_with_context(serve):
    """The change is inside the allowance; if all were proportional it would be 12.6 ms."""
    growth = attribution.context_growth(serve)
    assert growth.change_ms == pytest.approx(-0.36)
    assert abs(growth.change_ms) < growth.allowance_ms < growth.proportional_ms / 8
    assert growth.proportional_ms == pytest.approx(63.12 * 0.2)
    assert growth.per_1000_ms == pytest.approx(-0.72)
    assert growth.per_1000_allowance_ms == pytest.approx(2 * growth.allowance_ms)
    assert 0.05 < growth.share_high < 0.10


def test_growth_of_a_cost_that_is_proportional_is_seen():
    """Added time in proportion to the context, no spread between runs: the share is 1."""
    tpot = {(s, v): 20.0 for s in (1, 2) for v in ("dcp1_full", "dcp1_piecewise")}
    growth = attribution.context_growth(
        made_up_serve({**tpot, (1, "dcp2"): 45.0, (2, "dcp2"): 50.0})
    )
    assert growth.change_ms == pytest.approx(growth.proportional_ms) == pytest.approx(5.0)
    assert growth.per_1000_ms == pytest.approx(10.0)
    assert growth.share_high == pytest.approx(1.0)


def test_spread_between_runs_widens_the_bound():
    """With 1 % between the DCP 1 runs, the bound is the root of the four runs' squares."""
    tpot = {(s, "dcp1_full"): 20.0 for s in (1, 2)} | {(s, "dcp1_piecewise"): 20.2 for s in (1, 2)}
    growth = attribution.context_growth(
        made_up_serve({**tpot, (1, "dcp2"): 80.0, (2, "dcp2"): 80.0})
    )
    assert growth.allowance_ms == pytest.approx(0.01 * (2 * (20**2 + 80**2)) ** 0.5)
    assert growth.share_high == pytest.approx(growth.allowance_ms / 12.0)


def test_an_added_time_that_shrinks_gives_no_negative_share():
    """A share is never below 0."""
    tpot = {(s, v): 20.0 for s in (1, 2) for v in ("dcp1_full", "dcp1_piecewise")}
    growth = attribution.context_growth(
        made_up_serve({**tpot, (1, "dcp2"): 80.0, (2, "dcp2"): 70.0})
    )
    assert growth.share_high == 0.0


def test_growth_needs_two_contexts(serve):
    """One setting alone says nothing about growth."""
    with pytest.raises(ValueError, match=r"two settings with different contexts, got \[2500.0\]"):
        attribution.context_growth(serve[serve.setting == 1])


def test_gather_bytes_are_under_one_percent_of_study_1(serve):
    """At 2,500 tokens 1.93 GB a step: 0.24 to 0.34 ms on MI355X, under 1 % on every machine."""
    floor = attribution.gather_floor(STUDY1, 2500, (MI355X, MI300X, H200), added_ms=63.12)
    assert floor.bytes.tolist() == [94 * 2 * 10_240_000] * 3
    mi355x = floor.loc["AMD Instinct MI355X"]
    assert (mi355x.low_ms, mi355x.high_ms) == (
        pytest.approx(0.2406, abs=1e-4),
        pytest.approx(0.3438, abs=1e-4),
    )
    assert (floor.low_share < floor.high_share).all()
    assert floor.high_share.max() < 0.01
    assert "vendor" in mi355x.sources and "rocm-systems#8480" in mi355x.sources


def test_gather_floor_follows_context_and_ranks():
    """Twice the context is twice the time, twice the ranks half of it."""
    one = attribution.gather_floor(STUDY1, 2500, (H200,), added_ms=1.0).low_ms.iloc[0]
    two = attribution.gather_floor(STUDY1, 5000, (H200,), added_ms=1.0).low_ms.iloc[0]
    four = attribution.Step(ranks=4)
    less = attribution.gather_floor(four, 2500, (H200,), added_ms=1.0).low_ms.iloc[0]
    assert two == pytest.approx(2 * one) == pytest.approx(4 * less)


def test_h200_engine_without_a_gather(vllm):
    """3.7x under PIECEWISE, 1.7x and 1.8x under full graphs, 46 and 562 us a layer added."""
    modes = attribution.engine_modes(vllm)
    assert set(modes.gathers_kv) == {"no"}
    piecewise = modes.loc[(2, "a2a", "PIECEWISE")]
    assert piecewise.ratio == pytest.approx(3.74, abs=0.005)
    assert piecewise.added_us_per_layer == pytest.approx(562, abs=0.5)
    full = modes.loc[(2, "a2a", "FULL_AND_PIECEWISE")]
    assert (full.ratio, full.added_us_per_layer) == (
        pytest.approx(1.69, abs=0.005),
        pytest.approx(45.9, abs=0.05),
    )
    assert modes.loc[(2, "ag_rs", "FULL_AND_PIECEWISE")].ratio == pytest.approx(1.85, abs=0.005)
    assert (modes.loc[1].added_ms == 0).all()


def test_no_gather_account_adds_up(vllm):
    """What full graphs remove and what they leave is all that PIECEWISE adds: 92 % and 8 %."""
    account = attribution.no_gather_account(vllm)
    assert account.added_ms == pytest.approx(72.1 - 19.26)
    assert account.full_ms == pytest.approx(10.52 - 6.21)
    assert account.removed_ms + account.full_ms == pytest.approx(account.added_ms)
    assert account.removed_share == pytest.approx(0.918, abs=5e-4)
    assert account.ratio == pytest.approx(72.1 / 19.26)


def test_no_gather_account_refuses_a_gather_and_a_missing_run(vllm):
    """A run that gathers would falsify the account; ag_rs was not run under PIECEWISE."""
    with pytest.raises(ValueError, match=r"expected runs without a gather, got \['yes'\]"):
        attribution.no_gather_account(vllm.assign(gathers_kv="yes"))
    with pytest.raises(ValueError, match="expected one run in both modes, got 'ag_rs'"):
        attribution.no_gather_account(vllm, reducer="ag_rs")


def test_study_2_gain_of_full_graphs():
    """148 to 40 ms: 3.7x, 108 ms, 1.16 ms for each of 93 layers."""
    gain = attribution.graph_gain(tables.published_graph_modes())
    assert (gain.ratio, gain.saved_ms) == (pytest.approx(3.7), 108)
    assert gain.saved_us_per_layer == pytest.approx(1161, abs=0.5)


def test_peer_paths_compare_with_the_best_paged_row(peers):
    """extra_us is over the fastest FlashAttention 3 on pages, in the same mode."""
    graph = peers[peers["mode"] == "graph"].set_index("label")
    assert set(graph.paged_us) == {14.44}
    assert graph.extra_us["per_token gather, then FA3"] == pytest.approx(36.55 - 14.44)
    assert graph.extra_us["FA3, paged, planned, 32 splits"] == 0
    eager = peers[peers["mode"] == "eager"].set_index("label")
    assert eager.low_us["FA3, paged, planned"] == 73.2
    assert eager.high_us["FA3, paged, planned"] == 109.3
    assert (peers.low_us <= peers.median_us).all() and (peers.median_us <= peers.high_us).all()


@pytest.mark.parametrize(("spread", "share"), [(0.05, 0.449), (0.10, 0.93)])
def test_the_bound_is_as_loose_as_the_runs_spread(spread, share):
    """A spread of the runs that is larger than the DCP 1 pairs' bounds the growing share less."""
    serve = tables.published_serve()
    found = attribution.context_growth(serve, spread=spread)
    assert found.share_high == pytest.approx(share, abs=0.005)
    assert found.allowance_ms == pytest.approx(
        attribution.context_growth(serve).allowance_ms * spread / attribution.run_allowance(serve)
    )


def test_the_attend_is_named_by_its_launches():
    """Two launches gather and attend; a third merges what a split attend left."""
    assert attribution.attend_of(attribution.decode_paths(decode_rows(launches=2))) == "unsplit"
    assert attribution.attend_of(attribution.decode_paths(decode_rows(launches=3))) == "split"
    with pytest.raises(ValueError, match="expected gather rows with their launches"):
        attribution.attend_of(attribution.decode_paths(decode_rows(launches=None)))


def test_gather_on_an_h200_is_a_few_ms_a_step(peers):
    """In a graph 0.8 to 2.1 ms for 94 layers, eager 3.6 to 3.8 ms."""
    cost = attribution.gather_cost(peers, STUDY1, 2500, H200)
    assert cost.graph_low_ms == pytest.approx(94 * (22.80 - 14.44) / 1e3)
    assert cost.graph_high_ms == pytest.approx(94 * (36.55 - 14.44) / 1e3)
    assert (cost.eager_low_ms, cost.eager_high_ms) == (
        pytest.approx(94 * (111.3 - 73.2) / 1e3),
        pytest.approx(94 * (113.6 - 73.2) / 1e3),
    )
    # 32,768 tokens of 512 bytes, written and read, at the peak and at the copy's bandwidth.
    assert cost.bytes_low_ms == pytest.approx(94 * 33.554432e6 / 4800e6)
    assert cost.bytes_high_ms == pytest.approx(94 * 33.554432e6 / 4286e6)
    assert (cost.gpu, cost.shape, cost.covers) == ("NVIDIA H200", "16 x 2048", True)


def decode_rows(**changes) -> pd.DataFrame:
    """Rows like the lab's decode bench: three ways, two modes, one shape."""
    ways = {
        ("paged_decode", "planned"): (10.0, 30.0),
        ("gather_decode", "per_token"): (25.0, 60.0),
        ("gather_decode", "per_page"): (18.0, 62.0),
        ("sdpa", "contiguous"): (40.0, 45.0),
        ("read_pages", "floor"): (6.0, 12.0),
        ("plan", "planned"): (3.0, 9.0),
    }
    common = {
        "date_utc": "2026-11-29T12:00:00Z",
        "gpu": "NVIDIA H200",
        "requests": 16,
        "context_tokens": 2048,
        "num_q_heads": 16,
        "num_kv_heads": 1,
        "head_dim": 128,
        "page_size": 16,
        "kv_dtype": "bfloat16",
        "lengths": "equal",
        "host_us": None,
        "launches": 1,
        **changes,
    }
    return pd.DataFrame(
        [
            {
                **common,
                "op": op,
                "variant": variant,
                "mode": mode,
                "median_us": median,
                "p10_us": median - 1,
                "p90_us": median + 1,
            }
            for (op, variant), medians in ways.items()
            for mode, median in zip(("graph", "eager"), medians, strict=True)
        ]
    )


def test_decode_paths_have_the_same_columns_as_the_peers(peers):
    """Both sources draw and account alike; what is no way to attend is left out."""
    paths = attribution.decode_paths(decode_rows())
    assert list(paths.columns) == list(peers.columns)
    assert set(paths.path) == {"paged", "gather", "contiguous", "read"}
    extra = paths.set_index(["mode", "label"]).extra_us
    assert extra["graph", "per_token gather, then attend"] == 15.0
    assert extra["eager", "per_page gather, then attend"] == 32.0


def test_a_later_run_replaces_the_rows_of_an_earlier_one():
    """Of two rows of a kind the later one stands, wherever it lies in the file."""
    later = decode_rows(date_utc="2026-12-01T00:00:00Z").assign(
        median_us=lambda f: f.median_us / 2
    )
    for order in ([later, decode_rows()], [decode_rows(), later]):
        paths = attribution.decode_paths(pd.concat(order, ignore_index=True))
        assert len(paths) == 10
        assert set(paths[paths["mode"] == "graph"].paged_us) == {5.0}


@pytest.mark.parametrize(
    ("context_tokens", "shape"),
    [
        pytest.param(2048, (16, 1024), id="just enough"),
        pytest.param(2500, (16, 2048), id="the next larger one"),
        pytest.param(8192, (16, 4096), id="as many tokens: nearest requests"),
        pytest.param(100_000, (16, 4096), id="none is enough: the largest"),
        pytest.param(0, (16, 1024), id="no context: the smallest"),
    ],
)
def test_covering_shape(context_tokens, shape):
    """The smallest measured shape that holds a rank's tokens, in both modes, and no other rows."""
    rows = pd.concat(
        [
            decode_rows(context_tokens=1024),
            decode_rows(),
            decode_rows(requests=64, context_tokens=1024),
            decode_rows(context_tokens=4096),
            decode_rows(context_tokens=1250, lengths="uneven"),
            decode_rows(context_tokens=1250, num_kv_heads=8),
            decode_rows(context_tokens=1250, kv_dtype="float8_e4m3fn"),
        ]
    )
    found = attribution.covering_shape(attribution.decode_paths(rows), STUDY1, context_tokens)
    assert set(zip(found.requests, found.context_tokens, strict=True)) == {shape}
    assert len(found) == 10
    assert set(found.lengths) == {"equal"} and set(found.num_kv_heads) == {1}


def test_a_shape_that_does_not_cover_says_so(peers):
    """At 8,192 tokens a rank holds more than the peers were measured with."""
    assert not attribution.gather_cost(peers, STUDY1, 8192, H200).covers


def test_missing_shapes_and_rows_are_refused(peers):
    """No comparable shape, and no gather row in a mode, are told apart."""
    with pytest.raises(ValueError, match="num_kv_heads=3, head_dim=128 and 2-byte KV, got none"):
        attribution.covering_shape(peers, attribution.Step(num_kv_heads=3), 2500)
    rows = decode_rows()
    for without in ("gather", "paged"):
        paths = attribution.decode_paths(rows[~rows.op.str.startswith(without)])
        with pytest.raises(ValueError, match="expected paged and gather rows in mode graph"):
            attribution.gather_cost(paths, STUDY1, 2500, H200)


def test_waterfall_adds_up(peers):
    """Explained low plus open high, and explained high plus open low, are the added time."""
    floor = attribution.gather_floor(STUDY1, 2500, (MI355X, MI300X), added_ms=63.12)
    cost = attribution.gather_cost(peers, STUDY1, 2500, H200)
    parts = attribution.waterfall(floor, cost, added_ms=63.12)
    explained = parts[parts.state == "explained"]
    rest = parts.loc["open"]
    assert explained.low_ms.sum() + rest.high_ms == pytest.approx(63.12)
    assert explained.high_ms.sum() + rest.low_ms == pytest.approx(63.12)
    assert parts.basis.tolist() == ["modelled", "measured", "measured", "published"]
    assert parts.hardware.tolist() == [
        "MI355X to MI300X",
        "NVIDIA H200",
        "NVIDIA H200",
        "AMD, not stated",
    ]
    assert rest.low_ms > 0.9 * 63.12


def test_waterfall_by_hand():
    """1 to 2 ms of bytes, 3 - 2.5 to 8 - 2 ms of kernels, 4 to 5 ms of launches, of 20 ms."""
    cost = attribution.GatherCost(
        graph_low_ms=3.0,
        graph_high_ms=8.0,
        eager_low_ms=4.0,
        eager_high_ms=5.0,
        bytes_low_ms=2.0,
        bytes_high_ms=2.5,
        gpu="G",
        shape="1 x 1",
        covers=True,
    )
    fast = Accelerator(
        "A", "a", 1, (Figure("peak", 2000, "vendor", "s"), Figure("x", 1000, "published", "s"))
    )
    step = attribution.Step(
        requests=1, ranks=1, layers=1, num_kv_heads=1, head_dim=1, kv_itemsize=1
    )
    floor = attribution.gather_floor(step, 500e6, (fast,), added_ms=20.0)
    # The published path's kernels count where they are the most, and lower nothing.
    for extra, kernels in ((3.0, 6.0), (9.0, 8.5)):
        published = attribution.PublishedGather(extra, 0.5, 1, H200)
        parts = attribution.waterfall(floor, cost, published, added_ms=20.0)
        assert parts.low_ms.tolist() == pytest.approx([1.0, 0.5, 4.0, 20 - 2 - kernels - 5])
        assert parts.high_ms.tolist() == pytest.approx([2.0, kernels, 5.0, 20 - 1 - 0.5 - 4])


def stack_rows(**changes) -> pd.DataFrame:
    """Rows like bench stack's: GPU time 1 ms paged, 1 ms + 0.01 ms a token published."""
    common = {
        "num_layers": 94,
        "kv_layers": 94,
        "num_kv_heads": 1,
        "head_dim": 128,
        "requests": 16,
        "dense": "light",
        "dcp_size": 1,
        "launch_delay_us": 0.0,
        "bound": False,
        "mode": "piecewise",
        **changes,
    }
    return pd.DataFrame(
        [
            {
                "context_tokens": tokens,
                "attention": attention,
                "gpu_busy_ms": 1.0 + slope * tokens,
                **common,
            }
            for tokens in (100, 200, 400)
            for attention, slope in (("paged", 0.0), ("published", 0.01))
        ]
    )


def test_published_kernels_by_hand():
    """On a rank with half of 300 tokens: 1.5 ms, and as many compute units' share of it."""
    found = attribution.published_gather(stack_rows(), STUDY1, 300, H200)
    assert (found.extra_ms, found.rank_tokens) == (pytest.approx(1.5), 150)
    assert found.bytes_low_ms == pytest.approx(STUDY1.gather_bytes(300) / 4800e6)
    half = Accelerator("A", "a", 2 * H200.compute_units, H200.memory)
    assert found.scaled_ms(half) == pytest.approx(0.75)
    assert found.scaled_ms(H200) == found.extra_ms


@pytest.mark.parametrize(
    "other",
    [
        {"dense": "heavy"},
        {"dcp_size": 2},
        {"launch_delay_us": 10.0},
        {"bound": True},
        {"requests": 64},
        {"kv_layers": 24},
        {"head_dim": 576},
    ],
    ids=str,
)
def test_other_steps_are_left_out(other):
    """Rows of other work stand for nothing here, alone or beside the right ones."""
    wrong = stack_rows(**other).assign(gpu_busy_ms=1e6)
    rows = pd.concat([wrong, stack_rows(), wrong], ignore_index=True)
    assert attribution.step_gpu_time(rows, STUDY1).equals(
        attribution.step_gpu_time(stack_rows(), STUDY1)
    )
    with pytest.raises(ValueError, match="expected profiled rows without DCP of 94 layers"):
        attribution.step_gpu_time(wrong, STUDY1)


def test_published_kernels_are_not_extrapolated():
    """Outside the measured contexts, and without a path's rows, there is no answer."""
    for context in (199, 801):
        with pytest.raises(ValueError, match=r"2 x a measured context \(100, 200, 400\)"):
            attribution.published_gather(stack_rows(), STUDY1, context, H200)
    rows = stack_rows()
    with pytest.raises(ValueError, match="got no published"):
        attribution.published_gather(rows[rows.attention == "paged"], STUDY1, 300, H200)


def test_the_published_kernels_against_study_1(serve):
    """About 19 ms at an H200's price; their growth to 3,000 tokens is more than study 1 allows."""
    stack = tables.measured("stack_h200")
    short, long = (attribution.published_gather(stack, STUDY1, c, H200) for c in (2500, 3000))
    extra_1024, extra_2500 = 20.9201 - (5.3 + 5.3076) / 2, 43.9623 - 5.6624
    by_hand = extra_1024 + (extra_2500 - extra_1024) * (1250 - 1024) / (2500 - 1024)
    assert short.extra_ms == pytest.approx(by_hand, abs=0.001)
    assert short.scaled_ms(MI355X) == pytest.approx(by_hand * 132 / 256, abs=0.001)
    growth = attribution.context_growth(serve)
    most = growth.change_ms + growth.allowance_ms
    for machine in (H200, MI355X, MI300X):
        assert long.scaled_ms(machine) - short.scaled_ms(machine) > most > 0


def test_a_whole_step_in_a_full_graph():
    """The best gather adds 1.1 ms, the published one 38.7 and two launches a layer."""
    stack = tables.measured("stack_h200")
    modes = attribution.step_modes(stack, block="base", requests=16, context_tokens=2500)
    full, piecewise = modes.loc["full"], modes.loc["piecewise"]
    assert full.median_ms.per_page - full.median_ms.paged == pytest.approx(8.2494 - 7.1474)
    assert full.median_ms.published_no_sync - full.median_ms.paged == pytest.approx(38.7265)
    launches = piecewise.kernel_launches
    # As many more as the FA3 rows launch whose eager time stands for the published path's.
    assert launches.published - launches.paged == 2 * 94
    assert piecewise.host_syncs.published == 94
    with pytest.raises(ValueError, match="expected rows of block 'none'"):
        attribution.step_modes(stack, block="none", requests=16, context_tokens=2500)


def test_a_bound_call_does_not_stand_for_the_paged_way():
    """The gather's rows are unbound calls: a bound paged call would make a gather look worse."""
    rows = decode_rows()
    bound = rows[rows.op == "paged_decode"].assign(variant="bound", median_us=1.0, p10_us=0.5)
    paths = attribution.decode_paths(pd.concat([rows, bound], ignore_index=True))
    assert not paths.label.str.contains("bound").any()
    assert paths.equals(attribution.decode_paths(rows))


def test_the_shape_with_the_steps_query_heads_is_taken():
    """Of shapes with as many tokens and requests, the one with the nearest query heads."""
    rows = pd.concat([decode_rows(num_q_heads=heads) for heads in (8, 16, 64)], ignore_index=True)
    paths = attribution.decode_paths(rows)
    for heads in (8, 16, 64):
        step = attribution.Step(num_q_heads=heads)
        assert set(attribution.covering_shape(paths, step, 2500).num_q_heads) == {heads}


def test_launches_of_another_table():
    """GPU time spans both tables; wall time is the second's alone."""
    one = attribution.GatherCost(3.0, 6.0, 50.0, 90.0, 0.4, 0.5, "NVIDIA H200", "16 x 2048", True)
    two = attribution.GatherCost(0.8, 2.0, 3.6, 3.8, 0.4, 0.5, "NVIDIA H200", "16 x 2048", True)
    cost = attribution.with_launches_of(one, two)
    assert (cost.graph_low_ms, cost.graph_high_ms) == (0.8, 6.0)
    assert (cost.eager_low_ms, cost.eager_high_ms) == (3.6, 3.8)
    assert cost.covers
