"""The speed targets of decode attention, recomputed from rows of `bench decode`.

A cell is one shape; of each the latest run counts, and ours and the peers' rows of that run are
compared: medians in a graph. A target over many cells is judged by its worst one. Cells of the
grid that were never measured are counted, and a target with such cells does not hold.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pandas as pd

from dcp_lab.bench import costs, record
from dcp_lab.bench.verdicts import Verdict, judge

# num_q_heads, num_kv_heads, head_dim on one GPU.
HEADS = ((16, 1, 128), (8, 1, 128), (64, 8, 128), (32, 32, 128), (32, 4, 64))
REQUESTS = (1, 16, 64, 256)
CONTEXTS = (1024, 2048, 8192, 65536, 262144)
# One layer of the grid's largest cells; larger ones do not fit an H200 beside two gathers' copies.
MAX_CELL_BYTES = 40_000_000_000

PEERS = ("fa3", "flashinfer", "vllm_triton_decode", "vllm_triton_unified", "sdpa")
# write_kv and gather_kv are judged here: a rank's step, longer, and a whole model's KV heads.
COPIES = ((16, 2048, 16, 1, 128), (16, 8192, 16, 1, 128), (16, 2048, 64, 8, 128))
COPY_OPS = ("write_kv", "gather_kv", "copy")
MLA_PEERS = ("flashmla", "fa3_mla", "flashinfer_mla")
FP8 = "float8_e4m3fn"

LATENCY_BYTES = 70e6
LARGE_BYTES = 512e6

_SHAPE = ["requests", "context_tokens", "num_q_heads", "num_kv_heads", "head_dim", "lengths"]


def grid(max_bytes: float = MAX_CELL_BYTES) -> list[tuple[int, ...]]:
    """Return (requests, context_tokens, num_q_heads, num_kv_heads, head_dim) of every cell."""
    cells = (
        (requests, context, *heads)
        for heads, requests, context in itertools.product(HEADS, REQUESTS, CONTEXTS)
    )
    return [cell for cell in cells if _kv_bytes(*cell) <= max_bytes]


def uneven_grid() -> list[tuple[int | str, ...]]:
    """Return (cell of the grid..., lengths) of a third of its cells of several requests.

    Every third cell, 'uneven' and 'one_long' in turn; each stands beside its even cell.
    """
    several = [cell for cell in grid() if cell[0] > 1][::3]
    return [
        (*cell, lengths)
        for cell, lengths in zip(several, itertools.cycle(("uneven", "one_long")), strict=False)
    ]


def fp8_grid() -> list[tuple[int, ...]]:
    """Return a third of the grid's cells: the two that are held against FA3's fp8, and others.

    Every third cell in an order that begins with those two.
    """
    cells = grid()
    first = [(16, 2048, 16, 1, 128), (64, 8192, 16, 1, 128)]
    rest = [cell for cell in cells if cell not in first]
    chosen = [cell for cell in first if cell in cells] + rest[1::3]
    return chosen[: math.ceil(len(cells) / 3)]


def mla_grid() -> list[tuple[int, int, int, bool]]:
    """Return (requests, context_tokens, num_q_heads, fp8) of every MLA cell."""
    return list(itertools.product((1, 16, 64), (1024, 8192, 65536), (16, 128), (False, True)))


def _kv_bytes(requests: int, context: int, num_q_heads: int, kv_heads: int, dim: int) -> float:
    sizes = {"num_kv_heads": kv_heads, "head_dim": dim, "kv_itemsize": 2}
    return costs.kv_bytes(requests * context, **sizes)


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each cell's latest run; copies are cells of their own."""
    key = [rows[name] for name in (*_SHAPE, "page_size", "dtype", "kv_dtype")]
    key.append(rows.op.isin(COPY_OPS).rename("copies"))
    newest = rows.date_utc.groupby(key, dropna=False).transform("max")
    return rows[rows.date_utc == newest]


def cells_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row a cell with what the targets compare, us in a graph.

    Returns:
        Indexed by kv_dtype and shape: ours_us, read_us, best_us (the fastest peer), best, fa3_us,
        kv_bytes, launches, host_us and bound_host_us (eager, called plainly and bound).
    """
    rows = latest(table[(table.page_size == 16) & (table.dtype == "bfloat16")])
    found = []
    for key, cell in rows.groupby(["kv_dtype", *_SHAPE]):
        graph, eager = (cell[cell["mode"] == mode] for mode in ("graph", "eager"))
        ours = graph[(graph.op == "paged_decode") & (graph.variant == "planned")]
        if ours.empty:
            continue
        us = graph.groupby("op").median_us.min()
        peers = us[us.index.isin(PEERS)]
        host = eager[eager.op == "paged_decode"].groupby("variant").host_us.min()
        first = ours.iloc[0]
        found.append(
            {
                **dict(zip(["kv_dtype", *_SHAPE], key, strict=True)),
                "ours_us": first.median_us,
                "read_us": first.bound_us,
                "best_us": peers.min() if len(peers) else math.nan,
                "best": peers.idxmin() if len(peers) else "",
                "fa3_us": us.get("fa3", math.nan),
                "kv_bytes": first.bytes,
                "launches": graph[graph.op == "paged_decode"].launches.max(),
                "host_us": host.get("planned", math.nan),
                "bound_host_us": host.get("bound", math.nan),
            }
        )
    columns = ["kv_dtype", *_SHAPE, "ours_us", "read_us", "best_us", "best", "fa3_us", "kv_bytes"]
    columns += ["launches", "host_us", "bound_host_us"]
    return pd.DataFrame(found, columns=columns)


def _name(cell: pd.Series) -> str:
    tail = "" if cell.lengths == "equal" else f" {cell.lengths}"
    return (
        f"{cell.requests}x{cell.context_tokens} {cell.num_q_heads}q/{cell.num_kv_heads}kv "
        f"d{cell.head_dim}{tail}"
    )


def _worst(
    target: str,
    cells: pd.DataFrame,
    values: pd.Series,
    limit: float,
    *,
    better: str,
    unit: str = "us",
    cells_due: int | None = None,
    wish: bool = False,
) -> Verdict:
    """Return the verdict of the worst of many cells; cells without a value are not measured."""
    values = values.dropna().astype(float)
    due = len(cells) if cells_due is None else cells_due
    missing = max(0, due - len(values))
    if values.empty:
        return Verdict(target, None, limit, better, unit, missing, wish=wish)
    worst = values.idxmax() if better == "low" else values.idxmin()
    where = _name(cells.loc[worst])
    return Verdict(target, float(values[worst]), limit, better, unit, missing, where, wish)


def verdicts(table: pd.DataFrame) -> list[Verdict]:
    """Return every target's verdict.

    Args:
        table: measured("decode_...").
    """
    cells = cells_of(table)
    bf16 = cells[cells.kv_dtype == "bfloat16"]
    due = grid()
    even = bf16[bf16.lengths == "equal"]
    known = [tuple(row) in set(due) for row in even[_SHAPE[:5]].to_numpy().tolist()]
    in_grid = even[pd.Series(known, index=even.index, dtype=bool)]
    found = [_geometric_mean(in_grid, due)]
    ratio = bf16.best_us / bf16.ours_us
    uneven_due = len(uneven_grid())
    bf16_due = len(due) + max(uneven_due, len(bf16) - len(even))
    found.append(
        _worst(
            "no bf16 cell slower than its fastest peer",
            bf16,
            ratio,
            0.97,
            better="high",
            unit="x",
            cells_due=bf16_due,
        )
    )
    beyond = bf16.ours_us - 1.03 * bf16.read_us
    for limit, wish in ((4.0, False), (3.5, True)):
        found.append(
            _worst(
                "bf16 beyond the page-ordered read + 3 %",
                bf16,
                beyond,
                limit,
                better="low",
                cells_due=bf16_due,
                wish=wish,
            )
        )
    large = in_grid[in_grid.kv_bytes >= LARGE_BYTES]
    found.append(
        _worst(
            "KV of 512 MB and more: share of the read's bandwidth",
            large,
            large.read_us / large.ours_us,
            0.95,
            better="high",
            unit="x",
            cells_due=sum(_kv_bytes(*cell) >= LARGE_BYTES for cell in due),
        )
    )
    launches = pd.to_numeric(cells.launches).astype(float)
    found.append(_worst("launches a call", cells, launches, 2, better="low", unit="launches"))
    found.append(
        _worst(
            "host time of a bound call over a plain one's",
            cells,
            cells.bound_host_us / cells.host_us,
            1.0,
            better="low",
            unit="x",
        )
    )
    found += _fp8(cells[cells.kv_dtype == FP8], len(fp8_grid()))
    found += _mla(table)
    found.append(_uneven(bf16, uneven_due))
    found += _copies(table)
    return found


def _geometric_mean(in_grid: pd.DataFrame, due: list[tuple[int, ...]]) -> Verdict:
    """Return the verdict on best peer's time / ours over the latency cells."""
    fast = in_grid[(in_grid.num_kv_heads == 1) & (in_grid.kv_bytes < LATENCY_BYTES)]
    ratio = (fast.best_us / fast.ours_us).dropna().astype(float)
    expected = sum(cell[3] == 1 and _kv_bytes(*cell) < LATENCY_BYTES for cell in due)
    mean = math.exp(ratio.map(math.log).mean()) if len(ratio) else None
    return Verdict(
        "fastest peer over ours, geometric mean of the latency cells",
        mean,
        1.30,
        "high",
        "x",
        max(0, expected - len(ratio)),
        f"{len(ratio)} cells" if len(ratio) else "",
    )


def _fp8(cells: pd.DataFrame, due: int) -> list[Verdict]:
    found = []
    for requests, context, limit in ((16, 2048, 1.5), (64, 8192, 1.4)):
        cell = cells[
            (cells.requests == requests)
            & (cells.context_tokens == context)
            & (cells.num_kv_heads == 1)
            & (cells.num_q_heads == 16)
            & (cells.lengths == "equal")
        ]
        target = f"fp8 over FA3's fp8, {requests}x{context}"
        ratio = cell.fa3_us / cell.ours_us
        found.append(_worst(target, cell, ratio, limit, better="high", unit="x", cells_due=1))
    beyond = cells.ours_us - 1.03 * cells.read_us
    target = "fp8 beyond the page-ordered read + 3 %"
    return [*found, _worst(target, cells, beyond, 6.0, better="low", cells_due=due)]


def _mla(table: pd.DataFrame) -> list[Verdict]:
    """Return the verdicts on rows of op mla_paged_decode beside the MLA peers'."""
    rows = latest(table[table["mode"] == "graph"])
    ours, best, triton = [], [], []
    shapes = rows[rows.op == "mla_paged_decode"].drop_duplicates(["kv_dtype", *_SHAPE])
    for _, cell in shapes.iterrows():
        same = (rows[["kv_dtype", *_SHAPE]] == cell[["kv_dtype", *_SHAPE]]).all(axis=1)
        us = rows[same].groupby("op").median_us.min()
        ours.append(us["mla_paged_decode"])
        best.append(us[us.index.isin(MLA_PEERS)].min())
        triton.append(us.get("vllm_triton_decode", math.nan))
    shapes = shapes.assign(best=best, triton=triton, ours=ours)
    # None of the three takes an fp8 latent cache on Hopper; vLLM's Triton does.
    due = mla_grid()
    fast_due = len(due) // 4
    wide = shapes[shapes.kv_dtype == "bfloat16"]
    few, many = (wide[wide.num_q_heads == heads] for heads in (16, 128))
    fastest = "in bf16 over the fastest of FlashMLA, FA3's MLA and FlashInfer's"
    high = {"better": "high", "unit": "x"}
    return [
        _worst(
            f"MLA at 16 heads {fastest}",
            few,
            few.best / few.ours,
            1.0,
            cells_due=fast_due,
            **high,
        ),
        _worst(
            "MLA over vLLM's Triton",
            shapes,
            shapes.triton / shapes.ours,
            1.5,
            cells_due=len(due),
            **high,
        ),
        _worst(
            f"MLA at 128 heads {fastest}",
            many,
            many.best / many.ours,
            0.8,
            cells_due=fast_due,
            wish=True,
            **high,
        ),
    ]


def _uneven(bf16: pd.DataFrame, due: int) -> Verdict:
    """Return the verdict on uneven lengths over even ones of the same mean."""
    same = [name for name in _SHAPE if name != "lengths"]
    even = bf16[bf16.lengths == "equal"].set_index(same).ours_us
    uneven = bf16[bf16.lengths != "equal"]
    paired = uneven.join(even.rename("even_us"), on=same)
    target = "uneven lengths over even ones of the same total"
    ratio = paired.ours_us / paired.even_us
    return _worst(target, paired, ratio, 1.10, better="low", unit="x", cells_due=due)


def _copies(table: pd.DataFrame) -> list[Verdict]:
    """Return the verdicts on rows of op write_kv and gather_kv beside those of op copy."""
    rows = latest(table[table["mode"] == "graph"])
    # A copy's variant names what it is a copy of.
    copies = rows[rows.op == "copy"].set_index(["kv_dtype", *_SHAPE, "variant"]).median_us
    copy_us = copies.groupby(level=list(range(copies.index.nlevels))).min().to_dict()
    found = []
    for op, forms, limit in (
        ("write_kv", ("step", "prefill"), 1.10),
        ("gather_kv", ("per_page",), 1.25),
    ):
        ours = rows[(rows.op == op) & rows.variant.isin(forms)]
        beside = [
            copy_us.get((*shape, f"{op} {form}"), math.nan)
            for *shape, form in ours[["kv_dtype", *_SHAPE, "variant"]].to_numpy().tolist()
        ]
        target = f"{op}, {' and '.join(forms)}, over a copy of its bytes"
        ratio = ours.median_us / pd.Series(beside, index=ours.index, dtype=float)
        due = len(COPIES) * len(forms)
        found.append(_worst(target, ours, ratio, limit, better="low", unit="x", cells_due=due))
    return found


def gate(path: Path) -> int:
    """Print every target's verdict from a table of decode rows; see verdicts.judge."""
    return judge(path, record.DECODE, verdicts, command="dcp-lab bench decode --grid --peers")
