"""A vLLM engine a configuration on two GPUs: TPOT, TTFT and tokens, compared in one go.

    dcp-lab bench serve                           all rows, 94 layers, into data/measured
    dcp-lab bench serve --seconds 540             as many as fit, the judged ones first
    dcp-lab bench serve --layers 8 --rows ours_direct_full,fa_a2a_full --csv dev.csv
    dcp-lab bench serve --tokens                  tokens instead of times, in float16
    dcp-lab bench serve --gate [CSV]              the targets, recomputed

The model has study 1's attention per rank: 8 query heads on 1 KV head of 128, 16 requests; its
weights are random and spread, the same in every engine, so that wrong attention shows in the
tokens. The last two rows are study 2's question, an MLA model with vLLM's own layers and dummy
weights. Each engine is a process group of its own, bounded by --limit and gone afterwards. What it
had measured is written when it ends, however it ends: a row a sample, schema dcp_lab.bench.record
ENGINE, and its tokens as JSON lines beside that. Rows are held against each other only within one
run, and only when their settings and their machine are the same.

Tokens are compared in float16, by engines of their own: in bfloat16 the logits of 94 random layers
are rounded to steps of 0.06 to 0.12, more than a tie may be, and vLLM's own FLASH_ATTN under DCP 2
then gives other tokens than without (two H200s: 96.5 % of positions the same).

A start is cut to what every row shares: one folder of compiled code for all engines of the machine
(torch.compile sees no attention, DCP or graph mode; --own-code switches that off), no FlashInfer
autotuning, few graph sizes, no longer requests than the contexts need. The rows say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dcp_lab.bench import record
from dcp_lab.bench.verdicts import Verdict, judge
from dcp_lab.serving.clients import ClientError, run_client
from dcp_lab.vllm_plugin.engine import COMPARED_CONTEXT, SKIP, WINDOW, token_capacity


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine's configuration.

    Attributes:
        dcp: Ranks that share a request's KV, 1 or 2.
        backend: vLLM's --attention-backend.
        mode: cudagraph_mode.
        comm: --dcp-comm-backend.
        options: The lab's own.
        latent: Whether the model is the one with latent attention.
    """

    dcp: int
    backend: str
    mode: str
    comm: str = "a2a"
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    latent: bool = False


FULL, PIECEWISE = "FULL_AND_PIECEWISE", "PIECEWISE"
GATHER = {"attention_path": "gather", "gather": "published"}
# In the order in which they run: what is judged comes first.
ROWS = {
    "ours_direct_full": Row(2, "CUSTOM", FULL, options={"reducer": "direct"}),
    "fa_a2a_full": Row(2, "FLASH_ATTN", FULL),
    "none_full": Row(1, "FLASH_ATTN", FULL),
    "ours_a2a_full": Row(2, "CUSTOM", FULL),
    "none_ours_full": Row(1, "CUSTOM", FULL),
    "gather_ag_rs_piecewise": Row(2, "CUSTOM", PIECEWISE, comm="ag_rs", options=GATHER),
    "none_piecewise": Row(1, "FLASH_ATTN", PIECEWISE),
    "fa_a2a_piecewise": Row(2, "FLASH_ATTN", PIECEWISE),
    "ours_a2a_piecewise": Row(2, "CUSTOM", PIECEWISE),
    "mla_a2a_full": Row(2, "TRITON_MLA", FULL, latent=True),
    "mla_a2a_piecewise": Row(2, "TRITON_MLA", PIECEWISE, latent=True),
}

# (row, row it is held against, metric, at most so many times as much, at which contexts).
TARGETS = (
    ("ours_direct_full", "fa_a2a_full", "tpot", 0.65, None),
    ("ours_direct_full", "none_full", "tpot", 1.08, (2000,)),
    ("ours_direct_full", "none_full", "tpot", 1.0, "from 8000"),
    ("ours_a2a_full", "fa_a2a_full", "tpot", 0.85, None),
    ("none_ours_full", "none_full", "tpot", 1.0, None),
    ("ours_direct_full", "fa_a2a_full", "ttft", 1.1, (2000,)),
)
# The row whose tokens the others' must be, and those for which that is a target.
REFERENCE = "none_full"
TOKENS_OF = ("ours_direct_full", "ours_a2a_full")
# Compared when tokens are; fa_a2a_full says how well vLLM's own does.
TOKEN_ROWS = (REFERENCE, *TOKENS_OF, "fa_a2a_full")
# Of positions of which DCP 1 and DCP 2 must give the same token; the rest must be ties.
SAME_TOKENS = 0.99
TIE = 0.05

# Each target has a context among these. In the order in which they are measured: an engine that is
# ended early has the judged ones.
CONTEXTS = (2000, 8000, 32000, 1000, 5000, 3000)
# TTFT is judged at the targets' contexts, and has more samples there.
TTFT_CONTEXTS = (2000,)
LAYERS = 94
CAPTURE_SIZES = (1, 2, 4, 8, 16)
BATCHED_TOKENS = 8192
# No further window of a context begins when its decode has taken this long.
WINDOW_S = 4.0
# What is left of --seconds when the last engine is ended: time to write its rows.
RESERVE_S = 15.0

# What two rows must have in common to be held against each other.
SETTINGS = (
    "run",
    "num_layers",
    "requests",
    "weights",
    "dtype",
    "batched_tokens",
    "max_model_len",
    "capture_sizes",
    *("gpu", "gpu_count", "driver", "torch", "triton", "vllm", "git_commit"),
)
METHOD = (
    f"dcp_lab.vllm_plugin.engine: TPOT {WINDOW} steps over their number, from {SKIP} tokens after "
    "the context; TTFT until all requests, given at once, have a token, the first decoding "
    "meanwhile; compiled code "
)


def run_row(
    name: str, wanted: dict[str, Any], log: Path, limit_s: float, cache: Path
) -> list[dict[str, Any]]:
    """Return what one engine measured before it ended; why it failed is printed.

    Args:
        name: Of the row, for what is printed.
        wanted: What dcp_lab.vllm_plugin.engine takes, but for `results`.
        log: Where the engine's output goes.
        limit_s: How long it may take.
        cache: Folder for vLLM's compiled code.
    """
    results = log.with_suffix(".jsonl")
    results.unlink(missing_ok=True)
    given = json.dumps({**wanted, "results": str(results)})
    command = [sys.executable, "-m", "dcp_lab.vllm_plugin.engine", given]
    environ = {
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The engine asks its workers with functions of its own, which vLLM pickles only when told
        # so. Both ends are processes of this machine that this engine has started.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # FlashInfer's sampler would be compiled on the first use.
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
    }
    why = ""
    try:
        run_client(command, log=log, timeout_s=limit_s, environment=environ)
    except ClientError as error:
        why = str(error).splitlines()[0]
    found = []
    if results.exists():
        found = [json.loads(line) for line in results.read_text().splitlines()]
        results.unlink()
    if why or not any("context" in entry or "greedy" in entry for entry in found):
        text = log.read_text(errors="replace")
        # A worker's error stands far above the end, where every process says that it stops.
        lines = [line for line in text.splitlines() if "Error" in line] or text.splitlines()
        why = why or f"it ended without a result; the end of {log.name}:"
        print(f"{name}: FAILED: {why}\n" + "\n".join(lines[-6:]), flush=True)
    return found


def graphs_of(log: str) -> dict[str, float]:
    """Return what vLLM's log says of graph capture: seconds and GiB; {} where it says nothing."""
    found = re.search(r"Graph capturing finished in (\d+) secs, took (-?[\d.]+) GiB", log)
    return {"capture": float(found[1]), "graph_memory": float(found[2])} if found else {}


def table_rows(
    name: str,
    wanted: Mapping[str, Any],
    found: Sequence[Mapping[str, Any]],
    source: Mapping[str, Any],
    run: str,
    log: str = "",
) -> list[dict[str, Any]]:
    """Return the rows of record.ENGINE of one engine, none where it did not start.

    Args:
        name: Of the row.
        wanted: What the engine was asked for.
        found: What it wrote.
        source: record.provenance().
        run: When the run that the engine is part of began.
        log: What it and vLLM said.
    """
    facts = next((entry for entry in found if "workers" in entry), None)
    if facts is None:
        return []
    workers = facts["workers"]
    worker = workers[0]
    shared = {
        **source,
        "run": run,
        "row": name,
        **{key: wanted[key] for key in ("model_name", *SHAPE, "requests", "weights", "dtype")},
        "tensor_parallel": wanted["tp"],
        "dcp_size": wanted["dcp"],
        "dcp_comm_backend": wanted["comm"] if wanted["dcp"] > 1 else None,
        "attention_backend": wanted["backend"],
        "options": ", ".join(f"{key}={value}" for key, value in wanted["options"].items()) or None,
        "attention": worker["attention"],
        "reducer": worker["reducer"],
        "runner": worker["runner"],
        "cudagraph_mode": worker["cudagraph_mode"],
        "capture_sizes": " ".join(map(str, worker["capture_sizes"])),
        "block_size": worker["block_size"],
        "batched_tokens": worker["batched_tokens"],
        "max_model_len": wanted["max_model_len"],
        "memory_share": wanted["memory"],
        "method": METHOD + ("shared by all rows" if wanted["share_compiled"] else "of its own"),
    }
    capacity = min(entry["kv_blocks"] for entry in workers) * worker["block_size"] * wanted["dcp"]
    # (metric, unit, context, samples)
    values: list[tuple[str, str, int | None, list[float]]] = [
        ("start", "s", None, [facts["start_s"]]),
        ("compile", "s", None, [max(entry["compile_s"] for entry in workers)]),
        ("kv_cache_capacity", "tokens", None, [capacity]),
        ("exchange", "bytes", None, [max(entry["exchange_bytes"] for entry in workers)]),
        ("reserved", "bytes", None, [max(entry["reserved_bytes"] for entry in workers)]),
    ]
    units = {"capture": "s", "graph_memory": "GiB"}
    values += [(key, units[key], None, [value]) for key, value in graphs_of(log).items()]
    for entry in found:
        if "context" in entry:
            values += [
                (metric, "ms", entry["context"], entry[f"{metric}_ms"])
                for metric in ("tpot", "ttft")
            ]
    return [
        {
            **shared,
            "context_tokens": context,
            "metric": metric,
            "sample": sample,
            "value": float(value),
            "unit": unit,
        }
        for metric, unit, context, samples in values
        for sample, value in enumerate(samples)
    ]


# Columns of the table that are the model's.
SHAPE = ("num_layers", "num_q_heads", "num_kv_heads", "head_dim")


def compare_tokens(
    reference: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """Return how many positions are the same, ties, and neither.

    A position counts until the first one of a request that differs, which is a tie when the two
    likeliest tokens of the reference lie within TIE of each other; after that the texts are two.
    """
    counts = {"tokens_same": 0, "tokens_tied": 0, "tokens_other": 0}
    for want, got in zip(reference, other, strict=True):
        pairs = zip(want["tokens"], got["tokens"], want["logprobs"], strict=True)
        for expected, token, (first, second) in pairs:
            if expected != token:
                counts["tokens_tied" if first - second < TIE else "tokens_other"] += 1
                break
            counts["tokens_same"] += 1
    return counts


def token_rows(
    rows: Sequence[Mapping[str, Any]], counts: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the rows of one engine's comparison, of the same columns as its other rows."""
    return [
        {
            **rows[0],
            "context_tokens": COMPARED_CONTEXT,
            "metric": metric,
            "sample": 0,
            "value": float(count),
            "unit": "tokens",
        }
        for metric, count in counts.items()
    ]


def medians(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row a run, row, metric and context: its settings, the samples' median `value`."""
    keys = [*SETTINGS, "row", "metric", "context_tokens"]
    timed = table[table.context_tokens.notna()]
    return timed.groupby(keys, dropna=False, as_index=False).value.median()


def pairs_of(table: pd.DataFrame, name: str, other: str, metric: str) -> pd.DataFrame:
    """Return the contexts that both rows have, of the last run that has both at that context.

    Returns:
        Columns context, value, other_value.
    """
    found = medians(table[(table.num_layers == LAYERS) & (table.metric == metric)])
    ours, theirs = (found[found.row == row] for row in (name, other))
    same = [*SETTINGS, "context_tokens"]
    # A missing driver or version equals another missing one here.
    both = ours.merge(theirs, on=same, suffixes=("", "_other"))
    both = both.sort_values("run").drop_duplicates("context_tokens", keep="last")
    return pd.DataFrame(
        {
            "context": both.context_tokens.astype(int),
            "value": both.value,
            "other_value": both.value_other,
        }
    ).sort_values("context")


def verdicts(table: pd.DataFrame) -> list[Verdict]:
    """Return a verdict a target, on a table of record.ENGINE."""
    found = []
    for name, other, metric, most, where in TARGETS:
        due = [
            context
            for context in sorted(CONTEXTS)
            if where is None
            or (where == "from 8000" and context >= 8000)
            or (isinstance(where, tuple) and context in where)
        ]
        pairs = pairs_of(table, name, other, metric)
        if where == "from 8000":
            pairs = pairs[pairs.context >= 8000]
        elif where is not None:
            pairs = pairs[pairs.context.isin(where)]
        at = f" at {where[0]}" if isinstance(where, tuple) else f" {where}" if where else ""
        target = f"{metric.upper()} of {name} over {other}'s{at}"
        missing = len(set(due) - set(pairs.context))
        if pairs.empty:
            found.append(Verdict(target, None, most, unit="x", missing=missing))
            continue
        ratio = pairs.value / pairs.other_value
        worst = pairs.loc[ratio.idxmax()]
        where_worst = (
            f"{int(worst.context)} tokens: {worst.value:.2f} beside {worst.other_value:.2f} ms"
        )
        found.append(
            Verdict(target, ratio.max(), most, unit="x", missing=missing, where=where_worst)
        )
    return [*found, *(verdict for name in TOKENS_OF for verdict in _tokens(table, name))]


def _tokens(table: pd.DataFrame, name: str) -> list[Verdict]:
    """Return the verdicts on one row's greedy tokens."""
    rows = table[(table.row == name) & (table.num_layers == LAYERS) & (table.dtype == "float16")]
    rows = rows[rows.metric.isin(("tokens_same", "tokens_tied", "tokens_other"))]
    same_target = f"positions of {name} with {REFERENCE}'s token"
    other_target = f"other positions of {name} that are no ties"
    if rows.empty:
        return [
            Verdict(same_target, None, 100 * SAME_TOKENS, better="high", unit="%"),
            Verdict(other_target, None, 0, unit="tokens"),
        ]
    count = rows[rows.run == rows.run.max()].groupby("metric").value.last()
    share = 100 * count.tokens_same / count.sum()
    return [
        Verdict(same_target, share, 100 * SAME_TOKENS, better="high", unit="%"),
        Verdict(other_target, count.tokens_other, 0, unit="tokens"),
    ]


def gate(path: Path) -> int:
    """Print each target beside what was measured; see verdicts.judge."""
    return judge(path, record.ENGINE, verdicts, command="dcp-lab bench serve")


def default_csv() -> Path:
    """Return where the rows of two H200s go."""
    return Path(__file__).resolve().parents[2] / "data" / "measured" / "engine_h200x2.csv"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp-lab bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--csv", type=Path, help="where the rows go; default: data/measured/engine_MACHINE.csv"
    )
    parser.add_argument(
        "--logs", type=Path, help="folder of logs and tokens; default: that of --cache"
    )
    parser.add_argument(
        "--gate",
        type=Path,
        nargs="?",
        const=default_csv(),
        help="judge this table and run nothing; default: two H200s'",
    )
    parser.add_argument("--rows", help="default: all, in this order")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="compare tokens, in float16, and time nothing; default rows: " + ",".join(TOKEN_ROWS),
    )
    parser.add_argument(
        "--contexts", type=_numbers, default=list(CONTEXTS), help="tokens of each prompt"
    )
    parser.add_argument(
        "--seconds", type=float, default=None, help="for the whole run; default: no bound"
    )
    parser.add_argument(
        "--run",
        help="go on with this run of the table, on the same machine and commit, where a command "
        "may not take as long as all rows do; default: a new one, named by its time",
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="most, of each model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="windows a context")
    parser.add_argument("--memory", type=float, default=0.4, help="gpu_memory_utilization")
    parser.add_argument("--limit", type=float, default=500, help="seconds an engine may take")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "dcp-lab-serve",
        help="folder of the model and of compiled code, kept; default: %(default)s",
    )
    parser.add_argument(
        "--own-code", action="store_true", help="each configuration compiles its own code"
    )
    return parser


def _numbers(text: str) -> list[int]:
    """Return the numbers of '2000,8000'."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers >= 1 as 2000,8000, got {text!r}")
    return [int(part) for part in parts]


def _check_numbers(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the command where a number is none that an engine could be started with."""
    for name in ("layers", "requests", "repeats"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(given, name)}")
    for name in ("seconds", "limit"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name}: expected finite seconds above 0, got {value:g}")
    if not 0 < given.memory <= 1:
        parser.error(f"--memory: expected a share above 0 and up to 1, got {given.memory:g}")


def model_of(row: Row, layers: int, cache: Path) -> dict[str, Any]:
    """Return what an engine is told of its model, whose folder is written.

    Args:
        row: The configuration.
        layers: Of the model; one with latent attention has no more than its own.
        cache: Where the folder lies: the same path in every run, which the compiled code goes by.
    """
    from dcp_lab.serving.model_folder import (
        LATENT_TWO_GPUS,
        STUDY1_TWO_GPUS,
        write_latent_folder,
        write_model_folder,
    )

    if row.latent:
        layers = min(layers, LATENT_TWO_GPUS.num_layers)
        shape = dataclasses.replace(LATENT_TWO_GPUS, num_layers=layers)
        folder = write_latent_folder(cache / f"latent_{layers}", shape)
    else:
        shape = dataclasses.replace(STUDY1_TWO_GPUS, num_layers=layers)
        folder = write_model_folder(cache / f"model_{layers}", shape, random_weights=False)
    kind = "DeepSeek-V2" if row.latent else "Qwen3"
    return {
        "model": str(folder),
        "model_name": f"dummy {kind} dense MLP hidden {shape.hidden_size} "
        f"intermediate {shape.intermediate_size}",
        **{key: getattr(shape, key) for key in SHAPE},
        "vocabulary": shape.vocab_size,
        # Those of latent attention are folded into others while they are loaded.
        "weights": "dummy" if row.latent else "spread",
    }


def fits(left_s: float, taken: Sequence[float]) -> bool:
    """Return whether an engine can end in the time left: one as fast as the fastest so far."""
    return left_s > RESERVE_S + (1.1 * min(taken) if taken else 0.0)


def main(arguments: list[str] | None = None) -> int:
    """Run the rows asked for, or judge a table of them."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.gate:
        return gate(given.gate)
    every = TOKEN_ROWS if given.tokens else ROWS
    names = given.rows.split(",") if given.rows else list(every)
    unknown = sorted(set(names) - set(ROWS))
    if unknown:
        parser.error(f"--rows: expected some of {', '.join(ROWS)}; got {unknown[0]}")
    _check_numbers(parser, given)
    source = record.provenance()
    if reason := record.why_not_kept(source):
        parser.error(reason)
    machine = record.machine_name(str(source["gpu"]), int(source["gpu_count"]))
    csv = given.csv or default_csv().with_name(f"engine_{machine}.csv")
    logs = given.logs or given.cache / "logs"
    if reason := record.why_not_appended(csv, record.ENGINE):
        parser.error(f"--csv: {reason}")
    for name, folder in (("logs", logs), ("cache", given.cache)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as wrong:
            parser.error(
                f"--{name}: expected a folder that can be written, got {folder} ({wrong.strerror})"
            )

    contexts = [] if given.tokens else given.contexts
    longest = max([*contexts, COMPARED_CONTEXT])
    room = token_capacity(given.requests, longest, given.repeats, BATCHED_TOKENS)
    shared = {
        "tp": 2,
        "requests": given.requests,
        "repeats": given.repeats,
        "memory": given.memory,
        "contexts": contexts,
        "ttft_contexts": list(TTFT_CONTEXTS),
        "window_s": WINDOW_S,
        "batched_tokens": BATCHED_TOKENS,
        "max_model_len": longest + room,
        "capture_sizes": [size for size in CAPTURE_SIZES if size <= given.requests],
        "share_compiled": not given.own_code,
        "dtype": "float16" if given.tokens else "bfloat16",
        "compare_tokens": given.tokens,
    }
    run, begun = given.run or str(source["date_utc"]), time.monotonic()
    print(f"run {run}", flush=True)
    taken: list[float] = []
    tokens: dict[str, Any] = {}
    first_rows: dict[str, list[dict[str, Any]]] = {}
    failed = 0
    for name in names:
        left = given.limit
        if given.seconds is not None:
            left = given.seconds - (time.monotonic() - begun)
            if not fits(left, taken):
                print(f"{name}: not started, {left:.0f} s are left", flush=True)
                failed += 1
                continue
        model = model_of(ROWS[name], given.layers, given.cache)
        wanted = {**shared, **model, **dataclasses.asdict(ROWS[name])}
        log = logs / f"{csv.stem}.{name}.log"
        print(f"{name}: {ROWS[name]}", flush=True)
        started = time.monotonic()
        limit = min(given.limit, left - RESERVE_S if given.seconds is not None else left)
        found = run_row(name, wanted, log, limit, given.cache / "vllm")
        taken.append(time.monotonic() - started)
        engine = {**source, **{"date_utc": record.provenance()["date_utc"]}}
        text = log.read_text(errors="replace") if log.exists() else ""
        rows = table_rows(name, wanted, found, engine, run, text)
        measured = {entry["context"] for entry in found if "context" in entry}
        failed += measured != set(contexts)
        if not rows:
            continue
        record.write_rows(csv, rows, record.ENGINE)
        first_rows[name] = rows
        if greedy := [entry["greedy"] for entry in found if "greedy" in entry]:
            tokens[name] = greedy[0]
        _write_tokens(csv, logs, run, name, tokens, first_rows)
        _show(name, rows, taken[-1])
    return int(failed > 0)


def _write_tokens(
    csv: Path,
    logs: Path,
    run: str,
    name: str,
    tokens: Mapping[str, Any],
    first_rows: Mapping[str, list[dict[str, Any]]],
) -> None:
    """Write the last engine's tokens, and the comparisons that can be made since it ended."""
    if name not in tokens:
        return
    with (logs / f"{csv.stem}.tokens.jsonl").open("a") as file:
        file.write(json.dumps({"run": run, "row": name, "greedy": tokens[name]}) + "\n")
    if REFERENCE not in tokens:
        return
    others = [other for other in tokens if other != REFERENCE] if name == REFERENCE else [name]
    rows = [
        row
        for other in others
        for row in token_rows(first_rows[other], compare_tokens(tokens[REFERENCE], tokens[other]))
    ]
    if rows:
        record.write_rows(csv, rows, record.ENGINE)


def _show(name: str, rows: Sequence[Mapping[str, Any]], wall_s: float) -> None:
    """Print one engine's medians."""
    table = pd.DataFrame(rows)
    tpot = table[table.metric == "tpot"].groupby("context_tokens").value.median()
    start, compiled = (table[table.metric == m].value.iloc[0] for m in ("start", "compile"))
    print(
        f"{name}: {rows[0]['cudagraph_mode']}, started in {start:.0f} s ({compiled:.0f} s of it "
        f"compiling), {wall_s:.0f} s in all; TPOT "
        + ", ".join(f"{value:.2f} ms at {context:.0f}" for context, value in tpot.items()),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
