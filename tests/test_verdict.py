"""The verdict: shares that add up, study 1 by the model, what DCP buys, one traced layer."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math

import pytest

from dcp_lab.analysis import (
    engines,
    tables,
    verdict_fit,
    verdict_gain,
    verdict_shares,
    verdict_study,
    verdict_traces,
    what_if,
)
from dcp_lab.analysis.verdict_shares import EXCHANGE, GATHER, MODE, SYNC, shapley
from dcp_lab.bench import costs
from dcp_lab.bench.stack import write_traces

FIT = verdict_fit.h200()
STACK = tables.measured(verdict_fit.TABLE)


# ---- shares --------------------------------------------------------------------------------


def test_a_player_that_adds_alone_gets_what_it_adds():
    """Of independent parts each has its own, whatever may come first."""
    worth = {MODE: 5.0, EXCHANGE: 3.0, GATHER: 2.0, SYNC: 1.0}
    assert shapley(lambda c: 10 + sum(worth[p] for p in c)) == pytest.approx(worth)


def test_what_two_make_together_is_halved():
    """A gain that needs both the mode and the exchange is shared, half each."""
    found = shapley(lambda c: 8.0 if {MODE, EXCHANGE} <= c else 0.0, (MODE, EXCHANGE), {})
    assert found == {MODE: 4.0, EXCHANGE: 4.0}


def test_shares_against_every_order_by_hand():
    """Without needs, the mean over all 24 orders; with them, over the four that can be."""

    def value(c):
        return len(c) ** 2 + (7 if {MODE, GATHER} <= c else 0)

    every = dict.fromkeys(verdict_shares.PLAYERS, 0.0)
    for order in itertools.permutations(verdict_shares.PLAYERS):
        for n, player in enumerate(order):
            every[player] += (value(set(order[: n + 1])) - value(set(order[:n]))) / 24
    assert shapley(value, needs={}) == pytest.approx(every)
    four = verdict_shares.orders(verdict_shares.PLAYERS, verdict_shares.NEEDS)
    assert len(four) == 4 and {order.index(MODE) for order in four} == {0, 1, 2, 3}
    assert len(verdict_shares.coalitions()) == 8


def test_shares_of_the_measured_corners_by_hand():
    """The four orders over the base block's medians."""
    times = verdict_shares.corners(FIT, dense="light")
    assert set(times.basis) == {"measured"}
    none, mode, full, piecewise = 7.4323, 11.9499, 11.3663, 61.8405
    no_sync_full, no_sync, published = 31.9961, 137.1605, 146.9493
    expected = {
        MODE: (
            (mode - none) + (piecewise - full) + (no_sync - no_sync_full)
            + (published - no_sync_full)
        ) / 4,
        EXCHANGE: ((piecewise - mode) + 3 * (full - none)) / 4,
        GATHER: (2 * (no_sync - piecewise) + 2 * (no_sync_full - full)) / 4,
        SYNC: 3 * (published - no_sync) / 4,
    }  # fmt: skip
    found = verdict_shares.shares(times, draws=300, whole=True)
    assert found.share.to_dict() == pytest.approx(expected)
    assert found.share.sum() == pytest.approx(published - none)
    assert ((found.low < found.share) & (found.share < found.high)).all()
    relative = verdict_shares.shares(times, draws=300)
    assert relative.share.sum() == pytest.approx(1)


def test_what_was_not_measured_is_modelled_and_says_so():
    """The heavy dense part has no published row without its sync: the model's stand in."""
    times = verdict_shares.corners(FIT, dense="heavy")
    modelled = times[times.basis == "modelled"]
    assert set(modelled.attention) == {"published_no_sync"} and len(modelled) == 3
    assert (modelled.spread_ms > 0).all()
    with pytest.raises(ValueError, match="expected those of measured rows, got 'light', 77"):
        verdict_shares.corners(FIT, dense="light", context_tokens=77)


def test_a_wider_spread_is_less_certain():
    """Twice the spread of every corner gives about twice the interval."""
    times = verdict_shares.corners(FIT, dense="light")
    one = verdict_shares.shares(times, draws=400, whole=True)
    wide = times.assign(spread_ms=2 * times.spread_ms)
    two = verdict_shares.shares(wide, draws=400, whole=True)
    assert ((two.high - two.low) / (one.high - one.low)).tolist() == pytest.approx([2] * 4)


# ---- study 1 -------------------------------------------------------------------------------

ALONE, SHARED = 20.23, 83.35


@pytest.fixture(scope="module")
def solved() -> list[verdict_study.Study]:
    """Study 1 under every set of constants, the host's pace solved for."""
    return verdict_study.brackets(alone_ms=ALONE, context_tokens=2500, dcp_ms=SHARED)


def test_what_is_taken_from_the_study_is_given_back(solved):
    """The step without DCP and the one with it are the observed ones: no result."""
    assert len(solved) == 8
    for study in solved:
        assert study.ms(mode="full", **verdict_study.NO_DCP) == pytest.approx(ALONE, rel=1e-3)
        assert study.ms(**verdict_study.AS_PUBLISHED) == pytest.approx(SHARED)


def test_what_the_model_predicts_of_study_1(solved):
    """PIECEWISE hides without DCP, nothing grows with the context, full graphs take most away."""
    for study in solved:
        alone = study.ms(mode="piecewise", **verdict_study.NO_DCP)
        assert abs(alone - ALONE) < 0.15
        grown = study.at(3000).ms(**verdict_study.AS_PUBLISHED) - SHARED
        assert abs(grown) < 0.5
        full = study.ms(mode="full", dcp_size=2, attention="paged", reducer="ag_rs")
        assert ALONE < full < ALONE + 5


def test_the_pace_of_another_host_is_a_prediction():
    """With the H200s' host nothing of study 1's DCP run is used: too slow by less than a third."""
    free = verdict_study.study1(
        "MI355X", alone_ms=ALONE, context_tokens=2500, fitted=FIT.constants
    )
    assert free.constants.launch_us == pytest.approx(FIT.constants.launch_us)
    assert SHARED < free.ms(**verdict_study.AS_PUBLISHED) < 1.35 * SHARED


@pytest.mark.parametrize("library", [True, False])
def test_parts_add_up_to_what_dcp_adds(library):
    """All parts are the step with DCP, none of them the step without, and bytes are the least."""
    study = verdict_study.study1(
        "MI355X", alone_ms=ALONE, context_tokens=2500, fitted=FIT.constants, library=library
    )
    case = study.case(**verdict_study.AS_PUBLISHED)
    alone = study.case(mode="piecewise", **verdict_study.NO_DCP)
    parts = verdict_study.added_parts(case, alone, study.constants)
    whole = costs.predict_ms(case, study.constants) - costs.predict_ms(alone, study.constants)
    assert sum(parts.values()) == pytest.approx(whole, abs=0.01)
    assert parts[verdict_study.BYTES] < 0.01 * whole
    assert parts[verdict_study.COLLECTIVES] > 0.25 * whole


def test_parts_of_a_host_that_costs_nothing_are_the_gpus():
    """Without host time only the GPU's parts are left, and they are its kernels' times."""
    constants = what_if.paced(FIT.constants, 1e-6)
    study = dataclasses.replace(
        verdict_study.study1("H200", alone_ms=ALONE, context_tokens=2500, fitted=FIT.constants),
        constants=constants,
    )
    case = study.case(**verdict_study.AS_PUBLISHED)
    alone = study.case(mode="piecewise", **verdict_study.NO_DCP)
    parts = verdict_study.added_parts(case, alone, constants)
    for part in (verdict_study.COLLECTIVES, verdict_study.SMALL, verdict_study.CALLS):
        assert abs(parts[part]) < 0.01
    bytes_ms = 94 * costs.floor_us(2 * case.kv_bytes, constants.memory_gbps) / 1e3
    assert parts[verdict_study.BYTES] == pytest.approx(bytes_ms, rel=0.02)
    # Two collectives with the group's exchange, one for q; four small kernels.
    exchange = 94 * (3 * constants.collective_us + 4 * constants.kernel_us) / 1e3
    assert parts[verdict_study.EXCHANGE_GPU] == pytest.approx(exchange, rel=0.02)


def test_study_2_cannot_price_a_launch():
    """The pace that its step asks for depends on launches that it does not state."""
    few, many = (verdict_study.study2_pace(148, n, FIT.constants) for n in (4, 40))
    assert few > 3 * many
    host = FIT.constants
    layer = host.graph_launch_us + 5 * host.launch_us + 2 * host.collective_launch_us
    other = host.graph_launch_us + 4 * host.launch_us
    assert few == pytest.approx(148e3 / (24 * layer + 69 * other))


def test_solving():
    """The place where a rising function reaches a value; what it never reaches is refused."""
    assert verdict_study.solve(lambda x: x**2, 9, 1, 100) == pytest.approx(3)
    with pytest.raises(ValueError, match="target: expected one between 1 and 4, got 9"):
        verdict_study.solve(lambda x: x**2, 9, 1, 2)


def test_spans():
    """The least and the largest of each number."""
    found = verdict_study.spans([{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 2.0}])
    assert found.loc["a"].tolist() == [1, 3] and found.loc["b"].tolist() == [2, 5]


# ---- what DCP buys -------------------------------------------------------------------------


def test_the_context_from_which_dcp_is_faster():
    """direct between 3,000 and 8,192 tokens of 16 requests, ag_rs beyond what was measured."""
    steps = verdict_gain.full_steps(STACK)
    assert steps.median_ms["direct", 8192] == pytest.approx(8.9904)
    assert verdict_gain.crossing(steps, "direct") == (3000, 8192)
    assert verdict_gain.crossing(steps, "ag_rs") == (32768, math.inf)
    always = steps.copy()
    always.loc["direct"] = 0.1
    assert verdict_gain.crossing(always, "direct") == (0, 1024)


def test_the_modelled_crossing_is_the_measured_one():
    """For 16 requests it lies where it was measured, and with 4x the requests at a quarter."""
    found = verdict_gain.modelled_crossing(FIT.rows, FIT.constants)
    assert 3000 < found.direct[16] < 8192 and found.ag_rs[16] > 16384
    assert found.direct[16] / found.direct[64] == pytest.approx(4, rel=1e-3)


def test_drift_and_waits():
    """The same launches took up to 1.3x as long; a rank's exchange holds its wait."""
    assert verdict_gain.drift(STACK) == pytest.approx(75.8282 / 58.0855)
    waits = verdict_gain.waits(STACK)
    assert (waits.comm_least_ms <= waits.comm_ms).all() and len(waits) == 11


def test_an_engine_is_held_against_its_own_run():
    """Where a step of DCP becomes the shorter one: over its own run's no DCP, whatever runs."""
    table = tables.measured(engines.TABLE)
    steps = engines.chosen(table, engines.IN_FULL_GRAPHS)
    crossing = verdict_gain.crossing
    for column in ("median_ms", "over_none"):
        assert crossing(steps, "ours_direct_full", "none_full", column) == (0, 1000)
        assert crossing(steps, "ours_a2a_full", "none_full", column) == (8000, 32000)
        assert crossing(steps, "fa_a2a_full", "none_full", column) == (32000, math.inf)
    pair = ("ours_direct_full", "none_ours_full", "over_none")
    assert crossing(steps, *pair) == (2000, 8000)
    # A run on a machine that is slower throughout moves nothing.
    (other,) = set(steps.run[steps.apart])
    slower = table.assign(value=table.value.where(table.run != other, 1.2 * table.value))
    assert crossing(engines.chosen(slower, engines.IN_FULL_GRAPHS), *pair) == (2000, 8000)


def test_two_runs_of_one_engine_are_this_far_apart():
    """6.43 over 6.36 ms at 2,000 tokens, 7.64 over 7.59 at 8,000: the larger."""
    found = verdict_gain.runs_apart(tables.measured("engine_h200x2"))
    assert found == pytest.approx(6.427586 / 6.355269 - 1, rel=1e-4)


# ---- traces --------------------------------------------------------------------------------


def trace(layers: int = 3) -> list[dict]:
    """Layers of 100 us: a launch and a kernel each, and an exchange of 30 us."""
    found = []
    for layer in range(layers):
        at = 100.0 * layer
        for cat, name, begin, us in (
            ("cuda_runtime", "cudaLaunchKernel", 5, 10),
            ("kernel", "decode", 20, 40),
            ("kernel", "ncclDevKernel", 70, 30),
        ):
            found.append(
                {"cat": cat, "name": name, "ts": at + begin, "dur": us, "ph": "X", "args": {}}
                | {"pid": 5, "tid": 7}
            )
    return found


def test_one_layer_is_the_middle_one():
    """Of three layers the second, its launches beside it, from its first kernel on."""
    layer = verdict_traces.one_layer(trace())
    rows = [(e["row"], e["begin"], e["end"]) for e in layer]
    assert rows == [("GPU", 0, 40), ("exchange", 50, 80), ("host", 85, 95)]
    with pytest.raises(ValueError, match="expected kernels of 3 layers, got 2"):
        verdict_traces.one_layer(trace(1))


def test_traces_are_read_where_they_are(tmp_path):
    """No file, no traces; what the bench wrote is read, cut and shown; another file is refused."""
    assert verdict_traces.path(tmp_path) is None and verdict_traces.read(None) == {}
    file = tmp_path / "traces_h200.json.gz"
    names = (verdict_traces.SHAPE + "no DCP, full", "another model: no DCP, full")
    source = {"gpu": "NVIDIA H200"}
    write_traces(file, {name: trace() for name in names}, source)
    assert verdict_traces.path(tmp_path) == file
    traces = verdict_traces.read(file)
    assert list(traces) == ["no DCP, full"]
    layers = verdict_traces.shown(traces)
    rows = [(e["row"], e["begin"], e["end"]) for e in layers["no DCP, full"]]
    assert rows == [("GPU", 0, 40), ("exchange", 50, 80), ("host", 85, 95)]
    whole = json.loads(gzip.decompress(file.read_bytes()))
    assert whole["otherData"] == source
    drawn = [e for e in whole["traceEvents"] if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in drawn} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert min(e["ts"] for e in drawn) == 0
    # Two GPUs before one.
    pair = tmp_path / "traces_h200x2.json.gz"
    pair.write_bytes(gzip.compress(b"[1]"))
    assert verdict_traces.path(tmp_path) == pair
    with pytest.raises(ValueError, match=r"expected what bench stack --traces.*traces_h200x2"):
        verdict_traces.read(pair)
