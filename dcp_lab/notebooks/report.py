"""One HTML page of executed notebooks that opens without a network.

Everything is inside the page: figures as data, formulas as MathML (which browsers draw by
themselves), and no script at all.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_lab.notebooks.books import KINDS, read_notebook, title_of
from dcp_lab.notebooks.headlines import Headline, collect_headlines
from dcp_lab.notebooks.outputs import RECORD_TAG
from dcp_lab.notebooks.parameters import NotebookError

if TYPE_CHECKING:
    from nbconvert import HTMLExporter
    from nbformat import NotebookNode

_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Chapter:
    """One notebook of the report.

    Attributes:
        name: File name without ending; also its anchor.
        title: Its first heading.
        kind: 'teach', 'measure' or 'analyse'.
        run: What it ran with: parameters, seed, commit, versions.
        failed: Whether it holds an error.
        headlines: Its headline numbers.
        body: Its cells as HTML.
    """

    name: str
    title: str
    kind: str
    run: dict[str, Any]
    failed: bool
    headlines: list[Headline]
    body: str


def write_report(copies: Sequence[Path], path: Path) -> Path:
    """Write executed notebooks as one self-contained HTML page and return its path.

    Args:
        copies: Executed copies as the runner leaves them, in the order of the page.
        path: The page; written whole or not at all.

    Raises:
        NotebookError: A copy is broken or was not made by the runner.
    """
    import jinja2
    from pygments.formatters import HtmlFormatter

    names = {copy.stem for copy in copies}
    chapters = [_chapter(copy, names) for copy in copies]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((_HERE / "report.html.j2").read_text())
    css = (_HERE / "report.css").read_text()
    page = template.render(
        chapters=chapters,
        # Answers before the means to get them.
        answers_first=sorted(chapters, key=lambda c: KINDS.index(c.kind), reverse=True),
        css=css + HtmlFormatter(style="friendly").get_style_defs(".highlight"),
        run=chapters[0].run if chapters else {},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(page, encoding="utf-8")
    os.replace(part, path)
    return path


def _chapter(copy: Path, names: Collection[str], target: str = "#{}") -> Chapter:
    """Return an executed notebook as part of a report that holds the notebooks `names`.

    A link to one of them leads to target, with its name filled in.
    """
    nb = read_notebook(copy)
    about = nb.metadata.get("dcp_lab")
    if not isinstance(about, dict) or about.get("kind") not in KINDS:
        raise NotebookError(f"{copy.name}: expected an executed copy, got no dcp_lab metadata")
    outputs = [output for cell in nb.cells for output in cell.get("outputs", [])]
    _describe_figures(nb)
    return Chapter(
        name=copy.stem,
        title=title_of(nb) or copy.stem,
        kind=about["kind"],
        run=dict(about.get("run", {})),
        failed=any(output.output_type == "error" for output in outputs),
        headlines=_headlines(nb, copy.name),
        body=_body(nb, copy.stem, names, target),
    )


def _headlines(nb: NotebookNode, name: str) -> list[Headline]:
    try:
        return collect_headlines(nb)
    except NotebookError as error:
        raise NotebookError(f"{name}: {error}") from None


def _describe_figures(nb: NotebookNode) -> None:
    """Give every figure the heading above it as its text for those who cannot see it."""
    heading = ""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            lines = [line for line in cell.source.splitlines() if line.startswith("#")]
            heading = lines[-1].lstrip("# ") if lines else heading
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.metadata.setdefault("image/png", {}).setdefault("alt", f"Figure: {heading}")


def _body(nb: NotebookNode, name: str, names: Collection[str], target: str = "#{}") -> str:
    """Return a notebook's cells as HTML without scripts, ids and links made for one page."""
    for cell in nb.cells:
        # Ids of cells are only unique within their notebook.
        cell.id = f"{name}-{cell.id}"
    exporter = _exporter(frozenset(names), target)
    body, _ = exporter.from_notebook_node(nb, resources={"record_tag": RECORD_TAG})
    return re.sub(r"<script\b.*?</script>", "", body, flags=re.DOTALL | re.IGNORECASE)


# An exporter takes longer to make than a slide to write.
@functools.lru_cache(maxsize=8)
def _exporter(names: frozenset[str], target: str) -> HTMLExporter:
    """Return the exporter of cells whose links to one of names lead to target."""
    import jinja2
    from nbconvert import HTMLExporter
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return _mathml(body, "inline")

        def block_math(self, body: str) -> str:
            return _mathml(body, "block")

        def latex_environment(self, name: str, body: str) -> str:
            return _mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")

        def heading(self, text: str, level: int, **attrs: Any) -> str:
            # The page's own title is the only h1.
            return super().heading(text, min(level + 1, 6), **attrs)

        def link(self, text: str, url: str, title: str | None = None) -> str:
            other = re.fullmatch(r"(?:\./)?([\w-]+)\.ipynb", url)
            if other is None:
                return super().link(text, url, title)
            if other[1] not in names:
                return text
            return super().link(text, target.format(other[1]), title)

    class Exporter(HTMLExporter):
        @jinja2.pass_context
        def markdown2html(self, context: Any, source: str) -> str:
            renderer = Renderer(escape=False, exclude_anchor_links=True)
            return MarkdownWithMath(renderer=renderer).render(source)

    return Exporter(
        template_name="basic", raw_template=(_HERE / "report_cells.html.j2").read_text()
    )


def _mathml(latex: str, display: str) -> str:
    """Return a formula as MathML, or as the text it was written as where that cannot be made."""
    from latex2mathml.converter import convert

    try:
        return convert(latex, display=display)
    except Exception:
        # The converter raises whatever its parser meets; a formula must not cost the report.
        tag = "pre" if display == "block" else "code"
        return f"<{tag}>{html.escape(latex)}</{tag}>"
