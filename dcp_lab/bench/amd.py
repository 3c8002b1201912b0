"""Build every kernel for AMD GPUs without one, and say what the code uses.

    dcp-lab amd-report [--check] [--out FILE]

The public ops run with the launches caught: each kernel is compiled for gfx942 (MI300X) and gfx950
(MI355X) with the arguments, launch config and specialisation that the op would launch there, and
its assembly is read: registers, spills, scratch, LDS, matrix instructions (MFMA), and how wide
the loads are. Nothing is run, so this proves that the code builds and fits, not that it is right
or fast.

--check fails on any spill or scratch use, on LDS beyond the chip's limit, on a decode kernel
without MFMA or without 16-byte loads, and when the committed table (data/compiled/amd_kernels.csv)
says something else under the same Triton version.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# LDS a workgroup may use: CDNA3 64 KB, CDNA4 160 KB (AMD CDNA3 and CDNA4 instruction set guides).
LDS_LIMIT = {"gfx942": 65536, "gfx950": 163840}
# Compute units: MI300X 304, MI355X 256 (AMD data sheets).
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}
# Registers of a SIMD lane that waves share (same guides): 512, allocated in steps of 8.
SIMD_VGPRS = 512
MAX_WAVES = 8
DEFAULT_OUT = Path(__file__).resolve().parents[2] / "data" / "compiled" / "amd_kernels.csv"


@dataclasses.dataclass(frozen=True)
class Build:
    """What one kernel uses on one architecture.

    Attributes:
        arch, kernel, case: What was built; kernel is module.function, as in decode._reduce_kernel,
            and case is the call that launches it.
        num_warps, num_stages: Of the launch.
        vgprs, agprs, sgprs: Registers; waves_per_simd follows from vgprs + agprs.
        vgpr_spills, sgpr_spills, scratch_bytes: All 0 in a kernel that fits.
        lds_bytes: Of a workgroup.
        mfma: Matrix instructions by kind, e.g. 'f32_16x16x16_bf16 x40'.
        global_load_bits: Widths of loads from memory, e.g. '128 x17, 32 x4'.
        lds_load_bits: The same of loads from LDS.
    """

    arch: str
    kernel: str
    case: str
    triton: str
    num_warps: int
    num_stages: int
    vgprs: int
    agprs: int
    sgprs: int
    waves_per_simd: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    mfma: str
    global_load_bits: str
    lds_load_bits: str

    def faults(self) -> list[str]:
        """Return what makes this build unfit, in words."""
        found = []
        for name in ("vgpr_spills", "sgpr_spills", "scratch_bytes"):
            if getattr(self, name):
                found.append(f"{name} = {getattr(self, name)}, expected 0")
        if self.lds_bytes > LDS_LIMIT[self.arch]:
            found.append(f"lds_bytes = {self.lds_bytes}, the chip has {LDS_LIMIT[self.arch]}")
        name = self.kernel.rpartition(".")[2]
        if name in ("_decode_kernel", "_mla_decode_kernel", "_varlen_kernel"):
            # fp32 has no wide MFMA: its dots may become plain FMAs.
            if "float32" not in self.case and not self.mfma:
                found.append("no MFMA, expected matrix instructions in both products")
            widths = {int(part.split()[0]) for part in self.global_load_bits.split(", ") if part}
            # Narrower ones than a register are K or V element by element.
            if 128 not in widths or min(widths) < 32:
                found.append(f"loads of {self.global_load_bits}, expected 128 bits for K and V")
        return [f"{self.arch} {self.kernel} ({self.case}): {fault}" for fault in found]


def _number(assembly: str, field: str) -> int:
    found = re.search(rf"\.{field}:\s+(\d+)", assembly)
    return int(found.group(1)) if found else 0


def _counts(names: list[str]) -> str:
    """Return 'a x2, b x1', the widest or largest first."""
    order = sorted(set(names), key=lambda name: (-int(re.sub(r"\D.*", "", name) or 0), name))
    return ", ".join(f"{name} x{names.count(name)}" for name in order)


def _load_bits(assembly: str, prefix: str) -> str:
    widths = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "ushort": 16, "ubyte": 8}
    widths |= {"short_d16": 16, "short_d16_hi": 16, "b128": 128, "b96": 96, "b64": 64, "b32": 32}
    widths |= {"u16": 16, "u8": 8, "u16_d16": 16, "u16_d16_hi": 16, "b64_tr_b16": 64}
    found = re.findall(rf"^\s+{prefix}_(\w+)\s", assembly, flags=re.MULTILINE)
    return _counts([str(widths.get(kind, kind)) for kind in found])


def read_build(arch: str, kernel: str, case: str, compiled: object) -> Build:
    """Return what a compiled kernel's assembly says about it."""
    import triton

    assembly = compiled.asm["amdgcn"]
    vgprs, agprs = _number(assembly, "vgpr_count"), _number(assembly, "agpr_count")
    # On CDNA3 and CDNA4 vgpr_count holds the accumulation registers too.
    waves = min(MAX_WAVES, SIMD_VGPRS // max(8, -(-vgprs // 8) * 8))
    return Build(
        arch=arch,
        kernel=kernel,
        case=case,
        triton=triton.__version__,
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        vgprs=vgprs,
        agprs=agprs,
        sgprs=_number(assembly, "sgpr_count"),
        waves_per_simd=waves,
        vgpr_spills=_number(assembly, "vgpr_spill_count"),
        sgpr_spills=_number(assembly, "sgpr_spill_count"),
        scratch_bytes=_number(assembly, "private_segment_fixed_size"),
        lds_bytes=compiled.metadata.shared,
        mfma=_counts(re.findall(r"v_mfma_(\w+)", assembly)),
        global_load_bits=_load_bits(assembly, "(?:global|buffer)_load"),
        lds_load_bits=_load_bits(assembly, "ds_read"),
    )


@contextlib.contextmanager
def _catching_launches(arch: str, caught: list[tuple[str, object]]) -> Iterator[None]:
    """Compile for an architecture instead of launching; keep (kernel name, compiled kernel)."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class AbsentDevice:
        """The part of a Triton driver that compiling needs."""

        def get_current_device(self) -> int:
            # Triton caches kernels by this number: one an architecture.
            return list(LDS_LIMIT).index(arch)

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("hip", arch, 64)

    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        module = self.fn.__module__.rpartition(".")[2]
        caught.append((f"{module}.{self.__name__}", compiled))
        return compiled

    # Not driver.active, which fails where there is no GPU.
    before = driver._active
    driver.set_active(AbsentDevice())
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch
        driver.set_active(before)


def cases(arch: str) -> dict[str, Callable[[], object]]:
    """Return calls that between them launch every kernel in every config that AMD would use.

    The fp8 of gfx942 is e4m3fnuz, that of gfx950 e4m3fn.
    """
    import torch

    from dcp_lab.kernels import exchange as direct
    from dcp_lab.kernels import merge
    from dcp_lab.kernels.probe import _read_pages_kernel
    from dcp_lab.ops.decode import paged_decode
    from dcp_lab.ops.gather import gather_decode, gather_kv
    from dcp_lab.ops.kv_write import write_kv
    from dcp_lab.ops.merge import merge_states
    from dcp_lab.ops.mla import mla_paged_decode, write_mla_kv

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

    def inputs(requests, tokens, q_heads, kv_heads, dim, dtype, page=16, queries=1):
        return (
            torch.empty(requests * queries, q_heads, dim, dtype=dtype),
            torch.empty(4, page, kv_heads, dim, dtype=dtype),
            torch.empty(4, page, kv_heads, dim, dtype=dtype),
            torch.empty(requests, -(-tokens // page), dtype=torch.int32),
            torch.empty(requests, dtype=torch.int32),
        )

    found: dict[str, Callable[[], object]] = {}
    shapes = [
        (1, 8192, 16, 1, 128),
        (1, 65536, 16, 1, 128),
        (16, 1024, 8, 1, 128),
        (16, 8192, 16, 1, 128),
        (64, 8192, 64, 8, 128),
        (256, 1024, 16, 1, 128),
        (1024, 1024, 8, 1, 128),
        (16, 2048, 32, 32, 128),
        (16, 2048, 32, 4, 64),
        (4, 2048, 8, 2, 80),
        (4, 2048, 8, 1, 256),
    ]
    for shape in shapes:
        for dtype in (bf16, fp16, fp32):
            if dtype != bf16 and shape != (16, 8192, 16, 1, 128):
                continue
            name = "{}x{} {}q/{}kv d{}".format(*shape) + f" {str(dtype).removeprefix('torch.')}"
            found[f"decode {name}"] = lambda s=shape, d=dtype: paged_decode(*inputs(*s, d))
            for gather, attend in (("per_token", "prefill"), ("per_page", "split")):
                found[f"gather_decode {gather} {attend} {name}"] = (
                    lambda s=shape, d=dtype, g=gather, a=attend: gather_decode(
                        *inputs(*s, d), gather=g, attend=a
                    )
                )
    shape = (16, 8192, 16, 1, 128)
    found["decode 1 split bfloat16"] = lambda: paged_decode(*inputs(*shape, bf16), num_splits=1)
    found["decode 8 splits bfloat16"] = lambda: paged_decode(*inputs(*shape, bf16), num_splits=8)
    start = torch.arange(17, dtype=torch.int32) * 4
    found["decode 4 query tokens bfloat16"] = lambda: paged_decode(
        *inputs(*shape, bf16, queries=4), query_start_loc=start, max_query_len=4
    )
    found["decode window softcap sinks bfloat16"] = lambda: paged_decode(
        *inputs(*shape, bf16), sliding_window=128, softcap=30.0, sinks=torch.empty(16)
    )

    found["gather_decode published bfloat16"] = lambda: gather_decode(
        *inputs(*shape, bf16), gather="published"
    )
    for attend in ("prefill", "split"):
        found[f"gather_decode {attend} 4 query tokens bfloat16"] = lambda a=attend: gather_decode(
            *inputs(*shape, bf16, queries=4), query_start_loc=start, max_query_len=4, attend=a
        )
        found[f"gather_decode {attend} window softcap sinks bfloat16"] = lambda a=attend: (
            gather_decode(
                *inputs(*shape, bf16),
                sliding_window=128,
                softcap=30.0,
                sinks=torch.empty(16),
                attend=a,
            )
        )

    own_fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn

    def caches(dtype: torch.dtype, layout: str) -> dict[str, object]:
        """Return one KV head of 128 dims in pages of 16."""
        x = 16 // dtype.itemsize
        shapes = {
            "NHD": ((4, 16, 1, 128), (4, 16, 1, 128)),
            "SHUFFLE": ((4, 1, 128 // x, 16, x), (4, 1, 16 // x, 128, x)),
        }[layout]
        k_cache, v_cache = (torch.empty(s, dtype=dtype) for s in shapes)
        scales = {}
        if dtype == own_fp8:
            scales = {"k_scale": 0.5, "v_scale": torch.empty(1)}
        return {"k_cache": k_cache, "v_cache": v_cache, "kv_layout": layout, **scales}

    def write(dtype: torch.dtype, layout: str) -> None:
        rows = torch.empty(16, 1, 128, dtype=bf16)
        slots = torch.empty(16, dtype=torch.int64)
        write_kv(rows, rows, slot_mapping=slots, **caches(dtype, layout))

    def gather(dtype: torch.dtype, layout: str, how: str) -> None:
        table, lens = inputs(*shape, bf16)[3:]
        gather_kv(block_table=table, seq_lens=lens, gather=how, **caches(dtype, layout))

    def decode(dtype: torch.dtype, layout: str, queries: int = 1, **options: object) -> None:
        q, _, _, table, lens = inputs(*shape, bf16, queries=queries)
        options |= {"block_table": table, "seq_lens": lens, **caches(dtype, layout)}
        paged_decode(q, **options)

    for dtype in (bf16, own_fp8):
        for layout in ("NHD", "SHUFFLE"):
            name = f"{layout} {str(dtype).removeprefix('torch.')}"
            found[f"write_kv {name}"] = lambda d=dtype, x=layout: write(d, x)
            for how in ("per_token", "per_page"):
                found[f"gather_kv {how} {name}"] = lambda d=dtype, x=layout, g=how: gather(d, x, g)
            # NHD bf16 is above.
            if dtype == own_fp8 or layout == "SHUFFLE":
                found[f"decode {name}"] = lambda d=dtype, x=layout: decode(d, x)
                found[f"decode 4 query tokens {name}"] = lambda d=dtype, x=layout: decode(
                    d, x, queries=4, query_start_loc=start, max_query_len=4
                )

    def read_pages() -> None:
        _read_pages_kernel[(4,)](
            source_ptr=torch.empty(4, 2048, dtype=torch.int32),
            table_ptr=torch.empty(4, dtype=torch.int32),
            sink_ptr=torch.empty(4, dtype=torch.int32),
            stride_page=2048,
            BLOCK=2048,
            STEPS=1,
        )

    found["read_pages of 16 tokens, 1 KV head of 128 bfloat16"] = read_pages

    def mla(heads: int, dtype: torch.dtype, kv_dtype: torch.dtype, queries: int = 1, **options):
        q = torch.empty(16 * queries, heads, 576, dtype=dtype)
        kv_cache = torch.empty(4, 16, 576).to(kv_dtype)
        table, lens = inputs(*shape, dtype)[3:]
        mla_paged_decode(q, kv_cache, table, lens, softmax_scale=0.1, **options)

    fp8, fnuz = torch.float8_e4m3fn, torch.float8_e4m3fnuz
    for heads in (16, 128):
        for dtype, kv_dtype in ((bf16, bf16), (bf16, fp8), (bf16, fnuz), (fp32, fp32)):
            name = f"16x8192 {heads}q {str(kv_dtype).removeprefix('torch.')}"
            found[f"mla {name}"] = lambda h=heads, d=dtype, k=kv_dtype: mla(h, d, k)
    found["mla 16q 4 query tokens bfloat16"] = lambda: mla(
        16, bf16, bf16, queries=4, query_start_loc=start, max_query_len=4
    )
    found["mla 16q 1 split float16"] = lambda: mla(16, fp16, fp16, num_splits=1)
    for kv_dtype in (bf16, fp8, fnuz):
        found[f"write_mla_kv {str(kv_dtype).removeprefix('torch.')}"] = lambda k=kv_dtype: (
            write_mla_kv(
                torch.empty(16, 576, dtype=bf16),
                torch.empty(4, 16, 576).to(k),
                torch.empty(16, dtype=torch.int64),
            )
        )

    def exchange() -> None:
        out, lse = torch.empty(16, 16, 128, dtype=bf16), torch.empty(16, 16)
        send, lses = torch.empty(2, 16, 8, 128, dtype=bf16), torch.empty(2, 16, 8)
        merge.launch_pack(out=out, lse=lse, send_out=send, send_lse=lses)
        merge.launch_rescale(
            rank=0, out=out, lses=torch.empty(2, 16, 16), send=send, lse=torch.empty(16, 8)
        )

    found["reducers bfloat16"] = exchange
    found["merge_states bfloat16"] = lambda: merge_states(
        torch.empty(2, 16, 8, 128, dtype=bf16), torch.empty(2, 16, 8)
    )

    def peer_memory(tokens: int, dim: int, ranks: int = 2) -> None:
        heads = 16 // ranks
        rows, payload = tokens * heads, tokens * heads * dim * 2
        mailbox = direct.Mailbox.in_one_process(ranks, (payload, rows * 4), arch="hip")[0]
        config = direct.ExchangeConfig.from_payload(payload, COMPUTE_UNITS["gfx950"])
        out = torch.empty(tokens, 16, dim, dtype=bf16)
        q = torch.empty(tokens, heads, dim, dtype=bf16)
        direct.launch_reduce(
            mailbox,
            out=out,
            lse=torch.empty(tokens, 16),
            merged_out=q,
            merged_lse=torch.empty(tokens, heads),
            config=config,
        )
        direct.launch_gather(mailbox, q=q, gathered=out, config=config)

    for tokens, dim in ((16, 128), (256, 128), (16, 512)):
        found[f"direct {tokens} tokens d{dim} bfloat16"] = lambda t=tokens, d=dim: peer_memory(
            t, d
        )
    return found


def collect() -> list[Build]:
    """Build everything for both architectures. Needs TRITON_INTERPRET=0, see main."""
    from tqdm import tqdm

    from dcp_lab.ops.device import Device, planning_for

    builds: dict[tuple[object, ...], Build] = {}
    for arch in LDS_LIMIT:
        for case, call in tqdm(cases(arch).items(), desc=arch, file=sys.stderr, leave=False):
            caught: list[tuple[str, object]] = []
            with (
                planning_for(Device("hip", COMPUTE_UNITS[arch], chip=arch)),
                _catching_launches(arch, caught),
            ):
                call()
            for kernel, compiled in caught:
                # One row a distinct binary: many cases share the small kernels.
                key = (arch, kernel, compiled.hash)
                builds.setdefault(key, read_build(arch, kernel, case, compiled))
    return list(builds.values())


def main(args: list[str] | None = None) -> int:
    """Write or check the table; return 1 when a build is unfit or the committed table is stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare and fail, write nothing")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="table to write or compare")
    options = parser.parse_args(args)
    if os.environ.get("TRITON_INTERPRET") != "0":
        # Triton decides when it is imported whether kernels are interpreted: start over without.
        command = [sys.executable, "-m", "dcp_lab.bench.amd", "--out", str(options.out)]
        command += ["--check"] if options.check else []
        return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}).returncode

    import pandas as pd

    from dcp_lab.bench.record import write_csv

    builds = collect()
    faults = [fault for build in builds for fault in build.faults()]
    frame = pd.DataFrame([dataclasses.asdict(build) for build in builds])
    if options.check and not options.out.exists():
        faults.append(f"{options.out.name}: not there; `dcp-lab amd-report` writes it")
    elif options.check:
        committed = pd.read_csv(options.out, keep_default_na=False)
        if set(committed.triton) != set(frame.triton):
            print(f"not compared: the table is of Triton {', '.join(set(committed.triton))}")
        elif not committed.astype(str).equals(frame.astype(str)):
            faults.append(f"{options.out.name}: differs from this build; `dcp-lab amd-report`")
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_csv(options.out, frame)
    shown = frame.drop(columns=["triton", "agprs", "sgprs", "sgpr_spills"])
    print(shown.to_string(index=False, max_colwidth=44))
    for fault in faults:
        print(f"amd-report: {fault}", file=sys.stderr)
    kernels = frame.kernel.nunique()
    print(f"{len(frame)} builds of {kernels} kernels for {', '.join(LDS_LIMIT)}", end="; ")
    print(f"{len(faults)} faults" if faults else "no spill, no scratch, LDS within the limits")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
