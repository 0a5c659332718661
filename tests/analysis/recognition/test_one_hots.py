"""Masks of all experts at once, by comparison with 0, 1, .., are one-hot choices; what is like them stays."""

from __future__ import annotations

import pytest
import torch

from moefx.analysis.recognition import one_hots
from moefx.ir.edit import copy_of
from tests.support.graphs import assert_same_meaning, graph, short

COMPARED = """
def graph(ids: "i64[s0, 2]", buffer: "i64[4]", x: "f32[s0, 2]"):
    mask = {}
    return (mask,)
"""


def written(mask, held=None):
    gm, _ = graph(COMPARED.format(mask))
    buffer = next(node for node in gm.graph.find_nodes(op="placeholder") if node.name == "buffer")
    buffer.meta["held"] = torch.arange(4) if held is None else held
    before = copy_of(gm)
    relied = one_hots.write(gm)
    gm.graph.lint()
    return before, gm, relied


@pytest.mark.parametrize("mask", [
    "ids.unsqueeze(-1) == torch.arange(4)",
    "ids[..., None].eq(torch.arange(0, 4, dtype=torch.int32))",
    "torch.arange(4)[None, None, :] == ids[:, :, None]",
    "torch.eq(ids.unsqueeze(2), torch.arange(0, 4, 1).view(1, 1, 4).long())",
])  # fmt: skip
def test_a_comparison_with_all_numbers_is_one_hot(mask):
    before, gm, relied = written(mask)
    assert "one_hot.default(ids, 4)" in short(gm)
    assert relied == []
    assert_same_meaning(before, gm, s0=5)  # also for ids that name nobody


def test_a_buffer_is_relied_on_for_what_it_holds():
    _, gm, relied = written("ids[..., None] == buffer")
    assert "one_hot.default(ids, 4)" in short(gm)
    [(source, values)] = relied
    assert (source.key, values.tolist()) == ("buffer", [0, 1, 2, 3])


@pytest.mark.parametrize("mask", [
    "ids.unsqueeze(-1) == torch.arange(1, 5)",
    "ids.unsqueeze(-1) == torch.arange(0, 8, 2)",
    "ids.unsqueeze(-1) == torch.arange(4).flip(0)",
    "x.unsqueeze(-1) == torch.arange(4)",
    "ids.unsqueeze(0) == torch.arange(2)",  # its axis is that of the choices
    "ids.unsqueeze(-1) == torch.arange(4).view(4, 1, 1)",
    "ids.t()[..., None].transpose(0, 1) == torch.arange(4)",
])  # fmt: skip
def test_other_comparisons_stay(mask):
    _, gm, relied = written(mask)
    assert "one_hot" not in short(gm)
    assert relied == []


@pytest.mark.parametrize("held", [torch.tensor([0, 1, 3, 2]), torch.arange(4, device="meta")])
def test_buffers_that_hold_other_numbers_stay(held):
    _, gm, relied = written("ids[..., None] == buffer", held)
    assert "one_hot" not in short(gm)
    assert relied == []


def test_so_do_numbers_that_are_written_to():
    gm, _ = graph("""
        def graph(ids: "i64[s0, 2]"):
            numbers = torch.arange(4)
            numbers[0] = 3
            mask = ids[..., None] == numbers
            return (mask,)
    """)
    one_hots.write(gm)
    assert "one_hot" not in short(gm)


def test_masks_are_unbound_one_by_one():
    gm, _ = graph("""
        def graph(mask: "i64[s0, 3, 2]", x: "f32[s0, 3, 2]"):
            parts = mask.unbind(1)
            others = x.unbind(1)
            return (parts[2], parts[0], others[1])
    """)
    before = copy_of(gm)
    one_hots.write(gm)
    assert "mask.select(1, 2)" in short(gm)
    assert "x.unbind(1)" in short(gm)
    assert_same_meaning(before, gm, s0=4)
