"""Figures that can be read across a room: large type, units, the finding as the title.

A function here takes tables and returns a matplotlib Figure. It draws; what is true is computed
in dcp_lab.analysis. Colours are from the Okabe-Ito palette, which colour-blind readers can tell
apart; a variant has the same colour in every figure and notebook.
"""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from dcp_lab.analysis.attribution import Growth, NoGather

FONT = 15
TITLE_FONT = 20
DPI = 100
# Flat colours and grey edges of letters: more would only make notebooks heavier.
PNG_COLORS = 64

BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
YELLOW, VERMILION, PURPLE, BLACK = "#F0E442", "#D55E00", "#CC79A7", "#000000"
LIGHT_PURPLE, WINE = "#E8BFD7", "#882255"
DARK_GREY, GREY, LIGHT_GREY = "#4D4D4D", "#8C8C8C", "#D9D9D9"

# One fixed colour a variant, and no two alike among those that share a figure.
PALETTE = {
    # engine runs
    "dcp1_full": BLUE,
    "dcp1_piecewise": SKY,
    "dcp2": VERMILION,
    # graph modes
    "FULL_AND_PIECEWISE": BLUE,
    "PIECEWISE": VERMILION,
    # ways to attend
    "paged": GREEN,
    "gather": PURPLE,
    "per_token": PURPLE,
    "per_page": LIGHT_PURPLE,
    "published": WINE,
    "contiguous": GREY,
    "read": LIGHT_GREY,
    # reducers
    "ag_rs": DARK_GREY,
    "a2a": ORANGE,
    "direct": WINE,
    # parts of an account
    "launches": YELLOW,
    "open": LIGHT_GREY,
}


def color(variant: str) -> str:
    """Return a variant's colour.

    Raises:
        ValueError: The variant has none.
    """
    if variant not in PALETTE:
        raise ValueError(f"variant: expected one of {', '.join(PALETTE)}, got {variant!r}")
    return PALETTE[variant]


def use_style() -> None:
    """Set the lab's look for every figure of this process."""
    mpl.rcParams.update(
        {
            "font.size": FONT,
            "axes.labelsize": FONT,
            "xtick.labelsize": FONT,
            "ytick.labelsize": FONT,
            "legend.fontsize": FONT,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.color": "#E6E6E6",
            "legend.frameon": False,
            "figure.dpi": DPI,
            "savefig.dpi": DPI,
            "figure.facecolor": "white",
        }
    )


def _show_small() -> None:
    """In a notebook, show figures as png() makes them; elsewhere do not load IPython for it."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        shell.display_formatter.formatters["image/png"].for_type(Figure, png)


def png(fig: Figure) -> bytes:
    """Return a figure as a PNG of PNG_COLORS colours, a third of the usual size."""
    plain = io.BytesIO()
    fig.savefig(plain, format="png")
    small = io.BytesIO()
    image = Image.open(plain).convert("RGB")
    image.quantize(PNG_COLORS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def figure(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (13, 7), **options
) -> tuple[Figure, Axes]:
    """Return a figure and its axes in the lab's look; options go to plt.subplots."""
    use_style()
    fig, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", **options)
    return fig, axes


def finding(fig: Figure, title: str, source: str) -> Figure:
    """Put the finding above a figure and where its numbers come from below it.

    Args:
        fig: The figure.
        title: What the figure shows to be so, in one sentence.
        source: Table, machine and kind (published, measured, modelled) of what is drawn.

    Returns:
        The figure, closed for pyplot: a notebook shows it once, where it is returned.
    """
    # Matplotlib does not wrap a suptitle at the figure's edge. Bold letters are about 0.66 of the
    # font's size wide, plain ones 0.52.
    width = fig.get_figwidth() * 72
    # No line may start with a percent sign.
    title = title.replace(" %", "\N{NO-BREAK SPACE}%")
    title = textwrap.fill(title, int(width / (TITLE_FONT * 0.66)))
    source = textwrap.fill(source, int(width / (FONT * 0.52)))
    fig.suptitle(title, fontsize=TITLE_FONT, fontweight="bold", x=0.01, ha="left")
    fig.supxlabel(source, fontsize=FONT - 1, color="#595959", x=0.01, ha="left")
    plt.close(fig)
    # Not earlier: pyplot's first figure in a notebook sets the usual way to show one.
    _show_small()
    return fig


def number(value: float, places: int = 1) -> str:
    """Return a number as its table would be rounded by hand: 83.35 becomes 83.4."""
    step = Decimal(1).scaleb(-places)
    return f"{Decimal(repr(float(value))).quantize(step, ROUND_HALF_UP):,}"


def _label_bars(ax: Axes, bars, values: Iterable[float], places: int = 1) -> None:
    labels = [number(value, places) for value in values]
    ax.bar_label(bars, labels, padding=4, fontsize=FONT + 1, fontweight="bold")


def _note(ax: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **options):
    """Write beside a point, shifted by so many points."""
    ax.annotate(text, at, xytext=shift, textcoords="offset points", **options)


def two_studies(tpot: pd.DataFrame, contexts: pd.Series, modes: pd.DataFrame) -> Figure:
    """Draw the two published studies side by side, as TPOT.

    Args:
        tpot: attribution.metric(serve, MEAN_TPOT): a row a setting, a column a variant.
        contexts: Mean context by setting.
        modes: published_graph_modes().
    """
    fig, (left, right) = figure(1, 2, width_ratios=[2.2, 1])
    names = {
        "dcp1_full": "DCP 1, full graphs",
        "dcp1_piecewise": "DCP 1, PIECEWISE",
        "dcp2": "DCP 2",
    }
    width = 0.27
    for offset, (variant, label) in enumerate(names.items()):
        where = [row + (offset - 1) * width for row in range(len(tpot))]
        bars = left.bar(where, tpot[variant], width * 0.94, color=color(variant), label=label)
        _label_bars(left, bars, tpot[variant])
    left.set_xticks(range(len(tpot)), [f"mean context\n{c:,.0f} tokens" for c in contexts])
    left.set_ylabel("time per output token (ms)")
    left.set_title(
        "Study 1: Qwen3-235B (GQA), TP 8, AMD;\nGPU model and DCP 2's graph mode not stated",
        fontsize=FONT,
    )
    left.set_ylim(0, tpot.to_numpy().max() * 1.3)
    left.legend(loc="upper center", ncols=3, columnspacing=1.2, handlelength=1.2)

    shown = modes.set_index("cudagraph_mode").mean_tpot_ms
    bars = right.bar(range(len(shown)), shown, 0.6, color=[color(mode) for mode in shown.index])
    _label_bars(right, bars, shown, places=0)
    names = {"FULL_AND_PIECEWISE": "full graphs"}
    right.set_xticks(range(len(shown)), [names.get(mode, mode) for mode in shown.index])
    right.set_ylim(0, shown.max() * 1.3)
    right.set_title("Study 2: Kimi-K3 (MLA),\nTP 8, DCP 8, MI355X", fontsize=FONT)

    slower = (tpot["dcp2"] / tpot["dcp1_full"]).iloc[0]
    faster = shown["PIECEWISE"] / shown["FULL_AND_PIECEWISE"]
    return finding(
        fig,
        f"DCP 2 made a token {number(slower)}x slower in study 1; "
        f"full graphs made it {number(faster)}x faster in study 2",
        "Published: data/published/qwen3_235b_tp8_serve.csv (mean TPOT), "
        "kimi_k3_tp8_dcp8_graph_modes.csv. The two panels have their own scales.",
    )


def added_against_context(added: pd.DataFrame, growth: Growth) -> Figure:
    """Draw study 1's added time over mean context, with what a proportional cost would do.

    Args:
        added: attribution.added_time(serve).
        growth: attribution.context_growth(serve).
    """
    fig, ax = figure()
    added = added.sort_values("context_tokens")
    first, last = added.iloc[0], added.iloc[-1]
    reach = [0, last.context_tokens * 1.12]
    slope = first.added_ms / first.context_tokens
    ax.plot(reach, [slope * x for x in reach], "--", color=GREY, linewidth=2.5)
    middle = 0.55 * last.context_tokens
    _note(
        ax,
        "if all of it were proportional\nto the gathered tokens",
        (middle, slope * middle),
        (14, -4),
        va="top",
        color=DARK_GREY,
    )
    ax.errorbar(
        added.context_tokens,
        added.added_ms,
        # The allowance is that of a difference of two of these points.
        yerr=growth.allowance_ms / 2**0.5,
        fmt="o",
        markersize=9,
        capsize=9,
        linewidth=2.5,
        color=color("dcp2"),
    )
    for row in added.itertuples():
        at = (row.context_tokens, row.added_ms)
        text = f"{number(row.added_ms)} ms"
        _note(ax, text, at, (0, -22), ha="center", va="top", weight="bold", color=color("dcp2"))
    proportional = first.added_ms + growth.proportional_ms
    at = (last.context_tokens, proportional)
    _note(ax, f"{number(proportional)} ms", at, (-14, 6), ha="right", color=DARK_GREY)
    ax.set_xlim(*reach)
    ax.set_ylim(0, slope * reach[1] * 1.06)
    ax.set_xlabel("mean context of a request (tokens)")
    ax.set_ylabel("added by DCP 2 per output token (ms)")
    return finding(
        fig,
        f"The added time does not grow with the context: {number(first.added_ms)} ms at "
        f"{first.context_tokens:,.0f} tokens, {number(last.added_ms)} at "
        f"{last.context_tokens:,.0f}",
        "Published: data/published/qwen3_235b_tp8_serve.csv, mean TPOT, DCP 2 minus DCP 1 with "
        "full graphs. Bars: allowance for the spread between runs (the study has no repeats).",
    )


def gather_bytes(floor: pd.DataFrame, *, added_ms: float, context_tokens: float) -> Figure:
    """Draw what the gather's bytes cost a step beside the added time, on a log scale.

    Args:
        floor: attribution.gather_floor(...).
        added_ms: The added time that is to be explained.
        context_tokens: The context that floor was computed at.
    """
    fig, ax = figure(size=(13, 6.5))
    names = [name.removeprefix("AMD Instinct ").removeprefix("NVIDIA ") for name in floor.index]
    ax.hlines(range(len(floor)), floor.low_ms, floor.high_ms, color=color("gather"), linewidth=22)
    for place, row in enumerate(floor.itertuples()):
        text = (
            f"{number(row.low_ms, 2)} to {number(row.high_ms, 2)} ms: "
            f"{number(100 * row.low_share)} to {number(100 * row.high_share)} %"
        )
        middle = (row.low_ms * row.high_ms) ** 0.5
        _note(ax, text, (middle, place), (0, 20), ha="center", weight="bold")
    ax.axvline(added_ms, color=BLACK, linewidth=3)
    at = (added_ms, len(floor) - 0.5)
    _note(ax, f"added by DCP 2:\n{number(added_ms)} ms", at, (-10, 0), ha="right", va="top")
    ax.set_xscale("log")
    ax.set_xlim(min(0.05, floor.low_ms.min() / 3), max(200, floor.high_ms.max() * 3))
    ticks = [tick for tick in (0.01, 0.1, 1, 10, 100) if ax.get_xlim()[0] <= tick]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.grid(axis="x")
    ax.set_yticks(range(len(floor)), names)
    ax.set_ylim(-0.6, len(floor) - 0.3)
    ax.set_xlabel("extra time per output token (ms, log scale)")
    low, high = 100 * floor.low_share.min(), 100 * floor.high_share.max()
    return finding(
        fig,
        f"A gather's bytes cost {number(low)} to {number(high)} % of the added time "
        f"(context {context_tokens:,.0f} tokens)",
        "Modelled: a copy written and read in each layer, from the vendor's peak to the lowest "
        "bandwidth figure in dcp_lab/bench/hardware.py. Line: published, study 1.",
    )


def engine_modes(modes: pd.DataFrame, account: NoGather) -> Figure:
    """Draw vLLM's TPOT on two H200s by graph mode and DCP, where nothing is gathered.

    Args:
        modes: attribution.engine_modes(measured_vllm()).
        account: attribution.no_gather_account(measured_vllm()).
    """
    fig, ax = figure()
    runs = [
        ((1, "none"), "DCP 1", color("dcp1_full")),
        ((2, "a2a"), "DCP 2, a2a", color("a2a")),
        ((2, "ag_rs"), "DCP 2, ag_rs", color("ag_rs")),
    ]
    groups = {"FULL_AND_PIECEWISE": "full graphs", "PIECEWISE": "PIECEWISE"}
    width = 0.27
    for place, mode in enumerate(groups):
        for offset, (run, label, fill) in enumerate(runs):
            where = place + (offset - 1) * width
            if (*run, mode) not in modes.index:
                ax.text(where, 1, "not\nmeasured", ha="center", va="bottom", color=DARK_GREY)
                continue
            row = modes.loc[(*run, mode)]
            bar = ax.bar(where, row.tpot_ms, width * 0.94, color=fill)
            if place == 0:
                bar.set_label(label)
            text = number(row.tpot_ms) + ("" if run[0] == 1 else f"\n({number(row.ratio)}x)")
            ax.bar_label(bar, [text], padding=4, fontsize=FONT + 1, fontweight="bold")
    ax.set_xticks(range(len(groups)), groups.values())
    ax.set_xlim(-0.55, len(groups) - 0.45)
    ax.set_ylabel("time per output token (ms)")
    ax.set_ylim(0, modes.tpot_ms.max() * 1.22)
    ax.legend(loc="upper left")
    return finding(
        fig,
        f"With no gather at all, DCP 2 is still {number(account.ratio)}x slower under PIECEWISE",
        "Measured: data/measured/vllm_h200_dcp.csv, two H200s, FlashAttention 3 on the paged "
        "cache, dummy weights, light dense part; medians of 3. H200, not MI355X.",
    )


def attention_paths(
    rows: pd.DataFrame,
    *,
    layers: int,
    added_ms: float,
    source: str,
    kernels: str,
    modes: Sequence[str] = ("graph", "eager"),
) -> Figure:
    """Draw one layer's attention, paged and gathered, in a graph and launched eagerly.

    Args:
        rows: attribution.covering_shape(...): one shape's rows.
        layers: Layers of a step.
        added_ms: The added time to compare with.
        source: The rows' table.
        kernels: Whose attention it is, for the title: "FA3", "this lab's unsplit attend".
        modes: Which of "graph" and "eager" to draw. Default: both.
    """
    rows = rows[rows["mode"].isin(modes)]
    fig, axes = figure(1, len(modes), size=(14, 7.5), sharey=True, squeeze=False)
    axes = axes[0]
    labels = [
        label
        for path in ("read", "contiguous", "paged", "gather")
        for label in sorted(set(rows[rows.path == path].label), reverse=True)
    ]
    titles = {"graph": "in a graph", "eager": "launched eagerly (wall time)"}
    for ax, mode in zip(axes, modes, strict=True):
        shown = rows[rows["mode"] == mode]
        for row in shown.itertuples():
            place = labels.index(row.label)
            fill = color("per_page" if row.label.startswith("per_page") else row.path)
            ax.barh(place, row.median_us, 0.62, color=fill)
            spread = [[row.median_us - row.low_us], [row.high_us - row.median_us]]
            ax.errorbar(row.median_us, place, xerr=spread, color=BLACK, capsize=5, linewidth=1.5)
            text = number(row.median_us)
            if row.path == "gather":
                text += f"\n+{number(row.extra_us * layers / 1e3)} ms a step"
            _note(ax, text, (row.high_us, place), (8, 0), va="center", weight="bold")
        ax.set_title(titles[mode], fontsize=FONT + 1)
        ax.set_xlim(0, shown.high_us.max() * 1.6)
        ax.set_xlabel("one layer (us)")
        ax.grid(axis="x")
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(labels)), labels)
    extra = rows[rows.path == "gather"].extra_us.max() * layers / 1e3
    first = rows.iloc[0]
    return finding(
        fig,
        f"With {kernels}: a gather in {layers} layers adds up to {number(extra)} ms a step at an "
        f"H200's price, {number(100 * extra / added_ms, 0)} % of study 1's "
        f"{number(added_ms, 0)} ms",
        f"Measured: {source}, one {first.gpu}, {first.requests} x {first.context_tokens:,} tokens "
        f"on it, {first.num_q_heads} q heads. Step: extra over the best paged way, times {layers} "
        "layers. H200, not MI355X.",
    )


def step_against_context(busy: pd.DataFrame, *, layers: int, requests: int) -> Figure:
    """Draw a whole step's GPU time over context, paged, well gathered and as published.

    Args:
        busy: attribution.step_gpu_time(...).
        layers: Layers of the step.
        requests: Requests decoded together.
    """
    fig, ax = figure()
    names = {"published": "published gather", "per_page": "per_page gather", "paged": "paged"}
    # Numbers of lines that lie close together go above and below.
    below = {"paged"}
    # On this axis two near contexts leave no room for both their numbers.
    named: list[int] = []
    for tokens in busy.index:
        if not named or tokens > 1.3 * named[-1]:
            named.append(tokens)
    for attention, name in names.items():
        line = busy[attention].dropna()
        ax.plot(line.index, line, "o-", color=color(attention), linewidth=3, markersize=9)
        for tokens, value in line[line.index.isin(named)].items():
            drop = attention in below
            _note(
                ax,
                number(value),
                (tokens, value),
                (0, -10 if drop else 8),
                ha="center",
                va="top" if drop else "bottom",
                weight="bold",
            )
        _note(ax, name, (line.index[-1], line.iloc[-1]), (22, 0), va="center")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(named, [f"{tokens:,}" for tokens in named])
    ax.minorticks_off()
    ticks = [1, 3, 10, 30, 100, 300, 1000]
    ax.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.set_ylim(busy.min().min() / 1.8, busy.max().max() * 1.9)
    ax.set_xlim(busy.index.min() / 1.25, busy.index.max() * 2.4)
    ax.set_xlabel("tokens of each request on the GPU (log scale)")
    ax.set_ylabel("GPU time of one step (ms, log scale)")
    both = busy[["paged", "published"]].dropna()
    first, last = both.iloc[0], both.iloc[-1]
    return finding(
        fig,
        f"The published gather takes {number(first.published / first.paged, 0)}x the paged step's "
        f"GPU time at {both.index[0]:,} tokens, {number(last.published / last.paged, 0)}x at "
        f"{both.index[-1]:,}",
        f"Measured: data/measured/stack_h200.csv, one NVIDIA H200, {layers} layers, {requests} "
        "requests, no DCP, light dense part; GPU busy in a profiled step, n = 1 a mode. "
        "H200, not MI355X.",
    )


def step_modes(modes: pd.DataFrame, *, layers: int, shape: str) -> Figure:
    """Draw a whole step's wall time by attention path, in a full graph and under PIECEWISE.

    Args:
        modes: attribution.step_modes(...).
        layers: Layers of the step.
        shape: Requests x tokens, for the source line.
    """
    fig, axes = figure(1, 2, size=(14, 7.5), sharey=True)
    paths = {
        "published": "published gather",
        "published_no_sync": "published,\nno host sync",
        "per_token": "per_token gather",
        "per_page": "per_page gather",
        "paged": "paged",
    }
    for ax, mode in zip(axes, ("full", "piecewise"), strict=True):
        for place, path in enumerate(paths):
            if (mode, path) not in modes.index:
                ax.text(1, place, "cannot be captured (host sync)", va="center", color=DARK_GREY)
                continue
            row = modes.loc[(mode, path)]
            fill = color("published" if path.startswith("published") else path)
            ax.barh(place, row.median_ms, 0.62, color=fill)
            spread = [[row.median_ms - row.p10_ms], [row.p90_ms - row.median_ms]]
            ax.errorbar(row.median_ms, place, xerr=spread, color=BLACK, capsize=5, linewidth=1.5)
            text = f"{number(row.median_ms)}\n(GPU {number(row.gpu_busy_ms)})"
            _note(ax, text, (row.p90_ms, place), (8, 0), va="center", weight="bold")
        ax.set_xlim(0, modes.loc[["full", "piecewise"]].p90_ms.max() * 1.4)
        ax.set_xlabel("one step (ms)")
        ax.grid(axis="x")
        ax.grid(axis="y", visible=False)
    axes[0].set_title("in a full graph", fontsize=FONT + 1)
    axes[1].set_title("PIECEWISE (uneven host)", fontsize=FONT + 1)
    # In the order of a ranking: the slowest at the top.
    axes[0].set_yticks(range(len(paths)), paths.values())
    axes[0].invert_yaxis()
    full = modes.loc["full"].median_ms
    return finding(
        fig,
        f"In a full graph the best gather adds {number(full.per_page - full.paged)} ms a step, "
        f"the published one {number(full.published_no_sync - full.paged)}",
        f"Measured: data/measured/stack_h200.csv, one NVIDIA H200, {layers} layers, {shape} "
        "tokens, no DCP; bars 10th to 90th percentile of 7 samples of 3 steps. Host time of "
        "calls that check their arguments in Python. H200, not MI355X.",
    )


def waterfall(
    parts: pd.DataFrame, account: NoGather, *, base_ms: float, added_ms: float
) -> Figure:
    """Draw study 1's added time, explained and open, beside the H200's, where nothing is gathered.

    Args:
        parts: attribution.waterfall(...).
        account: attribution.no_gather_account(...).
        base_ms: Study 1's TPOT without DCP.
        added_ms: Study 1's added time.
    """
    fig, (left, right) = figure(1, 2, size=(15, 8.5), width_ratios=[1.55, 1], sharey=True)
    names = ["DCP 1", *(name.replace("gather: its", "gather:") for name in parts.index), "DCP 2"]
    left.bar(0, base_ms, 0.72, color=color("dcp1_full"))
    left.bar(len(names) - 1, base_ms + added_ms, 0.72, color=color("dcp2"))
    _top(left, 0, base_ms, number(base_ms))
    _top(left, len(names) - 1, base_ms + added_ms, number(base_ms + added_ms))
    level = base_ms
    for place, row in enumerate(parts.itertuples(), start=1):
        is_open = row.state == "open"
        # Explained parts are drawn at their largest, so the open part at its smallest.
        height = row.low_ms if is_open else row.high_ms
        fill = color("open" if is_open else "gather")
        style = {"hatch": "//", "edgecolor": GREY} if is_open else {}
        left.bar(place, height, 0.72, bottom=level, color=fill, **style)
        level += height
        _top(left, place, level, f"{number(row.low_ms)} to {number(row.high_ms)}")
    left.set_xticks(range(len(names)), [textwrap.fill(name, 12) for name in names])
    left.set_ylabel("time per output token (ms)")
    left.set_title("Study 1 (AMD, GPU model not stated)", fontsize=FONT + 1)
    left.set_ylim(0, (base_ms + added_ms) * 1.22)
    left.legend(
        handles=[
            Patch(color=color("gather"), label="a gather, at most (host sync apart)"),
            Patch(
                facecolor=color("open"),
                edgecolor=GREY,
                hatch="//",
                label="open: not measured there",
            ),
        ],
        loc="upper left",
    )

    base = account.added_ms / (account.ratio - 1)
    steps = [
        ("DCP 1, PIECE- WISE", 0.0, base, color("dcp1_piecewise")),
        ("left under full graphs", base, account.full_ms, color("a2a")),
        ("removed by full graphs", base + account.full_ms, account.removed_ms, color("launches")),
        ("DCP 2, PIECE- WISE", 0.0, base + account.added_ms, color("dcp2")),
    ]
    for place, (_, start, height, fill) in enumerate(steps):
        right.bar(place, height, 0.72, bottom=start, color=fill)
        _top(right, place, start + height, number(height))
    right.set_xticks(range(len(steps)), [textwrap.fill(name, 10) for name, *_ in steps])
    right.set_title("Two H200s, a2a, no gather", fontsize=FONT + 1)
    explained = parts[parts.state == "explained"].high_ms.sum()
    return finding(
        fig,
        f"A gather is at most {number(100 * explained / added_ms, 0)} % of study 1's added time "
        "at H200 prices, all parts added; full graphs remove "
        f"{number(100 * account.removed_share, 0)} % of what two H200s add without one",
        "Left: TPOT published; the gather's bytes modelled (MI355X, MI300X); its kernels (best "
        "gather to the published one, 94 layers) and launches measured on an H200; its host sync "
        "is in the open part. Right: measured, "
        "data/measured/vllm_h200_dcp.csv. H200 numbers are not MI355X numbers.",
    )


def _top(ax: Axes, place: float, height: float, text: str) -> None:
    _note(ax, text, (place, height), (0, 6), ha="center", weight="bold")
