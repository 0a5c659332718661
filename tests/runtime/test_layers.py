"""Inputs of a loop over layers."""

from __future__ import annotations

from moefx.runtime import layers


def test_rows_leave_the_inputs():
    values = list("abcdefgh")
    rows = layers.take(values, [1, 2], step=2, rounds=3)
    assert list(rows) == [("b", "c"), ("d", "e"), ("f", "g")]
    assert layers.left(values) == ["a", "h"]


def test_rows_of_several_loops_lie_among_one_another():
    values = list("abcdef")
    rows, others = layers.take(values, [4], step=-2, rounds=3), layers.take(values, [1], step=2, rounds=2)
    assert (list(rows), list(others)) == ([("e",), ("c",), ("a",)], [("b",), ("d",)])
    assert layers.left(values) == ["f"]
