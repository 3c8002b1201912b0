"""Notebook 04: its exercises can be solved, and its figures draw what they are given."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pandas as pd
import pytest

from dcp_lab import plots_graphs
from dcp_lab.bench.costs import Work

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


def test_a_launch_is_what_is_added_over_launches():
    """The right panel divides the left one by the launches."""
    table = pd.DataFrame({"added_us": [100.0, 90.0], "launches": [4, 9], "fill": ["C0", "C1"]})
    fig = plots_graphs.cost_of_a_launch(table)
    said = [[text.get_text() for text in ax.texts] for ax in fig.axes]
    assert said == [["100", "90"], ["25", "10"]]
