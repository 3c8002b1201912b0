"""The decode measurement: its shapes, its correctness gate, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dcp_lab.bench import copies, decode_targets, mla, protocol, record, sweep, timing, workers
from dcp_lab.bench import decode as command
from dcp_lab.bench import gqa as bench
from dcp_lab.bench.protocol import Variant, check_variant, right_ones
from dcp_lab.kernels.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = bench.DecodeShape(3, 32, num_q_heads=4, num_kv_heads=2, head_dim=32)


def test_lengths_keep_the_total():
    """Uneven lengths and one long request among short ones have the even lengths' total."""
    for lengths, tolerance in (("uneven", 0.01), ("one_long", 0.0)):
        lens = bench.DecodeShape(16, 3000, lengths=lengths).seq_lens()
        assert sum(lens) == pytest.approx(16 * 3000, rel=tolerance) and len(lens) == 16
        assert max(lens) > 1.5 * min(lens)
    assert max(lens) // min(lens) == 16


@pytest.mark.parametrize("text", ["16", "16x", "16x2048x3", "0x5", "axb"])
def test_bad_shapes_are_refused(text):
    """A shape that is none names what was expected."""
    with pytest.raises(ValueError, match="shape: expected REQUESTSxTOKENS"):
        bench.parse_shape(text)


def test_shapes_are_read():
    """Short and long forms, and lengths behind a colon."""
    assert bench.parse_shape("16x2048") == bench.DecodeShape(16, 2048)
    assert bench.parse_shape("1x64x8x2x80:uneven") == bench.DecodeShape(
        1, 64, 8, 2, 80, lengths="uneven"
    )
    with pytest.raises(ValueError, match="lengths: expected 'equal'"):
        bench.parse_shape("2x64:odd")
    fp8 = bench.DecodeShape(16, 2048, lengths="uneven", fp8=True)
    assert command.parse_cell("16x2048:fp8:uneven") == command.parse_cell("16x2048:uneven:fp8")
    assert command.parse_cell("16x2048:fp8:uneven") == fp8
    assert command.parse_cell("mla:16x8192") == mla.MlaShape(16, 8192)
    assert command.parse_cell("mla:1x64x128:fp8") == mla.MlaShape(1, 64, 128, fp8=True)
    cell = command.parse_cell("copies:16x2048x64x8x128")
    assert cell == copies.CopyShape(16, 2048, 64, 8, 128) and isinstance(cell, copies.CopyShape)
    for text in ("mla:16x8192x16x1", "mla:16", "copies:16x2048:fp8", "16x64:fp8:fp8"):
        with pytest.raises(ValueError, match="shape: expected"):
            command.parse_cell(text)


def test_every_attention_is_checked_before_it_is_timed():
    """Paged, gathered and contiguous attention pass the gate on the inputs that would be timed."""
    x = bench.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    variants = [bench.paged_variant(x), bench.bound_variant(x), *bench.sdpa_variants(x)]
    variants += [bench.gather_variant(x, g) for g in bench.GATHERS]
    for variant in variants:
        errors = check_variant(x, variant)
        assert 0 <= errors.out_error <= errors.error_budget
        assert (errors.lse_error is None) == (not variant.has_lse)


@pytest.mark.parametrize("broken", ["out", "lse", "nothing written"])
def test_a_wrong_result_is_not_timed(broken):
    """A variant whose out or LSE is off, or was never written, is refused by name."""
    x = bench.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    right = bench.paged_variant(x)

    def call(layer: int) -> None:
        if broken == "nothing written":
            return
        right.call(layer)
        x.out[layer] *= 1.01 if broken == "out" else 1
        # The factor between a base-2 and a natural logarithm: the fault this gate is there for.
        x.lse[layer] *= 1.442695 if broken == "lse" else 1

    with pytest.raises(RuntimeError, match="not timed.*broken planned"):
        check_variant(x, Variant("broken", "planned", call))


def replay_of(x: bench.Layers, variant: Variant):
    """Return what stands for a graph's replay: the variant's calls, one layer after the other."""
    return lambda: [variant.call(layer) for layer in range(x.layers)]


def test_replays_are_checked_too():
    """A replay that writes every layer rightly passes, with the errors of an eager call."""
    x = bench.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    right = bench.paged_variant(x)
    errors = check_variant(x, right, replay_of(x, right))
    assert errors == check_variant(x, right)


@pytest.mark.parametrize("broken", ["nothing", "one layer", "one row", "other inputs", "lse"])
def test_a_wrong_replay_is_not_timed(broken):
    """A graph that replays nothing, not all, or other inputs than the eager call is refused."""
    x = bench.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    right = bench.paged_variant(x)
    check_variant(x, right)
    queries = x.q.clone()

    def replay() -> None:
        if broken == "nothing":
            return
        if broken == "other inputs":
            x.q.normal_()
        replay_of(x, right)()
        x.q.copy_(queries)
        if broken == "one layer":
            x.out[1:].fill_(torch.nan)
        if broken == "one row":
            # A request between the first and the last, which are compared with float64.
            x.out[0, 1, 0] = torch.nan
        if broken == "lse":
            x.lse.fill_(torch.nan)

    with pytest.raises(RuntimeError, match="not timed.*paged_decode planned.*replayed"):
        check_variant(x, right, replay)


def test_a_peers_own_lse_is_emptied_before_a_replay():
    """What an earlier eager call left in a peer's own LSE does not pass for the replay's."""
    x = bench.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    ours, kept = bench.paged_variant(x), torch.zeros_like(x.lse)

    def call(layer: int) -> None:
        ours.call(layer)
        kept[layer] = x.lse[layer]

    peer = Variant("peer", "own lse", call, lse=lambda layer: kept[layer])
    check_variant(x, peer, replay_of(x, peer))
    with pytest.raises(RuntimeError, match="not timed"):
        check_variant(x, peer, replay_of(x, ours))


def test_a_peer_whose_replay_is_wrong_is_left_out(capsys, monkeypatch):
    """A peer that is right eagerly and wrong in its graph has no row; ours would end the run."""
    x = bench.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    ours = bench.paged_variant(x)
    peer = Variant("fa3", "auto", ours.call, peer=True)
    replays = {"paged_decode planned": replay_of(x, ours), "fa3 auto": lambda: None}
    assert right_ones(x, [ours, peer]) == [ours, peer]
    assert right_ones(x, [ours, peer], replays) == [ours]
    assert "peer fa3 auto: left out: not timed" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="not timed"):
        right_ones(x, [ours], {"paged_decode planned": lambda: None})


def test_l2_is_cold_only_where_the_bytes_say_so():
    """The label follows the bytes that a replay touches, not the layers that were asked for."""
    x = bench.make_layers(TINY, dtype=torch.float32, device="cpu")
    assert x.layers * x.kv_bytes < protocol.MIN_COLD_BYTES and x.l2 == "warm"
    x.layers = int(protocol.cold_bytes() / x.kv_bytes) + 1
    assert x.l2 == "cold"


def test_what_cannot_be_measured_is_said(capsys, monkeypatch, tmp_path):
    """Unsupported shapes, and rows that nobody could keep, give status 2 without a traceback."""
    monkeypatch.setattr(command, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    source = {"gpu": "NVIDIA H200", "git_commit": "unknown"}
    monkeypatch.setattr(record, "provenance", lambda: source)
    assert command.main(["--shape", "2x64"]) == 2
    assert "expected a git commit for the rows, got 'unknown'" in capsys.readouterr().err

    def refuse(shape, **_):
        raise ValueError("head_dim: expected a multiple of 16")

    source["git_commit"] = "0" * 40
    monkeypatch.setattr(command, "measure_shape", refuse)
    assert command.main(["--shape", "2x64", "--out", str(tmp_path / "decode_x.csv")]) == 2
    assert "head_dim: expected a multiple of 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "count", "name"),
    [
        ("NVIDIA H200", 1, "h200"),
        ("NVIDIA H200", 2, "h200x2"),
        ("AMD Instinct MI355X", 1, "mi355x"),
        ("NVIDIA H100 80GB HBM3", 1, "h100_80gb_hbm3"),
    ],
)
def test_tables_are_named_by_their_gpu(gpu, count, name):
    """Rows of one machine never land in another one's table by default."""
    assert record.machine_name(gpu, count) == name


def test_a_sweep_reads_shapes_alike(capsys):
    """The sweep takes what the bench takes, and refuses the rest with status 2."""
    with pytest.raises(SystemExit) as stopped:
        sweep.main(["--shape", "16x"])
    assert stopped.value.code == 2
    assert "shape: expected REQUESTSxTOKENS" in capsys.readouterr().err


@pytest.mark.parametrize("tile", ["64x4", "64x4x0", "axbxc"])
def test_a_sweep_refuses_a_tile_that_is_none(tile, capsys):
    """It says what a tile is, with status 2."""
    with pytest.raises(SystemExit) as stopped:
        sweep.main(["--tile", tile])
    assert stopped.value.code == 2
    assert f"tile: expected TOKENSxWARPSxSTAGES, got {tile!r}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1x1024", "16x2048:uneven", "mla:64x1024"])
def test_a_sweep_times_what_it_was_asked_for(text):
    """Each tile, slots and reduce is one config, with and without overlap, by its own name."""
    shape = sweep.parse_any(text)
    found = sweep.configs(shape, [(64, 4, 3)], (1, 2))
    assert len(found) == len({*found.values()}) == (12 if shape.requests == 1 else 4)
    assert {(c.block_n, c.num_warps, c.num_stages) for c in found.values()} == {(64, 4, 3)}
    assert {c.slots_per_sm for c in found.values()} == {1, 2}
    assert len(sweep.configs(shape)) == len(sweep.tiles_of(shape)) * 2 * len(found)


def _build(folder, name):
    """Leave a file, or fail."""
    if name == "fails":
        raise RuntimeError("said where it is timed")
    print("unseen")
    (folder / name).touch()


def test_kernels_are_compiled_side_by_side(tmp_path, capfd):
    """Each item is built in another process; one that fails ends neither the rest nor the run."""
    work = [(tmp_path, name) for name in ("a", "fails", "b")]
    assert workers.compile_side_by_side(_build, work, 2) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    assert "unseen" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("cell", "op"),
    [
        (bench.DecodeShape(2, 40, num_q_heads=2, num_kv_heads=1, head_dim=16), "_decode_kernel"),
        (mla.MlaShape(1, 40, num_q_heads=2), "_mla_decode_kernel"),
    ],
)
def test_a_cell_is_compiled_on_one_layer(cell, op, monkeypatch):
    """Before a run with workers each variant of a cell is called, on one layer."""
    if torch.cuda.is_available():
        pytest.skip("counts the interpreter's launches")
    layers, launched = [], set()
    for module in (bench, mla):
        make = module.make_layers

        def on_cpu(*args, make=make, **options):
            layers.append(options["layers"])
            return make(*args, **{**options, "dtype": torch.float32}, device="cpu")

        monkeypatch.setattr(module, "make_layers", on_cpu)
    run = Launch.run
    monkeypatch.setattr(
        Launch, "run", lambda launch: launched.add(launch.kernel.__name__) or run(launch)
    )
    command.compile_cell(cell, peers=True)
    assert layers == [1] and {op, "_plan_kernel"} <= launched


def test_needs_a_gpu(capsys, monkeypatch):
    """Without a GPU the command says so and measures nothing; a dry run shows the grid."""
    monkeypatch.setattr(command, "INTERPRETED", True)
    assert command.main([]) == 2
    assert "expected a GPU" in capsys.readouterr().err
    assert command.main(["--dry-run", "--shape", "16x2048"]) == 0
    assert capsys.readouterr().out.strip() == "16x2048 16q/1kv d128"
    assert command.main(["--shape", "nonsense"]) == 2
    assert command.main(["--samples", "1"]) == 2
    assert command.main(["--grid", "--shape", "16x2048"]) == 2
    capsys.readouterr()
    assert command.main(["--grid", "--dry-run"]) == 0
    cells = capsys.readouterr().out.splitlines()
    grids = (decode_targets.grid, decode_targets.uneven_grid, decode_targets.fp8_grid)
    due = sum(len(grid()) for grid in (*grids, decode_targets.mla_grid))
    assert len(cells) == due + len(decode_targets.COPIES)
    assert len(set(cells)) == len(cells)


def test_percentiles():
    """Median, p10 and p90 of what was sampled."""
    assert timing.percentiles([float(n) for n in range(11)]) == (5.0, 1.0, 9.0)
    assert timing.percentiles([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_measures_on_a_gpu(tmp_path):
    """A small measurement leaves rows that keep the schema."""
    rows = bench.measure_shape(bench.DecodeShape(2, 256), samples=5)
    source = record.provenance()
    path = tmp_path / "decode.csv"
    assert record.write_rows(path, [{**source, **r} for r in rows], record.DECODE) == len(rows)
    planned = next(r for r in rows if r["op"] == "paged_decode")
    assert planned["launches"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "-1"], "--workers: expected at least 0, got -1"),
        (["--samples", "0"], "--samples: expected at least 1, got 0"),
        (["--slots", "2", "--slots", "0"], "--slots: expected at least 1, got 0"),
        (["--tile", "48x4x3"], "tile: expected powers of two, at least 16 tokens"),
        (["--tile", "8x4x3"], "tile: expected powers of two, at least 16 tokens"),
        (["--tile", "64x3x3"], "tile: expected powers of two, at least 16 tokens"),
        (["--tile", "6²x4x3"], "tile: expected TOKENSxWARPSxSTAGES"),
        (["--shape", "²x64"], "shape: expected REQUESTSxTOKENS"),
        (["--out", "."], "--out: expected a file that can be written, got . (Is a directory)"),
        ([], "expected a GPU, found none"),
    ],
)
def test_a_sweep_starts_with_nothing_that_it_cannot_do(arguments, message, capsys, monkeypatch):
    """It is said at once, with status 2."""
    monkeypatch.setattr(sweep, "INTERPRETED", True)
    with pytest.raises(SystemExit) as stopped:
        sweep.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_sweep_says_what_it_takes_without_a_gpu():
    """As a module of its own it is loaded before any other of the lab."""
    command_line = [sys.executable, "-m", "dcp_lab.bench.sweep", "--help"]
    # Where the lab finds no GPU, and has not set this itself.
    alone = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    alone["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command_line, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--tile" in done.stdout, done.stderr


@pytest.mark.parametrize("place", ["folder", "file/decode.csv", "other.csv"])
def test_a_table_that_takes_no_rows_is_told_before_anything_is_measured(
    place, tmp_path, capsys, monkeypatch
):
    """Else what a GPU had measured by then would be lost."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "other.csv").write_text("gpu,half a li")
    source = {"git_commit": "0" * 40, "gpu": "NVIDIA H200"}
    monkeypatch.setattr(command, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "provenance", lambda: source)
    for name in ("measure_cell", "compile_side_by_side"):
        monkeypatch.setattr(command, name, lambda *_, **__: pytest.fail("started"))
    out = tmp_path / place
    assert command.main(["--shape", "2x64", "--workers", "2", "--out", str(out)]) == 2
    assert "--out: expected a table that" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "other.csv"]
    assert command.main(["--workers", "-1"]) == 2
    assert "--workers: expected at least 0, got -1" in capsys.readouterr().err
