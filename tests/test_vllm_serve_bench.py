"""What `bench serve` writes and concludes, on engines and rows made up here."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dcp_lab.bench import record, serve
from dcp_lab.bench.serve import (
    CONTEXTS,
    REFERENCE,
    ROWS,
    TARGETS,
    compare_tokens,
    fits,
    gate,
    main,
    run_row,
    table_rows,
    token_rows,
    verdicts,
)
from dcp_lab.vllm_plugin import engine

SOURCE = {
    "date_utc": "2026-11-30T10:00:00Z",
    "git_commit": "0" * 40,
    "git_dirty": False,
    "gpu": "NVIDIA H200",
    "gpu_count": 2,
    "driver": "580",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "vllm": "0.25.1",
    "python": "3.12.3",
    "command": "made up",
}
WORKER = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "attention": "made.up",
    "runner": "made.up",
    "reducer": None,
    "exchange_bytes": 0,
    "kv_blocks": 100,
    "block_size": 16,
    "capture_sizes": [1, 16],
    "batched_tokens": 8192,
    "compile_s": 70.0,
    "reserved_bytes": 1,
}
SAME = {"tokens_same": 500, "tokens_tied": 2, "tokens_other": 0}


def wanted_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return what a row's engine is asked for."""
    row = ROWS[name]
    return {
        "model_name": "made up",
        "num_layers": 94,
        "num_q_heads": 16,
        "num_kv_heads": 1,
        "head_dim": 128,
        "requests": 16,
        "weights": "spread",
        "dtype": "bfloat16",
        "tp": 2,
        "dcp": row.dcp,
        "comm": row.comm,
        "backend": row.backend,
        "mode": row.mode,
        "options": dict(row.options),
        "max_model_len": 8300,
        "memory": 0.4,
        "share_compiled": True,
        **changes,
    }


def found_of(tpot: float, contexts: tuple[int, ...] = CONTEXTS) -> list[dict[str, Any]]:
    """Return what an engine wrote."""
    times = [
        {"context": c, "tpot_ms": [tpot, 2 * tpot, tpot], "ttft_ms": [10.0]} for c in contexts
    ]
    return [{"start_s": 90.0, "workers": [WORKER, WORKER]}, *times]


def rows_of(
    name: str,
    tpot: float,
    contexts: tuple[int, ...] = CONTEXTS,
    *,
    run: str = "2026-11-30T10:00:00Z",
    source: dict[str, Any] = SOURCE,
    counts: dict[str, int] | None = SAME,
    **changes: Any,
) -> list[dict[str, Any]]:
    wanted = wanted_of(name, **changes)
    rows = table_rows(name, wanted, found_of(tpot, contexts), source, run)
    if counts is not None and name in serve.TOKENS_OF:
        rows += token_rows([{**rows[0], "dtype": "float16"}], counts)
    return rows


GOOD = {
    "none_full": 6.2,
    "none_ours_full": 6.1,
    "fa_a2a_full": 10.5,
    "ours_direct_full": 6.1,
    "ours_a2a_full": 8.5,
}
ALL = len(TARGETS) + 2 * len(serve.TOKENS_OF)


def write(path: Path, *engines: list[dict[str, Any]]) -> Path:
    record.write_rows(path, [row for rows in engines for row in rows], record.ENGINE)
    return path


def good(**changed: list[dict[str, Any]] | None) -> list[list[dict[str, Any]]]:
    """Return the rows of engines that meet every target, some of them replaced or left out."""
    engines = {name: rows_of(name, tpot) for name, tpot in GOOD.items()} | changed
    return [rows for rows in engines.values() if rows]


def states(path: Path) -> list[str]:
    table = record.read_table(path, record.ENGINE)
    return [verdict.state for verdict in verdicts(table)]


def test_rows_that_meet_every_target_pass(tmp_path: Path):
    """All targets met and measured: the gate says 0, by the command too."""
    path = write(tmp_path / "rows.csv", *good())
    assert states(path) == ["holds"] * ALL
    assert gate(path) == 0
    assert main(["--gate", str(path)]) == 0


def test_nothing_measured_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without a table every target is open; a table that is none is bad input."""
    assert gate(tmp_path / "none.csv") == 1
    assert f"0 of {ALL} targets hold" in capsys.readouterr().out
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    assert gate(tmp_path / "bad.csv") == 2


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_slower_row_and_a_missing_one_are_seen(name: str, tmp_path: Path):
    """Ours at twice its time, or the others at half, miss; without a row nothing is measured."""
    slow = rows_of(name, GOOD[name] * (2 if "ours" in name else 0.5))
    assert "missed" in states(write(tmp_path / "slow.csv", *good(**{name: slow})))
    fewer = states(write(tmp_path / "fewer.csv", *good(**{name: None})))
    assert "not measured" in fewer and "missed" not in fewer


def test_one_slow_context_misses_and_a_missing_one_is_named(tmp_path: Path):
    """The worst context decides; contexts that were not measured keep a target open."""
    slow = rows_of("none_ours_full", 6.1, (1000, 2000, 3000, 5000))
    slow += rows_of("none_ours_full", 7.0, (8000,))[-4:]
    (found,) = [
        verdict
        for verdict in verdicts(pd.DataFrame([r for e in good(none_ours_full=slow) for r in e]))
        if "none_ours_full" in verdict.target
    ]
    assert found.state == "missed" and "8000 tokens: 7.00 beside 6.20 ms" in str(found)
    path = write(tmp_path / "rows.csv", *good(none_full=rows_of("none_full", 6.2, (1000,))))
    assert states(path).count("not measured") == 3


def test_every_target_has_a_context_in_a_default_run():
    """8,000 tokens are among the defaults, which a target judges."""
    assert max(CONTEXTS) >= 8000
    assert {c for *_, where in TARGETS if isinstance(where, tuple) for c in where} <= set(CONTEXTS)
    # What is judged is measured first.
    assert set(list(ROWS)[:5]) == set(GOOD)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 8},
        {"weights": "dummy"},
        {"source": {**SOURCE, "gpu": "another"}},
        {"source": {**SOURCE, "git_commit": "1" * 40}},
        {"run": "2026-11-30T11:00:00Z"},
        {"max_model_len": 9000},
    ],
    ids=["layers", "weights", "machine", "commit", "run", "length"],
)
def test_rows_of_other_settings_are_not_held_against_each_other(
    changes: dict[str, Any], tmp_path: Path
):
    """A ratio of 8 layers to 94, of two machines or of two runs meets no target."""
    other = rows_of("fa_a2a_full", 10.5, **changes)
    path = write(tmp_path / "rows.csv", *good(fa_a2a_full=other))
    held = sum(other == "fa_a2a_full" for _, other, *_ in TARGETS)
    assert states(path).count("not measured") == held


def test_the_last_run_that_has_both_rows_counts(tmp_path: Path):
    """A later run of one row alone changes nothing; one of both rows does."""
    later = {"run": "2026-11-30T12:00:00Z", "counts": None}
    path = write(tmp_path / "rows.csv", *good(), rows_of("ours_direct_full", 60.0, **later))
    assert states(path) == ["holds"] * ALL
    write(path, rows_of("fa_a2a_full", 10.5, **later))
    assert states(path).count("missed") == 1


@pytest.mark.parametrize(
    ("counts", "missed"),
    [
        ({"tokens_same": 198, "tokens_tied": 1, "tokens_other": 0}, 0),
        ({"tokens_same": 198, "tokens_tied": 0, "tokens_other": 1}, 1),
        ({"tokens_same": 98, "tokens_tied": 2, "tokens_other": 0}, 1),
        ({"tokens_same": 20, "tokens_tied": 0, "tokens_other": 16}, 2),
    ],
    ids=["a tie", "no tie", "ties too often", "wrong"],
)
def test_other_tokens_than_without_dcp_are_missed(
    counts: dict[str, int], missed: int, tmp_path: Path
):
    """More than 99 % of the positions are the same and the others are ties."""
    other = rows_of("ours_a2a_full", 8.5, counts=counts)
    assert states(write(tmp_path / "rows.csv", *good(ours_a2a_full=other))).count("missed") == (
        missed
    )


def test_tokens_of_bfloat16_do_not_count(tmp_path: Path):
    """Rows of before tokens had engines of their own hold no target and miss none."""
    wrong = {"tokens_same": 20, "tokens_tied": 0, "tokens_other": 16}
    for counts in (SAME, wrong):
        alone = tmp_path / f"alone_{counts['tokens_other']}.csv"
        plain = rows_of("ours_a2a_full", 8.5, counts=None)
        rounded = [*plain, *token_rows(plain, counts)]
        assert states(write(alone, *good(ours_a2a_full=rounded))).count("not measured") == 2
    # Beside rows of float16, from a later run too, they change nothing.
    later = {"run": "2026-11-30T12:00:00Z", "counts": None}
    plain = rows_of("ours_a2a_full", 8.5, (), **later)
    path = write(tmp_path / "rows.csv", *good(), [*plain, *token_rows(plain, wrong)])
    assert states(path) == ["holds"] * ALL


def test_a_request_counts_until_its_first_difference():
    """What follows another token is another text; a tie is where the reference hardly prefers."""

    def request(tokens: list[int], gap: float = 1.0) -> dict[str, Any]:
        return {"tokens": tokens, "logprobs": [[-1.0, -1.0 - gap]] * len(tokens)}

    reference = [request([1, 2, 3, 4]), request([5, 6, 7, 8]), request([5, 6, 7, 8], gap=0.01)]
    other = [request([1, 2, 3, 4]), request([5, 0, 0, 0]), request([0, 6, 7, 8])]
    assert compare_tokens(reference, other) == {
        "tokens_same": 5,
        "tokens_tied": 1,
        "tokens_other": 1,
    }


def test_an_engine_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without vLLM the engine ends at once: no result, and the error out of its log."""
    wanted = {**wanted_of("none_full"), "share_compiled": False}
    assert run_row("none_full", wanted, tmp_path / "x.log", 120, tmp_path) == []
    assert re.search(r"none_full: FAILED: .* status 1; .*x.log:\n.*Error", capsys.readouterr().out)


class Bench:
    """A run of `bench serve` whose engines are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.csv, self.folder = folder / "engine_here.csv", folder
        self.contexts = CONTEXTS
        self.wall_s = 100.0
        self.now = 0.0
        self.limits: list[float] = []
        self.greedy = [{"tokens": [1, 2], "logprobs": [[-1.0, -2.0]] * 2}]
        monkeypatch.setenv("DCP_LAB_GIT_COMMIT", "0" * 40)
        monkeypatch.setattr(serve, "run_row", self.run_row)
        monkeypatch.setattr(serve.time, "monotonic", lambda: self.now)

    def run_row(
        self, name: str, wanted: dict[str, Any], log: Path, limit_s: float, cache: Path
    ) -> list[dict[str, Any]]:
        self.limits.append(limit_s)
        self.now += min(limit_s, self.wall_s)
        log.write_text("INFO Graph capturing finished in 7 secs, took 1.25 GiB\n")
        assert wanted["compare_tokens"] == (wanted["dtype"] == "float16")
        if wanted["compare_tokens"]:
            return [*found_of(6.0, ()), {"greedy": self.greedy}]
        return found_of(6.0, self.contexts)

    def main(self, *arguments: str) -> int:
        where = ["--csv", str(self.csv), "--cache", str(self.folder / "cache")]
        return main([*where, *arguments])

    def table(self) -> pd.DataFrame:
        return record.read_table(self.csv, record.ENGINE)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


def test_an_engines_rows_are_written_when_it_ends(bench: Bench):
    """A sample a row, with where it came from, what ran, and the log's word on graphs."""
    assert bench.main("--rows", "ours_direct_full,none_full,ours_a2a_full") == 0
    table = bench.table()
    assert set(table.git_commit) == {"0" * 40}
    one = table[table.row == "ours_direct_full"].set_index("metric")
    assert one.loc["tpot"].shape[0] == 3 * len(CONTEXTS)
    assert one.loc["graph_memory"].value == 1.25 and one.loc["capture"].value == 7
    assert one.loc["kv_cache_capacity"].value == 100 * 16 * 2
    assert one.loc["start"].options == "reducer=direct"
    assert not table.metric.str.startswith("tokens").any()


def test_tokens_are_compared_in_engines_of_their_own(bench: Bench):
    """In float16, without times; as soon as the reference is there, the one before it too."""
    assert bench.main("--tokens", "--rows", "ours_direct_full,none_full,ours_a2a_full") == 0
    table = bench.table()
    assert set(table.dtype) == {"float16"} and "tpot" not in set(table.metric)
    same = table[table.metric == "tokens_same"].set_index("row").value
    assert same.to_dict() == {"ours_direct_full": 2, "ours_a2a_full": 2}
    tokens = (bench.folder / "cache" / "logs" / "engine_here.tokens.jsonl").read_text()
    assert [json.loads(line)["row"] for line in tokens.splitlines()][1] == REFERENCE


def test_an_engine_that_was_cut_short_keeps_its_contexts(bench: Bench):
    """What was measured before the end is written; the run says that it is not whole."""
    bench.contexts = CONTEXTS[:2]
    assert bench.main("--rows", "none_full") == 1
    assert set(bench.table().context_tokens.dropna()) == set(CONTEXTS[:2])


def test_no_engine_starts_that_cannot_end(bench: Bench, capsys: pytest.CaptureFixture[str]):
    """With 350 s and engines of 100 s three run, bounded by what is left of it."""
    assert bench.main("--seconds", "350") == 1
    assert list(bench.table().row.unique()) == list(ROWS)[:3]
    assert bench.limits == [350 - 15, 250 - 15, 150 - 15]
    assert "ours_a2a_full: not started, 50 s are left" in capsys.readouterr().out
    assert fits(20.0, []) and not fits(10.0, []) and not fits(120.0, [100.0])


def test_study_2s_rows_are_of_a_latent_model(bench: Bench):
    """MLA with vLLM's own layers: dummy weights, no tokens to compare, graphs the only change."""
    full, piecewise = ROWS["mla_a2a_full"], ROWS["mla_a2a_piecewise"]
    assert dataclasses.replace(full, mode=piecewise.mode) == piecewise
    assert bench.main("--rows", "none_full,mla_a2a_full", "--layers", "94") == 0
    table = bench.table().drop_duplicates("row").set_index("row")
    assert table.loc["mla_a2a_full", "head_dim"] == 576
    assert table.num_layers.tolist() == [94, 61]
    assert table.weights.tolist() == ["spread", "dummy"]
    assert {path.name for path in (bench.folder / "cache").iterdir()} >= {"model_94", "latent_61"}


def test_a_run_without_a_commit_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """Nothing is measured that could not be kept."""
    monkeypatch.setattr(serve.record, "_git", lambda: ("unknown", False))
    with pytest.raises(SystemExit):
        bench.main()
    assert not bench.limits and not bench.csv.exists()


def test_a_time_without_its_context_or_unit_is_refused(tmp_path: Path):
    """The writer takes no row that a reader could misread."""
    row = rows_of("none_full", 6.2)[-1]
    for change in ({"context_tokens": None}, {"unit": "s"}, {"metric": "speed"}):
        with pytest.raises(ValueError):
            record.write_rows(tmp_path / "rows.csv", [{**row, **change}], record.ENGINE)


# ---- the engine's own side ------------------------------------------------------------------


class Clock:
    """Engine of 10 ms a step that prefills two requests a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.running, self.ended = 0.0, {}, []
        self.llm_engine = self
        vllm = types.SimpleNamespace(SamplingParams=types.SimpleNamespace)
        kinds = types.SimpleNamespace(RequestOutputKind=types.SimpleNamespace(DELTA=1))
        monkeypatch.setitem(engine.sys.modules, "vllm", vllm)
        monkeypatch.setitem(engine.sys.modules, "vllm.sampling_params", kinds)
        monkeypatch.setattr(engine.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(engine.time, "sleep", lambda _: None)

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> str:
        self.running[name] = [len(self.running) // 2, params.max_tokens]
        return f"{name}-inside"

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.now += 0.01
        outputs = [types.SimpleNamespace(request_id="of another run", outputs=[])]
        for name, state in list(self.running.items()):
            if state[0] > 0:
                state[0] -= 1
                continue
            state[1] -= 1
            token = types.SimpleNamespace(token_ids=[1])
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[token]))
            if not state[1]:
                del self.running[name]
        return outputs

    def abort_request(self, names: list[str], *, internal: bool) -> None:
        assert internal and all(name.endswith("-inside") for name in names)
        self.ended.append(len(self.running))
        self.running.clear()


@pytest.mark.parametrize(("window_s", "windows"), [(60.0, 3), (0.1, 1)])
def test_windows_are_of_all_requests(
    window_s: float, windows: int, monkeypatch: pytest.MonkeyPatch
):
    """TPOT counts steps in which every request runs; slow rows stop after a window."""
    clock = Clock(monkeypatch)
    wanted = {
        "requests": 16,
        "vocabulary": 100,
        "repeats": 3,
        "batched_tokens": 4000,
        "ttft_contexts": [2000],
        "window_s": window_s,
    }
    found = engine.measure(clock, wanted, 2000)
    # 16 requests, two a step: the last has its first token after 8 steps.
    assert found["ttft_ms"] == pytest.approx([80.0] * 3)
    assert found["tpot_ms"] == pytest.approx([10.0] * windows)
    # None had ended by itself when the last window closed.
    assert clock.ended[-1] == 16
    assert len(engine.measure(clock, wanted, 1000)["ttft_ms"]) == 1


def test_engines_that_compile_the_same_share_it():
    """Attention, DCP and graph mode leave the hash of the code; anything else stays in it."""

    def config(**changes: Any) -> Any:
        parallel = {"decode_context_parallel_size": 2, "dcp_comm_backend": "a2a"}
        return types.SimpleNamespace(
            additional_config={"dcp_lab": {}},
            attention_config=types.SimpleNamespace(backend=changes.get("backend"), other=1),
            parallel_config=types.SimpleNamespace(**parallel, tensor_parallel_size=2),
            compilation_config=types.SimpleNamespace(
                cudagraph_mode="FULL", capture_sizes=changes.get("sizes", [1])
            ),
        )

    one, other = config(backend="CUSTOM"), config(backend="FLASH_ATTN", sizes=[2])
    assert engine.same_code(one) != engine.same_code(other)
    other.compilation_config.capture_sizes = [1]
    other.parallel_config.decode_context_parallel_size = 1
    assert engine.same_code(one) == engine.same_code(other)
    # The engine's own configuration stays as it was.
    assert one.attention_config.backend == "CUSTOM"
    assert one.parallel_config.decode_context_parallel_size == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "2000,8k"], "--contexts: expected numbers >= 1 as 2000,8000"),
        (["--contexts", ""], "--contexts: expected numbers >= 1"),
        (["--contexts", "0"], "--contexts: expected numbers >= 1"),
        (["--layers", "0"], "--layers: expected at least 1, got 0"),
        (["--requests", "-1"], "--requests: expected at least 1, got -1"),
        (["--repeats", "0"], "--repeats: expected at least 1, got 0"),
        (["--seconds", "nan"], "--seconds: expected finite seconds above 0, got nan"),
        (["--limit", "-4"], "--limit: expected finite seconds above 0, got -4"),
        (["--memory", "7"], "--memory: expected a share above 0 and up to 1, got 7"),
        (["--logs", "FILE/logs"], "--logs: expected a folder that can be written"),
        (["--logs", "FILE"], "--logs: expected a folder that can be written"),
        (["--cache", "FILE"], "expected a folder that can be written"),
        (["--csv", "FILE/x.csv"], "--csv: expected a table that can be written"),
        (["--csv", "FILE"], "--csv: expected a table that rows can be appended to"),
    ],
)
def test_no_engine_starts_with_what_it_cannot_do(
    bench: Bench, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    """It is said at once, with status 2: an engine takes minutes to fail."""
    file = bench.folder / "file"
    file.write_text("half,a li")
    given = [argument.replace("FILE", str(file)) for argument in arguments]
    with pytest.raises(SystemExit) as stopped:
        bench.main(*given)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not bench.limits and not bench.csv.exists()


def test_chosen_contexts_are_measured(bench: Bench):
    """In the order in which they are given."""
    bench.contexts = (500, 64)
    assert bench.main("--rows", "none_full", "--contexts", "500,64") == 0
    assert set(bench.table().context_tokens.dropna()) == {500, 64}
