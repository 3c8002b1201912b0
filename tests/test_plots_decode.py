"""Figures of paged decode: titles say what the data says, and every token is drawn once."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dcp_lab import plots_decode


def title(fig: Figure) -> str:
    """Return a figure's title on one line."""
    return fig.get_suptitle().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")


def blocks(fig: Figure) -> list[Rectangle]:
    """Return the rectangles of a figure's only axes."""
    return [patch for patch in fig.axes[0].patches if isinstance(patch, Rectangle)]


def test_page_map_colours_each_token_once():
    """A slot is coloured exactly if it holds a token; unused table entries are not looked at."""
    table = torch.tensor([[4, 1, 99], [2, -7, 99], [-1, -1, -1]], dtype=torch.int32)
    lens = torch.tensor([5, 2, 0], dtype=torch.int32)
    fig = plots_decode.page_map(table, lens, num_pages=6, page_size=4)
    drawn = {(round(b.get_x()), round(b.get_y())): b.get_facecolor() for b in blocks(fig)}
    assert len(drawn) == 6 * 4
    grey = drawn[0, 0]
    coloured = {place for place, color in drawn.items() if color != grey}
    assert coloured == {(0, 4), (1, 4), (2, 4), (3, 4), (0, 1), (0, 2), (1, 2)}
    assert drawn[0, 4] == drawn[0, 1] != drawn[0, 2]
    assert title(fig).startswith("7 tokens lie scattered over 3 pages; 17 grey slots")


def test_split_map_draws_the_items():
    """Each used item is one block from its first token to its last, in its request's row."""
    items = torch.tensor([[0, 0, 10, 1], [1, 0, 64, 2], [1, 64, 100, 2], [-1, 7, 7, 7]])
    fig = plots_decode.split_map(items, torch.tensor([10, 100]))
    drawn = [(b.get_x(), b.get_width(), round(b.get_y() + 0.36)) for b in blocks(fig)]
    assert drawn == [(0, 10, 0), (0, 64, 1), (64, 36, 1)]
    assert title(fig) == "3 work items share 110 tokens; none reads more than 64"


def test_error_figure_names_the_largest_share():
    """The title's share is the worst of all rows; an exact result does not break the log scale."""
    errors = pd.DataFrame(
        {"kernel": [1e-7, 0.0], "eager": [2e-7, 1e-3], "budget": [4e-7, 1e-2]},
        index=["out", "lse"],
    )
    fig = plots_decode.error_budget(errors, source="here")
    assert "at most 25 % of it is used" in title(fig)
    assert fig.axes[0].get_xscale() == "log"


def test_base_figure_names_the_largest_shift():
    """The title's shift is that of the worse misunderstanding."""
    fig = plots_decode.wrong_bases(0.8, {"a": 0.76, "b": 1.0})
    assert title(fig).startswith("A misread LSE base shifts the output by 25 %")


@pytest.mark.parametrize("draw", ["page_map", "split_map"])
def test_nothing_to_draw_is_no_error(draw):
    """Requests without any token still give a figure."""
    empty = torch.zeros(1, dtype=torch.int32)
    if draw == "page_map":
        table = torch.full((1, 2), -1, dtype=torch.int32)
        fig = plots_decode.page_map(table, empty, num_pages=2, page_size=2)
        assert title(fig).startswith("0 tokens")
    else:
        fig = plots_decode.split_map(torch.tensor([[0, 0, 0, 1]]), empty)
        assert title(fig).startswith("1 work items share 0 tokens")
