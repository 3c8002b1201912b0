"""Figures of graph modes: two queues, launches a step, and what a launch would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dcp_lab import plots
from dcp_lab.analysis.graph_steps import AT_TOKENS, LIMIT_US
from dcp_lab.bench.costs import Work, queue_spans

HOST, GPU = plots.YELLOW, plots.BLUE


def queues(steps: Mapping[str, Sequence[Work]], layers: int, title: str) -> Figure:
    """Draw the host's and the GPU's queue of a few layers, one panel a step.

    Args:
        steps: Name -> one layer's calls.
        layers: Layers to draw.
        title: The finding.
    """
    fig, axes = plots.figure(
        len(steps), 1, size=(13, 1.6 + 2.0 * len(steps)), sharex=True, squeeze=False
    )
    for ax, (name, layer) in zip(axes[:, 0], steps.items(), strict=True):
        for row, (spans, fill) in enumerate(
            zip(queue_spans(layer, layers), (HOST, GPU), strict=True)
        ):
            bars = [(begin, end - begin) for begin, end in spans]
            ax.broken_barh(bars, (row + 0.1, 0.8), color=fill, edgecolor="white", linewidth=0.8)
        end = max(span[1] for spans in queue_spans(layer, layers) for span in spans)
        ax.axvline(end, color=plots.BLACK, linewidth=2)
        ax.annotate(
            f"{end / layers:.0f} us a layer",
            (end, 1.0),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
        )
        ax.set_ylim(2, 0)
        ax.set_yticks([0.5, 1.5], ["host", "GPU"])
        ax.set_title(name, loc="left", fontsize=plots.FONT + 1)
        ax.grid(visible=False)
        ax.tick_params(left=False)
    longest = max(
        span[1]
        for layer in steps.values()
        for spans in queue_spans(layer, layers)
        for span in spans
    )
    axes[-1, 0].set_xlim(0, 1.2 * longest)
    axes[-1, 0].set_xlabel("us")
    return plots.finding(
        fig, title, "Modelled: dcp_lab.bench.costs.queue_spans, times as given above."
    )


def launches(counts: pd.DataFrame, layers: int) -> Figure:
    """Draw how many launches a step takes in each mode.

    Args:
        counts: One row a combination, columns "eager", "piecewise", "full".
        layers: Of the step.
    """
    fig, ax = plots.figure(size=(13, 7))
    fills = {"eager": plots.LIGHT_GREY, "piecewise": plots.VERMILION, "full": plots.BLUE}
    width = 0.27
    for column, (mode, fill) in enumerate(fills.items()):
        drawn = [(row, n) for row, n in enumerate(counts[mode]) if pd.notna(n)]
        places = [row + (column - 1) * width for row, _ in drawn]
        values = [int(n) for _, n in drawn]
        bars = ax.bar(places, values, 0.94 * width, color=fill, label=mode)
        ax.bar_label(bars, [f"{n:,}" for n in values], padding=3, fontsize=plots.FONT)
    ax.set_yscale("log")
    ax.set_ylim(0.7, 30 * counts.max().max())
    ax.set_xticks(range(len(counts)), [name.replace(" + ", "\n+ ") for name in counts.index])
    ax.set_ylabel("launches from the host, a step")
    ax.legend(ncols=3, loc="upper center")
    least, most = counts.piecewise.min(), counts.piecewise.max()
    return plots.finding(
        fig,
        f"DCP makes {most / least:.1f}x the launches under PIECEWISE, no more in a full graph",
        f"Counted here: the calls of dcp_lab.stack, {layers} layers. A combination without a full "
        "graph waits for the device inside the step.",
    )


def cost_of_a_launch(table: pd.DataFrame, *, source: str) -> Figure:
    """Draw what PIECEWISE adds to a layer, and to each of its launches.

    Args:
        table: graph_steps.launch_costs(...).
        source: Tables, machines and kinds of the rows.
    """
    colors = (plots.SKY, plots.GREEN, plots.VERMILION)
    fills = dict(zip(table.basis.unique(), colors, strict=False))
    fig, axes = plots.figure(1, 2, size=(15, 2.2 + 0.75 * len(table)), sharey=True)
    for ax, values, label in zip(
        axes,
        (table.added_us, table.each_us),
        ("added to a layer with KV (us)", "the same for each launch (us)"),
        strict=True,
    ):
        bars = ax.barh(range(len(table)), values, color=table.basis.map(fills))
        ax.bar_label(bars, [f"{v:,.0f}" for v in values], padding=4, fontweight="bold")
        ax.set_xlim(0, 1.25 * values.max())
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set_xlabel(label)
        ax.grid(visible=False)
    axes[0].set_yticks(range(len(table)), table.index)
    axes[0].invert_yaxis()
    handles = [Patch(color=fill, label=basis) for basis, fill in fills.items()]
    axes[1].legend(handles=handles, loc="upper right")
    low, high = table.each_us.min(), table.each_us.max()
    title = "No single cost of a launch explains what PIECEWISE adds: it would be "
    return plots.finding(fig, f"{title}{low:,.0f} to {high:,.0f} us", source)


def step_queues(steps: pd.DataFrame, *, source: str) -> Figure:
    """Draw how long the host's and the GPU's queue of each step is, and the step itself.

    Args:
        steps: graph_steps.queues(...).
        source: Table, machine, n and spread.

    Raises:
        ValueError: There is no step.
    """
    if steps.empty:
        raise ValueError("steps: expected a row a path and mode, got none")
    fig, ax = plots.figure(size=(14, 2.4 + 0.48 * len(steps)))
    rows = range(len(steps))
    for row, step in zip(rows, steps.itertuples(), strict=True):
        comm = (step.work_ms, step.work_ms + step.comm_ms)
        ax.plot(comm, (row, row), color=GPU, linewidth=3, alpha=0.45)
    spread = [steps.median_ms - steps.p10_ms, steps.p90_ms - steps.median_ms]
    ax.errorbar(
        steps.median_ms, rows, xerr=spread, fmt="|", color=plots.BLACK, markersize=22,
        markeredgewidth=3, capsize=5, label="the step",
    )  # fmt: skip
    ax.plot(
        steps.host_ms, rows, "s", color=HOST, markeredgecolor=plots.BLACK, markersize=11,
        label="host: until its last launch returned",
    )  # fmt: skip
    ax.plot(
        steps.work_ms, rows, "o", color=GPU, markersize=11,
        label="GPU: its own work (line: and communication, waits included)",
    )  # fmt: skip
    for row, ms in zip(rows, steps.p90_ms, strict=True):
        text = plots.number(steps.median_ms.iloc[row])
        ax.annotate(
            text, (ms, row), (9, 0), textcoords="offset points", va="center", weight="bold"
        )
    ax.set_xscale("log")
    ticks = [
        tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if tick < 2 * steps.p90_ms.max()
    ]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    least = min(steps.host_ms.min(), steps.work_ms.min())
    ax.set_xlim(0.8 * least, 1.6 * steps.p90_ms.max())
    ax.set_xlabel("ms a step (log scale)")
    ax.set_yticks(rows, [f"{path}, {_MODE[mode]}" for path, mode in steps.index])
    ax.set_ylim(len(steps) - 0.4, -2.9)
    ax.grid(axis="x")
    ax.legend(loc="upper left")
    return plots.finding(fig, _longer_queue(steps), source)


_MODE = {"eager": "eager", "piecewise": "PIECEWISE", "full": "full graph"}


def _longer_queue(steps: pd.DataFrame) -> str:
    """Return which queue a step is as long as, in words, as far as the rows show it."""
    share = (steps.host_ms / steps.median_ms).groupby(level="mode")
    least, most = share.min(), share.max()
    launched = [_MODE[mode] for mode in ("eager", "piecewise") if least.get(mode, 0) > 0.9]
    if not launched or most.get("full", 1) > 0.5:
        return "Both queues of a step, and the step"
    return (
        f"{' and '.join(launched).capitalize().replace('piecewise', 'PIECEWISE')}: a step is as "
        f"long as the host's queue; in a full graph the host needs {most.full:.0%} of it at most"
    ).replace("%", " %")


_FORMS = ("o-", "D-", "s-", "^-")


def added_to_a_layer(stack: pd.DataFrame, engines: pd.DataFrame, *, source: str) -> Figure:
    """Draw what DCP adds to a layer in full graphs over context: the lab's stack, vLLM engines.

    Args:
        stack: graph_steps.added(...); its light dense part is drawn, which the target is of.
        engines: graph_steps.engine_added(...).
        source: Tables, machine, n and spread.

    Raises:
        ValueError: There is no row.
    """
    if stack.empty and engines.empty:
        raise ValueError("stack, engines: expected a row, got none")
    stack = stack[stack.dense == "light"].assign(line=stack.reducer)
    line = engines.pair.where(engines.one_run.astype(bool), engines.pair + " (two runs)")
    engines = engines.assign(line=line)
    fig, axes = plots.figure(1, 2, size=(16, 9), sharey=True)
    for ax, table, name in zip(axes, (stack, engines), ("The lab's stack", "vLLM"), strict=True):
        for form, (line, rows) in zip(_FORMS, table.groupby("line", sort=False), strict=False):
            spread = [rows.us - rows.low_us, rows.high_us - rows.us]
            ax.errorbar(
                rows.context_tokens, rows.us, yerr=spread, fmt=form, linewidth=2.5,
                color=plots.color(rows.reducer.iloc[0]), markersize=11, capsize=5, label=line,
            )  # fmt: skip
        ax.axhline(0, color=plots.BLACK, linewidth=1.5)
        ax.plot(
            AT_TOKENS, LIMIT_US, "*", color=plots.SKY, markersize=22, markeredgecolor=plots.BLACK,
            label=f"target: at most {LIMIT_US:g} us at {AT_TOKENS:,}",
        )  # fmt: skip
        ax.set_xscale("log", base=2)
        ticks = [1000, 2000, 4000, 8000, 16000, 32000]
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.minorticks_off()
        ax.set_xlabel("tokens of each request (log scale)")
        ax.set_title(f"{name}, 16 requests", loc="left", fontsize=plots.FONT + 1)
        ax.legend(loc="lower left")
    axes[0].set_ylabel("DCP 2 adds to a layer (us); below 0 it is faster")
    return plots.finding(fig, _adds(pd.concat([stack, engines])), source)


def _adds(table: pd.DataFrame) -> str:
    """Return what DCP adds at most, by direct and by collectives."""
    most = table.us.groupby(table.reducer == "direct").max()
    said = {True: "direct", False: "collectives"}
    parts = [f"{word} {most[own]:.1f} us" for own, word in said.items() if own in most.index]
    return f"In a full graph DCP adds to a layer at most: {', '.join(parts)}"
