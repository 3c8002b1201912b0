"""Exercises at the end of a teaching notebook: is this answer right?"""

from __future__ import annotations

from typing import Any


def check_answer(exercise: int, answer: Any, expected: Any, *, hint: str) -> None:
    """Print whether an answer is right, without giving the right one away.

    Args:
        exercise: Its number.
        answer: A number or a nested sequence of numbers; None: not answered yet.
        expected: The right answer, to 0.1 %; infinities and NaN have to be the same.
        hint: What to look at again, printed for a wrong answer.
    """
    import numpy as np

    if answer is None:
        print(f"Exercise {exercise}: not answered yet.")
        return
    right = np.asarray(expected, dtype=float)
    try:
        given = np.asarray(answer, dtype=float)
    except (TypeError, ValueError):
        given = np.asarray(np.nan)
    same = given.shape == right.shape and np.allclose(given, right, rtol=1e-3, equal_nan=True)
    print(f"Exercise {exercise}: {'right.' if same else f'not yet. {hint}'}")
