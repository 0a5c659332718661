"""What is said of several layers alike is said once."""

from __future__ import annotations

import pytest

from moefx.ir import alike


@pytest.mark.parametrize(("numbers", "words"), [
    ([3], "3"), ([0, 1], "0, 1"), (range(3, 48), "3 to 47"), ([0, 2, 3, 4, 9], "0, 2 to 4, 9"), ([], ""),
])  # fmt: skip
def test_ranges(numbers, words):
    assert alike.ranges(numbers) == words


def test_lines_that_differ_in_the_layer_are_one():
    lines = [f"region {n} (model.layers.{n + 1}.mlp): 2 chunks, 0.125 ms" for n in range(47)]
    assert alike.once(lines) == ["region 0 to 46 (model.layers.1 to 47.mlp): 2 chunks, 0.125 ms"]


def test_a_number_that_is_the_same_in_all_layers_stays():
    lines = [f"region {n} ({layer}): u0 rows" for n, layer in enumerate(["a.3.mlp", "a.4.mlp", "a.5.mlp"])]
    assert alike.once(lines) == ["region 0 to 2 (a.3 to 5.mlp): u0 rows"]


@pytest.mark.parametrize("odd", [
    "region 2 (model.layers.2.mlp): 2 chunks, 0.126 ms", "region 2 (model.layers.2.mlp): 3 chunks, 0.125 ms",
    "region 2 (model.layers.7.mlp): 2 chunks, 0.125 ms", "region 2 (model.layers.2.moe): 2 chunks, 0.125 ms",
])  # fmt: skip
def test_another_figure_or_word_stands_by_itself(odd):
    lines = [f"region {n} (model.layers.{n}.mlp): 2 chunks, 0.125 ms" for n in range(4)]
    assert alike.once([*lines[:2], odd, lines[3]]) == [
        "region 0, 1, 3 (model.layers.0, 1, 3.mlp): 2 chunks, 0.125 ms", odd]  # fmt: skip


def test_lines_without_numbers_of_layers_stay():
    lines = ["12 nodes, f32[16, 4]", "13 nodes, f32[16, 4]", "a.py:12", "a.py:13", "v1.50 s", "v1.60 s"]
    assert alike.once(lines) == lines
