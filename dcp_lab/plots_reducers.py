"""Figures of the exchange between ranks: who holds what, what merges, what it costs to send."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dcp_lab import plots
from dcp_lab.sharding import Shard

# One colour a rank, as far as they go; they repeat after that.
RANK_COLORS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.SKY, plots.VERMILION)


def owners(lengths: Sequence[int], interleave_sizes: Sequence[int], size: int) -> Figure:
    """Draw which rank holds each token of each request, for several interleave sizes.

    Args:
        lengths: Tokens of each request.
        interleave_sizes: One panel each.
        size: Ranks in the group.
    """
    height = 1.6 + 0.62 * len(lengths) * len(interleave_sizes)
    fig, axes = plots.figure(
        len(interleave_sizes), 1, size=(13, height), sharex=True, squeeze=False
    )
    fewest = size
    for ax, interleave_size in zip(axes[:, 0], interleave_sizes, strict=True):
        shard = Shard(0, size, interleave_size)
        for row, length in enumerate(lengths):
            ranks = [shard.owner(position) for position in range(length)]
            fewest = min(fewest, len(set(ranks)) or size)
            for position, rank in enumerate(ranks):
                color = RANK_COLORS[rank % len(RANK_COLORS)]
                ax.add_patch(Rectangle((position, row + 0.1), 0.9, 0.8, facecolor=color))
        ax.set_xlim(-0.5, max(lengths) + 0.5)
        ax.set_ylim(len(lengths), 0)
        names = [f"{length} token{'s' if length != 1 else ''}" for length in lengths]
        ax.set_yticks([row + 0.5 for row in range(len(lengths))], names)
        ax.set_title(f"interleave_size {interleave_size}", loc="left", fontsize=plots.FONT + 1)
        ax.grid(visible=False)
        ax.tick_params(left=False)
        ax.spines[["left"]].set_visible(False)
    axes[-1, 0].set_xlabel("position of the token in its request")
    handles = [
        Patch(color=RANK_COLORS[r % len(RANK_COLORS)], label=f"rank {r}") for r in range(size)
    ]
    fig.legend(handles=handles, loc="outside lower right", ncols=size)
    return plots.finding(
        fig,
        f"A short request lies on {fewest} of {size} ranks; the others hold nothing of it",
        "Computed here with Shard.owner.",
    )


def ways_to_combine(errors: pd.DataFrame) -> Figure:
    """Draw how far each way to combine the ranks' outputs is from attention over all tokens.

    Args:
        errors: One row a request, one column a way, in per cent of the right output's largest
            value; the last column is the merge by LSE.
    """
    fig, ax = plots.figure(size=(13, 7))
    fills = [*(plots.VERMILION, plots.SKY)[: errors.shape[1] - 1], plots.GREEN]
    width = 0.8 / errors.shape[1]
    for column, (way, fill) in enumerate(zip(errors, fills, strict=True)):
        places = [row + (column - (errors.shape[1] - 1) / 2) * width for row in range(len(errors))]
        bars = ax.bar(places, errors[way], 0.94 * width, color=fill, label=way)
        labels = [f"{value:.0f}" if value >= 0.5 else f"{value:.0e}" for value in errors[way]]
        ax.bar_label(bars, labels, padding=3, fontsize=plots.FONT)
    ax.set_yscale("log")
    # Room above the tallest bar for its label and the legend.
    ax.set_ylim(top=40 * errors.max().max())
    ax.set_xticks(range(len(errors)), errors.index)
    ax.set_xlabel("tokens of the request")
    ax.set_ylabel("error, % of the largest output")
    ax.legend(ncols=errors.shape[1], loc="upper left")
    wrong = errors.iloc[:, :-1].to_numpy()
    return plots.finding(
        fig,
        f"Without the LSE outputs are {wrong.min():.0f} to {wrong.max():.0f} % off, "
        "with it exact to rounding",
        "Computed here in fp32 against attention over the whole context in float64.",
    )


def exchange_bytes(sent: pd.DataFrame, *, source: str) -> Figure:
    """Draw what a rank sends a layer, against the number of ranks.

    Args:
        sent: Bytes, one row a number of ranks, columns "ag_rs" and "a2a".
        source: The shapes they are for.
    """
    fig, ax = plots.figure(size=(13, 7))
    for name, marker in (("ag_rs", "o"), ("a2a", "s")):
        style = {"color": plots.color(name), "marker": marker, "markersize": 10, "linewidth": 3}
        ax.plot(sent.index, sent[name] / 1e3, label=name, **style)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sent.index, [str(ranks) for ranks in sent.index])
    ax.set_ylim(0, 1.15 * sent.max().max() / 1e3)
    ax.set_xlabel("ranks in the group")
    ax.set_ylabel("sent by a rank, kB a layer")
    more = (sent.ag_rs / sent.a2a - 1) * 100
    for ranks in (sent.index[0], sent.index[-1]):
        text = f"ag_rs: +{plots.number(more[ranks])} %"
        # Below the lines where they begin, above them where they end.
        first = ranks == sent.index[0]
        ax.annotate(
            text,
            (ranks, sent.ag_rs[ranks] / 1e3),
            xytext=(0, -34) if first else (0, 16),
            textcoords="offset points",
            ha="left" if first else "right",
            fontweight="bold",
        )
    ax.legend(loc="lower right")
    few, many = sent.index[0], sent.index[-1]
    return plots.finding(
        fig,
        f"Sending every LSE to all costs ag_rs {plots.number(more[few])} % more bytes at {few} "
        f"ranks, {plots.number(more[many])} % at {many}",
        source,
    )


def exchange_cost(
    added_us: Mapping[str, float], wire_us: Mapping[str, float], source: str
) -> Figure:
    """Draw what DCP 2 adds to a layer with each reducer, beside what its bytes need on the link.

    Args:
        added_us: For each reducer, us a layer more than without DCP.
        wire_us: For each reducer, us that its bytes take at the link's bandwidth.
        source: Where the numbers are from.
    """
    fig, ax = plots.figure(size=(12, 6.5))
    names = list(added_us)
    bars = ax.bar(names, added_us.values(), 0.55, color=[plots.color(name) for name in names])
    labels = [f"{plots.number(added_us[n])} us\n(its bytes: {wire_us[n]:.2f} us)" for n in names]
    ax.bar_label(bars, labels, padding=4, fontsize=plots.FONT + 1, fontweight="bold")
    ax.set_ylim(0, 1.3 * max(added_us.values()))
    ax.set_ylabel("added by DCP 2, us a layer")
    most = max(wire_us[name] / added_us[name] for name in names)
    return plots.finding(
        fig,
        f"The exchange's bytes are under {math.ceil(1000 * most) / 10:.1f} % of what DCP 2 adds",
        source,
    )
