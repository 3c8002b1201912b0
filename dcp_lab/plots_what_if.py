"""Figures of notebook 07: a predicted step and its parts."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from dcp_lab import plots
from dcp_lab.analysis.what_if import PARTS

# Purple is the gather's, orange an exchange's, yellow the launches' in every figure of the lab.
COLORS = {
    "weights": plots.DARK_GREY,
    "all-reduce": plots.GREY,
    "attention": plots.GREEN,
    "gather": plots.PURPLE,
    "exchange": plots.ORANGE,
    "once a step": plots.BLUE,
    "waits": plots.YELLOW,
}


def step_parts(grid: pd.DataFrame, *, title: str, source: str) -> Figure:
    """Draw each step as a bar of its parts, one bar a mode and reducer; a tick for the host.

    Args:
        grid: As what_if.grid gives it.
        title: The finding.
        source: What the numbers rest on.
    """
    fig, ax = plots.figure(size=(13, 1.6 + 0.52 * len(grid)))
    names = [f"{row.mode}, {row.reducer}" for row in grid.itertuples()]
    left = pd.Series(0.0, index=grid.index)
    for part in PARTS:
        # What nobody could see gets no place in the legend.
        if grid[part].max() < 0.005 * grid.tpot_ms.max():
            left = left + grid[part]
            continue
        label = "GPU waits for launches" if part == "waits" else part
        ax.barh(names, grid[part], left=left, color=COLORS[part], label=label)
        left = left + grid[part]
    ax.plot(grid.host_ms, names, "|", color=plots.BLACK, ms=18, mew=2, label="host's calls")
    for name, total in zip(names, grid.tpot_ms, strict=True):
        ax.annotate(
            plots.number(total), (total, name), (8, 0), textcoords="offset points", va="center"
        )
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12 * grid.tpot_ms.max())
    ax.set_xlabel("ms a token of each request")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return plots.finding(fig, title, source)


def launch_sweep(
    sweep: pd.DataFrame, observed_ms: dict[str, float], *, title: str, source: str
) -> Figure:
    """Draw steps against the host time of a launch, with what was observed as dashed lines.

    Args:
        sweep: One column a line in ms, indexed by us a launch.
        observed_ms: For some of the columns what was observed.
        title: The finding.
        source: What the numbers rest on.
    """
    fig, ax = plots.figure(size=(13, 6))
    shades = [plots.BLUE, plots.VERMILION, plots.GREEN, plots.PURPLE]
    for name, shade in zip(sweep.columns, shades, strict=False):
        ax.plot(sweep.index, sweep[name], color=shade, lw=3, label=name)
        if name in observed_ms:
            ax.axhline(observed_ms[name], color=shade, ls="--", lw=1.5)
            ax.annotate(
                f"{observed_ms[name]:.1f}\npublished",
                (1.0, observed_ms[name]),
                (6, 0),
                # Beside the axes: inside, a line would cross it.
                xycoords=ax.get_yaxis_transform(),
                textcoords="offset points",
                va="center",
                color=shade,
            )
    ax.set_xlim(sweep.index[0], sweep.index[-1])
    ax.set_ylim(0)
    ax.set_xlabel("host time of one kernel launch, us")
    ax.set_ylabel("ms a token of each request")
    ax.legend(frameon=False)
    return plots.finding(fig, title, source)
