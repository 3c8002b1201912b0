"""The lab as a folder of HTML pages, and slides of each notebook for a review meeting.

Nothing in it needs a network: figures are data, formulas MathML, and reveal.js lies in the folder.
Pages have no script; slides have reveal.js and the few lines that make a slide fit.
"""

from __future__ import annotations

import copy as copying
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_lab.notebooks.books import KINDS, available, read_notebook, title_of
from dcp_lab.notebooks.headlines import HEADLINE_MIME
from dcp_lab.notebooks.outputs import ADDED_TAGS
from dcp_lab.notebooks.parameters import NotebookError
from dcp_lab.notebooks.report import _HERE, Chapter, _body, _chapter, _describe_figures

if TYPE_CHECKING:
    import jinja2
    from nbformat import NotebookNode

# Says in each page who wrote it; a folder without it is not replaced.
GENERATOR = '<meta name="generator" content="dcp_lab">'
REVEAL = ("reveal.js", "reveal.css", "LICENSE")
# Of a notebook's own headings, those that begin a slide.
_TITLES = ("# ", "## ")
# What a reader fills in is no slide.
_NOT_SHOWN = "Exercises"
# Over what a notebook computes as text before its first section.
_ANSWER = "The answer"


def sources(root: Path, out: Path) -> list[Path]:
    """Return a file with outputs for each notebook, in order of their names.

    The executed copy under out/notebooks, unless the notebook has changed since or the copy was
    run with other parameters; then, or without a copy, the notebook with its committed outputs.
    One without any outputs is left out.

    Args:
        root: The repository.
        out: The folder of the runner, build by default.

    Raises:
        NotebookError: A notebook or copy is broken.
    """
    executed = {path.name: path for path in (out / "notebooks").glob("*.ipynb")}
    found = dict(executed)
    for path in available(root):
        nb = read_notebook(path)
        if path.name in executed:
            copy = read_notebook(executed[path.name])
            if _code(copy) == _code(nb) and not _has_other_parameters(copy):
                continue
        found.pop(path.name, None)
        if any(cell.get("outputs") for cell in nb.cells):
            found[path.name] = path
    return [found[name] for name in sorted(found)]


def _has_other_parameters(copy: NotebookNode) -> bool:
    """Return whether a run was given parameters: its numbers are then not the notebook's own."""
    return any("injected-parameters" in c.metadata.get("tags", []) for c in copy.cells)


def _code(nb: NotebookNode) -> list[str]:
    """Return the cells as they were written, without those that a run adds."""
    return [c.source for c in nb.cells if not ADDED_TAGS & set(c.metadata.get("tags", []))]


def write_site(copies: Sequence[Path], folder: Path) -> Path:
    """Write the site of these notebooks and return its index.html.

    index.html has the verdict (see _verdict) and the headline numbers; NAME.html is one notebook;
    slides/NAME.html its slides.

    Args:
        copies: Notebooks with outputs, in order; see sources.
        folder: Written beside and moved into place. A folder there is replaced if it is a site.

    Raises:
        NotebookError: There are no copies, one is broken, or folder is something else than a site.
    """
    import jinja2

    if not copies:
        raise NotebookError("no notebooks with outputs: dcp-lab run")
    index = folder / "index.html"
    if folder.exists() and not (index.is_file() and GENERATOR in index.read_text("utf-8")):
        raise NotebookError(
            f"{folder}: expected no folder or an earlier site, got something else; move it away"
        )
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(_HERE),
        undefined=jinja2.StrictUndefined,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_pages(copies, part, environment)
        # mkdtemp's folder is its owner's alone; a site may be served.
        part.chmod(0o755)
        if folder.exists():
            old = part.with_name(f"{part.name}.old")
            os.replace(folder, old)
            os.replace(part, folder)
            shutil.rmtree(old)
        else:
            os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return index


def _write_pages(copies: Sequence[Path], folder: Path, environment: jinja2.Environment) -> None:
    from pygments.formatters import HtmlFormatter

    names = {copy.stem for copy in copies}
    chapters = [_chapter(copy, names, "{}.html") for copy in copies]
    # Answers before the means to get them.
    answers_first = sorted(chapters, key=lambda c: KINDS.index(c.kind), reverse=True)
    css = (_HERE / "report.css").read_text("utf-8")
    (folder / "site.css").write_text(
        css + HtmlFormatter(style="friendly").get_style_defs(".highlight"), encoding="utf-8"
    )
    verdict, verdict_from = _verdict(copies, answers_first, names)
    answers_first.sort(key=lambda c: c.name != verdict_from)
    shared = {"generator": GENERATOR, "chapters": chapters, "answers_first": answers_first}
    page = environment.get_template("site.html.j2")
    about = {"verdict": verdict, "verdict_from": verdict_from}
    (folder / "index.html").write_text(page.render(**shared, **about, chapter=None), "utf-8")
    slides = folder / "slides"
    (slides / "reveal").mkdir(parents=True)
    for name in REVEAL:
        shutil.copyfile(_HERE / "reveal" / name, slides / "reveal" / name)
    template = environment.get_template("slides.html.j2")
    for copy, chapter in zip(copies, chapters, strict=True):
        html = page.render(**shared, **about, chapter=chapter)
        (folder / f"{chapter.name}.html").write_text(html, encoding="utf-8")
        parts = list(_slides(copy, names))
        html = template.render(generator=GENERATOR, chapter=chapter, slides=parts)
        (slides / f"{chapter.name}.html").write_text(html, encoding="utf-8")


def _verdict(
    copies: Sequence[Path], answers_first: Sequence[Chapter], names: Collection[str]
) -> tuple[str, str]:
    """Return (HTML, notebook) of the verdict: "" and "" where no notebook has one.

    It is what an analyse notebook computes as text before its first section, the first that does:
    between the question that it answers and the words that it uses, as far as the notebook opens
    with them.
    """
    path_of = {copy.stem: copy for copy in copies}
    for chapter in answers_first:
        if chapter.kind != "analyse":
            continue
        nb = read_notebook(path_of[chapter.name])
        answers = list(_answers(nb))
        if answers:
            asked, words = (_opening(nb, lead) for lead in ("**Question.**", "**Words.**"))
            return _part(nb, asked + answers + words, names, "{}.html"), chapter.name
    return "", ""


def _before_sections(nb: NotebookNode) -> Iterator[NotebookNode]:
    """Yield the cells before the first heading of the second level."""
    for cell in nb.cells:
        if cell.cell_type == "markdown" and re.search(r"^## ", cell.source, re.MULTILINE):
            return
        yield cell


def _answers(nb: NotebookNode) -> Iterator[NotebookNode]:
    """Yield what is computed as text before the first section."""
    for cell in _before_sections(nb):
        for output in cell.get("outputs", []):
            if "text/markdown" in output.get("data", {}):
                yield _only(cell, output)


def _opening(nb: NotebookNode, lead: str) -> list[NotebookNode]:
    """Return a cell with the paragraph before the first section that begins so, if one does."""
    for cell in _before_sections(nb):
        for paragraph in cell.source.split("\n\n") if cell.cell_type == "markdown" else []:
            if paragraph.startswith(lead):
                shown = copying.deepcopy(cell)
                shown.source = paragraph
                return [shown]
    return []


def _only(cell: NotebookNode, output: NotebookNode) -> NotebookNode:
    """Return a code cell without its code and with one of its outputs."""
    shown = copying.deepcopy(cell)
    shown.source, shown.outputs = "", [copying.deepcopy(output)]
    return shown


def _part(
    nb: NotebookNode, cells: Sequence[NotebookNode], names: Collection[str], target: str
) -> str:
    """Return some cells of a notebook as HTML."""
    part = copying.copy(nb)
    part.cells = [copying.deepcopy(cell) for cell in cells]
    for number, cell in enumerate(part.cells):
        cell.id = str(number)
    return _body(part, "slide", names, target)


def _slides(copy: Path, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (heading, HTML) of each slide behind the title: a figure, or text and tables.

    First comes what is computed as text before the first section, a verdict. Left out are code,
    what is printed there, headline numbers (they have their own slides, at the end), the record
    of the run, and the exercises.
    """
    nb = read_notebook(copy)
    _describe_figures(nb)
    slides: list[tuple[str, list[NotebookNode]]] = []
    heading = title = title_of(nb)
    open_for_output = False
    for cell in nb.cells:
        if ADDED_TAGS & set(cell.metadata.get("tags", [])):
            continue
        if cell.cell_type == "markdown":
            open_for_output = False
            for piece in re.split(r"^(?=## )", cell.source.strip(), flags=re.MULTILINE):
                lines = piece.strip().splitlines()
                if lines and lines[0].startswith(_TITLES):
                    heading = lines[0].lstrip("# ")
                    lines = lines[1:]
                text = "\n".join(lines).strip()
                if text and heading != _NOT_SHOWN:
                    shown = copying.deepcopy(cell)
                    shown.source = text
                    slides.append((heading, [shown]))
                    open_for_output = True
            continue
        if heading in (title, _NOT_SHOWN):
            continue
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if HEADLINE_MIME in data:
                continue
            is_figure = any(mime.startswith("image/") for mime in data)
            if is_figure or not open_for_output:
                slides.append((heading, []))
            slides[-1][1].append(_only(cell, output))
            open_for_output = not is_figure
    answers = [(_ANSWER, [cell]) for cell in _answers(nb)]
    for heading, cells in answers + slides:
        yield heading, _part(nb, cells, names, "{}.html")
