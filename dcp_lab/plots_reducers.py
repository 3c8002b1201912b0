"""Figures of the exchange between ranks: who holds what, what merges, what it costs to send."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dcp_lab import plots
from dcp_lab.analysis import exchange
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


# A bare collective has the colour of the reducer that calls it, vLLM's function that of its name.
_OVER_TOKENS = (
    ("reduce", "direct", "direct", "-", "o"),
    ("reduce", "a2a", "a2a", "-", "s"),
    ("reduce", "ag_rs", "ag_rs", "-", "D"),
    ("collective", "all_to_all", "a2a", "--", "s"),
    ("collective", "all_gather + reduce_scatter", "ag_rs", "--", "D"),
    ("reduce", "vllm a2a", "a2a", ":", "X"),
    ("reduce", "vllm ag_rs", "ag_rs", ":", "P"),
)


def over_tokens(rows: pd.DataFrame, *, source: str) -> Figure:
    """Draw what an exchange takes in a graph over tokens, one panel a head_dim.

    Args:
        rows: exchange.current(...). A thing without rows is not drawn.
        source: Table, machine, n and spread.

    Raises:
        ValueError: There is no row of a reducer in a graph.
    """
    _need_reducer(rows)
    dims = sorted(rows.head_dim.unique())
    fig, axes = plots.figure(1, len(dims), size=(15, 8), sharey=True, squeeze=False)
    for ax, head_dim in zip(axes[0], dims, strict=True):
        panel = rows[rows.head_dim == head_dim]
        for op, what, name, line, marker in _OVER_TOKENS:
            some = exchange.pick(panel, op, what)
            if some.empty:
                continue
            solid = line == "-"
            ax.errorbar(
                some.tokens, some.median_us, yerr=_spread(some), linestyle=line, marker=marker,
                color=plots.color(name), markerfacecolor=plots.color(name) if solid else "white",
                linewidth=3 if solid else 2, markersize=10, capsize=5,
                label=what if op == "reduce" else f"NCCL alone: {what}",
            )  # fmt: skip
        _log_ticks(ax, sorted(panel.tokens.unique()))
        ax.set_title(f"head_dim {head_dim}", loc="left", fontsize=plots.FONT + 1)
        ax.set_xlabel("tokens (log scale)")
    ax = axes[0, 0]
    ax.set_yscale("log")
    ticks = [2, 5, 10, 20, 50, 100, 200]
    ax.set_yticks(ticks, [str(tick) for tick in ticks])
    ax.set_yticks([], minor=True)
    graph = rows[(rows["mode"] == "graph") & rows.op.isin(("reduce", "collective"))]
    # Room for the legends above the lines.
    ax.set_ylim(0.75 * graph.p10_us.min(), 4 * graph.p90_us.max())
    ax.set_ylabel("one call on the slower rank (us, log scale)")
    handles, labels = ax.get_legend_handles_labels()
    ours = sum(label in exchange.REDUCERS for label in labels)
    ax.legend(handles[:ours], labels[:ours], loc="upper left")
    axes[0, -1].legend(handles[ours:], labels[ours:], loc="upper left")
    return plots.finding(fig, _faster(rows), source)


def _need_reducer(rows: pd.DataFrame) -> None:
    if all(exchange.pick(rows, "reduce", what).empty for what in exchange.REDUCERS):
        raise ValueError("rows: expected a reducer's in a graph, got none")


def _faster(rows: pd.DataFrame) -> str:
    """Return how `direct` compares with the others, as far as they were measured."""
    medians = {
        what: exchange.pick(rows, "reduce", what).set_index(exchange.CELL).median_us
        for what in exchange.REDUCERS
    }
    direct = medians.pop("direct")
    ratios = {what: (other / direct).dropna() for what, other in medians.items()}
    parts = [
        f"{what} takes {plots.number(ratio.min())} to {plots.number(ratio.max())}x"
        for what, ratio in ratios.items()
        if len(ratio)
    ]
    if not parts:
        return "What the exchanges take over tokens"
    return f"In a graph {' and '.join(parts)} as long as direct ({len(direct)} cells)"


def _spread(rows: pd.DataFrame) -> list[pd.Series]:
    return [rows.median_us - rows.p10_us, rows.p90_us - rows.median_us]


def _log_ticks(ax: Axes, ticks: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.minorticks_off()


def against_lines(rows: pd.DataFrame, lines: pd.DataFrame, *, source: str) -> Figure:
    """Draw each reducer's cost over bytes against latency + bytes / link, a panel a reducer.

    Args:
        rows: exchange.current(...).
        lines: exchange.lines(rows).
        source: Table, machine, n and spread.

    Raises:
        ValueError: There is no row of a reducer in a graph.
    """
    _need_reducer(rows)
    names = [what for what in exchange.REDUCERS if ("reduce", what) in lines.index]
    fig, axes = plots.figure(1, len(names), size=(15, 8), sharey=True, squeeze=False)
    for ax, what in zip(axes[0], names, strict=True):
        some, line = exchange.pick(rows, "reduce", what), lines.loc[("reduce", what)]
        reach = np.geomspace(some.bytes.min() / 2, 2 * some.bytes.max(), 100)
        wire = reach / line.link_gbps / 1e3
        label = "latency + bytes / link"
        ax.plot(reach / 1e3, line.latency_us + wire, color=plots.BLACK, linewidth=2, label=label)
        ax.plot(reach / 1e3, wire, "--", color=plots.GREY, linewidth=2, label="bytes / link")
        for head_dim, marker in zip(sorted(some.head_dim.unique()), "osD^", strict=False):
            cells = some[some.head_dim == head_dim]
            ax.errorbar(
                cells.bytes / 1e3, cells.median_us, yerr=_spread(cells), fmt=marker,
                color=plots.color(what), markersize=10, capsize=5, label=f"head_dim {head_dim}",
            )  # fmt: skip
        ax.set_xscale("log")
        ticks = [tick for tick in (1, 10, 100, 1000, 10_000) if tick <= reach[-1] / 1e3]
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.minorticks_off()
        ax.set_xlim(reach[0] / 1e3, reach[-1] / 1e3)
        ax.set_title(
            f"{what}: {plots.number(line.latency_us)} us + bytes / "
            f"{line.link_gbps:,.0f} GB/s\n{_off(line.least_us)} to {_off(line.most_us)} us off",
            loc="left", fontsize=plots.FONT + 1,
        )  # fmt: skip
        ax.set_xlabel("sent by a rank, kB (log scale)")
        ax.legend(loc="upper left")
    shown = pd.concat([exchange.pick(rows, "reduce", what) for what in names])
    axes[0, 0].set_ylim(0, 1.15 * shown.p90_us.max())
    axes[0, 0].set_ylabel("one call on the slower rank (us)")
    worst = {
        what: max(-lines.least_us["reduce", what], lines.most_us["reduce", what]) for what in names
    }
    best, rest = names[0], [f"{what} by {plots.number(worst[what])}" for what in names[1:]]
    title = f"{best} costs a latency and its bytes, within {plots.number(worst[best])} us"
    if rest:
        title += f"; off that line are {' and '.join(rest)} us"
    return plots.finding(fig, title, source)


def _off(us: float) -> str:
    return f"{'+' if us >= 0 else '-'}{plots.number(abs(us))}"


def gather_and_reduce(
    together: pd.DataFrame, *, limits_us: Mapping[tuple[int, int], float], source: str
) -> Figure:
    """Draw what a layer's query gather and reduce take, measured in turn and as sums.

    Args:
        together: exchange.together(...).
        limits_us: (tokens, head_dim) -> the target of both in turn.
        source: Table, machine, n and spread.

    Raises:
        ValueError: No pair has both its parts measured.
    """
    if together.isna().all(axis=None):
        raise ValueError("together: expected a gather's and a reduce's time, got none")
    fills = {
        "direct, together": (plots.color("direct"), "direct + direct, in turn as in a layer"),
        "nccl + a2a": (plots.color("a2a"), "nccl + a2a, each alone, added"),
        "nccl + ag_rs": (plots.color("ag_rs"), "nccl + ag_rs, each alone, added"),
    }
    dims = sorted(together.index.get_level_values("head_dim").unique())
    fig, axes = plots.figure(1, len(dims), size=(17, 8), sharey=True, squeeze=False)
    width = 0.88 / len(fills)
    for ax, head_dim in zip(axes[0], dims, strict=True):
        panel = together.xs(head_dim, level="head_dim")
        first = np.arange(len(panel)) - (len(fills) - 1) / 2 * width
        for place, (column, (fill, label)) in enumerate(fills.items()):
            ax.bar(first + place * width, panel[column], 0.94 * width, color=fill, label=label)
        both = panel["direct, together"]
        spread = [both - panel.p10_us, panel.p90_us - both]
        ax.errorbar(first, both, yerr=spread, fmt="none", color=plots.BLACK, capsize=5)
        parts = panel["direct + direct"]
        ax.plot(
            first, parts, "D", color=plots.BLACK, markerfacecolor="white", markersize=8,
            label="direct + direct, each alone, added",
        )  # fmt: skip
        tops = {
            **panel,
            "direct, together": pd.concat([both, panel.p90_us, parts], axis=1).max(axis=1),
        }
        for place, column in enumerate(fills):
            for row, (us, top) in enumerate(zip(panel[column], tops[column], strict=True)):
                if pd.notna(us):
                    limit = limits_us.get((panel.index[row], head_dim)) if place == 0 else None
                    at = (first[row] + place * width, top)
                    text = {"textcoords": "offset points", "ha": "center"}
                    ax.annotate(plots.number(us), at, (0, 7), weight="bold", **text)
                    if limit is not None:
                        ends = (first[row] - 0.6 * width, first[row] + 0.6 * width)
                        ax.hlines(limit, *ends, color=plots.SKY, linewidth=4)
                        ax.annotate(f"target\n{plots.number(limit)}", at, (0, 26), **text)
        ax.set_xticks(range(len(panel)), [f"{tokens:,}" for tokens in panel.index])
        ax.set_xlabel("tokens")
        ax.set_title(f"head_dim {head_dim}", loc="left", fontsize=plots.FONT + 1)
    axes[0, 0].set_ylim(0, 1.15 * together.drop(columns=["p10_us", "p90_us"]).max().max())
    axes[0, 0].set_ylabel("query gather and reduce of a layer (us)")
    axes[0, 0].legend(loc="upper left")
    both = together["direct, together"]
    ratio = (together["nccl + a2a"] / both).dropna()
    title = "What the query gather and the reduce of a layer take"
    if len(ratio):
        title = (
            f"Gather and reduce by direct: {plots.number(both.min())} to "
            f"{plots.number(both.max())} us a layer; by NCCL and a2a {plots.number(ratio.min())} "
            f"to {plots.number(ratio.max())}x as long"
        )
    return plots.finding(fig, title, source)
