"""The decode measurement: its shapes, its correctness gate, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from dcp_lab.bench import decode as bench
from dcp_lab.bench import record, timing

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


def test_every_attention_is_checked_before_it_is_timed():
    """Paged, gathered and contiguous attention pass the gate on the inputs that would be timed."""
    x = bench.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    variants = [bench.paged_variant(x), bench.sdpa_variant(x)]
    variants += [bench.gather_variant(x, g) for g in ("per_token", "per_page")]
    for variant in variants:
        errors = bench.check_variant(x, variant)
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
        bench.check_variant(x, bench.Variant("broken", "planned", call))


def test_rows_without_a_check_are_refused(tmp_path):
    """The table takes no attention time without its error."""
    row = {**record.provenance(), "op": "paged_decode", "variant": "x", "median_us": 1.0}
    with pytest.raises(ValueError):
        record.write_rows(tmp_path / "decode.csv", [row], record.DECODE)


def test_needs_a_gpu(capsys, monkeypatch):
    """Without a GPU the command says so and measures nothing; a dry run shows the grid."""
    monkeypatch.setattr(bench, "INTERPRETED", True)
    assert bench.main([]) == 2
    assert "expected a GPU" in capsys.readouterr().err
    assert bench.main(["--dry-run", "--shape", "16x2048"]) == 0
    assert capsys.readouterr().out.strip() == "16x2048 16q/1kv d128"
    assert bench.main(["--shape", "nonsense"]) == 2
    assert bench.main(["--samples", "1"]) == 2


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
