"""The backend's options, from `--additional-config` or the environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

# Option -> its values, the first being the default; README.md beside this file says more.
VALUES = {
    "attention_path": ("paged", "gather"),
    "gather": ("published", "per_token", "per_page"),
    "reducer": ("auto", "ag_rs", "a2a", "direct"),
    "rocm_full_graph_gate": ("off", "a2a", "all"),
}
SECTION = "dcp_lab"
PREFIX = "DCP_LAB_"


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose beyond vLLM's own flags.

    Attributes:
        attention_path: 'paged' reads the pages in place, 'gather' copies them out first (the
            published path, to serve and measure the regression).
        gather: How 'gather' copies: 'published' (study 1's: the host waits for the device in every
            layer), 'per_token' or 'per_page'.
        reducer: 'ag_rs', 'a2a' or 'direct'; 'auto' is what --dcp-comm-backend says.
        rocm_full_graph_gate: Where vLLM lowers full graphs to PIECEWISE because of DCP on ROCm:
            'off' leaves that, 'a2a' keeps full graphs for the a2a exchange, 'all' for every one
            (unsafe: nobody has shown that ag_rs may be captured on ROCm).
    """

    attention_path: str = VALUES["attention_path"][0]
    gather: str = VALUES["gather"][0]
    reducer: str = VALUES["reducer"][0]
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
        ValueError: An unknown option or value; the message names it and what there is.
    """
    section: Any = None
    if isinstance(additional_config, Mapping):
        section = additional_config.get(SECTION)
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise ValueError(
            f"additional_config: {SECTION}: expected options by name, got {section!r}"
        )
    unknown = sorted(set(section) - set(VALUES))
    if unknown:
        raise ValueError(
            f"additional_config: {SECTION}: expected some of {', '.join(VALUES)}, got {unknown[0]}"
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
    return Options(**chosen)
