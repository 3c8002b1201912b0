"""The timeline of a step: what hides, what waits, and constants that a fit finds again."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from dcp_lab.analysis import tables
from dcp_lab.bench import costs, stack
from dcp_lab.bench.costs import StepCase, StepConstants, Work, timeline

# Another machine than the one a fit starts from.
TRUTH = StepConstants(
    launch_us=45.0,
    op_us=300.0,
    collective_launch_us=60.0,
    graph_launch_us=9.0,
    sync_us=25.0,
    kernel_us=2.0,
    collective_us=14.0,
    direct_us=6.0,
    memory_gbps=3000.0,
    published_gbps=400.0,
    gather_gbps=900.0,
)
KV = 16 * 2500 * 512


def cases(**options: object) -> list[StepCase]:
    """Return the factorial, with light and heavy dense work."""
    found = []
    for mode, dense in itertools.product(("eager", "piecewise", "full"), (38e6, 390e6)):
        common = {"mode": mode, "layers": 94, "dense_bytes": dense, **options}
        found.append(StepCase(attention="paged", reducer=None, kv_bytes=KV, **common))
        for attention, reducer in itertools.product(
            ("paged", "published", "published_no_sync", "per_token"), ("ag_rs", "a2a", "direct")
        ):
            if (mode, attention) != ("full", "published"):
                found.append(
                    StepCase(attention=attention, reducer=reducer, kv_bytes=KV / 2, **common)
                )
    return found


def test_a_step_takes_the_longer_queue() -> None:
    """Host 5 us and GPU 3 us a call: the host's time, and the last kernel; and the other way."""
    assert timeline([Work(5, 3)], 20).step_us == 20 * 5 + 3
    assert timeline([Work(3, 5)], 20).step_us == 3 + 20 * 5


def test_hidden_launches_cost_nothing() -> None:
    """More launches beside long GPU work change nothing until the host is the longer one."""
    hidden = [Work(10, 100), *[Work(10, 1)] * 4]
    more = [Work(10, 100), *[Work(10, 1)] * 4, *[Work(10, 0)] * 5]
    assert timeline(more, 50).step_us == timeline(hidden, 50).step_us == 10 + 50 * 104
    shown = [*more, *[Work(10, 0)] * 5]
    assert timeline(shown, 50).step_us > timeline(hidden, 50).step_us + 40 * 40


def test_a_sync_adds_host_and_gpu() -> None:
    """With a wait in every layer both times are paid, one after the other."""
    layer = [Work(10, 40), Work(30, 20)]
    assert timeline(layer, 30).step_us == 10 + 30 * 60
    waiting = [Work(10, 40), Work(30, 20, sync=True)]
    assert timeline(waiting, 30).step_us == pytest.approx(30 * (10 + 40 + 20))
    # 40 us of GPU work hide 30 us of host; the rest of each is added.
    assert timeline(waiting, 30).idle_us == pytest.approx(30 * 10)


def test_a_barrier_waits_for_the_slowest_rank() -> None:
    """One slow host makes every rank's step slow where they meet, and only where they meet."""
    layer = [Work(10, 5, barrier=True)]
    assert timeline(layer, 12, host_scales=(1.0, 1.5)).step_us == 12 * 15 + 5
    meeting = [Work(10, 30, barrier=True)]
    assert timeline(meeting, 12, host_scales=(1.0, 1.5)).step_us == 15 + 12 * 30


def test_layers_past_the_settled_ones_keep_the_pace() -> None:
    """94 layers of a mixed pattern are what playing them all gives."""
    layer = [Work(7, 11), Work(13, 2), Work(5, 9, sync=True), Work(4, 21, barrier=True)]
    played = timeline(layer * 94, 1, host_scales=(1.0, 1.2)).step_us
    assert timeline(layer, 94, host_scales=(1.0, 1.2)).step_us == pytest.approx(played, rel=1e-9)


def test_the_two_facts_a_model_must_explain() -> None:
    """PIECEWISE costs nothing without DCP where GPU work is long, and DCP then adds much."""
    heavy = {"layers": 94, "dense_bytes": 389e6, "attention": "paged"}
    slow = dataclasses.replace(TRUTH, launch_us=40.0, graph_launch_us=20.0)

    def ms(mode: str, reducer: str | None, attention: str = "paged") -> float:
        options = {**heavy, "attention": attention}
        case = StepCase(mode=mode, reducer=reducer, kv_bytes=KV, **options)
        return costs.predict_ms(case, slow)

    assert ms("piecewise", None) < 1.03 * ms("full", None)
    assert ms("piecewise", "ag_rs", "published") > 1.5 * ms("piecewise", None)
    assert ms("full", "ag_rs") < 1.6 * ms("full", None)


def test_calls_of_a_layer() -> None:
    """The stack's parts: 11 calls with the published path, one of them a wait; 3 without."""
    case = StepCase("piecewise", "published", "ag_rs", 94, KV, 1.0)
    kinds = [call.kind for call in costs.layer_calls(case)]
    assert (len(kinds), kinds.count("collective"), kinds.count("sync")) == (11, 3, 1)
    alone = dataclasses.replace(case, attention="paged", reducer=None)
    assert len(costs.layer_calls(alone)) == 3
    full = dataclasses.replace(case, attention="paged", mode="full")
    assert sum(work.host_us for work in costs.step_work(full, TRUTH)) == 0


def test_what_the_host_pays_in_a_layer() -> None:
    """A kernel that comes with a call costs no host time; a call that plans anew costs op_us."""

    def host_us(attention: str, reducer: str | None, delay: float = 0.0) -> float:
        case = StepCase(
            "piecewise", attention, reducer, 94, KV, 1.0, launch_delay_us=delay
        )  # fmt: skip
        return sum(work.host_us for work in costs.step_work(case, TRUTH))

    # The graph, write_kv and the attention, whose merge comes with it.
    assert host_us("paged", None) == 9 + 2 * 45
    # Both of direct's exchanges are launches; ag_rs has three collectives and two kernels more.
    assert host_us("paged", "direct") == 9 + 4 * 45
    assert host_us("paged", "ag_rs") == 9 + 4 * 45 + 3 * 60
    assert host_us("per_token", "ag_rs") == host_us("paged", "ag_rs") - 45 + 300
    # The new token is attended apart and merged: two launches more.
    assert host_us("published_no_sync", "ag_rs") == host_us("per_token", "ag_rs") + 2 * 45
    assert host_us("published", "ag_rs") == host_us("published_no_sync", "ag_rs") + 25
    # A delay is added to every kernel, those that come with a call too, and to the graph.
    assert host_us("paged", "ag_rs", 10.0) == host_us("paged", "ag_rs") + 9 * 10


def test_the_calls_are_those_that_were_launched() -> None:
    """As many kernels and copies as the profiler saw two H200s launch, and the plan."""
    table = tables.measured("stack_h200x2")
    for row in table[table["mode"] == "piecewise"].to_dict("records"):
        calls = costs.layer_calls(stack.step_case(row))
        launched = row["kernel_launches"] + row["copies"]
        assert launched == row["num_layers"] * len(calls) + 1, row["attention"]


def test_only_per_token_copies_at_its_own_rate() -> None:
    """Whole pages are copied at the memory's rate; the attention over a copy reads at it too."""

    def gpu_us(attention: str) -> float:
        case = StepCase("full", attention, None, 94, KV, 1.0)
        return sum(work.gpu_us for work in costs.step_work(case, TRUTH))

    per_page = gpu_us("paged") + 2 + costs.floor_us(2 * KV, 3000)
    assert gpu_us("per_page") == pytest.approx(per_page)
    slower = costs.floor_us(2 * KV, 900) - costs.floor_us(2 * KV, 3000)
    assert gpu_us("per_token") == pytest.approx(per_page + slower)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_fit_predicts_what_it_has_not_seen(noise: float) -> None:
    """Fitted on half of the corners of another machine, it predicts the other half."""
    random = np.random.default_rng(0)
    every = [*cases(), *cases(launch_delay_us=20.0)]
    right = np.array([costs.predict_ms(case, TRUTH) for case in every])
    measured = right * np.exp(noise * random.standard_normal(len(right)))
    order = random.permutation(len(every))
    seen, unseen = np.array_split(order, 2)
    fitted = costs.fit_constants(
        [every[i] for i in seen], measured[seen], fixed={"memory_gbps": 3000.0}
    )
    predicted = np.array([costs.predict_ms(every[i], fitted) for i in unseen])
    error = np.abs(predicted / right[unseen] - 1)
    assert np.median(error) < 0.01 + noise and error.max() < 0.05 + 3 * noise
    for name in ("launch_us", "collective_launch_us", "collective_us", "published_gbps"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUTH, name), rel=0.1 + 5 * noise)


def test_what_cannot_be_fitted() -> None:
    """No case, another number of times, a time of 0, an unknown constant: each is named."""
    one = cases()[:1]
    with pytest.raises(ValueError, match="measured_ms: expected one a case"):
        costs.fit_constants(one, [])
    with pytest.raises(ValueError, match="measured_ms: expected a number > 0"):
        costs.fit_constants(one, [0.0])
    with pytest.raises(ValueError, match="fixed: expected names out of launch_us"):
        costs.fit_constants(one, [1.0], fixed={"lunch_us": 1.0})
    with pytest.raises(ValueError, match="layers: expected"):
        timeline([Work(1)], 0)


def test_spans_are_those_of_the_timeline() -> None:
    """The last span ends when the step does; a wait moves the host's next call."""
    layer = [Work(10, 40), Work(30, 20, sync=True)]
    host, gpu = costs.queue_spans(layer, 3)
    assert max(host[-1][1], gpu[-1][1]) == timeline(layer, 3).step_us
    assert host[2][0] == gpu[1][1] == 70
