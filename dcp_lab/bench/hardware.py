"""What an accelerator's memory and links can move, each figure with where it comes from.

No figure stands without its source and its kind:

- vendor: a data sheet's peak. No program reaches it; it gives the smallest time that is possible.
- published: somebody else measured it and said how.
- measured: this lab measured it; the rows are in data/measured.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["vendor", "published", "measured"]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number of an accelerator, with its source.

    Attributes:
        name: What was moved, in a few words.
        gbps: GB/s, GB = 1e9 bytes.
        kind: "vendor", "published" or "measured".
        source: Where a reader can look it up.
    """

    name: str
    gbps: float
    kind: Kind
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.gbps:,.0f} GB/s ({self.kind}; {self.source})"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """An accelerator as the cost formulas see it.

    Attributes:
        name: Vendor's name.
        arch: Compiler target.
        compute_units: CUs (AMD) or SMs (NVIDIA).
        memory: Figures of its HBM, any number, any kind.
        link: What it can send one peer, one direction; None where no figure was found.
    """

    name: str
    arch: str
    compute_units: int
    memory: tuple[Figure, ...]
    link: Figure | None = None

    @property
    def fastest(self) -> Figure:
        """Return the memory figure that gives the smallest time."""
        return max(self.memory, key=lambda figure: figure.gbps)

    @property
    def slowest(self) -> Figure:
        """Return the memory figure that gives the largest time."""
        return min(self.memory, key=lambda figure: figure.gbps)

    def figure(self, kind: Kind) -> Figure:
        """Return the fastest memory figure of one kind.

        Raises:
            ValueError: There is none.
        """
        figures = [figure for figure in self.memory if figure.kind == kind]
        if not figures:
            kinds = sorted({figure.kind for figure in self.memory})
            raise ValueError(f"kind: expected one of {kinds} for {self.name}, got {kind!r}")
        return max(figures, key=lambda figure: figure.gbps)


H200 = Accelerator(
    name="NVIDIA H200",
    arch="sm_90a",
    compute_units=132,
    memory=(
        Figure("HBM3e peak", 4800, "vendor", "NVIDIA H200 data sheet"),
        Figure("read-only kernel, 4 GiB", 4696, "measured", "data/measured/probe_h200.csv"),
        Figure("copy, read + write", 4286, "measured", "data/measured/probe_h200.csv"),
    ),
    link=Figure("NVLink 4, all 18 links, one direction", 450, "vendor", "NVIDIA H200 data sheet"),
)

# The two kernel figures are of an MI350X, which has the MI355X's memory and compute units.
MI355X = Accelerator(
    name="AMD Instinct MI355X",
    arch="gfx950",
    compute_units=256,
    memory=(
        Figure("HBM3E peak", 8000, "vendor", "AMD Instinct MI355X data sheet"),
        Figure("read-only kernel, MI350X", 6914, "published", "ROCm/rocm-systems#8480"),
        Figure("older copy kernel, MI350X", 5600, "published", "ROCm/rocm-systems#8480"),
    ),
    link=Figure("xGMI, one link, one direction", 76.8, "published", "vllm-project/vllm#39080"),
)

MI300X = Accelerator(
    name="AMD Instinct MI300X",
    arch="gfx942",
    compute_units=304,
    memory=(
        Figure("HBM3 peak", 5300, "vendor", "AMD Instinct MI300X data sheet"),
        Figure("user's roofline run", 4200, "published", "ROCm/legacy-rocm-build#5070"),
        Figure(
            "rocprofiler-compute's expected value", 3911, "published", "ROCm/rocm-systems#2934"
        ),
    ),
)

ACCELERATORS = (H200, MI355X, MI300X)
