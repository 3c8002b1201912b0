"""What `bench serve` concludes from its rows: targets and equal tokens, on rows made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcp_lab.bench.serve import ROWS, TARGETS, compare, gate, main


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def timed(name: str, tpot: float, contexts: tuple[int, ...] = (2000, 8000)) -> dict[str, Any]:
    times = [{"context": c, "tpot_median_ms": tpot, "ttft_median_ms": 10.0} for c in contexts]
    return {"row": name, "dcp": ROWS[name].dcp, "times": times}


GOOD = {
    "none_full": 6.2,
    "none_ours_full": 6.1,
    "fa_a2a_full": 10.5,
    "ours_direct_full": 6.1,
    "ours_a2a_full": 8.5,
}


def test_rows_that_meet_every_target_pass(tmp_path: Path):
    """All targets met and measured: nothing is missed."""
    rows = [timed(name, tpot) for name, tpot in GOOD.items()]
    assert gate(write(tmp_path / "rows", rows)) == 0
    assert main(["--gate", str(tmp_path / "rows")]) == 0


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_slower_row_and_a_missing_one_are_seen(name: str, tmp_path: Path):
    """Ours at twice its time misses a target; without a row its targets count as missed."""
    slow = {**GOOD, name: GOOD[name] * (2 if "ours" in name else 0.5)}
    rows = [timed(row, tpot) for row, tpot in slow.items()]
    assert gate(write(tmp_path / "slow", rows)) >= 1
    rows = [timed(row, tpot) for row, tpot in GOOD.items() if row != name]
    assert gate(write(tmp_path / "fewer", rows)) >= 1


def test_a_target_without_its_context_is_not_met(tmp_path: Path):
    """Rows at 1,000 tokens only say nothing about 2,000 or 8,000."""
    rows = [timed(name, tpot, (1000,)) for name, tpot in GOOD.items()]
    assert gate(write(tmp_path / "rows", rows)) == sum(where is not None for *_, where in TARGETS)


def spoken(name: str, tokens: list[int], gap: float = 1.0) -> dict[str, Any]:
    request = {"tokens": tokens, "logprobs": [[-1.0, -1.0 - gap]] * len(tokens)}
    return {"row": name, "dcp": ROWS[name].dcp, "greedy": {"2000": [request]}}


@pytest.mark.parametrize(
    ("tokens", "gap", "wrong"),
    [
        (list(range(200)), 1.0, 0),
        ([*range(199), 7], 1.0, 1),
        ([*range(199), 7], 0.01, 0),
        ([*range(50), *[7] * 150], 0.01, 1),
    ],
    ids=["same", "differs", "a tie at the end", "ties too early"],
)
def test_tokens_that_differ_are_seen(tokens: list[int], gap: float, wrong: int, tmp_path: Path):
    """More than 99 % of the positions are the same and the others are ties, or the row differs."""
    rows = [spoken("none_full", list(range(200)), gap), spoken("ours_a2a_full", tokens)]
    assert compare(write(tmp_path / "rows", rows)) == wrong


def test_without_one_ranks_tokens_nothing_is_compared(tmp_path: Path):
    """A file without DCP 1 is an error, not a success."""
    assert compare(write(tmp_path / "rows", [spoken("ours_a2a_full", [1])])) == 1
