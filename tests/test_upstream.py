"""The notes for vLLM's maintainers quote the engines' rows as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_verdict_prose import wrong

from dcp_lab.analysis import engines, tables

NOTES = Path(__file__).resolve().parents[1] / "upstream"


@pytest.fixture(scope="module")
def quotes() -> list[tuple]:
    """Note, text, and the values that its numbers have to be."""
    served = tables.measured(engines.TABLE)
    tpot = engines.times(served)
    run = engines.widest_run(tpot)
    ms, ttft = tpot.median_ms[run], engines.times(served, "ttft").median_ms[run]
    taken = engines.engines(served).loc[run]
    (other,) = {r for r, name, _ in tpot.index if name == "gather_ag_rs_piecewise"}
    second = tpot.median_ms[other]
    ours, a2a, theirs, none = (
        ms[name] for name in ("ours_direct_full", "ours_a2a_full", "fa_a2a_full", "none_full")
    )
    gather, alone = second["gather_ag_rs_piecewise"], second["none_full"]
    both = (2000, 32000)
    beside = (*theirs[list(both)], *none[list(both)])
    graphs, gqa = "rocm_full_graphs.md", "rocm_gqa_dcp.md"
    return [
        (
            graphs,
            "TPOT 7.97 ms at 2,000 tokens, 10.90 at 32,000",
            a2a[2000],
            2000,
            a2a[32000],
            32000,
        ),
        (graphs, "in that run 10.48 and 13.14, no DCP 6.36 and 11.95", *beside),
        (
            graphs,
            "TPOT 100.0 ms at 2,000 tokens, no DCP in that run 6.43",
            gather[2000],
            2000,
            alone[2000],
        ),
        (graphs, "1.22 GiB for FLASH_ATTN's", taken.graph_gib["fa_a2a_full"]),
        (graphs, "and 0.28 for this lab's", taken.graph_gib["ours_a2a_full"]),
        (gqa, "100.0 ms at 2,000 tokens, 102.7 at 8,000", gather[2000], 2000, gather[8000], 8000),
        (gqa, "no DCP in that run 6.43 and 7.64", alone[2000], alone[8000]),
        (gqa, "7.97 ms at 2,000 tokens, 10.90 at 32,000", a2a[2000], 2000, a2a[32000], 32000),
        (gqa, "with a2a 10.48 and 13.14; no DCP 6.36 and 11.95", *beside),
        (gqa, "6.21 ms and 9.11", ours[2000], ours[32000]),
        (
            gqa,
            "706, 741 and 458 ms",
            *(ttft[name, 2000] for name in ("ours_direct_full", "fa_a2a_full", "none_full")),
        ),
        (gqa, "1,148,064 -> 2,248,384", *taken.kv_tokens[["none_full", "ours_a2a_full"]]),
    ]


def test_the_notes_say_what_the_rows_say(quotes):
    """Each quoted text stands in its note, and its numbers are those computed here."""
    text_of = {path.name: path.read_text() for path in NOTES.glob("*.md")}
    assert [text for note, text, *_ in quotes if text not in text_of[note]] == []
    assert [line for _, *quote in quotes for line in wrong(*quote)] == []
