"""The AMD build report: what it reads from assembly, and what it calls unfit."""

from __future__ import annotations

import dataclasses
import types

import pytest

from dcp_lab.bench import amd

ASSEMBLY = """
	global_load_dwordx4 v[0:3], v[8:9], off
	global_load_dwordx4 v[4:7], v[8:9], off
	buffer_load_dword v1, v2, s[0:3], 0 offen
	ds_read_b128 v[0:3], v4
	v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0
	v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0
    .agpr_count:     4
    .private_segment_fixed_size: 16
    .sgpr_count:     40
    .sgpr_spill_count: 1
    .vgpr_count:     100
    .vgpr_spill_count: 2
"""


def build(**changes) -> amd.Build:
    metadata = types.SimpleNamespace(num_warps=4, num_stages=2, shared=70000)
    compiled = types.SimpleNamespace(asm={"amdgcn": ASSEMBLY}, metadata=metadata)
    read = amd.read_build("gfx942", "_decode_kernel", "decode bfloat16", compiled)
    return dataclasses.replace(read, **changes)


def test_reads_assembly():
    """Registers, spills, scratch, LDS, MFMA and load widths are what the assembly says."""
    got = build()
    assert (got.vgprs, got.agprs, got.sgprs) == (100, 4, 40)
    assert (got.vgpr_spills, got.sgpr_spills, got.scratch_bytes) == (2, 1, 16)
    assert got.lds_bytes == 70000
    # 100 registers are allocated as 104: four waves share a SIMD's 512.
    assert got.waves_per_simd == 4
    assert got.mfma == "f32_16x16x32_bf16 x2"
    assert got.global_load_bits == "128 x2, 32 x1"
    assert got.lds_load_bits == "128 x1"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, "vgpr_spills = 2"),
        ({}, "sgpr_spills = 1"),
        ({}, "scratch_bytes = 16"),
        ({}, "lds_bytes = 70000, the chip has 65536"),
        ({"mfma": ""}, "no MFMA"),
        ({"global_load_bits": "32 x9"}, "expected 128 bits"),
        ({"global_load_bits": "128 x9, 32 x15, 16 x64"}, "expected 128 bits"),
        ({"global_load_bits": ""}, "expected 128 bits"),
    ],
)
def test_names_every_fault(changes, fault):
    """Each kind of unfitness is named with kernel and case."""
    found = build(**changes).faults()
    assert any(fault in text and "_decode_kernel (decode bfloat16)" in text for text in found)


def test_a_fit_build_has_no_fault():
    """Without spills and within the limits there is nothing to say; gfx950 has more LDS."""
    fit = {"vgpr_spills": 0, "sgpr_spills": 0, "scratch_bytes": 0}
    assert build(**fit, lds_bytes=65536).faults() == []
    assert build(**fit, arch="gfx950").faults() == []


def test_a_kernel_is_named_by_its_module():
    """Two modules may have a kernel of one name; what is asked of it goes by the name alone."""
    fit = {"vgpr_spills": 0, "sgpr_spills": 0, "scratch_bytes": 0, "lds_bytes": 0, "mfma": ""}
    assert "no MFMA" in build(**fit, kernel="decode._decode_kernel").faults()[0]
    assert build(**fit, kernel="decode._reduce_kernel").faults() == []


def test_the_device_that_was_active_is_given_back():
    """Building for an absent GPU leaves Triton's driver and its launches as they were."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    before = driver._active, JITFunction.run
    with pytest.raises(KeyError), amd._catching_launches("gfx950", []):
        assert driver.active.get_current_target().arch == "gfx950"
        raise KeyError
    assert (driver._active, JITFunction.run) == before
