"""The rows that measurements leave in data/measured: where they came from, what they must hold.

A row is written only when it is complete, traceable to a commit and a machine, and correct: a time
whose result was wrong, or was not checked, is refused. The same schema is checked on reading, so
that a table that was edited into nonsense is noticed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import pandas as pd
import pandera.pandas as pa
import torch
from pandera.errors import SchemaErrors

from dcp_lab.files import why_unwritable

COMMAND_SECONDS = 20
SHOWN_FAILURES = 5
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz")

# Rows that need no correctness columns: ops that compute nothing whose value could be wrong.
UNCHECKED_OPS = ("read_pages", "plan", "copy")
# Ops that copy and have to be exact: their budget is 0.
EXACT_OPS = ("write_kv", "gather_kv")

# Words of a GPU's name that no file name needs.
_VENDORS = ("nvidia", "amd", "instinct", "radeon", "geforce")

COMMIT = re.compile(r"[0-9a-f]{7,40}")


def provenance(command: str | None = None) -> dict[str, object]:
    """Return who measured, where and with what: the provenance columns of every measured table.

    Args:
        command: What was run. Default: this process's command line, without machine paths.

    Returns:
        date_utc (ISO 8601), git_commit, git_dirty, gpu, gpu_count, driver, torch, triton, vllm,
        python, command. gpu is "none" and gpu_count 0 without a GPU; a package that is not
        installed is None; git_commit is "unknown" outside a checkout.

    Notes:
        On a machine that has the files but no .git, set DCP_LAB_GIT_COMMIT to the output of
        `git describe --always --dirty --abbrev=40 --exclude '*'`.
    """
    commit, dirty = _git()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date_utc": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "git_commit": commit,
        "git_dirty": dirty,
        "gpu": torch.cuda.get_device_name(0) if count else "none",
        "gpu_count": count,
        "driver": _driver() if count else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "vllm": _version("vllm"),
        "python": platform.python_version(),
        "command": _command_line() if command is None else command,
    }


def why_not_kept(source: Mapping[str, object]) -> str | None:
    """Return why rows with this provenance would be refused, None when they would be kept.

    Asked before anything is measured, so that no run is lost for want of a commit.
    """
    if COMMIT.fullmatch(str(source["git_commit"])):
        return None
    return (
        f"expected a git commit for the rows, got {source['git_commit']!r}: run in a checkout, or "
        "set DCP_LAB_GIT_COMMIT to the output of git describe --always --dirty --abbrev=40 "
        "--exclude '*'"
    )


def machine_name(gpu: str, count: int = 1) -> str:
    """Return how tables name a machine: 'h200' of 'NVIDIA H200', 'h200x2' of two of them."""
    words = [word for word in re.findall(r"[a-z0-9]+", gpu.lower()) if word not in _VENDORS]
    return "_".join(words) + (f"x{count}" if count > 1 else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Return a short command's output, None where it is absent, fails or does not end."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _git() -> tuple[str, bool]:
    given = os.environ.get("DCP_LAB_GIT_COMMIT")
    if given is not None:
        commit = given.removesuffix("-dirty")
        if not COMMIT.fullmatch(commit):
            raise ValueError(
                "DCP_LAB_GIT_COMMIT: expected 7 to 40 hex digits, with -dirty behind them if the "
                f"tree was changed, got {given!r}"
            )
        return commit, given.endswith("-dirty")
    here = str(Path(__file__).resolve().parent)
    commit = _output("git", "-C", here, "rev-parse", "HEAD")
    if commit is None:
        return "unknown", False
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return commit, changed != ""


def _driver() -> str | None:
    if torch.version.hip:
        module = Path("/sys/module/amdgpu/version")
        kernel = f", amdgpu {module.read_text().strip()}" if module.exists() else ""
        return f"ROCm {torch.version.hip}{kernel}"
    out = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return out.splitlines()[0] if out else None


def _command_line() -> str:
    """A path of this machine says nothing to a reader: keep its last part."""
    return shlex.join(Path(arg).name if Path(arg).is_absolute() else arg for arg in sys.argv)


def one_of(*values: str) -> pa.Check:
    """A column check: one of these values."""
    return pa.Check.isin(values, error=f"one of {', '.join(values)}")


def like(pattern: str, example: str) -> pa.Check:
    """A column check: the whole text has this form."""
    return pa.Check.str_matches(f"^(?:{pattern})$", error=f"text like {example}")


def at_least(least: float) -> pa.Check:
    """A column check: a finite number >= least."""
    return pa.Check(lambda values: (values >= least) & (values < math.inf), error=f">= {least}")


def above(limit: float) -> pa.Check:
    """A column check: a finite number > limit."""
    return pa.Check(lambda values: (values > limit) & (values < math.inf), error=f"> {limit}")


def text(*checks: pa.Check, nullable: bool = False) -> pa.Column:
    """A column of text."""
    return pa.Column("string", list(checks), nullable=nullable)


def real(*checks: pa.Check, nullable: bool = False) -> pa.Column:
    """A column of floats."""
    return pa.Column(float, list(checks), nullable=nullable)


def whole(*checks: pa.Check, nullable: bool = False) -> pa.Column:
    """A column of integers. Int64 refuses 1.5 where int64 would cut it to 1."""
    return pa.Column("Int64", list(checks), nullable=nullable)


def added_later(column: pa.Column) -> pa.Column:
    """A nullable column that older tables do not have: there it is read as empty."""
    column.metadata = {"added_later": True}
    return column


def rule(rows_ok: Callable[[pd.DataFrame], pd.Series], expected: str) -> pa.Check:
    """A check of whole rows: rows_ok gives one bool a row."""
    return pa.Check(rows_ok, error=expected)


def table(
    name: str,
    columns: dict[str, pa.Column],
    rules: Iterable[pa.Check] = (),
    unique: list[str] | None = None,
) -> pa.DataFrameSchema:
    """A table that holds exactly these columns, in this order."""
    return pa.DataFrameSchema(
        columns, list(rules), name=name, unique=unique, coerce=True, strict=True, ordered=True
    )


DATE_UTC = text(like(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2026-11-29T12:00:00Z"))


def provenance_columns() -> dict[str, pa.Column]:
    """Return the columns that provenance() fills, as a measured table requires them."""
    return {
        "date_utc": DATE_UTC,
        "git_commit": text(like("[0-9a-f]{7,40}", "the 40 hex digits of a commit")),
        "git_dirty": pa.Column(bool),
        "gpu": text(),
        "gpu_count": whole(at_least(0)),
        "driver": text(nullable=True),
        "torch": text(),
        "triton": text(nullable=True),
        "vllm": text(nullable=True),
        "python": text(),
        "command": text(),
    }


def _percentiles_in_order(frame: pd.DataFrame) -> pd.Series:
    return (frame.p10_us <= frame.median_us) & (frame.median_us <= frame.p90_us)


def _host_percentiles_in_order(frame: pd.DataFrame) -> pd.Series:
    spread = frame[["host_p10_us", "host_p90_us"]]
    inside = (spread.host_p10_us <= frame.host_us) & (frame.host_us <= spread.host_p90_us)
    return spread.isna().all(axis=1) | inside


def _was_checked(frame: pd.DataFrame) -> pd.Series:
    return frame.op.isin(UNCHECKED_OPS) | (frame.out_error.notna() & frame.error_budget.notna())


def _budget_fits(frame: pd.DataFrame) -> pd.Series:
    return frame.error_budget.isna() | ((frame.error_budget == 0) == frame.op.isin(EXACT_OPS))


def _out_right(frame: pd.DataFrame) -> pd.Series:
    return frame.out_error.isna() | (frame.out_error <= frame.error_budget)


def _lse_right(frame: pd.DataFrame) -> pd.Series:
    budget = frame.lse_error_budget.fillna(frame.error_budget)
    return frame.lse_error.isna() | (frame.lse_error <= budget)


DECODE = table(
    "decode",
    {
        **provenance_columns(),
        "op": text(),
        "variant": text(),
        "num_q_heads": whole(at_least(1)),
        "num_kv_heads": whole(at_least(1)),
        "head_dim": whole(at_least(1)),
        "page_size": whole(at_least(1), nullable=True),
        "dtype": text(one_of(*DTYPES)),
        "kv_dtype": text(one_of(*DTYPES)),
        "requests": whole(at_least(1)),
        "context_tokens": whole(at_least(0)),
        "lengths": text(one_of("equal", "uneven", "one_long")),
        "mode": text(one_of("eager", "graph")),
        "l2": text(one_of("cold", "warm")),
        "layers": whole(at_least(1)),
        "samples": whole(at_least(1)),
        "median_us": real(above(0)),
        "p10_us": real(above(0)),
        "p90_us": real(above(0)),
        "host_us": real(above(0), nullable=True),
        "host_p10_us": added_later(real(above(0), nullable=True)),
        "host_p90_us": added_later(real(above(0), nullable=True)),
        "launches": whole(at_least(0), nullable=True),
        "bytes": whole(at_least(0)),
        "bound_us": real(above(0)),
        "read_gbps": real(above(0)),
        "out_error": real(at_least(0), nullable=True),
        "lse_error": real(at_least(0), nullable=True),
        "error_budget": real(at_least(0), nullable=True),
        "lse_error_budget": real(above(0), nullable=True),
        "method": text(),
    },
    rules=[
        rule(_percentiles_in_order, "p10_us <= median_us <= p90_us"),
        rule(_host_percentiles_in_order, "host_p10_us <= host_us <= host_p90_us"),
        rule(
            _was_checked,
            f"out_error and error_budget, unless op is one of {', '.join(UNCHECKED_OPS)}",
        ),
        rule(_budget_fits, f"error_budget > 0, and 0 of {' and '.join(EXACT_OPS)}"),
        rule(_out_right, "out_error <= error_budget: a wrong result has no time"),
        rule(_lse_right, "lse_error <= lse_error_budget (error_budget where that is empty)"),
    ],
)


def _exchange_was_checked(frame: pd.DataFrame) -> pd.Series:
    alone = frame.op == "collective"
    return alone | (frame.out_error.notna() & frame.error_budget.notna())


REDUCE = table(
    "reduce",
    {
        **provenance_columns(),
        "op": text(one_of("reduce", "gather_queries", "gather_and_reduce", "collective")),
        "variant": text(),
        "ranks": whole(at_least(2)),
        "tokens": whole(at_least(1)),
        "num_q_heads": whole(at_least(1)),
        "head_dim": whole(at_least(1)),
        "dtype": text(one_of(*DTYPES)),
        "mode": text(one_of("eager", "graph")),
        "calls": whole(at_least(1)),
        "samples": whole(at_least(1)),
        "median_us": real(above(0)),
        "p10_us": real(above(0)),
        "p90_us": real(above(0)),
        "host_us": real(above(0), nullable=True),
        "launches": whole(at_least(0), nullable=True),
        "bytes": whole(at_least(0)),
        "link_gbps": real(above(0)),
        "bound_us": real(above(0)),
        "out_error": real(at_least(0), nullable=True),
        "lse_error": real(at_least(0), nullable=True),
        "error_budget": real(above(0), nullable=True),
        "lse_error_budget": real(above(0), nullable=True),
        "method": text(),
    },
    rules=[
        rule(_percentiles_in_order, "p10_us <= median_us <= p90_us"),
        rule(_exchange_was_checked, "out_error and error_budget, unless op is collective"),
        rule(_out_right, "out_error <= error_budget: a wrong result has no time"),
        rule(_lse_right, "lse_error <= lse_error_budget (error_budget where that is empty)"),
    ],
)


# As dcp_lab.stack has them, which needs triton; a test compares.
STACK_MODELS = ("qwen3_235b_tp8", "kimi_k3_like_tp8")
STACK_ATTENTIONS = ("paged", "published", "published_no_sync", "per_token", "per_page")


def _step_percentiles_in_order(frame: pd.DataFrame) -> pd.Series:
    return (frame.p10_ms <= frame.median_ms) & (frame.median_ms <= frame.p90_ms)


STACK = table(
    "stack",
    {
        **provenance_columns(),
        "block": text(),
        "model": text(one_of(*STACK_MODELS)),
        "num_layers": whole(at_least(1)),
        "kv_layers": whole(at_least(1)),
        "dense": text(one_of("light", "heavy")),
        "requests": whole(at_least(1)),
        "context_tokens": whole(at_least(1)),
        "page_size": whole(at_least(1)),
        "num_q_heads": whole(at_least(1)),
        "num_kv_heads": whole(at_least(1)),
        "head_dim": whole(at_least(1)),
        "dtype": text(one_of(*DTYPES)),
        "ranks": whole(at_least(1)),
        "dcp_size": whole(at_least(1)),
        "mode": text(one_of("eager", "piecewise", "full")),
        "attention": text(one_of(*STACK_ATTENTIONS)),
        "reducer": text(one_of("ag_rs", "a2a", "direct"), nullable=True),
        "query_gather": text(one_of("nccl", "direct"), nullable=True),
        "bound": pa.Column(bool),
        "launch_delay_us": real(at_least(0)),
        "delayed_launches": real(at_least(0)),
        "steps": whole(at_least(1)),
        "samples": whole(at_least(1)),
        "median_ms": real(above(0)),
        "p10_ms": real(above(0)),
        "p90_ms": real(above(0)),
        "host_ms": real(above(0)),
        "kernel_launches": whole(at_least(0), nullable=True),
        "graph_launches": whole(at_least(0), nullable=True),
        "copies": whole(at_least(0), nullable=True),
        "host_syncs": whole(at_least(0), nullable=True),
        "device_kernels": whole(at_least(0), nullable=True),
        "gpu_busy_ms": real(above(0), nullable=True),
        "comm_ms": real(at_least(0), nullable=True),
        "comm_least_ms": real(at_least(0), nullable=True),
        "weight_bytes": whole(at_least(0)),
        "kv_bytes": whole(at_least(0)),
        "out_error": real(at_least(0)),
        "error_budget": real(above(0)),
        "lse_error": real(at_least(0)),
        "lse_error_budget": real(above(0)),
        "hidden_error": real(at_least(0)),
        "hidden_error_budget": real(above(0)),
        "method": text(),
    },
    rules=[
        rule(_step_percentiles_in_order, "p10_ms <= median_ms <= p90_ms"),
        rule(lambda f: f.out_error <= f.error_budget, "out_error <= error_budget"),
        rule(lambda f: f.lse_error <= f.lse_error_budget, "lse_error <= lse_error_budget"),
        rule(
            lambda f: f.hidden_error <= f.hidden_error_budget,
            "hidden_error <= hidden_error_budget",
        ),
        rule(lambda f: (f.dcp_size > 1) == f.reducer.notna(), "a reducer where dcp_size > 1"),
    ],
)


# Metric of an engine -> its unit; those that belong to a context.
ENGINE_UNITS = {
    "tpot": "ms",
    "ttft": "ms",
    "start": "s",
    "compile": "s",
    "capture": "s",
    "graph_memory": "GiB",
    "kv_cache_capacity": "tokens",
    "exchange": "bytes",
    "reserved": "bytes",
    "tokens_same": "tokens",
    "tokens_tied": "tokens",
    "tokens_other": "tokens",
}
ENGINE_OF_CONTEXT = ("tpot", "ttft", "tokens_same", "tokens_tied", "tokens_other")

ENGINE = table(
    "engine",
    {
        **provenance_columns(),
        "run": DATE_UTC,
        "row": text(),
        "model_name": text(),
        "num_layers": whole(at_least(1)),
        "num_q_heads": whole(at_least(1)),
        "num_kv_heads": whole(at_least(1)),
        "head_dim": whole(at_least(1)),
        "requests": whole(at_least(1)),
        "weights": text(one_of("spread", "dummy")),
        "dtype": text(one_of("float16", "bfloat16")),
        "tensor_parallel": whole(at_least(1)),
        "dcp_size": whole(at_least(1)),
        "dcp_comm_backend": text(one_of("ag_rs", "a2a"), nullable=True),
        "attention_backend": text(),
        "options": text(nullable=True),
        "attention": text(),
        "reducer": text(one_of("ag_rs", "a2a", "direct"), nullable=True),
        "runner": text(),
        "cudagraph_mode": text(),
        "capture_sizes": text(),
        "block_size": whole(at_least(1)),
        "batched_tokens": whole(at_least(1)),
        "max_model_len": whole(at_least(1)),
        "memory_share": real(above(0)),
        "context_tokens": whole(at_least(1), nullable=True),
        "metric": text(one_of(*ENGINE_UNITS)),
        "sample": whole(at_least(0)),
        "value": real(),
        "unit": text(),
        "method": text(),
    },
    rules=[
        rule(lambda f: f.unit == f.metric.map(ENGINE_UNITS), "the metric's unit"),
        rule(
            lambda f: f.metric.isin(ENGINE_OF_CONTEXT) == f.context_tokens.notna(),
            f"context_tokens of {', '.join(ENGINE_OF_CONTEXT)} alone",
        ),
        rule(lambda f: (f.value > 0) | ~f.metric.isin(("tpot", "ttft")), "a time > 0"),
        rule(
            lambda f: (f.dcp_size > 1) == f.dcp_comm_backend.notna(),
            "dcp_comm_backend where dcp_size > 1",
        ),
    ],
    unique=["run", "row", "metric", "context_tokens", "sample"],
)


def validate(frame: pd.DataFrame, schema: pa.DataFrameSchema, where: str) -> pd.DataFrame:
    """Return the table in the schema's types if it keeps the schema.

    Args:
        frame: The table.
        schema: What it must hold.
        where: What to call it in the error, such as its file name.

    Raises:
        ValueError: It does not; each of the first failures is named with its column, what was
            expected, what came and the row.
    """
    try:
        return schema.validate(frame, lazy=True)
    except SchemaErrors as error:
        failures = _root_causes(error.failure_cases)
        shown = "; ".join(failures[:SHOWN_FAILURES])
        more = (
            f"; and {len(failures) - SHOWN_FAILURES} more"
            if len(failures) > SHOWN_FAILURES
            else ""
        )
        raise ValueError(f"{where}: {shown}{more}") from None


def _root_causes(cases: pd.DataFrame) -> list[str]:
    """What is wrong, one sentence each, without the failures that only follow from another one."""
    names = cases[cases.check.isin(("column_in_dataframe", "column_in_schema"))]
    types = cases[cases.check.astype(str).str.startswith("coerce_dtype")]
    values = cases[
        (cases.schema_context == "Column")
        & ~cases.check.astype(str).str.startswith(("coerce_dtype", "dtype("))
        & ~cases.column.isin(types.column)
    ]
    said = []
    for case in names.itertuples():
        verb = "has no" if case.check == "column_in_dataframe" else "does not know the"
        said.append(f"{verb} column {case.failure_case!r}")
    for case in types.itertuples():
        kind = case.check.removeprefix("coerce_dtype('").removesuffix("')")
        said.append(f"{case.column}: expected {kind}, got {case.failure_case!r}{_row(case)}")
    for case in values.itertuples():
        expected = "a value" if case.check == "not_nullable" else case.check
        said.append(f"{case.column}: expected {expected}, got {case.failure_case!r}{_row(case)}")
    if said:
        return said
    rows = cases.drop_duplicates(subset=["check", "index"])
    return [f"expected {case.check}{_row(case)}" for case in rows.itertuples()]


def _row(case) -> str:
    return "" if pd.isna(case.index) else f" in row {int(case.index)}"


def read_table(path: Path, schema: pa.DataFrameSchema) -> pd.DataFrame:
    """Return a CSV table in its schema's types.

    Args:
        path: The file.
        schema: What it must hold.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It does not keep the schema.
    """
    # Text stays text: a commit such as 0123456 or 12345e7 is not a number.
    dtypes = {name: "string" for name, column in schema.columns.items() if _is_text(column)}
    frame = pd.read_csv(path, dtype=dtypes, keep_default_na=False, na_values=[""])
    return validate(_with_later_columns(frame, schema), schema, path.name)


def _with_later_columns(frame: pd.DataFrame, schema: pa.DataFrameSchema) -> pd.DataFrame:
    """Return an older table with empty columns where the schema has grown since."""
    later = [
        name
        for name, column in schema.columns.items()
        if (column.metadata or {}).get("added_later")
    ]
    for name in later:
        if name not in frame:
            # In its place, since columns stand in the schema's order.
            before = list(schema.columns)[: list(schema.columns).index(name)]
            frame.insert(sum(column in frame for column in before), name, math.nan)
    return frame


def _is_text(column: pa.Column) -> bool:
    return pd.api.types.is_string_dtype(column.dtype.type)


def why_not_appended(path: Path, schema: pa.DataFrameSchema) -> str | None:
    """Return why rows could not be appended to a table, None if they can; change nothing.

    Asked before anything is measured: later the measurement would be lost.

    Args:
        path: The table, which need not be there.
        schema: What it must hold.
    """
    if why := why_unwritable(path):
        return f"expected a table that can be written, got {path} ({why}): give another path"
    try:
        if path.exists():
            read_table(path, schema)
    except (ValueError, OSError) as wrong:
        return f"expected a table that rows can be appended to, got {path}: {wrong}"
    return None


def write_rows(
    path: str | os.PathLike[str],
    rows: Iterable[Mapping[str, object]],
    schema: pa.DataFrameSchema,
    *,
    mode: Literal["append", "replace"] = "append",
) -> int:
    """Write measured rows to a CSV table, all or none.

    The new rows are checked first, and what is there already is checked with them. The file is
    written beside its place and moved over it, so a reader never sees half a table.

    Args:
        path: The table; its folder is made if it is missing.
        rows: One mapping a row: column to value. A nullable column may be left out.
        schema: What the table must hold, such as DECODE.
        mode: "append" keeps the rows that are there, "replace" does not. Default: "append".

    Returns:
        The number of rows the file now holds.

    Raises:
        ValueError: There is no row, a row does not keep the schema (which holds the correctness
            check), or mode is not known.
    """
    if mode not in ("append", "replace"):
        raise ValueError(f'mode: expected "append" or "replace", got {mode!r}')
    path = Path(path)
    frame = pd.DataFrame(list(rows))
    if frame.empty:
        raise ValueError("rows: expected at least one row, got none")
    for name, column in schema.columns.items():
        if name not in frame and column.nullable:
            frame[name] = None
    known = [name for name in schema.columns if name in frame]
    frame = frame[known + [name for name in frame if name not in schema.columns]]
    frame = validate(frame, schema, "rows")
    if mode == "append" and path.exists():
        frame = pd.concat([read_table(path, schema), frame], ignore_index=True)
        frame = validate(frame, schema, path.name)
    write_csv(path, frame)
    return len(frame)


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write a table beside its place, then move it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
    try:
        with os.fdopen(handle, "w", newline="") as file:
            frame.to_csv(file, index=False, lineterminator="\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
