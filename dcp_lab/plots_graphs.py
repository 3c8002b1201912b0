"""Figures of graph modes: two queues, launches a step, and what a launch would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dcp_lab import plots
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
    ax.set_xticks(range(len(counts)), [name.replace(", ", "\n") for name in counts.index])
    ax.set_ylabel("launches from the host, a step")
    ax.legend(ncols=3, loc="upper center")
    least, most = counts.piecewise.min(), counts.piecewise.max()
    return plots.finding(
        fig,
        f"DCP makes {most / least:.1f}x the launches under PIECEWISE, no more in a full graph",
        f"Counted here: the calls of dcp_lab.stack, {layers} layers. A combination without a full "
        "graph waits for the device inside the step.",
    )


def cost_of_a_launch(table: pd.DataFrame) -> Figure:
    """Draw what PIECEWISE adds to a layer, and to each of its launches.

    Args:
        table: One row a case: added_us (a layer), launches (a layer), fill, source.
    """
    fig, axes = plots.figure(1, 2, size=(13, 7), sharey=True)
    each = table.added_us / table.launches
    for ax, values, label in zip(
        axes,
        (table.added_us, each),
        ("added to a layer with KV, us", "the same for each launch, us"),
        strict=True,
    ):
        bars = ax.barh(range(len(table)), values, color=table.fill)
        ax.bar_label(bars, [f"{v:,.0f}" for v in values], padding=4, fontweight="bold")
        ax.set_xlim(0, 1.25 * values.max())
        ax.set_xlabel(label)
        ax.grid(visible=False)
    axes[0].set_yticks(range(len(table)), table.index)
    axes[0].invert_yaxis()
    handles = [
        Patch(color=plots.SKY, label="measured, H200"),
        Patch(color=plots.VERMILION, label="published, MI355X"),
    ]
    axes[1].legend(handles=handles, loc="upper right")
    return plots.finding(
        fig,
        "No single cost of a launch explains what PIECEWISE adds",
        "Published: study 2. Measured: data/measured/vllm_h200_dcp.csv. Launches: counted here.",
    )
