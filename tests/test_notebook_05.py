"""Notebook 05 says what the rows say, and its commands for eight MI355X are those there are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import nbformat
import pytest
from test_verdict_prose import unquoted, wrong

from dcp_lab import cli
from dcp_lab.analysis import attribution, engines, tables
from dcp_lab.notebooks.headlines import collect_headlines
from dcp_lab.serving import retrieval
from dcp_lab.serving.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
BOOK = nbformat.read(ROOT / "notebooks" / "05_serve_vllm.ipynb", 4)
PROSE = "\n".join(cell.source for cell in BOOK.cells if cell.cell_type == "markdown")


@pytest.fixture(scope="module")
def quotes() -> list[tuple]:
    """Texts of the prose, each with the values that its numbers have to be."""
    served = tables.measured(engines.TABLE)
    tpot, ttft = engines.times(served), engines.times(served, "ttft")
    run = engines.widest_run(tpot)
    ms, over = tpot.median_ms[run], tpot.over_none[run]
    three = ("ours_direct_full", "ours_a2a_full", "fa_a2a_full")
    ours, a2a, theirs, none = (
        ms[name] for name in ("ours_direct_full", "ours_a2a_full", "fa_a2a_full", "none_full")
    )
    # A row of another run than the widest, beside its own run's no DCP.
    (other,) = {r for r, name, _ in tpot.index if name == "gather_ag_rs_piecewise"}
    second = tpot.loc[other]
    gather = second.loc["gather_ag_rs_piecewise"]
    same = second.median_ms["none_ours_full"]
    first = ttft.loc[run]
    start = engines.engines(served).loc[run]
    tokens = engines.tokens(served).loc[run]
    modes = attribution.engine_modes(tables.measured_vllm()).tpot_ms
    full, piecewise = (
        modes[2, "a2a", mode] / modes[1, "none", mode]
        for mode in ("FULL_AND_PIECEWISE", "PIECEWISE")
    )
    stderr = 100 * tables.published_gsm8k().stderr
    study1 = attribution.metric(tables.published_serve(), attribution.MEAN_TPOT).iloc[0]
    assert not set(tpot.index.unique("row")) & {"ours_a2a_piecewise", "fa_a2a_piecewise"}
    assert start.place["ours_direct_full"] == 1 and start.place["ours_a2a_full"] > 1
    # "With a2a it costs a quarter at 2,000 and gains at 32,000 only."
    assert over["ours_a2a_full"][2000] == pytest.approx(1.25, abs=0.02)
    assert (a2a < none).loc[lambda gains: gains].index.tolist() == [32000]
    # "costs a little at 2,000 tokens, nothing to speak of at 8,000": over one yardstick.
    alone = second.over_none["none_ours_full"]
    direct = over["ours_direct_full"]
    assert 1.03 < direct[2000] / alone[2000] < 1.1 and 0.95 < direct[8000] / alone[8000] < 1.0
    return [
        ("DCP 2 costs 1.7 times the token time", 2, full),
        ("piece by piece 3.7 times", piecewise),
        ("a token takes 6.2 ms at 2,000 tokens", ours[2000], 2000),
        ("6.4 without DCP and 10.5 with", none[2000], theirs[2000]),
        (
            "at 32,000 it is 9.1 against 12.0 and 13.1",
            32000,
            ours[32000],
            none[32000],
            theirs[32000],
        ),
        (
            "takes 5.9 ms where FLASH_ATTN of the same run takes 6.4",
            same[2000],
            second.median_ms["none_full"][2000],
        ),
        (
            "100 ms at 2,000 tokens and 103 at 8,000",
            gather.median_ms[2000],
            2000,
            gather.median_ms[8000],
            8000,
        ),
        ("15.6 and 13.4 times", gather.over_none[2000], gather.over_none[8000]),
        ("Study 1 saw 4.1 times", 1, study1.dcp2 / study1.dcp1_full),
        (
            "0.86 to 0.95 times vLLM's own",
            first.over_theirs["ours_direct_full"].min(),
            first.over_theirs["ours_direct_full"].max(),
        ),
        (
            "0.90 to 1.15 times",
            first.over_theirs["ours_a2a_full"].min(),
            first.over_theirs["ours_a2a_full"].max(),
        ),
        (
            "from 692 to 1,000 ms",
            first.least_ms["ours_direct_full", 2000],
            first.most_ms["ours_direct_full", 2000],
        ),
        (
            "1.5 times the time without it at 2,000 tokens, and 1.07 at 32,000",
            first.over_none["ours_direct_full", 2000],
            2000,
            first.over_none["ours_direct_full", 32000],
            32000,
        ),
        (
            "FLASH_ATTN 2.00 times, `direct` 1.97, a2a 1.96",
            *(start.kv_over_none[name] for name in (three[2], *three[:2])),
        ),
        (
            "0.16 GiB with `direct` and 1.22 with",
            start.graph_gib["ours_direct_full"],
            start.graph_gib["fa_a2a_full"],
        ),
        (
            "a2a 49.8 s, FLASH_ATTN with DCP 2 54.8",
            start.start_s["ours_a2a_full"],
            2,
            start.start_s["fa_a2a_full"],
        ),
        (
            "8,000 tokens (0.62) and not at 32,000 (0.69)",
            8000,
            tpot.over_theirs[run]["ours_direct_full"].loc[:8000].max(),
            32000,
            tpot.over_theirs[run]["ours_direct_full"][32000],
        ),
        ("saves 4.2 ms of a token at 8,000", theirs[8000] - ours[8000], 8000),
        ("and 4.0 at 32,000", theirs[32000] - ours[32000], 32000),
        (
            "97.1 % of the positions are the same with `direct`, 95.5 % with a2a, and 96.5 % with",
            *(100 * tokens.same_share[n] for n in three),
        ),
        (
            "; 7, 10 and 8 are not",
            *(tokens.other[n] for n in three),
        ),
        ("the others 3 each are ties", tokens.tied.unique().item()),
        ("standard error (0.8 to 1.7 points)", stderr.min(), stderr.max()),
        ("78,528 weights", sum(weight.numel() for weight in retrieval.load().values())),
    ]


def test_the_prose_says_what_the_rows_say(quotes):
    """Each quoted text stands in the notebook, and its numbers are those computed here."""
    assert [text for text, *_ in quotes if text not in PROSE] == []
    assert [line for quote in quotes for line in wrong(*quote)] == []


def test_every_number_with_a_unit_is_held_to_one(quotes):
    """No ms, per cent or ratio of the prose is free to be wrong."""
    free = ["a score of 100 %", "grew 4x"]
    assert unquoted(PROSE, [text for text, *_ in quotes] + free) == []


def test_the_tables_are_those_of_today():
    """Each Markdown table of the committed outputs is what the readings give now, in order."""
    served = tables.measured(engines.TABLE)
    tpot, ttft = engines.times(served), engines.times(served, "ttft")
    shown = [
        output.data["text/markdown"]
        for cell in BOOK.cells
        for output in cell.get("outputs", [])
        if "text/markdown" in output.get("data", {})
    ]
    assert shown == [
        engines.as_markdown(table)
        for table in (
            engines.by_context(tpot, "median_ms"),
            engines.by_context(ttft, "median_ms", 0),
            engines.by_context(ttft, "over_theirs"),
            engines.engines_in_words(engines.engines(served)),
            engines.judged(served),
            engines.tokens_in_words(engines.tokens(served)),
            engines.expected(tables.headline_numbers()),
        )
    ]


def test_the_headlines_are_of_one_run():
    """What the README holds against each other was measured in one go."""
    tpot = engines.times(tables.measured(engines.TABLE))
    ms = tpot.median_ms[engines.widest_run(tpot)]
    told = {line.name: line.value for line in collect_headlines(BOOK)}
    served = "vLLM 0.25.1 on two H200s, 16 x "
    assert {name: value for name, value in told.items() if name.startswith(served)} == {
        f"{served}{context:,}: {engines.NAMES[name]}": pytest.approx(ms[name, context])
        for context in (2000, 32000)
        for name in (engines.NO_DCP, engines.THEIRS, "ours_direct_full")
    }


def test_the_commands_name_what_there_is():
    """Sets and parameters of the shell lines are the notebook's and the lab's own."""
    (block,) = re.findall(r"```bash\n(.*?)```", PROSE, re.DOTALL)
    parameters = next(c.source for c in BOOK.cells if "parameters" in c.metadata.get("tags", []))
    names = re.findall(r"^(\w+):", parameters, re.MULTILINE)
    assert set(re.findall(r"-p (\w+)=", block)) <= set(names)
    sets = re.findall(r"setting=(\w+)", block) + re.findall(r"^round (.*)$", block, re.MULTILINE)
    listed = {name for line in sets for name in re.findall(r"(?:study|one|two)\w+", line)}
    assert listed >= {s.name for s in SETTINGS.values() if s.machine == "8 MI355X"}
    assert listed <= set(SETTINGS)
    pin = re.search(r"lm_eval\[api\]==([\d.]+)", block)[1]
    assert f"lm_eval=={pin}" in (ROOT / "constraints" / "cpu-engine.txt").read_text()
    # A measured round takes longer than the runner's usual limit for a notebook.
    assert "--timeout" in block and "timeout" in inspect.signature(cli.run).parameters


def test_the_first_set_on_two_amd_gpus_is_gated():
    """It asks for full graphs with the exchange that the gate lets through, as study 1's does."""
    first, study = SETTINGS["two_gpus_a2a"].server, SETTINGS["study1_paged"].server
    assert first.additional_config == study.additional_config
    assert first.cudagraph_mode == study.cudagraph_mode == "FULL_AND_PIECEWISE"
    assert first.dcp_comm_backend == study.dcp_comm_backend == "a2a"
