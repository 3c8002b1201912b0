"""Decode attention on one GPU beside its peers, checked, then timed.

    dcp-lab bench decode [--shape SHAPE ... | --grid [PART ...]] [--peers] [--out rows.csv]
    dcp-lab bench decode --gate [--out rows.csv]

SHAPE is one of, each with :uneven or :one_long and with :fp8 behind it where that makes sense,

    16x2048, 16x2048x64x8x128     REQUESTSxTOKENS, then query heads, KV heads, head_dim
    mla:16x8192, mla:16x8192x128  MLA: REQUESTSxTOKENS, then query heads
    copies:16x2048x64x8x128       write_kv and gather_kv beside a copy of their bytes

and PART one of gqa, uneven, fp8, mla, copies: the cells that --gate judges, by default all. What
is measured of each is said in gqa.py, mla.py and copies.py beside this file. With --peers, the
peers of dcp_lab/peers that can run here too.

Protocol (protocol.py): each variant runs once on each of several layers of distinct KV, more than
three times the last-level cache together where the shape allows it (column l2: cold; else warm);
in a graph and eagerly; variants take turns; every sample of a variant is kept until the
percentiles are made. Out and LSE are compared with float64 on the very inputs that are timed, on
the first and the last request of the first and the last layer: of eager calls and of a replay of
the very graph that is timed, into outputs that were filled with NaN, before any timing and again
after it. A variant that is off is not timed and the command fails; a peer that is off is left out.

A kernel that rounds its queries or the softmax's weights to fp8 is compared for the queries that
it attends, and allowed twice the error of plain torch that rounds the same weights.

--gate measures nothing: it recomputes the speed targets from the table's rows and says of each
whether it holds, by how much it is missed, or that it is not measured.

Not measured: the rest of a layer, several ranks, MI3xx GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from dcp_lab.analysis.tables import measured_path
from dcp_lab.bench import decode_targets, gqa, mla, record
from dcp_lab.bench.copies import CopyShape, measure_copies, parse_copies
from dcp_lab.bench.gqa import DecodeShape, measure_shape, parse_shape
from dcp_lab.bench.mla import MlaShape, measure_mla, parse_mla
from dcp_lab.bench.workers import compile_side_by_side
from dcp_lab.kernels import INTERPRETED
from dcp_lab.peers import DECODE_PEERS, MLA_PEERS

Cell = DecodeShape | MlaShape | CopyShape

# What study 1's rank holds under DCP 2 (16 q heads after the gather of q, 1 KV head), shorter and
# longer; one request; a whole model's 8 KV heads.
DEFAULT_SHAPES = (
    DecodeShape(1, 8192),
    DecodeShape(16, 1024),
    DecodeShape(16, 2048),
    DecodeShape(16, 3072, lengths="uneven"),
    DecodeShape(16, 8192),
    DecodeShape(64, 8192),
    DecodeShape(16, 2048, num_q_heads=64, num_kv_heads=8),
)
PARTS = ("gqa", "uneven", "fp8", "mla", "copies")


def parse_cell(text: str) -> Cell:
    """Return the shape that a --shape names.

    Raises:
        ValueError: It names none.
    """
    kind, _, rest = text.partition(":")
    if kind == "mla":
        return parse_mla(rest)
    return parse_copies(rest) if kind == "copies" else parse_shape(text)


def grid_cells(part: str) -> list[Cell]:
    """Return the cells of one part of the grid that --gate judges."""
    if part == "gqa":
        return [DecodeShape(*cell) for cell in decode_targets.grid()]
    if part == "uneven":
        return [
            DecodeShape(*cell, lengths=lengths) for *cell, lengths in decode_targets.uneven_grid()
        ]
    if part == "fp8":
        return [DecodeShape(*cell, fp8=True) for cell in decode_targets.fp8_grid()]
    if part == "mla":
        return [MlaShape(*cell, fp8=fp8) for *cell, fp8 in decode_targets.mla_grid()]
    return [CopyShape(*cell) for cell in decode_targets.COPIES]


def measure_cell(cell: Cell, *, samples: int, peers: bool) -> list[dict[str, object]]:
    """Check and time every variant of a cell; return its rows.

    Raises:
        RuntimeError: A variant's result is off; nothing was timed.
    """
    if isinstance(cell, MlaShape):
        return measure_mla(cell, samples=samples, peers=peers)
    if isinstance(cell, CopyShape):
        return measure_copies(cell, samples=samples)
    return measure_shape(cell, samples=samples, peers=peers)


def compile_cell(cell: Cell, peers: bool) -> None:
    """Leave a cell's kernels in Triton's cache: each variant is called once, on one layer."""
    if isinstance(cell, CopyShape):
        return
    bench, others = (mla, MLA_PEERS) if isinstance(cell, MlaShape) else (gqa, DECODE_PEERS)
    x = bench.make_layers(cell, dtype=torch.bfloat16, layers=1)
    for variant in bench.variants_of(x):
        variant.call(0)
    for peer in others if peers else ():
        for make in peer.calls(x).values() if peer.why_absent() is None else ():
            # A peer that does not run here says so where it is timed; the next still compiles.
            with contextlib.suppress(Exception):
                make().run(0)


def show(name: str, rows: list[dict[str, object]]) -> str:
    """Return the rows of one cell as a small table for a terminal."""
    head = f"{name}, us a layer"
    lines = [
        f"{head:45} {'graph':>8} {'eager':>8} {'host':>8} {'p10':>8} {'p90':>8} {'launches':>9}"
    ]
    by_name: dict[str, dict[str, dict[str, object]]] = {}
    for row in rows:
        by_name.setdefault(f"{row['op']} {row['variant']}", {})[str(row["mode"])] = row
    for variant, modes in by_name.items():
        eager = modes["eager"]
        graph = f"{modes['graph']['median_us']:8.2f}" if "graph" in modes else f"{'-':>8}"
        lines.append(
            f"  {variant:43} {graph} {eager['median_us']:8.1f} {eager['host_us']:8.1f} "
            f"{eager['host_p10_us']:8.1f} {eager['host_p90_us']:8.1f} {eager['launches']:9}"
        )
    return "\n".join(lines)


def main(args: list[str] | None = None) -> int:
    """Measure and append rows; return the exit status: 1 when a result is off, 2 on bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help="a cell, see above; repeatable")
    parser.add_argument("--samples", type=int, default=25, help="graph replays of each variant")
    parser.add_argument(
        "--out",
        type=Path,
        help="CSV to append to, or to judge (default: data/measured/decode_GPU.csv of this "
        "machine's GPU; with --gate, of an H200)",
    )
    parser.add_argument(
        "--grid",
        nargs="*",
        choices=PARTS,
        metavar="PART",
        help=f"every cell that --gate judges, or parts of them: {', '.join(PARTS)}",
    )
    parser.add_argument("--gate", action="store_true", help="measure nothing: judge the table")
    parser.add_argument("--peers", action="store_true", help="measure the peers that are here too")
    parser.add_argument("--dry-run", action="store_true", help="print the grid and stop")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="compile the kernels of all cells in so many processes before the first is measured "
        "(default: each cell's when it is measured)",
    )
    options = parser.parse_args(args)
    if options.gate:
        return decode_targets.gate(options.out or measured_path("decode_h200"))
    if options.grid is not None and options.shape:
        print("--grid: expected without --shape", file=sys.stderr)
        return 2
    try:
        cells: list[Cell] = [parse_cell(s) for s in options.shape or ()] or list(DEFAULT_SHAPES)
        if options.grid is not None:
            cells = [cell for part in options.grid or PARTS for cell in grid_cells(part)]
    except ValueError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    if options.samples < 5:
        print(f"--samples: expected at least 5, got {options.samples}", file=sys.stderr)
        return 2
    if options.workers < 0:
        print(f"--workers: expected at least 0, got {options.workers}", file=sys.stderr)
        return 2
    if options.dry_run:
        print("\n".join(cell.name for cell in cells))
        return 0
    if INTERPRETED or not torch.cuda.is_available():
        print(
            "bench decode: expected a GPU, found none; --dry-run shows the grid", file=sys.stderr
        )
        return 2
    source = record.provenance()
    if reason := record.why_not_kept(source):
        print(f"bench decode: {reason}", file=sys.stderr)
        return 2
    out = options.out or measured_path(f"decode_{record.machine_name(str(source['gpu']))}")
    if reason := record.why_not_appended(out, record.DECODE):
        print(f"--out: {reason}", file=sys.stderr)
        return 2
    if options.workers > 0:
        print(f"compiling for {len(cells)} cells", file=sys.stderr, flush=True)
        compile_side_by_side(
            compile_cell, [(cell, options.peers) for cell in cells], options.workers
        )
    for cell in tqdm(cells, desc="shapes", file=sys.stderr):
        try:
            rows = measure_cell(cell, samples=options.samples, peers=options.peers)
            record.write_rows(out, [{**source, **row} for row in rows], record.DECODE)
        except (ValueError, NotImplementedError, OSError) as wrong:
            print(f"{cell.name}: {wrong}", file=sys.stderr)
            return 2
        except RuntimeError as wrong:
            print(f"{cell.name}: {wrong}", file=sys.stderr)
            return 1
        print(show(cell.name, rows), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
