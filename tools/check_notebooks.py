"""Refuse notebooks that a reader, a reviewer or a diff would suffer from.

    python tools/check_notebooks.py [NOTEBOOK ...]      default: all in notebooks/

A notebook passes when

- it says what it is (metadata.dcp_lab.kind, and needs where it needs more than its kind says) and
  starts with its title;
- one cell is tagged `parameters`; each line of it has a type, a literal default and help, and no
  other cell assigns one of them;
- it ran top to bottom in one go (execution counts 1..N) without errors or warnings on stderr;
  a measure notebook may also be committed without outputs;
- no path of one machine, no host name, no picture in markdown, no attachment is in it;
- it does not change what it imports or where it runs: no sys.path, os.chdir, shell or magic line;
- file and outputs stay readable in a diff (MAX_KB, MAX_OUTPUT_LINES), and metadata holds nothing
  that changes from run to run.

`dcp-lab run NAME --in-place` mends counts, outputs and metadata.
"""

from __future__ import annotations

import ast
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat

from dcp_lab.notebooks import KINDS, NEEDS, NotebookError, read_parameters
from dcp_lab.notebooks.outputs import ABOUT_KEYS

# Ten figures at 100 dpi.
MAX_KB = 600
MAX_OUTPUT_LINES = 100

MACHINE_PATH = re.compile(
    r"(?<![\w.:/~-])/(?:home|root|tmp|usr|opt|var|mnt|media|srv|etc|work|workspace|workspaces"
    r"|Users|private|scratch|data|content|proc)/[\w.-]+"
    r"|\b[A-Za-z]:\\\w"
)
PICTURE = re.compile(r"data:image/")
NOTEBOOK_METADATA = {"dcp_lab", "kernelspec", "language_info"}
RERUN = "run it with dcp-lab run --in-place"


def problems(path: Path) -> list[str]:
    """Return what is wrong with a notebook, a sentence each; empty if nothing is."""
    try:
        nb = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        nbformat.validate(nb)
    except Exception as error:
        return [f"not a valid notebook: {str(error).splitlines()[0]}"]
    found = [*_whole(path, nb), *_parameters(path, nb), *_execution(nb)]
    for index, cell in enumerate(nb.cells):
        found += [f"cell {index}: {problem}" for problem in _cell(cell)]
    return found


def _whole(path: Path, nb: nbformat.NotebookNode) -> Iterator[str]:
    kilobytes = path.stat().st_size / 1000
    if kilobytes > MAX_KB:
        yield f"{kilobytes:.0f} kB: expected at most {MAX_KB}; fewer or smaller figures"
    about = nb.metadata.get("dcp_lab", {})
    about = about if isinstance(about, dict) else {}
    if about.get("kind") not in KINDS:
        expected = ", ".join(KINDS)
        yield f"metadata.dcp_lab.kind: expected one of {expected}, got {about.get('kind')!r}"
    needs = about.get("needs", [])
    if not isinstance(needs, list) or not set(needs) <= set(NEEDS):
        yield f"metadata.dcp_lab.needs: expected a list of {', '.join(NEEDS)}, got {needs!r}"
    first = nb.cells[0] if nb.cells else None
    if first is None or first.cell_type != "markdown" or not first.source.startswith("# "):
        yield "first cell: expected markdown that starts with the title, '# ...'"
    extra = set(nb.metadata) - NOTEBOOK_METADATA
    extra |= {f"dcp_lab.{key}" for key in set(about) - set(ABOUT_KEYS)}
    extra |= {
        f"language_info.{key}" for key in set(nb.metadata.get("language_info", {})) - {"name"}
    }
    if extra:
        yield f"metadata: {', '.join(sorted(extra))} changes from run to run; {RERUN}"


def _parameters(path: Path, nb: nbformat.NotebookNode) -> Iterator[str]:
    tagged = [cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        yield f"expected one cell tagged 'parameters', got {len(tagged)}"
        return
    try:
        known = set(read_parameters(path))
    except NotebookError as error:
        yield str(error).removeprefix(f"{path.name}: ")
        return
    # What papermill does not recognise it would leave at its default without a word.
    missed = sorted(_assigned(tagged[0].source) - known)
    if missed:
        yield f"parameters cell: {', '.join(missed)}: expected NAME: TYPE = LITERAL  # help"
    for index, cell in enumerate(nb.cells):
        if cell.cell_type == "code" and cell is not tagged[0]:
            again = sorted(_assigned(cell.source) & known)
            if again:
                yield f"cell {index}: assigns the parameter {', '.join(again)} anew"


def _assigned(source: str) -> set[str]:
    """Return the names a cell assigns at its top level, loops and with-blocks included."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    names = set()

    class Visitor(ast.NodeVisitor):
        def visit_Name(self, node: ast.Name) -> None:
            if isinstance(node.ctx, ast.Store):
                names.add(node.id)

        def skip(self, node: ast.AST) -> None:
            """A function, class or comprehension has names of its own."""

        visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = skip
        visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = skip

    Visitor().visit(tree)
    return names


def _execution(nb: nbformat.NotebookNode) -> Iterator[str]:
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    counts = [cell.execution_count for cell in code]
    never_ran = not any(counts) and not any(cell.outputs for cell in code)
    if never_ran and nb.metadata.get("dcp_lab", {}).get("kind") == "measure":
        return
    if counts != list(range(1, len(code) + 1)):
        shown = ", ".join("none" if count is None else str(count) for count in counts)
        yield f"execution counts: expected 1 to {len(code)}, got {shown}; {RERUN}"


def _cell(cell: nbformat.NotebookNode) -> Iterator[str]:
    if cell.get("attachments"):
        yield "holds an attachment: draw the figure in a code cell"
    if PICTURE.search(cell.source):
        yield "holds a picture in its source: draw the figure in a code cell"
    yield from _traces_of_a_machine("source", cell.source)
    if {"papermill", "execution"} & set(cell.metadata):
        yield f"metadata: papermill or execution times; {RERUN}"
    if "injected-parameters" in cell.metadata.get("tags", []):
        yield f"was injected by a run with other parameters; {RERUN}"
    if cell.cell_type == "code":
        yield from _code(cell.source)
        yield from _outputs(cell.outputs)


def _code(source: str) -> Iterator[str]:
    for line in source.splitlines():
        if line.lstrip().startswith(("!", "%")):
            yield f"shell or magic line: {line.strip()}"
    if re.search(r"\bsys\.path\b", source):
        yield "touches sys.path: install the package instead"
    if re.search(r"\bos\.chdir\b", source):
        yield "changes the working folder"


def _outputs(outputs: Sequence[nbformat.NotebookNode]) -> Iterator[str]:
    lines = 0
    for output in outputs:
        if output.output_type == "error":
            yield f"holds an error: {output.ename}"
            continue
        if output.output_type == "stream":
            if output.name == "stderr":
                yield f"wrote to stderr: {output.text.strip().splitlines()[0][:80]}"
            texts = [output.text]
        else:
            texts = [text for mime, text in output.data.items() if mime.startswith("text/")]
            svg = [mime for mime in output.data if mime.startswith("image/svg")]
            if svg:
                yield "holds an SVG figure: PNG at 100 dpi keeps diffs small"
        for text in texts:
            yield from _traces_of_a_machine("output", text)
            if PICTURE.search(text):
                yield "holds a picture inside HTML"
        lines += len(texts[0].splitlines()) if texts else 0
    if lines > MAX_OUTPUT_LINES:
        yield f"printed {lines} lines: expected at most {MAX_OUTPUT_LINES}"


def _traces_of_a_machine(where: str, text: str) -> Iterator[str]:
    if match := MACHINE_PATH.search(text):
        yield f"{where} holds a path of one machine: {match[0]}"
    host = socket.gethostname()
    if len(host) > 3 and host != "localhost" and re.search(rf"\b{re.escape(host)}\b", text):
        yield f"{where} holds the name of this machine"


def main(argv: Sequence[str]) -> int:
    """Print the problems of the notebooks named (default: all of the repository); 1 if any."""
    root = Path(__file__).resolve().parent.parent
    paths = [Path(name) for name in argv] or sorted((root / "notebooks").glob("*.ipynb"))
    bad = 0
    for path in paths:
        for problem in problems(path):
            print(f"{path.name}: {problem}")
            bad += 1
    print(f"{len(paths)} notebooks checked, {bad or 'no'} problem{'s' if bad != 1 else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
