"""The exchange kernels as NVIDIA's and AMD's compilers make them, on a machine without a GPU."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys

import pytest

# One line a build: the launch as a GPU would get it, its assembly read here.
BUILD = """
import json, sys
import torch
from dcp_lab.kernels.exchange import ExchangeConfig, Mailbox, launch_gather, launch_reduce
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ARCHS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64),
         "gfx950": GPUTarget("hip", "gfx950", 64)}
caught = []
launch = JITFunction.run


def compile_only(self, *args, grid, warmup, **kwargs):
    caught.append((self.__name__, grid, launch(self, *args, grid=grid, warmup=True, **kwargs)))


JITFunction.run = compile_only
for number, (name, target) in enumerate(ARCHS.items()):

    class AbsentDevice:
        def get_current_device(self):
            return number

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return target

    driver.set_active(AbsentDevice())
    for size, head_dim in ((2, 128), (8, 512)):
        rows = 64 * 2
        arch = target.backend
        mailbox = Mailbox.in_one_process(size, (rows * head_dim * 2, rows * 4), arch=arch)[1]
        out = torch.empty(64, 2 * size, head_dim, dtype=torch.bfloat16)
        for wait in (False, True) if arch == "cuda" and size == 2 else (False,):
            config = ExchangeConfig.from_payload(rows * head_dim * 2, 132)
            config = ExchangeConfig(config.tile_bytes, config.max_programs, wait)
            launch_reduce(mailbox, out=out, lse=torch.empty(64, 2 * size), config=config,
                          merged_out=torch.empty(64, 2, head_dim, dtype=torch.bfloat16),
                          merged_lse=torch.empty(64, 2))
            launch_gather(mailbox, q=out[:, :2], gathered=torch.empty_like(out), config=config)
            for kernel, grid, build in caught:
                asm = build.asm["ptx" if arch == "cuda" else "amdgcn"]
                case = dict(arch=name, kernel=kernel, size=size, head_dim=head_dim, wait=wait,
                            grid=grid, warps=build.metadata.num_warps, asm=asm, case="usual")
                print(json.dumps(case))
            caught.clear()

    if name == "gfx942":
        continue
    # Two ranks, few programs that loop: odd strides, odd head_dims, other dtypes, 64-bit offsets.
    for odd, dtype, gap in ((64, torch.float16, 1), (33, torch.bfloat16, 0),
                            (33, torch.float16, 3), (96, torch.float32, 0),
                            (64, torch.bfloat16, 2**28)):
        row = odd * dtype.itemsize
        mailbox = Mailbox.in_one_process(2, (64 * row, 64 * 4), arch=target.backend)[0]
        config = ExchangeConfig(tile_bytes=1024, max_programs=2)
        # Memory that is not touched is not taken.
        strides = (4 * odd + gap, odd, 1)
        out = torch.empty_strided((16, 4, odd), strides, dtype=dtype)
        strides = (4 * odd + gap, odd + gap % 2, 1)
        q = torch.empty_strided((16, 3, odd), strides, dtype=dtype)
        launch_reduce(mailbox, out=out, lse=torch.empty(16, 4), config=config,
                      merged_out=torch.empty(16, 2, odd, dtype=dtype),
                      merged_lse=torch.empty(16, 2))
        launch_gather(mailbox, q=q, gathered=torch.empty(16, 6, odd, dtype=dtype), config=config)
        for kernel, grid, build in caught:
            print(json.dumps(dict(arch=name, kernel=kernel, case=f"{dtype} d{odd} gap {gap}",
                                  grid=grid, warps=build.metadata.num_warps)))
        caught.clear()
"""


@functools.cache
def builds() -> list[dict[str, object]]:
    """Compile every case once, in a process whose Triton compiles."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(arch: str) -> list[dict[str, object]]:
    return [build for build in builds() if build["arch"] == arch and build["case"] == "usual"]


@pytest.mark.timeout(300)
def test_every_build_is_one_warp_a_program() -> None:
    """All three architectures build both kernels in every form, one warp or wave a program."""
    usual = [build for build in builds() if build["case"] == "usual"]
    assert len(usual) == 2 * (3 * 2 + 1) and len(builds()) == len(usual) + 2 * 5 * 2
    for build in builds():
        assert build["warps"] == 1
        assert 1 <= build["grid"][0] <= 8 * 132


@pytest.mark.timeout(300)
def test_nvidia_moves_vectors_and_never_fences() -> None:
    """PTX: stores and fresh loads as wide as a lane has; no fence, no release, no multicast."""
    for build in of("sm_90"):
        ptx = build["asm"]
        # A lane of 32 has 8 bytes of a row of 128 numbers, 32 of 512.
        reduces = build["kernel"] == "_direct_reduce_kernel"
        wide = "v4" if reduces and build["head_dim"] == 512 else "v2"
        assert f"st.global.{wide}.b32" in ptx
        # Volatile: in every turn of the wait anew, past L1.
        assert f"ld.volatile.global.{wide}.b32" in ptx
        assert "ld.volatile.global.b64" in ptx
        assert not re.search(r"multimem|fence\.|membar|\.release|\.acquire|trap;", ptx)
        # The whole warp takes one branch.
        assert "redux.sync.or.b32" in ptx and "globaltimer" in ptx
        assert len(re.findall(r"(?:atom|red)\.global\.gpu\.relaxed\.add\.u64", ptx)) == 1
        assert ("griddepcontrol.wait" in ptx) == build["wait"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_amd_writes_and_polls_through_the_caches(arch: str) -> None:
    """Assembly: what peers read is stored, and what they wrote is loaded, past every cache."""
    for build in of(arch):
        asm = build["asm"]
        wide = r"global_{}_dwordx[24] .* sc0 sc1"
        assert re.search(wide.format("store"), asm), "stores to peers"
        assert re.search(wide.format("load"), asm), "polls"
        # A release would write back a whole XCD's L2, an acquire throw it away.
        assert not re.search(r"buffer_wbl2|buffer_inv|s_trap", asm)
        assert "s_memrealtime" in asm
        for field in ("vgpr_spill_count", "private_segment_fixed_size"):
            assert re.search(rf"\.{field}:\s+0\b", asm), field
