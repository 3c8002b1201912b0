"""The model applied to study 1: what it has to take from the study, and what it then predicts.

Taken from the study (so explaining these numbers explains nothing): the step without DCP under
full graphs, which sets how long the GPU works on the dense part; and, where the host's pace is
asked for, the step with DCP. Taken from two H200s: what kernels, exchanges and launches cost.
Taken from public figures: memory and compute units. Everything else is a prediction.

No public launch cost of an MI3xx was found, so the pace of study 1's host is either that of the
H200s' host (nothing of study 1's DCP run is used) or solved for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import pandas as pd

from dcp_lab.analysis import verdict_fit, what_if
from dcp_lab.analysis.verdict_shares import NEEDS, PLAYERS, Coalition, corner_of, shapley
from dcp_lab.bench import costs
from dcp_lab.bench.costs import StepCase, StepConstants, Work

BRACKETS = ("MI355X", "MI300X")

# Parts of what DCP adds to a step, as the model sees them.
COLLECTIVES = "launching collectives"
SMALL = "launching small kernels"
CALLS = "launching the gather"
WAIT = "the gather's host sync"
BYTES = "GPU: the gather's bytes"
KERNELS = "GPU: its kernels beyond the bytes"
EXCHANGE_GPU = "GPU: exchange and small kernels"
HALF = "half of the KV is not read"
PARTS = (COLLECTIVES, SMALL, CALLS, WAIT, BYTES, KERNELS, EXCHANGE_GPU, HALF)


def solve(value: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return where a rising function reaches target, by bisection on a log scale.

    Raises:
        ValueError: It does not between low and high.
    """
    if not value(low) <= target <= value(high):
        raise ValueError(
            f"target: expected one between {value(low):.4g} and {value(high):.4g}, got {target:g}"
        )
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if value(middle) < target else (low, middle)
    return math.sqrt(low * high)


@dataclasses.dataclass(frozen=True)
class Study:
    """A study's step on one rank, as far as the model needs it.

    Attributes:
        constants: Of its machine, the host's pace included.
        dense_bytes: Of a layer: set so that the step without DCP takes what was observed.
        context_tokens: Of each request.
        label: Which constants these are.
    """

    constants: StepConstants
    dense_bytes: float
    context_tokens: float
    label: str = ""

    def case(self, **corner: object) -> StepCase:
        """Return a corner: mode, dcp_size, attention and reducer as in a stack table."""
        question = what_if.Question(
            context_tokens=self.context_tokens, dcp=corner["dcp_size"], mode="eager"
        )
        case = what_if.case_of(question)
        names = {name: corner[name] for name in ("mode", "attention", "reducer")}
        return dataclasses.replace(case, dense_bytes=self.dense_bytes, **names)

    def ms(self, **corner: object) -> float:
        """Return a corner's step."""
        return costs.predict_ms(self.case(**corner), self.constants)

    def coalition_ms(self, coalition: Coalition) -> float:
        """Return the step of verdict_shares.corner_of(coalition)."""
        return self.ms(**corner_of(coalition))

    def shares(self) -> dict[str, float]:
        """Return each player's share of what DCP adds, by the model."""
        found = shapley(self.coalition_ms, PLAYERS, NEEDS)
        return {player: ms / sum(found.values()) for player, ms in found.items()}

    def at(self, context_tokens: float) -> Study:
        """Return the same with other requests."""
        return dataclasses.replace(self, context_tokens=context_tokens)

    def paced(self, pace: float) -> Study:
        """Return the same on a host whose every call takes pace times as long."""
        return dataclasses.replace(self, constants=what_if.paced(self.constants, pace))


NO_DCP = {"dcp_size": 1, "attention": "paged", "reducer": None}
AS_PUBLISHED = {"dcp_size": 2, "attention": "published", "reducer": "ag_rs", "mode": "piecewise"}


def study1(
    machine: str,
    *,
    alone_ms: float,
    context_tokens: float,
    fitted: StepConstants,
    library: bool = True,
    dcp_ms: float | None = None,
) -> Study:
    """Return study 1 on a machine.

    Args:
        machine: One of what_if.MACHINES.
        alone_ms: Observed without DCP under full graphs; the dense part is set to give it.
        context_tokens: Of each request.
        fitted: Constants of two H200s.
        library: Whether a gather is called as a library's, see what_if.constants_of.
        dcp_ms: Observed with DCP as published; the host's pace is set to give it. Default: None,
            the H200s' host.
    """
    constants = what_if.constants_of(machine, fitted=fitted, library=library)
    study = Study(constants, 1.0, context_tokens, machine + (", library" if library else ""))

    def alone(dense_bytes: float) -> float:
        return dataclasses.replace(study, dense_bytes=dense_bytes).ms(mode="full", **NO_DCP)

    study = dataclasses.replace(study, dense_bytes=solve(alone, alone_ms, 1e3, 1e11))
    if dcp_ms is None:
        return study

    pace = solve(lambda p: study.paced(p).ms(**AS_PUBLISHED), dcp_ms, 0.01, 100)
    return study.paced(pace)


def brackets(
    *,
    alone_ms: float,
    context_tokens: float,
    dcp_ms: float | None = None,
    alike: bool = False,
) -> list[Study]:
    """Return study 1 on every machine that it may have run on, with every set of constants.

    MI355X and MI300X, the gather called as a library's and as this lab's, and the constants fitted
    to either half of the H200s' steps: eight in all. They span the transfer's uncertainty as far
    as it is known; what an MI3xx's kernels and exchanges cost by themselves is not.

    Args:
        alone_ms, context_tokens, dcp_ms: As of study1.
        alike: Whether every call of the host costs the same, a collective's as a small kernel's,
            instead of standing to one another as the H200s' do.
    """
    fits = [verdict_fit.h200(swapped=swapped).constants for swapped in (False, True)]
    if alike:
        fits = [
            dataclasses.replace(c, **dict.fromkeys(costs.HOST_CONSTANTS, c.launch_us))
            for c in fits
        ]
    return [
        study1(
            machine,
            alone_ms=alone_ms,
            context_tokens=context_tokens,
            fitted=fitted,
            library=library,
            dcp_ms=dcp_ms,
        )
        for machine, library, fitted in itertools.product(BRACKETS, (True, False), fits)
    ]


def added_parts(case: StepCase, alone: StepCase, constants: StepConstants) -> dict[str, float]:
    """Return what each part of DCP adds to a step under PIECEWISE, in ms.

    Shapley values over PARTS, every order alike: a part is the host time of some calls or the GPU
    time of some work, there or not. What hides behind the other queue counts as far as it shows.

    Args:
        case: The published gather with its sync, ag_rs, piecewise.
        alone: The same step without DCP, piecewise.
        constants: Of the machine.

    Returns:
        By part, together the step of case less that of alone.
    """
    c = constants

    def play(parts: Coalition) -> float:
        def host(part: str, us: float) -> float:
            return us if part in parts else 0.0

        work = [*costs.step_work(dataclasses.replace(alone, attention="paged"), c)]
        # The graph, write_kv, the attention and its merge: what a step without DCP has.
        dense, write, attend, merge = work
        exchange_us = c.collective_us if EXCHANGE_GPU in parts else 0.0
        small_us = c.kernel_us if EXCHANGE_GPU in parts else 0.0
        collective = Work(host(COLLECTIVES, c.collective_launch_us), exchange_us, barrier=True)
        small = Work(host(SMALL, c.launch_us), small_us)
        extra_us = host(CALLS, c.op_us - c.launch_us)
        read_us = costs.floor_us(alone.kv_bytes, c.memory_gbps)
        half_us = costs.floor_us(case.kv_bytes, c.memory_gbps)
        moved_us = costs.floor_us(2 * case.kv_bytes, c.memory_gbps)
        loop_us = costs.floor_us(3 * case.kv_bytes, c.published_gbps) - half_us - moved_us
        read_us = half_us if HALF in parts else read_us
        # The attention over the copy stands where the paged one stands; its merge is gone.
        attend_us = c.kernel_us + read_us
        attend_us += merge.gpu_us - (0.0 if KERNELS not in parts else merge.gpu_us)
        copy_us = (moved_us if BYTES in parts else 0.0) + (
            loop_us + c.kernel_us if KERNELS in parts else 0.0
        )
        layer = [dense, write, collective, small]
        layer.append(Work(attend.host_us + extra_us))
        if WAIT in parts:
            layer.append(Work(c.sync_us, c.kernel_us, sync=True))
        layer += [Work(0.0, copy_us), Work(0.0, attend_us)]
        layer += [collective, small, collective, small, small]
        before = [Work(c.launch_us, c.kernel_us)]
        return costs.timeline(layer, case.layers, before=before).step_us / 1e3

    # Every order may be.
    return shapley(play, PARTS, needs={})


def study2_pace(
    piecewise_ms: float,
    linear_launches: float,
    constants: StepConstants,
    *,
    layers: int = 93,
    kv_layers: int = 24,
) -> float:
    """Return how many times the H200s' host time study 2's PIECEWISE step would be.

    If that step is nothing but its host's calls: a graph before each layer, an exchange by a2a and
    a paged attention in those with a KV cache (the calls of dcp_lab.stack), and so many launches
    in each of the others, whose linear attention is launched between pieces too. How many those
    are the study does not say, which is why its launches cannot be priced.

    Args:
        piecewise_ms: Observed.
        linear_launches: Launches between pieces of a layer without a KV cache.
        constants: Of two H200s.
        layers, kv_layers: Of the model.
    """
    case = StepCase("piecewise", "paged", "a2a", layers, 0.0, 0.0)
    with_kv = sum(work.host_us for work in costs.step_work(case, constants))
    without = constants.graph_launch_us + linear_launches * constants.launch_us
    return piecewise_ms * 1e3 / (kv_layers * with_kv + (layers - kv_layers) * without)


def spans(rows: Sequence[dict[str, float]]) -> pd.DataFrame:
    """Return low and high of each number over several sets of constants."""
    table = pd.DataFrame(rows)
    return pd.DataFrame({"low": table.min(), "high": table.max()})
