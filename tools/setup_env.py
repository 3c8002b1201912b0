"""Make .venv and fill it with what this machine needs; a second run takes a moment.

    python3 tools/setup_env.py             what `make lab` and `make test` call first
    python3 tools/setup_env.py --dry-run   says what it would do

The kind of machine decides where torch comes from (DCP_LAB_MACHINE=cpu|cuda|rocm overrides):

    rocm  this Python already has a ROCm build of torch: .venv sees it, together with its triton,
          vllm and AITER, and none of them is ever replaced by a wheel from PyPI
    cuda  an NVIDIA GPU is there: torch's CUDA build from PyPI and the Triton that it names
    cpu   neither: torch's CPU build and the Triton whose interpreter was tried with it

Every version stands in constraints/<kind>.txt. The last thing written is .venv/dcp-lab.json, which
says what was installed; when it is missing, unfinished or no longer true, the next run repairs it.
Standard library only: nothing is installed yet when this runs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("cpu", "cuda", "rocm")
PACKAGE = "dcp-lab"
OLDEST = (3, 11)

# In .venv: what was installed, and the mark of a set-up that has not reached its end.
STAMP = "dcp-lab.json"
UNFINISHED = "dcp-lab.unfinished"

# One pip call may take long on a slow line: torch's CUDA build is 3 GB.
PIP_TIMEOUT_S = 2 * 3600
PIP_SHOWN = ("Collecting", "Downloading", "Installing")
LOCK_TIMEOUT_S = 1800

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# On a ROCm machine these are the machine's own, present or not.
NEVER_FROM_PYPI = frozenset(
    {
        "aiter",
        "amd-aiter",
        "flash-attn",
        "pytorch-triton-rocm",
        "torch",
        "torchaudio",
        "torchvision",
        "triton",
        "triton-kernels",
        "triton-rocm",
        "vllm",
    }
)
# The machine's torch and vllm were built with these: kept where present, installed where not.
NEVER_REPLACED = frozenset({"numpy", "setuptools"})


class SetupError(Exception):
    """The set-up cannot go on; the message says what to do."""


def normalise(name: str) -> str:
    """Return a distribution's name as PyPI compares it: amd_aiter and AMD.Aiter are amd-aiter."""
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- what machine is this -------------------------------------------------------------------


def torch_is_rocm() -> bool:
    """Return whether this Python has a ROCm build of torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    if not version_file.exists():
        return False
    return re.search(r"^hip\b[^=\n]*=\s*['\"]", version_file.read_text(), re.M) is not None


def has_nvidia_gpu() -> bool:
    """Return whether a driver shows an NVIDIA GPU."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU " in listed.stdout


def detect_machine(environ: Mapping[str, str]) -> str:
    """Return the kind of machine: DCP_LAB_MACHINE if set, else what is seen."""
    wanted = environ.get("DCP_LAB_MACHINE", "")
    if wanted:
        if wanted not in KINDS:
            raise SetupError(
                f"DCP_LAB_MACHINE: expected one of {', '.join(KINDS)}, got {wanted!r}"
            )
        if wanted == "rocm" and not torch_is_rocm():
            raise SetupError(
                f"DCP_LAB_MACHINE=rocm, but {sys.executable} has no ROCm build of torch.\n"
                "Start inside a ROCm image (rocm/vllm or rocm/pytorch), or name the Python that\n"
                "has it: make lab PYTHON=/path/to/python3"
            )
        return wanted
    if torch_is_rocm():
        return "rocm"
    if has_nvidia_gpu():
        return "cuda"
    if Path("/dev/kfd").exists():
        say(
            f"note: an AMD GPU is here, but {sys.executable} has no ROCm build of torch, so\n"
            "  this becomes a CPU set-up. For the GPU, start inside a ROCm image or name the\n"
            "  Python that has one: make lab PYTHON=/path/to/python3"
        )
    return "cpu"


def check_prerequisites(machine: str) -> None:
    """Raise SetupError naming the first thing that is missing and how to get it."""
    if sys.platform != "linux":
        raise SetupError(
            f"dcp_lab runs on Linux, this is {sys.platform}: Triton has no wheels for it.\n"
            "On Windows use WSL2, on a Mac a Linux container or virtual machine."
        )
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        raise SetupError(
            f"Python {version} at {sys.executable} has no venv or no ensurepip, so it cannot\n"
            "make a virtual environment.\n"
            f"Debian, Ubuntu: sudo apt install python{version}-venv"
        )
    # Triton builds its launcher with a C compiler; its interpreter needs none.
    if machine != "cpu" and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        raise SetupError(
            "no C compiler: Triton needs one to launch kernels on a GPU.\n"
            f"Debian, Ubuntu: sudo apt install gcc python{version}-dev"
        )


# ---- is .venv what it should be -------------------------------------------------------------


def sha256(path: Path) -> str:
    """Return the hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def machine_versions() -> dict[str, str]:
    """Return the machine's own torch, triton, vllm, AITER and numpy with their versions."""
    from importlib import metadata

    found: dict[str, str] = {}
    for dist in metadata.distributions():
        name = normalise(dist.metadata["Name"] or "")
        if name in NEVER_FROM_PYPI | NEVER_REPLACED:
            found.setdefault(name, dist.version)
    return dict(sorted(found.items()))


def wanted_stamp(machine: str, root: Path = ROOT) -> dict[str, object]:
    """Return what .venv/dcp-lab.json holds when .venv is as this checkout wants it."""
    constraints = root / "constraints" / f"{machine}.txt"
    return {
        "machine": machine,
        "place": str(root / ".venv"),
        "pyproject.toml": sha256(root / "pyproject.toml"),
        f"constraints/{machine}.txt": sha256(constraints),
        "tools/setup_env.py": sha256(Path(__file__).resolve()),
        "machine's own": machine_versions() if machine == "rocm" else {},
    }


def read_stamp(venv: Path) -> dict[str, object]:
    """Return what .venv/dcp-lab.json holds, {} when it is missing or unreadable."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def reason_to_rebuild(venv: Path, wanted: Mapping[str, object]) -> str:
    """Return why .venv has to be made from nothing, '' when it can be brought up to date."""
    if not venv.exists():
        return "it is missing"
    if (venv / UNFINISHED).exists():
        return "an earlier set-up was interrupted"
    if not (venv / "bin" / "python").exists():
        return "its Python is gone"
    config = venv / "pyvenv.cfg"
    if not config.exists():
        return "it is no virtual environment"
    text = config.read_text()
    shares = re.search(r"include-system-site-packages\s*=\s*true", text) is not None
    if shares != (wanted["machine"] == "rocm"):
        return f"it was made for another kind of machine than {wanted['machine']}"
    found = read_stamp(venv)
    if not found:
        return ""
    if found.get("made_with") != sys.executable:
        return f"it was made from {found.get('made_with')}, now {sys.executable} is asked for"
    for key in ("machine", "place", "machine's own"):
        if found.get(key) != wanted[key]:
            return f"{key}: {found.get(key)} is now {wanted[key]}"
    return ""


def reason_to_update(venv: Path, wanted: Mapping[str, object]) -> str:
    """Return why packages have to be installed into .venv, '' when it is as wanted."""
    found = read_stamp(venv)
    if not found:
        return "nothing says what is in it"
    changed = [key for key in wanted if found.get(key) != wanted[key]]
    return f"changed: {', '.join(changed)}" if changed else ""


# ---- installing -----------------------------------------------------------------------------


def say(text: str) -> None:
    """Print one line of progress at once."""
    print(f"set-up: {text}", flush=True)


class Pip:
    """The pip of one .venv; its full output goes to .venv/setup.log."""

    def __init__(self, venv: Path, environ: Mapping[str, str]) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.log = venv / "setup.log"
        self.environ = {
            **environ,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # a question would wait for ever
            "PIP_NO_INPUT": "1",
            # never into the Python that .venv was made from, whatever state .venv is in
            "PIP_REQUIRE_VIRTUALENV": "1",
            "PIP_USER": "0",
        }

    def install(self, *arguments: str | Path) -> bool:
        """Run `pip install` with these arguments; return whether it succeeded."""
        command = [str(self.python), "-m", "pip", "install", "--progress-bar=off"]
        command += [str(argument) for argument in arguments]
        on_terminal = sys.stdout.isatty()
        with self.log.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            process = subprocess.Popen(
                command,
                env=self.environ,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            too_long = threading.Timer(PIP_TIMEOUT_S, process.kill)
            too_long.start()
            try:
                for line in process.stdout or ():
                    log.write(line)
                    log.flush()
                    if on_terminal and line.lstrip().startswith(PIP_SHOWN):
                        columns = shutil.get_terminal_size().columns
                        print(f"\r\033[K  {line.strip()[: columns - 4]}", end="", flush=True)
                return process.wait() == 0
            finally:
                too_long.cancel()
                if process.poll() is None:
                    process.kill()
                    process.wait(timeout=30)
                if on_terminal:
                    print("\r\033[K", end="", flush=True)

    def must_install(self, what: str, *arguments: str | Path) -> None:
        """Run `pip install` and raise SetupError with the end of its output when it fails."""
        if self.install(*arguments):
            return
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        raise SetupError(
            f"pip could not install {what}. The end of {self.log}:\n{tail}\n"
            "If the network was at fault, run the same command again: it starts over by itself."
        )


def requirement(kind: str, name: str, root: Path = ROOT) -> str:
    """Return the line 'name==version' of constraints/<kind>.txt."""
    text = (root / "constraints" / f"{kind}.txt").read_text()
    found = re.search(rf"^{re.escape(name)}==\S+", text, re.M)
    if found is None:
        raise SetupError(f"constraints/{kind}.txt: expected a line {name}==<version>, found none")
    return found.group()


def install_cpu(pip: Pip) -> str:
    """Install torch's CPU build, triton and the package; return whose constraints were used."""
    torch = requirement("cpu", "torch")
    say(f"{torch}, CPU build")
    # First from wherever this machine's pip looks: PyPI alone has no such build and says so at
    # once. Then from PyTorch's own index, of which nothing but torch is taken.
    found = pip.install("--no-deps", f"{torch}+cpu") or pip.install(
        *("--no-deps", f"{torch}+cpu", "--timeout=15", "--retries=1"),
        *("--index-url", TORCH_CPU_INDEX),
    )
    if not found:
        say(
            "no CPU build of torch is to be had from here, so the CUDA build from PyPI takes its\n"
            "  place: about 3 GB more to download; it runs on the CPU just the same"
        )
        install_from_pypi(pip, "cuda")
        return "cuda"
    say("triton, the notebooks' tools, dcp_lab")
    install_from_pypi(pip, "cpu")
    return "cpu"


def install_from_pypi(pip: Pip, kind: str) -> None:
    """Install the package with its tools and the torch and triton of this kind."""
    constraints = ROOT / "constraints" / f"{kind}.txt"
    pip.must_install("the package", *package(constraints, kind, "dev"))


def package(constraints: Path, *extras: str) -> list[str]:
    """Return pip's arguments that install this checkout, editable, under these constraints."""
    where = f"{ROOT}[{','.join(extras)}]"
    return ["--no-build-isolation", "--constraint", str(constraints), "--editable", where]


def rocm_constraints(lines: Sequence[str], present: Mapping[str, str]) -> list[str]:
    """Return the constraints that leave alone what a ROCm machine already has.

    Args:
        lines: Those of constraints/rocm.txt.
        present: Name -> version of every distribution of the machine that .venv sees.

    Returns:
        The machine's own pinned to the version that is there; no line for others that are there,
        so that pip keeps them unless something needs another version; the given lines for the
        rest.
    """
    kept = []
    for line in lines:
        name = normalise(re.split(r"[=<>~!; \[]", line.strip(), maxsplit=1)[0])
        if name and not name.startswith("#") and name not in present:
            kept.append(line)
    own = NEVER_FROM_PYPI | NEVER_REPLACED
    pinned = [f"{name}=={present[name]}" for name in sorted(own) if name in present]
    return kept + pinned


def check_report(report: Mapping[str, object], present: Mapping[str, str]) -> list[str]:
    """Return what pip would put in place of what is there, as 'name old -> new'.

    Args:
        report: What `pip install --dry-run --report` wrote.
        present: Name -> version of what is there.

    Raises:
        SetupError: It would bring or replace something that has to be the machine's own.
    """
    replaced, refused = [], []
    for item in report["install"]:  # type: ignore[attr-defined]
        name = normalise(item["metadata"]["name"])
        step = f"{name} {present.get(name, 'absent')} -> {item['metadata']['version']}"
        kept = name in NEVER_REPLACED and name in present
        if name in NEVER_FROM_PYPI or kept:
            refused.append(step)
        elif name in present and name != PACKAGE:
            replaced.append(step)
    if refused:
        raise SetupError(
            f"pip would put its own in place of this ROCm machine's: {', '.join(refused)}.\n"
            "Nothing was installed. A dependency of dcp_lab must not ask for these."
        )
    return replaced


def present_in(pip: Pip) -> dict[str, str]:
    """Return name -> version of every distribution that a venv's Python sees outside the venv."""
    code = """
import json
from importlib.metadata import distributions
print(json.dumps([[d.metadata["Name"] or "", d.version, str(d.locate_file(""))]
                  for d in distributions()]))
"""
    done = subprocess.run(
        [str(pip.python), "-c", code],
        env=pip.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    inside = pip.venv.resolve()
    found: dict[str, str] = {}
    for name, version, place in json.loads(done.stdout):
        if not Path(place).resolve().is_relative_to(inside):
            found.setdefault(normalise(name), version)
    return found


def plan_rocm(pip: Pip) -> list[str]:
    """Return pip's arguments for a ROCm machine, after a dry run that replaced nothing of its own.

    Raises:
        SetupError: The dry run would bring or replace torch, triton, vllm, AITER or the like.
    """
    present = present_in(pip)
    merged = pip.venv / "rocm-constraints.txt"
    lines = (ROOT / "constraints" / "rocm.txt").read_text().splitlines()
    merged.write_text("\n".join(rocm_constraints(lines, present)) + "\n")
    own = sorted((NEVER_FROM_PYPI | NEVER_REPLACED) & present.keys())
    say(f"the machine's own stay: {', '.join(f'{name} {present[name]}' for name in own)}")
    pip.must_install("setuptools", "--constraint", merged, "setuptools>=77")
    arguments = package(merged, "dev")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip.must_install("the package (dry run)", "--dry-run", "--report", report, *arguments)
        replaced = check_report(json.loads(report.read_text()), present)
    for step in replaced:
        say(f"note: inside .venv only, {step}")
    return arguments


def install_rocm(pip: Pip) -> None:
    """Install the package and its tools beside the machine's own torch, triton, vllm and AITER."""
    arguments = plan_rocm(pip)
    say("the notebooks' tools, dcp_lab")
    pip.must_install("the package", *arguments)


def see_parent(venv: Path) -> None:
    """Let .venv see the packages of the virtual environment that it was made from."""
    # --system-site-packages shows those of the base Python, not those of a venv in between.
    if sys.prefix == sys.base_prefix:
        return
    inside = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # addsitedir also follows the .pth files there, by which a develop install of AITER is found.
    lines = [f"import site; site.addsitedir({place!r})\n" for place in site.getsitepackages()]
    (inside / "dcp-lab-parent.pth").write_text("".join(lines))


def mark_unfinished(venv: Path) -> None:
    """Leave the mark by which the next run knows that this one did not get to its end."""
    (venv / UNFINISHED).write_text("a set-up is running, or was interrupted\n")
    (venv / STAMP).unlink(missing_ok=True)


def make_venv(venv: Path, machine: str) -> None:
    """Make an empty .venv, marked as unfinished."""
    if venv.is_symlink() or venv.is_file():
        venv.unlink()
    venv.mkdir(exist_ok=True)
    # The mark comes first and goes last: emptying an old .venv takes a while, and without its
    # pyvenv.cfg what is left of it would install into the Python that it was made from.
    mark_unfinished(venv)
    for entry in venv.iterdir():
        if entry.name != UNFINISHED:
            entry.unlink() if entry.is_symlink() or entry.is_file() else shutil.rmtree(entry)
    command = [sys.executable, "-m", "venv", str(venv)]
    if machine == "rocm":
        command.append("--system-site-packages")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SetupError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr).strip()}")
    if machine == "rocm":
        see_parent(venv)


def fill(venv: Path, machine: str, environ: Mapping[str, str]) -> str:
    """Install everything into .venv; return the kind whose constraints were used."""
    pip = Pip(venv, environ)
    pip.must_install("pip", requirement(machine, "pip"))
    if machine == "rocm":
        install_rocm(pip)
        return machine
    pip.must_install("setuptools", requirement(machine, "setuptools"))
    if machine == "cpu":
        return install_cpu(pip)
    say(f"{requirement('cuda', 'torch')} for CUDA, about 3 GB; the notebooks' tools, dcp_lab")
    install_from_pypi(pip, "cuda")
    return machine


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Let one set-up at a time work on this checkout; wait half an hour at most for another."""
    descriptor = os.open(root, os.O_RDONLY)
    give_up = time.monotonic() + LOCK_TIMEOUT_S
    told = False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    message = f"another set-up has held {root} for {LOCK_TIMEOUT_S} s"
                    raise SetupError(message) from None
                if not told:
                    say("another set-up is at work here; waiting for it")
                    told = True
                time.sleep(0.5)
        yield
    finally:
        os.close(descriptor)


def set_up(root: Path, environ: Mapping[str, str], *, dry_run: bool = False) -> None:
    """Bring root/.venv to what this checkout and this machine ask for."""
    venv = root / ".venv"
    machine = detect_machine(environ)
    with only_one(root):
        wanted = wanted_stamp(machine, root)
        rebuild = reason_to_rebuild(venv, wanted)
        update = reason_to_update(venv, wanted)
        if not rebuild and not update:
            return
        check_prerequisites(machine)
        say(f"{'making' if rebuild else 'updating'} {venv} for {machine} ({rebuild or update})")
        if dry_run:
            return
        start = time.monotonic()
        if rebuild:
            say(f"Python {sys.version.split()[0]} from {sys.executable}")
            make_venv(venv, machine)
        else:
            mark_unfinished(venv)
        constraints = fill(venv, machine, environ)
        stamp = {**wanted, "made_with": sys.executable, "constraints": constraints}
        beside = venv / f"{STAMP}.new"
        beside.write_text(json.dumps(stamp, indent=1) + "\n")
        os.replace(beside, venv / STAMP)
        (venv / UNFINISHED).unlink()
        say(f"done in {time.monotonic() - start:.0f} s")


def python_to_use(venv: Path, *, this_python: bool) -> str:
    """Return the Python that has to run this: the one that made .venv, unless told otherwise.

    The kind of machine is read off that Python, so .venv must not change it between two runs.
    """
    maker = str(read_stamp(venv).get("made_with", ""))
    if maker and os.path.exists(maker) and not this_python:
        return maker
    if Path(sys.prefix).resolve() == venv.resolve():
        # .venv is active in this shell: it cannot make itself
        return os.path.realpath(sys.executable)
    return sys.executable


def main() -> int:
    """Parse the command line, set up, and say in words what went wrong if it did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument(
        "--this-python",
        action="store_true",
        help="make .venv from the Python that runs this, also where another one made it",
    )
    arguments = parser.parse_args()
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        needed = ".".join(map(str, OLDEST))
        print(
            f"set-up: dcp_lab needs Python {needed} or newer; {sys.executable} is {found}.\n"
            "Name another one: make lab PYTHON=/path/to/python3.12",
            file=sys.stderr,
        )
        return 1
    python = python_to_use(ROOT / ".venv", this_python=arguments.this_python)
    if python != sys.executable and "DCP_LAB_SETUP_AGAIN" not in os.environ:
        os.environ["DCP_LAB_SETUP_AGAIN"] = "1"
        os.execv(python, [python, *sys.argv])
    # A plain `kill` must stop pip too and leave the mark of an unfinished set-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        set_up(ROOT, os.environ, dry_run=arguments.dry_run)
    except SetupError as error:
        print(f"\nset-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; the next run starts over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
