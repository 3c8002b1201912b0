#!/usr/bin/env python3
"""Take the README's figure out of notebook 06, where it is the first one.

python tools/readme_figure.py            # write notebooks/figures/why_4x.png
python tools/readme_figure.py --check    # fail when it is not what the notebook shows
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "06_why_4x_tpot.ipynb"
FIGURE = ROOT / "notebooks" / "figures" / "why_4x.png"


def first_figure(notebook: Path) -> bytes:
    """Return the first PNG among a notebook's outputs.

    Raises:
        ValueError: It has none.
    """
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pngs = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    if not pngs:
        raise ValueError(f"{notebook.name}: expected a figure among its outputs, found none")
    return base64.b64decode("".join(pngs[0]))


def main() -> int:
    """Write or check the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    figure = first_figure(NOTEBOOK)
    if options.check:
        if not FIGURE.exists() or FIGURE.read_bytes() != figure:
            print(f"{FIGURE.name} is not notebook 06's: python tools/readme_figure.py")
            return 1
        return 0
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_bytes(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
