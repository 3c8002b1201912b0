"""The README says what the tables and notebooks 05 and 06 say."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import dcp_lab
from dcp_lab.analysis import engines, tables

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


def test_what_was_served_is_the_headlines():
    """The section on serving has the numbers of data/headlines.json, rounded to what it shows."""
    value_of = {line["name"]: line["value"] for line in tables.headline_numbers()}
    text = re.search(r"## Serve with it\n(.*?)\n## ", README, re.DOTALL)[1]
    served = "vLLM 0.25.1 on two H200s, 16 x {:,}: {}"
    ours, none, theirs = (
        engines.NAMES[name] for name in ("ours_direct_full", engines.NO_DCP, engines.THEIRS)
    )
    for pattern, name in (
        (r"a token takes ([\d.]+) ms with DCP 2", served.format(2000, ours)),
        (r"`direct`, ([\d.]+) without DCP", served.format(2000, none)),
        (
            r"\(([\d.]+) with this lab's",
            "two H200s, vLLM, 16 x 2,000, another run: without DCP, this lab's kernel",
        ),
        (r"run\), ([\d.]+) with vLLM's", served.format(2000, theirs)),
        (r"32,000 tokens ([\d.]+),", served.format(32000, ours)),
        (r"32,000 tokens [\d.]+, ([\d.]+) and", served.format(32000, none)),
        (r"32,000 tokens [\d.]+, [\d.]+ and (\d+\.\d)", served.format(32000, theirs)),
    ):
        said = re.search(pattern, text)[1]
        assert float(said) == round(value_of[name], len(said.partition(".")[2])), name


def test_where_it_ran_is_in_the_rows():
    """The machines and versions of "Which machine" are those of the tables."""
    (box,) = re.findall(r"^\*\*An NVIDIA box\.\*\*.*$", README, re.MULTILINE)
    driver, torch, triton = re.search(
        r"driver (\d+), torch ([\d.]+), Triton ([\d.]+)\)", box
    ).groups()
    for name, gpus in (
        ("decode_h200", 1),
        ("stack_h200", 1),
        ("reduce_h200x2", 2),
        ("stack_h200x2", 2),
        ("engine_h200x2", 2),
    ):
        table = tables.measured(name)
        assert set(table.gpu_count) == {gpus} and set(table.gpu) == {"NVIDIA H200"}
        for column, said in (("driver", driver), ("torch", torch), ("triton", triton)):
            assert table[column].str.startswith(f"{said}.").all(), (name, column)
    assert (
        set(tables.measured("engine_h200x2").vllm) == {"0.25.1"} and "vLLM 0.25.1 engines" in box
    )
    # Until a table of a load test is there.
    assert tables.is_measured("serve_h200x2") != ("`vllm serve` on a GPU" in box)
