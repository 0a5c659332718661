"""What a value is of a routing: asked of what both are on drawn inputs, not of ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moefx.analysis.recognition.draws import same
from moefx.analysis.recognition.facts import (
    ALL,
    PAIRS,
    ByChoice,
    Columns,
    Counts,
    Flat,
    Index,
    Inverse,
    Mask,
    Offsets,
    OneHot,
    Perm,
    Picks,
    Read,
    Scattered,
    Sorted,
    Tally,
    TokenOf,
    Weighed,
    token_axes,
)
from moefx.ir.op import value

MOST = 4096  # experts
Scored = Callable[[list[Tensor]], dict[Node, list[Tensor]]]  # all scores of the shapes of some values


class Routing:
    """A node of ids [.., K], and what they are in every draw."""

    def __init__(self, node: Node, ids: list[Tensor], scored: Scored) -> None:
        self.node, self.ids, self.scored = node, [each.long() for each in ids], scored
        self.axes = (*token_axes(node), "k")
        self.k = self.ids[0].shape[-1]
        self.experts = 1 + int(max(each.max() for each in self.ids))
        self.perms: list[list[Tensor]] = []

    # ---- of all experts

    @cached_property
    def flat(self) -> list[Tensor]:
        return [each.flatten() for each in self.ids]

    @cached_property
    def is_distinct(self) -> bool:
        """Whether no token chose an expert twice."""
        narrowed = self.node.target is torch.where and len(self.node.args) == 3
        nobody = self.node.args[2] if narrowed and type(self.node.args[2]) is int else -1
        ordered = [each.sort(-1).values for each in self.ids]
        return not any(((each[..., 1:] == each[..., :-1]) & (each[..., 1:] != nobody)).any() for each in ordered)

    def is_seen_in(self, values: list[Any]) -> bool:
        """Whether these are the ids once more, or those of one choice without its axis."""
        if not isinstance(values[0], Tensor) or values[0].dtype is torch.bool:
            return False
        return same(values, self.ids) or (self.k == 1 and values[0].dim() > 1 and same(
            values, [each.squeeze(-1) for each in self.ids]))  # fmt: skip

    def fact(self, node: Node, values: list[Any], mine: list[Any]) -> Any:
        """What the values are of this routing; `mine`: what those are that they are computed of."""
        if isinstance(values[0], (tuple, list)):
            return self._picks(values, mine)
        if not isinstance(values[0], Tensor):
            return None
        of_numbers = values[0].dtype.is_floating_point and not _are_zeros_and_ones(values)
        kinds = [] if of_numbers else [partial(self._index, node), self._row, self._counts]
        if free_unbacked_symbols(value(node)) <= free_unbacked_symbols(value(self.node)):  # a value per token
            kinds += [partial(self._scores_of, node), partial(self._read, node)]
            kinds += [] if of_numbers else [self._mask, self._one_hot, self._tally]
        else:
            kinds.append(partial(self._read, node))
        return next((found for kind in kinds if (found := kind(values, mine)) is not None), None)

    def _row(self, values: list[Tensor], mine: list[Any]) -> Any:
        """Of values [T*K]: the ids, or an order of them."""
        if values[0].dim() != 1 or values[0].dtype is torch.bool or not _all(
                v.numel() == ids.numel() for v, ids in zip(values, self.flat)):  # fmt: skip
            return None
        values, ids = [v.long() for v in values], Flat(self.node)
        if same(values, self.flat):
            return ids
        if same(values, [each.sort().values for each in self.flat]):
            return Sorted(ids)
        if any(same(values, [p // self.k for p in perm]) for perm in self.perms) and (
                self.k > 1 or Perm(ids) in mine):  # fmt: skip
            return TokenOf(ids)
        if any(same(values, [p.argsort() for p in perm]) for perm in self.perms) and Perm(ids) in mine:
            return Inverse(ids)
        if _all(_is_order(v) and _is_rising(ids[v]) for v, ids in zip(values, self.flat)):
            self.perms.append(values)
            return Perm(ids)
        if self.k > 1 and len(self.axes) == 2 and _all(
                _is_order(v) and _is_rising(each.t().flatten()[v]) for v, each in zip(values, self.ids)):  # fmt: skip
            return ByChoice(ids)
        return None

    def _counts(self, values: list[Tensor], mine: list[Any]) -> Any:
        """Of values [E]."""
        if values[0].dim() != 1 or values[0].dtype is torch.bool or not _all(
                1 < len(v) <= MOST for v in values):  # fmt: skip
            return None
        counts = [_count(ids, len(v)) for ids, v in zip(self.flat, values)]
        if same(values, counts):
            return Counts(Flat(self.node))
        return Offsets(Flat(self.node)) if same(values, [each.cumsum(0) for each in counts]) else None

    def _one_hot(self, values: list[Tensor], mine: list[Any]) -> OneHot | None:
        dims = self.ids[0].dim() + 1
        if values[0].dim() != dims:
            return None
        names = (*self.axes, "e")
        for order in itertools.permutations(range(dims)):
            experts = values[0].shape[order.index(dims - 1)]
            if experts < min(2, self.experts) or not _all(
                    v.shape == torch.Size((*ids.shape, experts)[i] for i in order)
                    for v, ids in zip(values, self.ids)):  # fmt: skip
                continue
            if same(values, [(ids[..., None] == torch.arange(experts)).permute(order) for ids in self.ids]):
                return OneHot(self.node, tuple(names[i] for i in order))
        return None

    def _tally(self, values: list[Tensor], mine: list[Any]) -> Tally | None:
        if values[0].dim() != 2 or (not mine and values[0].dtype is torch.bool):
            return None
        fits = _all(1 < v.shape[1] <= MOST and v.min() >= 0 and v.shape[0] * self.k % ids.numel() == 0
                    for v, ids in zip(values, self.flat) if v.numel())  # fmt: skip
        if not fits or not same([v.sum(0) for v in values],
                                [_count(ids, v.shape[1]) for v, ids in zip(values, self.flat)]):  # fmt: skip
            return None
        return Tally(Flat(self.node))

    # ---- of one expert

    def _masks_behind(self, mine: list[Any]) -> list[Mask]:
        """The masks of the experts that a value is computed of, two at most."""
        found = [fact if isinstance(fact, Mask) else getattr(fact, "mask", None) for fact in mine]
        found = [Mask(self.node, each.expert, fact.dims) if isinstance(fact, Weighed) else each
                 for each, fact in zip(found, mine)]  # fmt: skip
        return list(dict.fromkeys(each for each in found if each is not None))[:2]

    def _where(self, expert: int, dims: tuple[str, ...]) -> list[Tensor] | None:
        """Where the ids name an expert. None: of tokens, some of which name one twice."""
        found = [ids == expert for ids in self.ids]
        if "k" in dims:
            order = [self.axes.index(name) for name in dims]
            return [each.permute(order) for each in found]
        if not self.is_distinct:
            return None
        found = [each.any(-1) for each in found]
        return [each.flatten() for each in found] if dims == (ALL,) else found

    def _forms(self) -> Iterator[tuple[str, ...]]:
        """The dims that a mask may have."""
        yield from itertools.permutations(self.axes)
        yield self.axes[:-1]
        if len(self.axes) > 2:
            yield (ALL,)

    def _shape(self, dims: tuple[str, ...], ids: Tensor) -> torch.Size:
        if dims == (ALL,):
            return torch.Size([ids.shape[:-1].numel()])
        return torch.Size(ids.shape[self.axes.index(name)] for name in dims)

    def _fitted(self, values: list[Tensor], dims: tuple[str, ...]) -> list[Tensor] | None:
        """The values with these dims alone; those of tokens may have some of size 1 behind."""
        while "k" not in dims and values[0].dim() > len(dims) and _all(v.shape[-1] == 1 for v in values):
            values = [v.squeeze(-1) for v in values]
        fits = values[0].dim() == len(dims) and _all(
            v.shape == self._shape(dims, ids) for v, ids in zip(values, self.ids))  # fmt: skip
        return values if fits else None

    def _named(self, places: list[Tensor], dims: tuple[str, ...], mine: list[Any]) -> list[int]:
        """The experts that may be meant by places of these dims: those that the value is computed of, or else those of
        the first place."""
        behind = list(dict.fromkeys(mask.expert for mask in self._masks_behind(mine)))
        if behind:
            return behind
        for each, ids in zip(places, self.ids):
            ids = ids.permute([self.axes.index(name) for name in dims]) if "k" in dims else ids
            first = each.reshape(-1).nonzero()[:1]
            if len(first):
                found = ids.reshape(each.numel(), -1)[first[0, 0]].tolist()
                return list(dict.fromkeys(found))
        return []

    def _mask(self, values: list[Tensor], mine: list[Any]) -> Mask | None:
        if not _are_zeros_and_ones(values):
            return None
        forms = dict.fromkeys([*(mask.dims for mask in self._masks_behind(mine)), *self._forms()])
        for dims in forms:
            fitted = self._fitted(values, dims)
            for expert in self._named(fitted, dims, mine) if fitted is not None else ():
                where = self._where(expert, dims)
                if where is not None and same(fitted, where):
                    return Mask(self.node, expert, dims)
        return None

    def _index(self, node: Node, values: list[Tensor], mine: list[Any]) -> Index | Columns | None:
        if values[0].dtype is torch.bool or values[0].dtype.is_floating_point or (
                values[0].dim() not in (1, 2)):  # fmt: skip
            return None
        for mask in self._masks_behind(mine):
            where = self._where(mask.expert, mask.dims)
            if where is None:
                continue
            columns = [each.nonzero() for each in where]
            if values[0].dim() == 2:
                if same(values, columns):
                    return Columns(mask)
                continue
            places = [p for p in range(len(mask.dims)) if same(values, [each[:, p] for each in columns])]
            if places:  # of few tokens two may be the same
                item = node.args[1] if len(node.args) > 1 else None
                return Index(mask, mask.dims[item if type(item) is int and item in places else places[0]])
        return self._piece(values) if values[0].dim() == 1 else None

    def _piece(self, values: list[Tensor]) -> Index | None:
        """Of an order of the pairs the part of one expert, or its tokens."""
        for expert in self._counted(values):
            for parts in self._parts(expert):
                tokens = [part // self.k for part in parts]
                if same(values, tokens) and len(self.axes) == 2:
                    return Index(Mask(self.node, expert, self.axes), self.axes[0])
                if same(values, tokens) and self.is_distinct:
                    return Index(Mask(self.node, expert, (ALL,)), ALL)
                if same(values, parts):
                    return Index(Mask(self.node, expert, self.axes), PAIRS)
        return None

    def _counted(self, values: list[Tensor]) -> list[int]:
        """The experts that have so many rows."""
        numbers = torch.tensor([len(v) for v in values])
        counts = torch.stack([_count(ids, self.experts) for ids in self.flat]) if self.perms else numbers[:, None] + 1
        return (counts == numbers[:, None]).all(0).nonzero().flatten().tolist()

    def _parts(self, expert: int) -> Iterator[list[Tensor]]:
        """Where the pairs of an expert are, in each of the orders that were found."""
        for perm in self.perms:
            yield [p[ids[p] == expert] for p, ids in zip(perm, self.flat)]

    def _picks(self, values: list[tuple], mine: list[Any]) -> Picks | None:
        for mask in self._masks_behind(mine):
            where = self._where(mask.expert, mask.dims)
            if where is not None and _all(
                    len(v) == len(mask.dims) and same(list(v), list(each.nonzero(as_tuple=True)))
                    for v, each in zip(values, where)):  # fmt: skip
                return Picks(mask)
        return None

    # ---- of scores

    def _scores_of(self, node: Node, values: list[Tensor], mine: list[Any]) -> Any:
        dims = self.ids[0].dim()
        if not values[0].dtype.is_floating_point or not 1 <= values[0].squeeze().dim() <= dims:
            return None
        last = values[0].dim() == dims and _all(v.shape[:-1] == ids.shape[:-1]
                                                             for v, ids in zip(values, self.ids))  # fmt: skip
        for w, scores in self._weights(node, mine):
            scores = [each.view(ids.shape) for each, ids in zip(scores, self.ids)]
            if last and self.is_distinct and _all(ids.min() >= 0 and v.shape[-1] >= self.experts
                                                  for v, ids in zip(values, self.ids)):  # fmt: skip
                spread = [torch.zeros_like(v).scatter(-1, ids, each.to(v.dtype))
                          for v, ids, each in zip(values, self.ids, scores)]  # fmt: skip
                if same(values, spread):
                    return Scattered(self.node, w)
            found = self._weighed(values, mine, w, scores)
            if found is not None:
                return found
        return None

    def _read(self, node: Node, values: list[Tensor], mine: list[Any]) -> Read | None:
        if not values[0].dtype.is_floating_point or not values[0].dim() or any(
                v.numel() != len(v) for v in values):  # fmt: skip
            return None
        values = [v.flatten() for v in values]
        for mask in self._masks_behind(mine):
            where = self._where(mask.expert, mask.dims)
            for w, scores in self._weights(node, mine) if where is not None else ():
                scores = [each.view(ids.shape) * (ids == mask.expert) for each, ids in zip(scores, self.ids)]
                if "k" in mask.dims:
                    scores = [each.permute([self.axes.index(name) for name in mask.dims]) for each in scores]
                else:
                    scores = [each.sum(-1).view(at.shape) for each, at in zip(scores, where)]
                if same(values, [each[at] for each, at in zip(scores, where)]):
                    return Read(mask, w)
        for expert in {mask.expert for mask in self._masks_behind(mine)} & {*self._counted(values)}:
            for parts, (w, scores) in itertools.product(self._parts(expert), self._weights(node, mine)):
                if same(values, [each.flatten()[part] for each, part in zip(scores, parts)]):
                    return Read(Mask(self.node, expert, self.axes), w)
        return None

    def _weights(self, node: Node, mine: list[Any]) -> Iterator[tuple[Node, list[Tensor]]]:
        """What may weigh the choices: what a value is computed of, what weighs that, and the nearest first."""
        fitting = self.scored(self.ids)
        if self.k == 1:
            fitting |= self.scored([each[..., 0] for each in self.ids])
        behind = (n for each in node.all_input_nodes for n in each.all_input_nodes)
        before = [*node.all_input_nodes, *behind, *(getattr(fact, "w", None) for fact in mine)]
        for each in dict.fromkeys([*(n for n in before if n in fitting), *reversed(fitting)]):
            yield each, fitting[each]

    def _weighed(self, values: list[Tensor], mine: list[Any], w: Node, scores: list[Tensor]) -> Weighed | None:
        forms = ((ALL,), self.axes[:-1], self.axes)
        for dims in forms[1 if len(self.axes) == 2 else 0 :]:
            fitted = self._fitted(values, dims)
            for expert in self._named(fitted, dims, mine) if fitted is not None else ():
                chosen = [each * (ids == expert) for each, ids in zip(scores, self.ids)]
                chosen = chosen if "k" in dims else [each.sum(-1) for each in chosen]
                chosen = [each.flatten() for each in chosen] if dims == (ALL,) else chosen
                if same(fitted, chosen) and any(each.any() for each in chosen):
                    return Weighed(Mask(self.node, expert, self.axes), w, dims)
        return None


def _all(conditions: Iterable[bool]) -> bool:
    return all(conditions)


def _are_zeros_and_ones(values: list[Tensor]) -> bool:
    return all(v.dtype is torch.bool or all(bool(((each == 0) | (each == 1)).all()) for each in (v.flatten()[:16], v))
               for v in values)  # fmt: skip


def _is_rising(ids: Tensor) -> bool:
    return bool((ids[1:] >= ids[:-1]).all())


def _is_order(found: Tensor) -> bool:
    return bool((found.sort().values == torch.arange(len(found))).all())


def _count(ids: Tensor, experts: int) -> Tensor:
    return torch.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)
