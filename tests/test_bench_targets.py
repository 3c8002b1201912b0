"""The speed targets of decode, on small made-up tables: what holds, is missed, is open."""

from __future__ import annotations

import functools

import pandas as pd
import pytest
from test_record import ROW

from dcp_lab.bench import decode_targets, record
from dcp_lab.bench.protocol import MAX_KV_BYTES
from dcp_lab.bench.verdicts import Verdict, summary

OURS, READ, PEER = 10.0, 7.0, 14.0


def row(op: str, us: float, variant: str = "planned", **changes) -> dict[str, object]:
    times = {"median_us": us, "p10_us": us, "p90_us": us, "launches": 2, "bound_us": READ}
    if op in record.EXACT_OPS:
        times |= {"out_error": 0.0, "lse_error": None, "error_budget": 0.0}
    return {**ROW, "op": op, "variant": variant, **times, **changes}


def cell(ours: float = OURS, peer: float = PEER, **changes) -> list[dict[str, object]]:
    """Return one cell: ours plain and bound, in a graph and eager, and a peer."""
    changes = {"bytes": int(2 * 2 * 128 * 16 * 2048), **changes}
    eager = {"mode": "eager", **changes}
    return [
        row("paged_decode", ours, **changes),
        row("paged_decode", ours, "bound", **changes),
        row("fa3", peer, "metadata", **changes),
        row("paged_decode", 80.0, host_us=70.0, **eager),
        row("paged_decode", 20.0, "bound", host_us=12.0, **eager),
    ]


def judged(rows: list[dict[str, object]]) -> dict[str, Verdict]:
    frame = pd.DataFrame(rows)
    for name in record.DECODE.columns:
        if name not in frame:
            frame[name] = None
    table = record.validate(frame[list(record.DECODE.columns)], record.DECODE, "rows")
    return {("wish: " if v.wish else "") + v.target: v for v in decode_targets.verdicts(table)}


@functools.cache
def small_grid(max_bytes: float = 0) -> list[tuple[int, ...]]:
    return [(16, 2048, 16, 1, 128)]


@pytest.fixture(autouse=True)
def one_cell(monkeypatch):
    """The grid is one cell here, so that a small table can be whole."""
    monkeypatch.setattr(decode_targets, "grid", small_grid)


def test_ratios_and_times_are_recomputed():
    """Geometric mean, worst ratio and time beyond the read come from the rows."""
    even, uneven = cell(), cell(ours=10.5, lengths="uneven")
    found = judged(even + uneven)
    mean = found["fastest peer over ours, geometric mean of the latency cells"]
    assert (mean.value, mean.state) == (pytest.approx(1.4), "holds")
    worst = found["no bf16 cell slower than its fastest peer"]
    assert worst.value == pytest.approx(14 / 10.5) and worst.where.endswith("uneven")
    beyond = found["bf16 beyond the page-ordered read + 3 %"]
    assert beyond.value == pytest.approx(10.5 - 1.03 * 7) and beyond.state == "holds"
    uneven = found["uneven lengths over even ones of the same total"]
    assert (uneven.value, uneven.state) == (pytest.approx(1.05), "holds")
    assert found["launches a call"].state == "holds"
    host = found["host time of a bound call over a plain one's"]
    assert host.value == pytest.approx(12 / 70)


@pytest.mark.parametrize(
    ("change", "target"),
    [
        ({"ours": 14.5}, "no bf16 cell slower than its fastest peer"),
        ({"peer": 12.0}, "fastest peer over ours, geometric mean of the latency cells"),
        ({"ours": 11.3}, "bf16 beyond the page-ordered read + 3 %"),
        ({"launches": 3}, "launches a call"),
    ],
)
def test_a_miss_says_by_how_much(change, target):
    """A cell on the wrong side of the limit is a miss, with its distance and its name."""
    verdict = judged(cell(**change) + cell(lengths="uneven"))[target]
    assert verdict.state == "missed" and verdict.missed_by > 0
    assert f"by {verdict.missed_by:.2f}" in str(verdict)


def test_the_fastest_of_all_peers_counts():
    """Another peer, or another variant of one, that is faster takes the peer's place."""
    name = "fastest peer over ours, geometric mean of the latency cells"
    faster = row("flashinfer", 9.0, "tensor cores, no graph padding")
    assert judged([*cell(), faster])[name].value == pytest.approx(0.9)
    slower = row("flashinfer", 20.0, "tensor cores")
    assert judged([*cell(), slower])[name].value == pytest.approx(1.4)


def test_the_latest_run_of_a_cell_counts():
    """A later run replaces a cell whole: ours and the peers' come from one run."""
    later = {"date_utc": "2026-12-01T00:00:00Z"}
    name = "fastest peer over ours, geometric mean of the latency cells"
    assert judged(cell() + cell(20.0, 22.0, **later))[name].value == pytest.approx(1.1)


def test_large_cells_are_held_against_the_reads_bandwidth(monkeypatch):
    """From 512 MB on, the share of the read's bandwidth counts."""
    monkeypatch.setattr(decode_targets, "grid", lambda *_: [(256, 65536, 8, 1, 128)])
    large = {"requests": 256, "context_tokens": 65536, "num_q_heads": 8}
    large |= {"bytes": 2 * 2 * 128 * 256 * 65536}
    name = "KV of 512 MB and more: share of the read's bandwidth"
    assert judged(cell(ours=7.2, **large))[name].state == "holds"
    assert judged(cell(ours=7.6, **large))[name].state == "missed"


def test_what_was_not_measured_never_holds(monkeypatch):
    """Without rows, or with a cell of the grid missing, a target does not hold."""
    monkeypatch.setattr(decode_targets, "grid", lambda *_: [*small_grid(), (1, 1024, 8, 1, 128)])
    found = judged(cell() + cell(lengths="uneven"))
    mean = found["fastest peer over ours, geometric mean of the latency cells"]
    assert mean.state == "not measured" and "1 cells not measured" in str(mean)
    for target in (
        "fp8 over FA3's fp8, 16x2048",
        "MLA over vLLM's Triton",
        "write_kv, step and prefill, over a copy",
    ):
        (verdict,) = (v for name, v in found.items() if name.startswith(target))
        assert (verdict.state, verdict.value) == ("not measured", None)


def test_fp8_is_held_against_fa3s_fp8():
    """fp8 rows are compared with FA3's of the same cache dtype, and not with bf16's."""
    fp8 = {"kv_dtype": "float8_e4m3fn"}
    name = "fp8 over FA3's fp8, 16x2048"
    assert judged(cell() + cell(8.0, 12.5, **fp8))[name].value == pytest.approx(1.5625)
    assert judged(cell() + cell(8.0, 11.0, **fp8))[name].state == "missed"


def test_mla_and_copies_are_judged():
    """MLA against its fastest peer and vLLM's Triton; writes and gathers against a copy."""
    mla = {"head_dim": 576, "page_size": 64}
    rows = [
        row("mla_paged_decode", 10.0, **mla),
        row("flashmla", 9.0, "auto", **mla),
        row("vllm_triton_decode", 16.0, "4 splits", **mla),
        row("write_kv", 2.1, "step"),
        row("copy", 2.0, "write_kv step"),
        row("write_kv", 12.0, "prefill"),
        row("copy", 10.0, "write_kv prefill"),
        row("gather_kv", 9.0, "per_page"),
        row("gather_kv", 90.0, "per_token"),
        row("copy", 8.0, "gather_kv per_page"),
    ]
    found = judged(cell() + rows)
    at_16 = next(v for name, v in found.items() if name.startswith("MLA at 16 heads"))
    assert (at_16.value, at_16.state) == (pytest.approx(0.9), "missed")
    triton = found["MLA over vLLM's Triton"]
    assert triton.value == pytest.approx(1.6) and triton.missing == 35
    # The worst of both forms, each beside its own copy.
    write = found["write_kv, step and prefill, over a copy of its bytes"]
    assert (write.value, write.state) == (pytest.approx(1.2), "missed")
    gather = found["gather_kv, per_page, over a copy of its bytes"]
    assert (gather.value, gather.missing) == (pytest.approx(1.125), 2)


def test_an_fp8_latent_cache_is_held_against_the_peer_that_takes_one():
    """fp8 MLA counts beside vLLM's Triton, and in no cell of the peers that know bf16 alone."""
    mla = {"head_dim": 576, "page_size": 64, "kv_dtype": "float8_e4m3fn"}
    rows = [row("mla_paged_decode", 10.0, **mla), row("vllm_triton_decode", 14.0, "x", **mla)]
    found = judged(cell() + rows)
    assert found["MLA over vLLM's Triton"].value == pytest.approx(1.4)
    at_16 = next(v for name, v in found.items() if name.startswith("MLA at 16 heads"))
    assert (at_16.value, at_16.missing) == (None, 9)


def test_copies_are_a_run_of_their_own():
    """A later run of a shape's copies leaves the attention of that shape in place."""
    later = {"date_utc": "2026-12-01T00:00:00Z"}
    copies = [row("write_kv", 2.0, "step", **later), row("copy", 2.0, "write_kv step", **later)]
    found = judged(cell() + copies)
    name = "fastest peer over ours, geometric mean of the latency cells"
    assert found[name].value == pytest.approx(1.4)
    assert found["write_kv, step and prefill, over a copy of its bytes"].value == 1.0


def test_a_wish_is_shown_and_not_counted():
    """A wish that is missed leaves the status 0."""
    kept = Verdict("kept", 1.0, 2.0)
    wish = Verdict("hoped for", 3.0, 2.0, wish=True)
    assert wish.state == "missed" and "(wish)" in str(wish)
    assert summary([kept, wish]) == ("1 of 1 targets hold, 0 are missed, 0 not measured", 0)
    assert summary([kept, Verdict("open", None, 2.0)])[1] == 1


def test_the_command_reads_a_table(tmp_path, capsys):
    """Status 1 for what is missed or open, also without a table; 2 for a broken one."""
    path = tmp_path / "decode_test.csv"
    assert decode_targets.gate(path) == 1
    assert "nothing measured yet" in capsys.readouterr().out
    record.write_rows(path, cell(), record.DECODE)
    assert decode_targets.gate(path) == 1
    first, *printed = capsys.readouterr().out.splitlines()
    rows = record.read_table(path, record.DECODE)
    day, commit = rows.date_utc.iloc[0][:10], rows.git_commit.iloc[0][:7]
    assert first == (
        f"decode_test.csv: {len(rows)} rows of {rows.gpu_count[0]} x {rows.gpu[0]}, "
        f"measured {day}, the last at commit {commit}"
    )
    assert any(line.startswith("holds         launches a call: 2.00 launches") for line in printed)
    assert "(wish): shown, not counted" in printed and "targets hold" in printed[-1]
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert decode_targets.gate(path) == 1
    assert "decode_test.csv: no rows" in capsys.readouterr().out
    path.write_text("op\nfa3\n")
    assert decode_targets.gate(path) == 2
    assert "has no column" in capsys.readouterr().err


def test_the_grid_fits_what_the_bench_makes(monkeypatch):
    """Every cell of the grid fits the memory that the bench takes, and the largest ones do not."""
    monkeypatch.undo()
    cells = decode_targets.grid()
    assert decode_targets.MAX_CELL_BYTES == MAX_KV_BYTES
    assert (256, 262144, 16, 1, 128) in cells and (256, 262144, 32, 32, 128) not in cells
    assert {cell[2:] for cell in cells} == set(decode_targets.HEADS)
    uneven = decode_targets.uneven_grid()
    assert {lengths for *_, lengths in uneven} == {"uneven", "one_long"}
    assert all(cell[0] > 1 and cell[:5] in cells for cell in uneven)
    assert len(uneven) == pytest.approx(len([c for c in cells if c[0] > 1]) / 3, abs=1)
    fp8 = decode_targets.fp8_grid()
    assert len(fp8) == len(set(fp8)) == pytest.approx(len(cells) / 3, abs=1)
    assert set(fp8) <= set(cells) and {cell[2:] for cell in fp8} == set(decode_targets.HEADS)
    assert {(16, 2048, 16, 1, 128), (64, 8192, 16, 1, 128)} <= set(fp8)
    assert len(set(decode_targets.mla_grid())) == 36
