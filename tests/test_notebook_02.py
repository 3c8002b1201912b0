"""Notebook 02: its exercises can be solved."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "02_dcp_reducers.ipynb"

RIGHT = """
answer_1 = (0, 29)
answer_2 = (4.0, math.log(4))

def extra_percent(num_ranks, dims, itemsize):
    return 100 * 4 * (num_ranks - 1) / (dims * itemsize + 4)
"""
WRONG = """
answer_1 = (1, 13)
answer_2 = (3.0, math.log(4))

def extra_percent(num_ranks, dims, itemsize):
    return 100 * 4 * num_ranks / (dims * itemsize)
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
