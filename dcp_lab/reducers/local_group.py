"""run_ranks: a process group on this machine, one new process a rank, for a short job.

For notebooks, tests and demonstrations. On several machines, or where ranks live long, use
torchrun: the reducers only need an initialised process group.

Each rank is a fresh Python process (`python -m dcp_lab.reducers.local_group FOLDER RANK`), never a
fork, so that it works after a GPU was touched and from a notebook. Ranks find each other through a
file, so no port can be taken.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

POLL_S = 0.02
# How long a rank that failed is waited for to write its reason, and one told to stop to stop.
GRACE_S = 5.0
OUTPUT_TAIL_CHARS = 3000


class RankError(RuntimeError):
    """A rank raised or died; the message holds its traceback or the end of what it printed.

    Attributes:
        rank: The first rank that failed.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(
    target: Callable[..., Any] | str,
    size: int,
    *,
    args: Sequence[Any] = (),
    backend: str = "gloo",
    timeout_s: float = 120.0,
    group_timeout_s: float = 60.0,
) -> list[Any]:
    """Run target(rank, size, *args) on `size` new processes and return the results in rank order.

    In each process torch.distributed is initialised; the default group has all ranks.

    Args:
        target: A function at the top level of an importable module, or "module:function".
        size: Ranks, >= 1. Under "nccl" rank r uses GPU r.
        args: Passed on, pickled; every rank gets its own copy.
        backend: "gloo" or "nccl" (RCCL on ROCm).
        timeout_s: For everything, imports of the processes included (some 3 s each and core).
        group_timeout_s: Timeout of the process group: how long a collective waits for a silent
            rank.

    Returns:
        One value a rank, pickled. Tensors have to be on the CPU.

    Raises:
        ValueError: size < 1, or target cannot be imported by another process (a function defined
            in a notebook or a script).
        RankError: A rank raised, died or returned what cannot be pickled. The others are stopped.
        TimeoutError: Some rank was not done after timeout_s. All are stopped; the message shows
            where each of them was.

    Notes:
        No process outlives the call: ranks are killed when one fails, on timeout, and on
        KeyboardInterrupt; a rank whose parent was killed ends itself after timeout_s.
        A rank gets one thread (OMP_NUM_THREADS=1) and this process's environment and sys.path;
        under gloo its kernels run in Triton's interpreter, also on a machine with a GPU.

    Source:
        Written here.
    """
    name = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
    module, _, function = name.partition(":")
    if not module or module == "__main__" or not function.isidentifier():
        raise ValueError(
            "target: expected a function at the top level of an importable module, or "
            f"'module:function', got {name!r}; other processes cannot import what a notebook or a "
            "script defines: put it into a module"
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size: expected an int >= 1, got {size!r}")
    with tempfile.TemporaryDirectory(prefix="dcp_lab_ranks_") as name_of_folder:
        folder = Path(name_of_folder)
        job = {
            "target": name,
            "size": size,
            "backend": backend,
            "deadline": time.time() + timeout_s,
            "group_timeout_s": group_timeout_s,
        }
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "args.pickle").write_bytes(pickle.dumps(tuple(args)))
        deadline = time.monotonic() + timeout_s
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                with (folder / f"output_{rank}.txt").open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", __spec__.name, str(folder), str(rank)],
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env=_environment(backend),
                        )
                    )
            _wait(processes, folder, deadline, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
            for process in processes:
                process.wait(timeout=GRACE_S)
        return [pickle.loads(_result_path(folder, rank).read_bytes()) for rank in range(size)]


def _wait(
    processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout_s: float
) -> None:
    """Return when every rank has ended well; raise when one has not or time is up."""
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            rank, message = _first_failure(folder, codes)
            raise RankError(rank, f"rank {rank} of {len(processes)} failed\n{message}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    late = [rank for rank, code in enumerate(codes) if code is None]
    # Each rank writes its stack at about this moment.
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and any(processes[rank].poll() is None for rank in late):
        time.sleep(POLL_S)
    shown = "\n".join(f"rank {rank}:\n{_output_tail(folder, rank)}" for rank in late)
    raise TimeoutError(f"ranks {late} of {len(processes)} not done after {timeout_s:g} s\n{shown}")


def _first_failure(folder: Path, codes: list[int | None]) -> tuple[int, str]:
    """Return the rank that failed first and its reason: others often fail only because of it."""
    reasons = []
    for rank, code in enumerate(codes):
        if code:
            path = folder / f"error_{rank}.json"
            if path.exists():
                error = json.loads(path.read_text())
                reasons.append((error["time"], rank, error["traceback"]))
            else:
                ended = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
                # It wrote nothing, so nobody made it fail: it comes first.
                reasons.append((0.0, rank, f"{ended}\n{_output_tail(folder, rank)}"))
    _, rank, reason = min(reasons)
    return rank, reason


def _output_tail(folder: Path, rank: int) -> str:
    text = (folder / f"output_{rank}.txt").read_text(errors="replace").strip()
    return text[-OUTPUT_TAIL_CHARS:] or "(it printed nothing)"


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"result_{rank}.pickle"


def _environment(backend: str) -> dict[str, str]:
    """Return the environment of a rank: this one's, its sys.path, one thread, the loopback."""
    environment = dict(os.environ)
    if backend == "gloo":
        # Its tensors are on the CPU, also where a GPU is.
        environment["TRITON_INTERPRET"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["OMP_NUM_THREADS"] = "1"
    # Without it gloo asks what the host's name resolves to, which not every machine can tell.
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _write(path: Path, content: bytes) -> None:
    """Write a file that is either whole or not there."""
    beside = path.with_suffix(".part")
    beside.write_bytes(content)
    os.replace(beside, path)


def _run_rank(folder: Path, rank: int) -> None:
    """Be one rank: join the group, run the target, leave its result or its traceback."""
    job = json.loads((folder / "job.json").read_text())
    # Whatever happens, also to the parent, this process ends, and shows where it was. A little
    # after the deadline, so that the parent, which is waiting for that, has seen it pass.
    faulthandler.dump_traceback_later(
        max(job["deadline"] - time.time(), 0) + 10 * POLL_S, exit=True
    )
    try:
        import torch
        import torch.distributed as dist

        device = None
        if job["backend"] == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            job["backend"],
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=job["size"],
            timeout=datetime.timedelta(seconds=job["group_timeout_s"]),
            device_id=device,
        )
        module, _, function = job["target"].partition(":")
        target = getattr(importlib.import_module(module), function)
        args = pickle.loads((folder / "args.pickle").read_bytes())
        result = pickle.dumps(target(rank, job["size"], *args))
        _write(_result_path(folder, rank), result)
        dist.destroy_process_group()
    except BaseException:
        error = {"time": time.time(), "traceback": traceback.format_exc()}
        _write(folder / f"error_{rank}.json", json.dumps(error).encode())
        sys.stdout.flush()
        # Not sys.exit: after a failed collective, clean-up can wait for ranks that are gone.
        os._exit(1)


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]))
