"""Run a command and end everything that it started when nobody holds this process's stdin.

    python guard.py STOP_SECONDS TOKEN COMMAND...

A server has children, its children have children, and whoever started it may die in any way, even
by SIGKILL. A pipe notices all of them: its end is closed when its holder is gone. So stopping a
server is closing that pipe, and there is one way to end: SIGTERM to all, STOP_SECONDS to leave in
order, SIGKILL to what is left. What belongs to the server is told by two marks, since a process
can lose either: the session, which this process leads, and TOKEN in the environment, which a
descendant in a session of its own still has (and which renaming a process may overwrite).

Start it as the leader of a new session (`start_new_session=True`).

Exit status: the command's; 128 + N after signal N; 143 when it was asked to stop.
Standard library only: it is one more process beside a server, and starts at once.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "DCP_LAB_SERVER"
POLL_S = 0.05
# What a killed process may take until it is gone from the process table.
KILL_S = 5.0


def processes(leader: int, token: str) -> list[int]:
    """Return the ids of a guard's living processes, without the guard.

    Args:
        leader: The guard's process id, which is also that of its session.
        token: What VARIABLE holds in the environment that they were started with.
    """
    wanted = f"{VARIABLE}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == leader:
            continue
        try:
            # Behind the name, which may hold anything: state, parent, group, session.
            state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            # A zombie runs nothing; it is only not yet reaped.
            if state in "ZX":
                continue
            if int(session) == leader or wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            # It ended meanwhile, or is another user's.
            continue
    return found


def stop(leader: int, token: str, patience_s: float) -> list[int]:
    """End a guard's processes; return those that had to be killed.

    Args:
        leader: See `processes`.
        token: See `processes`.
        patience_s: How long after SIGTERM the first SIGKILL comes, at most.
    """

    def left() -> list[int]:
        return processes(leader, token)

    def send(signum: int) -> list[int]:
        reached = []
        for pid in left():
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue
            reached.append(pid)
        return reached

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while left():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    send(signal.SIGTERM)
    killed: set[int] = set()
    if wait(patience_s):
        return []
    end = time.monotonic() + KILL_S
    # Again and again: one that forked between the look and the kill has a child that was not seen.
    while left() and time.monotonic() < end:
        killed |= set(send(signal.SIGKILL))
        wait(POLL_S)
    return sorted(killed)


def main(args: Sequence[str]) -> int:
    """Run the command; see the module's docstring."""
    patience_s, token, *command = args
    # The end of the server is decided by the pipe, and this process has to live through it.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # Ignored signals stay ignored in a new program; the server must hear them.
        preexec_fn=_hear_signals,
    )
    asked = False
    while child.poll() is None and not asked:
        asked = bool(select.select([sys.stdin], [], [], POLL_S)[0])
    killed = stop(os.getpid(), token, float(patience_s))
    if killed:
        print(f"guard: {len(killed)} processes did not leave in {patience_s} s and were killed")
    status = child.wait()
    if asked:
        return 128 + signal.SIGTERM
    return status if status >= 0 else 128 - status


def _hear_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
