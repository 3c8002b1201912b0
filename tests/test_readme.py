"""The README says what the tables and notebook 06 say."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import dcp_lab

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_figure_is_notebook_06s():
    """The figure is the first one of the committed notebook, byte for byte."""
    done = subprocess.run([sys.executable, ROOT / "tools" / "readme_figure.py", "--check"])
    assert done.returncode == 0


def test_the_example_runs_as_it_is_pasted(tmp_path):
    """The README's code runs in a group of one process and gives merged heads with their LSE."""
    example = tmp_path / "example.py"
    example.write_text(re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, example],
        env=os.environ | {"MASTER_PORT": port, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([2, 16, 128]) torch.Size([2, 16])\n"


def test_the_table_has_every_public_function():
    """Each public name is in the README's table, but for types that others return."""
    inside = re.search(r"\| function \| does \|(.*?)\n\n", README, re.DOTALL).group(1)
    others = {"AttnState", "DecodeWorkspace", "GatherWorkspace", "__version__"}
    missing = [n for n in dcp_lab.__all__ if f"`{n}`" not in inside and n not in others]
    assert missing == []


def test_links_lead_somewhere():
    """Every relative link and image of the README is a file of the project."""
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_every_notebook_is_on_the_map():
    """The map of notebooks names each of them."""
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"(notebooks/{path.name})" in README
