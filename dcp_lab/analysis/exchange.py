"""The rows of `dcp-lab bench reduce`, read: cost over tokens and bytes, pairs, what is missing.

Of each cell (tokens, head_dim) the latest run counts, as in `dcp-lab bench reduce --gate`: rows of
two runs are never held against each other within a cell, and each row against the link of its own
run. A thing without a row is absent from the tables here, and `missing` names it.
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from dcp_lab.bench.reduce import DEFAULT_SHAPES

TABLE = "reduce_h200x2"
REDUCERS = ("direct", "a2a", "ag_rs")
CELL = ["tokens", "head_dim"]
# (op, variant) that a full run has; vLLM's also say by which collectives.
EXPECTED = (
    *(("reduce", name) for name in REDUCERS),
    *(("gather_queries", name) for name in ("direct", "nccl")),
    ("gather_and_reduce", "direct"),
    *(("collective", n) for n in ("all_to_all", "all_gather + reduce_scatter", "all_gather of q")),
    *(("reduce", f"vllm {name}") for name in ("a2a", "ag_rs")),
)
# What a layer calls one after the other: (op, variant) of the gather, of the reduce.
PAIRS = {
    "direct + direct": (("gather_queries", "direct"), ("reduce", "direct")),
    "nccl + a2a": (("gather_queries", "nccl"), ("reduce", "a2a")),
    "nccl + ag_rs": (("gather_queries", "nccl"), ("reduce", "ag_rs")),
    "NCCL alone: all-gather + all-to-all": (
        ("collective", "all_gather of q"),
        ("collective", "all_to_all"),
    ),
}
# Byte counts of two cells that are the same but for the LSEs beside the outputs.
SAME_BYTES = 0.05


def current(
    table: pd.DataFrame, *, ranks: int = 2, num_q_heads: int = 16, dtype: str = "bfloat16"
) -> pd.DataFrame:
    """Return the rows that count: each cell's latest run, launch configs of a sweep left out.

    Args:
        table: measured("reduce_...").
        ranks: Of the group.
        num_q_heads: Of the group.
        dtype: Of out and q.

    Returns:
        Rows with two columns more: `what` (a vLLM function's name without its collectives) and
        `over_us`, what a call takes longer than its bytes on the link of its run.
    """
    same = (table.ranks == ranks) & (table.num_q_heads == num_q_heads) & (table.dtype == dtype)
    rows = table[same]
    newest = rows.groupby(CELL).date_utc.transform("max")
    rows = rows[(rows.date_utc == newest) & ~rows.variant.str.startswith("direct tile")]
    return rows.assign(
        what=rows.variant.str.replace(r"^(vllm \w+) \(\w+\)$", r"\1", regex=True),
        over_us=rows.median_us - rows.bytes / rows.link_gbps / 1e3,
    ).sort_values([*CELL, "op", "what"], ignore_index=True)


def pick(rows: pd.DataFrame, op: str, what: str, mode: str = "graph") -> pd.DataFrame:
    """Return one thing's rows, by rising tokens and head_dim; empty where there is none."""
    found = rows[(rows.op == op) & (rows.what == what) & (rows["mode"] == mode)]
    # vLLM's function may be there with several kinds of collectives; the faster one counts.
    return found.sort_values("median_us").drop_duplicates(CELL).sort_values(CELL)


def runs(rows: pd.DataFrame) -> str:
    """Return one sentence on which runs the rows are of, with the link of each."""
    parts = [
        f"{run.gpu_count} x {run.gpu}, torch {run.torch}, {run.date_utc}, commit "
        f"{run.git_commit[:7]}, link {run.link_gbps:.1f} GB/s, {len(cells)} cells"
        for run, cells in (
            (group.iloc[0], group[CELL].drop_duplicates())
            for _, group in rows.groupby("date_utc", sort=True)
        )
    ]
    return "; ".join(parts) or "no row"


def missing(rows: pd.DataFrame) -> list[str]:
    """Return what a full run has and these rows have not, a line a thing; empty: nothing."""
    said = []
    cells = [(shape.tokens, shape.head_dim) for shape in DEFAULT_SHAPES]
    for op, what in EXPECTED:
        there = set(pick(rows, op, what)[CELL].itertuples(index=False, name=None))
        gone = [f"{t} tokens at {d} dims" for t, d in cells if (t, d) not in there]
        if gone:
            where = "in no cell" if len(gone) == len(cells) else f"not at {', '.join(gone)}"
            said.append(f"{op} {what}: measured {where}")
    return said


def at_one_shape(rows: pd.DataFrame, tokens: int, head_dim: int) -> pd.DataFrame:
    """Return everything measured of one cell, in a graph and launched eagerly.

    Returns:
        Indexed by (op, variant), by rising time in a graph: graph_us, p10_us, p90_us, eager_us,
        host_us (of eager), launches, bytes, wire_us (bytes over the run's link).
    """
    cell = rows[(rows.tokens == tokens) & (rows.head_dim == head_dim)]
    key = ["op", "variant"]
    graph = cell[cell["mode"] == "graph"].set_index(key)
    eager = cell[cell["mode"] == "eager"].set_index(key)
    found = graph[["median_us", "p10_us", "p90_us"]].rename(columns={"median_us": "graph_us"})
    found["eager_us"] = eager.median_us
    found["host_us"] = eager.host_us
    found = found.join(graph[["launches", "bytes"]])
    found["wire_us"] = graph.bytes / graph.link_gbps / 1e3
    return found.sort_values("graph_us")


def lines(rows: pd.DataFrame) -> pd.DataFrame:
    """Return each thing's cost in a graph as latency + bytes / link, and how well that fits.

    cost = latency_us + bytes / link_gbps, with the link measured in the same run: the one number
    taken from the costs is the latency, the median over the cells of what is over the bytes' time.

    Returns:
        Indexed by (op, what): cells, latency_us, least_us and most_us (cost less line, the cells
        furthest below and above it), marginal_gbps (bytes that a us more buys: the slope of a
        least-squares line over bytes, NaN with one byte count), link_gbps (lowest of its runs).
    """
    found = {}
    graph = rows[rows["mode"] == "graph"]
    for op, what in graph[["op", "what"]].drop_duplicates().itertuples(index=False, name=None):
        some = pick(rows, op, what)
        latency = some.over_us.median()
        off = some.over_us - latency
        slope = (
            np.polyfit(some.bytes, some.median_us, 1)[0] if some.bytes.nunique() > 1 else np.nan
        )
        found[op, what] = {
            "cells": len(some),
            "latency_us": latency,
            "least_us": off.min(),
            "most_us": off.max(),
            # A slope that is not positive says nothing of a bandwidth.
            "marginal_gbps": 1e-3 / slope if slope > 0 else np.nan,
            "link_gbps": some.link_gbps.min(),
        }
    columns = ["cells", "latency_us", "least_us", "most_us", "marginal_gbps", "link_gbps"]
    index = pd.MultiIndex.from_tuples(found, names=["op", "what"]) if found else None
    table = pd.DataFrame(list(found.values()), index=index, columns=columns)
    return table.sort_values("latency_us").sort_index(level="op", sort_remaining=False)


def same_bytes(rows: pd.DataFrame) -> pd.DataFrame:
    """Return pairs of cells that send the same but in other numbers of tokens.

    Returns:
        A row a reducer and pair, by rising bytes: what, bytes (of the wide cell), wide_tokens,
        narrow_tokens, wide_us and narrow_us (few tokens of many dims, many of few), and apart:
        whether their p10 to p90 do not meet.
    """
    found = []
    for what in REDUCERS:
        cells = pick(rows, "reduce", what)
        for wide, narrow in itertools.permutations(cells.itertuples(), 2):
            near = abs(wide.bytes / narrow.bytes - 1) < SAME_BYTES
            if not near or wide.tokens >= narrow.tokens or wide.head_dim <= narrow.head_dim:
                continue
            found.append(
                {
                    "what": what,
                    "bytes": wide.bytes,
                    "wide_tokens": wide.tokens,
                    "narrow_tokens": narrow.tokens,
                    "wide_us": wide.median_us,
                    "narrow_us": narrow.median_us,
                    "apart": wide.p10_us > narrow.p90_us or narrow.p10_us > wide.p90_us,
                }
            )
    columns = ["what", "bytes", "wide_tokens", "narrow_tokens", "wide_us", "narrow_us", "apart"]
    return pd.DataFrame(found, columns=columns)


def together(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what a layer's query gather and reduce take, in a graph.

    Returns:
        Indexed by (tokens, head_dim), a column a pair of PAIRS with the sum of its two medians,
        each measured by itself, and "direct, together" with both measured in turn, as a layer
        calls them, and its p10_us and p90_us. NaN where a part was not measured.
    """
    medians = {
        key: pick(rows, *key).set_index(CELL).median_us
        for key in {part for pair in PAIRS.values() for part in pair}
    }
    found = pd.DataFrame({name: medians[a] + medians[b] for name, (a, b) in PAIRS.items()})
    both = pick(rows, "gather_and_reduce", "direct").set_index(CELL)
    both = both[["median_us", "p10_us", "p90_us"]]
    found = found.join(both.rename(columns={"median_us": "direct, together"}), how="outer")
    return found.sort_index(level=["head_dim", "tokens"])


# ---- sentences -------------------------------------------------------------------------------


def say_over_tokens(rows: pd.DataFrame) -> str:
    """Return what the reducers cost, and beside NCCL alone and vLLM's, as far as measured."""
    medians = {
        (op, what): pick(rows, op, what).set_index(CELL).median_us
        for op, what in EXPECTED
        if op in ("reduce", "collective")
    }
    direct = pick(rows, "reduce", "direct")
    said = []
    if direct.empty:
        said.append("`direct` has no row.")
    else:
        spread = direct.p90_us - direct.p10_us
        said.append(
            f"`direct` takes {direct.median_us.min():.1f} to {direct.median_us.max():.1f} us. Its "
            f"10th and 90th percentile lie up to {spread.max():.1f} us apart, so a difference "
            "smaller than that between two of its cells says nothing."
        )
    for reducer, alone in (("a2a", "all_to_all"), ("ag_rs", "all_gather + reduce_scatter")):
        ours = medians["reduce", reducer]
        more = (ours - medians["collective", alone]).dropna()
        if more.empty:
            said.append(f"`{reducer}` and NCCL's {alone} alone were not measured in one cell.")
        else:
            said.append(
                f"The whole of `{reducer}` takes {more.min():+.1f} to {more.max():+.1f} us "
                f"against NCCL's {alone} called alone, back to back."
            )
        ratio = (medians["reduce", f"vllm {reducer}"] / ours).dropna()
        if ratio.empty:
            said.append(f"vLLM's {reducer} has no row: not compared.")
        else:
            faster = int((ratio > 1).sum())
            said.append(
                f"vLLM's {reducer} takes {ratio.min():.2f} to {ratio.max():.2f}x as long as ours, "
                f"which is the faster one in {faster} of {len(ratio)} cells."
            )
    return " ".join(said)


def say_lines(rows: pd.DataFrame) -> str:
    """Return how far latency and link explain each reducer, as far as measured."""
    table, pairs = lines(rows), same_bytes(rows)
    said = []
    for what in REDUCERS:
        if ("reduce", what) not in table.index:
            said.append(f"`{what}` has no row.")
            continue
        line = table.loc[("reduce", what)]
        text = (
            f"`{what}`: {line.latency_us:.1f} us and its bytes at {line.link_gbps:.0f} GB/s, "
            f"{line.least_us:+.1f} to {line.most_us:+.1f} us off over {line.cells:.0f} cells"
        )
        if not np.isnan(line.marginal_gbps):
            text += f"; its own slope is that of {line.marginal_gbps:.0f} GB/s"
        said.append(f"{text}.")
    if pairs.empty:
        said.append("No two cells send the same bytes in other numbers of tokens.")
    else:
        apart = int(pairs.apart.sum())
        most = (pairs.narrow_us / pairs.wide_us - 1).abs().max()
        said.append(
            "With the same bytes in more tokens of fewer dimensions the cost differs by up to "
            f"{most:.0%}; in {apart} of {len(pairs)} pairs by more than the spread."
        )
    return " ".join(said)


def say_together(rows: pd.DataFrame) -> str:
    """Return what gather and reduce of a layer take, as far as measured."""
    table = together(rows)
    both, parts = table["direct, together"].dropna(), table["direct + direct"]
    if both.empty:
        return "Gather and reduce in turn have no row."
    saved = (parts - both).dropna()
    said = [
        f"By `direct` a layer's gather and reduce take {both.min():.1f} us in the cheapest cell "
        f"and {both.max():.1f} in the dearest."
    ]
    if len(saved):
        said.append(
            f"In turn they take {saved.min():.1f} to {saved.max():.1f} us less than the sum of "
            "both alone."
        )
    for name in ("nccl + a2a", "nccl + ag_rs"):
        ratio = (table[name] / both).dropna()
        if len(ratio):
            said.append(
                f"{name.replace(' + ', ' and ')}, each measured alone and added: "
                f"{ratio.min():.1f} to {ratio.max():.1f}x as long."
            )
    return " ".join(said)
