"""The measurement of whole steps: what it refuses, reads out of a trace, and writes."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from stack_ranks import TINY, tiny

from dcp_lab.bench import costs, record
from dcp_lab.bench import stack as bench
from dcp_lab.reducers.local_group import run_ranks
from dcp_lab.stack import ATTENTIONS, MODELS, Corner
from dcp_lab.testing import error_and_budget


def test_names_are_those_of_the_stack() -> None:
    """The schema, which does without triton, knows every model and attention path."""
    assert tuple(MODELS) == record.STACK_MODELS
    assert record.STACK_ATTENTIONS == ATTENTIONS


def test_the_factorial_is_complete() -> None:
    """Every attention path x reducer x mode that can be is measured at 2,500 tokens, once."""
    at_2500 = [
        corner
        for block in bench.blocks()
        if (block.stack, block.context) == (("qwen3_235b_tp8", "light", 16), 2500)
        and block.name in ("base", "eager", "cross")
        for corner in block.corners
    ]
    assert len(at_2500) == len(set(at_2500)) == 3 + 5 * 3 * 3 - 3
    assert bench.blocks()[0].corners[0] == Corner.no_dcp("full")


def event(name: str, cat: str, ts: float, dur: float, correlation: int = 0) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args} | {
        "pid": 0,
        "tid": 0,
    }


STEP = [
    event(bench._WINDOW, "user_annotation", 0, 100),
    event("cudaLaunchKernel", "cuda_runtime", 1, 2, 1),
    event("cudaGraphLaunch", "cuda_runtime", 5, 2, 2),
    event("cudaStreamSynchronize", "cuda_runtime", 9, 40),
    event("cudaDeviceSynchronize", "cuda_runtime", 120, 9),
    event("_write_kv_kernel", "kernel", 10, 5, 1),
    event("gemm", "kernel", 20, 10, 2),
    event("ncclDevKernel_AllReduce", "kernel", 25, 15, 2),
    event("_direct_reduce_kernel", "kernel", 50, 4, 2),
]


def test_a_profile_is_read() -> None:
    """Launches of the window, overlapping kernels counted once, exchanges apart."""
    found = bench.read_profile(STEP)
    assert (found["kernel_launches"], found["graph_launches"], found["host_syncs"]) == (1, 1, 1)
    assert found["device_kernels"] == 4
    assert found["gpu_busy_ms"] == pytest.approx((5 + 20 + 4) / 1e3)
    assert found["comm_ms"] == pytest.approx(19 / 1e3)


def test_a_trace_keeps_the_middle() -> None:
    """A few layers' kernels and what launched them remain."""
    events = [event(f"k{i}", "kernel", 10 * i, 5, i) for i in range(20)]
    events += [event("cudaLaunchKernel", "cuda_runtime", 10 * i - 90, 2, i) for i in range(20)]
    kept = bench.middle(events, layers=20)
    kernels = [e for e in kept if e["cat"] == "kernel"]
    assert [e["name"] for e in kernels] == ["k8", "k9", "k10"]
    launched = {e["args"]["correlation"] for e in kept if e["cat"] == "cuda_runtime"}
    assert {8, 9, 10} <= launched
    assert bench.middle([], layers=20) == []


@pytest.mark.parametrize("fault", ["attention", "hidden", None])
def test_a_wrong_step_has_no_time(fault: str | None) -> None:
    """A step whose attention or residual stream is off is refused, a right one has its errors."""
    stack = tiny()
    stack.step(Corner.no_dcp("eager"))()
    hidden = (stack.reference()[0], stack.reference(stack.dtype)[0])
    if fault == "attention":
        stack.attn.lse.mul_(1.4427)
    elif fault == "hidden":
        stack.x[1] += 0.01
    if fault is None:
        found = bench.check(stack, "right", hidden)
        assert 0 <= found["hidden_error"] <= found["hidden_error_budget"]
        assert 0 <= found["out_error"] <= found["error_budget"]
        return
    with pytest.raises(RuntimeError, match="not timed, since its"):
        bench.check(stack, "broken", hidden)


def test_each_error_is_the_worst_ranks() -> None:
    """Each error is the largest of all ranks, with the budget that it was held against."""
    names = [name for pair in bench.ERRORS.items() for name in pair]
    ranks = [
        dict(zip(names, values, strict=True))
        for values in ((1, 9, 5, 8, 3, 7), (2, 4, 3, 6, 1, 5))
    ]
    assert list(bench.worst_of(ranks).values()) == [2, 4, 5, 8, 3, 7]
    stack = tiny()
    stack.step(Corner.no_dcp("eager"))()
    hidden = (stack.reference()[0], stack.reference(stack.dtype)[0])
    found = bench.check(stack, "right", hidden)
    assert bench.worst_of([found]) == found
    lse = error_and_budget(
        stack.attn.lse,
        stack.last_attention().lse,
        stack.last_attention(stack.dtype).lse,
        least_scale=1.0,
    )
    assert (found["lse_error"], found["lse_error_budget"]) == lse


def test_two_ranks_write_rows(tmp_path: Path) -> None:
    """A block on two ranks over gloo leaves checked rows; what cannot be made is left out."""
    corners = (Corner.no_dcp("eager"), Corner("eager", reducer="direct"), Corner("eager"))
    plan = (bench.Block("base", corners, requests=2, context=5),)
    out = tmp_path / "stack_none.csv"
    source = record.provenance() | {"git_commit": "0" * 40}
    settings = {
        "deadline": time.time() + 500,
        "layers": None,
        "repeats": 5,
        "out": out,
        "source": source,
        "models": {"qwen3_235b_tp8": TINY},
        "options": {"dtype": torch.float32, "device": "cpu", "page_size": 4},
    }
    results = run_ranks(bench.measure_rank, 2, args=(plan, settings), timeout_s=150)
    rows, problems, _ = results[0]
    assert rows == 2 and len(problems) == 1 and "paged + direct" in problems[0]
    table = record.read_table(out, record.STACK)
    assert table.dcp_size.tolist() == [1, 2] and table.samples.tolist() == [5, 5]
    assert table.kernel_launches.isna().all()
    alone, shared = (bench.step_case(row) for row in table.to_dict("records"))
    assert (alone.reducer, alone.all_reduces, alone.layers) == (None, 2, TINY.num_layers)
    assert (shared.reducer, shared.query_gather, shared.mode) == ("ag_rs", "nccl", "eager")
    # Two requests of five tokens, a key and a value of 16 fp32 numbers each; rank 0 holds three.
    assert alone.kv_bytes == 2 * 5 * 2 * 16 * 4 and shared.kv_bytes == 2 * 3 * 2 * 16 * 4
    assert costs.predict_ms(alone, costs.START) < costs.predict_ms(shared, costs.START)
    with pytest.raises(ValueError, match="row: expected a KV cache in each of 9 layers"):
        bench.step_case(table.iloc[0].to_dict() | {"num_layers": 9})
    broken = table.assign(hidden_error=table.hidden_error_budget * 2)
    with pytest.raises(ValueError, match="hidden_error <= hidden_error_budget"):
        record.validate(pd.DataFrame(broken), record.STACK, "broken")


def test_a_group_of_one_makes_every_call(tmp_path: Path) -> None:
    """Without a peer a step with DCP is right and makes the calls of a rank that has one."""
    corners = (Corner("eager"), Corner("eager", reducer="a2a"))
    (alone,) = run_ranks("stack_ranks:count_without_peer", 1, args=(corners,))
    paired = run_ranks("dcp_lab.stack:count_on_rank", 2, args=(corners, 2))[0]
    for mine, theirs in zip(alone, paired, strict=True):
        assert mine["collectives"] == theirs["collectives"] > 0
        assert mine == theirs
    with pytest.raises(ValueError, match="without_peer: expected False unless in a process group"):
        tiny(without_peer=True)


def test_only_traces_writes_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--only traces checks and profiles a few corners in each mode, and times none."""
    (block,) = bench.blocks_traced(1)
    assert {c.mode for c in block.corners} == {c.mode for c in block.corners if c.dcp}
    assert "direct" not in {c.reducer for c in block.corners}
    assert "direct" in {c.reducer for c in bench.blocks_traced(2)[0].corners}
    built = []
    monkeypatch.setattr(bench.Run, "prepare", lambda self, block: None)
    monkeypatch.setattr(
        bench.Run, "_build", lambda self, stack, wanted, profile: built.append(wanted) or ({},) * 3
    )
    monkeypatch.setattr(bench.Run, "_samples", lambda *_: pytest.fail("timed"))
    run = bench.Run(time.time() + 60, None, 5, tmp_path / "none.csv", {})
    run.measure(block)
    assert built == list(block.corners) and run.rows == 0


def test_out_of_time_measures_nothing(tmp_path: Path) -> None:
    """A run whose time is over starts no block and writes no row."""
    run = bench.Run(time.time(), None, 5, tmp_path / "none.csv", {})
    assert run.out_of_time()
    assert not dataclasses.replace(run, deadline=time.time() + 60).out_of_time()


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The dry run lists the corners; without GPUs, or with odd numbers, it says why not."""
    assert bench.main(["--dry-run", "--only", "base"]) == 0
    assert "published + ag_rs, piecewise" in capsys.readouterr().out
    assert bench.main(["--repeats", "2"]) == 2
    assert "--repeats: expected at least 5, got 2" in capsys.readouterr().err
    assert bench.main(["--dry-run", "--ranks", "1", "--only", "traces"]) == 0
    assert "    paged + ag_rs, full\n" in capsys.readouterr().out
    assert (
        bench.main(["--only", "traces"]) == bench.main(["--only", "traces", "--only", "base"]) == 2
    )
    assert "--only traces: expected no other --only, and --traces FILE" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert bench.main([]) == 2
        assert "expected 2 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "ranks", "table"),
    [
        ("NVIDIA H200", 1, "stack_h200.csv"),
        ("NVIDIA H200", 2, "stack_h200x2.csv"),
        ("AMD Instinct MI355X", 2, "stack_mi355xx2.csv"),
    ],
)
def test_a_machine_has_its_own_table(
    gpu: str, ranks: int, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go to the table of the GPUs that were measured; without a commit nothing is."""
    source = {"git_commit": "0" * 40, "gpu": gpu}
    seen = []

    def measured(*_: object, args: tuple, **__: object) -> list[tuple[int, list, list]]:
        seen.append(args[1]["out"].name)
        return [(1, [], [])] * ranks

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(bench, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: ranks)
    monkeypatch.setattr(record, "provenance", lambda: source)
    monkeypatch.setattr(bench, "run_ranks", measured)
    assert bench.main(["--ranks", str(ranks)]) == 0 and seen == [table]
    source["git_commit"] = "main"
    assert bench.main(["--ranks", str(ranks)]) == 2 and seen == [table]


def test_traces_of_an_earlier_run_are_none_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that kept no trace fails, whatever lies where it would have written."""
    traces = tmp_path / "traces.json"
    traces.write_text("{}")
    written: list[bool] = []

    def measured(*_: object, **__: object) -> list[tuple[int, list, list]]:
        if written:
            bench.write_traces(traces, {}, {})
        return [(0, [], [])]

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(bench, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    source = {"git_commit": "0" * 40, "gpu": "NVIDIA H200"}
    monkeypatch.setattr(record, "provenance", lambda: source)
    monkeypatch.setattr(bench, "run_ranks", measured)
    command = ["--ranks", "1", "--only", "traces", "--traces", str(traces)]
    assert bench.main(command) == 1
    written.append(True)
    assert bench.main(command) == 0


def test_nothing_is_started_whose_rows_could_not_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Odd numbers, blocks that these ranks have none of, and places where nothing can be."""
    (tmp_path / "other.csv").write_text("half,a li")
    (tmp_path / "file").touch()
    monkeypatch.setattr(bench, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    source = {"git_commit": "0" * 40, "gpu": "NVIDIA H200"}
    monkeypatch.setattr(record, "provenance", lambda: source)
    monkeypatch.setattr(bench, "run_ranks", lambda *_, **__: pytest.fail("started"))
    for arguments, message in (
        (["--seconds", "nan"], "--seconds: expected at least 1, got nan"),
        (["--ranks", "1", "--only", "cross"], "--only: expected some of base, "),
        (["--out", str(tmp_path)], "--out: expected a table that can be written"),
        (["--out", str(tmp_path / "file" / "x.csv")], "--out: expected a table that can be"),
        (["--out", str(tmp_path / "other.csv")], "--out: expected a table that rows can be"),
        (["--traces", str(tmp_path)], "--traces: expected a file that can be written"),
    ):
        assert bench.main(arguments) == 2
        assert message in capsys.readouterr().err
