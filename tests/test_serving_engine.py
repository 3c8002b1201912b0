"""Notebook 05 by the project's runner, with a real `vllm serve`: TP 2 and DCP 2 on a CPU.

Needs the CPU engine, `python3 tools/cpu_engine.py`; without it the test is skipped, with
DCP_LAB_CPU_ENGINE=1 it makes it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from dcp_lab.notebooks.outputs import committable, differences

ROOT = Path(__file__).resolve().parents[1]
# Two to five minutes on two cores.
LIMIT_S = 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 120)]


@pytest.fixture(scope="module")
def vllm() -> Path:
    """Return the command of the CPU engine."""
    path = ROOT / "tools" / "cpu_engine.py"
    spec = importlib.util.spec_from_file_location("cpu_engine", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    if os.environ.get("DCP_LAB_CPU_ENGINE") == "1":
        return tool.ensure().parent / "vllm"
    if tool.stamp_of(tool.PLACE) != tool.wanted():
        pytest.skip("no CPU engine here: python3 tools/cpu_engine.py makes it (1 GB, minutes)")
    return tool.PLACE / "bin" / "vllm"


def test_notebook_05_serves_loads_asks_and_tears_down(vllm, tmp_path):
    """Each request and question is answered right, nothing is left; the committed page holds."""
    values = ("setting=cpu_dcp2", f"vllm={vllm}", "questions=4")
    words = [word for value in values for word in ("-p", value)]
    done = subprocess.run(
        [sys.executable, "-m", "dcp_lab.cli", "run", "05", *words, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    name = "notebooks/05_serve_vllm.ipynb"
    book = nbformat.read(tmp_path / name, as_version=4)
    # What does not vary: `dcp-lab run --check` leaves out notebooks that measure.
    committed = nbformat.read(ROOT / name, as_version=4)
    assert differences(committed, committable(committed, book)) == []
    said = "".join(
        output.text
        for cell in book.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )
    assert re.search(r"processes while it ran: [3-9], now: \[\]", said)
    assert "4 of 4 requests, 64 tokens in, 8 out" in said
    assert "exact_match: 1.000 of 4 questions" in said
