"""Measured rows: provenance, what is refused, and that files are whole or absent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pandas as pd
import pytest

from dcp_lab.bench import record

ROW = {
    "date_utc": "2026-11-29T12:00:00Z",
    "git_commit": "0123456",
    "git_dirty": False,
    "gpu": "NVIDIA H200",
    "gpu_count": 1,
    "driver": "580.159.04",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "python": "3.12.3",
    "command": "dcp-lab bench decode",
    "op": "paged_decode",
    "variant": "num_splits=auto",
    "num_q_heads": 16,
    "num_kv_heads": 1,
    "head_dim": 128,
    "page_size": 16,
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "requests": 16,
    "context_tokens": 2048,
    "lengths": "equal",
    "mode": "graph",
    "l2": "cold",
    "layers": 12,
    "samples": 25,
    "median_us": 10.0,
    "p10_us": 9.9,
    "p90_us": 10.2,
    "bytes": 16_777_216,
    "bound_us": 6.0,
    "read_gbps": 2796.2,
    "out_error": 0.001,
    "lse_error": 1e-6,
    "error_budget": 0.01,
    "method": "graph replay",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table that is not there yet, in a folder that is not there yet."""
    return tmp_path / "measured" / "decode_test.csv"


def test_rows_come_back_as_they_went_in(path):
    """Written and read again, every value and type is the same, leading zeros included."""
    assert record.write_rows(path, [ROW], record.DECODE) == 1
    row = record.read_table(path, record.DECODE).iloc[0]
    assert {name: row[name] for name in ROW} == ROW
    assert row[["vllm", "host_us", "launches", "lse_error_budget"]].isna().all()


@pytest.mark.parametrize("commit", ["0123456", "1234567", "12345e7", "1e10000"])
def test_commit_that_looks_like_a_number_stays_text(path, commit):
    """A commit is never read as a number."""
    record.write_rows(path, [{**ROW, "git_commit": commit}], record.DECODE)
    assert record.read_table(path, record.DECODE).git_commit.tolist() == [commit]


def test_append_keeps_and_replace_drops_what_was_there(path):
    """append adds behind the old rows, replace leaves only the new ones."""
    record.write_rows(path, [ROW], record.DECODE)
    assert record.write_rows(path, [{**ROW, "mode": "eager"}], record.DECODE) == 2
    assert record.read_table(path, record.DECODE)["mode"].tolist() == ["graph", "eager"]
    assert record.write_rows(path, [ROW, ROW], record.DECODE, mode="replace") == 2
    assert record.read_table(path, record.DECODE)["mode"].tolist() == ["graph", "graph"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"out_error": 0.02}, r"out_error <= error_budget.*row 1", id="out wrong"),
        pytest.param({"out_error": None}, r"out_error and error_budget, unless", id="unchecked"),
        pytest.param({"error_budget": None}, r"out_error and error_budget", id="no budget"),
        pytest.param({"out_error": float("nan")}, r"out_error and error_budget", id="nan out"),
        pytest.param({"lse_error": 0.02}, r"lse_error <= lse_error_budget", id="lse wrong"),
        pytest.param(
            {"lse_error": 1e-4, "lse_error_budget": 1e-5},
            r"lse_error <= lse_error_budget",
            id="lse over its own budget",
        ),
        pytest.param(
            {"out_error": float("inf"), "error_budget": float("inf")},
            r"error_budget: expected >= 0, got inf",
            id="infinite budget",
        ),
        pytest.param({"out_error": 0.0, "error_budget": 0.0}, r"error_budget > 0", id="no budget"),
        pytest.param({"op": "write_kv"}, r"0 of write_kv and gather_kv", id="an inexact copy"),
        pytest.param(
            {"host_us": 7.0, "host_p10_us": 8.0, "host_p90_us": 9.0},
            r"host_p10_us <= host_us <= host_p90_us",
            id="host percentiles",
        ),
        pytest.param({"git_commit": "unknown"}, r"git_commit: .*got 'unknown'", id="no commit"),
        pytest.param({"median_us": 0.0}, r"median_us: expected > 0, got 0.0", id="no time"),
        pytest.param({"p90_us": 9.95}, r"p10_us <= median_us <= p90_us", id="percentiles"),
        pytest.param({"mode": "grph"}, r"mode: expected one of eager, graph", id="mode"),
        pytest.param({"kv_dtype": "bf16"}, r"kv_dtype: expected one of float32", id="dtype"),
        pytest.param({"requests": 1.5}, r"requests: expected Int64", id="half a request"),
        pytest.param({"requests": None}, r"requests: expected a value", id="missing value"),
        pytest.param({"median_us": "fast"}, r"median_us: expected float64, got 'fast'", id="text"),
        pytest.param({"speed": 1}, r"does not know the column 'speed'", id="unknown column"),
        pytest.param({"date_utc": "29.11.2026"}, r"date_utc: expected text like", id="date"),
    ],
)
def test_a_bad_row_is_refused_and_nothing_is_written(path, change, match):
    """One bad row among good ones keeps all of them out, and the table stays as it was."""
    record.write_rows(path, [ROW], record.DECODE)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=match):
        record.write_rows(path, [ROW, {**ROW, **change}], record.DECODE)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_table_of_before_a_column_was_added_is_read_and_appended_to(path):
    """What an older table lacks is empty in it; a column that it must have is still missed."""
    record.write_rows(path, [ROW], record.DECODE)
    later = ["host_p10_us", "host_p90_us"]
    old = pd.read_csv(path, dtype=str).drop(columns=later)
    old.to_csv(path, index=False)
    assert record.read_table(path, record.DECODE)[later].isna().all(axis=None)
    row = {**ROW, "host_us": 7.0, "host_p10_us": 6.0, "host_p90_us": 8.0}
    assert record.write_rows(path, [row], record.DECODE) == 2
    assert record.read_table(path, record.DECODE).host_p90_us.tolist()[1] == 8.0
    old.drop(columns="launches").to_csv(path, index=False)
    with pytest.raises(ValueError, match="has no column 'launches'"):
        record.read_table(path, record.DECODE)


def test_missing_column_is_named(path):
    """A row without a required column is refused by that column's name."""
    row = {name: value for name, value in ROW.items() if name != "op"}
    with pytest.raises(ValueError, match=r"rows: has no column 'op'$"):
        record.write_rows(path, [row], record.DECODE)
    assert not path.exists()


@pytest.mark.parametrize("op", record.UNCHECKED_OPS)
def test_ops_without_a_result_need_no_correctness(path, op):
    """What has no result of its own to be wrong is accepted without error columns."""
    unchecked = {"out_error": None, "lse_error": None, "error_budget": None}
    assert record.write_rows(path, [{**ROW, "op": op, **unchecked}], record.DECODE) == 1


def test_no_rows_and_unknown_mode_are_refused(path):
    """Nothing to write, or an unknown way to write it, is an error."""
    with pytest.raises(ValueError, match="rows: expected at least one row, got none"):
        record.write_rows(path, [], record.DECODE)
    with pytest.raises(ValueError, match="mode: expected .*got 'update'"):
        record.write_rows(path, [ROW], record.DECODE, mode="update")


def test_a_table_that_was_edited_into_nonsense_is_refused_on_read(path):
    """Reading checks the schema too, and names the file."""
    record.write_rows(path, [ROW], record.DECODE)
    path.write_text(path.read_text().replace(",10.0,", ",-10.0,"))
    with pytest.raises(ValueError, match=r"decode_test.csv: median_us: expected > 0, got -10.0"):
        record.read_table(path, record.DECODE)
    with pytest.raises(ValueError, match=r"decode_test.csv: median_us"):
        record.write_rows(path, [ROW], record.DECODE)


def test_a_write_that_fails_leaves_the_old_table(path, monkeypatch):
    """The new table is made beside the old one: an error half-way leaves the old one alone."""
    record.write_rows(path, [ROW], record.DECODE)
    before = path.read_bytes()

    def break_half_way(self, file, **_):
        file.write("date_utc,git_com")
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_csv", break_half_way)
    with pytest.raises(OSError, match="disk full"):
        record.write_rows(path, [ROW], record.DECODE)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_many_failures_are_counted(path):
    """Five failures are told in full, the rest by number."""
    rows = [{**ROW, "median_us": -1.0 - i} for i in range(8)]
    with pytest.raises(ValueError, match=r"got -5.0 in row 4; and 3 more$"):
        record.write_rows(path, rows, record.DECODE)


def test_provenance_fills_its_columns(monkeypatch):
    """provenance() gives exactly the columns of a measured table, and they pass its schema."""
    monkeypatch.setenv("DCP_LAB_GIT_COMMIT", "0123456789abcdef")
    given = record.provenance()
    assert list(given) == list(record.provenance_columns())
    schema = record.table("provenance", record.provenance_columns())
    record.validate(pd.DataFrame([given]), schema, "provenance")
    assert given["git_commit"] == "0123456789abcdef"
    assert given["git_dirty"] is False


@pytest.mark.parametrize(
    ("given", "commit", "dirty"),
    [
        pytest.param("0123456", "0123456", False, id="clean"),
        pytest.param("0123456-dirty", "0123456", True, id="changed tree"),
    ],
)
def test_commit_can_come_from_the_environment(monkeypatch, given, commit, dirty):
    """A machine without .git is told the commit, with -dirty where the tree was changed."""
    monkeypatch.setenv("DCP_LAB_GIT_COMMIT", given)
    found = record.provenance()
    assert (found["git_commit"], found["git_dirty"]) == (commit, dirty)


def test_commit_from_the_environment_must_be_one(monkeypatch):
    """A branch name is no commit."""
    monkeypatch.setenv("DCP_LAB_GIT_COMMIT", "main")
    with pytest.raises(ValueError, match="DCP_LAB_GIT_COMMIT: expected 7 to 40 hex digits"):
        record.provenance()


def test_without_git_the_commit_is_unknown(monkeypatch):
    """Where there is no git, provenance says so, and the schema then refuses the rows."""
    monkeypatch.delenv("DCP_LAB_GIT_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert record.provenance()["git_commit"] == "unknown"


def test_command_holds_no_path_of_this_machine(monkeypatch):
    """Absolute paths in the command line shrink to their last part; options stay."""
    monkeypatch.setattr(
        sys, "argv", ["/home/me/.venv/bin/dcp-lab", "bench", "--out", "/tmp/a b.csv"]
    )
    assert record.provenance()["command"] == "dcp-lab bench --out 'a b.csv'"
    assert record.provenance("make lab")["command"] == "make lab"
