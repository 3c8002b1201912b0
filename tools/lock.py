"""Write constraints/*.txt anew: the exact version of every package, one file a kind of machine.

Run by `make lock`. The versions come from uv's resolver, for every Python from 3.11 on at once;
the pins below are the only ones made by hand.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.8"

TORCH = "torch==2.13.0"
# What torch's CPU build asks for. PyPI's metadata describes the CUDA build, so it cannot be asked.
TORCH_CPU_NEEDS = [
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
]
# The newest Triton that was run in the interpreter; torch's CPU build names none.
TRITON_CPU = "triton==3.9.0"

# numpy 2.4.6 works in the interpreter of Triton 3.7.1 and 3.9.0 (loops over a loaded bound) and
# has wheels for every Python in use; the newest one does not install on 3.11.
PINS = ["numpy==2.4.6", "pip==26.3", "setuptools==84.2.1"]

KINDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    # kind: extras of pyproject.toml, further requirements, lines added as they are
    "cpu": (["dev"], TORCH_CPU_NEEDS, [TORCH, TRITON_CPU]),
    "cuda": (["dev", "cuda"], [], []),
    "rocm": (["dev"], [], []),
}

HEADERS = {
    "cpu": "No GPU: torch's CPU build, and Triton's interpreter.",
    "cuda": "NVIDIA GPU: torch's CUDA build from PyPI with the Triton that it names.",
    "rocm": "AMD GPU: torch, triton, vllm and AITER are the machine's own and stay what they are.",
}


def lock(kind: str) -> str:
    """Return the text of constraints/<kind>.txt."""
    extras, needs, added = KINDS[kind]
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "-"]
    command += ["--universal", "--python-version=3.11", "--upgrade", "--quiet", "--strip-extras"]
    command += ["--no-header", "--no-annotate", "--allow-unsafe"]
    command += [f"--extra={extra}" for extra in extras]
    wanted = "\n".join(PINS + needs) + "\n"
    done = subprocess.run(
        command, cwd=ROOT, input=wanted, text=True, stdout=subprocess.PIPE, timeout=600, check=True
    )
    lines = sorted(done.stdout.splitlines() + added)
    header = f"# {HEADERS[kind]}\n# Written by `make lock`; do not edit.\n"
    return header + "\n".join(lines) + "\n"


def main() -> None:
    """Install uv where this Python lives and write the three files."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", UV]
    subprocess.run(pip, timeout=600, check=True)
    texts = {kind: lock(kind) for kind in KINDS}
    for kind, text in texts.items():
        (ROOT / "constraints" / f"{kind}.txt").write_text(text)
        print(f"constraints/{kind}.txt: {len(text.splitlines()) - 2} packages")


if __name__ == "__main__":
    main()
