"""What a table of measured rows says of a target: it holds, is missed by so much, or is open."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pandas as pd
import pandera.pandas as pa

from dcp_lab.bench import record


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One target and what the rows say of it.

    Attributes:
        target: In words.
        value: What was measured; None where nothing was.
        limit: What it has to be; None where its yardstick was not measured.
        better: Whether the value has to be at most ("low") or at least ("high") the limit.
        unit: Of both, e.g. "us" or "x".
        missing: Cells of the target that were not measured.
        where: The cell that the value is of, where it is the worst of many.
        wish: Whether it is a wish, which is shown and not counted.
    """

    target: str
    value: float | None
    limit: float | None
    better: Literal["low", "high"] = "low"
    unit: str = "us"
    missing: int = 0
    where: str = ""
    wish: bool = False

    @property
    def missed_by(self) -> float:
        """How far the value is on the wrong side of the limit; 0 or less: it is not."""
        assert self.value is not None and self.limit is not None
        return self.value - self.limit if self.better == "low" else self.limit - self.value

    @property
    def state(self) -> str:
        """'missed', 'not measured' (in part, with nothing missed in the rest) or 'holds'."""
        if self.value is not None and self.limit is not None and self.missed_by > 0:
            return "missed"
        if self.value is None or self.limit is None or self.missing:
            return "not measured"
        return "holds"

    def __str__(self) -> str:
        state, unit = self.state, f" {self.unit}" if self.unit != "x" else "x"
        text = f"{state:12}  {'(wish) ' if self.wish else ''}{self.target}"
        if self.value is None:
            return text
        text += f": {self.value:.2f}{unit}"
        if self.limit is None:
            return f"{text}, its yardstick was not measured"
        side = "at most" if self.better == "low" else "at least"
        text += f", {side} {self.limit:.2f}{unit}"
        if state == "missed":
            text += f", by {self.missed_by:.2f}{unit}"
        text += f" ({self.where})" if self.where else ""
        return text + (f"; {self.missing} cells not measured" if self.missing else "")


def summary(verdicts: Sequence[Verdict]) -> tuple[str, int]:
    """Return one line that counts the states, and the exit status: 0 when every target holds."""
    counted = [verdict.state for verdict in verdicts if not verdict.wish]
    holds = counted.count("holds")
    line = f"{holds} of {len(counted)} targets hold, {counted.count('missed')} are missed"
    line += f", {counted.count('not measured')} not measured"
    return line, 0 if holds == len(counted) else 1


def judged_rows(name: str, table: pd.DataFrame) -> str:
    """Return one line on the rows that are judged: how many, of what, when, at which commit."""
    if table.empty:
        return f"{name}: no rows"
    last = table.loc[table.date_utc.idxmax()]
    machines = table.groupby(["gpu_count", "gpu"]).size().index
    gpus = ", ".join(f"{count} x {gpu}" for count, gpu in machines)
    first_day, last_day = table.date_utc.min()[:10], last.date_utc[:10]
    days = last_day if first_day == last_day else f"{first_day} to {last_day}"
    rows = f"{name}: {len(table):,} rows of {gpus}, measured {days}"
    return f"{rows}, the last at commit {last.git_commit[:7]}"


def judge(
    path: Path,
    schema: pa.DataFrameSchema,
    verdicts: Callable[[pd.DataFrame], list[Verdict]],
    *,
    command: str,
) -> int:
    """Print every target's verdict from a table; return 0 when all hold, 1 else, 2 on bad input.

    Args:
        path: The table. One that is not there has nothing measured.
        schema: Its columns.
        verdicts: Judges its rows.
        command: What measures it, for the reader of an empty answer.
    """
    try:
        if path.exists():
            table = record.read_table(path, schema)
            print(judged_rows(path.name, table))
        else:
            print(f"{path.name}: nothing measured yet: {command}")
            table = pd.DataFrame(columns=list(schema.columns))
    except (ValueError, OSError) as wrong:
        print(f"--gate: {wrong}", file=sys.stderr)
        return 2
    found = verdicts(table)
    for verdict in found:
        print(verdict)
    if any(verdict.wish for verdict in found):
        print("(wish): shown, not counted")
    if any(verdict.missing for verdict in found):
        print("cells: shapes or contexts; a target holds once all of its cells are measured")
    line, status = summary(found)
    print(line)
    return status
