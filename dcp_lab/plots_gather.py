"""Figures of notebook 03: paged against gathered decode, one layer and as a share of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from numpy.typing import ArrayLike

from dcp_lab import plots
from dcp_lab.analysis import gathering
from dcp_lab.analysis.gathering import SHAPE

# A colour and a marker each, so that no line is told apart by its colour alone.
WAYS = {
    # As a line the light grey of the palette would not be seen.
    "read": ("reading the pages\n(the bound)", plots.GREY, "_"),
    "paged": ("paged", plots.color("paged"), "o"),
    "paged_bound": ("paged, bound once", plots.BLACK, "x"),
    "per_page": ("per_page gather", plots.color("per_page"), "s"),
    "per_token": ("per_token gather", plots.color("per_token"), "^"),
    "published_no_sync": ("published gather,\nno host sync", plots.color("published"), "v"),
    "published": ("published gather", plots.color("published"), "D"),
}
PEERS = {
    "fa3": ("FlashAttention 3", plots.BLUE, "s"),
    "flashinfer": ("FlashInfer", plots.ORANGE, "^"),
    "vllm_triton_decode": ("vLLM Triton decode", plots.PURPLE, "v"),
    "vllm_triton_unified": ("vLLM Triton unified", plots.VERMILION, "D"),
    "sdpa": ("torch SDPA,\ncontiguous KV", plots.DARK_GREY, "x"),
}
MODES = {"graph": "in a graph", "eager": "launched eagerly"}


def tokens(count: float) -> str:
    """Return a number of tokens as an axis has room for: 2048 becomes 2k."""
    count = int(count)
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"


def _some(rows: pd.DataFrame, what: str) -> None:
    if rows.empty:
        raise ValueError(f"{what}: expected at least one row to draw, got none")


def _legend(fig: Figure, styles: Mapping[str, tuple[str, str, str]], there: set[str]) -> None:
    lines = [
        Line2D([], [], color=fill, marker=marker, markersize=10, linewidth=2.5, label=label)
        for name, (label, fill, marker) in styles.items()
        if name in there
    ]
    fig.legend(handles=lines, loc="outside right center", labelspacing=0.9)


def _line(ax: Axes, x: ArrayLike, y: ArrayLike, fill: str, marker: str) -> None:
    # Light fills need an edge; these two markers are nothing but edge.
    edge = (fill, 2) if marker in "x_" else (plots.DARK_GREY, 1)
    style = {"markersize": 9, "markeredgecolor": edge[0], "markeredgewidth": edge[1]}
    ax.plot(x, y, color=fill, marker=marker, linewidth=2.5, **style)


def _log_ticks(ax: Axes, ticks: list[float], axis: str) -> None:
    """Name these places of a log axis and no others."""
    low, high = ax.get_xlim() if axis == "x" else ax.get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    names = [f"{tick:,.4g}" if tick < 1000 else f"{tick:,.0f}" for tick in shown]
    (ax.set_xticks if axis == "x" else ax.set_yticks)(shown, names)
    (ax.xaxis if axis == "x" else ax.yaxis).set_minor_locator(NullLocator())


def layer_time(rows: pd.DataFrame, *, family: tuple[int, int, int], source: str) -> Figure:
    """Draw one layer's time over context: a column a batch, in a graph above, eager below.

    Args:
        rows: gathering.layer_rows(...).
        family: num_q_heads, num_kv_heads, head_dim.
        source: Machine and tables.

    Raises:
        ValueError: The family has no row.
    """
    rows = gathering.of_family(rows, family)
    _some(rows, "family")
    batches = sorted(set(rows.requests))
    fig, axes = plots.figure(
        2, len(batches), size=(16, 10), sharex=True, sharey="row", squeeze=False
    )
    contexts = sorted(set(rows.context_tokens))
    for line, (mode, name) in zip(axes, MODES.items(), strict=True):
        for ax, requests in zip(line, batches, strict=True):
            shown = rows[(rows["mode"] == mode) & (rows.requests == requests)]
            for way, (_, fill, marker) in WAYS.items():
                # In a graph a bound call is the same kernels.
                if (mode, way) == ("graph", "paged_bound"):
                    continue
                of_way = shown[shown.way == way].sort_values("context_tokens")
                _line(ax, of_way.context_tokens, of_way.median_us, fill, marker)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
        line[0].set_ylabel(f"{name}:\none layer (us, log scale)")
    for ax, requests in zip(axes[0], batches, strict=True):
        ax.set_title(f"{requests} request{'s' if requests > 1 else ''}", fontsize=plots.FONT + 1)
    wide = axes[0, 0].get_xlim()
    # Room for about five names in a row of narrow panels.
    step = max(1, math.ceil(len(contexts) * len(batches) / 20))
    for ax in axes[1]:
        ax.set_xlim(wide[0] / 1.2, wide[1] * 1.2)
        ax.set_xticks(contexts[::step], [tokens(c) for c in contexts[::step]])
        ax.xaxis.set_minor_locator(NullLocator())
    for ax in axes[:, 0]:
        _log_ticks(ax, [1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 1e5, 1e6], "y")
    axes[1, 0].set_xlabel("tokens of a request (log scale)", loc="left")
    _legend(fig, WAYS, set(rows.way))
    graph = rows[rows["mode"] == "graph"]
    of_read = 1 / graph[graph.way == "paged"].of_read
    title = (
        f"In a graph the paged kernel takes {_range(of_read)}x the page-ordered read of its bytes"
    )
    over = gathering.gather_costs(graph)
    best = over.groupby(SHAPE).times.min()
    if len(best):
        title += f"; the fastest gather {_range(best)}x the paged kernel"
    return plots.finding(fig, title, f"{source}; {gathering.family_name(*family)}.")


def _range(values: pd.Series, places: int = 1) -> str:
    low, high = (plots.number(value, places) for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def _panels(rows: pd.DataFrame) -> tuple[Figure, dict[tuple[int, int, int], Axes]]:
    """Return a figure of one panel a shape family."""
    found = gathering.families(rows)
    columns = min(3, len(found))
    lines = math.ceil(len(found) / columns)
    fig, axes = plots.figure(
        lines,
        columns,
        size=(16, 2 + 4.6 * lines),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for ax in axes.flat[len(found) :]:
        ax.set_visible(False)
    # The panel above an empty place has no axis below that could carry its numbers.
    for ax in axes.flat[: len(found)]:
        ax.tick_params(labelbottom=True)
    panels = dict(zip(found, axes.flat, strict=False))
    for family, ax in panels.items():
        q, kv, dim = family
        name = f"{q} q heads, {kv} KV head{'s' if kv > 1 else ''}, dim {dim}"
        ax.set_title(name, fontsize=plots.FONT)
    return fig, panels


def _by_bytes(ax: Axes, rows: pd.DataFrame, value: str, fill: str, marker: str) -> None:
    """Draw a line through the medians of shapes of the same bytes, and from end to end of them."""
    groups = rows.groupby("kv_bytes")[value]
    middle = groups.median()
    megabytes = middle.index.to_numpy(dtype=float) / 1e6
    ax.vlines(megabytes, groups.min(), groups.max(), color=fill, linewidth=4, alpha=0.5)
    _line(ax, megabytes, middle, fill, marker)


def _bytes_axis(panels: Mapping[tuple[int, int, int], Axes]) -> None:
    for ax in panels.values():
        ax.set_xscale("log")
        _log_ticks(ax, [1, 10, 100, 1000, 10000], "x")
    last = list(panels.values())[-1]
    last.set_xlabel("K and V of a layer (MB, log scale)")


def bandwidth_share(rows: pd.DataFrame, *, probe_gbps: float, probe: str, source: str) -> Figure:
    """Draw, a panel a shape family, what share of the probe's bandwidth each way to attend gets.

    Bytes are those of K and V once, whatever a gather moves beside them.

    Args:
        rows: gathering.layer_rows(...); its graph rows are drawn.
        probe_gbps: The probe's GB/s: 100 %.
        probe: What it is, for the source line.
        source: Machine and tables.

    Raises:
        ValueError: There is no row in a graph.
    """
    rows = rows[(rows["mode"] == "graph") & (rows.way != "paged_bound")]
    _some(rows, "rows in a graph")
    rows = rows.assign(percent=100 * rows.useful_gbps / probe_gbps)
    fig, panels = _panels(rows)
    for family, ax in panels.items():
        shown = gathering.of_family(rows, family)
        for way, (_, fill, marker) in WAYS.items():
            if (shown.way == way).any():
                _by_bytes(ax, shown[shown.way == way], "percent", fill, marker)
        ax.set_ylim(0, max(100, rows.percent.max() * 1.05))
    _bytes_axis(panels)
    for ax in list(panels.values())[:: min(3, len(panels))]:
        ax.set_ylabel("% of the probe's GB/s")
    _legend(fig, WAYS, set(rows.way))
    gathers = rows[rows.way.isin(gathering.GATHERS)]
    paged = rows[rows.way == "paged"]
    most = plots.number(paged.percent.max(), 0)
    title = f"The paged kernel attends at up to {most} % of the probe's bandwidth"
    if len(gathers):
        both = paged.merge(gathers[SHAPE].drop_duplicates(), on=SHAPE).percent.max()
        title += f": {plots.number(both, 0)} % on the shapes that were gathered too,"
        title += f" which get at most {plots.number(gathers.percent.max(), 0)} %"
    return plots.finding(
        fig,
        title,
        f"{source}; in a graph. 100 %: {probe_gbps:,.0f} GB/s, {probe}. A gather's own copies do "
        f"not count as attended bytes. Bars: shapes of the same bytes.",
    )


def peer_times(peers: pd.DataFrame, *, source: str) -> Figure:
    """Draw, a panel a shape family, each peer's time over that of paged_decode of the same run.

    Args:
        peers: gathering.peer_rows(...).
        source: Machine and tables.

    Raises:
        ValueError: There is no row.
    """
    _some(peers, "peers")
    fig, panels = _panels(peers)
    for family, ax in panels.items():
        shown = gathering.of_family(peers, family)
        for peer, (_, fill, marker) in PEERS.items():
            if (shown.peer == peer).any():
                _by_bytes(ax, shown[shown.peer == peer], "times", fill, marker)
        ax.axhline(1, color=plots.color("paged"), linewidth=4, zorder=1.5)
        ax.set_yscale("log")
        ax.set_ylim(min(0.8, peers.times.min() / 1.1), peers.times.max() * 1.15)
        _log_ticks(ax, [0.25, 0.5, 0.8, 1, 1.5, 2, 3, 5, 10, 20], "y")
    _bytes_axis(panels)
    for ax in list(panels.values())[:: min(3, len(panels))]:
        ax.set_ylabel("time over paged_decode's\n(x, log scale)")
    styles = {"paged": ("paged_decode", plots.color("paged"), ""), **PEERS}
    _legend(fig, styles, {"paged", *peers.peer})
    best = gathering.best_peer(peers)
    mean = gathering.geometric_mean(best.times)
    behind = int((best.times < 1).sum())
    return plots.finding(
        fig,
        f"The best peer of each of {len(best)} shapes takes {plots.number(mean, 2)}x the time of "
        f"paged_decode (geometric mean), and is the faster one in {behind}",
        f"{source}; in a graph, each peer's fastest form. Line at 1: paged_decode in the same "
        f"run. Bars: shapes of the same bytes.",
    )


def step_share(steps: pd.DataFrame, *, source: str) -> Figure:
    """Draw a gather's share of a whole step: over context at one batch, over batch at one context.

    Args:
        steps: gathering.step_shares(...) of one dense part.
        source: Machine and tables.

    Raises:
        ValueError: There is no step.
    """
    _some(steps, "steps")
    batch = int(steps.groupby("requests").context_tokens.nunique().idxmax())
    context = int(steps.groupby("context_tokens").requests.nunique().idxmax())
    over = {
        "context_tokens": (steps[steps.requests == batch], "tokens of a request (log scale)"),
        "requests": (steps[steps.context_tokens == context], "requests (log scale)"),
    }
    # Without its sync the published gather runs the same kernels.
    drawn = [gather for gather in gathering.GATHERS if gather != "published_no_sync"]
    fig, axes = plots.figure(1, 2, size=(15, 7.5), sharey=True)
    for ax, (column, (shown, label)) in zip(axes, over.items(), strict=True):
        for gather in drawn:
            line = shown[shown.gather == gather].sort_values(column)
            if line.empty:
                continue
            _, fill, marker = WAYS[gather]
            _line(ax, line[column], 100 * line.share, fill, marker)
            last = None
            for at, share in zip(line[column], line.share, strict=True):
                # Near places of a log axis leave no room for both their numbers.
                if last is None or at > 1.4 * last:
                    ax.annotate(
                        f"{plots.number(100 * share, 0)} %",
                        (at, 100 * share),
                        (0, 9),
                        textcoords="offset points",
                        ha="center",
                        weight="bold",
                    )
                    last = at
        ax.set_xscale("log", base=2)
        places: list[float] = []
        for at in sorted(set(shown[column])):
            if not places or at > 1.4 * places[-1]:
                places.append(at)
        ax.set_xticks(places, [f"{int(at):,}" for at in places])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.margins(x=0.12)
        ax.set_xlabel(label)
    axes[0].set_title(f"{batch} requests", fontsize=plots.FONT + 1)
    axes[1].set_title(f"{context:,} tokens of a request", fontsize=plots.FONT + 1)
    axes[0].set_ylim(0, 108)
    axes[0].set_ylabel("gather's share of the step's GPU time (%)")
    _legend(fig, WAYS, set(steps.gather) & set(drawn))
    ends = [
        f"{name} {_range(100 * steps[steps.gather == gather].share, 0)} %"
        for gather, name in (
            ("per_page", "the per_page gather is"),
            ("published", "the published"),
        )
        if (steps.gather == gather).any()
    ]
    return plots.finding(
        fig,
        f"Of a gathered step's GPU time {', '.join(ends)}, by context and batch",
        f"{source}, {steps.num_layers.iloc[0]} layers, {steps.dense.iloc[0]} dense part, no DCP: "
        f"(gathered step - paged step) / gathered step.",
    )


def share_map(shares: pd.DataFrame, *, gather: str, source: str) -> Figure:
    """Draw a gather's share of a step as a map: a line a batch and dense part, a column a context.

    Args:
        shares: gathering.modelled_shares(...).
        gather: Which gather.
        source: Machine and tables.

    Raises:
        ValueError: It has no row.
    """
    shown = shares[shares.gather == gather]
    _some(shown, "gather")
    share = shown.pivot(
        index=["dense", "requests"], columns="context_tokens", values="share"
    ).sort_index(ascending=[False, True])
    extra = shown.pivot(
        index=["dense", "requests"], columns="context_tokens", values="extra_ms"
    ).loc[share.index]
    fig, ax = plots.figure(size=(14, 3 + 1.05 * len(share)))
    image = ax.imshow(100 * share, cmap="cividis_r", vmin=0, vmax=100, aspect="auto")
    for row in range(len(share)):
        for column in range(share.shape[1]):
            value = share.iloc[row, column]
            if math.isnan(value):
                ax.text(column, row, "not\nbenched", ha="center", va="center", color=plots.GREY)
                continue
            text = f"{plots.number(100 * value, 0)} %\n+{plots.number(extra.iloc[row, column])} ms"
            ink = "white" if value > 0.4 else plots.BLACK
            ax.text(column, row, text, ha="center", va="center", weight="bold", color=ink)
    names = [f"{r} request{'s' if r > 1 else ''},\n{dense} dense part" for dense, r in share.index]
    ax.set_yticks(range(len(share)), names)
    ax.set_xticks(range(share.shape[1]), [tokens(c) for c in share.columns])
    ax.set_xlabel("tokens of a request")
    ax.grid(visible=False)
    fig.colorbar(image, ax=ax, label="share of the step (%)", pad=0.01)
    top = shown.loc[shown.share.idxmax()]
    low = shown.loc[shown.share.idxmin()]
    return plots.finding(
        fig,
        f"Modelled, a {gather} gather is {_at(low)}, {_at(top)}",
        f"Modelled from measured parts ({source}): layers x (gathered - paged layer), over the "
        f"measured rest of the step plus the gathered layers.",
    )


def _at(row: pd.Series) -> str:
    where = f"{row.requests} x {row.context_tokens:,} tokens ({row.dense} dense part)"
    return f"{plots.number(100 * row.share, 0)} % of a step of {where}"
