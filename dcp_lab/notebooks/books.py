"""Which notebooks there are, and which of them and of their parameters a person means."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_lab.notebooks.parameters import NotebookError, Parameter, read_parameters

if TYPE_CHECKING:
    from nbformat import NotebookNode

KINDS = ("teach", "measure", "analyse")
# What a notebook may list under metadata.dcp_lab.needs, beyond the GPU of a measure notebook.
NEEDS = ("gpu", "multigpu", "vllm", "aiter")


@dataclasses.dataclass(frozen=True)
class Notebook:
    """A notebook on disk, read once.

    Attributes:
        path: Where it is.
        kind: 'teach', 'measure' or 'analyse'.
        title: Its first heading.
        parameters: By name, in order.
        needs: What it needs beyond a CPU, of NEEDS.
    """

    path: Path
    kind: str
    title: str
    parameters: Mapping[str, Parameter]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """File name without ending, e.g. '06_why_4x_tpot'."""
        return self.path.stem

    @classmethod
    def read(cls, path: Path) -> Notebook:
        """Read a notebook's kind, title and parameters.

        Raises:
            NotebookError: The file is no notebook, has no kind, unknown needs, or bad parameters.
        """
        nb = read_notebook(path)
        about = nb.metadata.get("dcp_lab")
        about = about if isinstance(about, dict) else {}
        kind, needs = about.get("kind"), about.get("needs", [])
        if kind not in KINDS:
            raise NotebookError(
                f"{path.name}: metadata.dcp_lab.kind: expected {', '.join(KINDS)}, got {kind!r}"
            )
        if not isinstance(needs, list) or not set(needs) <= set(NEEDS):
            raise NotebookError(
                f"{path.name}: metadata.dcp_lab.needs: expected a list of {', '.join(NEEDS)}, "
                f"got {needs!r}"
            )
        return cls(
            path=path,
            kind=kind,
            title=title_of(nb),
            parameters=read_parameters(path),
            needs=tuple(needs),
        )


def read_notebook(path: Path) -> NotebookNode:
    """Return a notebook as it is on disk, in format 4.

    Raises:
        NotebookError: It cannot be read, or is no notebook.
    """
    import nbformat

    try:
        nb = nbformat.read(path, as_version=4)
        nbformat.validate(nb)
    except Exception as error:
        # nbformat raises whatever a broken file makes it stumble over.
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise NotebookError(f"{path.name}: not a notebook: {why[0]}") from None
    return nb


def title_of(nb: Any) -> str:
    """Return a notebook's first heading, '' if it has none."""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return line.removeprefix("# ").strip()
    return ""


def find_root() -> Path:
    """Return the repository: the nearest folder upwards that holds notebooks/ and pyproject.toml.

    Looks from the working folder first, then from where the package lies.

    Raises:
        NotebookError: There is none.
    """
    package_parent = Path(__file__).resolve().parents[2]
    for folder in (Path.cwd(), *Path.cwd().parents, package_parent):
        if (folder / "notebooks").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    raise NotebookError(
        "no folder notebooks/ beside a pyproject.toml here or above: run this in the repository"
    )


def available(root: Path) -> list[Path]:
    """Return the repository's notebooks, in order of their numbers."""
    return sorted((root / "notebooks").glob("*.ipynb"))


def find(names: Sequence[str], root: Path) -> list[Path]:
    """Return the notebooks that were asked for, each once, in the order asked.

    Args:
        names: Each a number ('06' or '6'), a name with or without its number
            ('06_why_4x_tpot', 'why_4x_tpot'), or a path. Empty: all of the repository's.
        root: The repository.

    Raises:
        NotebookError: A name fits none (the message lists those there are), fits two, or two of
            those asked for have one name, so that their copies would overwrite each other.
    """
    there = available(root)
    if not names:
        return there
    by_name: dict[str, list[Path]] = {}
    for path in there:
        number, _, rest = path.stem.partition("_")
        for key in {rest, number, number.lstrip("0")} - {path.stem, ""}:
            by_name.setdefault(key, []).append(path)
    # A whole name means that notebook, whatever else it may be short for.
    by_name |= {path.stem: [path] for path in there}
    found: dict[Path, None] = {}
    for name in names:
        fits = by_name.get(name, [])
        if len(fits) > 1:
            raise NotebookError(
                f"notebook {name!r}: expected one, got {', '.join(path.stem for path in fits)}"
            )
        path = fits[0] if fits else None
        if path is None and Path(name).suffix == ".ipynb" and Path(name).is_file():
            path = Path(name).resolve()
        if path is None:
            guess = difflib.get_close_matches(name, by_name, n=1)
            hint = f"; did you mean {by_name[guess[0]][0].stem}?" if guess else ""
            listing = "\n".join(f"  {path.stem}" for path in there) or "  (none)"
            raise NotebookError(f"no notebook {name!r}{hint}\nnotebooks:\n{listing}")
        found[path] = None
    stems = [path.stem for path in found]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise NotebookError(
            f"two notebooks are named {twice[0]}: their copies would be one file; run them apart"
        )
    return list(found)


def resolve(
    notebooks: Sequence[Notebook], assignments: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Return what to override in each notebook, checked.

    Args:
        notebooks: Those that will run.
        assignments: 'name=value' each. One goes to every notebook that has the name.

    Returns:
        For each notebook's name the overrides {parameter: value}, possibly empty.

    Raises:
        NotebookError: No notebook has the parameter, or the value is bad for one that has it. The
            message lists the valid ones with type, default and help.
    """
    overrides: dict[str, dict[str, Any]] = {notebook.name: {} for notebook in notebooks}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise NotebookError(f"-p {assignment}: expected NAME=VALUE")
        takers = [notebook for notebook in notebooks if name in notebook.parameters]
        if not takers:
            valid = {p for notebook in notebooks for p in notebook.parameters}
            guess = difflib.get_close_matches(name, valid, n=1)
            hint = f"; did you mean {guess[0]}?" if guess else ""
            raise NotebookError(f"no parameter {name!r}{hint}\n{_listing(notebooks)}")
        for notebook in takers:
            try:
                overrides[notebook.name][name] = notebook.parameters[name].parse(text)
            except NotebookError as error:
                raise NotebookError(f"{notebook.name}: {error}\n{_listing([notebook])}") from None
    return overrides


def _listing(notebooks: Sequence[Notebook]) -> str:
    lines = []
    for notebook in notebooks:
        lines.append(f"parameters of {notebook.name}:")
        lines += [f"  {p.line}" for p in notebook.parameters.values()] or ["  (none)"]
    return "\n".join(lines)
