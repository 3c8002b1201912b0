"""The README says what the tables and notebook 06 say."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_lab
from dcp_lab.analysis import attribution, tables
from dcp_lab.bench.hardware import H200, MI300X, MI355X

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DATA_README = (ROOT / "data" / "README.md").read_text()


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
    # The repeats are those of data/README.md.
    repeats = re.search(r"repeats of (\d+) to (\d+) ms, ([\d.]+)x to ([\d.]+)x", text).groups()
    low_ms, high_ms, low, high = map(float, repeats)
    said = re.search(r"64 steps: (\d+) to (\d+) ms a\n  token", DATA_README).groups()
    assert (low_ms, high_ms) == tuple(map(float, said))
    alone_ms = attribution.engine_modes(tables.measured_vllm()).tpot_ms[1, "none", "PIECEWISE"]
    assert (low, high) == tuple(round(ms / alone_ms, 1) for ms in (low_ms, high_ms))
    (share,) = re.search(r"full graphs remove (\d+) % of what it adds", text).groups()
    assert float(share) == pytest.approx(100 * account.removed_share, abs=0.5)


def test_the_figure_is_notebook_06s():
    """The figure is the last one of the committed notebook, byte for byte."""
    done = subprocess.run([sys.executable, ROOT / "tools" / "readme_figure.py", "--check"])
    assert done.returncode == 0


def test_the_gathers_share_is_the_waterfalls():
    """The share at H200 prices is the sum of notebook 06's explained parts."""
    added = attribution.added_time(tables.published_serve())
    added_ms, context = added.added_ms.loc[1], added.context_tokens.loc[1]
    step = attribution.Step()
    floor = attribution.gather_floor(step, context, (MI355X, MI300X), added_ms=added_ms)
    own, launched = (
        attribution.gather_cost(paths, step, context, H200)
        for paths in (
            attribution.decode_paths(tables.measured("decode_h200")),
            attribution.peer_paths(tables.measured("peers_h200")),
        )
    )
    published = attribution.published_gather(tables.measured("stack_h200"), step, context, H200)
    parts = attribution.waterfall(
        floor, attribution.with_launches_of(own, launched), published, added_ms=added_ms
    )
    share = 100 * parts[parts.state == "explained"].high_ms.sum() / added_ms
    shares = re.findall(r"at most (\d+) %[,a-zA-Z0-9 ]* all parts added", README)
    shares += re.findall(r"at H200 prices is at most (\d+) %, all parts added", README)
    assert len(shares) >= 2 and all(float(s) == pytest.approx(share, abs=0.5) for s in shares)
    kernels = re.search(
        r"about (\d+) ms, (\d+) % of it, at an H200's price, (\d+) to (\d+) % if", answer()
    )
    scaled = sorted(published.scaled_ms(machine) for machine in (MI355X, MI300X))
    said = [100 * ms / added_ms for ms in (published.extra_ms, *scaled)]
    assert [float(n) for n in kernels.groups()] == pytest.approx(
        [published.extra_ms, *said], abs=0.5
    )
    (left,) = re.search(r"taken at its word it leaves (\d+) %", answer()).groups()
    growth = attribution.context_growth(tables.published_serve())
    assert float(left) == pytest.approx(100 * growth.share_high, abs=0.5)
    # What the best gather costs is the full graph's.
    full = attribution.step_modes(
        tables.measured("stack_h200"), block="base", requests=16, context_tokens=2500
    ).median_ms.loc["full"]
    (best,) = re.search(r"a good gather costs about ([\d.]+) ms a step", answer()).groups()
    assert float(best) == pytest.approx(full.per_page - full.paged, abs=0.05)


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
