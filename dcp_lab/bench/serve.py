"""A vLLM engine a configuration on two GPUs: TPOT, TTFT and tokens, compared in one go.

    python -m dcp_lab.bench.serve --out serve.jsonl                       all rows, 94 layers
    python -m dcp_lab.bench.serve --out dev.jsonl --layers 8 --rows ours_direct_full,fa_a2a_full
    python -m dcp_lab.bench.serve --out same.jsonl --layers 8 --random-weights
    python -m dcp_lab.bench.serve --gate serve.jsonl                      the targets, recomputed
    python -m dcp_lab.bench.serve --compare same.jsonl                    tokens: DCP 2 with DCP 1

The model has study 1's attention per rank: 8 query heads on 1 KV head of 128, 16 requests. Each
engine is a process group of its own, bounded by --limit and gone afterwards; its log lies beside
--out. A row is one JSON line, written when its engine has ended well; data/README.md says what is
in it. Rows are held against each other only when their settings and their machine are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp_lab.bench import record
from dcp_lab.serving.clients import ClientError, run_client


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine's configuration.

    Attributes:
        dcp: Ranks that share a request's KV, 1 or 2.
        backend: vLLM's --attention-backend.
        mode: cudagraph_mode.
        comm: --dcp-comm-backend.
        options: The lab's own.
    """

    dcp: int
    backend: str
    mode: str
    comm: str = "a2a"
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


FULL, PIECEWISE = "FULL_AND_PIECEWISE", "PIECEWISE"
GATHER = {"attention_path": "gather", "gather": "published"}
ROWS = {
    "none_full": Row(1, "FLASH_ATTN", FULL),
    "none_piecewise": Row(1, "FLASH_ATTN", PIECEWISE),
    "none_ours_full": Row(1, "CUSTOM", FULL),
    "fa_a2a_full": Row(2, "FLASH_ATTN", FULL),
    "fa_a2a_piecewise": Row(2, "FLASH_ATTN", PIECEWISE),
    "ours_direct_full": Row(2, "CUSTOM", FULL, options={"reducer": "direct"}),
    "ours_a2a_full": Row(2, "CUSTOM", FULL),
    "ours_a2a_piecewise": Row(2, "CUSTOM", PIECEWISE),
    "gather_ag_rs_piecewise": Row(2, "CUSTOM", PIECEWISE, comm="ag_rs", options=GATHER),
}

# (row, row it is held against, metric, at most so many times as much, at which contexts).
TARGETS = (
    ("ours_direct_full", "fa_a2a_full", "tpot_median_ms", 0.65, None),
    ("ours_direct_full", "none_full", "tpot_median_ms", 1.08, (2000,)),
    ("ours_direct_full", "none_full", "tpot_median_ms", 1.0, "from 8000"),
    ("ours_a2a_full", "fa_a2a_full", "tpot_median_ms", 0.85, None),
    ("none_ours_full", "none_full", "tpot_median_ms", 1.0, None),
    ("ours_direct_full", "fa_a2a_full", "ttft_median_ms", 1.1, (2000,)),
)
# Each target has a context among these.
CONTEXTS = (1000, 2000, 3000, 5000, 8000)
# What two rows must have in common to be held against each other.
SETTINGS = ("layers", "requests", "repeats", "random_weights")
MACHINE = ("gpu", "gpu_count", "driver", "torch", "triton", "vllm")
# Of positions of which DCP 1 and DCP 2 must give the same token; the rest must be ties.
SAME_TOKENS = 0.99
TIE = 0.05


def run_row(name: str, wanted: dict[str, Any], log: Path, limit_s: float) -> dict[str, Any] | None:
    """Return what one engine measured, None when it failed; its log says why.

    Args:
        name: Of the row, for what is printed.
        wanted: What dcp_lab.vllm_plugin.engine takes.
        log: Where the engine's output goes.
        limit_s: How long it may take.
    """
    command = [sys.executable, "-m", "dcp_lab.vllm_plugin.engine", json.dumps(wanted)]
    environ = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The engine asks its workers with a function of its own, facts_of, which vLLM pickles only
        # when told so. Both ends are processes of this machine that this engine has started.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # FlashInfer's sampler would be compiled on the first use.
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
    }
    try:
        run_client(command, log=log, timeout_s=limit_s, environment=environ)
        why = f"it ended without a result; the end of {log.name}:"
    except ClientError as error:
        why = str(error).splitlines()[0]
    else:
        text = log.read_text(errors="replace")
        if "\nRESULT\n" in text:
            return json.loads(text.split("\nRESULT\n", 1)[1].splitlines()[0])
    # A worker's error stands far above the end, where every process says that it stops.
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if "Error" in line] or text.splitlines()
    print(f"{name}: FAILED: {why}\n" + "\n".join(lines[-6:]), flush=True)
    return None


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Return row name -> the last result of that name in a file of results."""
    rows = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows[row["row"]] = row
    return rows


def by_context(row: Mapping[str, Any], metric: str) -> dict[int, float]:
    """Return context -> value of one metric of a row."""
    return {entry["context"]: entry[metric] for entry in row["times"]}


def differences(row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return why two rows cannot be held against each other, empty when they can."""
    if missing := [name for name in MACHINE if not (name in row and name in other)]:
        return f"a row without its {', '.join(missing)}"
    pairs = [(name, row["wanted"][name], other["wanted"][name]) for name in SETTINGS]
    pairs += [(name, row[name], other[name]) for name in MACHINE]
    return ", ".join(f"{name} {a} against {b}" for name, a, b in pairs if a != b)


def gate(path: Path) -> int:
    """Print each target beside what was measured; return how many were missed or not measured.

    A target whose two rows differ in their settings or their machine is not measured.
    """
    rows, missed = read_rows(path), 0
    for name, other, metric, most, where in TARGETS:
        label = f"{name} {metric.split('_')[0].upper()} <= {most:g} x {other}"
        if not {name, other} <= rows.keys():
            print(f"not measured   {label}")
            missed += 1
            continue
        if different := differences(rows[name], rows[other]):
            print(f"not measured   {label}: {different}")
            missed += 1
            continue
        label += f" ({rows[name]['wanted']['layers']} layers)"
        ours, theirs = by_context(rows[name], metric), by_context(rows[other], metric)
        contexts = sorted(set(ours) & set(theirs))
        if where == "from 8000":
            contexts = [context for context in contexts if context >= 8000]
        elif where is not None:
            contexts = [context for context in contexts if context in where]
        if not contexts:
            print(f"not measured   {label}: no such context")
            missed += 1
        for context in contexts:
            ratio = ours[context] / theirs[context]
            verdict = "met   " if ratio <= most else "MISSED"
            missed += ratio > most
            print(
                f"{verdict} {ratio:5.2f}   {label} at {context}: "
                f"{ours[context]:.2f} against {theirs[context]:.2f} ms"
            )
    return missed


def compare(path: Path) -> int:
    """Hold every row's greedy tokens against DCP 1's; return how many rows differ.

    Without a DCP 1 row and a DCP 2 row that have tokens, nothing was shown: that counts as one. So
    does a row whose settings, machine or contexts are not the reference's.

    A position counts until the first one that differs, of which the two likeliest tokens of DCP 1
    must lie within TIE of each other; after that the texts are two.
    """
    rows, wrong = read_rows(path), 0
    reference = next((row for row in rows.values() if row["dcp"] == 1 and "greedy" in row), None)
    if reference is None:
        print("no DCP 1 row with tokens: run with --random-weights")
        return 1
    held = 0
    for name, row in rows.items():
        if "greedy" not in row or row is reference:
            continue
        held += row["dcp"] == 2
        different = differences(row, reference)
        if row["greedy"].keys() != reference["greedy"].keys():
            different = different or "its contexts are others"
        if different:
            print(f"not compared {name}: {different}")
            wrong += 1
            continue
        same = compared = ties = 0
        for context, requests in reference["greedy"].items():
            for want, got in zip(requests, row["greedy"][context], strict=True):
                pairs = zip(want["tokens"], got["tokens"], want["logprobs"], strict=True)
                for expected, token, (first, second) in pairs:
                    compared += 1
                    if expected != token:
                        ties += first - second < TIE
                        break
                    same += 1
        good = same > SAME_TOKENS * compared and ties == compared - same
        wrong += not good
        print(
            f"{'same  ' if good else 'DIFFER'} {name}: {same} of {compared} positions, "
            f"{ties} of the rest are ties"
        )
    if not held:
        print("no DCP 2 row with tokens: run with --random-weights")
        wrong += 1
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Run the rows asked for, or judge a file of them."""
    parser = argparse.ArgumentParser(
        prog="dcp-lab bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    parser.add_argument("--gate", type=Path, help="judge this file and run nothing")
    parser.add_argument("--compare", type=Path, help="compare this file's tokens, run nothing")
    parser.add_argument("--rows", default=",".join(ROWS), help="default: all")
    parser.add_argument(
        "--contexts", default=",".join(map(str, CONTEXTS)), help="tokens of each prompt"
    )
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.4, help="gpu_memory_utilization")
    parser.add_argument("--limit", type=float, default=500, help="seconds an engine may take")
    parser.add_argument("--random-weights", action="store_true", help="and their greedy tokens")
    given = parser.parse_args(arguments)
    if given.gate:
        return int(gate(given.gate) > 0)
    if given.compare:
        return int(compare(given.compare) > 0)
    if given.out is None:
        parser.error("--out: expected where the rows go")
    names = given.rows.split(",")
    unknown = sorted(set(names) - set(ROWS))
    if unknown:
        parser.error(f"--rows: expected some of {', '.join(ROWS)}; got {unknown[0]}")
    if reason := record.why_not_kept(record.provenance()):
        parser.error(reason)
    given.out.parent.mkdir(parents=True, exist_ok=True)

    from dcp_lab.serving.model_folder import STUDY1_TWO_GPUS, write_model_folder

    shape = dataclasses.replace(STUDY1_TWO_GPUS, num_layers=given.layers)
    failed = 0
    with tempfile.TemporaryDirectory() as model:
        write_model_folder(model, shape, random_weights=given.random_weights)
        for name in names:
            row = ROWS[name]
            wanted = {
                "model": model,
                "tp": 2,
                "vocabulary": shape.vocab_size,
                "layers": given.layers,
                "requests": given.requests,
                "repeats": given.repeats,
                "memory": given.memory,
                "contexts": [int(context) for context in given.contexts.split(",")],
                "random_weights": given.random_weights,
                **dataclasses.asdict(row),
            }
            log = given.out.with_name(f"{given.out.stem}.{name}.log")
            print(f"{name}: {row}", flush=True)
            result = run_row(name, wanted, log, given.limit)
            if result is None:
                failed += 1
                continue
            line = {"row": name, "dcp": row.dcp, **record.provenance(), **result}
            with given.out.open("a") as out:
                out.write(json.dumps(line) + "\n")
            times = by_context(result, "tpot_median_ms")
            print(
                f"{name}: {result['workers'][0]['cudagraph_mode']}, started in "
                f"{result['start_s']:.0f} s, TPOT "
                + ", ".join(f"{value:.2f} ms at {context}" for context, value in times.items()),
                flush=True,
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
