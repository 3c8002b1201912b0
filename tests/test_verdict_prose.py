"""Every number in notebook 06's prose is one of the account's, as the prose rounds it."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from dcp_lab.analysis import (
    attribution,
    engines,
    tables,
    verdict_account,
    verdict_fit,
    verdict_gain,
    verdict_study,
)
from dcp_lab.analysis.verdict_account import FULL, PAGED
from dcp_lab.bench import costs

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "06_why_4x_tpot.ipynb"
PROSE = "\n".join(
    cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "markdown"
)
# A number that stands alone: not the 2 of a2a, not the 355 of MI355X.
NUMBER = re.compile(r"(?<![\w.,])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
WITH_UNIT = re.compile(NUMBER.pattern + r"(?: ?%| (?:ms|us)\b|x\b)")


def wrong(text: str, *values: float) -> list[str]:
    """Return which numbers of a text are not these values, rounded to the places it shows."""
    written = NUMBER.findall(text)
    if len(written) != len(values):
        return [f"{text!r} has {len(written)} numbers, {len(values)} values were given"]
    found = []
    for said, value in zip(written, values, strict=True):
        step = Decimal(1).scaleb(-len(said.partition(".")[2]))
        # As a table is rounded by hand: 83.35 becomes 83.4.
        right = Decimal(repr(float(value))).quantize(step, ROUND_HALF_UP)
        if Decimal(said.replace(",", "")) != right:
            found.append(f"{text!r}: {said} should be {right} ({value:.6g})")
    return found


def of_the_tables() -> list[tuple]:
    """Texts whose numbers come from the measured and published tables, with those numbers."""
    account = verdict_account.account()
    steps = account.steps.set_index("name")
    none_ms, gathered_ms, paged_ms, full_ms = steps.ms.iloc[:4]
    assert list(steps.index[2:4]) == [PAGED, FULL]
    spread = 100 * (account.steps.p90_ms - account.steps.p10_ms) / account.steps.ms
    stack = tables.measured(verdict_fit.TABLE)
    piecewise = stack[(stack["mode"] == "piecewise") & (stack.launch_delay_us == 0)]
    direct = piecewise[(piecewise.block == "base") & (piecewise.reducer == "direct")]
    alone = piecewise[(piecewise.dcp_size == 1) & (piecewise.dense == "light")]
    alone = alone[~alone.bound.astype(bool)].median_ms
    gather = piecewise[(piecewise.attention == "published") & (piecewise.reducer == "ag_rs")]
    gather = gather[gather.dense == "light"].set_index("context_tokens").median_ms.sort_index()
    in_engine = tables.measured(engines.TABLE)
    chosen = engines.chosen(in_engine, verdict_account.ENGINES)
    beside = verdict_account.beside(stack, chosen, tables.measured_vllm()).droplevel("run")
    longer = [
        beside[f"stack, {mine:,}"] - beside[f"vLLM, {near:,}"]
        for mine, near in verdict_account.NEAR
    ]
    longer = pd.concat(longer).dropna()
    longer = longer[["PIECEWISE" not in words for words in longer.index]]
    (stack_none, vllm_none), (stack_dcp, vllm_dcp) = (
        beside.loc[engines.NAMES[name]].iloc[:2] for name in ("none_piecewise", "fa_a2a_piecewise")
    )
    gain = chosen.median_ms
    direct2, none2, a2a2, theirs2, same2 = (
        gain[name]
        for name in ("ours_direct_full", "none_full", "ours_a2a_full", "fa_a2a_full",
                     "none_ours_full")
    )  # fmt: skip
    # Of two runs, each beside its own run's no DCP.
    kernel, served = chosen.loc["none_ours_full"], gain["gather_ag_rs_piecewise"]
    over = chosen.over_none["ours_direct_full"]
    fair = {
        context: engines.gap(chosen, "ours_direct_full", "none_ours_full", context)[1]
        for context in kernel.index
    }
    place = chosen.run["ours_direct_full"].iloc[0], "ours_direct_full"
    kv = engines.engines(in_engine).kv_over_none[place]
    serve = tables.published_serve()
    tpot = attribution.metric(serve, attribution.MEAN_TPOT).loc[1]
    added, growth = attribution.added_time(serve), attribution.context_growth(serve)
    modes = tables.published_graph_modes().set_index("cudagraph_mode").mean_tpot_ms
    engine = attribution.engine_modes(tables.measured_vllm()).tpot_ms
    slow, fast = (engine[2, "a2a", mode] for mode in ("PIECEWISE", "FULL_AND_PIECEWISE"))
    light, heavy = (account.hidden.loc[name] for name in account.hidden.index[:2])
    slopes = verdict_fit.slopes(stack).set_index(["attention", "reducer"])
    some = [
        slopes.loc[k] for k in (("paged", "no DCP"), ("paged", "ag_rs"), ("published", "ag_rs"))
    ]
    waits = verdict_gain.waits(stack)
    in_graph = waits[waits["mode"] == "full"].comm_least_ms
    full = verdict_gain.full_steps(stack).median_ms
    blocks = stack.groupby("block").size()
    saved_us = 1e3 * (full["ag_rs", 2500] - full["direct", 2500]) / 94
    return [
        ("made DCP 3.7x faster", modes["PIECEWISE"] / modes["FULL_AND_PIECEWISE"]),
        ("still leave 62 ms, 8.3x the step", paged_ms, paged_ms / none_ms),
        ("25 ms with the direct exchange", direct.median_ms.item()),
        ("32 ms against 62", full_ms, paged_ms),
        ("spread by 23 and 30 % of the median", spread[1], spread[2]),
        ("full graphs by at most 3.4 %", spread.drop([1, 2]).max()),
        (
            "100 ms in vLLM at 2,000 tokens and 103 at 8,000",
            served[2000],
            2000,
            served[8000],
            8000,
        ),
        ("147 and 131 on the stack", gathered_ms, gather[8192]),
        ("took 72 under PIECEWISE", slow),
        ("engine is 1.5 to 2.4 ms shorter", longer.min(), longer.max()),
        ("takes longer, 19 ms against 12 without", vllm_none, stack_none),
        ("DCP and 72 against 59 with: its", vllm_dcp, stack_dcp),
        ("the engine's 100 ms are near", served[2000]),
        (
            "PIECEWISE costs 13 ms without DCP and 62 with it.* The",
            *account.hidden.iloc[2][["alone_ms", "shared_ms"]],
        ),
        ("6.2 ms of work cannot", engine[1, "none", "FULL_AND_PIECEWISE"]),
        ("host that needs 19, and still less one that needs 72", vllm_none, vllm_dcp),
        ("gather the 83 ms are its", account.shared_ms),
        ("exchange leave 6.2 ms, 0.98 times no", direct2[2000], over[2000]),
        (
            "the same kernel takes 5.9, 0.92 times the 6.4 of its own",
            same2[2000],
            kernel.over_none[2000],
            kernel.none_ms[2000],
        ),
        ("20.1 against 20.2 ms", tpot.dcp1_piecewise, tpot.dcp1_full),
        ("with DCP 63 ms are added", account.added_ms),
        ("-0.4 ms from 2,500 to 3,000", growth.change_ms, *added.context_tokens),
        ("allowance for the spread of runs 1.5", growth.allowance_ms),
        ("would have grown by 12.6", growth.proportional_ms),
        ("148 ms against 40 under full graphs", modes["PIECEWISE"], modes["FULL_AND_PIECEWISE"]),
        ("72 against 10.5 in vLLM", slow, fast),
        (
            "costs 13 ms without DCP, and 62 with",
            *account.hidden.iloc[2][["alone_ms", "shared_ms"]],
        ),
        ("works for 17.8 ms a step", account.times["heavy"].median_ms.iloc[0]),
        ("costs 1.1 ms without DCP", heavy.alone_ms),
        ("(0.8 to 1.7 with", heavy.alone_low, heavy.alone_high),
        ("it works for 7.4 ms", none_ms),
        ("hide as much: 4.5 ms", light.alone_ms),
        ("45 and 50 ms", heavy.shared_ms, light.shared_ms),
        ("(34 to 52 and", heavy.shared_low, heavy.shared_high),
        ("and 33 to 52)", light.shared_low, light.shared_high),
        ("not its whole 63 ms", account.added_ms),
        ("hide behind it, and the step took 11.9 to 15.7 ms", alone.min(), alone.max()),
        ("Between 10 and 30 us every", *sorted(set(stack.launch_delay_us) - {0.0})),
        ("slope 1.0 without DCP, 1.2 and 1.4 with it", *(row.slope for row in some)),
        (
            "at their worst 0.6 to 2.2",
            min(row.slope_low for row in some),
            max(row.slope_high for row in some),
        ),
        ("take 20 us longer adds 8 ms", 20, 20 * some[0].ms_per_us),
        ("20 to 31 with DCP", 20 * some[1].ms_per_us, 20 * some[2].ms_per_us),
        ("4 a layer without DCP", some[0].launches // 94),
        ("131 to 163 ms in no order", gather.loc[:8192].min(), gather.loc[:8192].max()),
        ("the GPU's, 296 ms", gather[32768]),
        ("at most 9 % of", 100 * growth.share_high),
        ("cannot split the 63 ms", account.added_ms),
        ("given the 20.2 ms", account.alone_ms),
        ("and the 83.4 ms", account.shared_ms),
        ("The same 63 ms are", account.added_ms),
        ("Its 148 ms depend", modes["PIECEWISE"]),
        ("run 1.8 to 3.0 ms a step", in_graph.min(), in_graph.max()),
        ("run up to 105 ms on one rank", waits[waits["mode"] == "piecewise"].comm_ms.max()),
        ("without it that step takes 62 ms", paged_ms),
        ("takes 34 us a layer less", saved_us),
        ("at 8,192 tokens, 9.0 against 9.1 ms", 8192, full["direct", 8192], full["no DCP", 8192]),
        ("at 32,768, 11.2 against 13.4", 32768, full["direct", 32768], full["no DCP", 32768]),
        ("6.0 against 6.1 ms at 1,000 tokens", direct2[1000], none2[1000], 1000),
        ("6.9 against 7.6 at 8,000", direct2[8000], none2[8000], 8000),
        ("9.1 against 12.0 at 32,000", direct2[32000], none2[32000], 32000),
        ("takes 5.9 ms at 2,000 tokens and 7.1 at 8,000", same2[2000], 2000, same2[8000], 8000),
        (
            "own takes 6.4 and 7.6 (up to 1.1 % more",
            *kernel.none_ms[[2000, 8000]],
            100 * verdict_gain.runs_apart(in_engine),
        ),
        ("behind at 2,000, by 0.35 ms", 2000, fair[2000]),
        ("ahead at 8,000, by 0.14", 8000, -fair[8000]),
        ("ahead at 32,000 only, 10.9 ms", 32000, a2a2[32000]),
        ("with a2a never, 13.1", theirs2[32000]),
        ("holds 1.97 times", kv),
        ("at 3,000 tokens (9 were) and eager (5 were)", 3000, blocks["3000"], blocks["eager"]),
    ]


def of_the_model() -> list[tuple]:
    """Texts whose numbers the fitted model gives."""
    account = verdict_account.account()
    fit, swapped = account.fit, account.swapped
    c, other = fit.constants, swapped.constants
    (miss,) = fit.missed().itertuples()
    drift = 100 * (fit.paces() - 1)
    full = fit.unseen[fit.unseen["mode"] == "full"]
    engine = verdict_account.engine_check(fit).set_index(["mode", "dcp_size"])
    engine = engine[engine.reducer != "ag_rs"]
    (slow, slow1), (fast, fast1) = (
        (engine.loc[(mode, 2)], engine.loc[(mode, 1)]) for mode in ("piecewise", "full")
    )
    calls = {
        reducer: sum(call.host != "with" for call in costs.layer_calls(case))
        for reducer in (None, "ag_rs", "direct")
        for case in [costs.StepCase("piecewise", "paged", reducer, 94, 0.0, 0.0)]
    }
    two = 94 * (c.graph_launch_us + 2 * c.launch_us) / 1e3
    seven = 94 * (c.graph_launch_us + 4 * c.launch_us + 3 * c.collective_launch_us) / 1e3
    gather = [100 * ms / account.added_ms for ms in account.gather]
    both = [100 * (study["gather"] + study["host sync"]) for study in account.model_shares]
    unsolved = [study.ms(**verdict_study.AS_PUBLISHED) for study in account.free]
    few = verdict_study.study2_pace(148, 4, c)
    slowed = account.free[0].paced(few)
    crossing = verdict_gain.modelled_crossing(fit.rows, c).round(-2)
    spans = verdict_account.host_spans(account.solved)
    alone, paged, published = (spans.iloc[i] for i in range(3))
    undelayed = [
        100 * verdict_fit.h200(swapped=swap, delayed=False).worst_error for swap in (False, True)
    ]
    return [
        ("whose 4 calls a layer", calls["direct"]),
        ("579 us of host time where a repeated call takes 59", c.op_us, c.launch_us),
        ("would take 105 ms instead of 149", account.library_ms, account.lab_ms),
        ("(both modelled; measured 147)", account.steps.ms[1]),
        ("1.7 ms a step (188 of 9.1 us", 188 * c.collective_us / 1e3, 188, c.collective_us),
        ("near the 105 that the model", account.library_ms),
        ("7 to 12 ms a step for 2 calls", alone.host_low, alone.host_high, calls[None]),
        ("the GPU works for 20: all", alone.gpu_high),
        ("35 to 58 ms for 7 calls", paged.host_low, paged.host_high, calls["ag_rs"]),
        ("the GPU 23 to 24: now", paged.gpu_low, paged.gpu_high),
        ("is 13.2 % off", 100 * miss.least_error),
        ("met within 18.0 %, and within 21.2 %", *undelayed),
        ("7 calls instead of 2", calls["ag_rs"], calls[None]),
        ("cost it 11 to 35 ms", *account.hidden.iloc[3][["shared_low", "shared_high"]]),
        ("median error at most 10 %", 100 * verdict_fit.MOST_MEDIAN_ERROR),
        ("worst at most 25 %", 100 * verdict_fit.MOST_ERROR),
        ("one corner of 34** (26.0 %)", len(fit.unseen), 100 * fit.worst_error),
        ("exchanged the worst is 20.5 %", 100 * swapped.worst_error),
        ("62 to 76 ms; it took 58", miss.like_low_ms, miss.like_high_ms, miss.median_ms),
        ("samples spread by 30 %", 100 * miss.spread),
        ("8 % faster to 12 % slower", -drift.min(), drift.max()),
        ("predicted within 5.3 %", 100 * full.error.abs().max()),
        ("94 x (39 + 2 x 59) us, 14.7 ms", 94, c.graph_launch_us, 2, c.launch_us, two),
        ("the GPU's 7.4 hide", account.steps.ms[0]),
        ("3 collectives of 168 us: 73.1 ms", 3, c.collective_launch_us, seven),
        ("graph's launch (10 or 39 us)", other.graph_launch_us, c.graph_launch_us),
        ("planning call (579 or 739 us)", c.op_us, other.op_us),
        ("take 1.15 to", slow.measured_ms / slow.modelled_ms),
        ("to 1.3 times what", slow1.measured_ms / slow1.modelled_ms),
        (
            "costs 7 ms without DCP where 13 were",
            slow1.modelled_ms - fast1.modelled_ms,
            slow1.measured_ms - fast1.measured_ms,
        ),
        (
            "53 with it where 62 were",
            slow.modelled_ms - fast.modelled_ms,
            slow.measured_ms - fast.measured_ms,
        ),
        ("(24 to 58 %; above", *gather),
        ("33 to 50 %)", min(both), max(both)),
        ("at most 3.4 ms are its kernels", account.parts.high[verdict_study.KERNELS]),
        ("says 100 to 157 ms where 83.4", min(unsolved), max(unsolved), account.shared_ms),
        ("At 4 a layer its host would have to be 4.2 times", 4, few),
        (
            "would then take 62 ms under PIECEWISE, not 20.1",
            slowed.ms(mode="piecewise", **verdict_study.NO_DCP),
            account.alone_ms + account.hidden.alone_ms.iloc[3],
        ),
        ("16 of 6,400, 64 of 1,600", 16, crossing.direct[16], 64, crossing.direct[64]),
        ("a good one: 59 us a call", c.launch_us),
    ]


@pytest.fixture(scope="module")
def quotes() -> list[tuple]:
    """Every text that is held to numbers, with them."""
    return of_the_tables() + of_the_model()


def test_the_prose_says_what_the_rows_and_the_model_say(quotes):
    """Each quoted text stands in the notebook, and its numbers are those computed here."""
    assert [text for text, *_ in quotes if text not in PROSE] == []
    assert [line for quote in quotes for line in wrong(*quote)] == []


def unquoted(prose: str, texts: list[str]) -> list[str]:
    """Return the numbers with a unit that stand outside of every text."""
    spans = [m.span() for text in texts for m in re.finditer(re.escape(text), prose)]
    return [
        prose[max(0, m.start() - 40) : m.end() + 20]
        for m in WITH_UNIT.finditer(prose)
        if not any(low <= m.start() and m.start() + len(m[0].split()[0].rstrip("%x")) <= high
                   for low, high in spans)
    ]  # fmt: skip


def test_every_number_with_a_unit_is_held_to_one(quotes):
    """No ms, us, per cent or ratio of the prose is free to be wrong."""
    # The question's own words; a title's.
    free = ["every output token 4x slower", "a token 4x slower", "flat added time", "the 4x"]
    assert unquoted(PROSE, [text for text, *_ in quotes] + free) == []


def test_a_number_that_moved_is_found():
    """Another value and a missing value are told, and so is a number that no text holds."""
    assert wrong("takes 8.2 ms of 1,024", 8.2068, 1024.4) == []
    assert wrong("at 83.4", 83.35) == [] and wrong("-0.4 ms", -0.36) == []
    assert "8.2 should be 8.3" in wrong("takes 8.2 ms", 8.26)[0]
    assert "has 1 numbers, 2 values" in wrong("a2a takes 8.2 ms", 8.2, 1)[0]
    assert len(unquoted("takes 8.2 ms, then 7.1 ms", ["takes 8.2"])) == 1


def test_what_the_prose_says_without_a_number():
    """Claims of order and count: which sets, which half, which interval."""
    account = verdict_account.account()
    (miss,) = account.fit.missed().itertuples()
    assert miss.like_count == 5 and miss.median_ms < miss.like_low_ms
    launching = [
        (parts[verdict_study.COLLECTIVES] + parts[verdict_study.SMALL]) / account.added_ms
        for parts in account.part_sets
    ]
    library = ["library" in study.label for study in account.solved]
    assert [share > 0.5 for share in launching] == library and sum(library) == 4
    pace = verdict_study.study2_pace(148, 32, account.fit.constants)
    assert pace == pytest.approx(1, abs=0.05)
    for name in ("H200, light dense part: measured", *list(account.shares)[1:2]):
        share = account.shares[name].share
        assert 0.45 < share["PIECEWISE"] < 0.5 and 0.3 < share["gather"] < 0.36
        assert 0.09 < share["exchange"] < 0.12
    crossing = verdict_gain.modelled_crossing(account.fit.rows, account.fit.constants)
    assert 95_000 < 16 * crossing.direct[16] < 105_000
    assert (
        4 < crossing.a2a[16] / crossing.direct[16] < crossing.ag_rs[16] / crossing.direct[16] < 5
    )
    # "medians of 7 samples": the blocks behind the opening and the first figure.
    stack = tables.measured(verdict_fit.TABLE)
    assert set(stack[stack.block.isin(["base", "heavy"])].samples) == {7}
