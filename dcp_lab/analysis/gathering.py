"""Paged against gathered decode: one layer by `bench decode`, whole steps by `bench stack`.

What stands side by side here was measured side by side: of each shape one run is taken for the
lab's own ways to attend, and a peer is compared with paged_decode of the peer's own run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from dcp_lab.analysis import tables
from dcp_lab.bench import costs, record
from dcp_lab.bench.decode_targets import HEADS, PEERS

FAMILY = ["num_q_heads", "num_kv_heads", "head_dim"]
SHAPE = [*FAMILY, "requests", "context_tokens"]
GATHERS = ("per_page", "per_token", "published", "published_no_sync")
_WAYS = {
    ("paged_decode", "planned"): "paged",
    ("paged_decode", "bound"): "paged_bound",
    ("read_pages", "floor"): "read",
    **{("gather_decode", gather): gather for gather in GATHERS},
}
WAYS = tuple(_WAYS.values())
_RUN = ["date_utc", "git_commit"]


def family_name(num_q_heads: int, num_kv_heads: int, head_dim: int) -> str:
    """Return e.g. '16 q heads, 1 KV head, dim 128'."""
    plural = "" if num_kv_heads == 1 else "s"
    return f"{num_q_heads} q heads, {num_kv_heads} KV head{plural}, dim {head_dim}"


def families(rows: pd.DataFrame) -> list[tuple[int, int, int]]:
    """Return the rows' shape families: those of the speed targets first, in their order."""
    there = {tuple(int(size) for size in row) for row in rows[FAMILY].to_numpy()}
    known = [heads for heads in HEADS if heads in there]
    return known + sorted(there - set(known))


def of_family(rows: pd.DataFrame, family: tuple[int, int, int]) -> pd.DataFrame:
    """Return the rows of one family."""
    return rows[(rows[FAMILY] == list(family)).all(axis=1)]


def decode_tables(machine: str) -> pd.DataFrame:
    """Return every row of the tables decode_MACHINE.csv and decode_MACHINE_*.csv.

    Args:
        machine: As in the file names, e.g. "h200".

    Returns:
        The tables' columns and `table`, the name of the table; no row where there is no table.
    """
    folder = tables.measured_path(f"decode_{machine}").parent
    name = re.compile(rf"decode_{re.escape(machine)}(_.*)?")
    found = sorted(path.stem for path in folder.glob("decode_*.csv") if name.fullmatch(path.stem))
    read = [tables.measured(stem).assign(table=stem) for stem in found]
    if not read:
        schema = tables.MEASURED["decode"]
        empty = record.validate(pd.DataFrame(columns=list(schema.columns)), schema, "no table")
        return empty.assign(table=pd.Series(dtype="string"))
    return pd.concat(read, ignore_index=True)


def runs(decode: pd.DataFrame) -> pd.DataFrame:
    """Return where the rows come from: one row a run, oldest first."""
    columns = ["date_utc", "git_commit", "table", "gpu", "driver", "torch", "triton", "vllm"]
    counted = decode.groupby(columns, dropna=False).size().rename("rows").reset_index()
    counted["git_commit"] = counted.git_commit.str[:8]
    return counted.sort_values("date_utc", kind="stable", ignore_index=True)


def layer_rows(
    decode: pd.DataFrame,
    *,
    kv_dtype: str = "bfloat16",
    lengths: str = "equal",
    page_size: int = 16,
) -> pd.DataFrame:
    """Return the lab's ways to attend one layer, one run a shape.

    Of each shape the latest run counts that has both the paged kernel and a gather; where no run
    has, the latest with the paged kernel. A gather that launches another number of kernels than
    the latest commit's is another program (the attention behind it has changed): left out.

    Args:
        decode: decode_tables(...) or measured("decode_...").
        kv_dtype: Which cache.
        lengths: Which lengths.
        page_size: Which pages.

    Returns:
        One row a shape, way (WAYS) and mode: median_us, p10_us, p90_us, host_us, launches, bytes,
        kv_bytes (K and V once), read_us (the page-ordered read of the same run), of_read (read_us
        / median_us), useful_gbps (kv_bytes / median_us), date_utc, git_commit.
    """
    rows = decode[
        (decode.kv_dtype == kv_dtype)
        & (decode.dtype == "bfloat16")
        & (decode.lengths == lengths)
        & (decode.page_size == page_size)
    ].copy()
    ways = [_WAYS.get(pair, "") for pair in zip(rows.op, rows.variant, strict=True)]
    rows["way"] = pd.Series(ways, index=rows.index, dtype="string")
    rows = _same_gathers(rows[rows.way != ""])
    keys = [*SHAPE, *_RUN]
    rows["paged"], rows["gathers"] = rows.way == "paged", rows.way.isin(GATHERS)
    has = rows.groupby(keys)[["paged", "gathers"]].any().reset_index()
    has = has[has.paged].sort_values(["gathers", "date_utc"], kind="stable")
    chosen = has.drop_duplicates(SHAPE, keep="last")[keys]
    rows = rows.merge(chosen, on=keys)
    once = rows[rows.way == "paged"].drop_duplicates(SHAPE)[[*SHAPE, "bytes"]]
    rows = rows.merge(once.rename(columns={"bytes": "kv_bytes"}), on=SHAPE)
    rows = rows.rename(columns={"bound_us": "read_us"})
    rows["of_read"] = rows.read_us / rows.median_us
    rows["useful_gbps"] = rows.kv_bytes / rows.median_us / 1e3
    columns = [*SHAPE, "way", "mode", "median_us", "p10_us", "p90_us", "host_us", "launches"]
    columns += ["bytes", "kv_bytes", "read_us", "of_read", "useful_gbps", *_RUN]
    # A cell that one run measured twice: the later row stands.
    rows = rows.drop_duplicates([*SHAPE, "way", "mode"], keep="last")
    return rows[columns].sort_values([*SHAPE, "mode", "way"], ignore_index=True)


def _same_gathers(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out gathers that launch as many kernels as none of the latest commit's."""
    gathers = rows[rows.way.isin(GATHERS)]
    stale = pd.Series(False, index=rows.index)
    for _, form in gathers.groupby("way"):
        latest = form[form.git_commit == form.sort_values("date_utc").git_commit.iloc[-1]]
        stale.loc[form.index] = ~form.launches.isin(set(latest.launches))
    return rows[~stale]


def left_out(decode: pd.DataFrame, rows: pd.DataFrame, *, kv_dtype: str = "bfloat16") -> int:
    """Return how many shapes of even lengths have gather rows and none that is used.

    Args:
        decode: All rows.
        rows: layer_rows(decode, kv_dtype=kv_dtype).
        kv_dtype: Which cache.
    """
    even = decode[(decode.lengths == "equal") & (decode.kv_dtype == kv_dtype)]
    measured = even[even.op == "gather_decode"][SHAPE].drop_duplicates()
    used = rows[rows.way.isin(GATHERS)][SHAPE].drop_duplicates()
    return len(measured) - len(used)


def gather_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what each gather adds to a layer over the paged kernel of the same run.

    Args:
        rows: layer_rows(...).

    Returns:
        One row a shape, mode and gather: gather, paged_us, gather_us, extra_us, times (gather_us /
        paged_us), paged_launches, gather_launches, times_bytes (bytes over those of reading once).
    """
    key = [*SHAPE, "mode"]
    paged = rows[rows.way == "paged"][[*key, "median_us", "launches"]]
    paged = paged.set_axis([*key, "paged_us", "paged_launches"], axis=1)
    found = rows[rows.way.isin(GATHERS)].merge(paged, on=key)
    renamed = {"way": "gather", "median_us": "gather_us", "launches": "gather_launches"}
    found = found.rename(columns=renamed)
    found["extra_us"] = found.gather_us - found.paged_us
    found["times"] = found.gather_us / found.paged_us
    found["times_bytes"] = found.bytes / found.kv_bytes
    columns = [*key, "gather", "paged_us", "gather_us", "extra_us", "times", "paged_launches"]
    columns += ["gather_launches", "times_bytes", "bytes", "kv_bytes"]
    return found[columns].reset_index(drop=True)


def expected_bytes(row: pd.Series, kv_dtype: str) -> float:
    """Return a gather's bytes by the formulas of bench.costs: pages once, and the copy twice.

    Args:
        row: Of gather_costs(...).
        kv_dtype: Of the cache; the copy is bf16.
    """
    tokens = row.requests * row.context_tokens
    sizes = {"num_kv_heads": int(row.num_kv_heads), "head_dim": int(row.head_dim)}
    pages = costs.kv_bytes(tokens, kv_itemsize=getattr(torch, kv_dtype).itemsize, **sizes)
    return pages + costs.gather_bytes(tokens, out_itemsize=2, **sizes)


def peer_rows(
    decode: pd.DataFrame,
    *,
    kv_dtype: str = "bfloat16",
    lengths: str = "equal",
    page_size: int = 16,
) -> pd.DataFrame:
    """Return each peer's fastest form beside paged_decode of the same run, in a graph.

    Of each shape and peer the latest run that has both counts.

    Args:
        decode: decode_tables(...) or measured("decode_...").
        kv_dtype: Which cache.
        lengths: Which lengths.
        page_size: Which pages.

    Returns:
        One row a shape and peer: peer, variant, median_us, paged_us, times (median_us / paged_us),
        kv_bytes, date_utc.
    """
    rows = decode[
        (decode.kv_dtype == kv_dtype)
        & (decode.dtype == "bfloat16")
        & (decode.lengths == lengths)
        & (decode.page_size == page_size)
        & (decode["mode"] == "graph")
    ]
    key = [*SHAPE, *_RUN]
    ours = rows[(rows.op == "paged_decode") & (rows.variant == "planned")].drop_duplicates(key)
    ours = ours[[*key, "median_us", "bytes"]].set_axis([*key, "paged_us", "kv_bytes"], axis=1)
    found = rows[rows.op.isin(PEERS)].rename(columns={"op": "peer"}).merge(ours, on=key)
    # Latest run first, then the fastest form of it.
    found = found.sort_values("median_us", kind="stable")
    found = found.sort_values("date_utc", ascending=False, kind="stable")
    found = found.drop_duplicates([*SHAPE, "peer"])
    found["times"] = found.median_us / found.paged_us
    columns = [*SHAPE, "peer", "variant", "median_us", "paged_us", "times", "kv_bytes", "date_utc"]
    return found[columns].sort_values([*SHAPE, "peer"], ignore_index=True)


def best_peer(peers: pd.DataFrame) -> pd.DataFrame:
    """Return of each shape the peer that comes closest to paged_decode, or passes it."""
    return peers.sort_values("times", kind="stable").drop_duplicates(SHAPE).sort_values(SHAPE)


def geometric_mean(values: Sequence[float] | pd.Series) -> float:
    """Return the geometric mean; NaN of nothing."""
    logs = np.log(np.asarray(values, dtype=float))
    return float(np.exp(logs.mean())) if len(logs) else float("nan")


# ---- whole steps ---------------------------------------------------------------------------

_STEP = ["model", "num_layers", "num_kv_heads", "head_dim", "dense", "requests", "context_tokens"]


def step_shares(stack: pd.DataFrame) -> pd.DataFrame:
    """Return what a gather is of a whole step's GPU time: measured steps, no DCP.

    share = (gathered step - paged step) / gathered step, time with at least one kernel running.
    The same kernels run in each graph mode, so of several modes the median counts. Steps whose
    layers all have a KV cache, without launch delay and with calls that are not bound.

    Args:
        stack: measured("stack_...").

    Returns:
        One row a step and gather: model, num_layers, num_kv_heads, head_dim, dense, requests,
        context_tokens, gather, paged_ms, gather_ms, extra_ms, share.
    """
    rows = stack[
        (stack.dcp_size == 1)
        & (stack.kv_layers == stack.num_layers)
        & (stack.launch_delay_us == 0)
        & ~stack.bound.astype(bool)
        & stack.gpu_busy_ms.notna()
    ]
    rows = rows.sort_values("date_utc", kind="stable")
    rows = rows.drop_duplicates([*_STEP, "attention", "mode"], keep="last")
    busy = rows.groupby([*_STEP, "attention"]).gpu_busy_ms.median().astype(float)
    busy = busy.rename("gather_ms").reset_index().rename(columns={"attention": "gather"})
    paged = busy[busy.gather == "paged"].drop(columns="gather")
    paged = paged.rename(columns={"gather_ms": "paged_ms"})
    found = busy[busy.gather != "paged"].merge(paged, on=_STEP)
    found["extra_ms"] = found.gather_ms - found.paged_ms
    found["share"] = found.extra_ms / found.gather_ms
    columns = [*_STEP, "gather", "paged_ms", "gather_ms", "extra_ms", "share"]
    return found[columns].reset_index(drop=True)


def layers_add_up(steps: pd.DataFrame, layer_costs: pd.DataFrame) -> pd.DataFrame:
    """Return whole steps beside layers x what one layer's bench says, where both were measured.

    Args:
        steps: step_shares(...).
        layer_costs: gather_costs(...); its graph rows of 16 query heads count. A gather does the
            same work for 8, and a rank of DCP 2 attends 16.

    Returns:
        One row a step and gather: requests, context_tokens, gather, dense, step_ms (measured extra
        of the step), layers_ms (layers x extra of one layer).
    """
    one = layer_costs[(layer_costs["mode"] == "graph") & (layer_costs.num_q_heads == 16)]
    on = ["num_kv_heads", "head_dim", "requests", "context_tokens", "gather"]
    both = steps.merge(one[[*on, "extra_us"]], on=on)
    both["layers_ms"] = both.num_layers * both.extra_us / 1e3
    both = both.rename(columns={"extra_ms": "step_ms"})
    return both[["requests", "context_tokens", "gather", "dense", "step_ms", "layers_ms"]]


def modelled_shares(
    steps: pd.DataFrame, rows: pd.DataFrame, layer_costs: pd.DataFrame
) -> pd.DataFrame:
    """Return what a gather would be of a step at every benched shape, modelled from its parts.

    rest  = GPU time of the paged step - layers x paged kernel, of the steps that were measured
    share = layers x extra / (rest + layers x gathered layer)

    The rest (dense work, norms, KV writes) is that of a step with as many requests; the paged
    kernel at a step's context is linear between two benched contexts. Where no step with so many
    requests was measured, or its context lies outside of what was benched, there is no row.

    Args:
        steps: step_shares(...).
        rows: layer_rows(...).
        layer_costs: gather_costs(rows).

    Returns:
        One row a shape, dense part and gather: dense, requests, context_tokens, gather, rest_ms,
        extra_ms, step_ms, share. Only 16 query heads and the KV heads and head_dim of the step.
    """
    in_graph = rows[(rows["mode"] == "graph") & (rows.way == "paged") & (rows.num_q_heads == 16)]
    costs_16 = layer_costs[(layer_costs["mode"] == "graph") & (layer_costs.num_q_heads == 16)]
    found = []
    kinds = ["num_layers", "num_kv_heads", "head_dim", "dense", "requests"]
    for key, group in steps.drop_duplicates(_STEP).groupby(kinds):
        layers, kv_heads, dim, dense, requests = key
        same = {"num_kv_heads": kv_heads, "head_dim": dim, "requests": requests}
        line = _where(in_graph, same).sort_values("context_tokens")
        known = group[group.context_tokens.between(*_ends(line.context_tokens))]
        if known.empty:
            continue
        paged_us = np.interp(
            known.context_tokens.astype(float),
            line.context_tokens.astype(float),
            line.median_us.astype(float),
        )
        rest_ms = float((known.paged_ms - layers * paged_us / 1e3).median())
        for row in _where(costs_16, same).itertuples():
            extra_ms = layers * row.extra_us / 1e3
            step_ms = rest_ms + layers * row.gather_us / 1e3
            found.append(
                {
                    "dense": dense,
                    "requests": int(requests),
                    "context_tokens": int(row.context_tokens),
                    "gather": row.gather,
                    "rest_ms": rest_ms,
                    "extra_ms": extra_ms,
                    "step_ms": step_ms,
                    "share": extra_ms / step_ms,
                }
            )
    columns = ["dense", "requests", "context_tokens", "gather", "rest_ms", "extra_ms", "step_ms"]
    return pd.DataFrame(found, columns=[*columns, "share"])


def _where(rows: pd.DataFrame, values: dict[str, object]) -> pd.DataFrame:
    for name, value in values.items():
        rows = rows[rows[name] == value]
    return rows


def _ends(values: pd.Series) -> tuple[float, float]:
    """Return the smallest and the largest; of nothing an interval that holds nothing."""
    return (values.min(), values.max()) if len(values) else (1.0, 0.0)
