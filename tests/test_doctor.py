"""The doctor: right about every kind of machine, and never loading vLLM or AITER."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_lab import doctor

H200 = doctor.Gpu("nvidia", "NVIDIA H200", "sm_90", 143771 << 20)
MI355 = doctor.Gpu("amd", "AMD gfx950", "gfx950", 288 << 30)
WORKS = doctor.Probe(works=True, error="", mode="interpreted", torch_build="cpu")
ABSENT = doctor.Aiter("absent")
AMD_AITER = doctor.Aiter("amd", "0.1.13", "site-packages/aiter")
HOST = doctor.Host(
    system="Linux",
    python="3.12.1 at python",
    cores=2,
    memory_bytes=24 << 30,
    memory_available_bytes=20 << 30,
    driver=None,
    compute=None,
    gcc="gcc",
    make="make",
    git="2.39",
    commit="abc",
    environment="set up by hand",
)
PACKAGES: dict[str, str | None] = {
    **dict.fromkeys(doctor.RUN_NEEDS, "1.0"),
    "torch": "2.13.0+cpu",
    "triton": "3.9.0",
    "vllm": None,
}


def missing(
    *,
    host: doctor.Host = HOST,
    gpus: tuple[doctor.Gpu, ...] = (),
    packages: dict[str, str | None] = PACKAGES,
    probe: doctor.Probe = WORKS,
    aiter: doctor.Aiter = ABSENT,
) -> dict[str, doctor.Missing]:
    """Return what is missing on such a machine, by name."""
    found = doctor.find_missing(host, gpus, packages, probe, aiter)
    return {entry.what: entry for entry in found}


# ---- this machine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here() -> doctor.Report:
    return doctor.collect()


def test_this_machine_can_run_the_lab(here):
    """Where the tests run the lab runs: its probe decoded, nothing that blocks is missing."""
    assert here.probe.works, here.probe.error
    assert here.ok
    assert doctor.find_missing(HOST, (), here.packages, here.probe, ABSENT) == []


def test_this_machine_is_told_in_full(here, monkeypatch, capsys):
    """The report for a person names every part, every notebook and how it ends; status 0."""
    monkeypatch.setattr(doctor, "collect", lambda: here)
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    for name in ("gpu", "cores", "memory", "python", "git", "torch", "triton", "vllm", "aiter"):
        assert f"\n {name} " in printed
    for path in (doctor.ROOT / "notebooks").glob("*.ipynb"):
        assert path.stem in printed
    assert "a decode ran and was right" in printed
    assert printed.strip().endswith("The lab runs here: make lab")


def test_json_says_the_same(here, monkeypatch, capsys):
    """--json is the whole report and the verdict."""
    monkeypatch.setattr(doctor, "collect", lambda: here)
    assert doctor.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("ok") is True
    assert told == dataclasses.asdict(here)


def test_status_1_and_the_reason_when_the_lab_cannot_run(here, monkeypatch, capsys):
    """What blocks comes first with its command, and the exit status tells."""
    packages = {**PACKAGES, "torch": None, "papermill": None}
    broken = dataclasses.replace(
        here,
        packages=packages,
        probe=doctor.Probe(False, "torch is not installed"),
        missing=list(missing(packages=packages, host=no(make=None)).values()),
    )
    monkeypatch.setattr(doctor, "collect", lambda: broken)
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "not installed: papermill" in printed
    assert "make env" in printed
    assert printed.index("torch: every op") < printed.index("make: the two commands")
    assert printed.strip().endswith("The lab cannot run here yet; see Missing")


def no(**changes: str | None) -> doctor.Host:
    return dataclasses.replace(HOST, **changes)


def test_without_rich_the_report_is_json(here, monkeypatch, capsys):
    """A half-made .venv still gets a report."""
    packages = {**here.packages, "rich": None}
    monkeypatch.setattr(doctor, "collect", lambda: dataclasses.replace(here, packages=packages))
    doctor.main([])
    assert json.loads(capsys.readouterr().out)["packages"]["rich"] is None


def test_looking_loads_neither_torch_nor_triton_nor_vllm_nor_aiter():
    """A fresh interpreter that looks at everything but the probe has none of them loaded."""
    code = (
        "import sys; from dcp_lab import doctor; doctor.probe = lambda: doctor.Probe(True, '')\n"
        "doctor.collect()\n"
        "print([n for n in ('torch', 'triton', 'vllm', 'aiter', 'pandas') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


# ---- trying a kernel ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise SystemExit('no libcuda')", "exit status 1: no libcuda"),
        ("import os; os.abort()", "exit status -6: no output"),
        ("print('{')", "exit status 0: no output"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
    ids=["exit", "abort", "garbage", "hang"],
)
def test_a_probe_that_dies_is_an_answer(monkeypatch, code, error):
    """A crash, a hang or nonsense in the probe's process becomes a reason, never an exception."""
    run = subprocess.run
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 1 if "sleep" in code else 60)
    monkeypatch.setattr(
        doctor.subprocess,
        "run",
        lambda command, **kwargs: run([command[0], "-c", code], **kwargs),
    )
    assert doctor.probe() == doctor.Probe(works=False, error=error)


@pytest.mark.parametrize(
    ("shift", "error"), [(0.0, ""), (1.0, "the kernel ran, but its result is off by 1")]
)
def test_a_wrong_result_does_not_count_as_working(monkeypatch, capsys, shift, error):
    """The probe compares with a result known beforehand."""
    import dcp_lab

    decode = dcp_lab.paged_decode

    def shifted(**arguments):
        out, lse = decode(**arguments)
        return out + shift, lse

    monkeypatch.setattr(dcp_lab, "paged_decode", shifted)
    doctor.decode_once()
    told = json.loads(capsys.readouterr().out)
    assert (told["works"], told["error"]) == (shift == 0, error)


def test_a_kernel_that_raises_is_told_in_one_line(monkeypatch, capsys):
    """numpy and Triton that do not fit together raise inside the kernel: the reason is shown."""
    import dcp_lab

    def broken(**arguments):
        raise TypeError("only 0-dimensional arrays can be converted\nand more")

    monkeypatch.setattr(dcp_lab, "paged_decode", broken)
    doctor.decode_once()
    told = json.loads(capsys.readouterr().out)
    assert told["error"] == "TypeError: only 0-dimensional arrays can be converted"


# ---- looking at made-up machines ------------------------------------------------------------


def test_nvidia_gpus_are_read_from_the_driver(monkeypatch):
    """Name, architecture and memory, one line a GPU; none without the tool."""
    lines = "NVIDIA H200, 9.0, 143771\nNVIDIA B200, 10.0, [N/A]"
    monkeypatch.setattr(doctor, "output_of", lambda *command: lines)
    assert doctor.nvidia_gpus() == [H200, doctor.Gpu("nvidia", "NVIDIA B200", "sm_100", 0)]
    monkeypatch.setattr(doctor, "output_of", lambda *command: None)
    assert doctor.nvidia_gpus() == []


def test_amd_gpus_are_read_from_the_driver(tmp_path):
    """The CPU's node is no GPU; the architecture's last digit is hexadecimal."""
    nodes, cards = tmp_path / "nodes", tmp_path / "drm"
    for index, target in enumerate([0, 90402, 90500, 90010]):
        (nodes / str(index)).mkdir(parents=True)
        text = f"cpu_cores_count 0\ngfx_target_version {target}\nvendor_id 4098\n"
        (nodes / str(index) / "properties").write_text(text)
        if target:
            (cards / f"card{index}" / "device").mkdir(parents=True)
            (cards / f"card{index}" / "device" / "mem_info_vram_total").write_text(
                "309220868096\n"
            )
    found = doctor.amd_gpus(nodes, cards)
    assert [gpu.arch for gpu in found] == ["gfx942", "gfx950", "gfx90a"]
    assert {gpu.memory_bytes for gpu in found} == {309220868096}
    assert doctor.amd_gpus(tmp_path / "none", tmp_path / "none") == []


def test_driver_and_compute_are_read_off_the_machine(monkeypatch):
    """NVIDIA's tool tells both; without a GPU there is neither."""
    shown = "| NVIDIA-SMI 570.1   Driver Version: 570.124.06   CUDA Version: 12.8  |"
    monkeypatch.setattr(doctor, "output_of", lambda *command: shown)
    assert doctor.driver_of([H200]) == ("570.124.06", "CUDA 12.8 (driver's newest)")
    assert doctor.driver_of([MI355])[0].startswith("amdgpu")
    assert doctor.driver_of([]) == (None, None)


def test_the_environment_says_who_made_it(monkeypatch, tmp_path):
    """The stamp of the set-up names the machine kind; without one it was done by hand."""
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path))
    assert doctor.environment() == "set up by hand"
    (tmp_path / "dcp-lab.json").write_text('{"machine": "rocm"}')
    assert doctor.environment() == "set up by make, machine kind rocm"


@pytest.mark.parametrize(
    ("files", "dists", "kind"),
    [
        (["__init__.py", "ops/__init__.py", "jit/__init__.py"], {"amd-aiter": "0.1.13"}, "amd"),
        (["__init__.py", "ops/__init__.py", "jit/__init__.py"], {}, "amd"),
        (["__init__.py", "map_aiter.py"], {"aiter": "0.13.20191203"}, "impostor"),
        (["__init__.py", "map_aiter.py"], {}, "impostor"),
        (
            ["__init__.py", "map_aiter.py", "ops/__init__.py", "jit/__init__.py"],
            {"aiter": "0.13.20191203", "amd-aiter": "0.1.13"},
            "impostor",
        ),
        (["__init__.py"], {}, "unknown"),
        ([], {}, "absent"),
    ],
    ids=["amd", "amd-from-source", "pypi", "pypi-no-metadata", "both", "other", "absent"],
)
def test_aiter_is_told_from_its_impostor(monkeypatch, tmp_path, files, dists, kind):
    """By metadata and file names alone: importing it would raise here."""
    for name in files:
        path = tmp_path / "aiter" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "version_of", lambda *names: dists.get(names[0]))
    found = doctor.find_aiter()
    assert found.kind == kind
    if files:
        assert found.place == str(tmp_path / "aiter")


def test_a_folder_called_aiter_is_no_aiter(monkeypatch, tmp_path):
    """A clone of the sources in the working folder is a namespace, not a package."""
    (tmp_path / "aiter" / "docs").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "version_of", lambda *names: None)
    assert doctor.find_aiter().kind == "unknown"


# ---- judging --------------------------------------------------------------------------------


def test_a_cpu_machine_misses_nothing():
    """vLLM, AITER and a compiler are no loss on a machine without a GPU."""
    assert missing(host=no(gcc=None)) == {}


def test_missing_parts_of_the_lab_block_it():
    """Without torch, triton, the notebook tools or a right kernel the lab cannot run."""
    found = missing(packages={**PACKAGES, "torch": None, "pandas": None})
    assert set(found) == {"notebook tools", "torch"}
    assert {entry.command for entry in found.values()} == {"make env"}
    assert all(entry.blocks for entry in found.values())
    assert missing(packages={**PACKAGES, "triton": None})["triton"].blocks
    bad = doctor.Probe(False, "TypeError: numpy", mode="interpreted")
    entry = missing(probe=bad)["working kernels"]
    assert entry.blocks
    assert entry.why == "TypeError: numpy (triton 3.9.0, numpy 1.0)"


def test_on_amd_nothing_comes_from_pypi():
    """torch, triton and vLLM come from a ROCm image, AITER from its sources."""
    packages = {**PACKAGES, "torch": None, "triton": None}
    found = missing(gpus=(MI355,), packages=packages, probe=doctor.Probe(False, "no torch"))
    assert set(found) == {"torch", "AMD's AITER", "vLLM"}
    assert found["torch"].command.startswith("docker run -it --rm --device /dev/kfd")
    assert "github.com/ROCm/aiter" in found["AMD's AITER"].command
    assert not any("pip install" in entry.command for entry in found.values())
    assert [name for name, entry in found.items() if entry.blocks] == ["torch"]


def test_a_rocm_image_without_its_gpu_is_still_one():
    """No command names PyPI's torch where a ROCm build is there, though no GPU is passed in."""
    packages = {**PACKAGES, "torch": "2.11.0+rocm7.2", "vllm": "0.25.1"}
    found = missing(packages=packages, probe=doctor.Probe(False, "OSError"), aiter=AMD_AITER)
    assert set(found) == {"working kernels"}
    assert found["working kernels"].command.startswith("docker run")


def test_the_impostor_is_shown_the_door():
    """PyPI's aiter is uninstalled everywhere and replaced on AMD machines; it blocks nothing."""
    impostor = doctor.Aiter("impostor", "0.13.20191203", "site-packages/aiter")
    entry = missing(aiter=impostor)["AMD's AITER"]
    assert entry.command.endswith("-m pip uninstall -y aiter")
    assert not entry.blocks
    assert "ROCm/aiter" in missing(aiter=impostor, gpus=(MI355,))["AMD's AITER"].command


def test_an_nvidia_machine_gets_vllm_beside_the_lab():
    """vLLM pins another torch, so its command makes an environment of its own."""
    working = doctor.Probe(True, "", mode="compiled", gpu_count=1, torch_build="cuda 13.0")
    found = missing(gpus=(H200,), probe=working)
    assert set(found) == {"vLLM"}
    assert ".venv-vllm" in found["vLLM"].command


@pytest.mark.parametrize(
    ("gpu", "build", "why", "command"),
    [
        (H200, "cpu", "torch is a CPU build", "make env"),
        (H200, "cuda 13.0", r"cannot use driver 535", "nvidia-smi"),
        (MI355, "cpu", "torch's build is for cpu", "docker run"),
    ],
    ids=["cpu-torch", "old-driver", "amd-cpu-torch"],
)
def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch, gpu, build, why, command):
    """The lab runs interpreted meanwhile, so this blocks nothing, but it is said."""
    monkeypatch.setattr(doctor.os, "access", lambda *_: True)
    probe = dataclasses.replace(WORKS, torch_build=build)
    entry = missing(gpus=(gpu,), probe=probe, host=no(driver="535"))["the GPU for torch"]
    assert why in entry.why
    assert entry.command.startswith(command)
    assert not entry.blocks


def test_a_user_outside_the_render_group_is_told(monkeypatch):
    """On AMD the device file decides who may compute."""
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    entry = missing(gpus=(MI355,))["the GPU for torch"]
    assert "may not open /dev/kfd" in entry.why
    assert entry.command.startswith("sudo usermod")


def test_small_tools_are_told():
    """make, git and, on a GPU, a compiler; only the compiler blocks."""
    working = doctor.Probe(True, "", mode="compiled", gpu_count=1)
    found = missing(gpus=(H200,), host=no(gcc=None, make=None, git=None), probe=working)
    assert {"a C compiler", "make", "git"} <= set(found)
    assert [name for name, entry in found.items() if entry.blocks] == ["a C compiler"]
    assert next(iter(found)) == "a C compiler"


def test_data_that_is_not_there_blocks(tmp_path):
    """The analyses read the published tables."""
    found = doctor.find_missing(HOST, (), PACKAGES, WORKS, ABSENT, tmp_path)
    assert [(entry.what, entry.blocks) for entry in found] == [("data/", True)]


# ---- notebooks ------------------------------------------------------------------------------


def write_notebook(root: Path, name: str, about: object) -> None:
    (root / "notebooks").mkdir(exist_ok=True)
    metadata = {} if about is None else {"dcp_lab": about}
    (root / "notebooks" / f"{name}.ipynb").write_text(json.dumps({"metadata": metadata}))


def states(root: Path, probe: doctor.Probe, aiter: doctor.Aiter = ABSENT) -> dict[str, tuple]:
    found = doctor.notebook_states(root, probe, PACKAGES, aiter)
    return {state.name: (state.runs, state.does) for state in found}


def test_notebooks_say_what_they_can_do_here(tmp_path):
    """Teach interprets, analyse reads, measure and what else is needed is named."""
    write_notebook(tmp_path, "01_a", {"kind": "teach"})
    write_notebook(tmp_path, "02_b", {"kind": "analyse"})
    write_notebook(tmp_path, "03_c", {"kind": "measure", "needs": ["multigpu", "vllm"]})
    write_notebook(tmp_path, "04_d", {"kind": "teach", "needs": ["aiter"]})
    write_notebook(tmp_path, "05_e", {"kind": "teach", "needs": ["luck"]})
    write_notebook(tmp_path, "06_f", None)
    (tmp_path / "notebooks" / "07_g.ipynb").write_text("{")
    measured = "its rows are in data/measured"
    assert states(tmp_path, WORKS) == {
        "01_a": (True, "runs its kernels interpreted"),
        "02_b": (True, "reads data/"),
        "03_c": (False, f"measuring needs two GPUs and vLLM; {measured}"),
        "04_d": (False, f"needs AMD's AITER; {measured}"),
        "05_e": (False, "needs something unknown: luck"),
        "06_f": (False, "does not say what it is"),
        "07_g": (False, "does not say what it is"),
    }


def test_notebooks_on_a_gpu_measure(tmp_path):
    """With a GPU that works the measure notebooks run; with broken kernels only analyses do."""
    write_notebook(tmp_path, "01_a", {"kind": "teach"})
    write_notebook(tmp_path, "02_b", {"kind": "measure"})
    write_notebook(tmp_path, "03_c", {"kind": "analyse"})
    working = doctor.Probe(True, "", mode="compiled", gpu_count=1)
    assert states(tmp_path, working) == {
        "01_a": (True, "runs its kernels compiled"),
        "02_b": (True, "measures on this GPU"),
        "03_c": (True, "reads data/"),
    }
    broken = dataclasses.replace(working, works=False, error="x")
    assert {name: runs for name, (runs, _) in states(tmp_path, broken).items()} == {
        "01_a": False,
        "02_b": False,
        "03_c": True,
    }


@pytest.mark.parametrize(
    ("aiter", "words"),
    [
        (doctor.Aiter("amd", "0.1.13", "p"), "AMD's 0.1.13 at p"),
        (doctor.Aiter("impostor", "0.13", "p"), "the unrelated package of that name from PyPI"),
        (doctor.Aiter("unknown", None, "p"), "something that is neither AMD's nor PyPI's"),
        (ABSENT, "none"),
    ],
    ids=["amd", "impostor", "unknown", "absent"],
)
def test_facts_of_a_gpu_machine(aiter, words):
    """GPU, driver, CUDA, torch's build and what is wrong with Triton all have their line."""
    report = doctor.Report(
        host=no(driver="570.1", compute="CUDA 12.8"),
        gpus=[H200],
        packages={**PACKAGES, "vllm": "0.33.0"},
        probe=doctor.Probe(False, "OSError: no libcuda", torch_build="cuda 13.0"),
        aiter=aiter,
        notebooks=[],
        missing=[],
    )
    told = dict(doctor.facts(report))
    assert told["gpu"] == "NVIDIA H200, sm_90, 151 GB"
    assert (told["driver"], told["compute"]) == ("570.1", "CUDA 12.8")
    assert told["torch"] == "2.13.0+cpu, built for cuda 13.0"
    assert told["triton"] == "3.9.0: OSError: no libcuda"
    assert told["aiter"].startswith(words)
    assert told["vllm"].startswith("0.33.0; our backend: checked 20")
