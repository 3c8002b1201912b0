"""The README says what the tables and notebook 06 say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_lab.analysis import attribution, tables
from dcp_lab.bench.hardware import MI300X, MI355X

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def answer() -> str:
    found = re.search(r"\*\*The answer so far\.\*\* (.*)", README)
    return found.group(1)


def test_the_answer_quotes_the_tables():
    """Each number of the README's answer is recomputed from data/."""
    serve = tables.published_serve()
    added = attribution.added_time(serve)
    added_ms = added.added_ms.loc[1]
    floor = attribution.gather_floor(
        attribution.Step(), added.context_tokens.loc[1], (MI355X, MI300X), added_ms=added_ms
    )
    account = attribution.no_gather_account(tables.measured_vllm())
    text = answer()
    low, high, whole = re.search(
        r"cost ([\d.]+) to ([\d.]+) ms of the (\d+) ms added", text
    ).groups()
    assert float(low) == pytest.approx(floor.low_ms.min(), abs=0.005)
    assert float(high) == pytest.approx(floor.high_ms.max(), abs=0.005)
    assert float(whole) == pytest.approx(added_ms, abs=0.5)
    (ratio,) = re.search(r"two H200s ([\d.]+)x slower under PIECEWISE", text).groups()
    assert float(ratio) == pytest.approx(account.ratio, abs=0.05)
    (share,) = re.search(r"full graphs remove (\d+) % of what it adds", text).groups()
    assert float(share) == pytest.approx(100 * account.removed_share, abs=0.5)


def test_the_figure_is_notebook_06s():
    """The figure is the last one of the committed notebook, byte for byte."""
    done = subprocess.run([sys.executable, ROOT / "tools" / "readme_figure.py", "--check"])
    assert done.returncode == 0


def test_links_lead_somewhere():
    """Every relative link and image of the README is a file of the project."""
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_every_notebook_is_on_the_map():
    """The map of notebooks names each of them."""
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"(notebooks/{path.name})" in README
