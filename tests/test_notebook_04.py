"""Notebook 04: exercises can be solved, faults are named, figures draw what they are given."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pandas as pd
import pytest

from dcp_lab import plots_graphs
from dcp_lab.analysis import attribution, exchange, graph_steps, tables
from dcp_lab.bench.costs import Work
from dcp_lab.stack import KIMI_K3_LIKE

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "04_cudagraphs.ipynb"

RIGHT = """
answer_1 = (250, 180)
answer_2 = 94 * 9 * 35 / 1000 - 8

def step_us(host_us, gpu_us, layers, waits):
    return layers * (host_us + gpu_us if waits else max(host_us, gpu_us))
"""
WRONG = """
answer_1 = (430, 280)
answer_2 = 94 * 9 * 35 / 1000

def step_us(host_us, gpu_us, layers, waits):
    return layers * (host_us + gpu_us)
"""


@pytest.mark.parametrize(
    ("answers", "said"),
    [(RIGHT, "right."), (WRONG, "not yet. "), (None, "not answered yet.")],
    ids=["right", "wrong", "open"],
)
def test_exercises_are_checked(capsys, answers, said):
    """Right answers pass all three checks, wrong ones none, and open ones are said to be open."""
    code = [c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
    parameters, imports, *_, answer_cell, check_cell = code
    namespace: dict[str, object] = {}
    for source in (parameters, imports, answers or answer_cell, check_cell):
        exec(compile(source, NOTEBOOK.name, "exec"), namespace)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 3
    for number, line in enumerate(lines, 1):
        assert line.startswith(f"Exercise {number}: {said}")


def cell_of(name: str) -> nbformat.NotebookNode:
    (found,) = (c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c["id"] == name)
    return found


def test_each_planted_fault_is_named_with_its_line():
    """The committed table has the fault's own cause and the line of the cell that plants it."""
    planted = {
        "host_sync": 'int(w["lens"].sum())',
        "host_value": "torch.mul(",
        "growing_workspace": "torch.zeros(32",
        "rebuilt_metadata": 'w["lens"] + 1',
        "moved_buffer": 'w["x"] = torch.randn',
        "allocation": "* 2.0 + 1.0",
        "stale_output": ".copy_(mailbox)",
    }
    lines = cell_of("c09").source.splitlines()
    (output,) = cell_of("c10").outputs
    html = output.data["text/html"].replace("&nbsp;", " ")
    rows = ElementTree.fromstring(html[html.index("<table") : html.index("</div>")]).iter("tr")
    (_, *columns), *shown = ([cell.text for cell in row] for row in rows)
    table = pd.DataFrame({name: cells for name, *cells in shown}, index=columns).T
    assert len(table) == 8
    for cause, code in planted.items():
        fault = table[table.named.str.contains(cause)].iloc[0]
        assert code in fault.code and lines[int(fault.line) - 1].strip() == fault.code
    wrong = set(table.index[table["a replay"] == "wrong numbers"])
    assert "a reducer that skips a wait" in wrong and "memory taken by each call" not in wrong
    assert set(table.index[table["a replay"] == "capture is refused"]) == {
        "a value read on the host"
    }


def test_the_prose_says_what_the_rows_say():
    """Numbers that stand in the text are those of the tables and the models."""
    prose = "\n".join(
        cell.source
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells
        if cell.cell_type == "markdown"
    )
    modes = tables.published_graph_modes().set_index("cudagraph_mode").mean_tpot_ms
    slow, fast = modes.PIECEWISE, modes.FULL_AND_PIECEWISE
    engine = attribution.engine_modes(tables.measured_vllm()).tpot_ms
    most = engine[2, "a2a", "PIECEWISE"] / engine[2, "a2a", "FULL_AND_PIECEWISE"]
    exchange_rows = exchange.current(tables.measured(exchange.TABLE))
    both = exchange.pick(exchange_rows, "gather_and_reduce", "direct").set_index(exchange.CELL)
    layers = tables.measured(graph_steps.TABLE).num_layers.unique().item()
    for said in (
        f"takes {slow / fast:.1f}x to {most:.0f}x as long",
        f"{slow:.0f} against {fast:.0f} ms, so PIECEWISE added {slow - fast:.0f} ms",
        f"Study 2's {slow / fast:.1f}x against its launches",
        f"{KIMI_K3_LIKE.num_layers} layers, {len(KIMI_K3_LIKE.kv_layers)} of which have a KV",
        f"where all {layers} layers have one",
        f"by `direct` take {both.median_us[16, 128]:.1f} us together",
        f"at most {graph_steps.LIMIT_US:g} us more a layer with `direct` at "
        f"{graph_steps.AT_REQUESTS} x {graph_steps.AT_TOKENS:,} tokens",
        f"from below {graph_steps.AIM_TOKENS:,} tokens on",
    ):
        assert said in prose


def test_the_queues_end_when_the_step_does():
    """Each panel says what a layer takes: the longer queue."""
    steps = {"host": [Work(10, 1)], "GPU": [Work(1, 10)]}
    fig = plots_graphs.queues(steps, 50, "found")
    said = [text.get_text() for ax in fig.axes for text in ax.texts]
    assert said == ["10 us a layer", "10 us a layer"]
    assert fig.get_suptitle() == "found"


def test_launches_are_labelled_and_compared():
    """Bars carry their counts, a mode that cannot be has none, the title compares PIECEWISE."""
    counts = pd.DataFrame(
        {"eager": [40, 90], "piecewise": [10, 25], "full": [1, float("nan")]}, index=["a", "b"]
    )
    fig = plots_graphs.launches(counts, 5)
    said = sorted(text.get_text() for text in fig.axes[0].texts)
    assert said == ["1", "10", "25", "40", "90"]
    assert fig.get_suptitle().startswith("DCP makes 2.5x the launches")


def test_what_a_launch_costs_is_labelled():
    """Both panels carry their numbers, the legend says what is measured and what published."""
    table = pd.DataFrame(
        {"added_us": [100.0, 90.0], "each_us": [25.0, 10.0], "basis": ["measured", "published"]}
    )
    fig = plots_graphs.cost_of_a_launch(table, source="here")
    said = [[text.get_text() for text in ax.texts] for ax in fig.axes]
    assert said == [["100", "90"], ["25", "10"]]
    legend = [text.get_text() for text in fig.axes[1].get_legend().get_texts()]
    assert legend == ["measured", "published"]
    assert fig.get_suptitle().endswith("10 to 25 us")
