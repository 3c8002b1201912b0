"""The command line: quick help, plain errors, exit statuses, and who is called."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from rich.console import Console

import dcp_lab
from dcp_lab import cli

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A repository of one notebook that fails when it is asked to, and the working folder."""
    nb = v4.new_notebook(metadata={"dcp_lab": {"kind": "teach"}})
    nb.cells = [
        v4.new_markdown_cell("# A title"),
        v4.new_code_cell(
            "seed: int = 0  # of the random numbers\nworks: bool = True  # or not",
            metadata={"tags": ["parameters"]},
        ),
        v4.new_code_cell("assert works, 'asked to fail'"),
        v4.new_code_cell(
            "from dcp_lab.notebooks import headline\nheadline('n', 12.5, 'ms', basis='modelled')"
        ),
    ]
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    nbformat.write(nb, tmp_path / "notebooks" / "01_small.ipynb")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def status(*args: str) -> int:
    """Return the exit status of the command line in this process."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(args)
    return exit_.value.code or 0


def test_help_and_refusals_load_nothing_heavy():
    """Help comes without torch, triton, papermill, pandas or nbconvert."""
    heavy = ("torch", "triton", "papermill", "nbconvert", "nbformat", "pandas", "matplotlib")
    script = (
        "import sys\nfrom dcp_lab import cli\n"
        "try:\n    cli.main(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "LOADED []"
    assert "--parameter" in done.stdout


def test_run_prints_headlines_and_the_report(repository, capsys):
    """A run ends with its headline numbers and the report's path, status 0."""
    assert status("run") == 0
    said = capsys.readouterr().out
    assert "ok     01_small" in said
    assert "12.5 ms" in said
    assert "modelled" in next(line for line in said.splitlines() if "12.5 ms" in line)
    assert said.splitlines()[-1] == "report: build/report.html"
    page = (repository / "build" / "report.html").read_text()
    assert "12.5 ms</td><td>modelled</td>" in page

    assert status("run", "01", "-p", "seed=3") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "report: build/report_01_small.html"
    assert (repository / "build" / "report.html").read_text() == page


def test_a_run_of_everything_names_what_it_left_out(repository, capsys, monkeypatch):
    """Without a GPU a run of everything says which notebooks it left out; one by name none."""
    monkeypatch.setattr("dcp_lab.notebooks.execute.gpu_present", lambda: False)
    text = (repository / "notebooks" / "01_small.ipynb").read_text()
    measure = text.replace('"kind": "teach"', '"kind": "measure"')
    assert measure != text
    (repository / "notebooks" / "02_big.ipynb").write_text(measure)
    assert status("run") == 0
    said = capsys.readouterr().out
    assert "left out here: 02_big (dcp-lab doctor says why)\n" in said
    assert "ok     02_big" not in said
    assert status("run", "01") == 0
    assert "left out" not in capsys.readouterr().out


def test_a_long_headline_wraps_under_its_name(capsys):
    """The second line of a headline number begins where its first does, a notebook's name left."""
    line = types.SimpleNamespace(name="a name of many words " * 3, text="1 ms", basis="measured")
    notebook = types.SimpleNamespace(name="01_small")
    result = types.SimpleNamespace(notebook=notebook, headlines=[line])
    cli._print_headlines(Console(width=50), [result])
    said = capsys.readouterr().out.splitlines()
    lines = said[said.index(next(row for row in said if row.startswith("01_small"))) + 1 :]
    assert len(lines) > 1 and all(row[:2] == "  " != row[1:3] for row in lines)


def test_failing_notebook_is_shown_and_gives_status_1(repository, capsys):
    """The failing cell, its error and its copy are on the terminal; the report is written."""
    assert status("run", "01", "-p", "works=false") == 1
    said = capsys.readouterr().out
    assert "cell 2 of 01_small" in said
    assert "assert works, 'asked to fail'" in said
    assert "AssertionError: asked to fail" in said
    assert "partial copy: build/notebooks/01_small.ipynb" in said
    assert (repository / "build" / "notebooks" / "01_small.ipynb").exists()
    assert "AssertionError" in (repository / "build" / "report_01_small.html").read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "02"], "no notebook '02'"),
        (["run", "-p", "sed=1"], "no parameter 'sed'; did you mean seed?"),
        (["run", "-p", "seed=x"], "seed: expected int, got 'x'"),
        (["run", "-p", "seed=1", "--check"], "leave out -p"),
        (["bench"], "bench: expected one of decode, reduce, stack, serve, got ''"),
        (
            ["bench", "prefill"],
            "bench: expected one of decode, reduce, stack, serve, got 'prefill'",
        ),
        (["report"], "no notebooks with outputs: dcp-lab run"),
        (["run", "01", "--out", "."], "out: the copy of 01_small would overwrite the notebook"),
        (["run", "--out", "pyproject.toml"], "out: expected a folder that can be written, got"),
        (["run", "--timeout", "inf"], "timeout: expected seconds from 1 up, finite, got inf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_person_can_put_right_has_no_traceback(repository, capsys, args, said):
    """A wrong name or value gives one plain message and status 2, and nothing runs."""
    assert status(*args) == 2
    error = capsys.readouterr().err
    assert error.startswith("dcp-lab: ")
    assert said in error
    assert not (repository / "build").exists()


def break_it(repository: Path, text: str) -> Path:
    path = repository / "notebooks" / "02_broken.ipynb"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cells": 3, "nbformat": 4}'])
def test_a_broken_notebook_has_no_traceback(repository, capsys, text):
    """A file that is no notebook is named by every command that reads it, with status 2."""
    break_it(repository, text)
    for args in (["run"], ["run", "--list"], ["run", "--check"]):
        assert status(*args) == 2
        assert "dcp-lab: 02_broken.ipynb: " in capsys.readouterr().err
    copies = repository / "build" / "notebooks"
    copies.mkdir(parents=True)
    break_it(repository, text).rename(copies / "02_broken.ipynb")
    assert status("report") == 2
    assert "dcp-lab: 02_broken.ipynb: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "said", [3, {}, {"name": "n"}, {"name": "n", "value": "4"}, {"name": "n", "value": 4, "x": 1}]
)
def test_a_malformed_headline_has_no_traceback(repository, capsys, said):
    """A headline number that `headline` did not write is named with its cell, with status 2."""
    path = repository / "notebooks" / "01_small.ipynb"
    nb = nbformat.read(path, as_version=4)
    data = {"application/vnd.dcp-lab.headline+json": said, "text/plain": "n"}
    nb.cells[2].outputs = [v4.new_output("display_data", data=data)]
    nbformat.write(nb, path)
    copies = repository / "build" / "notebooks"
    copies.mkdir(parents=True)
    path.rename(copies / path.name)
    assert status("report") == 2
    assert "01_small.ipynb: cell 2: headline: expected what" in capsys.readouterr().err


def test_two_notebooks_of_one_name_are_refused(repository, capsys):
    """Copies go by name, so two of one name, or a number that fits two, are refused."""
    text = (repository / "notebooks" / "01_small.ipynb").read_text()
    (repository / "01_small.ipynb").write_text(text)
    assert status("run", "01", "./01_small.ipynb") == 2
    assert "two notebooks are named 01_small" in capsys.readouterr().err
    (repository / "notebooks" / "01_other.ipynb").write_text(text)
    assert status("run", "01") == 2
    assert "notebook '01': expected one, got 01_other, 01_small" in capsys.readouterr().err
    assert not (repository / "build").exists()


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_bench_help_lists_the_benches(capsys, flag):
    """`bench --help` says what can be measured and how to go on."""
    assert status("bench", flag) == 0
    said = capsys.readouterr().out
    for words in ("decode ", "reduce ", "dcp-lab bench NAME --help", "--gate of decode, reduce"):
        assert words in said


def test_list_shows_kinds_and_parameters(repository, capsys):
    """--list names each notebook with its kind, title and parameters, and runs none."""
    assert status("run", "--list") == 0
    said = capsys.readouterr().out
    assert "01_small (teach): A title" in said
    assert "works: bool = True  # or not" in said
    assert not (repository / "build").exists()


def test_report_is_written_anew_from_copies(repository, capsys):
    """`report` needs no kernel: it writes the site from the copies that are there."""
    copies = repository / "build" / "notebooks"
    copies.mkdir(parents=True)
    (repository / "notebooks" / "01_small.ipynb").rename(copies / "01_small.ipynb")
    assert status("report") == 0
    assert capsys.readouterr().out == "report: build/site/index.html\n"
    assert "A title" in (repository / "build" / "site" / "index.html").read_text()


def test_a_report_that_cannot_be_written_has_no_traceback(repository, capsys):
    """A file where --out should be a folder is named, with status 2, and stays as it is."""
    path = repository / "notebooks" / "01_small.ipynb"
    nb = nbformat.read(path, as_version=4)
    nb.cells[2].outputs = [v4.new_output("stream", text="x")]
    nbformat.write(nb, path)
    assert status("report", "--out", "pyproject.toml") == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "dcp-lab: out: expected a folder that can be written, got pyproject.toml"
    )
    assert len(said.splitlines()) == 1 and (repository / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("command", "module", "prog"),
    [
        (["doctor"], "dcp_lab.doctor", "dcp-lab doctor"),
        (["bench", "decode"], "dcp_lab.bench.decode", "dcp-lab bench decode"),
        (["amd-report"], "dcp_lab.bench.amd", "dcp-lab amd-report"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_command_hands_its_arguments_over(monkeypatch, command, module, prog):
    """Options go through as they are, --help included, and the module's status comes back."""
    got = []

    def stand_in(args: list[str]) -> int:
        got.append((args, sys.argv[0]))
        return 3

    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(main=stand_in))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert status(*command, "--json", "--help", "x") == 3
    assert got == [(["--json", "--help", "x"], prog)]


def test_lab_opens_on_this_machine_only(repository, monkeypatch):
    """JupyterLab is started by this Python and listens on 127.0.0.1."""
    started = []
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append((path, argv)))
    assert status("lab", "--port", "9999") == 0
    ((path, argv),) = started
    assert path == argv[0] == sys.executable
    assert "--ip=127.0.0.1" in argv
    assert "--port=9999" in argv
    assert argv[-1] == str(repository / "notebooks")


def test_version_is_the_packages(capsys):
    """`version` prints dcp_lab.__version__."""
    assert status("version") == 0
    assert capsys.readouterr().out.strip() == dcp_lab.__version__
