"""Argument checks: what was wrong, expected and given. Metadata only, never a device sync."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def dtype_name(dtype: torch.dtype) -> str:
    """Return 'float16' for torch.float16."""
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    """Return a tensor as 'int64 [4, 9] on cuda:0', anything else as its repr."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)} on {value.device}"
    return repr(value)


def fail(argument: str, expected: str, got: object) -> NoReturn:
    """Raise the ValueError that names the argument, what was expected and what was given."""
    raise ValueError(f"{argument}: expected {expected}, got {describe(got)}")


def unsupported(argument: str, got: object, instead: str) -> NoReturn:
    """Raise the NotImplementedError that names the argument and what to do instead."""
    raise NotImplementedError(f"{argument}={describe(got)} is not supported: {instead}")


def check_tensor(
    argument: str,
    value: object,
    *,
    dtypes: Collection[torch.dtype] | None = None,
    shape: Sequence[int | str | tuple[str, int]] | None = None,
    device: torch.device | None = None,
    last_contiguous: bool = False,
    distinct: bool = False,
) -> torch.Tensor:
    """Return value if it is the tensor that was asked for.

    Args:
        argument: Name the caller knows it by.
        value: What was given.
        dtypes: Accepted dtypes. Default: any.
        shape: One entry a dimension: a size, a name (any size), or a name with its size,
            ("B", 4). Default: any.
        device: Where it has to be. Default: anywhere.
        last_contiguous: Whether the last dimension needs stride 1.
        distinct: Whether each element needs memory of its own, as one that is written does.

    Raises:
        ValueError: It is not.

    Notes:
        Runs in every call of an op: words are made only for an error.
    """
    if not isinstance(value, torch.Tensor):
        fail(argument, _wanted("a tensor", shape), value)
    wrong = dtypes is not None and value.dtype not in dtypes
    if shape is not None and not wrong:
        sizes = value.shape
        wrong = len(sizes) != len(shape)
        if not wrong:
            for size, entry in zip(sizes, shape, strict=True):
                if entry.__class__ is tuple:
                    entry = entry[1]
                if entry.__class__ is not str and size != entry:
                    wrong = True
                    break
    if wrong:
        kinds = " or ".join(dtype_name(d) for d in dtypes) if dtypes else "any dtype"
        fail(argument, _wanted(kinds, shape), value)
    if device is not None and value.device != device:
        fail(argument, f"a tensor on {device}", value)
    # A dimension of size 1 or a tensor without elements has no stride that could be wrong.
    if last_contiguous and value.stride(-1) != 1 and value.shape[-1] > 1 and value.numel():
        fail(argument, "a contiguous last dimension (stride 1)", f"strides {value.stride()}")
    if distinct and _overlaps(value):
        fail(
            argument,
            "elements that do not share memory, since it is written",
            f"shape {list(value.shape)}, strides {value.stride()}",
        )
    return value


def _overlaps(value: torch.Tensor) -> bool:
    """Return whether elements share memory, as far as each dimension spans the smaller ones."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return value.numel() > 0
        reach += stride * (size - 1)
    return False


def _wanted(kind: str, shape: Sequence[int | str | tuple[str, int]] | None) -> str:
    """Return 'int32 [B=4, max_pages]'."""
    if shape is None:
        return kind
    sizes = [f"{e[0]}={e[1]}" if isinstance(e, tuple) else str(e) for e in shape]
    return f"{kind} [{', '.join(sizes)}]"


def check_positive_int(argument: str, value: object, *, at_most: int | None = None) -> int:
    """Return value if it is an int >= 1 (and <= at_most)."""
    bad = isinstance(value, bool) or not isinstance(value, int) or value < 1
    if bad or (at_most is not None and value > at_most):
        upper = "" if at_most is None else f" and <= {at_most}"
        fail(argument, f"an int >= 1{upper}", value)
    return value
