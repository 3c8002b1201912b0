"""The timeline's constants, fitted to one half of the measured steps and held against the other.

The halves are the table's rows in turn: the first, third, ... are fitted, the second, fourth, ...
are predicted. Nobody chose them, and both hold every mode, attention path and reducer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import pandas as pd

from dcp_lab.analysis import tables
from dcp_lab.bench import costs, stack

TABLE = "stack_h200x2"
# What a prediction of unseen steps has to reach.
MOST_MEDIAN_ERROR, MOST_ERROR = 0.10, 0.25
# Known from one layer's own bench (costs.START says which), so not fitted.
KNOWN = {"gather_gbps": costs.START.gather_gbps}
_WORK = ("dcp_size", "mode", "attention", "reducer", "launch_delay_us")


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted constants and what they say of every row.

    Attributes:
        constants: Of the machine.
        rows: The table's rows with seen (fitted to), predicted_ms, error (predicted over measured,
            less 1), host_bound (whether the predicted host queue is the longer one).
    """

    constants: costs.StepConstants
    rows: pd.DataFrame

    @property
    def unseen(self) -> pd.DataFrame:
        """Rows that were predicted, not fitted."""
        return self.rows[~self.rows.seen]

    @property
    def median_error(self) -> float:
        """Median of the unseen rows' errors, as a share, without sign."""
        return float(self.unseen.error.abs().median())

    @property
    def worst_error(self) -> float:
        """Largest of the unseen rows' errors, as a share, without sign."""
        return float(self.unseen.error.abs().max())

    @property
    def free(self) -> int:
        """How many constants were fitted."""
        return len(dataclasses.fields(costs.StepConstants)) - len(KNOWN)

    @property
    def holds(self) -> bool:
        """Whether both targets are met."""
        return self.median_error <= MOST_MEDIAN_ERROR and self.worst_error <= MOST_ERROR

    def missed(self) -> pd.DataFrame:
        """Return the unseen rows beyond MOST_ERROR, with what their own samples spread.

        Columns beside the row's: spread (p90 - p10, as a share of the median), like_low_ms and
        like_high_ms (like_count other rows with the same calls of the host, at other contexts
        and dense parts, where the host is the longer queue too: measured alike if nothing but the
        case counted), least_error (the worst error over those and the row itself of the one
        prediction that is nearest to all).
        """
        rows = self.unseen[self.unseen.error.abs() > MOST_ERROR].copy()
        rows["spread"] = (rows.p90_ms - rows.p10_ms) / rows.median_ms
        others = [self._alike(index, row) for index, row in rows.iterrows()]
        rows["like_count"] = [len(other) for other in others]
        rows["like_low_ms"] = [other.min() for other in others]
        rows["like_high_ms"] = [other.max() for other in others]
        low = rows[["like_low_ms", "median_ms"]].min(axis=1)
        high = rows[["like_high_ms", "median_ms"]].max(axis=1)
        rows["least_error"] = (high - low) / (high + low)
        return rows

    def _alike(self, index: int, row: Mapping[str, object]) -> pd.Series:
        same = self.rows.host_bound & (self.rows.index != index)
        for name in _WORK:
            same &= self.rows[name].fillna("") == (row[name] if pd.notna(row[name]) else "")
        return self.rows[same].median_ms

    def paces(self) -> pd.Series:
        """Return, by block, the median of measured over predicted of the host-bound rows.

        The corners of a block were timed in turn, blocks one after the other: a host that is
        faster or slower for a while shows here, and no constant of a machine can hold it.
        """
        rows = self.rows[self.rows.host_bound]
        return (rows.median_ms / rows.predicted_ms).groupby(rows.block, sort=False).median()


def fit(table: pd.DataFrame, *, swapped: bool = False, delayed: bool = True) -> Fit:
    """Fit one half of a stack table's rows and predict all.

    Args:
        table: measured("stack_..."), of a model all of whose layers have a KV cache.
        swapped: Fit the second, fourth, ... rows instead. Default: the first, third, ...
        delayed: Whether that half's steps with a delay before each launch are fitted too. The
            other half is the same either way. Default: True.
    """
    rows = table.reset_index(drop=True)
    rows["seen"] = rows.index % 2 == int(swapped)
    cases = [stack.step_case(row) for row in rows.to_dict("records")]
    used = rows.seen & (delayed | (rows.launch_delay_us == 0))
    half = [(case, ms) for case, ms, use in zip(cases, rows.median_ms, used, strict=True)
            if use]  # fmt: skip
    constants = costs.fit_constants(*map(list, zip(*half, strict=True)), fixed=KNOWN)
    timelines = [costs.predict_step(case, constants) for case in cases]
    rows["predicted_ms"] = [line.step_us / 1e3 for line in timelines]
    rows["error"] = rows.predicted_ms / rows.median_ms - 1
    rows["host_bound"] = [line.host_us > line.gpu_us for line in timelines]
    return Fit(constants, rows)


@functools.cache
def h200(*, swapped: bool = False, delayed: bool = True) -> Fit:
    """Return the fit to two H200s, made once."""
    return fit(tables.measured(TABLE), swapped=swapped, delayed=delayed)


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """Return what a launch that takes 1 us longer costs a step, from steps that were delayed.

    Each corner of the delay block was measured at two delays, one series after the other. slope is
    their difference over (delayed launches x difference of the delays): 1 where every added
    microsecond is seen, 0 where it hides. from_zero is the same from the row without a delay,
    which another block measured.

    Args:
        table: measured("stack_...") with a block "delay".

    Returns:
        One row a corner: mode, attention, reducer ("no DCP" without), launches, ms_per_us (what
        a step gains for each us a launch), slope, slope_low, slope_high (of the 10th and 90th
        percentiles, at their worst), from_zero.

    Raises:
        ValueError: There is no such block.
    """
    delayed = table[table.block == "delay"]
    if delayed.empty:
        raise ValueError("table: expected rows of block 'delay', got none")
    keys = ["mode", "attention", "reducer"]
    named = delayed.assign(reducer=delayed.reducer.fillna("no DCP").where(
        delayed.dcp_size > 1, "no DCP"))  # fmt: skip
    base = table[(table.block == "base")]
    base = base.assign(reducer=base.reducer.where(base.dcp_size > 1, "no DCP"))
    found = []
    for key, rows in named.groupby(keys, sort=False):
        low, high = (rows.loc[rows.launch_delay_us.agg(which)] for which in ("idxmin", "idxmax"))
        added = high.delayed_launches * (high.launch_delay_us - low.launch_delay_us) / 1e3
        zero = base[(base[keys] == list(key)).all(axis=1)].median_ms.iloc[0]
        whole = high.delayed_launches * high.launch_delay_us / 1e3
        found.append(
            dict(zip(keys, key, strict=True))
            | {
                "launches": int(high.delayed_launches),
                "ms_per_us": (high.median_ms - low.median_ms)
                / (high.launch_delay_us - low.launch_delay_us),
                "slope": (high.median_ms - low.median_ms) / added,
                "slope_low": (high.p10_ms - low.p90_ms) / added,
                "slope_high": (high.p90_ms - low.p10_ms) / added,
                "from_zero": (high.median_ms - zero) / whole,
            }
        )
    return pd.DataFrame(found)
