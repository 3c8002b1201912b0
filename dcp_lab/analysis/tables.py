"""The tables under data/, read with their schema checked.

data/README.md is the dictionary of every file and column. data/ lies beside the package in a
checkout; the environment variable DCP_LAB_DATA names it elsewhere.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pandera.pandas as pa

from dcp_lab.bench import record
from dcp_lab.bench.record import above, at_least, like, one_of, real, rule, table, text, whole
from dcp_lab.serving import rows

CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
SHARE = pa.Check.in_range(0, 1, error="0 to 1")


def data_dir() -> Path:
    """Return the folder data/.

    Raises:
        FileNotFoundError: It is not there.
    """
    given = os.environ.get("DCP_LAB_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "data"
    if not (folder / "published").is_dir():
        why = "DCP_LAB_DATA names it" if given else "it lies beside an editable install"
        raise FileNotFoundError(
            f"data: expected a folder with published/ in it ({why}), got {folder}; run from a "
            "checkout (make lab) or set DCP_LAB_DATA to a checkout's data folder"
        )
    return folder


def _one_value_each(key: list[str], values: list[str]):
    """Rows of one key hold one value in each of these columns."""

    def rows_ok(frame: pd.DataFrame) -> pd.Series:
        counts = frame.groupby(key, dropna=False)[values].transform("nunique", dropna=False)
        return (counts == 1).all(axis=1)

    return rows_ok


def _complete(key: list[str], member: str):
    """Every key has every member that any key has."""

    def rows_ok(frame: pd.DataFrame) -> pd.Series:
        return frame.groupby(key)[member].transform("nunique") == frame[member].nunique()

    return rows_ok


SERVE = table(
    "qwen3_235b_tp8_serve",
    {
        "setting": whole(at_least(1)),
        "input_len": whole(at_least(1)),
        "output_len": whole(at_least(2)),
        "variant": text(one_of("dcp1_full", "dcp1_piecewise", "dcp2")),
        "dcp_size": whole(at_least(1)),
        "cudagraph_mode": text(one_of(*CUDAGRAPH_MODES, "not stated")),
        "metric": text(),
        "value": real(at_least(0)),
    },
    rules=[
        rule(
            _one_value_each(["setting"], ["input_len", "output_len"]),
            "one input_len and output_len a setting",
        ),
        rule(
            _one_value_each(["variant"], ["dcp_size", "cudagraph_mode"]),
            "one dcp_size and cudagraph_mode a variant",
        ),
        rule(
            _complete(["setting", "variant"], "metric"),
            "every metric for each setting and variant",
        ),
    ],
    unique=["setting", "variant", "metric"],
)

GSM8K = table(
    "qwen3_235b_tp8_gsm8k",
    {
        "dcp_size": whole(at_least(1)),
        "task": text(one_of("gsm8k")),
        "task_version": whole(),
        "num_fewshot": whole(at_least(0)),
        "filter": text(one_of("flexible-extract", "strict-match")),
        "metric": text(one_of("exact_match")),
        "value": real(SHARE),
        "stderr": real(SHARE),
    },
    unique=["dcp_size", "filter"],
)

GRAPH_MODES = table(
    "kimi_k3_tp8_dcp8_graph_modes",
    {
        "cudagraph_mode": text(one_of(*CUDAGRAPH_MODES)),
        "output_tok_per_s": real(above(0)),
        "mean_tpot_ms": real(above(0)),
        "requests_ok": whole(at_least(0)),
        "requests": whole(at_least(1)),
    },
    rules=[rule(lambda frame: frame.requests_ok <= frame.requests, "requests_ok <= requests")],
    unique=["cudagraph_mode"],
)

VLLM = table(
    "vllm",
    {
        "date": text(like(r"\d{4}-\d\d-\d\d", "2026-11-29")),
        "gpu": text(),
        "gpu_count": whole(at_least(1)),
        "vllm": text(),
        "torch": text(),
        "triton": text(),
        "driver": text(),
        "model": text(),
        "num_layers": whole(at_least(1)),
        "num_q_heads": whole(at_least(1)),
        "num_kv_heads": whole(at_least(1)),
        "head_dim": whole(at_least(1)),
        "requests": whole(at_least(1)),
        "context_tokens": whole(at_least(1)),
        "tensor_parallel": whole(at_least(1)),
        "dcp_size": whole(at_least(1)),
        "dcp_comm_backend": text(one_of("a2a", "ag_rs", "direct"), nullable=True),
        "attention_backend": text(),
        "gathers_kv": text(one_of("yes", "no")),
        "cudagraph_mode": text(one_of(*CUDAGRAPH_MODES)),
        "repeats": whole(at_least(1)),
        "metric": text(one_of("tpot", "kv_cache_capacity")),
        "value": real(above(0)),
        "unit": text(one_of("ms", "tokens")),
    },
    rules=[
        rule(
            lambda frame: (frame.dcp_size > 1) == frame.dcp_comm_backend.notna(),
            "a dcp_comm_backend where dcp_size > 1 and only there",
        ),
        rule(
            lambda frame: (frame.metric == "tpot") == (frame.unit == "ms"),
            "tpot in ms, kv_cache_capacity in tokens",
        ),
    ],
    unique=["dcp_size", "dcp_comm_backend", "cudagraph_mode", "metric"],
)

_BEFORE_THE_PROJECT = {
    "date_utc": record.DATE_UTC,
    "source": text(like(r"\S+ sha256:[0-9a-f]{12}", "FILE sha256:12 hex digits")),
    "gpu": text(),
    "gpu_count": whole(at_least(1)),
    "driver": text(),
    "cuda": text(),
    "torch": text(),
    "triton": text(),
    "vllm": text(),
    "flashinfer": text(),
    "python": text(),
}


def _timed_or_failed(frame: pd.DataFrame) -> pd.Series:
    return frame.median_us.notna() != frame.error.notna()


PEERS = table(
    "peers",
    {
        "group": text(),
        "shape": text(),
        "peer": text(),
        "mode": text(one_of("eager", "graph")),
        "requests": whole(at_least(1)),
        "context_tokens": whole(at_least(1)),
        "num_q_heads": whole(at_least(1)),
        "num_kv_heads": whole(at_least(1)),
        "head_dim": whole(at_least(1)),
        "head_dim_v": whole(at_least(1)),
        "page_size": whole(at_least(1)),
        "kv_dtype": text(one_of(*record.DTYPES)),
        "l2": text(one_of("cold", "warm")),
        "layers": whole(at_least(1)),
        "median_us": real(above(0), nullable=True),
        "min_us": real(above(0), nullable=True),
        "p90_us": real(above(0), nullable=True),
        "again_us": real(above(0), nullable=True),
        "host_us": real(above(0), nullable=True),
        "again_host_us": real(above(0), nullable=True),
        "launches": whole(at_least(1), nullable=True),
        "bytes": whole(at_least(1)),
        "read_gbps": real(above(0)),
        "out_error": real(at_least(0), nullable=True),
        "lse_error": real(at_least(0), nullable=True),
        "ok": pa.Column("boolean", nullable=True),
        "checked": text(one_of("these inputs", "small cases"), nullable=True),
        "error": text(nullable=True),
        **_BEFORE_THE_PROJECT,
    },
    rules=[
        rule(_timed_or_failed, "either median_us or error"),
        rule(
            lambda frame: (
                frame.p90_us.isna()
                | ((frame.min_us <= frame.median_us) & (frame.median_us <= frame.p90_us))
            ),
            "min_us <= median_us <= p90_us",
        ),
        rule(
            lambda frame: frame.ok.isna() | (frame.ok & frame.checked.notna()),
            "ok to be true, and checked to say on what, or both empty",
        ),
    ],
    unique=["group", "shape", "peer", "mode"],
)

PROBE = table(
    "probe",
    {
        "pattern": text(),
        "bytes": whole(at_least(1)),
        "gbps": real(above(0)),
        "again_gbps": real(above(0)),
        **_BEFORE_THE_PROJECT,
    },
    unique=["pattern"],
)

PUBLISHED = {
    "qwen3_235b_tp8_serve": SERVE,
    "qwen3_235b_tp8_gsm8k": GSM8K,
    "kimi_k3_tp8_dcp8_graph_modes": GRAPH_MODES,
}

AMD_KERNELS = table(
    "amd_kernels",
    {
        "arch": text(one_of("gfx942", "gfx950")),
        "kernel": text(),
        "case": text(),
        "triton": text(),
        "num_warps": whole(at_least(1)),
        "num_stages": whole(at_least(1)),
        "vgprs": whole(at_least(0)),
        "agprs": whole(at_least(0)),
        "sgprs": whole(at_least(0)),
        "waves_per_simd": whole(at_least(1)),
        "vgpr_spills": whole(at_least(0)),
        "sgpr_spills": whole(at_least(0)),
        "scratch_bytes": whole(at_least(0)),
        "lds_bytes": whole(at_least(0)),
        "mfma": text(nullable=True),
        "global_load_bits": text(nullable=True),
        "lds_load_bits": text(nullable=True),
    },
)

COMPILED = {"amd_kernels": AMD_KERNELS}

# A measured table is named KIND_MACHINE; tables of one kind share their columns.
MEASURED = {
    "accuracy": rows.ACCURACY,
    "decode": record.DECODE,
    "engine": record.ENGINE,
    "peers": PEERS,
    "probe": PROBE,
    "reduce": record.REDUCE,
    "serve": rows.SERVE,
    "stack": record.STACK,
    "vllm": VLLM,
}


def published_serve() -> pd.DataFrame:
    """Return study 1's `vllm bench serve` results, one row a setting, variant and metric."""
    return _published("qwen3_235b_tp8_serve")


def published_gsm8k() -> pd.DataFrame:
    """Return study 1's accuracy results, one row a DCP size and answer filter."""
    return _published("qwen3_235b_tp8_gsm8k")


def published_graph_modes() -> pd.DataFrame:
    """Return study 2's results, one row a graph mode."""
    return _published("kimi_k3_tp8_dcp8_graph_modes")


def measured_vllm() -> pd.DataFrame:
    """Return the vLLM engine runs on two H200s, one row a configuration and metric."""
    return measured("vllm_h200_dcp")


def measured_peers() -> pd.DataFrame:
    """Return other kernels' times on one H200, one row a group, shape, peer and mode."""
    return measured("peers_h200")


def measured_probe() -> pd.DataFrame:
    """Return the bandwidth probes of the peers' run, one row an access pattern."""
    return measured("probe_h200")


def compiled_amd_kernels() -> pd.DataFrame:
    """Return what every kernel uses on gfx942 and gfx950, one row a build (nothing was run)."""
    return record.read_table(data_dir() / "compiled" / "amd_kernels.csv", AMD_KERNELS)


def headline_numbers() -> list[dict]:
    """Return the headline numbers that the README quotes, from data/headlines.json."""
    return json.loads((data_dir() / "headlines.json").read_text(encoding="utf-8"))["numbers"]


def _published(name: str) -> pd.DataFrame:
    return record.read_table(data_dir() / "published" / f"{name}.csv", PUBLISHED[name])


def measured_path(name: str) -> Path:
    """Return where the measured table of this name lies, whether it is there or not.

    Raises:
        ValueError: The name's first word is no kind of table.
    """
    measured_schema(name)
    return data_dir() / "measured" / f"{name}.csv"


def measured_schema(name: str) -> pa.DataFrameSchema:
    """Return the schema of the measured table of this name, by its first word.

    Raises:
        ValueError: The name's first word is no kind of table.
    """
    kind = name.split("_", maxsplit=1)[0]
    if kind not in MEASURED:
        raise ValueError(
            f"name: expected KIND_MACHINE with KIND of {sorted(MEASURED)}, got {name!r}"
        )
    return MEASURED[kind]


def measured(name: str) -> pd.DataFrame:
    """Return a measured table such as "decode_h200", its schema checked.

    Args:
        name: File name under data/measured without .csv: KIND_MACHINE.

    Raises:
        FileNotFoundError: Nothing was measured under that name yet.
        ValueError: The name's first word is no kind of table, or the table breaks its schema.
    """
    path = measured_path(name)
    if not path.exists():
        there = ", ".join(sorted(file.stem for file in path.parent.glob("*.csv"))) or "no table"
        raise FileNotFoundError(
            f"name: expected a table under data/measured ({there}), got {name!r}"
        )
    return record.read_table(path, measured_schema(name))


def is_measured(name: str) -> bool:
    """Return whether a measured table of this name is there."""
    return measured_path(name).exists()
