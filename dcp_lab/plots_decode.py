"""Figures of paged decode: where tokens lie, who reads them, and how exact the result is."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dcp_lab import plots

# One colour a request, as far as they go; they repeat after that.
REQUEST_COLORS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.SKY, plots.VERMILION)
EMPTY = "#DDDDDD"


def wrong_bases(right: float, read_wrong: Mapping[str, float]) -> Figure:
    """Draw the merged output when both sides mean the same LSE base, and when they do not.

    Args:
        right: The merged output.
        read_wrong: For each misunderstanding, in words, the output it gives.
    """
    fig, ax = plots.figure(size=(12, 5.5))
    values = [right, *read_wrong.values()]
    fills = [plots.GREEN] + [plots.VERMILION] * len(read_wrong)
    bars = ax.bar(range(len(values)), values, 0.6, color=fills)
    labels = [f"{value:.4f}" for value in values]
    inside = {"fontsize": plots.FONT + 4, "fontweight": "bold", "color": "white"}
    ax.bar_label(bars, labels, label_type="center", **inside)
    ax.axhline(right, color=plots.BLACK, linestyle="--", linewidth=1.5)
    ax.set_xticks(range(len(values)), ["both natural:\nright", *read_wrong])
    ax.set_ylim(0, max(values) * 1.1)
    ax.set_ylabel("merged output")
    worst = max(abs(value - right) / right for value in read_wrong.values())
    return plots.finding(
        fig,
        f"A misread LSE base shifts the output by {100 * worst:.0f} %, and nothing fails",
        "Computed here: two parts, out 0 and 1, LSE ln 2 and ln 8, merged by merge_states.",
    )


def page_map(
    block_table: torch.Tensor, seq_lens: torch.Tensor, *, num_pages: int, page_size: int
) -> Figure:
    """Draw which request's token each slot of each physical page holds.

    Args:
        block_table: int32 [B, max_pages].
        seq_lens: int32 [B], tokens of each request.
        num_pages: Physical pages there are.
        page_size: Tokens a page.
    """
    held: dict[int, tuple[int, int, int]] = {}
    for request, length in enumerate(seq_lens.tolist()):
        for logical in range(-(-length // page_size)):
            count = min(page_size, length - logical * page_size)
            held[int(block_table[request, logical])] = (request, logical, count)
    fig, ax = plots.figure(size=(13, 8))
    for page in range(num_pages):
        request, logical, count = held.get(page, (0, 0, 0))
        fill = REQUEST_COLORS[request % len(REQUEST_COLORS)]
        for slot in range(page_size):
            color = fill if slot < count else EMPTY
            ax.add_patch(Rectangle((slot, page), 0.94, 0.86, facecolor=color))
        text = f" request {request}, its page {logical}" if count else " no request's"
        ax.text(page_size, page + 0.43, text, va="center", fontsize=plots.FONT)
    ax.set_xlim(0, page_size * 1.5)
    ax.set_ylim(num_pages, 0)
    ax.set_xticks([0.47, page_size - 0.53], ["0", str(page_size - 1)])
    ax.set_yticks([page + 0.43 for page in range(num_pages)], range(num_pages))
    ax.set_xlabel("slot in the page", loc="left")
    ax.set_ylabel("physical page")
    ax.grid(visible=False)
    ax.spines[["left", "bottom"]].set_visible(False)
    tokens = sum(count for _, _, count in held.values())
    empty = num_pages * page_size - tokens
    return plots.finding(
        fig,
        f"{tokens} tokens lie scattered over {len(held)} pages; {empty} grey slots hold no token",
        "Computed here from block_table and seq_lens. One colour a request.",
    )


def split_map(items: torch.Tensor, seq_lens: torch.Tensor) -> Figure:
    """Draw which tokens each work item of a decode reads.

    Args:
        items: int32 [items, 4] of a prepared DecodeWorkspace: request (-1: unused), first token,
            one past the last, pieces of its request.
        seq_lens: int32 [B], tokens of each request.
    """
    fig, ax = plots.figure(size=(13, 6))
    lengths = seq_lens.tolist()
    used = [(i, *row) for i, row in enumerate(items.tolist()) if row[0] >= 0]
    longest = max(max(lengths), 1)
    for i, request, begin, end, _ in used:
        shade = plots.GREEN if i % 2 else "#7FCEB9"
        ax.add_patch(Rectangle((begin, request - 0.36), end - begin, 0.72, facecolor=shade))
        if end - begin > longest / 30:
            middle = (begin + end) / 2
            ax.text(middle, request, str(i), ha="center", va="center", fontsize=plots.FONT)
        else:
            ax.text(end + longest / 150, request, str(i), va="center", fontsize=plots.FONT)
    ax.set_xlim(0, longest * 1.03)
    ax.set_ylim(len(lengths) - 0.4, -0.6)
    ax.set_yticks(
        range(len(lengths)),
        [f"request {b}:\n{length:,} tokens" for b, length in enumerate(lengths)],
    )
    ax.set_xlabel("token of the request")
    ax.grid(axis="x")
    ax.grid(axis="y", visible=False)
    longest_piece = max(end - begin for _, _, begin, end, _ in used)
    return plots.finding(
        fig,
        f"{len(used)} work items share {sum(lengths):,} tokens; none reads more than "
        f"{longest_piece}",
        "Computed here: the work table of DecodeWorkspace.prepare. One block: one item, with its "
        "number; items run side by side.",
    )


def error_budget(errors: pd.DataFrame, *, source: str) -> Figure:
    """Draw the kernel's and plain torch's error against float64, and what is allowed.

    Args:
        errors: Index: what was compared. Columns kernel, eager, budget: absolute errors.
        source: Machine and shape of what is drawn.
    """
    fig, ax = plots.figure(size=(13, 6.5))
    # A log scale has no place for 0: an exact result is drawn at the left edge.
    edge = errors.to_numpy()[errors.to_numpy() > 0].min() / 3
    shown = errors.clip(lower=edge)
    places = range(len(errors))
    ax.hlines(places, edge, shown.budget, color=plots.LIGHT_GREY, linewidth=16)
    ax.plot(shown.budget, places, "|", color=plots.BLACK, markersize=30, markeredgewidth=4)
    ax.plot(shown.eager, places, "s", color=plots.GREY, markersize=13)
    ax.plot(shown.kernel, places, "o", color=plots.color("paged"), markersize=15)
    ax.set_xscale("log")
    ax.set_xlim(edge, errors.budget.max() * 3)
    ax.set_ylim(len(errors) - 0.4, -0.6)
    ax.set_yticks(places, errors.index)
    ax.set_xlabel("largest absolute error against float64 (log scale)")
    ax.grid(axis="x")
    ax.grid(axis="y", visible=False)
    colors = {
        "paged_decode": plots.color("paged"),
        "plain torch, same dtype": plots.GREY,
        "budget": plots.BLACK,
    }
    handles = [Patch(color=fill, label=label) for label, fill in colors.items()]
    ax.legend(handles=handles, loc="upper right")
    share = (errors.kernel / errors.budget).max()
    return plots.finding(
        fig,
        f"The kernel stays inside its error budget: at most {100 * share:.0f} % of it is used",
        source,
    )
