"""The account of the 4x from the tables: what notebook 06 shows and the README says."""

from __future__ import annotations

import dataclasses
import functools

import pandas as pd

from dcp_lab.analysis import (
    attribution,
    engines,
    tables,
    verdict_fit,
    verdict_shares,
    verdict_study,
    what_if,
)
from dcp_lab.analysis.verdict_study import AS_PUBLISHED, NO_DCP, Study
from dcp_lab.bench import costs, stack

# One thing of study 1's step mended, then two, then the exchange too. The first two rows are where
# the account begins and ends.
STEPS = {
    "no DCP, full graphs": {**NO_DCP, "mode": "full"},
    "DCP 2: study 1's gather, ag_rs, PIECEWISE": AS_PUBLISHED,
    "... with the pages read in place": {**AS_PUBLISHED, "attention": "paged"},
    "... with full graphs (no host sync)": {
        **AS_PUBLISHED,
        "attention": "published_no_sync",
        "mode": "full",
    },
    "... with both": {**AS_PUBLISHED, "attention": "paged", "mode": "full"},
    "... with both and the direct exchange": {
        "dcp_size": 2,
        "attention": "paged",
        "reducer": "direct",
        "mode": "full",
    },
}
PUBLISHED_STEP, PAGED, FULL, BOTH, DIRECT = list(STEPS)[1:]
# 10th percentile, median and 90th percentile of a row.
_TIMES = ["p10_ms", "median_ms", "p90_ms"]


@dataclasses.dataclass(frozen=True)
class Account:
    """Everything that the verdict rests on.

    Attributes:
        fit, swapped: The timeline's constants from either half of the H200s' steps.
        alone_ms, shared_ms: Study 1 at its shorter context, without DCP and with it.
        added_ms: Their difference.
        solved: Study 1 under every set of constants, the host's pace solved for.
        free: The same with the H200s' host: nothing of study 1's DCP run is used.
        steps: plots_verdict.removal's table.
        hidden: plots_verdict.hidden's table.
        shares: Account -> table of each player's share.
        times: The corners behind the measured shares, by dense part.
        model_shares: Each player's share in study 1 under each set of constants.
        part_sets: Each part of study 1's added time under each set of constants, in ms.
        parts: Of each the least and the most.
        gather: All of the gather's parts together: low, high, in ms.
        library_ms: The first H200 step of STEPS with DCP, by the model, if its gather were called
            as a library's; lab_ms: as this lab calls it, which is what was measured.
        alike: Study 1 if every call of its host cost the same, see verdict_study.brackets.
    """

    fit: verdict_fit.Fit
    swapped: verdict_fit.Fit
    alone_ms: float
    shared_ms: float
    added_ms: float
    solved: list[Study]
    free: list[Study]
    steps: pd.DataFrame
    hidden: pd.DataFrame
    shares: dict[str, pd.DataFrame]
    times: dict[str, pd.DataFrame]
    model_shares: list[dict[str, float]]
    part_sets: list[dict[str, float]]
    parts: pd.DataFrame
    gather: tuple[float, float]
    library_ms: float
    lab_ms: float
    alike: list[Study]

    def removed(self, step: str, *, measured: bool) -> tuple[float, float]:
        """Return which share of what DCP adds is gone at a step of STEPS: low, high.

        Args:
            step: Its name.
            measured: On two H200s, by the medians; else by the model of study 1.
        """
        rows = self.steps.set_index("name")
        if measured:
            base, most, left = (rows.ms[n] for n in (next(iter(STEPS)), PUBLISHED_STEP, step))
            return ((most - left) / (most - base),) * 2
        lows = [self.shared_ms - rows.high_ms[step], self.shared_ms - rows.low_ms[step]]
        return lows[0] / self.added_ms, lows[1] / self.added_ms


def measured_step(table: pd.DataFrame, corner: dict[str, object], **where: object) -> pd.Series:
    """Return the first row of a corner, unbound and undelayed.

    Args:
        table: measured("stack_...").
        corner: As in STEPS.
        where: More columns and their values. Default: light dense part, 2,500 tokens.

    Raises:
        ValueError: There is no such row.
    """
    wanted = {"dense": "light", "context_tokens": 2500, "launch_delay_us": 0.0, **where, **corner}
    rows = table[~table.bound.astype(bool)]
    for name, value in wanted.items():
        rows = rows[rows[name].isna() if value is None else rows[name] == value]
    if rows.empty:
        raise ValueError(f"corner: expected one that was measured, got {wanted}")
    return rows.iloc[0]


def steps(table: pd.DataFrame, solved: list[Study], shared_ms: float) -> pd.DataFrame:
    """Return STEPS as measured on two H200s and as modelled for study 1."""
    rows = []
    for name, corner in STEPS.items():
        p10, median, p90 = measured_step(table, corner)[_TIMES]
        modelled = [study.ms(**corner) for study in solved]
        observed = {"no DCP, full graphs": solved[0].ms(**corner), PUBLISHED_STEP: shared_ms}
        rows.append(
            {
                "name": name,
                "ms": median,
                "p10_ms": p10,
                "p90_ms": p90,
                "low_ms": min(modelled),
                "high_ms": max(modelled),
                "observed_ms": observed.get(name, float("nan")),
            }
        )
    return pd.DataFrame(rows)


def hidden(
    table: pd.DataFrame, vllm: pd.DataFrame, serve: pd.DataFrame, solved: list[Study]
) -> pd.DataFrame:
    """Return what PIECEWISE adds without and with DCP, on the lab's stack, an engine and study 1.

    With DCP the pages are read in place and nothing waits, everywhere. So nobody ran it in study
    1, where it is modelled; without DCP it is published.

    Returns:
        Indexed by system: alone_ms, shared_ms, each with _low and _high: the 10th to 90th
        percentiles of both steps at their worst, or the span of the model's sets; NaN where one
        number a step was kept. basis: what shared_ms rests on.
    """
    shared = {"dcp_size": 2, "attention": "paged", "reducer": "ag_rs"}

    def stack_of(dense: str) -> dict[str, object]:
        found: dict[str, object] = {"basis": "measured"}
        for name, corner in (("alone", NO_DCP), ("shared", shared)):
            full, piecewise = (
                measured_step(table, {**corner, "mode": mode}, dense=dense)
                for mode in ("full", "piecewise")
            )
            found[f"{name}_ms"] = piecewise.median_ms - full.median_ms
            found[f"{name}_low"] = piecewise.p10_ms - full.p90_ms
            found[f"{name}_high"] = piecewise.p90_ms - full.p10_ms
        return found

    engine = attribution.engine_modes(vllm).tpot_ms
    tpot = attribution.metric(serve, attribution.MEAN_TPOT).loc[1]
    modelled = [study.ms(**shared, mode="piecewise") - study.ms(**shared, mode="full")
                for study in solved]  # fmt: skip
    found = {
        "H200 stack, light dense part": stack_of("light"),
        "H200 stack, heavy dense part": stack_of("heavy"),
        "H200 vLLM engine, light": {
            "alone_ms": engine[1, "none", "PIECEWISE"] - engine[1, "none", "FULL_AND_PIECEWISE"],
            "shared_ms": engine[2, "a2a", "PIECEWISE"] - engine[2, "a2a", "FULL_AND_PIECEWISE"],
            "basis": "measured",
        },
        "Study 1 (with DCP: modelled)": {
            "alone_ms": tpot.dcp1_piecewise - tpot.dcp1_full,
            "shared_ms": (min(modelled) + max(modelled)) / 2,
            "shared_low": min(modelled),
            "shared_high": max(modelled),
            "basis": "modelled",
        },
    }
    rows = pd.DataFrame(found).T
    return rows.astype({name: float for name in rows.columns if name != "basis"})


def _called_ms(fit: verdict_fit.Fit, *, library: bool) -> float:
    """Return study 1's step on two H200s by the model, its gather called in one of two ways."""
    row = measured_step(fit.rows, AS_PUBLISHED)
    constants = what_if.constants_of("H200", fitted=fit.constants, library=library)
    return costs.predict_ms(stack.step_case(row.to_dict()), constants)


@functools.cache
def account() -> Account:
    """Return the account, computed once: about ten seconds."""
    table = tables.measured(verdict_fit.TABLE)
    serve, vllm = tables.published_serve(), tables.measured_vllm()
    added = attribution.added_time(serve).loc[1]
    fits = verdict_fit.h200(), verdict_fit.h200(swapped=True)
    observed = {"alone_ms": added.base_ms, "context_tokens": added.context_tokens}
    solved = verdict_study.brackets(**observed, dcp_ms=added.dcp_ms)
    free = verdict_study.brackets(**observed)
    times = {dense: verdict_shares.corners(fits[0], dense=dense) for dense in ("light", "heavy")}
    model_shares = [study.shares() for study in solved]
    by_model = verdict_study.spans(model_shares)
    shares = {
        "H200, light dense part: measured": verdict_shares.shares(times["light"]),
        "H200, heavy: measured, the gather without sync modelled": verdict_shares.shares(
            times["heavy"]
        ),
        "study 1: modelled, low to high": by_model.assign(share=float("nan")),
    }
    parts = [
        verdict_study.added_parts(
            study.case(**AS_PUBLISHED), study.case(mode="piecewise", **NO_DCP), study.constants
        )
        for study in solved
    ]
    names = (
        verdict_study.CALLS,
        verdict_study.WAIT,
        verdict_study.BYTES,
        verdict_study.KERNELS,
    )
    gathers = [sum(part[name] for name in names) for part in parts]
    return Account(
        *fits,
        alone_ms=added.base_ms,
        shared_ms=added.dcp_ms,
        added_ms=added.added_ms,
        solved=solved,
        free=free,
        steps=steps(table, solved, added.dcp_ms),
        hidden=hidden(table, vllm, serve, solved),
        shares=shares,
        times=times,
        model_shares=model_shares,
        part_sets=parts,
        parts=verdict_study.spans(parts),
        gather=(min(gathers), max(gathers)),
        library_ms=_called_ms(fits[0], library=True),
        lab_ms=_called_ms(fits[0], library=False),
        alike=verdict_study.brackets(**observed, dcp_ms=added.dcp_ms, alike=True),
    )


def queue_lines(contexts: list[int]) -> pd.DataFrame:
    """Return the published step of two H200s over context, by the model: step, host, GPU, ms.

    The gather is called as this lab calls it, since that is what was measured.
    """
    fitted = verdict_fit.h200()
    row = measured_step(fitted.rows, AS_PUBLISHED)
    case = stack.step_case(row.to_dict())
    found = {}
    for context in contexts:
        kv = case.kv_bytes * context / row.context_tokens
        line = costs.predict_step(dataclasses.replace(case, kv_bytes=kv), fitted.constants)
        found[context] = {
            "step_ms": line.step_us / 1e3,
            "host_ms": line.host_us / 1e3,
            "gpu_ms": line.gpu_us / 1e3,
        }
    return pd.DataFrame(found).T.rename_axis("context_tokens")


def engine_check(fit: verdict_fit.Fit) -> pd.DataFrame:
    """Return the vLLM engine's steps beside the model's, none of which was fitted to them.

    Returns:
        mode, dcp_size, reducer, measured_ms, modelled_ms, error.
    """
    rows = attribution.engine_modes(tables.measured_vllm()).reset_index()
    names = {"PIECEWISE": "piecewise", "FULL_AND_PIECEWISE": "full"}
    light = what_if.Question(model="study 1's attention, light", tp=2, context_tokens=2000)
    constants = what_if.constants_of("H200", fitted=fit.constants)
    found = []
    for row in rows.itertuples():
        asked = {"mode": names[row.cudagraph_mode], "dcp": row.dcp_size}
        if row.dcp_size > 1:
            asked["reducer"] = row.reducer
        said = what_if.answer(dataclasses.replace(light, **asked), constants).tpot_ms
        found.append(
            {
                "mode": asked["mode"],
                "dcp_size": row.dcp_size,
                "reducer": row.reducer,
                "measured_ms": row.tpot_ms,
                "modelled_ms": said,
                "error": said / row.tpot_ms - 1,
            }
        )
    return pd.DataFrame(found)


# Rows of engine_h200x2 that the account is about.
GATHERED = "gather_ag_rs_piecewise"
ENGINES = (*engines.IN_FULL_GRAPHS, GATHERED)
# What the engine of measured_vllm() ran: rows of bench serve, in a run of its own before that.
EARLIER = {
    engines.NO_DCP: (1, "none", "FULL_AND_PIECEWISE"),
    "none_piecewise": (1, "none", "PIECEWISE"),
    "fa_a2a_piecewise": (2, "a2a", "PIECEWISE"),
}
_A2A = {"dcp_size": 2, "attention": "paged", "reducer": "a2a"}
# The same corners on the stack. FLASH_ATTN is not in it; under PIECEWISE the kernel hardly counts.
STACKED = {
    "none_ours_full": {**NO_DCP, "mode": "full"},
    GATHERED: AS_PUBLISHED,
    "ours_a2a_full": {**_A2A, "mode": "full"},
    "ours_direct_full": {"dcp_size": 2, "attention": "paged", "reducer": "direct", "mode": "full"},
    "none_piecewise": {**NO_DCP, "mode": "piecewise"},
    "fa_a2a_piecewise": {**_A2A, "mode": "piecewise"},
}
# What stands beside what: tokens of a request on the stack and in the engine.
NEAR = ((2500, 2000), (8192, 8000))


def beside(table: pd.DataFrame, served: pd.DataFrame, earlier: pd.DataFrame) -> pd.DataFrame:
    """Return the same corners on the stack and in vLLM, ms a token, run by run.

    Args:
        table: measured("stack_...").
        served: engines.chosen(...).
        earlier: measured_vllm(), of 2,000 tokens.

    Returns:
        Indexed by (run, engine) in words, each run with its own no DCP: for each of NEAR's
        contexts the stack's step, vLLM's, and vLLM's over that no DCP; NaN where there is no row.
    """

    def stacked(row: str, context: int) -> float:
        if row not in STACKED:
            return float("nan")
        try:
            return measured_step(table, STACKED[row], context_tokens=context).median_ms
        except ValueError:
            return float("nan")

    ms: dict[tuple[str, str, int], float] = {}
    for (row, context), line in served.sort_values(["apart", "run"], kind="stable").iterrows():
        run = engines.run_name(line.run)
        ms[run, engines.NO_DCP, context] = line.none_ms
        ms[run, row, context] = line.median_ms
    once = attribution.engine_modes(earlier).tpot_ms
    for row, key in EARLIER.items():
        ms["earlier", row, NEAR[0][1]] = once[key]
    found: dict[tuple[str, str], dict[str, float]] = {}
    for run, row in dict.fromkeys((run, row) for run, row, _ in ms):
        line = found[run, engines.NAMES[row]] = {}
        for mine, theirs in NEAR:
            line[f"stack, {mine:,}"] = stacked(row, mine)
            step = line[f"vLLM, {theirs:,}"] = ms.get((run, row, theirs), float("nan"))
            none = ms.get((run, engines.NO_DCP, theirs), float("nan"))
            line[f"x no DCP, {theirs:,}"] = step / none
    return pd.DataFrame(found).T.rename_axis(["run", "engine"])


def host_spans(studies: list[Study]) -> pd.DataFrame:
    """Return how long study 1's host and GPU work in a step, by the model, the others waited out.

    Args:
        studies: Account.solved.

    Returns:
        Indexed by corner under PIECEWISE ("no DCP", "pages in place", "study 1's gather"):
        host_low, host_high, gpu_low, gpu_high, ms.
    """
    corners = {
        "no DCP": NO_DCP,
        "pages in place": {"dcp_size": 2, "attention": "paged", "reducer": "ag_rs"},
        "study 1's gather": AS_PUBLISHED,
    }
    found = {}
    for name, corner in corners.items():
        lines = [
            costs.predict_step(study.case(**{**corner, "mode": "piecewise"}), study.constants)
            for study in studies
        ]
        found[name] = {
            f"{queue}_{end}": of(getattr(line, f"{queue}_us") for line in lines) / 1e3
            for queue in ("host", "gpu")
            for end, of in (("low", min), ("high", max))
        }
    return pd.DataFrame(found).T


def three_ways(
    account: Account, table: pd.DataFrame, *, floor: pd.DataFrame
) -> dict[str, tuple[str, str, str]]:
    """Return what two H200s, the model of study 1 and the published tables alone say, in words.

    Args:
        account: The account.
        table: measured("stack_...").
        floor: attribution.gather_floor of study 1's step.

    Returns:
        By question: measured, modelled, published.
    """
    serve = tables.published_serve()
    growth = attribution.context_growth(serve)
    study2 = 1 - 1 / attribution.graph_gain(tables.published_graph_modes()).ratio
    short, long = attribution.added_time(serve).context_tokens
    hidden_alone = [
        study.ms(mode="piecewise", **NO_DCP) - account.alone_ms for study in account.solved
    ]
    grown = [study.at(long).ms(**AS_PUBLISHED) - account.shared_ms for study in account.solved]
    near, far = (
        measured_step(table, AS_PUBLISHED, context_tokens=tokens).median_ms
        for tokens in (short, long)
    )
    alone = account.hidden.alone_ms
    moved = account.parts.loc[verdict_study.BYTES] / account.added_ms

    def removed(step: str) -> tuple[str, str]:
        ((measured, _), modelled) = (account.removed(step, measured=m) for m in (True, False))
        return f"{100 * measured:.0f} %", f"{_span(*(100 * share for share in modelled))} %"

    return {
        "PIECEWISE without DCP": (
            f"{alone.iloc[0]:+.1f} ms light, {alone.iloc[1]:+.1f} heavy",
            f"{_span(min(hidden_alone), max(hidden_alone), '+.1f')} ms",
            f"{alone.iloc[3]:+.1f} ms",
        ),
        f"from {short:,.0f} to {long:,.0f} tokens": (
            f"{far - near:+.0f} ms, as much as blocks drift; no growth to 8,192",
            f"{_span(min(grown), max(grown), '+.1f')} ms",
            f"{growth.change_ms:+.1f} ms, allowance {growth.allowance_ms:.1f}",
        ),
        "removed by pages in place alone": (
            *removed(PAGED),
            f"no bound: at most {100 * growth.share_high:.0f} % grows with the context",
        ),
        "removed by full graphs alone": (
            *removed(FULL),
            f"{100 * study2:.0f} % of study 2's whole step",
        ),
        "removed by both": (*removed(BOTH), "study 2: nothing was gathered"),
        "the gather's bytes": (
            "hidden",
            f"{_span(100 * moved.low, 100 * moved.high, '.1f')} %",
            f"{_span(100 * floor.low_share.min(), 100 * floor.high_share.max(), '.1f')} % "
            "if nothing hid them",
        ),
    }


def _span(low: float, high: float, form: str = ".0f") -> str:
    # 0 has no sign, whatever it was rounded from.
    ends = [format(value, form).replace("-0.0", "+0.0") for value in (low, high)]
    return " to ".join(dict.fromkeys(ends))
