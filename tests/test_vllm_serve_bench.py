"""What `bench serve` concludes from its rows: targets and equal tokens, on rows made up here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dcp_lab.bench import serve
from dcp_lab.bench.serve import CONTEXTS, ROWS, TARGETS, compare, gate, main, run_row


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def about(name: str) -> dict[str, Any]:
    """Return what every row says of itself, its settings and its machine."""
    wanted = {"layers": 94, "requests": 16, "repeats": 3, "random_weights": False}
    machine = dict.fromkeys(("gpu", "gpu_count", "driver", "torch", "triton", "vllm"), "made up")
    return {"row": name, "dcp": ROWS[name].dcp, **machine, "wanted": wanted}


def timed(name: str, tpot: float, contexts: tuple[int, ...] = (2000, 8000)) -> dict[str, Any]:
    times = [{"context": c, "tpot_median_ms": tpot, "ttft_median_ms": 10.0} for c in contexts]
    return {**about(name), "times": times}


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


def test_every_target_has_a_context_in_a_default_run():
    """8,000 tokens are among the defaults, which a target judges."""
    assert max(CONTEXTS) >= 8000
    assert {c for *_, where in TARGETS if isinstance(where, tuple) for c in where} <= set(CONTEXTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wanted": {"layers": 8}}, "layers 8 against 94"),
        ({"wanted": {"random_weights": True}}, "random_weights True against False"),
        ({"gpu": "another"}, "gpu another against made up"),
        ({"gpu": None}, "a row without its gpu"),
    ],
    ids=["layers", "weights", "machine", "unknown machine"],
)
def test_rows_of_other_settings_are_not_held_against_each_other(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A ratio of 8 layers to 94, or of two machines, meets no target and shows no equal tokens."""

    def changed(row: dict[str, Any]) -> dict[str, Any]:
        row = {**row, **change, "wanted": {**row["wanted"], **change.get("wanted", {})}}
        return {name: value for name, value in row.items() if value is not None}

    times = [timed(name, tpot) for name, tpot in GOOD.items()]
    times = [changed(row) if row["row"] == "ours_direct_full" else row for row in times]
    held = sum(name == "ours_direct_full" for name, *_ in TARGETS)
    assert gate(write(tmp_path / "rows", times)) == held
    assert said in capsys.readouterr().out
    tokens = [spoken("none_full", [1]), changed(spoken("ours_a2a_full", [1]))]
    assert compare(write(tmp_path / "rows", tokens)) == 1
    assert said in capsys.readouterr().out


def spoken(name: str, tokens: list[int], gap: float = 1.0) -> dict[str, Any]:
    request = {"tokens": tokens, "logprobs": [[-1.0, -1.0 - gap]] * len(tokens)}
    return {**about(name), "greedy": {"2000": [request]}}


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


@pytest.mark.parametrize("others", [[], ["none_ours_full"]])
def test_without_tokens_of_two_ranks_nothing_is_compared(others: list[str], tmp_path: Path):
    """DCP 1 alone, or beside DCP 1, says nothing of DCP 2, nor do rows that have times only."""
    rows = [spoken(name, [1]) for name in ("none_full", *others)]
    rows.append(timed("ours_a2a_full", 8.5))
    assert compare(write(tmp_path / "rows", rows)) == 1
    assert main(["--compare", str(tmp_path / "rows")]) == 1


def test_other_contexts_and_no_positions_are_no_equal_tokens(tmp_path: Path):
    """Tokens at another context, or of no position at all, count as a row that differs."""
    elsewhere = spoken("ours_a2a_full", [1])
    elsewhere["greedy"]["3000"] = elsewhere["greedy"].pop("2000")
    rows = [spoken("none_full", [1]), elsewhere]
    assert compare(write(tmp_path / "rows", rows)) == 1
    rows = [spoken("none_full", []), spoken("ours_a2a_full", [])]
    assert compare(write(tmp_path / "rows", rows)) == 1


def test_an_engine_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without vLLM the engine ends at once: no row, and the error out of its log."""
    assert run_row("none_full", {"dcp": 1}, tmp_path / "x.log", 120) is None
    assert re.search(r"none_full: FAILED: .* status 1; .*x.log:\n.*Error", capsys.readouterr().out)


def test_a_row_says_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Commit, machine and versions stand in every line, and a run without a commit is refused."""
    wanted = {"layers": 94, "requests": 16, "repeats": 3, "random_weights": False}
    result = {"workers": [{"cudagraph_mode": "FULL"}], "start_s": 1.0, "wanted": wanted}
    result["times"] = [{"context": 2000, "tpot_median_ms": 1.0, "ttft_median_ms": 1.0}]
    monkeypatch.setattr(serve, "run_row", lambda *_: result)
    monkeypatch.setenv("DCP_LAB_GIT_COMMIT", "0" * 40)
    out = tmp_path / "rows.jsonl"
    assert main(["--out", str(out), "--rows", "none_full"]) == 0
    (line,) = out.read_text().splitlines()
    row = json.loads(line)
    assert row["git_commit"] == "0" * 40
    assert {*serve.MACHINE, "date_utc", "python", "command"} <= row.keys()
    monkeypatch.setattr(serve.record, "_git", lambda: ("unknown", False))
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "none.jsonl")])
    assert not (tmp_path / "none.jsonl").exists()
