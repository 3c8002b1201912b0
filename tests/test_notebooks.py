"""The notebook runner: what it refuses, what it records, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from nbformat import v4

from dcp_lab import notebooks
from dcp_lab.bench import record
from dcp_lab.notebooks import (
    Headline,
    Listener,
    Notebook,
    NotebookError,
    Parameter,
    check_answer,
    execute,
    find,
    headline,
    read_parameters,
    resolve,
    run,
)
from dcp_lab.notebooks.headlines import HEADLINE_MIME, format_number
from dcp_lab.notebooks.outputs import committable, differences
from dcp_lab.notebooks.report import write_report

REPOSITORY = Path(__file__).resolve().parent.parent
PARAMETERS = """\
seed: int = 0  # of the random numbers
context_tokens: int = 64  # KV tokens of a request (1 to 4096)
hardware: str = "H200"  # whose bandwidth (one of MI355X, H200)
"""
DRAW = "import random\nfrom dcp_lab.notebooks import headline\nrandom.seed(seed)"


def code(source: str, *tags: str) -> nbformat.NotebookNode:
    """Return a code cell."""
    return v4.new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def write(
    root: Path, name: str, *cells: str, kind: str | None = "teach", parameters: str = PARAMETERS
) -> Path:
    """Write a notebook of a title, parameters and these code cells into root/notebooks."""
    nb = v4.new_notebook(metadata={"dcp_lab": {"kind": kind}} if kind else {})
    nb.cells = [v4.new_markdown_cell(f"# Title of {name}"), code(parameters, "parameters")]
    nb.cells += [code(cell) for cell in cells]
    path = root / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").touch()
    nbformat.write(nb, path)
    return path


def read(path: Path) -> nbformat.NotebookNode:
    """Return a notebook as it is on disk."""
    return nbformat.read(path, as_version=4)


def process_lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return status != "Z"


def wait_until(done, seconds: float) -> bool:
    """Return whether done() came true within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.1)
    return bool(done())


# Parameters


@pytest.mark.parametrize(
    ("type_name", "text", "value"),
    [
        ("int", "8192", 8192),
        ("int", "-3", -3),
        ("float", "0.5", 0.5),
        ("float", "1e9", 1e9),
        ("bool", "true", True),
        ("bool", "No", False),
        ("str", "MI355X", "MI355X"),
        ("list[int]", "[1, 2,3]", [1, 2, 3]),
        ("list[int]", "7", [7]),
        ("list[float]", "0.5,2", [0.5, 2.0]),
        ("list[str]", "a2a,'ag_rs'", ["a2a", "ag_rs"]),
    ],
)
def test_typed_text_becomes_a_value(type_name, text, value):
    """A value typed on the command line arrives as its parameter's type."""
    parsed = Parameter("x", type_name, None, "help").parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("type_name", "hint", "text"),
    [
        ("int", "", "abc"),
        ("int", "", "1.5"),
        ("int", "", "1,5"),
        ("int", "", ""),
        ("float", "", "fast"),
        ("float", "", "nan"),
        ("bool", "", "maybe"),
        ("list[int]", "", "1,x"),
        ("int", " (1 to 10)", "0"),
        ("int", " (1 to 10)", "11"),
        ("list[int]", " (1 to 10)", "3,11"),
        ("float", " (0.5 to 1e3)", "0.25"),
        ("str", " (one of A, B)", "C"),
        ("list[str]", " (one of A, B)", "A,C"),
    ],
)
def test_bad_value_is_refused_with_what_was_expected(type_name, hint, text):
    """A value of another type, or outside of what the help allows, is refused by name."""
    with pytest.raises(NotebookError, match=rf"^x: expected {re.escape(type_name)}.*got"):
        Parameter("x", type_name, None, f"help{hint}").parse(text)


def test_parameters_cell_gives_type_default_and_help(tmp_path):
    """Name, type, default and help of each line are read."""
    found = read_parameters(write(tmp_path, "01_a"))
    assert list(found) == ["seed", "context_tokens", "hardware"]
    assert found["context_tokens"] == Parameter(
        "context_tokens", "int", 64, "KV tokens of a request (1 to 4096)"
    )


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("tokens = 4  # help", "tokens: expected type int.*got no type"),
        ("tokens: int = 4", "tokens: expected help"),
        ("tokens: dict = 4  # help", "tokens: expected type int.*got dict"),
        ("tokens: int = n  # help", "tokens: expected a literal as default, got n"),
        ("tokens: int = 4.0  # help", "tokens: expected int as default, got 4.0"),
        ("tokens: int = True  # help", "tokens: expected int as default, got True"),
        ("tokens: list[int] = [1, 'a']  # help", r"tokens: expected list\[int\] as default"),
        ("tokens: int = 0  # help (1 to 9)", "default of tokens: expected int from 1 to 9, got 0"),
    ],
)
def test_bad_parameters_cell_is_refused(tmp_path, line, match):
    """A parameter without type or help, or with a default it would refuse itself, is an error."""
    path = write(tmp_path, "01_a", parameters=line)
    with pytest.raises(NotebookError, match=match):
        read_parameters(path)


# Finding


def test_notebooks_are_found_by_number_name_and_path(tmp_path):
    """A number, a name with or without its number and a path all lead to the notebook, once."""
    paths = [write(tmp_path, name) for name in ("01_decode", "06_why_4x")]
    for name in ("06", "6", "06_why_4x", "why_4x", str(paths[1])):
        assert find([name], tmp_path) == [paths[1]]
    assert find([], tmp_path) == paths
    assert find(["6", "why_4x", "1"], tmp_path) == [paths[1], paths[0]]


@pytest.mark.parametrize("name", ["07", "why_4", "notebooks/none.ipynb"])
def test_unknown_notebook_is_refused_with_those_there_are(tmp_path, name):
    """An unknown name is refused, and the message lists what there is."""
    write(tmp_path, "06_why_4x")
    with pytest.raises(NotebookError, match=r"no notebook .*\n(.*\n)*  06_why_4x"):
        find([name], tmp_path)


def test_repository_is_found_from_below(tmp_path, monkeypatch):
    """The repository is the nearest folder upwards with notebooks/ and pyproject.toml."""
    write(tmp_path, "01_a")
    below = tmp_path / "data" / "measured"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert notebooks.find_root() == tmp_path


def test_no_repository_is_said(tmp_path, monkeypatch):
    """Outside of a repository, with the package elsewhere, the error says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebooks.books, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    with pytest.raises(NotebookError, match="no folder notebooks/"):
        notebooks.find_root()


@pytest.mark.parametrize("kind", [None, "demo"])
def test_notebook_without_a_kind_is_refused(tmp_path, kind):
    """metadata.dcp_lab.kind must be one of the three kinds."""
    path = write(tmp_path, "01_a", kind=kind)
    with pytest.raises(NotebookError, match="kind: expected teach, measure, analyse"):
        Notebook.read(path)


def test_file_that_is_no_notebook_is_refused(tmp_path):
    """A file that is not JSON is named, not met with a traceback."""
    path = tmp_path / "01_a.ipynb"
    path.write_text("no json")
    with pytest.raises(NotebookError, match="01_a.ipynb: not a notebook"):
        Notebook.read(path)


def test_override_goes_to_every_notebook_that_has_it(tmp_path):
    """One -p reaches all notebooks with that parameter and leaves the others alone."""
    first = Notebook.read(write(tmp_path, "01_a"))
    second = Notebook.read(write(tmp_path, "02_b", parameters="seed: int = 0  # numbers"))
    assert resolve([first, second], ["context_tokens=128", "seed=3"]) == {
        "01_a": {"context_tokens": 128, "seed": 3},
        "02_b": {"seed": 3},
    }


@pytest.mark.parametrize(
    ("assignment", "match"),
    [
        ("context_token=1", r"no parameter 'context_token'; did you mean context_tokens\?"),
        ("context_tokens=abc", "01_a: context_tokens: expected int from 1 to 4096, got 'abc'"),
        ("context_tokens=0", "01_a: context_tokens: expected int from 1 to 4096, got 0"),
        ("hardware=B200", "01_a: hardware: expected str, one of MI355X, H200, got 'B200'"),
    ],
)
def test_bad_override_is_refused_with_the_valid_ones(tmp_path, assignment, match):
    """An unknown name or a bad value is refused, with type, default and help of the valid ones."""
    notebook = Notebook.read(write(tmp_path, "01_a"))
    with pytest.raises(NotebookError, match=match) as error:
        resolve([notebook], [assignment])
    assert "context_tokens: int = 64  # KV tokens of a request (1 to 4096)" in str(error.value)


@pytest.mark.parametrize("assignment", ["context_tokens", "=3", "a b=3"])
def test_override_without_a_name_is_refused(tmp_path, assignment):
    """What is not NAME=VALUE is refused."""
    notebook = Notebook.read(write(tmp_path, "01_a"))
    with pytest.raises(NotebookError, match="expected NAME=VALUE"):
        resolve([notebook], [assignment])


# Headline numbers


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (62.84, 3, "62.8"),
        (0.0, 3, "0"),
        (1234567, 3, "1,234,567"),
        (1234.5, 3, "1,230"),
        (4.128, 2, "4.1"),
        (3.21e-7, 2, "3.2e-07"),
        (-0.05, 1, "-0.05"),
        (9.996, 3, "10.00"),
    ],
)
def test_numbers_show_their_significant_digits(value, digits, text):
    """An int is shown whole, a float with the digits that mean something."""
    assert format_number(value, digits) == text


def test_headline_outside_of_a_notebook_is_printed(capsys):
    """Without a kernel a headline number is a line of text; numpy and torch scalars will do."""
    headline("added time", np.float64(62.84), "ms")
    headline("ratio", torch.tensor(4.13), "x", digits=2)
    assert capsys.readouterr().out == "added time: 62.8 ms\nratio: 4.1x\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "62", None, True])
def test_headline_refuses_what_is_no_finite_number(value):
    """A headline number is a finite number."""
    with pytest.raises(ValueError, match=r"headline 'x': value: expected a finite number"):
        headline("x", value)


def test_headline_refuses_an_unknown_basis():
    """Where a number comes from is one of four words."""
    with pytest.raises(ValueError, match="basis: expected one of published, measured, modelled"):
        headline("x", 1.0, basis="guessed")


def test_headline_refuses_no_digits():
    """At least one digit is shown."""
    with pytest.raises(ValueError, match="digits: expected an int >= 1, got 0"):
        headline("x", 1.0, digits=0)


# Exercises


@pytest.mark.parametrize(
    ("answer", "expected", "said"),
    [
        (None, 3.0, "not answered yet."),
        (3.001, 3.0, "right."),
        (torch.tensor([4, 13]), (4, 13), "right."),
        ([[0.0, -np.inf]], [(0.0, -np.inf)], "right."),
        (3.1, 3.0, "not yet. Look at the weights."),
        ((4, 13, 1), (4, 13), "not yet. Look at the weights."),
        ((4, None), (4, 13), "not yet. Look at the weights."),
        ("four", 4, "not yet. Look at the weights."),
        ([[0.0, np.nan]], [(0.0, -np.inf)], "not yet. Look at the weights."),
    ],
)
def test_answers_are_told_right_from_wrong(capsys, answer, expected, said):
    """An answer is right to 0.1 %, wrong with a hint, or not there yet."""
    check_answer(2, answer, expected, hint="Look at the weights.")
    assert capsys.readouterr().out == f"Exercise 2: {said}\n"


# Running


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> tuple[Path, Sequence[notebooks.Result]]:
    """Run a good notebook, one that fails, and one after it."""
    root = tmp_path_factory.mktemp("three")
    write(
        root,
        "01_good",
        DRAW,
        "import os, sys\nprint(sys.executable)\nprint(os.environ['PYTHONHASHSEED'], os.getcwd())",
        "headline('drawn', random.random(), 'us')\nheadline('tokens', context_tokens)",
    )
    write(root, "02_bad", "print('before')", "y = 1 / (context_tokens - 128)", "print('never')")
    write(root, "03_after", "print('after')")
    return root, run([], ["context_tokens=128"], root=root)


def test_failure_is_reported_and_the_rest_still_runs(three):
    """The failing cell and its error come back; the notebook after it runs."""
    _, (good, bad, after) = three
    assert [result.ok for result in (good, bad, after)] == [True, False, True]
    assert bad.failure.cell == 3
    assert bad.failure.source == "y = 1 / (context_tokens - 128)"
    assert bad.failure.error == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in bad.failure.traceback


def test_failing_notebook_leaves_its_partial_copy(three):
    """The copy of a notebook that failed holds what ran before and the error, nothing after."""
    root, (_, bad, _) = three
    assert bad.copy == root / "build" / "notebooks" / "02_bad.ipynb"
    outputs = {cell.source: cell.get("outputs", []) for cell in read(bad.copy).cells}
    assert outputs["print('before')"][0].text == "before\n"
    assert outputs["y = 1 / (context_tokens - 128)"][0].ename == "ZeroDivisionError"
    assert outputs["print('never')"] == []


def test_headline_numbers_are_collected(three):
    """headline() in a kernel is seen by the runner, and all of a run end up in headline.json."""
    root, (good, _, _) = three
    drawn, tokens = good.headlines
    assert (drawn.name, drawn.unit) == ("drawn", "us")
    assert tokens == Headline("tokens", 128)
    kept = json.loads((root / "build" / "headline.json").read_text())
    assert [number["name"] for number in kept["numbers"]] == ["drawn", "tokens"]
    assert kept["numbers"][1] == {
        "notebook": "01_good",
        "name": "tokens",
        "value": 128,
        "unit": "",
        "digits": 3,
        "varies": False,
        "basis": "",
    }


def test_copy_records_what_it_ran_with(three):
    """Parameters, seed, commit and versions stand in the copy's metadata and in a visible cell."""
    _, (good, _, _) = three
    nb = read(good.copy)
    ran = nb.metadata.dcp_lab.run
    assert ran.parameters == {"seed": 0, "context_tokens": 128, "hardware": "H200"}
    assert ran.seed == 0
    assert ran.torch == torch.__version__
    for key in ("git_commit", "date_utc", "python", "triton", "dcp_lab", "gpu"):
        assert key in ran
    shown = nb.cells[-1]
    assert shown.cell_type == "markdown"
    assert "context_tokens = 128" in shown.source
    assert ran.git_commit in shown.source


def test_kernel_is_this_python_in_the_notebooks_folder(three):
    """The kernel is the runner's own Python, with a fixed hash seed, where the notebook lies."""
    root, (good, _, _) = three
    printed = read(good.copy).cells[4].outputs[0].text
    assert printed == f"{sys.executable}\n0 {root / 'notebooks'}\n"


def test_same_parameters_give_the_same_numbers(three, tmp_path, monkeypatch):
    """Two runs with the same parameters give the same numbers; another seed gives others.

    Nor does it matter what somebody has installed as the kernel 'python3'.
    """
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["false"], "display_name": "X", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    root, (good, _, _) = three
    out = root / "again"
    again = run(["1"], ["context_tokens=128"], root=root, out_dir=out)[0]
    other = run(["1"], ["seed=1"], root=root, out_dir=out)[0]
    assert again.headlines == good.headlines
    assert other.headlines[0].value != good.headlines[0].value


def test_repository_notebook_is_left_alone(three):
    """Running writes into copies: the notebook itself has no outputs and no record."""
    root, _ = three
    nb = read(root / "notebooks" / "01_good.ipynb")
    assert all(not cell.get("outputs") for cell in nb.cells)
    assert "run" not in nb.metadata.dcp_lab


def test_nothing_runs_when_anything_asked_for_is_wrong(tmp_path):
    """One bad value among several notebooks stops the run before its first cell."""
    write(tmp_path, "01_a", "print(1)")
    with pytest.raises(NotebookError, match="expected int"):
        run([], ["context_tokens=abc"], root=tmp_path)
    assert not (tmp_path / "build").exists()


def test_nothing_to_run_is_said(tmp_path, monkeypatch):
    """Measure notebooks alone, without a GPU and without being named, are an error."""
    write(tmp_path, "03_b", kind="measure")
    monkeypatch.setattr(execute, "gpu_present", lambda: False)
    with pytest.raises(NotebookError, match="no notebook that can run here"):
        run(root=tmp_path)


def test_listener_hears_every_cell_once(tmp_path):
    """Progress counts the notebook's own cells, whatever cells the run adds."""
    heard = []

    class Ears(Listener):
        def notebook_starts(self, notebook, cells):
            heard.append(cells)

        def cell_starts(self, notebook, index):
            heard.append(index)

    write(tmp_path, "01_a", "x = 1")
    run([], ["seed=1"], root=tmp_path, listener=Ears())
    assert heard[0] == 3
    assert sorted(set(heard[1:])) == [0, 1, 2, 3]


def test_measure_notebooks_need_a_gpu_or_their_name(tmp_path, monkeypatch):
    """Without names, measure notebooks run only where a GPU is; named, they always do."""
    write(tmp_path, "01_a", kind="teach")
    write(tmp_path, "03_b", kind="measure")
    ran = []

    def note(notebook, *args, **kwargs):
        ran.append(notebook.name)
        return execute.Result(notebook, notebook.path, 0.0, ())

    monkeypatch.setattr(execute, "_execute", note)
    for gpu, names, expected in [
        (False, [], ["01_a"]),
        (True, [], ["01_a", "03_b"]),
        (False, ["03"], ["03_b"]),
    ]:
        ran.clear()
        monkeypatch.setattr(execute, "gpu_present", lambda gpu=gpu: gpu)
        run(names, root=tmp_path)
        assert ran == expected


@pytest.mark.parametrize("needs", ["gpu", "multigpu", "vllm", "aiter"])
def test_needs_of_a_notebook_are_heeded(tmp_path, monkeypatch, needs):
    """Without names, a notebook that needs what is not here does not run; its needs are kept."""
    path = write(tmp_path, "01_a")
    nb = read(path)
    nb.metadata.dcp_lab.needs = [needs]
    nbformat.write(nb, path)
    assert Notebook.read(path).needs == (needs,)
    assert committable(nb, nb).metadata.dcp_lab == {"kind": "teach", "needs": [needs]}
    monkeypatch.setattr(execute, "gpu_present", lambda: False)
    monkeypatch.setattr(execute.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotebookError, match="no notebook that can run here"):
        run(root=tmp_path)


def test_unknown_needs_are_refused(tmp_path):
    """A need that nobody knows how to check is refused."""
    path = write(tmp_path, "01_a")
    nb = read(path)
    nb.metadata.dcp_lab.needs = ["luck"]
    nbformat.write(nb, path)
    with pytest.raises(NotebookError, match=r"needs: expected a list of gpu.*got \['luck'\]"):
        Notebook.read(path)


def test_notebook_past_its_time_is_ended(tmp_path):
    """The time is the whole notebook's: the cell that passes it fails, and the kernel is gone."""
    pid_file = tmp_path / "pid"
    wait = "time.sleep(6)"
    write(
        tmp_path,
        "01_long",
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n{wait}",
        wait,
    )
    (result,) = run(root=tmp_path, timeout_s=9)
    assert result.failure.error.startswith("TimeoutError: the notebook took longer than 9 s")
    assert result.failure.source.endswith(wait)
    stopped = read(result.copy).cells[result.failure.cell]
    assert stopped.outputs[-1].ename == "TimeoutError"
    assert wait_until(lambda: not process_lives(int(pid_file.read_text())), 10)


def test_kernel_that_dies_is_a_failure(tmp_path):
    """A kernel that dies fails its notebook with the cell, and its last words are kept."""
    write(
        tmp_path,
        "01_dead",
        "import os, signal, sys\nprint('last words', file=sys.__stderr__, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    (result,) = run(root=tmp_path)
    assert result.failure.error.startswith("DeadKernelError: the kernel died here")
    assert result.failure.cell == 2
    assert "last words" in result.copy.with_suffix(".log").read_text()


def test_kernel_that_never_starts_is_a_failure(tmp_path, monkeypatch):
    """A Python without a kernel fails the notebook before its first cell."""
    write(tmp_path, "01_a", "print(1)")
    monkeypatch.setattr(sys, "executable", "false")
    (result,) = run(root=tmp_path)
    assert result.failure.error.startswith("the kernel did not start")
    assert result.failure.cell == -1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_interrupt_leaves_no_kernel_behind(tmp_path, number):
    """Ctrl-C and a polite kill end the run with status 130 and end its kernel."""
    pid_file = tmp_path / "pid"
    write(
        tmp_path,
        "01_long",
        f"import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)",
    )
    with subprocess.Popen(
        [sys.executable, "-m", "dcp_lab.cli", "run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert wait_until(lambda: pid_file.exists() and pid_file.read_text(), 90)
            process.send_signal(number)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert wait_until(lambda: not process_lives(int(pid_file.read_text())), 10)


# Committed outputs


def test_in_place_leaves_outputs_and_nothing_that_changes(tmp_path, monkeypatch):
    """in_place writes outputs and counts 1..N but no times, paths, versions; check then agrees."""
    path = write(
        tmp_path,
        "01_a",
        f"{DRAW}\nimport os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])",
        "",
        "headline('drawn', random.random())\n1 + 1",
    )
    write(tmp_path, "02_bad", "print('out')", "1 / 0")
    before = read(path)
    facts = record.provenance() | {"gpu": "NVIDIA H200", "gpu_count": 2}
    monkeypatch.setattr(record, "provenance", lambda: facts)
    good, bad = run(root=tmp_path, in_place=True)
    assert good.ok
    assert not bad.ok
    nb = read(path)
    assert [cell.source for cell in nb.cells] == [cell.source for cell in before.cells]
    counts = [cell.execution_count for cell in nb.cells if cell.cell_type == "code"]
    assert counts == [1, 2, None, 3]
    # Committed outputs are those of a machine without a GPU.
    assert nb.cells[2].outputs[0].text == "-1\n"
    assert read(good.copy).metadata.dcp_lab.run.gpu == "none"
    assert HEADLINE_MIME in nb.cells[4].outputs[0].data
    assert nb.cells[4].outputs[1].execution_count == 3
    assert set(nb.metadata) == {"dcp_lab", "kernelspec", "language_info"}
    assert nb.metadata.dcp_lab == {"kind": "teach"}
    assert str(tmp_path) not in path.read_text()
    assert "papermill" not in path.read_text()
    failed = read(tmp_path / "notebooks" / "02_bad.ipynb")
    assert all(not cell.get("outputs") for cell in failed.cells)

    written = path.read_bytes()
    (checked,) = run(["1"], root=tmp_path, check=True)
    assert checked.ok
    assert path.read_bytes() == written
    path.write_text(path.read_text().replace('"value": 0.8', '"value": 0.7'))
    (stale,) = run(["1"], root=tmp_path, check=True)
    assert not stale.ok
    assert stale.stale == ("drawn: committed 0.744, now 0.844",)


@pytest.mark.parametrize("mode", ["in_place", "check"])
def test_committed_outputs_are_those_of_the_defaults(tmp_path, mode):
    """Overrides together with in_place or check are refused."""
    write(tmp_path, "01_a")
    with pytest.raises(NotebookError, match="leave out -p"):
        run(["01"], ["seed=1"], root=tmp_path, **{mode: True})


def printed(*texts: str, tags: Sequence[str] = ()) -> nbformat.NotebookNode:
    """Return a notebook of one cell that printed these texts."""
    cell = code("print()", *tags)
    cell.outputs = [v4.new_output("stream", name="stdout", text=text) for text in texts]
    return v4.new_notebook(cells=[cell])


def written(text: str) -> nbformat.NotebookNode:
    """Return a notebook of one cell that showed this as Markdown, with the text IPython adds."""
    cell = code("Markdown()")
    data = {"text/markdown": text, "text/plain": "<IPython.core.display.Markdown object>"}
    cell.outputs = [v4.new_output("execute_result", data=data)]
    return v4.new_notebook(cells=[cell])


def headlined(**values: object) -> nbformat.NotebookNode:
    """Return a notebook of one headline number."""
    cell = code("headline()")
    data = {HEADLINE_MIME: values, "text/plain": "a number"}
    cell.outputs = [v4.new_output("display_data", data=data)]
    return v4.new_notebook(cells=[cell])


@pytest.mark.parametrize(
    ("committed", "fresh", "match"),
    [
        pytest.param(printed("a 1.0\n"), printed("b 1.0\n"), "committed 'a 1.0'", id="word"),
        pytest.param(printed("a 1.0\n"), printed("a 1.1\n"), "now 'a 1.1'", id="number"),
        pytest.param(printed("a\n"), printed("a\nb\n"), "1 lines, now 2", id="line"),
        pytest.param(printed("a\n"), printed(), r"committed \['text'\], now \[\]", id="output"),
        pytest.param(
            written("takes 4.0 ms"), written("takes 4.1 ms"), "now .takes 4.1 ms", id="said"
        ),
        pytest.param(written("a\n\nlevel"), written("a\n\nlonger"), "now 'longer'", id="claim"),
        pytest.param(
            headlined(name="t", value=4.0), headlined(name="t", value=4.1), "t: c", id="headline"
        ),
        pytest.param(
            headlined(name="t", value=4.0), headlined(name="u", value=4.0), "now .'u'", id="name"
        ),
        pytest.param(
            headlined(name="t", value=4.0, unit="ms"),
            headlined(name="t", value=4.0, unit="us"),
            "committed 4.00 ms, now 4.00 us",
            id="unit",
        ),
        pytest.param(
            headlined(name="t", value=9.12), headlined(name="t", value=9.13), "t: c", id="digit"
        ),
        pytest.param(
            headlined(name="t", value=1001), headlined(name="t", value=1002), "t: c", id="int"
        ),
    ],
)
def test_what_changed_is_told(committed, fresh, match):
    """Another word, number, line, output or headline number is a difference."""
    found = differences(committed, fresh)
    assert len(found) == 1
    assert re.search(match, found[0])


@pytest.mark.parametrize(
    ("committed", "fresh"),
    [
        pytest.param(printed("a 1.00000\n"), printed("a  1.00001\n"), id="last-digits"),
        pytest.param(written("a 1.00000"), written("a  1.00001"), id="last-digits-of-markdown"),
        pytest.param(
            printed("3 us", tags=["varies"]), printed("9 us", tags=["varies"]), id="varies-cell"
        ),
        pytest.param(
            headlined(name="t", value=4.0, varies=True),
            headlined(name="t", value=9.0, varies=True),
            id="varies-headline",
        ),
        pytest.param(
            headlined(name="t", value=4.001), headlined(name="t", value=4.005), id="below-a-digit"
        ),
        pytest.param(
            printed("<Styler at 0x7f11aa22bb33>"),
            printed("<Styler at 0x7fccdd44ee55>"),
            id="address",
        ),
    ],
)
def test_what_may_vary_is_no_difference(committed, fresh):
    """Rounding, addresses and what is marked as varying do not make outputs stale."""
    assert differences(committed, fresh) == []


# The report


def test_report_opens_without_a_network(three, tmp_path):
    """The page holds every notebook and its headlines, formulas as MathML, and loads nothing."""
    root, results = three
    nb = read(results[0].copy)
    nb.cells.insert(
        1,
        v4.new_markdown_cell(
            "## Part\nInline $e^{x}$, block\n\n$$\\ln \\sum_s e^{x_s}$$\n\n"
            "and [the bad one](02_bad.ipynb), [one that is not here](03_c.ipynb), $\\undefined{$."
        ),
    )
    figure = code("draw()")
    figure.outputs = [
        v4.new_output("display_data", data={"image/png": "aGVsbG8="}),
        v4.new_output("display_data", data={"text/html": "<b>t</b><script src='x.js'></script>"}),
        v4.new_output("display_data", data={"application/javascript": "alert(1)"}),
    ]
    nb.cells.insert(2, figure)
    copy = tmp_path / "01_good.ipynb"
    nbformat.write(nb, copy)
    page = write_report([copy, results[1].copy], tmp_path / "build" / "report.html").read_text()

    assert "Title of 01_good" in page
    assert "Title of 02_bad" in page
    assert re.search(r"drawn</td><td class=\"number\">0\.844 us", page)
    assert page.count("<math") == 2
    assert "\\undefined{" in page
    assert 'href="#02_bad"' in page
    assert "one that is not here" in page
    assert "03_c" not in page
    assert 'alt="Figure: Part"' in page
    assert "ZeroDivisionError" in page
    assert "failed" in page
    assert "<script" not in page
    assert "alert(1)" not in page
    loads = re.findall(
        r"""(?:src|srcset|data)\s*=\s*["'](?!data:)[^"']*|<link\b|@import|url\(""", page
    )
    assert loads == []


def test_report_opens_with_the_answers(tmp_path):
    """Headline numbers of analyse notebooks stand before those of teach notebooks."""
    copies = []
    for name, kind in (("01_a", "teach"), ("06_b", "analyse")):
        nb = headlined(name=f"number of {name}", value=1)
        nb.metadata["dcp_lab"] = {"kind": kind}
        copies.append(tmp_path / f"{name}.ipynb")
        nbformat.write(nb, copies[-1])
    page = write_report(copies, tmp_path / "report.html").read_text()
    assert page.index("number of 06_b") < page.index("number of 01_a")
    assert page.index('<section id="01_a">') < page.index('<section id="06_b">')
