"""Engines of vLLM, read: medians and ratios by hand, and nothing held together across runs."""

from __future__ import annotations

import pandas as pd
import pytest
from figure_checks import cut_off, letters

from dcp_lab import plots_serving
from dcp_lab.analysis import engines, tables
from dcp_lab.bench import serve


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return tables.measured(engines.TABLE)


def values(table: pd.DataFrame, run: str, row: str, metric: str, context: int) -> pd.Series:
    same = (table.run == run) & (table.row == row) & (table.metric == metric)
    return table[same & (table.context_tokens == context)].value


def test_every_row_of_the_bench_has_a_name():
    """A configuration that is added to `bench serve` gets its words here."""
    assert set(engines.NAMES) == set(serve.ROWS)
    assert len(set(engines.NAMES.values())) == len(engines.NAMES)


@pytest.mark.parametrize("metric", ["tpot", "ttft"])
def test_times_are_medians_beside_those_of_their_own_run(table: pd.DataFrame, metric: str):
    """Median, least and most of the samples; a ratio has both of its times in one run."""
    found = engines.times(table, metric)
    for (run, row, context), line in found.iterrows():
        own = values(table, run, row, metric, context)
        assert (line.median_ms, line.least_ms) == (own.median(), own.min())
        assert (line.most_ms, line.samples) == (own.max(), len(own))
        for column, other in (("over_none", engines.NO_DCP), ("over_theirs", engines.THEIRS)):
            base = values(table, run, other, metric, context)
            if base.empty:
                assert pd.isna(line[column])
            else:
                assert line[column] == pytest.approx(own.median() / base.median())
    assert found.over_theirs.isna().any() and found.over_theirs.notna().any()


def test_other_settings_in_a_run_are_not_held_together(table: pd.DataFrame):
    """An engine without DCP of another commit or length is nobody's yardstick."""
    changed = table.copy()
    changed.loc[changed.row == engines.NO_DCP, "max_model_len"] += 1
    found = engines.times(changed).over_none
    assert set(found.dropna().index.get_level_values("row")) == {engines.NO_DCP}


def test_engines_of_few_layers_are_left_out(table: pd.DataFrame):
    """A development run of fewer layers is in no reading."""
    short = table.assign(num_layers=8)
    assert engines.times(short).empty
    assert engines.not_measured(short)[0] == f"{engines.NAMES['none_full']}: at no context"


def test_what_an_engine_takes_is_its_own_numbers(table: pd.DataFrame):
    """Start, graphs and KV cache as the rows have them; the order is that of the run."""
    found = engines.engines(table)
    for (run, row), line in found.iterrows():
        rows = table[(table.run == run) & (table.row == row)].set_index("metric").value
        assert line.start_s == rows["start"] and line.kv_tokens == rows["kv_cache_capacity"]
        assert line.graph_gib == rows["graph_memory"]
    for run, lines in found.groupby("run"):
        ended = table[table.run == run].groupby("row").date_utc.min().sort_values()
        assert list(lines.xs(run).sort_values("place").index) == list(ended.index)
        assert sorted(lines.place) == list(range(1, len(lines) + 1))
    run = engines.widest_run(engines.times(table))
    kv = found.loc[run].kv_tokens
    assert found.loc[run].kv_over_none["ours_direct_full"] == pytest.approx(
        kv["ours_direct_full"] / kv[engines.NO_DCP]
    )


def test_tokens_are_counted_as_the_rows_do(table: pd.DataFrame):
    """A share over all compared positions; without such rows there is an empty table."""
    found = engines.tokens(table)
    line = found.xs("ours_direct_full", level="row").iloc[0]
    assert line.same_share == line.same / (line.same + line.tied + line.other)
    assert engines.tokens(table[table.metric == "tpot"]).empty


def test_verdicts_are_the_gates(table: pd.DataFrame):
    """State by state what `dcp-lab bench serve --gate` prints."""
    found = engines.judged(table)
    assert list(found.verdict) == [verdict.state for verdict in serve.verdicts(table)]
    for line, verdict in zip(found.itertuples(), serve.verdicts(table), strict=True):
        assert line.target == verdict.target
        assert bool(line.measured) == (verdict.value is not None)


def test_what_was_not_measured_is_named(table: pd.DataFrame):
    """Each configuration without a row, each context without one, tokens without float16."""
    whole = table[table.row == engines.NO_DCP]
    whole = whole[whole.metric == "tpot"]
    said = engines.not_measured(whole)
    assert not any(engines.NAMES[engines.NO_DCP] == line.split(": not")[0] for line in said)
    assert f"{engines.NAMES['mla_a2a_full']}: at no context" in said
    assert f"{engines.NAMES['ours_a2a_full']}: tokens in float16" in said
    fewer = whole[whole.context_tokens != 32000]
    assert f"{engines.NAMES[engines.NO_DCP]}: not at 32,000 tokens" in engines.not_measured(fewer)


def test_the_run_that_is_drawn_is_the_one_with_most(table: pd.DataFrame):
    """Most engines and contexts beside no DCP; without one the reader is told."""
    found = engines.times(table)
    counts = found.over_none.dropna().groupby("run").size()
    assert counts[engines.widest_run(found)] == counts.max()
    with pytest.raises(ValueError, match="expected a run with 'none_full'"):
        engines.widest_run(engines.times(table[table.row != engines.NO_DCP]))


def row_of(name: str, run: str, ms: float, **other: object) -> dict[str, object]:
    """A row of a TPOT, as far as the analysis looks at it."""
    return {
        **dict.fromkeys(serve.SETTINGS, "the same"),
        "run": run,
        "row": name,
        "metric": "tpot",
        "context_tokens": 2000,
        "num_layers": serve.LAYERS,
        "value": ms,
    } | other


FIRST, SECOND = "2026-01-01T09:30:00Z", "2026-01-02T10:45:00Z"


def two_runs(*more: dict[str, object]) -> pd.DataFrame:
    """Three engines, and two of another run on a machine that takes 1.2 times as long."""
    rows = [
        row_of("none_full", FIRST, 5.0),
        row_of("ours_direct_full", FIRST, 5.0),
        row_of("fa_a2a_full", FIRST, 8.0),
        row_of("none_full", SECOND, 6.0),
        row_of("none_ours_full", SECOND, 5.4),
    ]
    return pd.DataFrame([*rows, *more])


def test_several_engines_are_of_one_run_as_far_as_it_has_them():
    """No median over both; what the fullest run lacks is apart, beside its own run's no DCP."""
    found = engines.chosen(two_runs()).droplevel("context_tokens")
    columns = ["run", "apart", "median_ms", "none_ms", "over_none"]
    assert found[columns].T.to_dict("list") == {
        "none_full": [FIRST, False, 5.0, 5.0, 1.0],
        "fa_a2a_full": [FIRST, False, 8.0, 5.0, 1.6],
        "ours_direct_full": [FIRST, False, 5.0, 5.0, 1.0],
        "none_ours_full": [SECOND, True, 5.4, 6.0, 0.9],
    }
    assert list(found.index) == [name for name in engines.NAMES if name in found.index]
    asked = engines.chosen(two_runs(), ("none_ours_full", "none_full"))
    assert set(asked.run) == {SECOND} and not asked.apart.any()
    with pytest.raises(ValueError, match=r"expected rows of none_full, mla.*none of \['mla_a2a"):
        engines.chosen(two_runs(), ("none_full", "mla_a2a_full"))


def test_the_fullest_run_is_counted_not_the_first():
    """Most engines, then most contexts beside no DCP, then the latest; short models count not."""
    names = ("none_full", "ours_direct_full")

    def run_of(*more: dict[str, object]) -> set[str]:
        return set(engines.chosen(two_runs(*more), names).run)

    assert run_of() == {FIRST}
    again = row_of("ours_direct_full", SECOND, 6.0)
    assert run_of(again) == {SECOND}
    long = [row_of(name, FIRST, 9.0, context_tokens=8000) for name in names]
    assert run_of(again, *long) == {FIRST}
    assert run_of(again | {"num_layers": 8}) == {FIRST}
    # Its no DCP has other settings: nothing to hold it against.
    assert run_of(again | {"dtype": "float16"}) == {FIRST}


def test_a_gap_between_two_runs_leaves_the_machines_out():
    """Within a run the difference; of two runs the difference of what each is over no DCP."""
    more = [row_of("none_full", FIRST, ms) for ms in (4.9, 5.2)]
    found = engines.chosen(two_runs(*more))
    one = engines.gap(found, "fa_a2a_full", "ours_direct_full", 2000)
    assert one == pytest.approx((3.0, 3.0, 3.0))
    two = engines.gap(found, "ours_direct_full", "none_ours_full", 2000)
    # 5.0 is 0.0 more than no DCP (4.9 to 5.2) in its run, 5.4 is 0.6 less in the other.
    assert two == pytest.approx((0.4, 0.6, 0.7))
    both = engines.chosen(two_runs(row_of("gather_ag_rs_piecewise", SECOND, 90.0)))
    apart = engines.gap(both, "gather_ag_rs_piecewise", "none_ours_full", 2000)
    assert apart == pytest.approx((84.6, 84.6, 84.6))


def test_the_rows_of_two_runs_are_told_apart(table: pd.DataFrame):
    """In the committed table no median has windows of two runs, and none is without its no DCP."""
    found = engines.chosen(table)
    for (row, context), line in found.iterrows():
        own = values(table, line.run, row, "tpot", context)
        none = values(table, line.run, engines.NO_DCP, "tpot", context)
        assert (line.median_ms, line.samples) == (own.median(), len(own))
        assert line.none_ms == none.median()
        assert (line.none_least_ms, line.none_most_ms) == (none.min(), none.max())
    assert found[~found.apart].run.nunique() == 1


def test_what_is_expected_is_published_or_modelled():
    """Every set for eight MI355X has a number of a study or of notebook 06, never both."""
    from dcp_lab.serving.settings import SETTINGS

    found = engines.expected(tables.headline_numbers())
    assert set(found.index) == {s.name for s in SETTINGS.values() if s.machine == "8 MI355X"}
    assert ((found.published_ms == "") != (found.modelled_ms == "")).all()


@pytest.mark.parametrize("name", ["over_context", "at_one_context"])
def test_figures_say_their_finding_their_machine_and_their_units(table: pd.DataFrame, name: str):
    """The title has the ratios of the rows; nothing is small or cut off."""
    found = engines.times(table)
    source = "engine_h200x2.csv"
    if name == "over_context":
        fig = plots_serving.over_context(found, source=source)
        ours = found.loc[engines.widest_run(found)].over_none["ours_direct_full"]
        said = (f"{ours[2000]:.2f}x the time of no DCP at 2,000", f"{ours[32000]:.2f}x at 32,000")
    else:
        fig = plots_serving.at_one_context(found, 2000, source=source)
        rows = found.xs(2000, level="context_tokens").over_none
        gather = rows.xs("gather_ag_rs_piecewise", level="row").iloc[-1]
        said = (f"{gather:.1f}x the time of no DCP", "pages read in place")
        assert len(fig.axes[0].patches) == len(rows)
    title = " ".join(fig.get_suptitle().split())
    assert [text for text in said if text not in title] == []
    assert "H200, not MI355X" in " ".join(fig.get_supxlabel().split())
    assert any("(ms" in ax.get_xlabel() + ax.get_ylabel() for ax in fig.axes)
    assert not cut_off(fig)
    assert min(text.get_fontsize() for text in letters(fig)) >= 14
