"""The exchange measurement: its correctness gate, its targets, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import types
from pathlib import Path

import pytest
import torch

from dcp_lab import AttnState, merge_states
from dcp_lab.bench import record
from dcp_lab.bench import reduce as bench
from dcp_lab.peers import vllm_reducers

SHAPE = bench.ReduceShape(3, num_q_heads=4, head_dim=16)


def exchanged(rank: int = 0, size: int = 2) -> tuple[bench.Inputs, AttnState]:
    """Return a rank's inputs and the right result."""
    x = bench.make_inputs(SHAPE, rank, size, device="cpu")
    states = [bench.make_inputs(SHAPE, r, size, device="cpu").state for r in range(size)]
    own = SHAPE.num_q_heads // size
    heads = slice(rank * own, (rank + 1) * own)
    outs, lses = (torch.stack(parts)[:, :, heads] for parts in zip(*states, strict=True))
    return x, merge_states(outs, lses)


@pytest.mark.parametrize("rank", [0, 1])
def test_right_results_pass(rank: int) -> None:
    """A merged state and the gathered q of either rank pass, with their errors."""
    x, state = exchanged(rank)
    qs = [bench.make_inputs(SHAPE, r, 2, device="cpu").q for r in range(2)]
    errors = bench.check(x, "right", state, torch.cat(qs, 1))
    assert 0 <= errors["out_error"] <= errors["error_budget"]
    assert 0 <= errors["lse_error"] <= errors["lse_error_budget"]
    assert set(bench.check(x, "nothing to check", None, None).values()) == {None}


@pytest.mark.parametrize("fault", ["out", "lse", "other heads", "q", "nan"])
def test_a_wrong_result_is_not_timed(fault: str) -> None:
    """An out, LSE or q that is off is refused by name."""
    x, state = exchanged()
    gathered = x.gathered.clone()
    if fault == "out":
        state.out[1, 1] *= 1.05
    elif fault == "lse":
        state.lse.mul_(1.4427)
    elif fault == "other heads":
        state = exchanged(rank=1)[1]
    elif fault == "nan":
        state.out[0, 0, 0] = torch.nan
    else:
        gathered[2, 3, 15] += 1
    with pytest.raises(RuntimeError, match="not timed, since .* off: broken"):
        bench.check(x, "broken", state, gathered)


def test_an_unchecked_time_is_refused() -> None:
    """The table takes the time of a reduce only with its error, a bare collective's without."""
    row = table_row("reduce", "a2a", SHAPE, "graph", 5.0)
    frame = record.pd.DataFrame([row | {"out_error": None}])
    with pytest.raises(ValueError, match="expected out_error and error_budget, unless op is coll"):
        record.validate(frame, record.REDUCE, "rows")
    with pytest.raises(ValueError, match="a wrong result has no time"):
        record.validate(record.pd.DataFrame([row | {"out_error": 1.0}]), record.REDUCE, "rows")
    alone = table_row("collective", "all_to_all", SHAPE, "graph", 5.0) | {"out_error": None}
    assert len(record.validate(record.pd.DataFrame([alone]), record.REDUCE, "rows")) == 1


@functools.cache
def source() -> dict[str, object]:
    found = record.provenance("test")
    return found | ({"git_commit": "0" * 40} if found["git_commit"] == "unknown" else {})


def table_row(
    op: str, variant: str, shape: bench.ReduceShape, mode: str, us: float, date: str = "01"
) -> dict[str, object]:
    return {
        **source(),
        "date_utc": f"2026-01-{date}T00:00:00Z",
        "op": op,
        "variant": variant,
        "ranks": 2,
        "tokens": shape.tokens,
        "num_q_heads": shape.num_q_heads,
        "head_dim": shape.head_dim,
        "dtype": "bfloat16",
        "mode": mode,
        "calls": 40,
        "samples": 30,
        "median_us": us,
        "p10_us": us,
        "p90_us": us,
        "host_us": us if mode == "eager" else None,
        "launches": 1,
        "bytes": 10,
        "link_gbps": 300.0,
        "bound_us": 0.1,
        "out_error": 0.001,
        "lse_error": 0.0,
        "error_budget": 0.01,
        "lse_error_budget": 0.01,
        "method": "made up",
    }


def whole_table(date: str = "01", **times: float) -> list[dict[str, object]]:
    """Return a run that meets every target, but for the times given by variant."""
    us = {
        "direct": 3.5,
        "a2a": 14.0,
        "ag_rs": 20.0,
        "vllm a2a (pynccl)": 30.0,
        "vllm ag_rs (torch)": 40.0,
        "all_to_all": 11.0,
        "all_gather + reduce_scatter": 18.0,
        "both": 7.0,
    } | times
    rows = []
    for shape, mode in itertools.product(bench.DEFAULT_SHAPES, ("graph", "eager")):
        for name, value in us.items():
            op = "collective" if name.startswith("all_") else "reduce"
            op, name = ("gather_and_reduce", "direct") if name == "both" else (op, name)
            rows.append(table_row(op, name, shape, mode, value, date))
    return rows


def judged(rows: list[dict[str, object]]) -> list[bench.Verdict]:
    return bench.verdicts(record.validate(record.pd.DataFrame(rows), record.REDUCE, "rows"))


def test_targets_met() -> None:
    """Every target is judged: direct at 4 sizes, 2 x 3 a cell of 8, both together once."""
    found = judged(whole_table())
    assert len(found) == 4 + 8 * 6 + 1
    assert all(verdict.state == "holds" for verdict in found), [
        str(v) for v in found if v.state != "holds"
    ]


@pytest.mark.parametrize(
    "name, us, missed",
    [
        ("direct", 4.5, 2),
        ("direct", 6.5, 3),
        ("a2a", 15.5, 8),
        ("a2a", 31.0, 8 * 3),
        ("ag_rs", 22.5, 8),
        ("all_to_all", 9.0, 8),
        ("vllm ag_rs (torch)", 19.0, 16),
        ("both", 7.6, 1),
    ],
)
def test_targets_missed(name: str, us: float, missed: int) -> None:
    """A time over its limit, or a yardstick below it, misses as many targets as it stands in."""
    found = judged(whole_table(**{name: us}))
    assert sum(verdict.state != "holds" for verdict in found) == missed


def test_what_was_not_measured_is_missed() -> None:
    """Without vLLM's rows, or without a cell, the targets that need them are not met."""
    rows = [row for row in whole_table() if not str(row["variant"]).startswith("vllm")]
    found = [verdict for verdict in judged(rows) if verdict.state != "holds"]
    assert len(found) == 8 * 4 and "its yardstick was not measured" in str(found[0])
    rows = [row for row in whole_table() if row["tokens"] != 16 or row["head_dim"] != 128]
    found = [verdict for verdict in judged(rows) if verdict.state != "holds"]
    assert len(found) == 1 + 6 + 1 and "not measured" in str(found[0])


def test_the_latest_run_is_judged() -> None:
    """A later run of a cell replaces an earlier one, in both directions."""
    bad, good = whole_table("01", direct=9.0), whole_table("02")
    assert all(verdict.state == "holds" for verdict in judged(bad + good))
    bad, good = whole_table("02", direct=9.0), whole_table("01")
    assert sum(verdict.state != "holds" for verdict in judged(bad + good)) == 4


def test_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--gate fails with nothing measured and with a missed target, and counts what holds."""
    path = tmp_path / "reduce_test.csv"
    assert bench.main(["--gate", "--out", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "reduce_test.csv: nothing measured yet" in printed
    assert "0 of 53 targets hold, 0 are missed, 53 not measured" in printed
    path.write_text("op\nreduce\n")
    assert bench.main(["--gate", "--out", str(path)]) == 2
    assert "reduce_test.csv: has no column 'date_utc'" in capsys.readouterr().err
    path.unlink()
    record.write_rows(path, whole_table(both=8.0), record.REDUCE)
    assert bench.main(["--gate", "--out", str(path)]) == 1
    printed = capsys.readouterr().out
    assert (
        "missed        direct gather and reduce, 16 tokens, d128: 8.00 us, at most 7.50 us, "
        "by 0.50 us"
    ) in printed
    assert "52 of 53 targets hold, 1 are missed, 0 not measured" in printed
    record.write_rows(path, whole_table(), record.REDUCE, mode="replace")
    assert bench.main(["--gate", "--out", str(path)]) == 0


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input and missing GPUs are said before anything runs; a dry run shows the grid."""
    assert bench.main(["--dry-run", "--shape", "16", "--shape", "1x8x576"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "16 tokens, 16 heads, d128",
        "1 tokens, 8 heads, d576",
    ]
    for arguments, message in (
        (["--shape", "0"], "shape: expected TOKENS or TOKENSxQHEADSxDIM, got '0'"),
        (["--shape", "1x2"], "shape: expected TOKENS or"),
        (["--ranks", "1"], "--ranks: expected at least 2, got 1"),
        (["--samples", "4"], "--samples: expected at least 5, got 4"),
        (["--shape", "²x2x64"], "shape: expected TOKENS or"),
        (["--shape", "4x6x64", "--ranks", "4"], "--shape: expected heads that 4 ranks can share"),
    ):
        assert bench.main(arguments) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(bench, "INTERPRETED", True)
    assert bench.main([]) == 2
    assert "expected 2 GPUs, found 0" in capsys.readouterr().err


def test_default_grid_is_what_the_targets_name() -> None:
    """The default shapes are the cells that --gate judges."""
    cells = {dataclasses.astuple(shape) for shape in bench.DEFAULT_SHAPES}
    assert cells == {(t, 16, d) for t in (1, 16, 64, 256) for d in (128, 512)}


def test_sweep_stays_resident() -> None:
    """No swept config launches more programs than the device holds at once."""
    configs = bench.sweep_configs(132, dependent_launch=True)
    assert len(configs) == 20
    assert all(config.max_programs <= 8 * 132 for config in configs.values())
    assert not any(c.wait_launch for c in bench.sweep_configs(132, False).values())


def test_absent_vllm_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs, or without vLLM, the peers' functions are absent for a reason that is said."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vllm_reducers.absent() == "it needs GPUs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "pip install vllm==0.25.1" in vllm_reducers.absent()


def test_half_a_vllm_is_an_absent_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM whose configuration lacks a package is found before the ranks start, and says which.

    The functions import without it; their communicator does not.
    """
    files = {
        "distributed/parallel_state.py": "",
        "v1/attention/ops/common.py": "",
        "v1/attention/ops/dcp_alltoall.py": "",
        "config.py": "import a_package_that_is_not_there",
    }
    for name, text in files.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for folder in ("", "distributed", "v1", "v1/attention", "v1/attention/ops"):
        (tmp_path / "vllm" / folder / "__init__.py").touch()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "a_package_that_is_not_there" in vllm_reducers.absent()


def test_vllm_functions_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of vLLM's ag_rs stands for itself: its context keeps the first call's binary.

    Triton 3.6 refuses that binary's second launch, so a context may be used once.
    """
    used = []

    def cp_lse_ag_out_rs(out, lse, cp_group, ctx=None, return_lse=False):
        if ctx is not None and any(ctx is other for other in used):
            raise TypeError("function takes exactly 27 arguments (24 given)")
        used.append(ctx)
        return out, lse

    operations = "vllm.v1.attention.ops"
    modules = {
        f"{operations}.common": {
            "cp_lse_ag_out_rs": cp_lse_ag_out_rs,
            "CPTritonContext": type("CPTritonContext", (), {}),
        },
        f"{operations}.dcp_alltoall": {"dcp_a2a_lse_reduce": lambda *state, **_: state[:2]},
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))
    monkeypatch.setattr(
        vllm_reducers, "_Group", lambda group, device: types.SimpleNamespace(kind="torch")
    )
    functions, kind = vllm_reducers.make(None, torch.device("cpu"))
    assert kind == "torch" and set(functions) == set(vllm_reducers.NAMES)
    state = AttnState(torch.zeros(1, 2, 4), torch.zeros(1, 2))
    for function in functions.values():
        for _ in range(2):
            assert function(state).out is state.out
    assert len(used) == 2


@pytest.mark.multigpu
@pytest.mark.unpoisoned
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_measures_on_two_gpus(tmp_path: Path) -> None:
    """A small measurement leaves rows that keep the schema, direct in one launch."""
    path = tmp_path / "reduce_test.csv"
    arguments = ["--shape", "4x4x64", "--samples", "5", "--out", str(path)]
    assert bench.main(arguments) == 0
    rows = record.read_table(path, record.REDUCE)
    launches = {(r.op, r.variant): r.launches for r in rows.itertuples()}
    assert launches["reduce", "direct"] == launches["gather_queries", "direct"] == 1
    assert launches["gather_and_reduce", "direct"] == 2
