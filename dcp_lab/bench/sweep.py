"""Sweep the launch configs of paged_decode: which tile, warps, slots and reduce shape win where.

    python -m dcp_lab.bench.sweep [--shape 16x2048x16x1x128] [--shape mla:16x8192]
                                  [--tile 64x4x3] [--slots 2] [--workers 8] [--samples 9]

The winners are written by hand into dcp_lab/ops/workspace.py, each with the number that justifies
it: the shipped choice depends on the shape alone, never on a timing of the machine it runs on.
Every config is checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from dcp_lab.bench import gqa, mla, timing
from dcp_lab.bench.gqa import DecodeShape
from dcp_lab.bench.mla import MlaShape
from dcp_lab.bench.protocol import Variant, check_variant, read_variant
from dcp_lab.bench.workers import compile_side_by_side
from dcp_lab.files import why_unwritable
from dcp_lab.kernels import INTERPRETED
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
    MlaShape(16, 8192),
    MlaShape(64, 1024),
    MlaShape(16, 8192, num_q_heads=128),
)
# Tokens, warps, stages of the software pipeline.
Tile = tuple[int, int, int]
Shape = DecodeShape | MlaShape


def tiles_of(shape: Shape) -> list[Tile]:
    """Return the tiles worth timing for a shape."""
    if isinstance(shape, MlaShape):
        return [(16, 4, 3), (16, 4, 4), (32, 4, 2), (32, 4, 3), (32, 8, 3), (64, 8, 2), (64, 8, 3)]
    if shape.head_dim == 64:
        return [(32, 1, 3), (64, 2, 3), (64, 4, 3), (128, 4, 3), (128, 8, 3)]
    return [(16, 1, 3), (32, 2, 3), (32, 2, 4), (64, 4, 2), (64, 4, 3), (64, 2, 3), (128, 8, 3)]


def configs(
    shape: Shape, tiles: Iterable[Tile] | None = None, slots: Iterable[int] = (1, 2, 3, 4)
) -> dict[str, DecodeConfig]:
    """Return the configs to time, by name.

    Args:
        shape: What to attend.
        tiles: Default: tiles_of(shape).
        slots: Work items aimed at per multiprocessor.
    """
    reduces = [(16, 64, 1)]
    if shape.requests <= 4:
        reduces = [(64, 32, 1), (128, 32, 4), (256, 32, 4)]
    found = {}
    for tile, per_sm, reduce, overlap in itertools.product(
        tiles or tiles_of(shape), slots, reduces, (False, True)
    ):
        block_n, warps, stages = tile
        splits, columns, reduce_warps = reduce
        name = f"{block_n}/{warps}/{stages} s{per_sm} r{splits}.{columns}.{reduce_warps}"
        found[name + " overlap" * overlap] = DecodeConfig(
            block_n=block_n,
            num_warps=warps,
            num_stages=stages,
            slots_per_sm=per_sm,
            min_split_tokens=64,
            reduce_splits=splits,
            reduce_columns=columns,
            reduce_warps=reduce_warps,
            overlap_entry=overlap,
        )
    return found


def make_inputs(shape: Shape, layers: int | None = None) -> gqa.Layers | mla.MlaLayers:
    """Return a shape's inputs."""
    make = mla.make_layers if isinstance(shape, MlaShape) else gqa.make_layers
    return make(shape, dtype=torch.bfloat16, layers=layers)


def variant_of(x: gqa.Layers | mla.MlaLayers, name: str, config: DecodeConfig | None) -> Variant:
    """Return the call with a config; None: the shipped one."""
    make = mla.paged_variant if isinstance(x, mla.MlaLayers) else gqa.paged_variant
    return make(x, name, config)


def sweep(
    shape: Shape, found: dict[str, DecodeConfig], *, samples: int
) -> list[dict[str, object]]:
    """Return one row a config: median us a layer in a graph, fastest first; 'shipped' is one."""
    # Here, for dcp_lab comes before triton wherever there is no GPU.
    from triton.runtime.errors import OutOfResources

    x = make_inputs(shape)
    graphs, rows = {}, {}
    floor = read_variant(x)
    floor.call(0)
    graphs["floor"] = timing.capture_layers(floor.call, x.layers)
    held = []
    for name, config in {"shipped": None, **found}.items():
        try:
            variant = variant_of(x, name, config)
            error = check_variant(x, variant).out_error
        except (RuntimeError, OutOfResources) as reason:
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


@functools.lru_cache(maxsize=1)
def _one_layer(shape: Shape) -> gqa.Layers | mla.MlaLayers:
    return make_inputs(shape, layers=1)


def compile_config(shape: Shape, config: DecodeConfig) -> None:
    """Leave a config's kernels in Triton's cache."""
    variant_of(_one_layer(shape), "compiled", config).call(0)


def parse_any(text: str) -> Shape:
    """Return the shape of '16x2048...' or 'mla:16x8192...'."""
    return mla.parse_mla(text[4:]) if text.startswith("mla:") else gqa.parse_shape(text)


def parse_tile(text: str) -> Tile:
    """Return the tile of '64x4x3'."""
    numbers = text.split("x")
    if len(numbers) != 3 or not all(n.isdecimal() and int(n) for n in numbers):
        raise ValueError(f"tile: expected TOKENSxWARPSxSTAGES, got {text!r}")
    tokens, warps, stages = map(int, numbers)
    if tokens < 16 or tokens & (tokens - 1) or warps & (warps - 1):
        raise ValueError(f"tile: expected powers of two, at least 16 tokens, got {text!r}")
    return tokens, warps, stages


def main(args: list[str] | None = None) -> None:
    """Parse the command line and sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape",
        action="append",
        help="as 16x2048, 16x2048x64x8x128, 16x3072:uneven, mla:16x8192",
    )
    parser.add_argument("--tile", action="append", help="TOKENSxWARPSxSTAGES; default: by shape")
    parser.add_argument("--slots", action="append", type=int, help="per SM; default: 1 to 4")
    parser.add_argument("--workers", type=int, default=0, help="compile in so many processes")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    options = parser.parse_args(args)
    try:
        shapes = tuple(map(parse_any, options.shape)) if options.shape else SHAPES
        tiles = tuple(map(parse_tile, options.tile)) if options.tile else None
    except ValueError as wrong:
        parser.error(str(wrong))
    numbers = [("workers", 0, options.workers), ("samples", 1, options.samples)]
    for name, least, value in [*numbers, *(("slots", 1, slots) for slots in options.slots or ())]:
        if value < least:
            parser.error(f"--{name}: expected at least {least}, got {value}")
    if options.out and (reason := why_unwritable(options.out)):
        parser.error(f"--out: expected a file that can be written, got {options.out} ({reason})")
    if INTERPRETED or not torch.cuda.is_available():
        parser.error("expected a GPU, found none")
    found = {shape: configs(shape, tiles, options.slots or (1, 2, 3, 4)) for shape in shapes}
    if options.workers:
        work = [(shape, config) for shape in shapes for config in found[shape].values()]
        compile_side_by_side(compile_config, work, options.workers)
    everything = []
    for shape in shapes:
        rows = sweep(shape, found[shape], samples=options.samples)
        everything += rows
        print(f"\n{shape.name}: floor {rows[0]['floor']:.2f} us")
        shipped = next((row for row in rows if row["config"] == "shipped"), None)
        for row in [*rows[:6], *([shipped] if shipped and shipped not in rows[:6] else [])]:
            print(f"  {row['us']:7.2f} us  {row['config']}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
