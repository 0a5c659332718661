"""What a value is along every axis of the mesh, and over which axes a gradient must be summed.

    I   every rank along the axis has the same value, and of it the same gradient
    R   the same value, and a partial gradient: its sum over the ranks is the gradient
    V   a part: cut in one dim, or made from data that other ranks do not read
    P   a partial sum: the sum over the ranks is the value

A gradient is I of what is I, P of what is R, V of what is V, and I of what is P. So a parameter's gradient is summed
over the axes along which it is R.

Along an axis whose ranks read different data, all that touches data is V, and every rank's loss is a term of the
objective. So what ranks share there is R, and nothing needs to be inferred. Along an axis whose ranks read the same
data (role `mp`), types are inferred: forward from inputs, by `ir.dims` and by what records of ops say (`op.Along`), and
R or I from the readers of a value, backward. What cannot be told is a type, too, "?", which says why.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from moefx.axes import MeshSpec
from moefx.ir import edit
from moefx.ir.dim_arguments import sizes_held
from moefx.ir.dims import tensor_of, trace
from moefx.ir.fates import Fate, How, Operand, Size, shape_of
from moefx.ir.names import op_name
from moefx.ir.op import VALUES, Stage
from moefx.ir.randomness import is_random
from moefx.ir.rules import BACKWARD, WHOLE, Call, View
from moefx.ir.sums import ADDS, LINEAR, adds_bias, against, is_zero
from moefx.layout import Layout

PARAMETERS = ("param", "experts", "stack")
_SIZED = ("view", "reshape", "_unsafe_view", "unflatten", "view_as", "reshape_as")
_NORMS = ("native_layer_norm_backward", "_fused_rms_norm_backward")  # behind the gradient of the rows stand sums
_FRESH = re.compile(r"(new_)?(zeros|ones|empty|full|rand|randn)(_like)?")
_WORDS = {"I": "the same on every rank", "V": "a part", "P": "a partial sum"}


@dataclass(frozen=True)
class Type:
    """letter: I, R, V, P, or "?". dim: of a part, the dim that is cut; None: no dim that is known. why: of "?". outer:
    how many entries of the dim stand before those that are cut: B of a dim that was made of [B, heads]. others: what it
    may be instead. A rank that has one head, in a view without a dim for it, has it before the entries of one dim as
    much as behind those of the dim before; what follows tells."""

    letter: str
    dim: int | None = None
    why: str = ""
    outer: Size = 1
    others: tuple[Type, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return _WORDS.get(self.letter) or f"not known ({self.why})"


SAME, PARTIAL = Type("I"), Type("P")
_OTHER_DATA = Type("V")


def same_data(mesh: MeshSpec) -> tuple[str, ...]:
    """The root dims of more than one rank along which all ranks read the same data."""
    return tuple(dim for dim in mesh.root if mesh.root[dim] > 1 and dim not in mesh.dims("data"))


def of_input(source: Any, dim: str, mesh: MeshSpec) -> Type:
    """The type of a program's input along a root dim."""
    cut = next((cut for cut in source.layout.cuts if dim in cut.axis), None)
    if cut is not None:
        return Type("V", cut.dim)
    is_apart = source.kind in ("input", "buffer") and dim in mesh.dims("data")
    return _OTHER_DATA if is_apart or not source.layout.sharers([dim]) else SAME


class Types:
    """The types of a graph's tensors along `dims`, by default those along which ranks read the same data.

    known: {node: {dim: I, V, P or ?}}. gradients: {node: {dim: I, R or ?}} of what is I and has a gradient. Raises
    VerifyError, by `view.fail`, for a collective that takes what its record forbids.
    """

    def __init__(self, view: View, dims: Iterable[str] | None = None) -> None:
        self.view, self.mesh = view, view.facts.mesh
        self.dims = same_data(self.mesh) if dims is None else tuple(dims)
        self.known: dict[Node, dict[str, Type]] = {}
        self.gradients: dict[Node, dict[str, Type]] = {}
        if self.dims:
            self._infer()
            for node in reversed(view.nodes) if view.facts.graph == WHOLE else ():
                self.gradients[node] = {dim: found for dim in self.dims if (found := self._gradient(node, dim))}

    def summed(self, node: Node, layout: Layout, found: Mapping[str, Type]) -> str:
        """The axes over which a gradient of this layout is summed. found: the types of a parameter that is R where
        its gradient is partial, or those of the gradient, which is P there."""
        shared = layout.sharers(self.mesh.root)
        for dim, each in found.items():
            if each.letter in "?V" and each != _OTHER_DATA and dim in shared:
                self.view.fail(node, f"over '{dim}', the gradient of {node.name} is {each}",
                               "let all readers of a value work on parts of it, or all on the whole")  # fmt: skip
        data = self.mesh.dims("data")
        partial = {dim for dim, each in found.items() if each.letter in "RP" or each == _OTHER_DATA}
        return self.mesh.axis("+".join(dim for dim in shared if dim in data or dim in partial))

    # ---- forward: I, V and P

    def _infer(self) -> None:
        given = iter(self.view.facts.types)
        for node in self.view.nodes:
            call = self.view.call_of.get(node)
            if node.op == "output" or (call is not None and call.result is not node):
                continue  # a start has no value; its wait has
            if node.op == "placeholder":
                self.known[node] = self._of_input(node, next(given, {}))
                continue
            args = call.node.all_input_nodes if call is not None else node.all_input_nodes
            operands = [a for a in args if a in self.known]
            self.known[node] = {dim: self._type(node, call, operands, dim) for dim in self.dims}
            self._written(node)

    def _of_input(self, node: Node, given: Mapping[str, Type]) -> dict[str, Type]:
        """A gradient of an output has the type of the output: it is the user's."""
        source, data = node.meta.get("moefx"), self.mesh.dims("data")
        return {dim: given.get(dim) or (of_input(source, dim, self.mesh) if source is not None else
                                        _OTHER_DATA if dim in data else SAME) for dim in self.dims}  # fmt: skip

    def _written(self, node: Node) -> None:
        """Of what an op writes to, nothing is known any more if it writes something of another type."""
        name = op_name(node)
        if node.target is operator.setitem or (name.endswith("_") and not name.startswith("_")):
            base = self.known.get(node.args[0], {})
            base.update({dim: Type("?", why=f"{name} writes to {node.args[0].name} what is not {base[dim]}")
                         for dim, each in self.known[node].items() if dim in base and base[dim] != each})  # fmt: skip

    def _type(self, node: Node, call: Call | None, operands: list[Node], dim: str) -> Type:
        """Sizes have types, too: those of parts are not the sizes of the whole."""
        found, name = [self.known[a][dim] for a in operands], op_name(node).removesuffix("_")
        if call is not None and self._runs_along(call, dim):
            return self._through(call, dim)
        if call is not None and (call.op.copies or call.op.stage in (Stage.WEIGHTS, Stage.COPIES)):
            return found[0]  # along other axes it moves what it is given
        if dim in self.mesh.dims("data"):
            return SAME if all(each == SAME for each in found) and not is_random(node) else _OTHER_DATA
        if call is not None and call.op.tokens is not None and call.op.tokens.ends and (
            {each.letter for each in found} in ({"V"}, {"I", "V"})):  # fmt: skip
            return Type("V", 0)  # rows that are back with this rank's tokens
        if any(self.known[a][dim] == _OTHER_DATA and _is_float(tensor_of(a)) for a in operands):
            return _OTHER_DATA  # of rows that other ranks do not have
        moved = self._of_routing(node, call, operands, dim)
        if moved is not None:
            return moved
        if _FRESH.fullmatch(name) or all(each == SAME for each in found):
            return SAME
        unknown = next((each for each in found if each.letter == "?"), None)
        if unknown is not None:
            return unknown
        if tensor_of(node) is None:
            return SAME if self._is_size_of_others(node, name, operands, dim) else _OTHER_DATA
        tensors = [a for a in operands if tensor_of(a) is not None]
        if all(each in (SAME, _OTHER_DATA) for each in found) and any(self.known[a][dim] != SAME for a in tensors):
            return _OTHER_DATA
        if name == "expand" and all(self.known[a][dim] == SAME for a in tensors):
            own = [i for i, held in sizes_held(node).items() if held.of(node) in operands]
            if own:
                return Type("V", own[0])  # a copy for each of a rank's own rows
        if name not in LINEAR and any(self.known[a][dim] != SAME for a in operands if a not in tensors):
            return Type("?", why=f"{name} computes with a size of what is cut over '{dim}'")
        return self._of_sums(node, name, tensors, dim) if PARTIAL in found else self._of_parts(node, name, dim)

    def _is_size_of_others(self, node: Node, name: str, operands: list[Node], dim: str) -> bool:
        """Whether it is the size of a dim that is not cut."""
        read = node.args[1] if name in ("size", "sym_size") and len(node.args) > 1 else None
        return isinstance(read, int) and self.known[operands[0]][dim].dim not in (None, read)

    def _runs_along(self, call: Call, dim: str) -> bool:
        return dim in self.mesh.dims(call.args.get("axis") or call.args.get("axes") or ())

    def _through(self, call: Call, dim: str) -> Type:
        """What an op makes along its own axis."""
        along = call.op.along
        if along is None:
            is_own = dim in self.mesh.dims("data") or tensor_of(call.node) is None
            return _OTHER_DATA if is_own else Type("?", why=f"{call.name} moves it over '{dim}'")
        found = call.args[along.of] if along.of else next(iter(call.args.values()))
        wanted = "I" if along.takes == "R" else along.takes
        for operand in found if isinstance(found, (list, tuple)) else [found]:
            given = self.known.get(operand, {}).get(dim, SAME)
            if given.letter == "?":
                return given
            if not self._is_taken(wanted, given, operand) and dim not in self.mesh.dims("data"):
                twice = ": it is reduced twice" if along.takes == "P" and given == SAME else ""
                self.view.fail(call.node, f"over '{dim}', {call.name} takes what is {_WORDS[wanted]}, and "
                                          f"gets what is {given}{twice}")  # fmt: skip
        cut = call.args[along.dim] if isinstance(along.dim, str) else along.dim
        cut = None if call.args.get("apart") else cut  # a batch that other ranks do not read
        return Type("V", cut) if along.gives == "V" else PARTIAL if along.gives == "P" else SAME

    def _is_taken(self, wanted: str, given: Type, operand: Any) -> bool:
        """Counts that all ranks have alike are as well those of each of them. What comes of rows that other ranks do
        not have is a part of a gradient's sum where every rank has the value."""
        if wanted == "V" and given == SAME:
            return not isinstance(operand, Node) or not _is_float(tensor_of(operand))
        if wanted == "P" and given == _OTHER_DATA:
            return self.view.facts.graph == BACKWARD
        return wanted in (given.letter, *(each.letter for each in given.others))

    def _of_parts(self, node: Node, name: str, dim: str) -> Type:
        """An op on parts makes the same part of its result where it keeps the dim, a partial sum where it adds the
        entries of the dim."""
        operands = trace(node)
        if self._adds_own_rows(node, name, dim):
            return PARTIAL
        parts = [o for o in operands or () if self.known[o.node][dim].letter == "V"
                 and any(fate.how is not How.UNREAD for fate in o.dims)]  # fmt: skip
        made = [self._fates(node, operands, o, self.known[o.node][dim]) for o in parts]
        common = [each for each in made[0] if all(each in others for others in made)] if made else []
        if not common:
            return Type("?", why=f"{name} does more to what is cut over '{dim}' than to keep or add its entries")
        here = tensor_of(node)
        if name == "getitem" and common[0].letter == "V" and common[0].dim >= here.dim():
            # Beside the parts of an attention stands what it drew with.
            return Type("?", why="it is one of several, with other dims") if here.is_floating_point() else SAME
        common.sort(key=lambda each: each == PARTIAL)
        found = replace(common[0], others=tuple(common[1:]))
        if found == PARTIAL and adds_bias(node):
            return Type("?", why=f"{name} adds to a partial sum over '{dim}' what every rank adds, too")
        return found

    def _adds_own_rows(self, node: Node, name: str, dim: str) -> bool:
        """Whether it adds what a rank has, by numbers that only this rank has, to zeros: as the gradient of a weight
        that every token picks from. Or it is the gradient of what scales or shifts all rows of a norm."""
        if name == "getitem" and op_name(node.args[0]) in _NORMS:
            return node.args[1] > 0
        if name != "index_put" or len(node.args) < 4 or node.args[3] is not True or not is_zero(node.args[0]):
            return False
        return any(isinstance(index, Node) and self.known[index][dim].letter == "V" for index in node.args[1])

    @staticmethod
    def _fates(node: Node, operands: list[Operand], operand: Operand, cut: Type) -> list[Type]:
        """What an op may make of a part."""
        shape, given = shape_of(tensor_of(node)), shape_of(tensor_of(operand.node))
        new_ones = _new_ones(node, operands)
        found = [made for each in (cut, *cut.others) for made in _fate(operand.dims, each, shape, new_ones, given)]
        if op_name(node) in _SIZED:
            found += [Type("V", dim) for each in found for dim in _ones_beside(each, shape)]
        return list(dict.fromkeys(found))

    def _of_routing(self, node: Node, call: Call | None, operands: list[Node], dim: str) -> Type | None:
        """What ops of a routing make of the rows of this rank's tokens: these rows, in another order, or for what it
        says of them, which no rank else has. `rules_moe` knows the order. None: `ir.dims` knows."""
        given = self.view.call_of.get(node.args[0]) if node.target is operator.getitem else None
        tokens = (call or given).op.tokens if call or given else None
        if tokens is None or all(self.known[a][dim].letter != "V" for a in operands):
            return None
        unknown = next((each for a in operands if (each := self.known[a][dim]).letter == "?"), None)
        if unknown is not None:
            return unknown
        gives = tokens.gives
        if isinstance(gives, tuple):
            gives = gives[node.args[1]] if given else next(filter(None, gives))
        if not (gives or tokens.moves or "perm" in tokens.takes.values()):
            return PARTIAL if tokens.orders else _OTHER_DATA  # a sum over rows, perhaps added to one
        if any(self.known[a][dim] == PARTIAL for a in operands):
            return Type("?", why=f"{op_name(node)} moves partial sums over '{dim}'")
        if call and "row_dim" in call.args and tokens.rule != "packed":
            return Type("V", call.args["row_dim"] % tensor_of(node).dim())
        return _OTHER_DATA if gives in VALUES else Type("V", 0)

    def _of_sums(self, node: Node, name: str, operands: list[Node], dim: str) -> Type:
        """Partial sums stay that through what is linear in them."""
        sums = {a for a in operands if self.known[a][dim] == PARTIAL}
        why = against(node, sums)
        if not why and all(self.known[a][dim] == SAME for a in operands if a not in sums):
            return PARTIAL
        return Type("?", why=f"{name} adds to a partial sum over '{dim}' what every rank adds, too" if why == ADDS else
                    f"{name} is not linear, and reads a partial sum over '{dim}'")  # fmt: skip

    # ---- backward: I or R

    def _gradient(self, node: Node, dim: str) -> Type | None:
        """What the readers of a value that is the same on all ranks make of its gradient; None if it has none."""
        if self.known.get(node, {}).get(dim) != SAME or not _has_gradient(node):
            return None
        found: dict[str, tuple[Node, Type]] = {}
        for user in node.users:
            each = self._from(user, dim)
            if each is not None:
                found.setdefault(each.letter, (user, each))
        if "?" in found or len(found) < 2:
            return next((each for _, each in ([found["?"]] if "?" in found else found.values())), None)
        whole, part = found["I"][0], found["R"][0]
        return Type("?", why=f"whole from {whole.name} and partial from {part.name}, which both read {node.name} at "
                             f"{edit.place(node)}")  # fmt: skip

    def _from(self, user: Node, dim: str) -> Type | None:
        """The type of a value's gradient, as far as it comes from one reader."""
        if user.op == "output":
            return SAME
        if not _has_gradient(user):
            return None
        call = self.view.call_of.get(user)
        if call is not None and self._runs_along(call, dim):
            return Type(call.op.along.takes if call.op.along else "?", why=f"{call.name} moves it over '{dim}'")
        found = self.known[user][dim]
        return Type("R") if found.letter in "VP" else found if found.letter == "?" else (
            self.gradients[user].get(dim))  # fmt: skip


def _is_float(found: Tensor | None) -> bool:
    return found is not None and found.is_floating_point()


def _has_gradient(node: Node) -> bool:
    is_fresh = node.op.startswith("call") and (op_name(node) == "detach" or _FRESH.fullmatch(op_name(node)))
    return _is_float(tensor_of(node)) and not is_fresh


def _new_ones(node: Node, operands: list[Operand]) -> set[int]:
    """The dims of one entry that a view makes: one head of [B, S, D], perhaps."""
    if op_name(node) not in _SIZED:
        return set()
    known = {place.dim for o in operands for fate in o.dims for place in fate.to}
    return {dim for dim, size in enumerate(shape_of(tensor_of(node))) if size == 1 and dim not in known}


def _ones_beside(found: Type, shape: Sequence[Size]) -> list[int]:
    """A part in a dim of one entry may as well be in the others beside it: [1, 1, S, S] of one row and one head."""
    if found.dim is None or found.outer != 1 or shape[found.dim] != 1:
        return []
    runs = ([*range(found.dim - 1, -1, -1)], [*range(found.dim + 1, len(shape))])
    return [dim for run in runs for dim in itertools.takewhile(lambda dim: shape[dim] == 1, run)]


def _fate(fates: Sequence[Fate], cut: Type, shape: Sequence[Size], new_ones: set[int],
          given: Sequence[Size]) -> list[Type]:  # fmt: skip
    if cut.letter == "P" or cut.dim is None:
        return []
    fate = fates[cut.dim]
    if fate.how is How.KEPT:
        found = _kept(fate, cut, shape, new_ones, is_gone=given[cut.dim] == 1)
        if not found and cut.outer == given[cut.dim] and cut.dim + 1 < len(given):  # in front of the next dim's entries
            return _fate(fates, Type("V", cut.dim + 1), shape, new_ones, given)
        return found
    if fate.how is How.TAKEN and len(fates) == len(shape):
        return [replace(cut, others=())]  # which of its entries are whose, only who cut it knows
    return [PARTIAL] if fate.how in (How.REDUCED, How.CONTRACTED) and fate.by == "sum" else []


def _kept(fate: Fate, cut: Type, shape: Sequence[Size], new_ones: set[int], is_gone: bool) -> list[Type]:
    """Where the cut is that stood behind `outer` entries. is_gone: a dim of one entry is, unless the result has it."""
    before: Size = 1
    for place in fate.to:
        if before == cut.outer:
            dim = place.dim
            while place.outer == 1 and dim - 1 in new_ones and isinstance(place.size, int):  # rows are not heads
                dim -= 1
            found = Type("V", dim, outer=place.outer if dim == place.dim else 1)
            if not is_gone or shape[dim] == 1:
                return [found]
            if found.outer == shape[dim] and dim + 1 < len(shape):
                return [Type("V", dim + 1), found]
            return [found, Type("V", dim - 1, outer=shape[dim - 1])] if found.outer == 1 and dim else [found]
        before = before * place.size
    if before == cut.outer and fate.to and fate.to[-1].dim + 1 in new_ones:
        return [Type("V", fate.to[-1].dim + 1)]
    return [Type("V", fate.to[0].dim, outer=fate.to[0].outer * cut.outer)] if len(fate.to) == 1 else []
