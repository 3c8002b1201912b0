"""Figures of the exchange: titles say what the data says, a token has its owner's colour."""

from __future__ import annotations

import pandas as pd
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from dcp_lab import plots_reducers


def title(fig: Figure) -> str:
    """Return a figure's title on one line."""
    return fig.get_suptitle().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")


def test_owners_colours_each_token_by_its_rank():
    """Each token is drawn once, in the colour of the rank that holds it."""
    fig = plots_reducers.owners([5, 2], [1, 2], size=2)
    colors = [plots_reducers.RANK_COLORS.index(c) for c in _colors(fig, 0)]
    assert colors == [0, 1, 0, 1, 0, 0, 1]
    assert [plots_reducers.RANK_COLORS.index(c) for c in _colors(fig, 1)] == [0, 0, 1, 1, 0, 0, 0]
    assert title(fig) == "A short request lies on 1 of 2 ranks; the others hold nothing of it"


def _colors(fig: Figure, panel: int) -> list[str]:
    return [to_hex(patch.get_facecolor()).upper() for patch in fig.axes[panel].patches]


def test_ways_to_combine_names_the_range_without_the_lse():
    """The title's range is over every way but the merge by LSE."""
    errors = pd.DataFrame({"mean": [40.0, 9.0], "count": [30.0, 12.0], "lse": [1e-5, 2e-5]})
    fig = plots_reducers.ways_to_combine(errors)
    assert title(fig).startswith("Without the LSE outputs are 9 to 40 % off")
    assert fig.axes[0].get_yscale() == "log"
    assert len(fig.axes[0].patches) == errors.size


def test_exchange_bytes_names_both_ends():
    """The title compares the reducers at the fewest and at the most ranks."""
    sent = pd.DataFrame({"ag_rs": [101.0, 150.0], "a2a": [100.0, 120.0]}, index=[2, 8])
    fig = plots_reducers.exchange_bytes(sent, source="here")
    assert title(fig).endswith("1.0 % more bytes at 2 ranks, 25.0 % at 8")
    assert fig.axes[0].get_ylim()[0] == 0


def test_exchange_cost_rounds_its_bound_up():
    """The title's bound holds: the largest share of the added time, rounded up."""
    fig = plots_reducers.exchange_cost(
        {"ag_rs": 50.0, "a2a": 40.0}, {"ag_rs": 0.06, "a2a": 0.05}, ""
    )
    assert title(fig) == "The exchange's bytes are under 0.2 % of what DCP 2 adds"
    assert [bar.get_height() for bar in fig.axes[0].patches] == [50.0, 40.0]
