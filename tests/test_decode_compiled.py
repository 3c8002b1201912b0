"""The decode kernels in the configs that NVIDIA GPUs get, built on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# One line a build: what was asked for, and the shared memory that a program takes.
BUILD = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from dcp_lab.ops.decode import paged_decode
from dcp_lab.ops.device import Device, planning_for
from dcp_lab.ops.mla import mla_paged_decode
from dcp_lab.ops.workspace import DecodeWorkspace

caught = []
launch = JITFunction.run


def compile_only(self, *args, grid, warmup, **kwargs):
    caught.append((self.__name__, launch(self, *args, grid=grid, warmup=True, **kwargs)))


JITFunction.run = compile_only
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
GPUS = {89: Device("cuda", 58, shared_bytes=99 << 10),
        90: Device("cuda", 132, dependent_launch=True, shared_bytes=227 << 10)}
GQA = [(64, 8192, BF16), (256, 1024, BF16), (16, 2048, BF16), (16, 2048, FP8), (64, 8192, FP8)]
MLA = [(64, 1024, 16, BF16), (16, 1024, 16, BF16), (64, 1024, 16, FP8), (16, 8192, 128, BF16)]

for capability, facts in GPUS.items():

    class AbsentDevice:
        def get_current_device(self):
            return capability

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

    driver.set_active(AbsentDevice())
    with planning_for(facts):
        for requests, tokens, dtype in GQA:
            q = torch.empty(requests, 16, 128, dtype=BF16)
            k, v = torch.empty(2, 4, 16, 1, 128, dtype=dtype)
            table = torch.empty(requests, tokens // 16, dtype=torch.int32)
            lens = torch.empty(requests, dtype=torch.int32)
            paged_decode(q, k, v, table, lens)
            caught.append(("case", f"{requests}x{tokens} {dtype}"))
        for requests, tokens, heads, dtype in MLA:
            q = torch.empty(requests, heads, 576, dtype=BF16)
            table = torch.empty(requests, tokens // 64, dtype=torch.int32)
            lens = torch.empty(requests, dtype=torch.int32)
            mla_paged_decode(q, torch.empty(4, 64, 576, dtype=dtype), table, lens,
                             softmax_scale=0.1, kv_lora_rank=512)
            caught.append(("case", f"MLA {requests}x{tokens} {heads} heads {dtype}"))
    builds = []
    for kernel, found in caught:
        if kernel == "case":
            for name, build in builds:
                line = dict(capability=capability, case=found, kernel=name,
                            shared=build.metadata.shared, limit=facts.shared_bytes)
                print(json.dumps(line))
            builds = []
        else:
            builds.append((kernel, found))
    caught.clear()
"""


@pytest.fixture(scope="module")
def builds() -> list[dict[str, object]]:
    """Every build; in a process of its own, since this one interprets."""
    run = subprocess.run(
        [sys.executable, "-c", BUILD],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("capability", [89, 90])
def test_every_config_fits_its_gpu(builds, capability) -> None:
    """No program takes more shared memory than GPUs of this kind have."""
    of_kind = [build for build in builds if build["capability"] == capability]
    kernels = {build["kernel"] for build in of_kind}
    assert {"_decode_kernel", "_mla_decode_kernel", "_reduce_kernel"} <= kernels
    assert [build for build in of_kind if build["shared"] > build["limit"]] == []


def test_two_programs_fit_where_one_starts_early(builds) -> None:
    """Where a program may start early there is room for two and for no third, of 228 KB."""
    for case in ("64x8192 torch.bfloat16", "256x1024 torch.bfloat16"):
        shared = max(b["shared"] for b in builds if b["case"] == case and b["capability"] == 90)
        assert 2 * shared <= 228 << 10 < 3 * shared
