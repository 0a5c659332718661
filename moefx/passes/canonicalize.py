"""Bring a captured graph into the form that the other passes expect.

Contract
    takes  CAPTURED   whatever dynamo gave
    gives  CAPTURED   same values; only placeholders as leaves; in-place ops on fresh tensors are functional
    never  touches in-place ops on parameters, buffers or inputs: those are effects that the user wants

Pseudo-code
    1. what runs without gradients reads detached tensors instead
    2. turn tensor attributes and tensors of literals into constant placeholders
    3. write special methods as operators, arguments by position, einsums with a letter for every axis; drop logging
       calls, sizes that are plain numbers, checks that hold by construction, casts to the dtype that a tensor has
    4. for x.op_(y) on a tensor with no other live alias: z = x.op(y), later uses of x use z; x[mask] += y is
       index_put(x, mask, y, accumulate=True)
    5. one node for equal views of one tensor, the opposite of one mask, and what weighs rows, where loops compute these
       again for every expert
    6. ids[..., None] == arange(E) is one_hot(ids, E); one_hot(ids)[..., e] that picks tokens is ids == e; where a token
       has a single choice, argmax(scores) == e or ids == 0, 1, .. that pick tokens, compare [.., 1] and take any(-1):
       routings are [.., K]
    7. w[tokens, c] of one column c for several experts becomes w[.., c][tokens]: a choice of its own

    out.add_(bias); gate = out[..., ::2]   ->   out_1 = out.add(bias); gate = out_1[..., ::2]
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moefx import _torch_compat as compat
from moefx.analysis import grad_modes
from moefx.analysis.recognition import einsums, index_forms, one_hots, repeats
from moefx.capture.trace import Source
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit, ragged
from moefx.ir.dims import is_reshape
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, value
from moefx.ir.shapes import LIKE
from moefx.ir.writes import INPLACE_OPERATORS, may_be_view, place_of_inplace, storage


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result, before = PassResult(), _calls(gm)
    _lift_constants(gm, result)
    found = grad_modes.detach_instead(gm) if ctx.grad else 0
    if found:
        result.changed(f"{found} tensors are detached, as gradients are off where they are read")
    for node in gm.graph.find_nodes(op="call_function", target=compat.LOG_API_USAGE):
        gm.graph.erase_node(node)
    _use_operators(gm)
    _use_positions(gm)
    _write_results(gm, result)
    einsums.spell_out(gm)
    index_forms.shorten(gm)
    index_forms.on_one_axis(gm)
    _fold_constants(gm)
    _drop_identities(gm)  # other names of a tensor, which keep its writes from being functional
    _functionalise(gm, result)
    repeats.merge(gm)
    ctx.decisions.relied += one_hots.write(gm)
    one_hots.compare(gm)
    _widen_single_choices(gm, result)
    index_forms.columns(gm)
    index_forms.masked_rows(gm)
    _drop_identities(gm)
    if not result.changes and before != _calls(gm):
        result.changed("calls are written in one form")
    return result


def _calls(gm: GraphModule) -> list[tuple]:
    return [(node, node.op, node.target, node.args, node.kwargs) for node in gm.graph.nodes]


def _lift_constants(gm: GraphModule, result: PassResult) -> None:
    last = gm.graph.find_nodes(op="placeholder")
    for node in list(gm.graph.nodes):
        value = _constant(gm, node)
        if value is None:
            continue
        with gm.graph.inserting_after(last[-1]) if last else gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            new = gm.graph.placeholder(f"const_{node.name.lstrip('_')}")
        new.meta.update(node.meta)
        new.meta["moefx"] = Source("constant", value.detach())
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        last.append(new)
        result.changed(f"constant {new.name} lifted")


def _constant(gm: GraphModule, node: Node) -> torch.Tensor | None:
    """The value of a tensor attribute, or of torch.tensor([1.0, 2.0]), which the model makes anew in every forward."""
    if node.op == "get_attr":
        found = getattr(gm, node.target, None)
        return found if isinstance(found, torch.Tensor) else None
    makes = node.op == "call_function" and node.target in (torch.tensor, torch.as_tensor)
    return node.target(*node.args, **node.kwargs) if makes and not node.all_input_nodes else None


def _use_operators(gm: GraphModule) -> None:
    """x.__eq__(0), which dynamo writes until torch 2.12, becomes x == 0; what numpy's arrays do is done by tensors."""
    for node in gm.graph.nodes:
        twin = compat.numpy_twin(node.target)
        if callable(twin):
            node.target = twin
        elif twin in _SAME_METHODS and not node.kwargs:
            if twin == "cumsum" and len(node.args) == 1:  # of all numbers, whatever dims they have
                if edit.tensor_value(node.args[0]).dim() != 1:
                    continue
                node.args = (*node.args, 0)
            node.op, node.target = "call_method", twin
        found = getattr(operator, node.target, None) if node.op == "call_method" and node.target[:2] == "__" else None
        if found is not None and not node.kwargs:
            node.op, node.target = "call_function", found


def _use_positions(gm: GraphModule) -> None:
    """x.transpose(dim0=0, dim1=1) becomes x.transpose(0, 1), torch.cat(tensors=[..], dim=0) torch.cat([..], 0)."""
    for node in gm.graph.nodes:
        args, kwargs = list(node.args), dict(node.kwargs)
        names = _POSITIONS.get(op_name(node), ()) if kwargs and node.op.startswith("call") else ()
        while len(args) < len(names) and names[len(args)] in kwargs:
            args.append(kwargs.pop(names[len(args)]))
        node.args, node.kwargs = tuple(args), kwargs


_POSITIONS = {
    "transpose": ("input", "dim0", "dim1"), "swapaxes": ("input", "axis0", "axis1"), "permute": ("input", "dims"),
    "flatten": ("input", "start_dim", "end_dim"), "unflatten": ("input", "dim", "sizes"),
    "reshape": ("input", "shape"), "view": ("input", "size"), "unsqueeze": ("input", "dim"),
    "cat": ("tensors", "dim"), "concat": ("tensors", "dim"), "stack": ("tensors", "dim"),
}  # fmt: skip
_SAME_METHODS = ("cumsum", "item", "sum", "tolist")  # of numpy and torch, with arguments by position


def _fold_constants(gm: GraphModule) -> None:
    """Sizes and comparisons that came out as plain numbers become literals; checks of what is true go."""
    for node in list(gm.graph.nodes):
        found = _number(value(node))
        if node.op != "placeholder" and found is not None and _is_pure_number(node):
            for user in list(node.users):
                user.args = map_arg(user.args, lambda a, n=node, v=found: v if a is n else a)
                user.kwargs = map_arg(user.kwargs, lambda a, n=node, v=found: v if a is n else a)
            gm.graph.erase_node(node)
        elif node.target is torch.ops.aten._assert_scalar.default and _holds(node.args[0]):
            edit.erase_unused([node, *node.all_input_nodes])


def _holds(condition: object) -> bool:
    """Whether a check is always true; x[:n] has no more rows than x, which torch 2.11 makes a check of."""
    if not isinstance(condition, Node) or op_name(condition) != "le":
        return condition is True
    cut, size = condition.args
    is_size = isinstance(cut, Node) and op_name(cut) == "sym_size" and arg(cut, 1, "dim") == 0
    part = cut.args[0] if is_size else condition
    is_slice = op_name(part) == "getitem" and isinstance(part.args[1], slice)
    return is_slice and expr(value(part.args[0]).shape[0]) == expr(value(size) if isinstance(size, Node) else size)


def _number(found: object) -> int | bool | None:
    """The value of an int, a bool, or a symbolic one that turned out to be a constant."""
    if type(found) in (int, bool):
        return found
    if isinstance(found, (torch.SymInt, torch.SymBool)) and not found.node.expr.free_symbols:
        return int(found) if isinstance(found, torch.SymInt) else bool(found)
    return None


def _is_pure_number(node: Node) -> bool:
    sizes = (torch.ops.aten.sym_size.int, operator.getitem, operator.eq, operator.ge, operator.le, operator.mul,
             operator.add, operator.sub, operator.floordiv, operator.ne, operator.gt, operator.lt)  # fmt: skip
    return node.target in sizes or (node.op == "call_method" and node.target in ("size", "numel", "dim"))


def _widen_single_choices(gm: GraphModule, result: PassResult) -> None:
    wide: dict[Node, Node] = {}
    compared: dict[Node, list[tuple[Node, Node, int]]] = {}  # by where the ids come from: comparison, ids, expert
    for node in gm.graph.nodes:
        ids, expert = (node.args[0], arg(node, 1, "other")) if op_name(node) == "eq" else (None, None)
        if isinstance(ids, Node) and isinstance(expert, int) and _is_numbers(ids):
            compared.setdefault(_origin(ids), []).append((node, ids, expert))
    for origin, found in compared.items():
        if not (_is_choice(origin) or _picks_tokens(found)):
            continue
        for node, ids, expert in found:
            emit = ragged.Rows(gm, edit.tensor_value(ids).fake_mode, "")
            if origin not in wide:
                with edit.at(ids, after=True):
                    wide[origin] = emit.method("unsqueeze", ids, -1)
                result.changed(f"{ids.name} is a single choice per token")
            with edit.at(node):
                node.replace_all_uses_with(emit.method("any", emit.method("eq", wide[origin], expert), -1))
            gm.graph.erase_node(node)
    for node in gm.graph.nodes:
        if op_name(node) in ("sort", "argsort") and _is_choice(ids := _origin(node.args[0])) and _is_numbers(ids):
            _flatten_choices(gm, ids)
            result.changed(f"{ids.name} is a single choice per token")


def _flatten_choices(gm: GraphModule, ids: Node) -> None:
    """Ids [T] become those of [T, 1] in one row, as of more choices."""
    emit = ragged.Rows(gm, edit.tensor_value(ids).fake_mode, "")
    with edit.at(ids, after=True):
        wide = emit.method("unsqueeze", ids, -1)
        flat = emit.method("flatten", wide)
    ids.replace_all_uses_with(flat, delete_user_cb=lambda user: user is not wide and op_name(user) != "one_hot")


def _is_numbers(ids: Node) -> bool:
    """Whether there is one integer per token; tokens have several axes only where the numbers are known choices."""
    found = edit.tensor_value(ids)
    if found is None or found.dim() == 0 or found.dtype.is_floating_point or found.dtype is torch.bool:
        return False
    origin = _origin(ids)
    several = expr(found.shape[-1]) == 1 or not _is_choice(origin)
    if op_name(origin.args[0] if origin.target is operator.getitem else origin) == "topk":
        several = several or expr(edit.tensor_value(origin).shape[-1]) != 1
    return found.dim() == 1 or not several


def _origin(ids: Node) -> Node:
    """Where the numbers come from: every expert may shape them anew."""
    while op_name(ids) in ("to", "long", "int", "squeeze", "reshape", "view", "flatten"):
        ids = ids.args[0]
    return ids


def _is_choice(origin: Node) -> bool:
    """Whether the numbers are those of the best experts: by argmax, by max, or by top-k with k = 1."""
    if origin.target is operator.getitem and origin.args[1] == 1:
        return op_name(origin.args[0]) in ("max", "topk")
    return op_name(origin) == "argmax"


def _picks_tokens(found: list[tuple[Node, Node, int]]) -> bool:
    """Whether numbers of any other origin (a hash of the token, say) are compared with 0, 1, .. and every comparison
    says which tokens are taken."""
    experts = sorted(expert for _, _, expert in found)
    if len(experts) < 2 or experts != list(range(len(experts))):
        return False
    return all(any(op_name(u) in ("where", "nonzero", "argwhere", "getitem", "setitem") and not _selects(u, node)
                   for u in node.users) for node, _, _ in found)  # fmt: skip


def _selects(user: Node, mask: Node) -> bool:
    """torch.where(mask, a, b) chooses between values and takes no tokens; x[.., i] of the mask itself neither."""
    return (op_name(user) == "where" and len(user.args) == 3) or (op_name(user) == "getitem" and user.args[0] is mask)


def _write_results(gm: GraphModule, result: PassResult) -> None:
    """torch.add(a, b, out=x) becomes x.copy_(torch.add(a, b)), which says that it writes to x."""
    for node in list(gm.graph.nodes):
        out = node.kwargs.get("out") if node.op == "call_function" else None
        if not isinstance(out, Node) or index_forms.sizes(out) != index_forms.sizes(node):
            continue
        with edit.at(node, after=True):
            written = gm.graph.call_method("copy_", (out, node))
        written.meta["val"] = edit.tensor_value(out)
        node.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)  # noqa: B023
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
        result.changed(f"{node.name} is written to {out.name}")


def _drop_identities(gm: GraphModule) -> None:
    """`x.to(dtype)` of a tensor that has the dtype and device already is x itself; so is a squeeze of nothing, or of
    what was unsqueezed."""
    for node in list(gm.graph.find_nodes(op="call_method", target="to")):
        before, after = edit.tensor_value(node.args[0]), edit.tensor_value(node)
        plain = not ({"copy", "memory_format"} & set(node.kwargs)) and len(node.args) <= 3
        if plain and before is not None and before.dtype == after.dtype and before.device == after.device:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    for node in list(gm.graph.find_nodes(op="call_method", target="squeeze")):
        source = node.args[0]
        undoes = op_name(source) == "unsqueeze" and source.args[1:] == node.args[1:] and len(node.args) == 2
        same = source.args[0] if undoes else source
        if index_forms.sizes(node) == index_forms.sizes(same):
            node.replace_all_uses_with(same)
            gm.graph.erase_node(node)
            edit.erase_unused([source])


def _functionalise(gm: GraphModule, result: PassResult) -> None:
    for node in list(gm.graph.nodes):
        index_forms.add_to_masked(gm, node)
    position = {n: i for i, n in enumerate(gm.graph.nodes)}
    sharing: dict[int | None, list[Node]] = {}  # the tensors over one memory, in no order
    for node in position:
        sharing.setdefault(storage(node), []).append(node)
    for node in list(gm.graph.nodes):
        functional = _functional_form(node)
        target = node.args[0] if node.args else None
        if functional is None or not isinstance(target, Node) or target.op == "placeholder":
            continue
        whole = _seen_as(target)
        if not _only_alias(node, target, [n for n in sharing[storage(target)] if n is not whole], position):
            result.skip(node, "another view of the tensor is used later")
            continue
        op, name = functional
        with edit.at(node):
            place, args = place_of_inplace(node), node.args
            args = args if place is None else (*args[:place], *(False for _ in args[place:]))
            kwargs = {key: given for key, given in node.kwargs.items() if key != "inplace"}
            new = gm.graph.create_node(op, name, args, kwargs)
            new.meta = dict(node.meta)
            before, after = edit.tensor_value(target), edit.tensor_value(node)
            if before is not None and after is not None and before.dtype != _result_dtype(node, before):
                new = gm.graph.call_method("to", (new, before.dtype))
                new.meta = dict(node.meta)
        for user in [u for u in target.users if position.get(u, -1) > position[node]]:
            user.replace_input_with(target, new)
        node.replace_all_uses_with(new)
        if whole is not None:
            _write_whole(whole, new, position, position[node])
        gm.graph.erase_node(node)
        sharing[storage(node)].remove(node)
        sharing.setdefault(storage(new), []).append(new)
        position[new] = position[node]
        result.changed(f"{new.name} made functional")


def _seen_as(target: Node) -> Node | None:
    """x of x.view(..), the same numbers in another shape, where nobody else has its memory."""
    whole = target.args[0] if is_reshape(target) and target.args else None
    fresh = isinstance(whole, Node) and whole.op.startswith("call") and not may_be_view(whole)
    return whole if fresh and storage(whole) == storage(target) else None


def _write_whole(whole: Node, new: Node, position: dict[Node, int], here: int) -> None:
    """What reads a tensor after a view of all of it was written to reads what the view became."""
    for user in [u for u in whole.users if position.get(u, -1) > here]:
        if is_reshape(user) and index_forms.sizes(user) == index_forms.sizes(new):
            user.replace_all_uses_with(new)
            user.graph.erase_node(user)
            continue
        with edit.at(user):
            back = new.graph.call_method("view_as", (new, whole))
        back.meta["val"] = edit.tensor_value(whole)
        position[back] = position[user]
        user.replace_input_with(whole, back)


def _functional_form(node: Node) -> tuple[str, object] | None:
    """(node kind, target) of the functional twin of an in-place op, None if the node is not in-place."""
    if node.op == "call_function" and node.target in INPLACE_OPERATORS:
        is_tensor = edit.tensor_value(node.args[0]) is not None
        return ("call_function", INPLACE_OPERATORS[node.target]) if is_tensor else None
    if place_of_inplace(node) is not None:
        return node.op, node.target
    if node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__"):
        name = node.target[:-1]
        return ("call_method", name) if hasattr(torch.Tensor, name) and name not in ("requires_grad", "copy") else None
    return None


def _result_dtype(node: Node, before: torch.Tensor) -> torch.dtype:
    """What the functional op would promote to."""
    others = [edit.tensor_value(a) for a in node.args[1:]]
    dims = [t for t in others if t is not None and t.dim() > 0 and before.dim() > 0]
    dtype = before.dtype
    for other in dims:
        dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def _only_alias(node: Node, target: Node, sharing: list[Node], position: dict[Node, int]) -> bool:
    """No other tensor over the same memory, made before the in-place op, is read after it; nor is it an input's."""
    if storage(target) is None:
        return False
    here = position[node]
    for other in sharing:
        if other is target or other is node:
            continue
        if other.op == "placeholder":
            return False
        if position.get(other, here) < here and any(position.get(u, here) > here for u in other.users
                                                    if op_name(u) not in LIKE or u.args[0] is other):  # fmt: skip
            return False
    return True
