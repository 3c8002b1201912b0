#!/usr/bin/env python3
"""Take the headline numbers out of notebooks 06 and 05, for all who quote them.

python tools/headlines.py            # write data/headlines.json
python tools/headlines.py --check    # fail when it is not what the notebooks say
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from dcp_lab.notebooks.books import read_notebook
from dcp_lab.notebooks.headlines import collect_headlines

ROOT = Path(__file__).resolve().parents[1]
# The verdict's comes first.
NOTEBOOKS = ("06_why_4x_tpot", "05_serve_vllm")
NUMBERS = ROOT / "data" / "headlines.json"


def numbers_of(notebook: Path) -> list[dict]:
    """Return a notebook's headline numbers, each with the text that may be quoted."""
    lines = collect_headlines(read_notebook(notebook))
    name = notebook.stem
    return [{"notebook": name, **dataclasses.asdict(line), "text": line.text} for line in lines]


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    notebooks = [ROOT / "notebooks" / f"{name}.ipynb" for name in NOTEBOOKS]
    numbers = [line for notebook in notebooks for line in numbers_of(notebook)]
    text = json.dumps({"numbers": numbers}, indent=1, ensure_ascii=False) + "\n"
    if options.check:
        if not NUMBERS.exists() or NUMBERS.read_text("utf-8") != text:
            print(f"data/{NUMBERS.name} is not the notebooks': python tools/headlines.py")
            return 1
        return 0
    part = NUMBERS.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(NUMBERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
