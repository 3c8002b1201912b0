"""Run what talks to a server, `vllm bench serve` and `lm_eval`, as programs of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 20
STOP_S = 10.0
# What a row of results says about the program that was measured.
PACKAGES = ("vllm", "torch", "triton", "lm_eval")

_ASK = (
    "import importlib.metadata as m, json, platform, sys\n"
    "found = {'python': platform.python_version()}\n"
    "for name in sys.argv[1:]:\n"
    "    try:\n"
    "        found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError:\n"
    "        found[name] = None\n"
    "print(json.dumps(found))\n"
)


class ClientError(RuntimeError):
    """A load test or an evaluation failed; the message has the end of what it said."""


def run_client(
    command: Sequence[str],
    *,
    log: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    inherit: bool = True,
    folder: Path | None = None,
) -> None:
    """Run a program to its end, or end it.

    Args:
        command: A word an item; no shell.
        log: File for everything it says; replaced.
        timeout_s: Until it has to be done.
        environment: Variables on top of this process's.
        inherit: False leaves this process's variables out.
        folder: Where it runs. Default: where this process does.

    Raises:
        ClientError: There is no such program, it failed, or it was not done in time.

    Notes:
        However it ends, also late or by Ctrl-C, nothing of it is left: its children go too.
    """
    name = f"{Path(command[0]).name} {command[1]}"
    check_program(command[0])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**(os.environ if inherit else {}), **(environment or {})},
            cwd=folder,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ClientError(
                f"{name}: not done in {timeout_s:g} s; the end of {log.name}:\n{_tail(log)}"
            ) from None
        finally:
            _end(process)
    if status:
        raise ClientError(
            f"{name} failed with status {status}; the end of {log.name}:\n{_tail(log)}"
        )


def check_program(program: str) -> None:
    """Raise ClientError unless there is such a program, on PATH or where its path says."""
    if shutil.which(program) is None:
        raise ClientError(
            f"{Path(program).name}: not found: pip install 'vllm' or 'lm-eval[api]' where the "
            "server runs"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that may still run, and the children it has or has left behind."""
    signums = (signal.SIGTERM, signal.SIGKILL) if process.poll() is None else (signal.SIGKILL,)
    for signum in signums:
        # Also when the leader is gone: the group lives on with its children.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_S)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:]) or "(it said nothing)"


def beside(executable: str, name: str) -> str:
    """Return the program of this name in the folder of another, or the plain name.

    Args:
        executable: Such as the vllm command, which may be in an environment of its own.
        name: Such as "lm_eval".
    """
    found = shutil.which(executable)
    if found is not None:
        neighbour = Path(found).parent / name
        if neighbour.is_file():
            return str(neighbour)
    return name


def versions(executable: str) -> dict[str, str | None]:
    """Return the versions in the Python that runs a command.

    Args:
        executable: A script that pip installed: its first line names its Python.

    Returns:
        python and each of PACKAGES; None for one that is not installed. All None where the script
        does not say.
    """
    nothing = dict.fromkeys(("python", *PACKAGES))
    found = shutil.which(executable)
    if found is None:
        return nothing
    with open(found, "rb") as script:
        first = script.readline(512).decode(errors="replace").strip()
    if not first.startswith("#!"):
        return nothing
    try:
        done = subprocess.run(
            [*shlex.split(first[2:]), "-c", _ASK, *PACKAGES],
            capture_output=True,
            text=True,
            timeout=STOP_S,
            check=True,
        )
        return {**nothing, **json.loads(done.stdout)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return nothing
