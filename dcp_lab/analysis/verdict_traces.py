"""A few layers of each step as the profiler saw them: read, and cut to one layer.

`dcp-lab bench stack --traces FILE` keeps them, of TRACED_LAYERS layers, for ui.perfetto.dev. Those
under data/measured with a name of FILES are shown; without one the notebooks say that none is.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcp_lab.analysis import tables
from dcp_lab.bench.stack import DEVICE, TRACED_LAYERS

# The first that is there is shown. On one GPU the exchanges have no peer.
FILES = ("traces_h200x2.json.gz", "traces_h200.json.gz")
SHAPE = "qwen3_235b_tp8, light, 16 x 2500: "
# What the account is about; a corner's name as dcp_lab.stack.Corner says it.
SHOWN = (
    "no DCP, full",
    "no DCP, piecewise",
    "published + ag_rs, piecewise",
    "paged + ag_rs, eager",
    "paged + ag_rs, piecewise",
    "paged + ag_rs, full",
)
_EXCHANGE = ("nccl", "_direct_")


def path(folder: Path | None = None) -> Path | None:
    """Return where the traces lie, None where there are none.

    Args:
        folder: Default: data/measured.
    """
    folder = tables.data_dir() / "measured" if folder is None else folder
    return next((folder / name for name in FILES if (folder / name).exists()), None)


def source(file: Path) -> str:
    """Return what a figure says of where its traces come from."""
    if "x2" in file.name:
        return f"data/measured/{file.name}, two H200s"
    return f"data/measured/{file.name}, one H200: an exchange's calls are made, to no peer"


def read(file: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Return corner -> events, of the shape that the notebook shows; empty without a file.

    Args:
        file: path().

    Raises:
        ValueError: The file is there and holds something else.
    """
    if file is None:
        return {}
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        trace = json.load(opened)
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError(
            "file: expected what bench stack --traces writes, a trace for Perfetto, got "
            f"{file.name}"
        )
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return {
        name.removeprefix(SHAPE): [e for e in events if e["pid"] == pid and e["ph"] == "X"]
        for pid, name in names.items()
        if name.startswith(SHAPE)
    }


def one_layer(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the middle layer: what the GPU ran, and what the host launched meanwhile.

    A layer is as many kernels as the trace holds over TRACED_LAYERS.

    Returns:
        Events with row ("host", "GPU", or "exchange" on the GPU), name, begin, end: us from the
        layer's first kernel, cut at its ends.

    Raises:
        ValueError: There is no kernel.
    """
    kernels = sorted((e for e in events if e["cat"] in DEVICE), key=lambda e: e["ts"])
    if len(kernels) < TRACED_LAYERS:
        raise ValueError(f"events: expected kernels of {TRACED_LAYERS} layers, got {len(kernels)}")
    count = len(kernels) // TRACED_LAYERS
    first = (len(kernels) - count) // 2
    begin = float(kernels[first]["ts"])
    after = kernels[first + count : first + count + 1]
    last = kernels[first + count - 1]
    end = float(after[0]["ts"]) if after else float(last["ts"]) + float(last["dur"])
    found = []
    for event in events:
        start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if stop <= begin or start >= end:
            continue
        if event["cat"] not in DEVICE:
            row = "host"
        else:
            row = "exchange" if any(w in event["name"].lower() for w in _EXCHANGE) else "GPU"
        found.append(
            {
                "row": row,
                "name": event["name"],
                "begin": max(start, begin) - begin,
                "end": min(stop, end) - begin,
            }
        )
    return found


def shown(traces: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return one layer of each corner of SHOWN that was traced."""
    return {name: one_layer(traces[name]) for name in SHOWN if name in traces}
