"""Byte and time formulas against cases worked by hand, and where hardware figures come from."""

from __future__ import annotations

import pytest

from dcp_lab.analysis import tables
from dcp_lab.bench import costs, hardware

# Study 1, a rank of DCP 2: 16 requests of 2,500 tokens, half of them here; 1 KV head of 128; bf16.
STUDY1_TOKENS = 16 * 2500 // 2
STUDY1_KV = {"num_kv_heads": 1, "head_dim": 128}


def test_kv_bytes_by_hand():
    """3 tokens, 2 heads, 4-element keys and values of 2 bytes: 3 * 2 * (4 + 4) * 2 = 96."""
    assert costs.kv_bytes(3, num_kv_heads=2, head_dim=4, kv_itemsize=2) == 96


def test_kv_bytes_of_mla_counts_the_latent_once():
    """A value inside its key is not read again: 8,704 tokens * 576 elements * 1 byte."""
    read = costs.kv_bytes(8704, num_kv_heads=1, head_dim=576, head_dim_v=0, kv_itemsize=1)
    assert read == 8704 * 576 == 5_013_504


def test_decode_bytes_by_hand():
    """KV 96 bytes; q 2*4*4*2 = 64, out 64, LSE 2*4*4 = 32 bytes: 256 in all."""
    moved = costs.decode_bytes(
        3, query_tokens=2, num_q_heads=4, num_kv_heads=2, head_dim=4, itemsize=2
    )
    assert moved == 96 + 64 + 64 + 32


def test_decode_bytes_with_fp8_cache_and_short_values():
    """The cache and the query have their own item sizes, keys and values their own lengths."""
    moved = costs.decode_bytes(
        10,
        query_tokens=1,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=6,
        head_dim_v=2,
        itemsize=2,
        kv_itemsize=1,
    )
    assert moved == 10 * (6 + 2) + 2 * ((6 + 2) * 2 + 4)


@pytest.mark.parametrize(
    ("gbps", "floor_ms", "gather_ms"),
    [
        pytest.param(8000, 0.120, 0.241, id="8 TB/s"),
        pytest.param(6914, 0.139, 0.278, id="6.9 TB/s"),
        pytest.param(5600, 0.172, 0.344, id="5.6 TB/s"),
    ],
)
def test_study1_step_at_mean_context_2500(gbps, floor_ms, gather_ms):
    """10.24 MB of KV a layer, 94 layers: the step's read floor, and what a gather adds to it."""
    kv = costs.kv_bytes(STUDY1_TOKENS, kv_itemsize=2, **STUDY1_KV)
    extra = costs.gather_bytes(STUDY1_TOKENS, out_itemsize=2, **STUDY1_KV)
    assert kv == 10_240_000
    assert costs.step_ms(costs.floor_us(kv, gbps), 94) == pytest.approx(floor_ms, abs=5e-4)
    assert costs.step_ms(costs.floor_us(extra, gbps), 94) == pytest.approx(gather_ms, abs=5e-4)


def test_gather_bandwidth_that_would_explain_63_ms():
    """A gather explains 63 ms only at 30.6 GB/s, a 260th of the memory's peak."""
    step = 94 * costs.gather_bytes(STUDY1_TOKENS, out_itemsize=2, **STUDY1_KV)
    assert costs.gbps_needed(step, 63) == pytest.approx(30.6, abs=0.05)


def test_gather_bytes_of_an_fp8_cache_are_those_of_its_bf16_copy():
    """Study 2: 8,704 tokens, a 1,152-byte row of each written and read, 24 layers: 481 MB."""
    extra = costs.gather_bytes(8704, num_kv_heads=1, head_dim=576, head_dim_v=0, out_itemsize=2)
    assert extra == 8704 * (1152 + 1152)
    assert 24 * extra == pytest.approx(481e6, rel=1e-3)


def test_q_all_gather_bytes_by_hand():
    """16 tokens * 8 own heads * 128 * 2 bytes to the one peer: 32,768."""
    sent = costs.q_all_gather_bytes(16, num_q_heads=16, head_dim=128, itemsize=2, ranks=2)
    assert sent == 32_768


@pytest.mark.parametrize(
    ("query_tokens", "num_q_heads", "head_dim", "ranks", "sent"),
    [
        pytest.param(16, 16, 128, 2, 33_280, id="study 1: 16 * 8 * (256 + 4)"),
        pytest.param(8, 96, 512, 8, 690_816, id="study 2: 7 peers * 8 * 12 * (1024 + 4)"),
        pytest.param(16, 16, 128, 1, 0, id="one rank sends nothing"),
    ],
)
def test_a2a_bytes_by_hand(query_tokens, num_q_heads, head_dim, ranks, sent):
    """Each peer gets its heads' output rows and fp32 LSEs."""
    shape = {"num_q_heads": num_q_heads, "head_dim": head_dim, "itemsize": 2, "ranks": ranks}
    assert costs.a2a_bytes(query_tokens, **shape) == sent


@pytest.mark.parametrize(
    ("ranks", "sent"),
    [
        pytest.param(2, 16 * 16 * 4 + 16 * 8 * 256, id="2 ranks"),
        pytest.param(4, 3 * (16 * 16 * 4 + 16 * 4 * 256), id="4 ranks"),
    ],
)
def test_ag_rs_bytes_by_hand(ranks, sent):
    """All heads' LSE to every peer, then each peer's heads of the output."""
    shape = {"num_q_heads": 16, "head_dim": 128, "itemsize": 2, "ranks": ranks}
    assert costs.ag_rs_bytes(16, **shape) == sent


def test_floor_and_step_by_hand():
    """1 MB at 1,000 GB/s takes 1 us; 100 layers of 1 us take 0.1 ms."""
    assert costs.floor_us(1e6, 1000) == pytest.approx(1.0)
    assert costs.step_ms(1.0, 100) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        pytest.param(
            lambda: costs.kv_bytes(-1, kv_itemsize=2, **STUDY1_KV),
            r"tokens: expected a number >= 0, got -1",
            id="negative tokens",
        ),
        pytest.param(
            lambda: costs.kv_bytes(1, num_kv_heads=0, head_dim=1, kv_itemsize=2),
            r"num_kv_heads: expected a number > 0, got 0",
            id="no heads",
        ),
        pytest.param(
            lambda: costs.floor_us(1.0, float("nan")),
            r"gbps: expected a number > 0, got nan",
            id="nan bandwidth",
        ),
        pytest.param(
            lambda: costs.floor_us(1.0, "8000"),
            r"gbps: expected a number > 0, got '8000'",
            id="text",
        ),
        pytest.param(
            lambda: costs.a2a_bytes(1, num_q_heads=16, head_dim=1, itemsize=2, ranks=3),
            r"num_q_heads: expected a multiple of ranks=3, got 16",
            id="heads that do not divide",
        ),
    ],
)
def test_bad_arguments_are_named(call, match):
    """An error names the argument, what was expected and what came."""
    with pytest.raises(ValueError, match=match):
        call()


def test_every_figure_has_a_source_and_a_sane_value():
    """No number of an accelerator stands alone, and none beats the vendor's peak."""
    for accelerator in hardware.ACCELERATORS:
        peak = accelerator.figure("vendor")
        assert accelerator.fastest == peak
        assert accelerator.slowest.gbps < peak.gbps
        for figure in accelerator.memory:
            assert figure.source
            assert figure.kind in ("vendor", "published", "measured")
            assert 1000 < figure.gbps <= peak.gbps


def test_measured_h200_figures_are_those_of_the_probe_table():
    """The H200's measured bandwidths trace to rows: the best read pattern, and the copy."""
    probe = tables.measured_probe().set_index("pattern").gbps
    measured = {f.name: f.gbps for f in hardware.H200.memory if f.kind == "measured"}
    assert measured == {
        "read-only kernel, 4 GiB": round(probe.drop("copy").max()),
        "copy, read + write": round(probe["copy"]),
    }


def test_figure_reads_with_its_kind_and_source():
    """Printed, a figure still says what kind it is and where it is from."""
    assert str(hardware.MI355X.fastest) == (
        "HBM3E peak: 8,000 GB/s (vendor; AMD Instinct MI355X data sheet)"
    )


def test_a_kind_that_is_missing_is_refused():
    """Asking for a measured MI355X figure fails, and says what there is."""
    with pytest.raises(ValueError, match=r"expected one of \['published', 'vendor'\].*'measured'"):
        hardware.MI355X.figure("measured")
