"""Measured exchanges: which rows count, what is made of them, and what is said without rows."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest

matplotlib.use("Agg")

from figure_checks import cut_off, letters

from dcp_lab import plots_reducers
from dcp_lab.analysis import exchange, tables
from dcp_lab.bench import reduce

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
LINK = 200.0
CELLS = [(tokens, dims) for dims in (128, 512) for tokens in (1, 16, 64, 256)]


def sent(tokens: int, head_dim: int) -> int:
    """Bytes of a rank of two: half of the 16 heads, out in bf16 and its LSE."""
    return tokens * 8 * (2 * head_dim + 4)


def row(
    op: str, variant: str, us: float, tokens: int = 16, head_dim: int = 128, **other: object
) -> dict[str, object]:
    """A row of a reduce table, as far as the analysis looks at it."""
    return {
        "date_utc": EARLY,
        "git_commit": "a" * 40,
        "gpu": "NVIDIA H200",
        "gpu_count": 2,
        "torch": "2.11.0",
        "op": op,
        "variant": variant,
        "ranks": 2,
        "tokens": tokens,
        "num_q_heads": 16,
        "head_dim": head_dim,
        "dtype": "bfloat16",
        "mode": "graph",
        "samples": 30,
        "median_us": us,
        "p10_us": 0.9 * us,
        "p90_us": 1.1 * us,
        "host_us": np.nan,
        "launches": 1,
        "bytes": sent(tokens, head_dim),
        "link_gbps": LINK,
    } | other


def full_run(**other: object) -> list[dict[str, object]]:
    """A row of everything but vLLM's functions in every cell, in a graph and eagerly.

    A thing costs its place in the list, in us, and its bytes.
    """
    rows = []
    for place, (op, variant) in enumerate(exchange.EXPECTED, 2):
        if variant.startswith("vllm"):
            continue
        for cell in CELLS:
            us = place + sent(*cell) / LINK / 1e3
            rows.append(row(op, variant, us, *cell, **other))
            eager = {"mode": "eager", "host_us": 9 * us} | other
            rows.append(row(op, variant, 10 * us, *cell, **eager))
    return rows


def current(*rows: dict[str, object]) -> pd.DataFrame:
    return exchange.current(pd.DataFrame(list(rows)))


def test_each_cell_counts_by_its_latest_run():
    """A newer run replaces its cells whole, also what it did not measure; others stay."""
    later = row("reduce", "a2a", 50.0, date_utc=LATE, link_gbps=100.0)
    rows = current(*full_run(), later)
    cell = rows[(rows.tokens == 16) & (rows.head_dim == 128)]
    assert cell.variant.tolist() == ["a2a"] and cell.median_us.tolist() == [50.0]
    assert (rows.date_utc == EARLY).sum() == len(full_run()) * 7 // 8
    # Each row stands against the link of its own run.
    assert cell.over_us.item() == pytest.approx(50.0 - sent(16, 128) / 100e3)
    assert "7 cells; " in exchange.runs(rows) and exchange.runs(rows).endswith(
        "link 100.0 GB/s, 1 cells"
    )


@pytest.mark.parametrize(
    "other",
    [
        {"ranks": 4},
        {"num_q_heads": 32},
        {"dtype": "float16"},
        {"variant": "direct tile 256, 132 programs"},
    ],
)
def test_other_shapes_and_sweeps_do_not_count(other):
    """Other groups, heads and types are other tables; a sweep's configs are no reducers."""
    rows = current(row("reduce", "direct", 4.0), row("reduce", "direct", 1.0) | other)
    assert rows.median_us.tolist() == [4.0]


def test_the_rows_are_those_of_the_gate():
    """What the gate judges of `direct` is what the notebook shows of it."""
    measured = tables.measured(exchange.TABLE)
    shown = exchange.pick(exchange.current(measured), "reduce", "direct").set_index(exchange.CELL)
    judged = {v.target: v.value for v in reduce.verdicts(measured)}
    seen = 0
    for tokens, head_dim in shown.index:
        target = f"direct in a graph, {tokens} tokens, d{head_dim}"
        if target in judged:
            assert judged[target] == shown.median_us[tokens, head_dim]
            seen += 1
    assert seen == len(reduce.DIRECT_LIMITS_US)


def test_missing_names_things_and_cells():
    """Nowhere, in some cells, everywhere: three answers."""
    rows = [r for r in full_run() if (r["variant"], r["tokens"]) != ("ag_rs", 64)]
    rows += [row("reduce", "vllm a2a (pynccl)", 20.0, *cell) for cell in CELLS]
    assert exchange.missing(current(*rows)) == [
        "reduce ag_rs: measured not at 64 tokens at 128 dims, 64 tokens at 512 dims",
        "reduce vllm ag_rs: measured in no cell",
    ]


def test_vllm_counts_by_its_faster_collectives():
    """Of pynccl and torch the faster is held against ours, at whatever place it stands."""
    rows = current(
        row("reduce", "vllm a2a (torch)", 30.0),
        row("reduce", "vllm a2a (pynccl)", 20.0),
        row("reduce", "a2a", 10.0),
    )
    assert exchange.pick(rows, "reduce", "vllm a2a").median_us.tolist() == [20.0]
    said = exchange.say_over_tokens(rows)
    assert (
        "vLLM's a2a takes 2.00 to 2.00x as long as ours, which is the faster one in 1 of 1" in said
    )
    assert "vLLM's ag_rs has no row: not compared." in said


def test_one_shape_holds_both_modes():
    """Graph and eager of one cell stand in one row, sorted by the graph."""
    shown = exchange.at_one_shape(current(*full_run()), 16, 128)
    assert len(shown) == 9 and shown.graph_us.is_monotonic_increasing
    direct = shown.loc[("reduce", "direct")]
    assert direct.eager_us == pytest.approx(10 * direct.graph_us)
    assert direct.host_us == pytest.approx(9 * direct.graph_us)
    assert direct.wire_us == pytest.approx(sent(16, 128) / LINK / 1e3)


def test_a_latency_and_a_link_are_found_again():
    """Costs made of a latency and bytes at the link give just these back."""
    lines = exchange.lines(current(*full_run()))
    for place, key in enumerate(exchange.EXPECTED, 2):
        if key in lines.index:
            assert lines.latency_us[key] == pytest.approx(place)
            assert lines.marginal_gbps[key] == pytest.approx(LINK)
            assert abs(lines.least_us[key]) < 1e-9 > lines.most_us[key]


def test_bytes_that_cost_more_than_the_link_show():
    """Costs at half the link's pace are off the line, and so is their own slope."""
    rows = current(*(row("reduce", "a2a", 5 + 2 * sent(*c) / LINK / 1e3, *c) for c in CELLS))
    line = exchange.lines(rows).loc[("reduce", "a2a")]
    assert line.marginal_gbps == pytest.approx(LINK / 2)
    over = [5 + sent(*c) / LINK / 1e3 for c in CELLS]
    assert line.latency_us == pytest.approx(np.median(over))
    assert line.most_us == pytest.approx(max(over) - np.median(over))
    assert line.least_us == pytest.approx(min(over) - np.median(over))


def test_one_cell_has_no_slope():
    """With one byte count the slope is not known, and the sentence leaves it out."""
    rows = current(row("reduce", "direct", 4.0))
    assert np.isnan(exchange.lines(rows).marginal_gbps["reduce", "direct"])
    assert "slope" not in exchange.say_lines(rows)


def test_same_bytes_pairs_wide_with_narrow():
    """16 x 512 stands beside 64 x 128, and only a gap wider than both spreads is one."""
    rows = current(
        row("reduce", "direct", 4.0, 16, 512),
        row("reduce", "direct", 4.4, 64, 128),
        row("reduce", "direct", 8.0, 64, 512),
        row("reduce", "direct", 12.0, 256, 128),
        row("reduce", "direct", 3.0, 1, 128),
    )
    pairs = exchange.same_bytes(rows)
    assert pairs[["wide_tokens", "narrow_tokens"]].to_numpy().tolist() == [[16, 64], [64, 256]]
    assert pairs.apart.tolist() == [False, True]
    assert "differs by up to 50%; in 1 of 2 pairs by more" in exchange.say_lines(rows)


def test_gather_and_reduce_add_up():
    """Sums are of parts measured alone; both in turn is a row of its own; a gap stays a gap."""
    table = exchange.together(
        current(
            row("gather_queries", "direct", 3.0),
            row("reduce", "direct", 4.0),
            row("gather_and_reduce", "direct", 6.0),
            row("gather_queries", "nccl", 10.0),
            row("reduce", "a2a", 14.0),
        )
    ).loc[(16, 128)]
    assert table["direct + direct"] == 7.0 and table["direct, together"] == 6.0
    assert table["nccl + a2a"] == 24.0 and np.isnan(table["nccl + ag_rs"])


def test_sentences_say_what_has_no_row():
    """An empty table gives sentences, not errors and not numbers."""
    none = current(*full_run()).iloc[:0]
    assert exchange.runs(none) == "no row"
    assert len(exchange.missing(none)) == len(exchange.EXPECTED)
    assert exchange.say_over_tokens(none).startswith("`direct` has no row.")
    assert exchange.say_lines(none).startswith("`direct` has no row. `a2a` has no row.")
    assert exchange.say_together(none) == "Gather and reduce in turn have no row."
    assert exchange.lines(none).empty and exchange.at_one_shape(none, 16, 128).empty
    for draw in (plots_reducers.over_tokens, plots_reducers.against_lines):
        given = (none,) if draw is plots_reducers.over_tokens else (none, exchange.lines(none))
        with pytest.raises(ValueError, match="rows: expected a reducer's in a graph"):
            draw(*given, source="here")


def title(fig) -> str:
    return fig.get_suptitle().replace("\n", " ")


def draw_all(rows: pd.DataFrame) -> list:
    return [
        plots_reducers.over_tokens(rows, source="here"),
        plots_reducers.against_lines(rows, exchange.lines(rows), source="here"),
        plots_reducers.gather_and_reduce(
            exchange.together(rows), limits_us={(16, 128): 7.5}, source="here"
        ),
    ]


@pytest.mark.parametrize("vllm", [False, True])
def test_figures_can_be_read(vllm):
    """No letter is cut off or small, with vLLM's functions and without them."""
    rows = full_run()
    if vllm:
        rows += [
            row("reduce", f"vllm {name} (pynccl)", 30.0, *cell)
            for name in ("a2a", "ag_rs")
            for cell in CELLS
        ]
    for fig in draw_all(current(*rows)):
        assert not cut_off(fig)
        assert not [text.get_text() for text in letters(fig) if text.get_fontsize() < 14]
        labels = [text.get_text() for text in letters(fig)]
        assert len(labels) > 10
    first = draw_all(current(*rows))[0]
    drawn = {label for ax in first.axes for label in ax.get_legend_handles_labels()[1]}
    assert ("vllm a2a" in drawn) == vllm


def test_titles_say_what_the_rows_say():
    """direct 2 us, a2a 3 and ag_rs 4, all with the bytes: the ratios are those of the rows."""
    over, lines, both = draw_all(current(*full_run()))
    bytes_us = [sent(*cell) / LINK / 1e3 for cell in CELLS]
    least, most = ((3 + us) / (2 + us) for us in (max(bytes_us), min(bytes_us)))
    assert title(over).startswith(f"In a graph a2a takes {least:.1f} to {most:.1f}x and ag_rs")
    assert title(lines).startswith("direct costs a latency and its bytes, within 0.0 us")
    assert "us a layer; by NCCL and a2a" in title(both)
    said = [text.get_text() for text in letters(both)]
    assert "target\n7.5" in said


def test_titles_without_the_others():
    """With `direct` alone the titles compare nothing; with no pair there is no figure of pairs."""
    rows = current(row("reduce", "direct", 4.0), row("reduce", "direct", 5.0, 64))
    alone = plots_reducers.over_tokens(rows, source="here")
    assert title(alone) == "What the exchanges take over tokens"
    lines = plots_reducers.against_lines(rows, exchange.lines(rows), source="here")
    assert title(lines) == "direct costs a latency and its bytes, within 0.3 us"
    with pytest.raises(ValueError, match="together: expected a gather's and a reduce's time"):
        plots_reducers.gather_and_reduce(exchange.together(rows), limits_us={}, source="here")
    pair = current(row("reduce", "direct", 4.0), row("gather_queries", "direct", 3.0))
    both = plots_reducers.gather_and_reduce(exchange.together(pair), limits_us={}, source="here")
    assert title(both) == "What the query gather and the reduce of a layer take"
