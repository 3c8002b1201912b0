"""Sweep the launch configs of paged_decode: which tile, warps, slots and reduce shape win where.

    python -m dcp_lab.bench.sweep [--shape 16x2048x16x1x128] [--samples 9]

The winners are written by hand into dcp_lab/ops/workspace.py, each with the number that justifies
it: the shipped choice depends on the shape alone, never on a timing of the machine it runs on.
Every config is checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
import triton

from dcp_lab.bench import timing
from dcp_lab.bench.gqa import DecodeShape, make_layers, paged_variant, parse_shape
from dcp_lab.bench.protocol import check_variant, read_variant
from dcp_lab.ops.workspace import DecodeConfig

SHAPES = (
    DecodeShape(1, 1024),
    DecodeShape(1, 8192),
    DecodeShape(1, 65536),
    DecodeShape(16, 1024),
    DecodeShape(16, 2048),
    DecodeShape(16, 3072, lengths="uneven"),
    DecodeShape(16, 8192),
    DecodeShape(64, 8192),
    DecodeShape(256, 1024),
    DecodeShape(16, 2048, num_q_heads=64, num_kv_heads=8),
    DecodeShape(16, 8192, num_q_heads=64, num_kv_heads=8),
    DecodeShape(16, 2048, num_q_heads=32, num_kv_heads=32),
    DecodeShape(16, 2048, num_q_heads=32, num_kv_heads=4, head_dim=64),
)


def configs(shape: DecodeShape) -> list[DecodeConfig]:
    """Return the configs worth timing for a shape."""
    tiles = [(16, 1, 3), (32, 2, 3), (32, 2, 4), (64, 4, 2), (64, 4, 3), (64, 2, 3), (128, 8, 3)]
    if shape.head_dim == 64:
        tiles = [(32, 1, 3), (64, 2, 3), (64, 4, 3), (128, 4, 3), (128, 8, 3)]
    reduces = [(16, 64, 1)]
    if shape.requests <= 4:
        reduces = [(64, 32, 1), (128, 32, 4), (256, 32, 4)]
    found = []
    for (block_n, warps, stages), slots, (
        splits,
        columns,
        reduce_warps,
    ), overlap in itertools.product(tiles, (1, 2, 3, 4), reduces, (False, True)):
        found.append(
            DecodeConfig(
                block_n=block_n,
                num_warps=warps,
                num_stages=stages,
                slots_per_sm=slots,
                min_split_tokens=64,
                reduce_splits=splits,
                reduce_columns=columns,
                reduce_warps=reduce_warps,
                overlap_entry=overlap,
            )
        )
    return found


def sweep(shape: DecodeShape, *, samples: int) -> list[dict[str, object]]:
    """Return one row a config: median us a layer in a graph, fastest first."""
    x = make_layers(shape, dtype=torch.bfloat16)
    graphs, rows = {}, {}
    floor = read_variant(x)
    floor.call(0)
    graphs["floor"] = timing.capture_layers(floor.call, x.layers)
    held = []
    for config in configs(shape):
        name = "/".join(str(v) for v in (config.block_n, config.num_warps, config.num_stages))
        name += f" s{config.slots_per_sm} r{config.reduce_splits}.{config.reduce_columns}."
        name += str(config.reduce_warps) + (" overlap" if config.overlap_entry else "")
        try:
            variant = paged_variant(x, name, config)
            error = check_variant(x, variant).out_error
        except (RuntimeError, triton.runtime.errors.OutOfResources) as reason:
            print(f"{shape.name} {name}: left out: {reason}", flush=True)
            continue
        graphs[name] = timing.capture_layers(variant.call, x.layers)
        held.append(variant)
        rows[name] = {"shape": shape.name, "config": name, "out_error": error}
    times = timing.graph_times(graphs, layers=x.layers, samples=samples)
    floor_us = timing.percentiles(times["floor"])[0]
    for name, row in rows.items():
        median, p10, p90 = timing.percentiles(times[name])
        row.update(us=round(median, 3), p10=round(p10, 3), p90=round(p90, 3), floor=floor_us)
    return sorted(rows.values(), key=lambda row: row["us"])


def main(args: list[str] | None = None) -> None:
    """Parse the command line and sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", action="append", help="as 16x2048, 16x2048x64x8x128, 16x3072:uneven"
    )
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    options = parser.parse_args(args)
    shapes = SHAPES
    if options.shape:
        try:
            shapes = tuple(parse_shape(text) for text in options.shape)
        except ValueError as wrong:
            parser.error(str(wrong))
    everything = []
    for shape in shapes:
        rows = sweep(shape, samples=options.samples)
        everything += rows
        print(f"\n{shape.name}: floor {rows[0]['floor']:.2f} us")
        for row in rows[:6]:
            print(f"  {row['us']:7.2f} us  {row['config']}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
