"""How tensors are cut: every element lies where it should, and nowhere else."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from moefx._torch_compat import strided_shard
from moefx.layout import Cut, Layout, Spread, index, places

SIZES = {"a": 2, "b": 3, "c": 2}


@st.composite
def layouts(draw, sizes=SIZES, dims=3):
    """(layout, shape) of up to three dims over up to two mesh dims each, in any order, with an owner or without."""
    free = draw(st.permutations(list(sizes)))
    shape, cuts = [], []
    for dim in range(draw(st.integers(0, dims))):
        axis = tuple(free.pop() for _ in range(min(len(free), draw(st.integers(0, 2)))))
        n = math.prod(sizes[each] for each in axis)
        if axis and not dim and draw(st.booleans()):
            cuts.append(Spread(axis, tuple(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=7)))))
            shape.append(len(cuts[0].owners))
            continue
        pieces = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
        shape.append(sum(pieces) * n)
        if axis:
            cuts.append(Cut(dim, axis, tuple(piece * n for piece in pieces)))
    owner = None
    if free and draw(st.booleans()):
        axis = tuple(free[: draw(st.integers(1, 2))])
        owner = axis, draw(st.integers(0, math.prod(sizes[each] for each in axis) - 1))
    layout = Layout(tuple(cuts), owner)
    layout.check(shape, sizes)
    return layout, shape


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_parts_make_the_whole_again(found):
    layout, shape = found
    whole = torch.arange(math.prod(shape)).view(shape)
    again, copies = torch.full_like(whole, -1), torch.zeros_like(whole)
    groups = {}
    apart = [dim for dim in SIZES if dim not in layout.sharers(SIZES)]
    for place in places(SIZES):
        part, boxes = layout.take(whole, SIZES, place), layout.boxes(shape, SIZES, place)
        layout.put(again, part, SIZES, place)
        assert part.numel() == sum(math.prod(box.size) for box in boxes)
        assert part.shape == layout.shape(shape, SIZES, place) or (part.shape[0] == 0 and layout.owner)
        for box in boxes:
            copies[box.slices] += 1
            assert torch.equal(box.of_local(part), whole[box.slices])
        sharers = groups.setdefault(tuple(place[dim] for dim in apart), part)
        assert torch.equal(sharers, part)
    assert torch.equal(again, whole)
    # The ranks that share a part have all of its elements, and every element lies in one part.
    assert (copies == math.prod(SIZES.values()) // math.prod(SIZES[dim] for dim in apart)).all()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([("a",), ("b",), ("c", "b")]), st.data())
def test_rows_by_owner(axis, data):
    n, most = math.prod(SIZES[dim] for dim in axis), 0
    owners = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=12))
    layout, whole = Layout.spread(owners, "+".join(axis), n), torch.arange(2 * len(owners)).view(len(owners), 2)
    layout.check(whole.shape, SIZES)
    even = sorted(owners) == owners and len({owners.count(place) for place in range(n)}) == 1
    assert (layout == Layout.rows(len(owners), "+".join(axis))) == even
    for place in places(SIZES):
        mine = [row for row, owner in enumerate(owners) if owner == index(axis, SIZES, place)]
        assert torch.equal(layout.take(whole, SIZES, place), whole[mine])
        assert layout.shape(whole.shape, SIZES, place) == (len(mine), 2)
        assert layout.holds(SIZES, place) == (len(mine) > 0)
        boxes = layout.boxes(whole.shape, SIZES, place)
        assert [row for box in boxes for row in range(box.offset[0], box.offset[0] + box.size[0])] == mine
        assert len(boxes) == sum(row - 1 not in mine for row in mine)  # one for every run, no more
        most = max(most, len(mine))
    assert layout.shape(whole.shape, SIZES) == (most, 2)
    assert [layout.of_row(row, SIZES) for row in range(len(owners))] == [Layout(owner=(axis, at)) for at in owners]
    assert Layout.read(str(layout)) == layout


@settings(max_examples=100, deadline=None)
@given(layouts(dims=2), st.integers(1, 2))
def test_a_row_lies_where_the_stack_has_it(found, pieces):
    layout, shape = found
    free = layout.sharers(SIZES)
    if layout.owner or not free or any(isinstance(cut, Spread) for cut in layout.cuts):
        return
    cuts = tuple(Cut(cut.dim + 1, cut.axis, cut.pieces) for cut in layout.cuts)
    n = SIZES[free[0]]
    stack = Layout((Cut(0, free[:1], (n,) * pieces), *cuts))
    whole = torch.arange(pieces * n * math.prod(shape)).view(pieces * n, *shape)
    for place in places(SIZES):
        rows = [stack.of_row(row, SIZES) for row in range(pieces * n)]
        held = [each.take(whole[row], SIZES, place) for row, each in enumerate(rows) if each.holds(SIZES, place)]
        assert torch.equal(torch.stack(held), stack.take(whole, SIZES, place))


def test_a_part_of_one_piece_is_a_view():
    whole = torch.zeros(4, 6)
    part = Layout((Cut(1, ("a",), (6,)),)).take(whole, SIZES, {"a": 1, "b": 0, "c": 0})
    part.fill_(1)
    assert whole.tolist() == [[0, 0, 0, 1, 1, 1]] * 4


@pytest.mark.parametrize(("layout", "said", "plain"), [
    (Layout(), (Replicate(),) * 3, True),
    (Layout((Cut(1, ("b",), (6,)),)), (Replicate(), Shard(1), Replicate()), True),
    (Layout((Cut(0, ("a", "c"), (8,)), Cut(1, ("b",), (6,)))), (Shard(0), Shard(1), Shard(0)), True),
    # Halves, and dims in another order than the mesh: blocks of which each mesh dim cuts every one.
    (Layout((Cut(0, ("a",), (2, 2)),)), (strided_shard(0, 2), Replicate(), Replicate()), False),
    (Layout((Cut(0, ("b", "a"), (12,)),)), (strided_shard(0, 3), Shard(0), Replicate()), False),
    # What DTensor has no words for.
    (Layout((Cut(0, ("b", "a"), (6, 6)),)), (Replicate(),) * 3, False),
    (Layout((Cut(0, ("a",), (2, 6)), Cut(1, ("b",), (3,)))), (Replicate(), Shard(1), Replicate()), False),
    (Layout((Spread(("b",), (0, 2, 2)), Cut(1, ("a",), (4,)))), (Shard(1), Replicate(), Replicate()), False),
    (Layout((Cut(0, ("c",), (2,)),), (("a",), 1)), (Replicate(), Replicate(), Shard(0)), False),
])  # fmt: skip
def test_what_a_dtensor_says(layout, said, plain):
    assert layout.placements(SIZES) == said
    assert (layout.plain(SIZES) == layout) == plain
    if plain:
        assert Layout.of(said, list(SIZES), [8, 6]) == layout


@pytest.mark.parametrize(("layout", "why"), [
    (Layout((Cut(0, ("x",), (4,)),)), "'x' must be one dim of the mesh (a, b, c), used once"),
    (Layout((Cut(0, ("a",), (4,)), Cut(1, ("a",), (6,)))), "'a' must be one dim"),
    (Layout((Cut(0, ("a",), (4,)),), (("a",), 0)), "'a' must be one dim"),
    (Layout((Cut(0, ("a",), (4,)), Cut(0, ("b",), (6,)))), "a dim is cut twice"),
    (Layout(owner=(("a", "b"), 6)), "there is no place 6 on a+b"),
    (Layout((Spread(("a",), (0, 1, 1)),)), "dim 0 of (4, 6) does not have 3 rows"),
    (Layout((Spread(("a",), (0, 1, 2, 0)),)), "there is no place 2 on a"),
    (Layout((Cut(2, ("a",), (4,)),)), "dim 2 of (4, 6) does not divide so over 2 ranks"),
    (Layout((Cut(0, ("a",), (3, 1)),)), "dim 0 of (4, 6) does not divide so over 2 ranks"),
    (Layout((Cut(0, ("a",), (2,)),)), "dim 0 of (4, 6) does not divide so over 2 ranks"),
])  # fmt: skip
def test_what_cannot_be_laid_out(layout, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        layout.check((4, 6), SIZES)


def test_in_words():
    layout = Layout((Cut(1, ("a", "b"), (6, 12)),), (("c",), 1))
    assert str(layout) == "dim 1 of 6+12 over a+b, at place 1 of c"
    assert str(Layout()) == "whole"
    assert all(Layout.read(str(each)) == each for each in (layout, Layout(), Layout(owner=(("a", "b"), 4))))
    assert str(Layout.spread((1, 1, 0, 2), "ep", 3)) == "dim 0 of 2+1+1 at 1+0+2 over ep"
    assert Layout.rows(8, "") == Layout()


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sets(st.sampled_from(list(SIZES))))
def test_parts_of_some_ranks_are_joined_piece_by_piece(found, dims):
    """Ranks along some dims have together the shares of all of them, of every piece. All such groups have the whole."""
    layout, shape = found
    dims = {dim for cut in layout.cuts if isinstance(cut, Cut) for dim in cut.axis} & dims
    cuts = tuple(cut for cut in layout.cuts if isinstance(cut, Cut))
    layout, sizes = Layout(cuts), {dim: SIZES[dim] for dim in SIZES if dim in dims}
    inner, whole = layout.among(dims, SIZES), torch.arange(math.prod(shape)).view(shape)
    assert Layout.read(str(inner)) == inner
    groups = {}
    for place in places(SIZES):
        part = layout.take(whole, SIZES, place)
        groups.setdefault(tuple(place[dim] for dim in SIZES if dim not in dims), []).append((place, part))
    for members in groups.values():
        shares = [sum(cut.pieces) for cut in inner.cuts]
        size = list(members[0][1].shape)
        for cut, share in zip(inner.cuts, shares):
            size[cut.dim] = share
        joined = torch.full(size, -1)
        for place, part in members:
            inner.put(joined, part, sizes, {dim: place[dim] for dim in sizes})
        assert (joined >= 0).all()
        for place, part in members:
            assert torch.equal(inner.take(joined, sizes, {dim: place[dim] for dim in sizes}), part)
    assert torch.equal(torch.cat([part.flatten() for members in groups.values() for _, part in members]).unique(),
                       whole.flatten())  # fmt: skip
