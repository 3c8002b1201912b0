"""What DCP adds, shared out over graph mode, exchange, gather and host sync by Shapley values.

A player's share is the mean, over the orders in which the players may come, of what the step gains
when it comes. It adds up to the whole and favours no order. Not every order can be: nothing is
gathered without DCP, whose exchange comes first, and nothing waits for a gather's total without a
gather (a Shapley value with precedence). The graph mode may come at any place.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from dcp_lab.analysis.verdict_fit import Fit
from dcp_lab.bench import costs, stack

MODE, EXCHANGE, GATHER, SYNC = "PIECEWISE", "exchange", "gather", "host sync"
PLAYERS = (MODE, EXCHANGE, GATHER, SYNC)
NEEDS = {GATHER: EXCHANGE, SYNC: GATHER}
Coalition = frozenset[str]


def orders(players: Sequence[str], needs: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the orders in which every player comes after the one that it needs."""
    return [
        order
        for order in itertools.permutations(players)
        if all(order.index(needs[p]) < order.index(p) for p in players if p in needs)
    ]


def shapley(
    value: Callable[[Coalition], float],
    players: Sequence[str] = PLAYERS,
    needs: Mapping[str, str] = NEEDS,
) -> dict[str, float]:
    """Return each player's share of value(all) - value(none).

    Args:
        value: Of a coalition; asked only for those that some order passes through.
        players: Their names.
        needs: For some of them the player that has to be there first.
    """
    known: dict[Coalition, float] = {}

    def worth(coalition: Coalition) -> float:
        if coalition not in known:
            known[coalition] = value(coalition)
        return known[coalition]

    shares = dict.fromkeys(players, 0.0)
    for player, before, weight in _arrivals(tuple(players), tuple(needs.items())):
        shares[player] += weight * (worth(before | {player}) - worth(before))
    return shares


@functools.cache
def _arrivals(
    players: tuple[str, ...], needs: tuple[tuple[str, str], ...]
) -> list[tuple[str, Coalition, float]]:
    """Return (player, who is there before it, in which share of the orders) of every arrival."""
    possible = orders(players, dict(needs))
    found = Counter(
        (player, frozenset(order[:place]))
        for order in possible
        for place, player in enumerate(order)
    )
    return [(player, before, n / len(possible)) for (player, before), n in found.items()]


def corner_of(coalition: Coalition) -> dict[str, object]:
    """Return the corner that a coalition is: columns of a stack table, and their values.

    A full graph cannot hold a host sync: with one that comes before PIECEWISE, the graph is of the
    path without it.
    """
    gathered = "published" if {SYNC, MODE} <= coalition else "published_no_sync"
    return {
        "mode": "piecewise" if MODE in coalition else "full",
        "dcp_size": 2 if EXCHANGE in coalition else 1,
        "attention": gathered if GATHER in coalition else "paged",
        "reducer": "ag_rs" if EXCHANGE in coalition else None,
    }


def coalitions() -> list[Coalition]:
    """Return the coalitions that the orders pass through, smallest first."""
    seen = {frozenset(o[:n]) for o in orders(PLAYERS, NEEDS) for n in range(len(PLAYERS) + 1)}
    return sorted(seen, key=lambda c: (len(c), sorted(c)))


def corners(fit: Fit, *, dense: str, context_tokens: int = 2500) -> pd.DataFrame:
    """Return the time of each coalition's corner, measured where it was, else modelled.

    Args:
        fit: With its rows.
        dense: "light" or "heavy".
        context_tokens: Of each request; 16 requests.

    Returns:
        Indexed by coalition: mode, attention, reducer, median_ms, spread_ms (of one sample:
        (p90 - p10) / 2.56, as of a normal distribution; of a modelled one, the median error of
        the fit), basis.

    Raises:
        ValueError: Nothing was measured with that dense part and context.
    """
    table = fit.rows
    # The blocks that the whole factorial was measured in; bound and delayed calls are others.
    table = table[
        (table.dense == dense)
        & (table.context_tokens == context_tokens)
        & (table.requests == 16)
        & (table.launch_delay_us == 0)
        & ~table.bound.astype(bool)
    ]
    if table.empty:
        raise ValueError(
            f"dense, context_tokens: expected those of measured rows, got {dense!r}, "
            f"{context_tokens}"
        )
    found = {}
    for coalition in coalitions():
        corner = corner_of(coalition)
        same = pd.Series(True, index=table.index)
        for name, wanted in corner.items():
            same &= table[name].isna() if wanted is None else table[name] == wanted
        rows = table[same]
        if len(rows):
            row = rows.iloc[0]
            spread, basis = (row.p90_ms - row.p10_ms) / 2.563, "measured"
            median = row.median_ms
        else:
            # Bytes and layers of a row of the same DCP size.
            like = table[table.dcp_size == corner["dcp_size"]].iloc[0].to_dict()
            case = stack.step_case(like | corner | {"query_gather": "nccl"})
            median = costs.predict_ms(case, fit.constants)
            spread, basis = median * fit.median_error, "modelled"
        found[coalition] = corner | {"median_ms": median, "spread_ms": spread, "basis": basis}
    table = pd.DataFrame.from_dict(found, orient="index")
    table.index = pd.Index(list(found), tupleize_cols=False)
    return table


def shares(
    times: pd.DataFrame, *, draws: int = 2000, seed: int = 0, whole: bool = False
) -> pd.DataFrame:
    """Return each player's share with its uncertainty from the corners' samples.

    Each draw moves every corner by its spread, independently. That is the spread of one sample,
    not of a median: blocks of a run differ by more than medians do.

    Args:
        times: corners(...).
        draws: How many.
        seed: Of the draws.
        whole: In ms instead of shares of what is added.

    Returns:
        Indexed by player: share, low, high (10th and 90th percentile of the draws).
    """
    place = {coalition: i for i, coalition in enumerate(times.index)}
    ms, spread = times.median_ms.to_numpy(float), times.spread_ms.to_numpy(float)
    random = np.random.default_rng(seed)

    def one(values: np.ndarray) -> np.ndarray:
        found = np.array(list(shapley(lambda c: values[place[c]]).values()))
        return found if whole else found / found.sum()

    drawn = np.array([one(ms + spread * random.standard_normal(len(ms))) for _ in range(draws)])
    low, high = np.percentile(drawn, [10, 90], axis=0)
    return pd.DataFrame({"share": one(ms), "low": low, "high": high}, index=pd.Index(PLAYERS))
