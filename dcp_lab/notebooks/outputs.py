"""Outputs that are committed with a notebook: what is kept of a run, and whether it is current."""

from __future__ import annotations

import copy
import math
import re
from typing import TYPE_CHECKING

from dcp_lab.notebooks.headlines import HEADLINE_MIME, collect_headlines

if TYPE_CHECKING:
    from nbformat import NotebookNode

# Tag of the cell in which the runner writes what it ran with.
RECORD_TAG = "dcp-lab-record"
# Tag of a cell whose printed numbers may differ from run to run or machine to machine.
VARIES_TAG = "varies"
# What metadata.dcp_lab holds in a committed notebook.
ABOUT_KEYS = ("kind", "needs")
# Cells that are not in the repository's notebook: the runner's and papermill's.
ADDED_TAGS = {RECORD_TAG, "injected-parameters", "papermill-error-cell-tag"}


def committable(source: NotebookNode, executed: NotebookNode) -> NotebookNode:
    """Return the source notebook with the outputs of its executed copy and nothing else of it.

    Execution counts run 1..N; what papermill and the runner added (metadata, timings, paths, their
    own cells) stays behind.

    Args:
        source: As it stands in the repository.
        executed: The same, run with the default parameters.
    """
    nb = copy.deepcopy(source)
    nb.cells = [c for c in nb.cells if not ADDED_TAGS & set(c.metadata.get("tags", []))]
    ran = [c for c in executed.cells if not ADDED_TAGS & set(c.metadata.get("tags", []))]
    count = 0
    for cell, done in zip(nb.cells, ran, strict=True):
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.outputs = done.outputs
        cell.execution_count = None
        if cell.source.strip():
            count += 1
            cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    about = nb.metadata["dcp_lab"]
    nb.metadata = type(nb.metadata)(
        dcp_lab={key: about[key] for key in ABOUT_KEYS if key in about},
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    return nb


def differences(committed: NotebookNode, fresh: NotebookNode) -> list[str]:
    """Return where the outputs of two runs of one notebook differ, a line each.

    Headline numbers must agree to half of the last digit that is shown and have the same unit,
    printed text and Markdown must agree word by word and their numbers within 0.1 %, figures and
    tables in kind and number. What varies by its nature is left out: values of headlines with
    varies=True, cells tagged 'varies', anything on stderr.
    """
    found = []
    old_numbers, new_numbers = collect_headlines(committed), collect_headlines(fresh)
    old_names = [line.name for line in old_numbers]
    new_names = [line.name for line in new_numbers]
    if old_names != new_names:
        found.append(f"headline numbers: committed {old_names}, now {new_names}")
    else:
        for old, new in zip(old_numbers, new_numbers, strict=True):
            if new.varies and new.unit == old.unit:
                continue
            apart = abs(old.value - new.value) > max(
                old.half_of_last_digit, new.half_of_last_digit
            )
            if apart or new.unit != old.unit:
                found.append(f"{new.name}: committed {old.text}, now {new.text}")
    for index, (old_cell, new_cell) in enumerate(zip(committed.cells, fresh.cells, strict=True)):
        if new_cell.cell_type != "code" or VARIES_TAG in new_cell.metadata.get("tags", []):
            continue
        old_outputs, new_outputs = _comparable(old_cell), _comparable(new_cell)
        old_kinds = [kind for kind, _ in old_outputs]
        new_kinds = [kind for kind, _ in new_outputs]
        if old_kinds != new_kinds:
            found.append(f"cell {index}: outputs: committed {old_kinds}, now {new_kinds}")
            continue
        for (_, old_text), (_, new_text) in zip(old_outputs, new_outputs, strict=True):
            if not _same_text(old_text, new_text):
                found.append(f"cell {index}: {_first_change(old_text, new_text)}")
    return found


def _comparable(cell: NotebookNode) -> list[tuple[str, str]]:
    """Return (kind, text) of a cell's outputs; headlines are compared as numbers elsewhere."""
    outputs = []
    for output in cell.outputs:
        if output.output_type == "stream":
            if output.name == "stdout":
                outputs.append(("text", output.text))
            continue
        data = output.get("data", {})
        if HEADLINE_MIME in data:
            continue
        images = [mime for mime in data if mime.startswith("image/")]
        if images:
            outputs.append((images[0], ""))
        else:
            # The text of a Markdown object names its class alone. A table's HTML says what its
            # text says, with ids that change.
            text = data.get("text/markdown", data.get("text/plain", ""))
            outputs.append(("+".join(sorted(data)), text))
    return outputs


_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# What Styler and figures print as text: an address.
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def _same_text(old: str, new: str) -> bool:
    old, new = _ADDRESS.sub("@", old), _ADDRESS.sub("@", new)
    if _NUMBER.sub("#", old).split() != _NUMBER.sub("#", new).split():
        return False
    pairs = zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True)
    return all(
        math.isclose(float(a.replace(",", "")), float(b.replace(",", "")), rel_tol=1e-3)
        for a, b in pairs
    )


def _first_change(old: str, new: str) -> str:
    for a, b in zip(old.splitlines(), new.splitlines(), strict=False):
        if not _same_text(a, b):
            return f"committed {a.strip()!r}, now {b.strip()!r}"
    return f"committed {len(old.splitlines())} lines, now {len(new.splitlines())}"
