"""The backend's options, from `--additional-config` or the environment."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

# Option -> its values, the first being the default; README.md beside this file says more.
VALUES = {
    "attention_path": ("paged", "gather"),
    "gather": ("published", "per_token", "per_page"),
    "reducer": ("auto", "ag_rs", "a2a", "direct"),
    "prefill": ("auto", "flash", "paged"),
    "rocm_full_graph_gate": ("off", "a2a", "all"),
}
SECTION = "dcp_lab"
PREFIX = "DCP_LAB_"
# How alike a variable's name and an option's are, 0 to 1, before it is taken for a slip. The lab
# has other variables with this prefix (a test holds that none is that near).
NEAR = 0.75


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose beyond vLLM's own flags.

    Attributes:
        attention_path: 'paged' reads the pages in place, 'gather' copies them out first (the
            published path, to serve and measure the regression).
        gather: How 'gather' copies: 'published' (study 1's: the host waits for the device in every
            layer), 'per_token' or 'per_page'.
        reducer: 'ag_rs', 'a2a' or 'direct'; 'auto' is what --dcp-comm-backend says.
        prefill: What attends prefills: 'flash' is vLLM's FlashAttention 3, on the pages, and
            refuses what that cannot take; 'paged' is the lab's kernel; 'auto' is 'flash' where it
            is there and takes the layer, else 'paged'.
        rocm_full_graph_gate: Where vLLM lowers full graphs to PIECEWISE because of DCP on ROCm:
            'off' leaves that, 'a2a' keeps full graphs for the a2a exchange, 'all' for every one
            (unsafe: nobody has shown that ag_rs may be captured on ROCm).
    """

    attention_path: str = VALUES["attention_path"][0]
    gather: str = VALUES["gather"][0]
    reducer: str = VALUES["reducer"][0]
    prefill: str = VALUES["prefill"][0]
    rocm_full_graph_gate: str = VALUES["rocm_full_graph_gate"][0]

    @property
    def gather_form(self) -> str | None:
        """How decodes gather, None where they read the pages in place."""
        return self.gather if self.attention_path == "gather" else None

    def reducer_name(self, dcp_comm_backend: str | None) -> str:
        """Return the reducer that runs.

        Args:
            dcp_comm_backend: vLLM's own choice; None is its default, ag_rs.
        """
        return (dcp_comm_backend or "ag_rs") if self.reducer == "auto" else self.reducer


def read_options(
    additional_config: object = None, environ: Mapping[str, str] = os.environ
) -> Options:
    """Return the options given; --additional-config goes before the environment.

    Args:
        additional_config: vLLM's, of which the section 'dcp_lab' is read:
            --additional-config '{"dcp_lab": {"reducer": "direct"}}'.
        environ: DCP_LAB_REDUCER=direct and so on.

    Raises:
        ValueError: An unknown option or value, one that would have no effect ('gather' where the
            pages are read in place, an option outside its section), or a name that is nearly one
            of these; the message names it and what there is.
    """
    section: Any = None
    if isinstance(additional_config, Mapping):
        _refuse_near_keys(additional_config)
        section = additional_config.get(SECTION)
    _refuse_near_variables(environ)
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise ValueError(
            f"additional_config: {SECTION}: expected options by name, got {section!r}"
        )
    for name in section:
        if name not in VALUES:
            raise ValueError(
                f"additional_config: {SECTION}: expected some of {', '.join(VALUES)}, got {name!r}"
            )
    chosen = {}
    for name, values in VALUES.items():
        variable = PREFIX + name.upper()
        where, value = f"additional_config: {SECTION}.{name}", section.get(name)
        if value is None and environ.get(variable):
            where, value = variable, environ[variable]
        if value is None:
            continue
        if value not in values:
            raise ValueError(f"{where}: expected {' or '.join(values)}, got {value!r}")
        chosen[name] = value
        if name == "gather" and chosen.get("attention_path") != "gather":
            raise ValueError(
                f"{where}: expected attention_path=gather beside it, got {value!r} where the "
                "pages are read in place: add that, or leave gather away"
            )
    return Options(**chosen)


def _plain(name: object) -> str:
    return "".join(c for c in str(name).lower() if c.isalnum())


def _refuse_near_keys(additional_config: Mapping[Any, Any]) -> None:
    """Raise for the section under another spelling, and for an option outside the section."""
    options = {_plain(name): name for name in VALUES}
    for key in additional_config:
        if key != SECTION and _plain(key) == _plain(SECTION):
            raise ValueError(f"additional_config: expected {SECTION!r}, got {key!r}")
        option = options.get(_plain(key))
        if option is not None:
            raise ValueError(
                f"additional_config: expected {option!r} inside {SECTION!r}, got {key!r} outside: "
                f'{{"{SECTION}": {{"{option}": ...}}}}'
            )


def _refuse_near_variables(environ: Mapping[str, str]) -> None:
    """Raise for a variable that is nearly an option's."""
    variables = [PREFIX + name.upper() for name in VALUES]
    for given in environ:
        if given in variables or not given.upper().startswith(PREFIX):
            continue
        names = [variable.removeprefix(PREFIX) for variable in variables]
        near = difflib.get_close_matches(given.upper().removeprefix(PREFIX), names, 1, NEAR)
        if near:
            raise ValueError(f"environment: expected {PREFIX}{near[0]}, got {given}")
