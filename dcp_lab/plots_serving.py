"""Figures of notebook 05: real vLLM engines, over context and at one context by run."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from dcp_lab import plots
from dcp_lab.analysis import engines
from dcp_lab.plots import number

# A colour and a marker each, so that no line is told apart by its colour alone.
STYLES = {
    "none_full": (plots.BLUE, "o"),
    "none_ours_full": (plots.SKY, "s"),
    "fa_a2a_full": (plots.DARK_GREY, "D"),
    "ours_a2a_full": (plots.color("a2a"), "^"),
    "ours_direct_full": (plots.color("direct"), "v"),
    "gather_ag_rs_piecewise": (plots.color("gather"), "P"),
}
OTHER = (plots.LIGHT_GREY, "x")
# Points of a log axis at which a label would touch its neighbour's.
UNLABELLED = (3000, 5000)


def over_context(found: pd.DataFrame, *, source: str) -> Figure:
    """Draw the full-graph engines of one run over context: TPOT, and TPOT over no DCP's.

    Args:
        found: engines.times(...).
        source: What the rows are of.
    """
    run = engines.widest_run(found)
    rows = found.loc[run]
    names = [name for name in rows.index.unique("row") if not name.endswith("piecewise")]
    fig, (left, right) = plots.figure(1, 2, size=(16, 7.5))
    for name in names:
        line = rows.loc[name]
        fill, marker = STYLES.get(name, OTHER)
        look = {"color": fill, "marker": marker, "linewidth": 3, "markersize": 10}
        spread = [line.median_ms - line.least_ms, line.most_ms - line.median_ms]
        left.errorbar(line.index, line.median_ms, spread, label=engines.NAMES[name], **look)
        right.plot(line.index, line.over_none, **look)
        if name == engines.NO_DCP:
            continue
        for at, side, shift in ((line.index[0], "right", -10), (line.index[-1], "left", 10)):
            right.annotate(
                f"{number(line.over_none[at], 2)}x", (at, line.over_none[at]), (shift, 0),
                textcoords="offset points", ha=side, va="center", weight="bold", color=fill,
            )  # fmt: skip
    contexts = sorted(rows.index.unique("context_tokens"))
    shown = [context for context in contexts if context not in UNLABELLED]
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(shown, [f"{context:,}" for context in shown])
        ax.minorticks_off()
        ax.set_xlabel("tokens of each of 16 requests (log scale)")
    right.set_xlim(contexts[0] / 2, contexts[-1] * 2)
    left.set_ylim(0, 1.45 * rows.loc[names].most_ms.max())
    left.set_ylabel("time per output token (ms)")
    left.legend(loc="upper left")
    right.set_ylim(0, 1.1 * rows.loc[names].over_none.max())
    right.set_ylabel("TPOT over no DCP's with FLASH_ATTN (x)")
    ours, theirs = (rows.over_none[name] for name in ("ours_direct_full", engines.THEIRS))
    first, last = max(contexts[0], 2000), contexts[-1]
    return plots.finding(
        fig,
        f"With the direct exchange DCP 2 takes {number(ours[first], 2)}x the time of no DCP at "
        f"{first:,} tokens, {number(ours[last], 2)}x at {last:,}; vLLM's own DCP 2 takes "
        f"{number(theirs[first], 2)}x and {number(theirs[last], 2)}x",
        f"Measured: {source}, one run; full graphs; medians of 64-step windows, bars their "
        "least and most. H200, not MI355X.",
    )


def at_one_context(found: pd.DataFrame, context_tokens: int, *, source: str) -> Figure:
    """Draw every engine's TPOT at one context, run by run.

    Args:
        found: engines.times(...).
        context_tokens: Which.
        source: What the rows are of.
    """
    rows = found.xs(context_tokens, level="context_tokens")
    runs = rows.index.unique("run")
    fig, ax = plots.figure(size=(15, 2.6 + 0.62 * (len(rows) + len(runs))))
    place, ticks = 0, {}
    for run in runs:
        ax.text(
            0, place, f" run of {run[:10]}, {run[11:16]}", va="center", color=plots.DARK_GREY,
            fontsize=plots.FONT,
        )  # fmt: skip
        place += 1
        for row in rows.loc[run].itertuples():
            fill, _ = STYLES.get(row.Index, OTHER)
            ax.barh(place, row.median_ms, 0.7, color=fill)
            alone = row.Index == engines.NO_DCP or pd.isna(row.over_none)
            over = "" if alone else f"  {number(row.over_none, 2)}x"
            ax.annotate(
                f"{number(row.median_ms)} ms{over}", (row.median_ms, place), (6, 0),
                textcoords="offset points", va="center", weight="bold",
            )  # fmt: skip
            ticks[place] = engines.NAMES[row.Index]
            place += 1
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.28 * rows.median_ms.max())
    ax.set_xlabel("time per output token (ms); x: over no DCP with FLASH_ATTN in the same run")
    ax.grid(axis="x")
    ax.grid(axis="y", visible=False)
    gather, ours = (
        rows.xs(name, level="row").iloc[-1]
        for name in ("gather_ag_rs_piecewise", "ours_direct_full")
    )
    return plots.finding(
        fig,
        f"Study 1's gather under PIECEWISE takes {number(gather.over_none)}x the time of no DCP; "
        f"pages read in place, in full graphs, {number(ours.over_none, 2)}x",
        f"Measured: {source}, 16 requests of {context_tokens:,} tokens, full graphs but where "
        "PIECEWISE is said. Bars of two runs are not held against each other. H200, not MI355X.",
    )
