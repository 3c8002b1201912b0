#!/usr/bin/env python3
"""Take the signatures that the AITER adapters call from AITER's source, without importing it.

    pip download --no-deps amd-aiter==0.1.7.post2.dev18
    python tools/aiter_signatures.py amd_aiter-0.1.7.post2.dev18-py3-none-any.whl \\
        "amd-aiter 0.1.7.post2.dev18 (PyPI wheel)"
    python tools/aiter_signatures.py CHECKOUT_OF_ROCM_AITER "ROCm/aiter COMMIT"

Writes tests/aiter_signatures.json. A function that this source lacks keeps the signature
and the source that the file has.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "tests" / "aiter_signatures.json"
# Where each function lies in the package.
FUNCTIONS = {
    "paged_attention_v1": "aiter/ops/attention.py",
    "get_pa_metadata_info_v1": "aiter/ops/attention.py",
    "get_pa_metadata_v1": "aiter/ops/attention.py",
    "pa_persistent_fwd": "aiter/ops/attention.py",
    "get_mla_metadata_info_v1": "aiter/ops/attention.py",
    "get_mla_metadata_v1": "aiter/ops/attention.py",
    "flash_attn_varlen_func": "aiter/ops/mha.py",
    "mla_decode_fwd": "aiter/mla.py",
}


def source_of(path: Path, file: str) -> str:
    """Return a file of a wheel or of a checkout."""
    if path.is_dir():
        return (path / file).read_text()
    with zipfile.ZipFile(path) as wheel:
        return wheel.read(file).decode()


def parameters(function: ast.FunctionDef) -> Iterator[list[object]]:
    """Yield [name, whether a call has to give it] of a function's parameters, in order."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = len(names) - len(arguments.defaults)
    for place, name in enumerate(names):
        yield [name, place < required]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield [argument.arg, default is None]


def main(argv: list[str]) -> int:
    """Write the file; 2 on bad input."""
    if len(argv) != 2 or not Path(argv[0]).exists():
        print(__doc__, file=sys.stderr)
        return 2
    path, source = Path(argv[0]), argv[1]
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name, file in FUNCTIONS.items():
        tree = ast.parse(source_of(path, file))
        defined = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
        if not defined:
            print(f"{name}: not in {file} of this source; kept as it is", file=sys.stderr)
            continue
        found[name] = {
            "source": source,
            "file": file,
            "parameters": list(parameters(defined[-1])),
        }
    text = json.dumps(dict(sorted(found.items())), indent=1) + "\n"
    part = OUT.with_suffix(".part")
    part.write_text(text)
    part.replace(OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
