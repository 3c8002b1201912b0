"""The notebook check: it passes a clean notebook and finds each fault that is planted in one."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

_TOOL = Path(__file__).resolve().parent.parent / "tools" / "check_notebooks.py"
_SPEC = importlib.util.spec_from_file_location("check_notebooks", _TOOL)
check_notebooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_notebooks)


def clean() -> nbformat.NotebookNode:
    """Return a notebook with nothing wrong."""
    parameters = v4.new_code_cell(
        "seed: int = 0  # of the random numbers\ntokens: int = 4  # how many (1 to 9)",
        metadata={"tags": ["parameters"]},
        execution_count=1,
    )
    work = v4.new_code_cell(
        "for t in range(tokens):\n    print(t / 2)\n[seed for seed in (1, 2)]",
        execution_count=2,
        outputs=[
            v4.new_output("stream", name="stdout", text="data/measured 1/2 https://a.b/tmp/c")
        ],
    )
    return v4.new_notebook(
        metadata={
            "dcp_lab": {"kind": "teach"},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        cells=[v4.new_markdown_cell("# Title\nRead and/or write."), parameters, work],
    )


def found(nb: nbformat.NotebookNode, tmp_path: Path) -> list[str]:
    """Return what the check says of a notebook."""
    path = tmp_path / "01_a.ipynb"
    nbformat.write(nb, path)
    return check_notebooks.problems(path)


def stream(text: str, name: str = "stdout") -> list[nbformat.NotebookNode]:
    """Return the outputs of a cell that printed this."""
    return [v4.new_output("stream", name=name, text=text)]


def shown(mime: str, data: str) -> list[nbformat.NotebookNode]:
    """Return the outputs of a cell that showed this."""
    return [v4.new_output("display_data", data={mime: data})]


def work_cell(**fields: object):
    """Return a fault: these fields of the working cell are others."""
    return lambda nb: nb.cells[2].update(fields)


def parameters_are(source: str):
    """Return a fault: the parameters cell is this."""
    return lambda nb: nb.cells[1].update(source=source)


def metadata_has(**entries: object):
    """Return a fault: the notebook's metadata has these entries too."""
    return lambda nb: nb.metadata.update(entries)


FAULTS = {
    "no-kind": (lambda nb: nb.metadata.pop("dcp_lab"), "kind: expected one of teach"),
    "unknown-needs": (
        metadata_has(dcp_lab={"kind": "teach", "needs": ["luck"]}),
        "needs: expected a list of gpu, multigpu, vllm, aiter, got ['luck']",
    ),
    "no-title": (lambda nb: nb.cells[0].update(source="Text"), "first cell: expected markdown"),
    "gap-in-counts": (work_cell(execution_count=3), "execution counts: expected 1 to 2, got 1, 3"),
    "never-ran": (
        lambda nb: [cell.update(execution_count=None, outputs=[]) for cell in nb.cells[1:]],
        "execution counts: expected 1 to 2, got none, none",
    ),
    "error": (
        work_cell(outputs=[v4.new_output("error", ename="KeyError", evalue="a", traceback=[])]),
        "cell 2: holds an error: KeyError",
    ),
    "stderr": (work_cell(outputs=stream("a warning", "stderr")), "wrote to stderr: a warning"),
    "home-path": (work_cell(outputs=stream("in /home/jo/lab")), "path of one machine: /home/jo"),
    "windows-path": (work_cell(outputs=stream(r"in C:\lab")), r"path of one machine: C:\\l"),
    "path-in-html": (work_cell(outputs=shown("text/html", "<b>/tmp/x</b>")), "machine: /tmp/x"),
    "path-in-source": (work_cell(source="open('/mnt/a.csv')"), "source holds a path"),
    "host-name": (work_cell(outputs=stream("on box-17.lab")), "holds the name of this machine"),
    "attachment": (
        lambda nb: nb.cells[0].update(attachments={"a.png": {"image/png": "aa"}}),
        "cell 0: holds an attachment",
    ),
    "picture-in-markdown": (
        lambda nb: nb.cells[0].update(source="# T\n![a](data:image/png;base64,aa)"),
        "cell 0: holds a picture in its source",
    ),
    "picture-in-html": (
        work_cell(outputs=shown("text/html", "<img src='data:image/png;base64,aa'>")),
        "holds a picture inside HTML",
    ),
    "svg": (work_cell(outputs=shown("image/svg+xml", "<svg/>")), "holds an SVG figure"),
    "long-output": (work_cell(outputs=stream("a\n" * 101)), "printed 101 lines"),
    "large-file": (
        work_cell(outputs=shown("image/png", "a" * 700_000)),
        "kB: expected at most 600",
    ),
    "no-parameters-cell": (
        lambda nb: nb.cells[1].metadata.update(tags=[]),
        "expected one cell tagged 'parameters', got 0",
    ),
    "two-parameters-cells": (
        lambda nb: nb.cells[2].metadata.update(tags=["parameters"]),
        "expected one cell tagged 'parameters', got 2",
    ),
    "no-type": (parameters_are("tokens = 4  # how many"), "tokens: expected type int"),
    "no-help": (parameters_are("tokens: int = 4"), "tokens: expected help"),
    "not-recognised": (
        parameters_are("a: int = 1  # one\nb: str = 'x=y'  # two"),
        "parameters cell: b: expected NAME: TYPE",
    ),
    "parameter-assigned-anew": (
        work_cell(source="with open('a') as tokens:\n    pass"),
        "cell 2: assigns the parameter tokens anew",
    ),
    "sys-path": (work_cell(source="import sys\nsys.path.append('..')"), "touches sys.path"),
    "chdir": (work_cell(source="import os\nos.chdir('..')"), "changes the working folder"),
    "pip": (work_cell(source="!pip install torch"), "shell or magic line: !pip install torch"),
    "magic": (work_cell(source="%%capture\n1"), "shell or magic line: %%capture"),
    "papermill": (metadata_has(papermill={}), "metadata: papermill changes from run to run"),
    "record": (
        metadata_has(dcp_lab={"kind": "teach", "run": {}}),
        "metadata: dcp_lab.run changes",
    ),
    "python-version": (
        metadata_has(language_info={"name": "python", "version": "3.11.7"}),
        "metadata: language_info.version changes",
    ),
    "cell-times": (
        lambda nb: nb.cells[2].metadata.update(execution={"iopub.status.busy": "t"}),
        "cell 2: metadata: papermill or execution times",
    ),
    "injected": (
        lambda nb: nb.cells[2].metadata.update(tags=["injected-parameters"]),
        "cell 2: was injected",
    ),
}


def test_clean_notebook_passes(tmp_path):
    """Relative paths, addresses, fractions and comprehension variables are no faults."""
    assert found(clean(), tmp_path) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(tmp_path, monkeypatch, fault):
    """Each rule finds its fault in a notebook that is clean otherwise, and finds nothing else."""
    monkeypatch.setattr(socket, "gethostname", lambda: "box-17.lab")
    plant, message = FAULTS[fault]
    nb = clean()
    plant(nb)
    problems = found(nb, tmp_path)
    assert len(problems) == 1, problems
    assert message.replace("\\\\", "\\") in problems[0]


def test_needs_are_kept(tmp_path):
    """What a notebook needs beyond its kind is no fault."""
    nb = clean()
    nb.metadata.dcp_lab.needs = ["multigpu", "vllm"]
    assert found(nb, tmp_path) == []


def test_measure_notebook_may_be_committed_unrun(tmp_path):
    """Only a measure notebook may lack outputs: not everybody has its GPU."""
    nb = clean()
    nb.metadata.dcp_lab.kind = "measure"
    for cell in nb.cells[1:]:
        cell.update(execution_count=None, outputs=[])
    assert found(nb, tmp_path) == []


def test_file_that_is_no_notebook_is_a_problem(tmp_path):
    """A broken file is a problem, not a crash."""
    path = tmp_path / "01_a.ipynb"
    path.write_text("{}")
    assert "not a valid notebook" in check_notebooks.problems(path)[0]


def test_exit_status_tells(tmp_path, capsys):
    """Status 0 and a count for clean notebooks, 1 and a line a problem otherwise."""
    path = tmp_path / "01_a.ipynb"
    nb = clean()
    nbformat.write(nb, path)
    assert check_notebooks.main([str(path)]) == 0
    nb.cells[2].execution_count = 7
    nbformat.write(nb, path)
    assert check_notebooks.main([str(path)]) == 1
    assert "01_a.ipynb: execution counts" in capsys.readouterr().out


def test_notebooks_of_this_repository_pass(capsys):
    """What is committed keeps the rules."""
    assert check_notebooks.main([]) == 0, capsys.readouterr().out
