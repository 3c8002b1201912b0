"""Run notebooks through papermill: fresh kernels, recorded facts, bounded waits."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dcp_lab.notebooks.books import Notebook, find, find_root, read_notebook, resolve
from dcp_lab.notebooks.headlines import Headline, collect_headlines
from dcp_lab.notebooks.outputs import RECORD_TAG, committable, differences
from dcp_lab.notebooks.parameters import NotebookError

if TYPE_CHECKING:
    from nbformat import NotebookNode

# Seconds a whole notebook may take. Far above what one should: it ends a hang, not a slow machine.
TIMEOUT_S = {"teach": 600.0, "analyse": 600.0, "measure": 3600.0}


@dataclasses.dataclass(frozen=True)
class Failure:
    """Where and why a notebook stopped.

    Attributes:
        cell: Index among the notebook's cells as they stand in the repository; -1: before any.
        source: The cell's code.
        error: Exception name and message.
        traceback: The kernel's traceback, with terminal colours; "" if there is none.
    """

    cell: int
    source: str
    error: str
    traceback: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """One notebook's run.

    Attributes:
        notebook: What ran.
        copy: The executed copy; partial if it failed, with a .log beside it if the kernel said
            anything outside of its cells.
        seconds: Wall time, kernel start included.
        headlines: Its headline numbers.
        failure: Why it stopped, None if it did not.
        stale: With check: where the committed outputs differ from this run.
    """

    notebook: Notebook
    copy: Path
    seconds: float
    headlines: tuple[Headline, ...]
    failure: Failure | None = None
    stale: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it ran through and, where that was asked, its committed outputs are current."""
        return self.failure is None and not self.stale


class Listener:
    """What `run` tells while it works; override what is of interest."""

    def run_starts(self, notebooks: Sequence[Notebook]) -> None:
        """Everything asked for is valid, these notebooks will run."""

    def notebook_starts(self, notebook: Notebook, cells: int) -> None:
        """A notebook with this many cells begins."""

    def cell_starts(self, notebook: Notebook, index: int) -> None:
        """Cell `index` of it begins."""

    def notebook_ends(self, result: Result) -> None:
        """It ended, well or not."""


def gpu_present() -> bool:
    """Return whether torch sees a CUDA or ROCm GPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _lacking(notebook: Notebook) -> list[str]:
    """Return which of the needs that a notebook lists this machine lacks."""
    gpus = 0
    if {"gpu", "multigpu"} & set(notebook.needs) and gpu_present():
        import torch

        gpus = torch.cuda.device_count()
    have = {"gpu": gpus >= 1, "multigpu": gpus >= 2}
    have |= {name: importlib.util.find_spec(name) is not None for name in ("vllm", "aiter")}
    return [need for need in notebook.needs if not have[need]]


def run(
    names: Sequence[str] = (),
    assignments: Sequence[str] = (),
    *,
    root: Path | None = None,
    out_dir: Path | None = None,
    timeout_s: float | None = None,
    in_place: bool = False,
    check: bool = False,
    listener: Listener | None = None,
) -> list[Result]:
    """Run notebooks through papermill and return what came of each.

    Each runs in a fresh kernel of this very Python. One that fails leaves its partial copy and the
    rest still run. Executed copies go to out_dir/notebooks, the headline numbers of all of them to
    out_dir/headline.json.

    Args:
        names: See `find`. Default: every teach and analyse notebook, and where a GPU is present
            every measure notebook too; without those that list needs this machine lacks.
        assignments: 'name=value' overrides, see `resolve`.
        root: The repository. Default: `find_root()`.
        out_dir: Default: root/build.
        timeout_s: Seconds a whole notebook may take. Default: TIMEOUT_S of its kind.
        in_place: Write the outputs of those that succeed back into the notebook itself.
        check: Compare with the outputs in the notebook itself; see `differences`.
        listener: Told of progress.

    Returns:
        One result a notebook, in the order they ran.

    Raises:
        NotebookError: Before anything ran: an unknown notebook, no notebook at all, an unknown
            parameter, a bad value, overrides together with in_place or check, a timeout that is no
            finite number of seconds, or an out_dir that cannot be written or whose copies would be
            the notebooks themselves. Later: a notebook whose headline numbers cannot be read.

    Notes:
        With in_place and check, teach and analyse notebooks do not see a GPU, since committed
        outputs are those of a CPU.
    """
    root = root or find_root()
    out_dir = out_dir or root / "build"
    listener = listener or Listener()
    if assignments and (in_place or check):
        raise NotebookError("committed outputs are those of the default parameters: leave out -p")
    notebooks = [Notebook.read(path) for path in find(names, root)]
    if not names and not gpu_present():
        notebooks = [notebook for notebook in notebooks if notebook.kind != "measure"]
    if not names:
        notebooks = [notebook for notebook in notebooks if not _lacking(notebook)]
    if not notebooks:
        raise NotebookError("no notebook that can run here: measure notebooks need a GPU")
    overrides = resolve(notebooks, assignments)
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 1):
        raise NotebookError(f"timeout: expected seconds from 1 up, finite, got {timeout_s:g}")
    copies = _folder_of_copies(out_dir, notebooks)

    from dcp_lab.bench.record import provenance

    facts = provenance()
    listener.run_starts(notebooks)
    results = []
    for notebook in notebooks:
        result = _execute(
            notebook,
            overrides[notebook.name],
            copy=copies / notebook.path.name,
            facts=facts,
            timeout_s=timeout_s or TIMEOUT_S[notebook.kind],
            hide_gpu=(in_place or check) and notebook.kind != "measure",
            listener=listener,
        )
        if result.failure is None and (check or in_place):
            result = _compare_or_write(result, check=check, in_place=in_place)
        listener.notebook_ends(result)
        results.append(result)
    _write_headlines(results, facts, out_dir / "headline.json")
    return results


def _folder_of_copies(out_dir: Path, notebooks: Sequence[Notebook]) -> Path:
    """Return the folder of executed copies, which is there and holds none of the notebooks.

    Raises:
        NotebookError: A copy would overwrite its notebook, or the folder cannot be written.
    """
    folder = out_dir / "notebooks"
    for notebook in notebooks:
        if (folder / notebook.path.name).resolve() == notebook.path.resolve():
            raise NotebookError(
                f"out: the copy of {notebook.name} would overwrite the notebook itself: "
                f"expected another folder, got {out_dir}"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise NotebookError(
            f"out: expected a folder that can be written, got {out_dir} ({error.strerror})"
        ) from None
    return folder


def _execute(
    notebook: Notebook,
    overrides: Mapping[str, Any],
    *,
    copy: Path,
    facts: Mapping[str, Any],
    timeout_s: float,
    hide_gpu: bool,
    listener: Listener,
) -> Result:
    """Run one notebook into its copy."""
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    nb = nbformat.read(notebook.path, as_version=4)
    num_cells = len(nb.cells)
    listener.notebook_starts(notebook, num_cells)
    # papermill puts a cell with the overrides behind the parameters cell.
    injected_at = _parameters_index(nb) + 1 if overrides else len(nb.cells) + 1
    seen = {"gpu": "none", "gpu_count": 0, "driver": None} if hide_gpu else {}
    _add_record(nb, notebook, overrides, {**facts, **seen})
    write_notebook(nb, copy)
    current = -1

    def as_committed(index: int) -> int:
        return index - 1 if index >= injected_at else index

    def cell_starts(cell: NotebookNode, cell_index: int) -> None:
        nonlocal current
        current = cell_index
        listener.cell_starts(notebook, min(as_committed(cell_index), num_cells))

    start = time.monotonic()
    failure = None
    log = copy.with_suffix(".log")
    with tempfile.TemporaryDirectory(prefix="dcp_lab_") as scratch, log.open("w") as log_file:
        manager = _kernel_manager_class(Path(scratch), log_file, hide_gpu=hide_gpu)
        try:
            papermill.execute_notebook(
                copy,
                copy,
                parameters=dict(overrides),
                kernel_name="python3",
                language="python",
                progress_bar=False,
                cwd=notebook.path.parent,
                start_timeout=120,
                kernel_manager_class=manager,
                timeout_func=lambda cell: max(start + timeout_s - time.monotonic(), 1.0),
                iopub_timeout=60,
                record_timing=False,
                coalesce_streams=True,
                on_cell_start=cell_starts,
            )
        except papermill.PapermillExecutionError as error:
            failure = Failure(
                cell=as_committed(error.cell_index),
                source=error.source,
                error=f"{error.ename}: {error.evalue}",
                traceback="\n".join(error.traceback),
            )
        except CellTimeoutError:
            why = f"the notebook took longer than {timeout_s:g} s; its kernel was ended here"
            failure = _mark_stopped(copy, current, as_committed(current), "TimeoutError", why)
        except DeadKernelError:
            why = f"the kernel died here, often for want of memory; what it said is in {log.name}"
            failure = _mark_stopped(copy, current, as_committed(current), "DeadKernelError", why)
        except RuntimeError as error:
            # jupyter_client's only word for a kernel that never answered.
            if current >= 0:
                raise
            failure = Failure(-1, "", f"the kernel did not start: {error}")
    if failure is None or not log.stat().st_size:
        log.unlink()
    try:
        headlines = tuple(collect_headlines(nbformat.read(copy, as_version=4)))
    except NotebookError as error:
        raise NotebookError(f"{notebook.name}: {error}") from None
    return Result(notebook, copy, time.monotonic() - start, headlines, failure)


def _parameters_index(nb: NotebookNode) -> int:
    """Return the index of the cell tagged 'parameters', or -1."""
    tagged = (i for i, c in enumerate(nb.cells) if "parameters" in c.metadata.get("tags", []))
    return next(tagged, -1)


def _kernel_manager_class(scratch: Path, log_file: TextIO, *, hide_gpu: bool) -> type:
    """Return a kernel manager whose kernels are this Python, whatever kernelspec is installed.

    What a kernel says outside of its cells goes to log_file.
    """
    import traitlets
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    package_parent = str(Path(__file__).resolve().parents[2])
    search_path = [package_parent, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {
        # The kernel imports the dcp_lab that runs it, and nobody's personal IPython set-up.
        "PYTHONPATH": os.pathsep.join(entry for entry in search_path if entry),
        "IPYTHONDIR": str(scratch),
        "PYTHONHASHSEED": "0",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        # Nothing is downloaded in the middle of a run.
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }
    if hide_gpu:
        env |= {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="dcp_lab",
        language="python",
        env=env,
    )

    class ThisPython(AsyncKernelManager):
        # Sockets in a folder of our own: no ports, nobody else's eyes.
        transport = traitlets.Unicode("ipc")
        connection_file = traitlets.Unicode(str(scratch / "kernel.json"))

        @property
        def kernel_spec(self) -> KernelSpec:
            return spec

        async def start_kernel(self, **options: Any) -> None:
            await self._async_start_kernel(stdout=log_file, stderr=log_file, **options)

    return ThisPython


def _add_record(
    nb: NotebookNode,
    notebook: Notebook,
    overrides: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """Write what a run was made with into the metadata and into a last, visible cell."""
    import nbformat

    from dcp_lab import __version__

    parameters = {name: p.default for name, p in notebook.parameters.items()} | dict(overrides)
    record = {
        "parameters": parameters,
        "seed": parameters.get("seed"),
        "dcp_lab": __version__,
        **facts,
    }
    nb.metadata.setdefault("dcp_lab", {})["run"] = record
    shown = ", ".join(f"{name} = {value!r}" for name, value in parameters.items())
    rows = [("parameters", shown or None), *list(record.items())[1:]]
    lines = ["**This run**", "", "| | |", "|---|---|"]
    for key, value in rows:
        text = "none" if value is None else str(value).replace("|", "\\|")
        lines.append(f"| {key.replace('_', ' ')} | {text} |")
    nb.cells.append(
        nbformat.v4.new_markdown_cell("\n".join(lines), metadata={"tags": [RECORD_TAG]})
    )


def _mark_stopped(copy: Path, index: int, committed: int, name: str, message: str) -> Failure:
    """Write into the partial copy that its kernel was lost in a cell, and return the failure."""
    import nbformat

    nb = nbformat.read(copy, as_version=4)
    error = f"{name}: {message}"
    nb.cells[index].outputs.append(
        nbformat.v4.new_output("error", ename=name, evalue=message, traceback=[error])
    )
    write_notebook(nb, copy)
    return Failure(committed, nb.cells[index].source, error)


def write_notebook(nb: NotebookNode, path: Path) -> None:
    """Write a notebook whole or not at all."""
    import nbformat

    part = path.with_suffix(".part")
    nbformat.write(nb, part)
    os.replace(part, path)


def _write_headlines(results: Sequence[Result], facts: Mapping[str, Any], path: Path) -> None:
    numbers = [
        {"notebook": result.notebook.name, **dataclasses.asdict(line)}
        for result in results
        for line in result.headlines
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"run": dict(facts), "numbers": numbers}, indent=1) + "\n")
    os.replace(part, path)


def _compare_or_write(result: Result, *, check: bool, in_place: bool) -> Result:
    """Hold a successful run against the notebook's own outputs, or put its outputs there."""
    import nbformat

    committed = read_notebook(result.notebook.path)
    fresh = committable(committed, nbformat.read(result.copy, as_version=4))
    if in_place:
        write_notebook(fresh, result.notebook.path)
    if check:
        try:
            stale = tuple(differences(committed, fresh))
        except NotebookError as error:
            raise NotebookError(f"{result.notebook.name}, as committed: {error}") from None
        result = dataclasses.replace(result, stale=stale)
    return result
