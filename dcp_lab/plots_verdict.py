"""Figures of notebook 06: the account of the 4x."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dcp_lab import plots
from dcp_lab.analysis import engines
from dcp_lab.analysis import verdict_shares as shares_
from dcp_lab.analysis import verdict_study as study_
from dcp_lab.analysis.verdict_fit import MOST_ERROR, MOST_MEDIAN_ERROR, Fit
from dcp_lab.plots import number
from dcp_lab.plots_serving import STYLES

# The lab's colours: orange an exchange's, purple a gather's, yellow what launches cost.
PLAYER_COLORS = {
    shares_.MODE: plots.YELLOW,
    shares_.EXCHANGE: plots.ORANGE,
    shares_.GATHER: plots.PURPLE,
    shares_.SYNC: plots.WINE,
}
PART_COLORS = {
    study_.COLLECTIVES: plots.ORANGE,
    study_.SMALL: plots.YELLOW,
    study_.CALLS: plots.PURPLE,
    study_.WAIT: plots.WINE,
    study_.BYTES: plots.LIGHT_PURPLE,
    study_.KERNELS: plots.LIGHT_PURPLE,
    study_.EXCHANGE_GPU: plots.SKY,
    study_.HALF: plots.GREY,
}
MODE_COLORS = {"full": plots.BLUE, "piecewise": plots.VERMILION, "eager": plots.GREY}
MODE_NAMES = {"full": "full graphs", "piecewise": "PIECEWISE", "eager": "eager"}


def removal(steps: pd.DataFrame, *, title: str, source: str) -> Figure:
    """Draw what is left of a DCP step when one thing of it is mended, measured and modelled.

    Args:
        steps: One row a step, in order: name, ms, p10_ms, p90_ms (measured), low_ms, high_ms
            (modelled for study 1), observed_ms (NaN where study 1 has none).
        title: The finding.
        source: What the numbers rest on.
    """
    fig, (left, right) = plots.figure(1, 2, size=(15, 7.5), sharey=True)
    places = np.arange(len(steps))
    fills = [
        plots.BLUE if "no DCP" in name else plots.VERMILION if "gather" in name else plots.GREEN
        for name in steps.name
    ]
    left.barh(places, steps.ms, 0.62, color=fills)
    spread = [steps.ms - steps.p10_ms, steps.p90_ms - steps.ms]
    left.errorbar(steps.ms, places, xerr=spread, fmt="none", color=plots.BLACK, capsize=5)
    for place, row in zip(places, steps.itertuples(), strict=True):
        _right_of(left, row.p90_ms, place, number(row.ms))
        at = (row.low_ms + row.high_ms) / 2 if np.isnan(row.observed_ms) else row.observed_ms
        right.barh(place, at, 0.62, color=fills[place], alpha=0.45)
        if np.isnan(row.observed_ms):
            right.hlines(place, row.low_ms, row.high_ms, color=plots.BLACK, linewidth=6)
            _right_of(right, row.high_ms, place, _span(row.low_ms, row.high_ms))
        else:
            right.plot(row.observed_ms, place, "D", color=plots.BLACK, markersize=10)
            _right_of(right, row.observed_ms, place, f"{number(row.observed_ms)} published")
    left.set_yticks(places, [textwrap.fill(name, 26) for name in steps.name])
    left.invert_yaxis()
    left.set_title("Two H200s: measured", fontsize=plots.FONT + 1)
    right.set_title("Study 1: bars modelled, ◆ published; own scale", fontsize=plots.FONT + 1)
    for ax, most in ((left, steps.p90_ms.max()), (right, np.nanmax(steps[["high_ms",
                     "observed_ms"]]))):  # fmt: skip
        ax.set_xlim(0, 1.42 * most)
        ax.set_xlabel("time per output token (ms)")
        ax.grid(axis="x")
        ax.grid(axis="y", visible=False)
    return plots.finding(fig, title, source)


def _right_of(ax, x: float, y: float, text: str) -> None:
    ax.annotate(text, (x, y), (9, 0), textcoords="offset points", va="center", weight="bold")


def _span(low: float, high: float, places: int = 1) -> str:
    """Return "low to high", or one number where both are written alike."""
    ends = dict.fromkeys((number(low, places), number(high, places)))
    return " to ".join(ends)


def hidden(systems: pd.DataFrame, *, title: str, source: str) -> Figure:
    """Draw what PIECEWISE adds without and with DCP, one pair of bars a system.

    Args:
        systems: verdict_account.hidden(...): indexed by name, alone_ms and shared_ms with their
            _low and _high (NaN where nothing is known), basis of shared_ms ("modelled" is drawn
            pale).
        title: The finding.
        source: What the numbers rest on.
    """
    fig, ax = plots.figure(size=(14, 7))
    places, width = np.arange(len(systems)), 0.36
    for offset, name, label, fill in (
        (-1, "alone", "without DCP", plots.BLUE),
        (1, "shared", "with DCP 2, pages read in place", plots.VERMILION),
    ):
        at = places + offset * width / 2
        ms, low, high = (systems[f"{name}_{end}"] for end in ("ms", "low", "high"))
        bars = ax.bar(at, ms, 0.94 * width, color=fill, label=label)
        for bar, basis in zip(bars, systems.basis, strict=True):
            bar.set_alpha(0.45 if name == "shared" and basis == "modelled" else 1.0)
        ax.errorbar(at, ms, yerr=[ms - low, high - ms], fmt="none", color=plots.BLACK, capsize=6)
        for x, row in zip(at, systems.itertuples(), strict=True):
            middle, top = getattr(row, f"{name}_ms"), getattr(row, f"{name}_high")
            modelled = name == "shared" and row.basis == "modelled"
            text = _span(row.shared_low, top) if modelled else number(middle)
            ax.annotate(
                text, (x, max(0.0, middle, -np.inf if np.isnan(top) else top)), (0, 7),
                textcoords="offset points", ha="center", weight="bold",
            )  # fmt: skip
    ax.set_xticks(places, [textwrap.fill(name, 22) for name in systems.index])
    ax.axhline(0, color=plots.BLACK, linewidth=1)
    ax.set_ylim(min(0, systems.alone_ms.min()) - 2, 1.25 * systems.shared_ms.max())
    ax.set_ylabel("PIECEWISE less full graphs (ms a token)")
    ax.legend(loc="upper left", ncols=2)
    return plots.finding(fig, title, source)


def against_context(
    steps: pd.DataFrame, lines: pd.DataFrame, *, title: str, source: str
) -> Figure:
    """Draw the published step under PIECEWISE over context, with the queues that the model sees.

    Args:
        steps: Measured: context_tokens, median_ms, p10_ms, p90_ms.
        lines: Modelled, indexed by context_tokens: step_ms, host_ms, gpu_ms.
        title: The finding.
        source: What the numbers rest on.
    """
    fig, ax = plots.figure(size=(13, 7))
    for name, label, fill, style in (
        ("step_ms", "the step, modelled", plots.VERMILION, "-"),
        ("host_ms", "the host's calls alone", plots.DARK_GREY, ":"),
        ("gpu_ms", "the GPU's work alone", plots.BLUE, "--"),
    ):
        ax.plot(lines.index, lines[name], style, color=fill, linewidth=3, label=label)
    spread = [steps.median_ms - steps.p10_ms, steps.p90_ms - steps.median_ms]
    ax.errorbar(
        steps.context_tokens,
        steps.median_ms,
        yerr=spread,
        fmt="o",
        color=plots.BLACK,
        markersize=10,
        capsize=6,
        label="measured",
    )
    for row in steps.itertuples():
        # Beside its neighbour 2,500 there is room to the right of 3,000 alone.
        beside = row.context_tokens == 3000
        ax.annotate(
            number(row.median_ms, 0),
            (row.context_tokens, row.median_ms if beside else row.p90_ms),
            (14, 0) if beside else (0, 9),
            textcoords="offset points",
            ha="left" if beside else "center",
            va="center" if beside else "bottom",
            weight="bold",
        )
    ax.set_xscale("log", base=2)
    ticks = [c for c in steps.context_tokens if c != 3000]
    ax.set_xticks(ticks, [f"{c:,}" for c in ticks])
    ax.minorticks_off()
    ax.set_ylim(0, 1.2 * steps.p90_ms.max())
    ax.set_xlabel("tokens of each request, over both ranks (log scale)")
    ax.set_ylabel("time per output token (ms)")
    ax.legend(loc="upper left")
    return plots.finding(fig, title, source)


def predicted(fit: Fit, *, source: str) -> Figure:
    """Draw predicted against measured steps, the fitted half and the predicted one."""
    fig, ax = plots.figure(size=(13, 8))
    ends = np.array([0.8 * fit.rows.median_ms.min(), 1.35 * fit.rows.p90_ms.max()])
    ax.fill_between(
        ends, (1 - MOST_ERROR) * ends, (1 + MOST_ERROR) * ends, color=plots.LIGHT_GREY, alpha=0.6,
        label=f"within {100 * MOST_ERROR:.0f} %",
    )  # fmt: skip
    ax.plot(ends, ends, color=plots.GREY)
    for mode, fill in MODE_COLORS.items():
        rows = fit.rows[fit.rows["mode"] == mode]
        for seen, marker, face in ((True, "o", "none"), (False, "D", fill)):
            some = rows[rows.seen == seen]
            spread = [some.median_ms - some.p10_ms, some.p90_ms - some.median_ms]
            ax.errorbar(
                some.median_ms, some.predicted_ms, xerr=spread, fmt=marker, color=fill,
                markerfacecolor=face, markersize=9, elinewidth=1.2,
                label=f"{MODE_NAMES[mode]}, {'fitted' if seen else 'predicted'}",
            )  # fmt: skip
    for row in fit.missed().itertuples():
        name = f"{row.attention} + {row.reducer}, {row.context_tokens:,}: {100 * row.error:+.0f} %"
        ax.annotate(
            name, (row.median_ms, row.predicted_ms), (-30, 60), textcoords="offset points",
            ha="right", weight="bold", arrowprops={"arrowstyle": "->"},
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticks = [10, 20, 50, 100, 200]
    for axis, limits in ((ax.xaxis, ax.set_xlim), (ax.yaxis, ax.set_ylim)):
        limits(*ends)
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    ax.set_xlabel("measured (ms a token; bars: 10th to 90th percentile)")
    ax.set_ylabel("predicted (ms a token)")
    ax.legend(loc="lower right")
    median, worst = 100 * fit.median_error, 100 * fit.worst_error
    held = "both targets met" if fit.holds else "the worst misses its target"
    return plots.finding(
        fig,
        f"{fit.free} constants from half of the steps predict the rest within "
        f"{number(median)} % (median), {number(worst)} % at worst: {held}",
        f"Targets for the predicted half: median {100 * MOST_MEDIAN_ERROR:.0f} %, worst "
        f"{100 * MOST_ERROR:.0f} %. {source}",
    )


def delays(table: pd.DataFrame, slopes: pd.DataFrame, *, title: str, source: str) -> Figure:
    """Draw steps whose every launch was delayed.

    Args:
        table: measured("stack_...").
        slopes: verdict_fit.slopes(table).
        title: The finding.
        source: What the numbers rest on.
    """
    fig, ax = plots.figure(size=(13, 7.5))
    fills = [plots.BLUE, plots.WINE, plots.DARK_GREY, plots.ORANGE]
    delay = table[table.block == "delay"]
    base = table[table.block == "base"]
    for corner, fill in zip(slopes.itertuples(), fills, strict=True):

        def pick(rows: pd.DataFrame, corner=corner) -> pd.DataFrame:
            names = rows.reducer.where(rows.dcp_size > 1, "no DCP")
            same = (rows["mode"] == corner.mode) & (rows.attention == corner.attention)
            return rows[same & (names == corner.reducer)].sort_values("launch_delay_us")

        rows, zero = pick(delay), pick(base)
        path = "study 1's gather" if corner.attention == "published" else corner.attention
        name = "no DCP" if corner.reducer == "no DCP" else f"{path} + {corner.reducer}"
        launches = f"{corner.launches:,} launch" + ("" if corner.launches == 1 else "es")
        label = f"{name}, {MODE_NAMES[corner.mode]}: {launches}"
        for some, line, face in ((rows, "-", fill), (zero, "", "white")):
            spread = [some.median_ms - some.p10_ms, some.p90_ms - some.median_ms]
            ax.errorbar(
                some.launch_delay_us, some.median_ms, yerr=spread, fmt=f"o{line}", color=fill,
                markerfacecolor=face, linewidth=3, markersize=10, capsize=6,
                label=label if line else None,
            )  # fmt: skip
        last = rows.iloc[-1]
        text = f"+{corner.ms_per_us:.2f} ms a us"
        _right_of(ax, last.launch_delay_us, last.median_ms, text)
    # Room for the slopes behind the last points.
    ax.set_xlim(-2, 40)
    ax.set_xticks(sorted({0.0, *delay.launch_delay_us}))
    ax.set_ylim(0, 1.5 * delay.p90_ms.max())
    ax.set_xlabel("host time added to every launch (us)")
    ax.set_ylabel("time per output token (ms)")
    ax.legend(loc="upper left")
    return plots.finding(fig, title, source)


def shares(columns: Mapping[str, pd.DataFrame], *, title: str, source: str) -> Figure:
    """Draw each player's share of what DCP adds, in several accounts side by side.

    Args:
        columns: Account -> table indexed by player: share (NaN where it is only bounded), low,
            high.
        title: The finding.
        source: What the numbers rest on.
    """
    fig, ax = plots.figure(size=(15, 7.5))
    width = 0.8 / len(columns)
    players = list(shares_.PLAYERS)
    for i, table in enumerate(columns.values()):
        for j, player in enumerate(players):
            at = j + (i - (len(columns) - 1) / 2) * width
            row = table.loc[player]
            middle = (row.low + row.high) / 2 if np.isnan(row.share) else row.share
            hollow = np.isnan(row.share)
            ax.bar(
                at, 100 * middle, 0.9 * width, color="none" if hollow else PLAYER_COLORS[player],
                edgecolor=plots.DARK_GREY if hollow else PLAYER_COLORS[player], linewidth=2,
                alpha=1 - 0.17 * i,
            )  # fmt: skip
            ax.errorbar(
                at, 100 * middle, yerr=[[100 * (middle - row.low)], [100 * (row.high - middle)]],
                fmt="none", color=plots.BLACK, capsize=5,
            )  # fmt: skip
            # Below the axes, where no bar reaches.
            ax.annotate(
                f"{i + 1}", (at, 0), (0, -18), xycoords=ax.get_xaxis_transform(),
                textcoords="offset points", ha="center", color=plots.DARK_GREY,
                fontsize=plots.FONT - 1,
            )  # fmt: skip
            ax.annotate(
                number(100 * middle, 0), (at, 100 * row.high), (0, 5), weight="bold",
                textcoords="offset points", ha="center",
            )  # fmt: skip
    ax.set_xticks(range(len(players)), players)
    ax.tick_params(axis="x", pad=24, length=0)
    ax.axhline(0, color=plots.BLACK, linewidth=1)
    ax.set_ylabel("share of what DCP adds (%)")
    highest = 100 * max(table.high.max() for table in columns.values())
    ax.set_ylim(min(0, 100 * min(t.low.min() for t in columns.values())) - 2, 1.1 * highest)
    key = "\n".join(f"{i}  {name}" for i, name in enumerate(columns, 1))
    ax.text(0.99, 0.98, key, transform=ax.transAxes, ha="right", va="top")
    return plots.finding(fig, title, source)


def study_parts(parts: pd.DataFrame, *, added_ms: float, title: str, source: str) -> Figure:
    """Draw the parts of study 1's added time that add to it, each between its low and its high.

    Args:
        parts: Indexed by part: low, high, in ms.
        added_ms: What they add up to.
        title: The finding.
        source: What the numbers rest on.
    """
    fig, ax = plots.figure(size=(14, 7))
    parts = parts[parts.high > 0]
    for place, (name, row) in enumerate(parts.iterrows()):
        ax.barh(place, row.high - row.low, 0.6, left=row.low, color=PART_COLORS[name])
        ax.vlines((row.low + row.high) / 2, place - 0.3, place + 0.3, color=plots.BLACK)
        low, high = 100 * row.low / added_ms, 100 * row.high / added_ms
        places = 1 if high < 1 else 0
        text = f"{_span(row.low, row.high)} ms: {_span(low, high, places)} %"
        _right_of(ax, row.high, place, text)
    ax.set_yticks(range(len(parts)), parts.index)
    ax.invert_yaxis()
    ax.set_xlim(min(0, 1.2 * parts.low.min()), 1.6 * parts.high.max())
    ax.set_xlabel(f"of the {number(added_ms)} ms that DCP 2 adds (ms)")
    ax.grid(axis="x")
    ax.grid(axis="y", visible=False)
    return plots.finding(fig, title, source)


def gain(stack: pd.DataFrame, served: pd.DataFrame, *, title: str, source: str) -> Figure:
    """Draw full-graph steps over context, without DCP and with each exchange: stack and engine.

    Args:
        stack: verdict_gain.full_steps(...).
        served: analysis.engines.chosen(...); its engines in full graphs are drawn.
        title: The finding.
        source: What the numbers rest on.
    """
    fig, (left, right) = plots.figure(1, 2, size=(16, 8), sharey=True)
    looks = {
        "no DCP": STYLES["none_full"],
        "ag_rs": (plots.color("ag_rs"), "D"),
        "direct": STYLES["ours_direct_full"],
    }
    for name, look in looks.items():
        label = name if name == "no DCP" else f"DCP 2, {name}"
        _over_context(left, stack.loc[name], label, look)
    served = served.rename(columns={"least_ms": "p10_ms", "most_ms": "p90_ms"})
    served = served[served.index.isin(engines.IN_FULL_GRAPHS, level="row")]
    for row in served.index.unique("row"):
        rows, label = served.loc[row], engines.NAMES[row]
        apart = bool(rows.apart.all())
        _over_context(
            right, rows, f"{label} (another run)" if apart else label, STYLES[row],
            line="--" if apart else "-",
        )  # fmt: skip
    left.set_title("The stack", fontsize=plots.FONT + 1)
    right.set_title("vLLM 0.25.1", fontsize=plots.FONT + 1)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(shown := (1000, 2000, 4000, 8000, 16000, 32000), [f"{c:,}" for c in shown])
        ax.minorticks_off()
        ax.set_xlim(850, 56000)
        ax.set_xlabel("tokens of each of 16 requests (log scale)")
        ax.legend(loc="upper left", fontsize=plots.FONT - 1)
    left.set_ylim(0, 1.4 * max(stack.p90_ms.max(), served.p90_ms.max()))
    left.set_yticks(range(0, int(left.get_ylim()[1]) + 1, 4))
    left.set_ylabel("time per output token (ms)")
    return plots.finding(fig, title, source)


def _over_context(
    ax, rows: pd.DataFrame, label: str, look: tuple[str, str], line: str = "-"
) -> None:
    fill, marker = look
    spread = [rows.median_ms - rows.p10_ms, rows.p90_ms - rows.median_ms]
    ax.errorbar(
        rows.index, rows.median_ms, yerr=spread, fmt=f"{marker}{line}", color=fill, linewidth=3,
        markersize=9, capsize=5, label=label,
    )  # fmt: skip
    if rows.index[-1] < 30000:
        return
    # The lines that end close to another have their number a little off it.
    apart = {"DCP 2, ag_rs": 0.3, "no DCP": -0.3}.get(label, 0.0)
    _right_of(ax, rows.index[-1], rows.median_ms.iloc[-1] + apart, number(rows.median_ms.iloc[-1]))


def traces(layers: Mapping[str, Sequence[Mapping[str, object]]], *, source: str) -> Figure:
    """Draw one layer of each step as its profiler saw it: the host's launches, the GPU's kernels.

    Args:
        layers: Name -> verdict_traces.one_layer(...).
        source: What was traced.
    """
    fig, axes = plots.figure(
        len(layers), 1, size=(14, 2.2 + 1.45 * len(layers)), sharex=True, squeeze=False
    )
    fills = {"host": plots.YELLOW, "GPU": plots.BLUE, "exchange": plots.ORANGE}
    longest = max(e["end"] for layer in layers.values() for e in layer)
    for ax, (name, layer) in zip(axes[:, 0], layers.items(), strict=True):
        for event in layer:
            row = 0 if event["row"] == "host" else 1
            ax.broken_barh(
                [(event["begin"], max(event["end"] - event["begin"], longest / 800))],
                (row + 0.1, 0.8), color=fills[event["row"]],
            )  # fmt: skip
        end = max(e["end"] for e in layer)
        _right_of(ax, end, 1.0, f"{end:,.0f} us")
        ax.set_ylim(2, 0)
        ax.set_yticks([0.5, 1.5], ["host", "GPU"])
        ax.set_title(name, loc="left", fontsize=plots.FONT + 1)
        ax.grid(visible=False)
    axes[-1, 0].set_xlim(0, 1.15 * longest)
    axes[-1, 0].set_xlabel("us")
    ends = {name: max(e["end"] for e in layer) for name, layer in layers.items()}
    first, last = max(ends, key=ends.get), min(ends, key=ends.get)
    return plots.finding(
        fig,
        f"One layer takes {ends[first]:,.0f} us as {first}, {ends[last]:,.0f} as {last}",
        f"Measured: {source}; the profiler slows the host. Orange: exchange kernels, their waits "
        "included. H200, not MI355X.",
    )
