"""Headline numbers: what a notebook wants to be remembered by, and the runner shows.

Cheap to import, since every notebook does.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

HEADLINE_MIME = "application/vnd.dcp-lab.headline+json"


@dataclasses.dataclass(frozen=True)
class Headline:
    """One number a notebook wants to be remembered by.

    Attributes:
        name: What it is, in a few words.
        value: The number itself, unrounded.
        unit: Its unit, "" for a plain number.
        digits: Significant digits that mean something.
        varies: Whether another run or machine may give another value: a time, a rounding error.
    """

    name: str
    value: float
    unit: str = ""
    digits: int = 3
    varies: bool = False

    @property
    def text(self) -> str:
        """The value and its unit, rounded to the digits that mean something."""
        glue = "" if self.unit in ("", "x", "%") else " "
        return f"{format_number(self.value, self.digits)}{glue}{self.unit}"


def format_number(value: float, digits: int) -> str:
    """Return an int whole and a float with this many significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    place = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, place)
    if not 1e-4 <= abs(rounded) < 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{rounded:,.{max(place, 0)}f}"


def headline(
    name: str, value: float, unit: str = "", digits: int = 3, *, varies: bool = False
) -> None:
    """Show one headline number and mark it for the runner.

    The runner lists headline numbers on the terminal and at the top of the report. In plain
    Jupyter the number shows as a line of text, outside of a notebook it is printed.

    Args:
        name: What the number is, in a few words.
        value: A finite number: an int, a float, or a numpy or torch scalar.
        unit: Its unit. Default: "", a plain number.
        digits: Significant digits to show. Default: 3.
        varies: True for what another run or machine may change (a time, a rounding error), which
            the check of committed outputs then leaves out. Default: False.

    Raises:
        ValueError: value is not a finite number, or digits < 1.
    """
    number = value.item() if hasattr(value, "item") else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number):
        raise ValueError(f"headline {name!r}: value: expected a finite number, got {value!r}")
    if digits < 1:
        raise ValueError(f"headline {name!r}: digits: expected an int >= 1, got {digits!r}")
    line = Headline(name, number, unit, digits, varies)
    text = f"{name}: {line.text}"
    # Inside a kernel IPython is loaded already; elsewhere it must not be loaded for this.
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        print(text)
        return
    ipython.display.display(
        {HEADLINE_MIME: dataclasses.asdict(line), "text/plain": text}, raw=True
    )


def collect_headlines(nb: NotebookNode) -> list[Headline]:
    """Return the headline numbers in a notebook's outputs, in order."""
    return [
        Headline(**output["data"][HEADLINE_MIME])
        for cell in nb.cells
        for output in cell.get("outputs", [])
        if HEADLINE_MIME in output.get("data", {})
    ]


def machine_line() -> str:
    """Return one line that says what this Python computes with: versions, and the GPU if any."""
    import torch

    try:
        import triton
    except ImportError:
        triton_version = "no triton"
    else:
        triton_version = f"triton {triton.__version__}"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
    else:
        device = "no GPU, so kernels run in Triton's interpreter"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {triton_version}"
    return f"{versions}; {device}"
