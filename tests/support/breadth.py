"""Which parameters of a test the gate runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *kept: Any) -> list:
    """`values` as pytest parameters. Those alone run without --full that are `kept`, or tuples that start with one."""
    values = list(values)
    missing = [each for each in kept if not any(_is(value, [each]) for value in values)]
    assert not missing, f"{missing} are no parameters"
    return [value if _is(value, kept) else _with_full(value) for value in values]


def places(values: Iterable[Any], *kept: int) -> list:
    """The same, of values that are long: kept are those at these places."""
    return [value if place in kept else _with_full(value) for place, value in enumerate(values)]


def _is(value: Any, kept: Collection[Any]) -> bool:
    return any(value is each or value == each or (isinstance(value, tuple) and value and value[0] is each)
               for each in kept)  # fmt: skip


def _with_full(value: Any) -> Any:
    if hasattr(value, "marks"):
        return value._replace(marks=[*value.marks, pytest.mark.full])
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
