"""Whole steps by graph mode: which rows count, what is made of them, what is said without rows."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest

matplotlib.use("Agg")

from figure_checks import cut_off, letters

from dcp_lab import plots_graphs
from dcp_lab.analysis import graph_steps, tables
from dcp_lab.bench import serve
from dcp_lab.graphs import rule_of

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
LAYERS = 10
SHAPE = {"dense": "light", "requests": 16, "context_tokens": 2000}


def row(path: str, mode: str, ms: float, **other: object) -> dict[str, object]:
    """A row of a stack table, as far as the analysis looks at it; its spread is 1 % either way."""
    attention, _, reducer = path.partition(" + ")
    alone = path == "no DCP"
    return {
        "date_utc": EARLY,
        "block": "base",
        "model": "qwen3_235b_tp8",
        "num_layers": LAYERS,
        "attention": "paged" if alone else attention,
        "reducer": None if alone else reducer,
        "dcp_size": 1 if alone else 2,
        "mode": mode,
        "bound": False,
        "launch_delay_us": 0.0,
        "samples": 7,
        "median_ms": ms,
        "p10_ms": 0.99 * ms,
        "p90_ms": 1.01 * ms,
        "host_ms": 0.2 * ms if mode == "full" else ms,
        "kernel_launches": {"eager": 200, "piecewise": 31, "full": 0}[mode],
        "graph_launches": {"eager": 0, "piecewise": LAYERS + 1, "full": 1}[mode],
        "copies": 0,
        "host_syncs": 0,
        "gpu_busy_ms": 7.0,
        "comm_ms": 3.0,
        "comm_least_ms": 1.0,
        **SHAPE,
    } | other


def plain(*rows: dict[str, object]) -> pd.DataFrame:
    return graph_steps.plain(pd.DataFrame(list(rows)))


def three_modes(*paths: str) -> list[dict[str, object]]:
    """Steps of 40, 20 and 10 ms, and 2 ms more for each path behind the first."""
    return [
        row(path, mode, ms + 2 * place)
        for place, path in enumerate(paths)
        for mode, ms in zip(graph_steps.MODES, (40.0, 20.0, 10.0), strict=True)
    ]


# ---- which rows count ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [{"bound": True}, {"launch_delay_us": 10.0}, {"model": "kimi_k3_like_tp8"}]
)
def test_other_experiments_are_left_out(other):
    """Bound attention, delayed launches and another model are no step of these."""
    rows = plain(row("no DCP", "full", 10.0), row("no DCP", "full", 1.0, **other))
    assert rows.median_ms.tolist() == [10.0]


def test_a_path_is_attention_and_reducer():
    """Pages without DCP are the base; a gather without DCP is not taken for it."""
    rows = plain(
        row("no DCP", "full", 10.0),
        row("no DCP", "full", 15.0, attention="per_page"),
        row("paged + a2a", "full", 12.0),
    )
    assert rows.path.tolist() == ["no DCP", "per_page + none", "paged + a2a"]
    steps = graph_steps.queues(rows, **SHAPE)
    assert steps.index.tolist() == [("no DCP", "full"), ("paged + a2a", "full")]


def test_queues_of_a_shape():
    """Each corner by its latest row, in a fixed order, with what it launches and both queues."""
    steps = graph_steps.queues(
        plain(
            row("paged + direct", "piecewise", 30.0),
            row("no DCP", "full", 10.0),
            row("no DCP", "full", 12.0, date_utc=LATE),
            row("no DCP", "piecewise", 41.0, copies=3),
            row("no DCP", "eager", 50.0, context_tokens=8000),
            row("no DCP", "eager", 50.0, dense="heavy"),
        ),
        **SHAPE,
    )
    assert steps.index.tolist() == [
        ("no DCP", "piecewise"), ("no DCP", "full"), ("paged + direct", "piecewise")
    ]  # fmt: skip
    assert steps.median_ms.tolist() == [41.0, 12.0, 30.0]
    assert steps.launches.tolist() == [45, 1, 42]
    assert steps.launch_us.tolist() == pytest.approx([41e3 / 45, 2400, 30e3 / 42])
    assert (steps.work_ms == 4.0).all() and (steps.comm_ms == 1.0).all()


def test_what_has_no_row_is_named():
    """Every path and mode is asked for but the full graph of the path that waits."""
    gone = graph_steps.without_row(graph_steps.queues(plain(*three_modes("no DCP")), **SHAPE))
    assert len(gone) == 3 * 4 - 1
    assert "paged + direct, full" in gone and "published + ag_rs, full" not in gone


def test_launches_between_pieces():
    """What is no graph, by layer; what is launched once a step does not count."""
    # 10 layers and 11 graphs; 9 launches are of the step.
    rows = [
        row("no DCP", "piecewise", 20.0, kernel_launches=39),
        row("paged + a2a", "piecewise", 20.0, kernel_launches=79, copies=10),
    ]
    steps = graph_steps.queues(plain(*rows), **SHAPE)
    between = graph_steps.between_pieces(steps, LAYERS)
    assert between.to_dict() == {"no DCP": 3, "paged + a2a": 8}


# ---- what a launch costs, and vLLM beside the stack ------------------------------------------


def vllm_rows() -> pd.DataFrame:
    """An engine of 10 layers: 5 and 9 ms without DCP, 6 and 25 with a2a, 30 with ag_rs."""
    found = [
        (1, None, "FULL_AND_PIECEWISE", 5.0), (1, None, "PIECEWISE", 9.0),
        (2, "a2a", "FULL_AND_PIECEWISE", 6.0), (2, "a2a", "PIECEWISE", 25.0),
        (2, "ag_rs", "PIECEWISE", 30.0),
    ]  # fmt: skip
    columns = ["dcp_size", "dcp_comm_backend", "cudagraph_mode", "value"]
    return pd.DataFrame(found, columns=columns).assign(
        metric="tpot", num_layers=LAYERS, gathers_kv="no"
    )


def engine_row(name: str, ms: float, **other: object) -> dict[str, object]:
    """A row of an engines' table, as far as the analysis looks at it."""
    return {
        **dict.fromkeys(serve.SETTINGS, "the same"),
        "run": EARLY,
        "row": name,
        "metric": "tpot",
        "context_tokens": 2000,
        "num_layers": serve.LAYERS,
        "requests": 16,
        "value": ms,
    } | other


def test_launch_costs():
    """PIECEWISE less full graphs, by layer and by launch, the piece's own graph among them."""
    steps = graph_steps.queues(plain(*three_modes("no DCP", "paged + a2a")), **SHAPE)
    study2 = pd.DataFrame(
        {"cudagraph_mode": ["PIECEWISE", "FULL_AND_PIECEWISE"], "mean_tpot_ms": [120.0, 27.0]}
    )
    between = {"no DCP": 3, "paged + a2a": 9}
    costs = graph_steps.launch_costs(steps, vllm_rows(), study2, between, LAYERS)
    assert costs.added_us.to_dict() == pytest.approx(
        {
            "vLLM, no DCP": 400.0,
            "vLLM, DCP 2, a2a": 1900.0,
            "the lab's stack, no DCP": 1000.0,
            "the lab's stack, DCP 2, a2a": 1000.0,
            "study 2, DCP 8, its 24 layers with KV": 93e3 / 24,
            "study 2, if all 93 launched as much": 1000.0,
        }
    )
    assert costs.launches.tolist() == [4, 10, 4, 10, 10, 10]
    assert costs.each_us.iloc[:2].tolist() == pytest.approx([100.0, 190.0])
    said = graph_steps.say_launches(costs)
    assert "Measured, vLLM, us a launch: no DCP 100; DCP 2, a2a 190." in said
    assert said.endswith("if all 93 launched as much 100.")


def test_the_stack_beside_vllm():
    """A step stands beside the engines of its path and mode, each beside its own run's no DCP."""
    steps = graph_steps.queues(
        plain(*three_modes("no DCP", "paged + direct", "paged + a2a", "published + ag_rs")),
        **SHAPE,
    )
    early, late = "2026-01-01T09:30:00Z", "2026-01-02T10:45:00Z"
    engines = pd.DataFrame(
        [
            engine_row("none_full", 5.5, run=early),
            engine_row("none_full", 1.0, run=early, context_tokens=8000),
            engine_row("ours_a2a_full", 7.0, run=early),
            engine_row("ours_direct_full", 5.0, run=early),
            engine_row("none_full", 6.0, run=late),
            engine_row("none_ours_full", 4.5, run=late),
            engine_row("gather_ag_rs_piecewise", 90.0, run=late),
        ]
    )
    both = graph_steps.beside_vllm(steps, engines, vllm_rows())
    lines = {key: tuple(line) for key, *line in both.itertuples()}
    own, lab = "vLLM's", "this lab's"
    assert lines == {
        ("no DCP", "piecewise", own): (20.0, 9.0, "earlier", 5.0, 9.0 / 5.0),
        # Not the median over both runs, 5.75.
        ("no DCP", "full", own): (10.0, 5.5, "09:30", 5.5, 1.0),
        ("no DCP", "full", lab): (10.0, 4.5, "10:45", 6.0, 4.5 / 6.0),
        ("paged + direct", "full", lab): (12.0, 5.0, "09:30", 5.5, 5.0 / 5.5),
        ("paged + a2a", "piecewise", own): (24.0, 25.0, "earlier", 5.0, 5.0),
        ("paged + a2a", "full", own): (14.0, 6.0, "earlier", 5.0, 1.2),
        ("paged + a2a", "full", lab): (14.0, 7.0, "09:30", 5.5, 7.0 / 5.5),
        # That gather runs with this lab's kernel; the older table's ag_rs gathers nothing.
        ("published + ag_rs", "piecewise", lab): (26.0, 90.0, "10:45", 6.0, 15.0),
    }


def test_an_engine_runs_what_bench_serve_says():
    """Path and mode are read off the configuration, for every engine that the stack has."""
    found = {name: graph_steps.in_vllm(row) for name, row in serve.ROWS.items() if not row.latent}
    assert found["ours_direct_full"] == ("paged + direct", "full")
    assert found["fa_a2a_piecewise"] == found["ours_a2a_piecewise"] == ("paged + a2a", "piecewise")
    assert found["gather_ag_rs_piecewise"] == (graph_steps.WAITS, "piecewise")
    assert {path for path, _ in found.values()} <= set(graph_steps.PATHS)


def test_releases_are_those_of_the_rules():
    """Each release that was read lies in its rule's span, whose ends have that rule."""
    found = graph_steps.releases()
    spans = {rule: said.split(" to ") for rule, said in found.items() if said[0] == "0"}
    assert all(rule_of(end) == rule for rule, ends in spans.items() for end in ends)
    assert {rule for rule in found if rule not in spans} == {"a2a_gate"}
    for read in ("0.11.2", "0.12.0", "0.18.1", "0.25.1", "0.33.0"):
        first, last = (int(end.removeprefix("0.")) for end in spans[rule_of(read)])
        assert first <= int(read.split(".")[1]) <= last


# ---- what DCP adds ---------------------------------------------------------------------------


def test_added_is_of_one_block():
    """Both steps are of one block of one run, and the latest run counts."""
    table = graph_steps.added(
        plain(
            row("no DCP", "full", 10.0),
            row("paged + direct", "full", 10.5),
            # Another block and another run have no step without DCP.
            row("paged + direct", "full", 99.0, block="other"),
            row("paged + a2a", "full", 99.0, date_utc=LATE),
            # Later and whole: it counts.
            row("no DCP", "full", 10.0, date_utc=LATE, context_tokens=8000),
            row("paged + direct", "full", 9.0, date_utc=LATE, context_tokens=8000),
            row("no DCP", "full", 20.0, context_tokens=8000),
            row("paged + direct", "full", 30.0, context_tokens=8000),
            # Neither a full graph nor pages.
            row("paged + direct", "piecewise", 50.0),
            row("per_page + direct", "full", 50.0),
        )
    )
    assert table.reducer.tolist() == ["direct", "direct"]
    assert table.us.tolist() == pytest.approx([50.0, -100.0])
    assert table.run.tolist() == [EARLY, LATE]
    assert table.low_us.tolist() == pytest.approx(
        [100 * (0.99 * 10.5 - 10.1), 100 * (8.91 - 10.1)]
    )
    assert table.high_us.tolist() == pytest.approx([100 * (1.01 * 10.5 - 9.9), 100 * (9.09 - 9.9)])
    assert table.step.tolist() == ["longer", "shorter"]


def test_within_the_spread_steps_are_level():
    """A difference smaller than the samples' spread is none."""
    table = graph_steps.added(plain(row("no DCP", "full", 10.0), row("paged + a2a", "full", 10.1)))
    assert table.step.tolist() == ["level"]


def test_engines_are_paired_within_a_run():
    """The run that has both counts; steps of two runs are held by what each adds to no DCP."""
    rows = [
        *(engine_row("none_full", ms) for ms in (5.0, 5.2, 5.1)),
        *(engine_row("fa_a2a_full", ms) for ms in (6.0, 6.2, 6.1)),
        engine_row("ours_direct_full", 5.05),
        # Later, on a machine that is slower throughout.
        *(engine_row("none_full", ms, run=LATE) for ms in (6.0, 6.1, 6.3)),
        engine_row("none_ours_full", 5.8, run=LATE),
        engine_row("fa_a2a_full", 1.0, context_tokens=8000),
        engine_row("none_full", 99.0, metric="ttft"),
    ]
    table = graph_steps.engine_added(pd.DataFrame(rows)).set_index("reducer")
    us = 1e3 / serve.LAYERS
    a2a = table.loc["a2a"]
    assert a2a.us == pytest.approx(1.0 * us) and a2a.windows == 3 and a2a.one_run
    assert (a2a.low_us, a2a.high_us) == pytest.approx((0.8 * us, 1.2 * us))
    assert a2a.step == "longer"
    over_vllm, over_own = table.loc["direct"].itertuples()
    assert over_vllm.us == pytest.approx(-0.05 * us) and over_vllm.step == "level"
    assert over_vllm.one_run and not over_own.one_run
    # 0.05 ms less than no DCP here, 0.3 less there: not 5.05 less 5.8, which is the machine.
    assert (over_own.alone_ms, over_own.dcp_ms) == (5.8, 5.05)
    assert (over_own.alone_none_ms, over_own.dcp_none_ms) == (6.1, 5.1)
    assert over_own.us == pytest.approx(0.25 * us) and over_own.step == "longer"
    assert over_own.low_us == pytest.approx((5.05 - 5.2 - (5.8 - 6.0)) * us)
    assert over_own.high_us == pytest.approx((5.05 - 5.0 - (5.8 - 6.3)) * us)
    said = graph_steps.say_engines(table.reset_index())
    assert "+10.6 us for vLLM's a2a over vLLM without DCP (+8.5 to +12.8, 3 windows)" in said
    assert said.count("two runs") == 1 and "of its run, 5.10 and 6.10 ms)" in said


def test_two_runs_without_a_common_engine_are_not_held_together():
    """Where either run has no step without DCP there is nothing to hold both against."""
    rows = [engine_row("ours_direct_full", 5.0), engine_row("none_ours_full", 4.0, run=LATE)]
    assert graph_steps.engine_added(pd.DataFrame(rows)).empty
    one = [engine_row("ours_direct_full", 5.0), engine_row("none_ours_full", 4.0)]
    assert graph_steps.engine_added(pd.DataFrame(one)).us.tolist() == [
        pytest.approx(1e3 / serve.LAYERS)
    ]


def adds(**us_by_context: float) -> pd.DataFrame:
    """added(...) of direct: a step without DCP of 10 ms, us more a layer at c<context>."""
    rows = []
    for name, us in us_by_context.items():
        context = int(name.removeprefix("c"))
        ms = 10.0 + us * LAYERS / 1e3
        spread = {"p10_ms": ms, "p90_ms": ms, "context_tokens": context}
        rows.append(row("paged + direct", "full", ms, **spread))
        alone = {"p10_ms": 10.0, "p90_ms": 10.0, "context_tokens": context}
        rows.append(row("no DCP", "full", 10.0, **alone))
    return graph_steps.added(plain(*rows))


@pytest.mark.parametrize(
    ("us", "state", "word"), [(5.0, "holds", "holds the"), (7.0, "missed", "misses the")]
)
def test_the_target_is_judged_at_its_shape(us, state, word):
    """A row of the target's own context holds or misses it, whatever its neighbours say."""
    table = adds(c1024=100.0, c2000=us, c2500=100.0)
    judged = graph_steps.verdict(table)
    assert judged.state == state and judged.value == pytest.approx(us)
    said = graph_steps.say_target(table)
    assert f"adds {us:.1f} us at 2,000 tokens" in said and word in said


@pytest.mark.parametrize(
    ("below", "above", "where"),
    [(1.0, 2.0, "within it"), (5.0, 8.0, "on both sides of it"), (7.0, 8.0, "over it")],
)
def test_without_its_row_the_target_is_open(below, above, where):
    """Neighbours are told beside it and judge nothing."""
    table = adds(c500=99.0, c1024=below, c2500=above, c8000=-99.0)
    assert graph_steps.verdict(table).state == "not measured"
    said = graph_steps.say_target(table)
    assert "2,000 tokens have no row, so the target of 6 us is open" in said
    assert said.endswith(
        f"{below:.1f} us at 1,024 tokens and {above:.1f} us at 2,500 tokens, {where}."
    )


def test_the_heavy_part_and_other_batches_are_not_the_target():
    """The target is of 16 requests and the light dense part."""
    pair = [row("no DCP", "full", 10.0), row("paged + direct", "full", 11.0)]
    for other in ({"dense": "heavy"}, {"requests": 64}):
        table = graph_steps.added(plain(*({**one, **other} for one in pair)))
        assert len(table) == 1 and graph_steps.verdict(table).value is None


def test_grain_is_of_the_nearest_contexts():
    """1 ms more of 10 layers are 100 us a layer; far contexts say nothing."""
    table = adds(c1000=1.0, c2500=2.0, c3000=7.0, c9000=50.0)
    table.loc[table.context_tokens == 3000, "alone_ms"] += 1.0
    said = graph_steps.say_grain(table)
    assert said.startswith("From 2,500 to 3,000 tokens the step without DCP changes by +100.0 us")
    assert "the one with DCP by +5.0" in said
    assert "fewer than two" in graph_steps.say_grain(table.iloc[:1])


@pytest.mark.parametrize(
    ("steps", "found", "said"),
    [
        ({1: "longer", 2: "level", 4: "shorter"}, (2, 4), "from 4 tokens at the latest, level at"),
        ({1: "shorter", 2: "longer", 4: "shorter"}, (2, 4), "from 4 tokens at the latest, longer"),
        ({1: "shorter", 2: "shorter"}, (0, 1), "at every measured context, from 1 tokens on"),
        ({1: "shorter", 2: "level"}, (2, np.inf), "at no context from 1 to 2 tokens"),
        ({}, (0, np.inf), "no row"),
    ],
)  # fmt: skip
def test_crossing(steps, found, said):
    """From where on every step with DCP is the shorter one."""
    series = pd.Series(steps, dtype=object)
    assert graph_steps.crossing(series) == found
    assert said in graph_steps.say_crossing("it", series)


# ---- without rows, and the committed ones ----------------------------------------------------


def test_sentences_say_what_has_no_row():
    """Empty tables give sentences, not errors and not numbers."""
    none = plain(*three_modes("no DCP")).iloc[:0]
    steps, table = graph_steps.queues(none, **SHAPE), graph_steps.added(none)
    assert steps.empty and table.empty and graph_steps.verdict(table).value is None
    said = graph_steps.say_queues(steps)
    assert said == "No eager step has a row. No piecewise step has a row. No full step has a row."
    assert graph_steps.say_target(table).endswith("so the target of 6 us is open.")
    engines = graph_steps.engine_added(pd.DataFrame([engine_row("none_full", 5.0)]))
    assert engines.empty
    assert graph_steps.say_engines(engines) == "No engine has a row at 2,000 tokens."
    with pytest.raises(ValueError, match="steps: expected a row a path and mode, got none"):
        plots_graphs.step_queues(steps, source="here")
    with pytest.raises(ValueError, match="stack, engines: expected a row, got none"):
        plots_graphs.added_to_a_layer(table, engines, source="here")


def test_queues_in_words():
    """Each mode's launches, the host's share and the GPU's work, as spans or one number."""
    said = graph_steps.say_queues(
        graph_steps.queues(plain(*three_modes("no DCP", "paged + a2a")), **SHAPE)
    )
    assert (
        "**Eager:** 200 launches a step, on which the host spends 100 % of its 40.0 to 42.0"
        in said
    )
    assert "**PIECEWISE:** 42 launches a step" in said
    assert said.endswith(
        "**Full:** 1 launch a step, on which the host spends 20 % of its 10.0 to 12.0 ms; the "
        "GPU's own work takes 4.0 ms."
    )


def test_the_committed_rows_can_be_read():
    """The tables have every path and mode, one model's layers, and pairs on both sides of 0."""
    rows = graph_steps.plain(tables.measured(graph_steps.TABLE))
    steps = graph_steps.queues(rows, dense="light", requests=16, context_tokens=2500)
    assert graph_steps.without_row(steps) == []
    assert steps.notna().all(axis=None) and rows.num_layers.nunique() == 1
    assert (steps.p10_ms <= steps.median_ms).all() and (steps.median_ms <= steps.p90_ms).all()
    assert (steps.work_ms > 0).all() and (steps.comm_ms > 0).all()
    # A host sync is one of the reasons why a step has no full graph.
    waits = steps.host_syncs > 0
    assert set(steps.index.get_level_values("path")[waits]) == {graph_steps.WAITS}
    table = graph_steps.added(rows)
    assert set(graph_steps.of_target(table).index) >= {1024, 2500, 3000, 8192, 32768}
    engines = graph_steps.engine_added(tables.measured(graph_steps.ENGINES))
    assert set(engines.pair) == set(graph_steps.ENGINE_PAIRS)
    assert {"longer", "shorter"} <= set(engines.step) and graph_steps.AT_TOKENS in set(
        engines.context_tokens
    )


# ---- figures ---------------------------------------------------------------------------------


def title(fig) -> str:
    return fig.get_suptitle().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")


def test_the_queues_figure_says_which_is_longer():
    """Every step's time is written, and the title speaks of the modes that have rows."""
    steps = graph_steps.queues(plain(*three_modes("no DCP", "paged + a2a")), **SHAPE)
    fig = plots_graphs.step_queues(steps, source="here")
    said = {text.get_text() for text in letters(fig)}
    assert {"40.0", "20.0", "10.0", "42.0", "22.0", "12.0"} <= said
    assert fig.axes[0].get_yticklabels()[1].get_text() == "no DCP, PIECEWISE"
    assert title(fig) == (
        "Eager and PIECEWISE: a step is as long as the host's queue; in a full graph the host "
        "needs 20 % of it at most"
    )
    assert not cut_off(fig) and min(text.get_fontsize() for text in letters(fig)) >= 14
    alone = plots_graphs.step_queues(steps.xs("full", level="mode", drop_level=False), source="h")
    assert title(alone) == "Both queues of a step, and the step"


def test_the_figure_of_what_dcp_adds():
    """The light dense part is drawn, the title gives the most by direct and by collectives."""
    heavy = [{**r, "dense": "heavy"} for r in three_modes("no DCP", "paged + direct")]
    stack = graph_steps.added(
        plain(*three_modes("no DCP", "paged + direct", "paged + a2a"), *heavy)
    )
    engines = graph_steps.engine_added(
        pd.DataFrame(
            [
                engine_row("none_full", 5.0),
                engine_row("ours_direct_full", 5.1),
                engine_row("none_full", 5.0, run=LATE),
                engine_row("none_ours_full", 5.0, run=LATE),
            ]
        )
    )
    fig = plots_graphs.added_to_a_layer(stack, engines, source="here")
    assert (
        title(fig)
        == "In a full graph DCP adds to a layer at most: direct 200.0 us, collectives 400.0 us"
    )
    legends = [ax.get_legend_handles_labels()[1] for ax in fig.axes]
    target = "target: at most 6 us at 2,000"
    assert sorted(legends[0]) == ["a2a", "direct", target]
    pairs = ["the lab's direct over the lab's kernel (two runs)", "the lab's direct over vLLM"]
    assert sorted(legends[1]) == [target, *pairs]
    assert not cut_off(fig) and min(text.get_fontsize() for text in letters(fig)) >= 14


def test_figures_of_the_committed_rows_can_be_read():
    """No letter of them is cut off or small."""
    rows = graph_steps.plain(tables.measured(graph_steps.TABLE))
    steps = graph_steps.queues(rows, dense="light", requests=16, context_tokens=2500)
    costs = graph_steps.launch_costs(
        steps,
        tables.measured_vllm(),
        tables.published_graph_modes(),
        graph_steps.between_pieces(steps, 94),
        94,
    )
    engines = graph_steps.engine_added(tables.measured(graph_steps.ENGINES))
    for fig in (
        plots_graphs.step_queues(steps, source="here"),
        plots_graphs.added_to_a_layer(graph_steps.added(rows), engines, source="here"),
        plots_graphs.cost_of_a_launch(costs, source="here"),
    ):
        assert not cut_off(fig)
        assert not [text.get_text() for text in letters(fig) if text.get_fontsize() < 14]
