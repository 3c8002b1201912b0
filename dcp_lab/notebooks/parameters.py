"""The parameters cell: one typed line a parameter, with help behind it.

    context_tokens: int = 8192  # KV tokens of a request (1 to 131072)
    hardware: str = "MI355X"  # whose bandwidth to assume (one of MI300X, MI355X, H200)
    lengths: list[int] = [0, 1, 500]  # KV tokens of each request (0 to 4096)

The bracket at the end of the help is optional. Where it stands, a value outside of it is refused
before anything runs.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


class NotebookError(Exception):
    """What the person who asked for a run has to know; printed without a traceback."""


def _as_bool(text: str) -> bool:
    values = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    return values[text.lower()]


def _as_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": _as_float,
    "bool": _as_bool,
    "str": str,
}
PARAMETER_TYPES = (*_SCALARS, "list[int]", "list[float]", "list[str]")

_RANGE = re.compile(r"\((?P<low>[-+.\de]+) to (?P<high>[-+.\de]+)\)$")
_CHOICES = re.compile(r"\(one of (?P<choices>[^()]+)\)$")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell.

    Attributes:
        name: The variable.
        type: One of PARAMETER_TYPES.
        default: Its value in the notebook.
        help: The comment behind it; may end in '(LOW to HIGH)' or '(one of A, B)'.
    """

    name: str
    type: str
    default: Any
    help: str

    @property
    def expected(self) -> str:
        """What a value must be, for error messages."""
        if match := _RANGE.search(self.help):
            return f"{self.type} from {match['low']} to {match['high']}"
        if match := _CHOICES.search(self.help):
            return f"{self.type}, one of {match['choices']}"
        return self.type

    @property
    def line(self) -> str:
        """The parameter as its notebook writes it."""
        return f"{self.name}: {self.type} = {self.default!r}  # {self.help}"

    def parse(self, text: str) -> Any:
        """Return the value that was typed, as this parameter's type.

        Args:
            text: As on the command line. Lists: values between commas, brackets optional.

        Raises:
            NotebookError: It is not of the type, or outside of what the help allows.
        """
        inner = self.type.removeprefix("list[").removesuffix("]")
        parse_one = _SCALARS[inner]
        try:
            if self.type == inner:
                value = parse_one(text.strip())
            else:
                parts = text.strip().removeprefix("[").removesuffix("]").split(",")
                value = [parse_one(part.strip().strip("'\"")) for part in parts if part.strip()]
        except (ValueError, KeyError):
            raise NotebookError(f"{self.name}: expected {self.expected}, got {text!r}") from None
        self.check(value)
        return value

    def check(self, value: Any) -> None:
        """Raise NotebookError if a value of the right type is outside of what the help allows."""
        values = value if isinstance(value, list) else [value]
        allowed = True
        if match := _RANGE.search(self.help):
            allowed = all(float(match["low"]) <= v <= float(match["high"]) for v in values)
        elif match := _CHOICES.search(self.help):
            choices = [choice.strip() for choice in match["choices"].split(",")]
            allowed = all(str(v) in choices for v in values)
        if not allowed:
            raise NotebookError(f"{self.name}: expected {self.expected}, got {value!r}")


def read_parameters(path: Path) -> dict[str, Parameter]:
    """Return a notebook's parameters, by name, in order.

    Args:
        path: The notebook.

    Raises:
        NotebookError: A line of the parameters cell lacks its type or its help, has a type the
            runner does not know, or a default that its own type or help does not allow.
    """
    import nbformat
    import papermill

    nb = nbformat.read(path, as_version=4)
    # papermill asks for a kernel's name; which one it is does not matter here.
    nb.metadata["kernelspec"] = {"name": "python3", "language": "python"}
    parameters = {}
    for name, seen in papermill.inspect_notebook(nb).items():
        where = f"{path.name}: parameters cell: {name}"
        type_name = seen["inferred_type_name"].replace(" ", "")
        if type_name not in PARAMETER_TYPES:
            got = "no type" if type_name == "None" else type_name
            raise NotebookError(f"{where}: expected type {', '.join(PARAMETER_TYPES)}, got {got}")
        if not seen["help"]:
            raise NotebookError(f"{where}: expected help in a comment on the same line")
        try:
            default = ast.literal_eval(seen["default"])
        except (ValueError, SyntaxError):
            raise NotebookError(
                f"{where}: expected a literal as default, got {seen['default']}"
            ) from None
        if not _is_of_type(default, type_name):
            raise NotebookError(f"{where}: expected {type_name} as default, got {default!r}")
        parameter = Parameter(name=name, type=type_name, default=default, help=seen["help"])
        try:
            parameter.check(default)
        except NotebookError as error:
            raise NotebookError(f"{path.name}: parameters cell: default of {error}") from None
        parameters[name] = parameter
    return parameters


def _is_of_type(value: Any, type_name: str) -> bool:
    if type_name.startswith("list["):
        inner = type_name.removeprefix("list[").removesuffix("]")
        return isinstance(value, list) and all(_is_of_type(v, inner) for v in value)
    return type(value).__name__ == type_name
