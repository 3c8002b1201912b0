"""The exercises of notebook 01 can be solved, and a wrong solution is told from a right one."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "01_paged_decode_lse.ipynb"

RIGHT = """
answer_1 = 3.0
answer_2 = (4, 13)

def merge_two(out_a, lse_a, out_b, lse_b):
    top = max(lse_a, lse_b)
    if top == -math.inf:
        return 0.0, top
    a, b = math.exp(lse_a - top), math.exp(lse_b - top)
    return (a * out_a + b * out_b) / (a + b), top + math.log(a + b)
"""
WRONG = """
answer_1 = 4.0
answer_2 = (5, 13)

def merge_two(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, max(lse_a, lse_b)
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
