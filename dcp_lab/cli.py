"""The command `dcp-lab`.

Every subcommand loads what it needs when it is called, so that help and errors come at once. What
a person can put right is printed without a traceback, with exit status 2.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_lab.notebooks import Listener, NotebookError

if TYPE_CHECKING:
    from rich.console import Console

    from dcp_lab.notebooks import Notebook, Result

app = typer.Typer(
    name="dcp-lab",
    help="Decode context parallelism: kernels, reducers and graphs, measured in notebooks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Arguments belong to the module that the command hands over to, --help included.
_HAND_OVER = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

_BENCHES = {
    "decode": ("dcp_lab.bench.decode", "Decode attention on one GPU, beside its peers."),
    "reduce": ("dcp_lab.bench.reduce", "Exchanges between ranks, one GPU each."),
    "stack": ("dcp_lab.bench.stack", "Whole decode steps, every corner, one GPU a rank."),
    "serve": ("dcp_lab.bench.serve", "vLLM engines, our backend beside FLASH_ATTN, two GPUs."),
}


@app.command()
def run(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Notebooks by number (06), name or path. Default: all that this machine can run."
        ),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", metavar="NAME=VALUE", help="Override one parameter."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of copies and report. Default: build.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=1.0, help="Seconds a notebook may take. Default: 600, measure 3600."),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Write the outputs back into the notebooks.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Fail where the committed outputs are not current.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--list", help="Only list notebooks and their parameters.")
    ] = False,
) -> None:
    """Run notebooks, write one HTML report, print the headline numbers.

    A run of everything writes report.html. A run of some notebooks, or with -p, leaves that as it
    is and writes report_NAME.html, or report_part.html for several.
    """
    from rich.console import Console

    from dcp_lab import notebooks
    from dcp_lab.notebooks.report import write_report

    console = Console()
    root = notebooks.find_root()
    if show:
        _list_notebooks(console, notebooks.find(names or [], root))
        return
    out = out or root / "build"
    screen = _Screen(console)
    try:
        with _terminate_as_interrupt(), screen:
            results = notebooks.run(
                names or [],
                parameter or [],
                root=root,
                out_dir=out,
                timeout_s=timeout,
                in_place=in_place,
                check=check,
                listener=screen,
            )
    except KeyboardInterrupt:
        console.print(f"interrupted; what had run is in {_shown(out / 'notebooks')}")
        raise typer.Exit(130) from None
    # The report of everything stays what it is when one notebook runs, or runs otherwise.
    whole = not names and not parameter
    stem = "report" if whole else f"report_{results[0].notebook.name}"
    if not whole and len(results) > 1:
        stem = "report_part"
    page = write_report([result.copy for result in results], out / f"{stem}.html")
    _print_headlines(console, results)
    if not names:
        _print_left_out(console, notebooks.find([], root), results)
    failed = [result.notebook.name for result in results if not result.ok]
    console.print(f"report: {_shown(page)}", soft_wrap=True, highlight=False)
    if failed:
        console.print(f"[bold red]failed or not current:[/] {', '.join(failed)}")
        raise typer.Exit(1)


@app.command()
def report(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the executed copies. Default: build.")
    ] = None,
) -> None:
    """Write the lab as a site, build/site: the verdict, a page and slides for each notebook.

    From the executed copies; from a notebook as committed where there is none, or an older one.
    """
    from dcp_lab import notebooks
    from dcp_lab.notebooks.site import sources, write_site

    root = notebooks.find_root()
    out = out or root / "build"
    try:
        page = write_site(sources(root, out), out / "site")
    except OSError as error:
        raise NotebookError(
            f"out: expected a folder that can be written, got {out} ({error.strerror})"
        ) from None
    print(f"report: {_shown(page)}")


@app.command(context_settings=_HAND_OVER)
def doctor(context: typer.Context) -> None:
    """Say what this machine has, what is missing, and the command that brings it."""
    _hand_over("dcp_lab.doctor", context.args, "dcp-lab doctor")


@app.command(context_settings=_HAND_OVER)
def bench(context: typer.Context) -> None:
    """Measure: `dcp-lab bench decode --help`; reduce, stack and serve likewise."""
    what, *rest = context.args or [""]
    if what in ("--help", "-h"):
        print(f"Usage: dcp-lab bench {{{','.join(_BENCHES)}}} [OPTIONS]\n")
        print("Measure on this machine's GPUs; rows go to data/measured.\n")
        for name, (_, help_) in _BENCHES.items():
            print(f"  {name:8} {help_}")
        print("\nOptions of one: dcp-lab bench NAME --help")
        print("Speed targets, judged from the committed rows: --gate of decode, reduce and serve.")
        return
    if what not in _BENCHES:
        raise NotebookError(f"bench: expected one of {', '.join(_BENCHES)}, got {what!r}")
    _hand_over(_BENCHES[what][0], rest, f"dcp-lab bench {what}")


@app.command("amd-report", context_settings=_HAND_OVER)
def amd_report(context: typer.Context) -> None:
    """Build the kernels for gfx942 and gfx950 without such a GPU; say what they use."""
    _hand_over("dcp_lab.bench.amd", context.args, "dcp-lab amd-report")


@app.command(context_settings=_HAND_OVER)
def serve(context: typer.Context) -> None:
    """Start vLLM with one of the lab's parameter sets: `dcp-lab serve --help`."""
    _hand_over("dcp_lab.serving.command", context.args, "dcp-lab serve")


@app.command()
def lab(port: Annotated[int, typer.Option(help="Port on this machine.")] = 8888) -> None:
    """Open the notebooks in JupyterLab, reachable from this machine only."""
    from dcp_lab import notebooks

    folder = notebooks.find_root() / "notebooks"
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--port={port}", str(folder)]
    os.execv(sys.executable, command)


@app.command()
def version() -> None:
    """Print the version of dcp_lab."""
    import dcp_lab

    print(dcp_lab.__version__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        app(args=None if argv is None else list(argv))
    except NotebookError as error:
        print(f"dcp-lab: {error}", file=sys.stderr)
        sys.exit(2)


def _hand_over(module: str, args: Sequence[str], prog: str) -> None:
    """Call `main(args)` of a module as if it were the command `prog`, and exit with its status."""
    sys.argv = [prog, *args]
    raise typer.Exit(importlib.import_module(module).main(list(args)) or 0)


def _shown(path: Path) -> str:
    """Return a path as short as it can be typed from here."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that a run ended by a timeout leaves no kernel behind either."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Screen(Listener):
    """Progress on the terminal: bars for notebooks and cells, a line for each that ended."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def run_starts(self, notebooks: Sequence[Notebook]) -> None:
        self.progress.start()
        self.books = self.progress.add_task("all", total=len(notebooks), unit="notebooks")
        self.cells = self.progress.add_task("", total=None, unit="cells")

    def notebook_starts(self, notebook: Notebook, cells: int) -> None:
        self.progress.reset(self.cells, total=cells, description=notebook.name)

    def cell_starts(self, notebook: Notebook, index: int) -> None:
        self.progress.update(self.cells, completed=index)

    def notebook_ends(self, result: Result) -> None:
        from rich.markup import escape
        from rich.text import Text

        self.progress.advance(self.books)
        state = "[green]ok[/]    " if result.ok else "[bold red]failed[/]"
        if result.failure is None and result.stale:
            state = "[bold red]stale[/] "
        name = result.notebook.name
        self.console.print(f"{state} {escape(name)}  {result.seconds:.1f} s", highlight=False)
        if result.failure is not None:
            failure = result.failure
            where = f"cell {failure.cell} of" if failure.cell >= 0 else "before any cell of"
            self.console.print(f"  {where} {escape(name)}:", highlight=False)
            for line in failure.source.splitlines():
                self.console.print(Text(f"    {line}"), soft_wrap=True)
            if failure.traceback:
                self.console.print(Text.from_ansi(failure.traceback), soft_wrap=True)
            else:
                self.console.print(Text(f"  {failure.error}", style="bold red"), soft_wrap=True)
            self.console.print(Text(f"  partial copy: {_shown(result.copy)}"), soft_wrap=True)
        for line in result.stale:
            self.console.print(Text(f"  {line}"), soft_wrap=True)
        if result.stale:
            command = f"dcp-lab run {name} --in-place"
            self.console.print(f"  bring it up to date: {command}", highlight=False)


def _print_left_out(console: Console, there: Sequence[Path], results: Sequence[Result]) -> None:
    """Name the notebooks that a run of everything did not run on this machine."""
    ran = {result.notebook.name for result in results}
    left_out = [path.stem for path in there if path.stem not in ran]
    if left_out:
        names = ", ".join(left_out)
        console.print(f"left out here: {names} (dcp-lab doctor says why)", highlight=False)


def _print_headlines(console: Console, results: Sequence[Result]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title="Headline numbers",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    table.add_column("number")
    table.add_column("value", justify="right", style="bold", no_wrap=True)
    table.add_column("basis", style="dim", no_wrap=True)
    for result in results:
        if result.headlines:
            table.add_row(Text(result.notebook.name, style="dim"))
        for line in result.headlines:
            # A name's second line is indented as its first, or it would look like a notebook.
            name = Padding(Text(line.name), (0, 0, 0, 2))
            table.add_row(name, Text(line.text), Text(line.basis))
    if table.row_count:
        console.print(table)


def _list_notebooks(console: Console, paths: Sequence[Path]) -> None:
    from rich.text import Text

    from dcp_lab.notebooks import Notebook

    for path in paths:
        notebook = Notebook.read(path)
        console.print(Text(f"{notebook.name} ({notebook.kind}): {notebook.title}", style="bold"))
        for parameter in notebook.parameters.values():
            console.print(Text(f"  {parameter.line}"), soft_wrap=True)


if __name__ == "__main__":
    main()
