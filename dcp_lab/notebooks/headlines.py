"""Headline numbers: what a notebook wants to be remembered by, and the runner shows.

Cheap to import, since every notebook does.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import sys
from typing import TYPE_CHECKING

from dcp_lab.notebooks.parameters import NotebookError

if TYPE_CHECKING:
    from nbformat import NotebookNode

HEADLINE_MIME = "application/vnd.dcp-lab.headline+json"
# Where a number comes from (data/README.md); computed: by the notebook, from its own inputs.
BASES = ("published", "measured", "modelled", "computed")


@dataclasses.dataclass(frozen=True)
class Headline:
    """One number a notebook wants to be remembered by.

    Attributes:
        name: What it is, in a few words.
        value: The number itself, unrounded.
        unit: Its unit, "" for a plain number.
        digits: Significant digits that mean something.
        varies: Whether another run or machine may give another value: a time, a rounding error.
        basis: One of BASES, "" where the notebook does not say.
    """

    name: str
    value: float
    unit: str = ""
    digits: int = 3
    varies: bool = False
    basis: str = ""

    @property
    def half_of_last_digit(self) -> float:
        """Half of the place of the last digit that text shows; an int is shown whole: 0."""
        if isinstance(self.value, int) or self.value == 0:
            return 0.0
        return 0.5 * 10.0 ** -_last_place(self.value, self.digits)

    @property
    def text(self) -> str:
        """The value and its unit, rounded to the digits that mean something."""
        glue = "" if self.unit in ("", "x", "%") else " "
        return f"{format_number(self.value, self.digits)}{glue}{self.unit}"


def _last_place(value: float, digits: int) -> int:
    """Return how many places behind the point the last of so many significant digits stands."""
    return digits - 1 - math.floor(math.log10(abs(value)))


def format_number(value: float, digits: int) -> str:
    """Return an int whole and a float with this many significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    place = _last_place(value, digits)
    rounded = round(value, place)
    if not 1e-4 <= abs(rounded) < 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{rounded:,.{max(place, 0)}f}"


def headline(
    name: str,
    value: float,
    unit: str = "",
    digits: int = 3,
    *,
    varies: bool = False,
    basis: str = "",
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
        basis: Where it comes from: "published", "measured", "modelled" (data/README.md) or
            "computed" (here, from the notebook's own inputs). Default: "", not said.

    Raises:
        ValueError: value is not a finite number, digits < 1, or basis is not one of these.
    """
    number = value.item() if hasattr(value, "item") else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number):
        raise ValueError(f"headline {name!r}: value: expected a finite number, got {value!r}")
    if digits < 1:
        raise ValueError(f"headline {name!r}: digits: expected an int >= 1, got {digits!r}")
    if basis and basis not in BASES:
        expected = ", ".join(BASES)
        raise ValueError(f"headline {name!r}: basis: expected one of {expected}, got {basis!r}")
    line = Headline(name, number, unit, digits, varies, basis)
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
    """Return the headline numbers in a notebook's outputs, in order.

    Raises:
        NotebookError: One of them is not what `headline` writes.
    """
    found = []
    for index, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            if HEADLINE_MIME not in output.get("data", {}):
                continue
            said = output["data"][HEADLINE_MIME]
            if not _is_headline(said):
                raise NotebookError(
                    f"cell {index}: headline: expected what dcp_lab.notebooks.headline writes, "
                    f"got {str(said)[:80]}; run the notebook again"
                )
            found.append(Headline(**said))
    return found


def _is_headline(said: object) -> bool:
    """Return whether this has a name and a finite value, and nothing that Headline lacks."""
    fields = {field.name: field.type for field in dataclasses.fields(Headline)}
    if not isinstance(said, dict) or not {"name", "value"} <= set(said) <= set(fields):
        return False
    kinds = {"str": str, "float": (int, float), "int": int, "bool": bool}
    right = all(isinstance(value, kinds[fields[key]]) for key, value in said.items())
    return right and math.isfinite(said["value"]) and said.get("digits", 1) >= 1


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
