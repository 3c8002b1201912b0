"""The set-up: what makes .venv stale, what is installed where, and what may never be replaced."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KINDS = ("cpu", "cuda", "rocm")


def load_setup_env() -> types.ModuleType:
    """Return tools/setup_env.py as a module."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup_env() -> types.ModuleType:
    return load_setup_env()


OWN = sorted(load_setup_env().NEVER_FROM_PYPI)


def constraint_lines(kind: str) -> list[str]:
    lines = (ROOT / "constraints" / f"{kind}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


# ---- the files agree ------------------------------------------------------------------------


def project_requirements() -> list[Requirement]:
    return [Requirement(line) for line in PYPROJECT["project"]["dependencies"]]


def conda_lines() -> tuple[list[str], list[str]]:
    """Return environment.yml's conda lines and pip lines."""
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return [x for x in listed if isinstance(x, str)], [x for x in listed if isinstance(x, dict)]


def test_environment_yml_holds_what_pyproject_asks_for():
    """Conda users get the same packages in the same ranges, and the package itself."""
    conda, pip = conda_lines()
    assert sorted(conda) == sorted(["python=3.12", "pip", *PYPROJECT["project"]["dependencies"]])
    assert pip == [{"pip": ["-e ."]}]


def test_python_versions_agree():
    """pyproject.toml, environment.yml, the set-up and the README name the same oldest Python."""
    oldest = ".".join(map(str, load_setup_env().OLDEST))
    assert PYPROJECT["project"]["requires-python"] == f">={oldest}"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert f"Python {oldest} or newer" in (ROOT / "README.md").read_text()
    conda_python = next(x for x in conda_lines()[0] if x.startswith("python="))
    assert Requirement(f"x{PYPROJECT['project']['requires-python']}").specifier.contains(
        conda_python.removeprefix("python=")
    )


def test_readme_names_commands_that_the_makefile_has():
    """Every `make x` of the README is a target, the two commands among them."""
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)\b(?=[`\s;])", "\n".join(code_of(readme))))
    assert {"lab", "test"} <= named <= targets


def code_of(markdown: str) -> list[str]:
    """Return what stands in backticks or fences."""
    return re.findall(r"```.*?```|`[^`\n]+`", markdown, re.S)


@pytest.mark.parametrize("name", OWN)
def test_nothing_depends_on_what_a_rocm_machine_brings(name, setup_env):
    """torch, triton, vllm and AITER are in no list that a ROCm machine installs from."""
    conda, _ = conda_lines()
    listed = [requirement.name for requirement in project_requirements()]
    listed += [Requirement(x).name for x in PYPROJECT["project"]["optional-dependencies"]["dev"]]
    listed += [re.split(r"[=<>]", line)[0] for line in conda]
    listed += [Requirement(line).name for line in constraint_lines("rocm")]
    assert name not in {setup_env.normalise(entry) for entry in listed}


def test_pypi_aiter_is_no_dependency_anywhere(setup_env):
    """PyPI's `aiter` shadows AMD's import name: no extra and no constraint may bring it."""
    listed = [x for extra in PYPROJECT["project"]["optional-dependencies"].values() for x in extra]
    listed += [line for kind in KINDS for line in constraint_lines(kind)]
    assert "aiter" not in {setup_env.normalise(Requirement(line).name) for line in listed}


@pytest.mark.parametrize("kind", KINDS)
def test_constraints_pin_everything_that_is_asked_for(kind, setup_env):
    """Each line is one exact version, and each requirement of this kind has its line."""
    pinned = [Requirement(line) for line in constraint_lines(kind)]
    assert [x for x in pinned if not re.fullmatch(r"==[^*]+", str(x.specifier)) or x.extras] == []
    extras = {"cpu": ["cpu", "dev"], "cuda": ["cuda", "dev"], "rocm": ["dev"]}[kind]
    wanted = [*PYPROJECT["project"]["dependencies"], "pip", "setuptools"]
    for extra in extras:
        wanted += PYPROJECT["project"]["optional-dependencies"][extra]
    names = {setup_env.normalise(x.name): x for x in pinned}
    for requirement in map(Requirement, wanted):
        pin = names[setup_env.normalise(requirement.name)]
        assert requirement.specifier.contains(str(pin.specifier).removeprefix("==")), requirement


def test_what_is_installed_is_what_the_constraints_say(setup_env):
    """This run uses the locked versions, so that its numbers can be had again."""
    stamp = setup_env.read_stamp(Path(sys.prefix))
    if not stamp:
        pytest.skip("this Python was not set up by tools/setup_env.py")
    if stamp["machine"] == "rocm":
        pytest.skip("a ROCm machine keeps the versions that it has")
    differing = []
    for line in constraint_lines(stamp["constraints"]):
        pin = Requirement(line)
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not pin.specifier.contains(version, prereleases=True):
            differing.append(f"{pin} but {version}")
    assert differing == []


def test_a_wheel_holds_every_module_and_template(tmp_path):
    """Installed without -e the package still has its modules and the report's templates."""
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dcp_lab", tmp_path / "dcp_lab", ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path / "out"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("dcp_lab/")}
    there = {
        path.relative_to(tmp_path).as_posix()
        for path in (tmp_path / "dcp_lab").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there


# ---- what machine this is -------------------------------------------------------------------


def test_machine_named_by_hand_is_checked(setup_env, monkeypatch):
    """An unknown kind, and rocm without a ROCm torch, are refused with what to do."""
    with pytest.raises(setup_env.SetupError, match="expected one of cpu, cuda, rocm, got 'gpu'"):
        setup_env.detect_machine({"DCP_LAB_MACHINE": "gpu"})
    monkeypatch.setattr(setup_env, "torch_is_rocm", lambda: False)
    with pytest.raises(setup_env.SetupError, match="has no ROCm build of torch"):
        setup_env.detect_machine({"DCP_LAB_MACHINE": "rocm"})
    assert setup_env.detect_machine({"DCP_LAB_MACHINE": "cuda"}) == "cuda"


@pytest.mark.parametrize(
    ("rocm", "nvidia", "kind"),
    [(True, True, "rocm"), (True, False, "rocm"), (False, True, "cuda"), (False, False, "cpu")],
)
def test_machine_is_read_off_torch_and_driver(setup_env, monkeypatch, rocm, nvidia, kind):
    """A ROCm torch decides first, then an NVIDIA GPU; without either it is a CPU machine."""
    monkeypatch.setattr(setup_env, "torch_is_rocm", lambda: rocm)
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: nvidia)
    assert setup_env.detect_machine({}) == kind


@pytest.mark.parametrize(
    ("line", "is_rocm"),
    [
        ("hip: Optional[str] = '7.2.53211'", True),
        ("hip = '7.2'", True),
        ("hip: Optional[str] = None", False),
        ("hip = None", False),
        ("cuda = '13.0'", False),
    ],
)
def test_rocm_torch_is_known_without_importing_it(setup_env, monkeypatch, tmp_path, line, is_rocm):
    """torch/version.py is read as text: importing torch would take seconds on every make."""
    (tmp_path / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\n{line}\n")
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: spec)
    assert setup_env.torch_is_rocm() is is_rocm


def test_no_torch_is_no_rocm_torch(setup_env, monkeypatch):
    """A Python without torch is not a ROCm machine."""
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    assert setup_env.torch_is_rocm() is False


def test_missing_prerequisites_are_named(setup_env, monkeypatch):
    """No venv module, no compiler for a GPU, no Linux: each says what to install."""
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    setup_env.check_prerequisites("cpu")
    with pytest.raises(setup_env.SetupError, match="apt install gcc"):
        setup_env.check_prerequisites("cuda")
    with monkeypatch.context() as patch:
        patch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(setup_env.SetupError, match=r"apt install python3\.\d+-venv"):
            setup_env.check_prerequisites("cpu")
    monkeypatch.setattr(setup_env.sys, "platform", "darwin")
    with pytest.raises(setup_env.SetupError, match="runs on Linux, this is darwin"):
        setup_env.check_prerequisites("cpu")


def test_an_old_python_is_told_which_one_is_needed(setup_env, monkeypatch, capsys):
    """The message names the version found and how to name another Python."""
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 10, 13))
    monkeypatch.setattr(setup_env.sys, "argv", ["setup_env.py"])
    assert setup_env.main() == 1
    assert re.search(r"needs Python 3\.11 or newer.* is 3\.10\.13", capsys.readouterr().err)


def test_make_without_a_fitting_python_says_so(tmp_path):
    """With no Python on PATH `make test` ends in one sentence, before anything is made."""
    for name in ("bash", "make"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["make", "-C", str(ROOT), "test"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "dcp_lab needs Python 3.11 or newer; found: " in done.stderr


# ---- when .venv is made, mended or left alone -----------------------------------------------


@pytest.fixture
def checkout(setup_env, monkeypatch, tmp_path) -> Path:
    """A checkout whose set-up records its steps in the list `steps` instead of installing."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    monkeypatch.setattr(setup_env, "torch_is_rocm", lambda: False)
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: False)
    setup_env.steps = []

    def make_venv(venv: Path, machine: str) -> None:
        setup_env.steps.append("make")
        shutil.rmtree(venv, ignore_errors=True)
        (venv / "bin").mkdir(parents=True)
        setup_env.mark_unfinished(venv)
        (venv / "bin" / "python").symlink_to(sys.executable)
        shares = "true" if machine == "rocm" else "false"
        (venv / "pyvenv.cfg").write_text(f"include-system-site-packages = {shares}\n")

    monkeypatch.setattr(setup_env, "make_venv", make_venv)
    monkeypatch.setattr(setup_env, "fill", lambda *_: setup_env.steps.append("fill"))
    return tmp_path


def test_a_second_run_does_nothing(setup_env, checkout):
    """The first run makes and fills .venv; the second calls neither venv nor pip."""
    setup_env.set_up(checkout, {})
    setup_env.set_up(checkout, {})
    assert setup_env.steps == ["make", "fill"]
    assert sorted(p.name for p in (checkout / ".venv").iterdir()) == [
        "bin",
        "dcp-lab.json",
        "pyvenv.cfg",
    ]


def test_a_dry_run_changes_nothing(setup_env, checkout, capsys):
    """--dry-run says what would be done and leaves the folder as it is."""
    setup_env.set_up(checkout, {}, dry_run=True)
    assert setup_env.steps == []
    assert not (checkout / ".venv").exists()
    assert re.search(r"making .*\.venv for cpu \(it is missing\)", capsys.readouterr().out)


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints/cpu.txt"])
def test_a_changed_file_makes_it_stale(setup_env, checkout, capsys, file):
    """What decides the packages decides whether they are installed again, into the same .venv."""
    setup_env.set_up(checkout, {})
    with (checkout / file).open("a") as text:
        text.write("# changed\n")
    setup_env.set_up(checkout, {})
    setup_env.set_up(checkout, {})
    assert setup_env.steps == ["make", "fill", "fill"]
    assert f"changed: {file}" in capsys.readouterr().out


def test_constraints_of_another_kind_do_not_make_it_stale(setup_env, checkout):
    """A CPU machine does not care for cuda.txt."""
    setup_env.set_up(checkout, {})
    (checkout / "constraints" / "cuda.txt").write_text("# changed\n")
    setup_env.set_up(checkout, {})
    assert setup_env.steps == ["make", "fill"]


def remove_config(venv: Path) -> None:
    (venv / "pyvenv.cfg").unlink()


def remove_python(venv: Path) -> None:
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/nowhere/python3")


def another_maker(venv: Path) -> None:
    stamp = json.loads((venv / "dcp-lab.json").read_text())
    (venv / "dcp-lab.json").write_text(json.dumps({**stamp, "made_with": "/elsewhere/python3"}))


def another_place(venv: Path) -> None:
    stamp = json.loads((venv / "dcp-lab.json").read_text())
    (venv / "dcp-lab.json").write_text(json.dumps({**stamp, "place": "/elsewhere/.venv"}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove_config, "it is no virtual environment"),
        (remove_python, "its Python is gone"),
        (another_maker, "it was made from /elsewhere/python3"),
        (another_place, "place: /elsewhere/.venv is now"),
        (lambda venv: (venv / "dcp-lab.unfinished").touch(), "an earlier set-up was interrupted"),
    ],
    ids=["no-pyvenv.cfg", "python-gone", "other-python", "moved", "interrupted"],
)
def test_a_broken_venv_is_made_anew(
    setup_env, checkout, capsys, damage: Callable[[Path], None], reason: str
):
    """Whatever broke .venv, the next run makes it from nothing and says why."""
    setup_env.set_up(checkout, {})
    damage(checkout / ".venv")
    setup_env.set_up(checkout, {})
    assert setup_env.steps == ["make", "fill", "make", "fill"]
    assert reason in capsys.readouterr().out


def test_an_unreadable_stamp_counts_as_none(setup_env, checkout):
    """Half a stamp says nothing about what is installed: everything is installed again."""
    setup_env.set_up(checkout, {})
    (checkout / ".venv" / "dcp-lab.json").write_text('{"machine": "c')
    setup_env.set_up(checkout, {})
    assert setup_env.steps == ["make", "fill", "fill"]


def test_another_kind_of_machine_makes_it_anew(setup_env, checkout, monkeypatch):
    """A GPU that has come, and a ROCm image mounted over the same checkout, start from nothing."""
    setup_env.set_up(checkout, {})
    setup_env.set_up(checkout, {"DCP_LAB_MACHINE": "cuda"})
    monkeypatch.setattr(setup_env, "torch_is_rocm", lambda: True)
    setup_env.set_up(checkout, {})
    monkeypatch.setattr(setup_env, "machine_versions", lambda: {"torch": "9+rocm9"})
    setup_env.set_up(checkout, {})
    setup_env.set_up(checkout, {})
    assert setup_env.steps == ["make", "fill"] * 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interrupted_set_up_is_repaired(setup_env, checkout, monkeypatch, error):
    """Stopped half-way, on a first run or on an update, it starts over and gets to its end."""

    def stopped(*_: object) -> None:
        raise error

    whole = setup_env.fill
    for _ in range(2):
        monkeypatch.setattr(setup_env, "fill", stopped)
        with pytest.raises(error):
            setup_env.set_up(checkout, {})
        assert not (checkout / ".venv" / "dcp-lab.json").exists()
        monkeypatch.setattr(setup_env, "fill", whole)
        setup_env.steps.clear()
        setup_env.set_up(checkout, {})
        setup_env.set_up(checkout, {})
        assert setup_env.steps == ["make", "fill"]
        (checkout / "pyproject.toml").write_text("# changed\n")


def test_a_venv_that_is_being_emptied_is_marked_first(setup_env, monkeypatch, tmp_path):
    """A .venv without pyvenv.cfg would install into the base Python: the mark outlives it."""
    venv = tmp_path / ".venv"
    (venv / "lib").mkdir(parents=True)
    (venv / "dcp-lab.json").write_text("{}")

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_env.shutil, "rmtree", stopped)
    with pytest.raises(KeyboardInterrupt):
        setup_env.make_venv(venv, "cpu")
    assert (venv / "dcp-lab.unfinished").exists()
    assert not (venv / "dcp-lab.json").exists()


def test_pip_refuses_to_install_outside_a_venv(setup_env, tmp_path):
    """Without its pyvenv.cfg a .venv's Python is the base Python, and pip leaves that alone."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    pip = setup_env.Pip(tmp_path, {**os.environ, "PIP_NO_INDEX": "1"})
    assert pip.install("--dry-run", "pip") is False
    assert "Could not find an activated virtualenv" in pip.log.read_text()


def test_only_one_set_up_at_a_time(setup_env, checkout, monkeypatch):
    """A second set-up waits, says so, and gives up with the reason when the wait is over."""
    monkeypatch.setattr(setup_env, "LOCK_TIMEOUT_S", -1)
    holder = os.open(checkout, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(setup_env.SetupError, match="another set-up has held"):
            setup_env.set_up(checkout, {})
    finally:
        os.close(holder)
    setup_env.set_up(checkout, {})
    assert setup_env.steps == ["make", "fill"]


def test_one_venv_keeps_its_python(setup_env, monkeypatch, tmp_path):
    """The Python that made .venv runs its later set-ups, unless another one is asked for."""
    maker = tmp_path / "python3"
    maker.touch()
    (tmp_path / "dcp-lab.json").write_text(json.dumps({"made_with": str(maker)}))
    assert setup_env.python_to_use(tmp_path, this_python=False) == str(maker)
    assert setup_env.python_to_use(tmp_path, this_python=True) == sys.executable
    maker.unlink()
    assert setup_env.python_to_use(tmp_path, this_python=False) == sys.executable
    monkeypatch.setattr(setup_env.sys, "prefix", str(tmp_path))
    base = os.path.realpath(sys.executable)
    assert setup_env.python_to_use(tmp_path, this_python=False) == base


# ---- what pip is asked for ------------------------------------------------------------------


class FakePip:
    """Answers each `pip install` in turn and remembers what it was asked."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.calls: list[list[str]] = []

    def install(self, *arguments: str | Path) -> bool:
        self.calls.append(list(map(str, arguments)))
        return self.answers.pop(0)

    def must_install(self, what: str, *arguments: str | Path) -> None:
        assert self.install(*arguments)


@pytest.mark.parametrize(
    ("answers", "kind"),
    [((True, True), "cpu"), ((False, True, True), "cpu"), ((False, False, True), "cuda")],
    ids=["own-index", "pytorch-index", "neither"],
)
def test_cpu_torch_comes_from_where_it_is_to_be_had(setup_env, answers, kind):
    """First pip's own places, then PyTorch's index for torch alone, then PyPI's CUDA build."""
    pip = FakePip(*answers)
    assert setup_env.install_cpu(pip) == kind
    *torch_calls, last = pip.calls
    assert all("torch==2.13.0+cpu" in call and "--no-deps" in call for call in torch_calls)
    assert "--index-url" not in torch_calls[0]
    assert all("--index-url" in call and "--timeout=15" in call for call in torch_calls[1:])
    assert f"{ROOT}[{kind},dev]" in last
    assert str(ROOT / "constraints" / f"{kind}.txt") in last


def test_a_constraint_that_is_not_there_is_named(setup_env):
    """A lock file without the line is an error that names both."""
    assert setup_env.requirement("cpu", "torch") == "torch==2.13.0"
    with pytest.raises(
        setup_env.SetupError, match=r"constraints/rocm\.txt: expected a line torch"
    ):
        setup_env.requirement("rocm", "torch")


def test_a_failing_pip_shows_the_end_of_its_output(setup_env, tmp_path):
    """The person sees what pip said and where the rest of it is."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho first\necho ERROR: no space left on device\nexit 1\n")
    python.chmod(0o755)
    pip = setup_env.Pip(tmp_path, {"PATH": os.environ["PATH"]})
    with pytest.raises(setup_env.SetupError, match="(?s)could not install x.*no space left"):
        pip.must_install("x", "x==1")
    assert "pip install --progress-bar=off x==1" in pip.log.read_text()


def test_a_pip_that_never_ends_is_ended(setup_env, monkeypatch, tmp_path):
    """pip gets a bounded time; then it is killed and counts as failed."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(setup_env, "PIP_TIMEOUT_S", 0.2)
    assert setup_env.Pip(tmp_path, {"PATH": os.environ["PATH"]}).install("x") is False


def test_rocm_constraints_keep_what_is_there(setup_env):
    """Its own pinned as they are, others that are there unpinned, the rest as locked."""
    lines = ["# head", "numpy==2.4.6", "click==8.5.1", "pandas==3.1.1", "yarl==1 ; os_name == 'x'"]
    present = {"numpy": "2.2.6", "click": "8.1.8", "torch": "2.11.0+rocm7.2", "amd-aiter": "0.1"}
    assert setup_env.rocm_constraints(lines, present) == [
        "pandas==3.1.1",
        "yarl==1 ; os_name == 'x'",
        "amd-aiter==0.1",
        "numpy==2.2.6",
        "torch==2.11.0+rocm7.2",
    ]


@pytest.mark.parametrize("name", ["Torch", "triton", "vllm", "amd_aiter", "aiter", "numpy"])
def test_a_report_that_replaces_the_machines_own_is_refused(setup_env, name):
    """Replacing numpy, and bringing torch, triton, vllm or an AITER at all, stops the set-up."""
    report = {"install": [{"metadata": {"name": name, "version": "9"}}]}
    present = {"numpy": "2.2.6", "torch": "2.11.0+rocm7.2"}
    with pytest.raises(setup_env.SetupError, match=f"{setup_env.normalise(name)} .* -> 9"):
        setup_env.check_report(report, present)


def test_a_report_tells_what_else_changes(setup_env):
    """New packages pass, replaced ones are told, the lab itself may be renewed."""
    names = ["click", "pandera", "dcp-lab", "numpy"]
    report = {"install": [{"metadata": {"name": name, "version": "9"}} for name in names]}
    assert setup_env.check_report(report, {"click": "8", "dcp-lab": "0"}) == ["click 8 -> 9"]


# ---- a ROCm machine, made up: real pip, no network -------------------------------------------


def write_dist(folder: Path, name: str, version: str) -> None:
    """Write what pip takes for an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("image\n")
    (info / "RECORD").write_text("")


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write the smallest wheel that pip would install."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", wheel)
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def rocm_pip(setup_env, tmp_path):
    """The pip of a fresh venv on a made-up ROCm machine whose index offers newer everything."""
    image, index, venv = tmp_path / "image", tmp_path / "index", tmp_path / ".venv"
    for name, version in (
        ("torch", "2.11.0+rocm7.2.0.git1a2b3c"),
        ("triton", "3.6.0+rocm7.2.0"),
        ("vllm", "0.25.1+rocm721"),
        ("amd-aiter", "0.1.13"),
        ("numpy", "2.2.6"),
    ):
        write_dist(image, name, version)
    index.mkdir()
    for name, version in (
        ("torch", "2.13.0"),
        ("triton", "3.9.0"),
        ("vllm", "0.33.0"),
        ("aiter", "0.13.20191203"),
        ("amd-aiter", "0.1.14"),
        ("numpy", "2.5.5"),
    ):
        write_wheel(index, name, version)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    # What this run has installed stands for the rest of the image: pip needs no network.
    here = sysconfig.get_path("purelib")
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(image), here]),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_CONFIG_FILE": os.devnull,
    }
    return setup_env.Pip(venv, environ)


def test_a_rocm_machine_keeps_its_own(setup_env, rocm_pip, capsys):
    """pip's own dry run installs the lab beside a ROCm torch and replaces nothing."""
    arguments = setup_env.plan_rocm(rocm_pip)
    report = rocm_pip.venv / "report.json"
    assert rocm_pip.install("--dry-run", "--report", report, *arguments)
    installs = json.loads(report.read_text())["install"]
    assert [item["metadata"]["name"] for item in installs] == ["dcp-lab"]
    printed = capsys.readouterr().out
    assert "torch 2.11.0+rocm7.2.0.git1a2b3c" in printed
    assert "note: inside .venv" not in printed


def test_a_requirement_on_torch_would_be_caught(setup_env, rocm_pip, monkeypatch):
    """Were torch asked for, the dry run would replace the ROCm build, and that is refused."""

    def careless(constraints: Path, *extras: str) -> list[str]:
        return ["--no-build-isolation", "--editable", f"{ROOT}[cpu]"]

    monkeypatch.setattr(setup_env, "package", careless)
    with pytest.raises(setup_env.SetupError, match=r"torch 2\.11\.0\+rocm\S+ -> 2\.13\.0"):
        setup_env.plan_rocm(rocm_pip)


def test_the_constraints_alone_hold_torch_in_place(setup_env, rocm_pip, monkeypatch):
    """Even then the generated constraints leave pip no way to replace it."""

    def careless(constraints: Path, *extras: str) -> list[str]:
        where = f"{ROOT}[cpu]"
        return ["--no-build-isolation", "--constraint", str(constraints), "--editable", where]

    monkeypatch.setattr(setup_env, "package", careless)
    with pytest.raises(setup_env.SetupError, match="(?s)could not install.*conflict"):
        setup_env.plan_rocm(rocm_pip)


def test_a_venv_on_a_venv_sees_its_packages(setup_env, tmp_path):
    """ROCm wheels often live in a venv: .venv made from it sees them, .pth files included."""
    parent, venv = tmp_path / "parent", tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", parent], check=True, timeout=60)
    (inside,) = (parent / "lib").glob("python*/site-packages")
    write_dist(inside, "torch", "2.11.0+rocm7.2")
    linked = tmp_path / "aiter-sources"
    (linked / "aiter").mkdir(parents=True)
    (linked / "aiter" / "__init__.py").write_text("origin = 'sources'\n")
    (inside / "easy-install.pth").write_text(f"{linked}\n")
    code = (
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('s', {str(setup_env.__file__)!r})\n"
        "s = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(s)\n"
        f"s.make_venv(pathlib.Path({str(venv)!r}), 'rocm')\n"
    )
    subprocess.run([parent / "bin" / "python", "-c", code], check=True, timeout=120)
    seen = subprocess.run(
        [venv / "bin" / "python", "-c"]
        + ["import aiter, importlib.metadata as m; print(aiter.origin, m.version('torch'))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert seen.stdout.split() == ["sources", "2.11.0+rocm7.2"]
