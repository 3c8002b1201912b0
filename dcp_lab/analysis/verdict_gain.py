"""What DCP buys, and from where on: cache capacity, and steps that are shorter than without it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from dcp_lab.analysis import engines, verdict_study
from dcp_lab.bench import costs, stack

NO_DCP = "no DCP"


def full_steps(table: pd.DataFrame) -> pd.DataFrame:
    """Return the paged steps in full graphs: a row a context and reducer.

    Args:
        table: measured("stack_..."), several contexts of 16 requests and the light dense part.

    Returns:
        Indexed by (reducer, context_tokens), "no DCP" for none: median_ms, p10_ms, p90_ms.
    """
    rows = table[
        (table["mode"] == "full")
        & (table.attention == "paged")
        & (table.dense == "light")
        & (table.requests == 16)
        & (table.launch_delay_us == 0)
        & ~table.bound.astype(bool)
    ]
    rows = rows.assign(reducer=rows.reducer.where(rows.dcp_size > 1, NO_DCP))
    columns = ["median_ms", "p10_ms", "p90_ms"]
    return rows.set_index(["reducer", "context_tokens"])[columns].sort_index()


def runs_apart(table: pd.DataFrame, row: str = engines.NO_DCP) -> float:
    """Return how far the medians of one engine lie apart in two runs, at the worst, as a share.

    Args:
        table: measured("engine_...").
        row: An engine of several runs.
    """
    medians = engines.times(table).median_ms.xs(row, level="row").groupby("context_tokens")
    return float((medians.max() / medians.min() - 1).max())


def crossing(
    steps: pd.DataFrame, reducer: str, without: str = NO_DCP, column: str = "median_ms"
) -> tuple[float, float]:
    """Return between which two measured contexts DCP's step becomes the shorter one.

    Args:
        steps: full_steps(...) or engines.chosen(...).
        reducer: With which exchange: the first level of the index.
        without: The step without DCP that it is held against.
        column: What is held. Of engines over_none: two of one run compare by it as by their
            times, two of different runs only by it.

    Returns:
        (largest context at which it is longer, smallest behind it at which it is shorter); 0 and
        infinity where there is none.
    """
    gained = (steps[column][without] - steps[column][reducer]).dropna().sort_index()
    longer = gained.index[gained <= 0]
    last = longer.max() if len(longer) else 0
    shorter = gained.index[gained.index > last]
    return float(last), float(shorter.min()) if len(shorter) else float("inf")


def modelled_crossing(fit_rows: pd.DataFrame, constants: costs.StepConstants) -> pd.DataFrame:
    """Return the context from which DCP 2 is faster in full graphs, by batch and exchange.

    Study 1's shapes on a rank; found by bisection. Both steps grow in proportion to requests x
    context, so the product is what counts.

    Args:
        fit_rows: Rows to take a step's layers and dense part from.
        constants: Of the machine.

    Returns:
        Indexed by requests, a column a reducer, in tokens of a request.
    """
    like = fit_rows[(fit_rows["mode"] == "full") & (fit_rows.dcp_size == 1)].iloc[0].to_dict()
    alone = stack.step_case(like)
    kv = alone.kv_bytes / (like["requests"] * like["context_tokens"])

    def behind_ms(context: float, requests: int, reducer: str) -> float:
        whole = requests * context * kv
        with_dcp = dataclasses.replace(alone, reducer=reducer, kv_bytes=whole / 2)
        without = dataclasses.replace(alone, kv_bytes=whole)
        return costs.predict_ms(without, constants) - costs.predict_ms(with_dcp, constants)

    found = {}
    for requests in (1, 16, 64):
        found[requests] = {
            reducer: verdict_study.solve(
                lambda c, n=requests, r=reducer: behind_ms(c, n, r) + 1e3, 1e3, 1, 1e8
            )
            for reducer in ("direct", "a2a", "ag_rs")
        }
    return pd.DataFrame(found).T.rename_axis("requests")


def waits(table: pd.DataFrame) -> pd.DataFrame:
    """Return how long a step's exchange kernels ran on the rank where they ran least and most.

    A kernel that waits for a peer runs. In a full graph the least of the ranks is the exchange
    itself; what the other rank has more is its wait. Under PIECEWISE the wait holds the peer's
    launches too. One profiled step each.

    Returns:
        Full-graph and piecewise rows of block "base" with DCP: mode, attention, reducer,
        comm_least_ms, comm_ms.
    """
    rows = table[(table.block == "base") & (table.dcp_size > 1)]
    columns = ["mode", "attention", "reducer", "comm_least_ms", "comm_ms", "gpu_busy_ms"]
    return rows[columns].sort_values(["mode", "comm_least_ms"], ignore_index=True)


def drift(table: pd.DataFrame) -> float:
    """Return the largest over the smallest median of host-bound steps that launch the same.

    PIECEWISE with pages and ag_rs launches the same at every context and dense part: what differs
    between blocks is the host.
    """
    same = table[
        (table["mode"] == "piecewise")
        & (table.attention == "paged")
        & (table.reducer == "ag_rs")
        & (table.launch_delay_us == 0)
    ]
    return float(np.max(same.median_ms) / np.min(same.median_ms))
