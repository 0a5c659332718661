"""Equal layers: which they are, and that differentiating one for all computes the same, to the bit."""

from __future__ import annotations

import re

import pytest
import torch

from moefx.analysis import kinds
from moefx.analysis.checking.same import difference
from moefx.compiler import pipeline
from moefx.context.pass_types import PassResult
from moefx.ir.op import expr, value
from tests.support.graphs import context, graph

PLAIN = """
    h{n} = h{i} + F.silu(F.linear(h{i}, use{n}))
"""


def layers(count, body=PLAIN, *, before="", inputs="", gives="h{count}"):
    """A graph of so many layers. Each begins where it reads its weight."""
    weights = ", ".join(f'w{n}: "f32[16, 16]"' for n in range(1, count + 1))
    text = before
    for n in range(1, count + 1):
        text += f"    use{n} = materialize(w{n}, 'identity', 'dp', 0.5, {n})\n"
        text += body.strip("\n").format(n=n, i=n - 1) + "\n"
    given = f'xs: "f32[s0, 16]", {weights}{inputs}'
    return f"def graph({given}):\n    h0 = xs.clone()\n{text}    return ({gives.format(count=count)},)\n"


def read(source, frozen=(), grad=True, outputs=1):
    gm, mode = graph(source, frozen=frozen)
    here = None
    for node in gm.graph.nodes:
        if node.op.startswith("call"):
            here = node.name[3:] if node.name.startswith("use") and node.name[3:].isdigit() else here
            node.meta["nn_module_stack"] = {"": (f"layers.{here}" if here else "", torch.nn.Module)}
    ctx = context(mode, None, dp=2)
    ctx.decisions.num_user_outputs, ctx.grad = outputs, grad
    return gm, ctx


def once_and_whole(source, **how):
    """Forward and backward by kinds, as a whole, and what was said."""
    gm, ctx = read(source, **how)
    said = PassResult()
    once = pipeline.differentiated(gm, ctx, said, kinds.find(gm))
    return once, pipeline.differentiated(gm, ctx), said


def assert_once(source, equal, **how):
    once, whole, said = once_and_whole(source, **how)
    assert difference(once, whole) is None
    assert difference(whole, once) is None
    assert [change for change in said.changes if "once" in change] == [f"{equal}: differentiated once"], said
    assert not said.skipped
    return once


# ---- which are equal


def test_a_form_has_no_names():
    gm, _ = read(layers(3))
    found = kinds.find(gm)
    (kind,) = found.found
    one, other = kind.blocks
    assert str(kind) == "2 equal layers, layers.2 to layers.3"
    assert found.alone == {"layers.1": "unlike layers.2: its input h0 needs no gradient"}
    assert (one.numbers, other.numbers) == ((2,), (3,)), "which inputs the parameters are"
    assert one.form == other.form
    assert [re.sub(r"s\d+", "s0", line) for line in one.form] == [
        "moefx.ir.ops.parameters.materialize((<0, 'identity', 'dp', 0.5, ['input 0']), {}) -> "
        "torch.float32 [16, 16] strides [16, 1] from 0 on cpu with gradient []",
        "torch._C._nn.linear((<1, %0), {}) -> torch.float32 [s0, 16] strides [16, 1] from 0 on cpu with gradient []",
        "torch.nn.functional.silu((%1,), {}) -> torch.float32 [s0, 16] strides [16, 1] from 0 on cpu with gradient []",
        "_operator.add((<1, %2), {}) -> torch.float32 [s0, 16] strides [16, 1] from 0 on cpu with gradient []",
        "placeholder: parameter torch.float32 [16, 16] strides [16, 1] from 0 on cpu with gradient",
        "value: torch.float32 [s0, 16] strides [16, 1] from 0 on cpu with gradient",
    ]


@pytest.mark.parametrize(("odd", "why"), [
    ("    h{n} = h{i} + F.silu(F.linear(h{i}, use{n})) * 2.0", "mul computes"),
    ("    h{n} = h{i} + F.gelu(F.linear(h{i}, use{n}))", "gelu computes"),
    ("    h{n} = h{i} + F.silu(F.linear(use{n}, use{n}))[0]", "linear computes"),
    ("    h{n} = h{i} + F.silu(F.linear(h{i}.double(), use{n}.double())).float()", "double computes"),
    ("    h{n} = h{i} + F.silu(F.linear(h{i}, use{n}.t()))", "t computes"),
    ("    h{n} = h{i} + F.silu(F.linear(h{i}, use{n})).detach()", "detach computes"),
    ("    h{n} = h0 + F.silu(F.linear(h{i}, use{n}))", "add computes"),
])  # fmt: skip
def test_another_op_operand_or_type_is_another_form(odd, why):
    source = layers(4)
    plain = PLAIN.strip("\n").format(n=3, i=2)
    assert plain in source
    gm, _ = read(source.replace(plain, odd.format(n=3, i=2)))
    found = kinds.find(gm)
    (kind,) = found.found
    assert [block.path for block in kind.blocks] == ["layers.2", "layers.4"]
    assert found.alone["layers.3"].startswith("unlike layers.2: "), found.alone
    assert why in found.alone["layers.3"]


def test_strides_and_frozen_weights_are_part_of_the_form():
    gm, _ = read(layers(4), frozen=("w3",))
    found = kinds.find(gm)
    assert found.alone["layers.3"] == "unlike layers.2: its input w3 needs no gradient"
    node = next(node for node in gm.graph.nodes if node.name == "h2")
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty_strided((node.meta["val"].shape[0], 16), (1, 999)).requires_grad_()
    assert {"layers.2", "layers.3", "layers.4"} <= kinds.find(gm).alone.keys()


# ---- one joint graph per kind


def test_layers_are_differentiated_once():
    once = assert_once(layers(4), "3 equal layers, layers.2 to layers.4")
    reduced = [node for node in once.backward.graph.nodes if "reduce_gradient" in str(node.target)]
    assert sorted(node.args[3] for node in reduced) == [1, 2, 3, 4], "of every parameter"


def test_sizes_that_data_tell_before_the_layers_are_one_in_all_of_them():
    """As the number of samples in a part of the batch, which decides what is planned."""
    before = "    n = m.num_chunk_rows(xs, 0, 0, 2)\n    p0, rest = h0.split([n, h0.size(0) - n])\n"
    once = assert_once(layers(5, PLAIN.replace("h{", "p{"), before=before, gives="torch.cat([p{count}, rest])"),
                       "3 equal layers, layers.2 to layers.4")  # fmt: skip
    for gm in once.graphs.values():
        symbols = {symbol for node in gm.graph.nodes if isinstance(value(node), torch.Tensor)
                   for symbol in expr(value(node).shape[0]).free_symbols if symbol.name.startswith("u")}  # fmt: skip
        assert len(symbols) == 1


def test_without_gradients():
    once = assert_once(layers(3), "2 equal layers, layers.2 to layers.3", grad=False)
    assert once.backward is None


def test_a_parameter_that_layers_share_and_read_twice_sums_as_autograd_does():
    body = """
    h{n} = h{i} + F.silu(F.linear(F.linear(h{i}, shared), use{n}) * shared[0]) @ shared
    """.strip(" ")
    source = layers(4, body, before="    shared = materialize(s, 'identity', 'dp', 0.5, 5)\n",
                    inputs=', s: "f32[16, 16]"', gives="h{count} @ shared")  # fmt: skip
    assert_once(source, "2 equal layers, layers.2 to layers.3")


def test_values_that_leave_layers():
    body = """
    p{n} = F.linear(h{i}, use{n})
    h{n} = h{i} + F.silu(p{n})
    """.strip(" ")
    source = layers(4, body, gives="h{count}, p1 * p3")
    assert_once(source, "2 equal layers, layers.2 to layers.3", outputs=2)
    source = layers(4, body, gives="h3, h{count}")  # of p4 there is no gradient, of h4 alone
    assert_once(source, "3 equal layers, layers.2 to layers.4", outputs=2)


def test_random_numbers_are_drawn_in_the_same_order():
    body = "    h{n} = h{i} + F.dropout(F.silu(F.linear(h{i}, use{n})), 0.5, True)"
    assert_once(layers(4, body), "3 equal layers, layers.2 to layers.4")


def test_buffers_that_layers_write():
    body = """
    p{n} = F.linear(h{i}, use{n})
    seen{n} = buffer{n}.add_(p{n}.detach().sum(0))
    h{n} = h{i} + F.silu(p{n})
    """.strip(" ")
    source = layers(4, body, inputs="".join(f', buffer{n}: "f32[16]"' for n in range(1, 5)))
    once = assert_once(source, "3 equal layers, layers.2 to layers.4")
    assert len(once.mutated_inputs) == 4


def test_what_does_not_fit_goes_the_old_way():
    body = """
    q{n} = h{i}.mul_(2.0)
    h{n} = h{i} + F.silu(F.linear(h{i}, use{n}))
    """.strip(" ")
    once, whole, said = once_and_whole(layers(3, body))
    assert difference(once, whole) is None
    ((kind, why),) = said.skipped
    assert kind == "2 equal layers, layers.2 to layers.3"
    assert why == "differentiated one by one: it writes to what wants a gradient, or to memory that inputs share"


# ---- the comparison finds what a kind forgets


@pytest.mark.parametrize("other", [
    layers(3).replace("F.silu(F.linear(h2", "F.gelu(F.linear(h2"),
    layers(3).replace("h3 = h2 +", "h3 = h1 +"),
    layers(3).replace("0.5, 2)", "0.25, 2)"),
    layers(3).replace("return (h3,)", "return (h2,)"),
])  # fmt: skip
def test_programs_that_differ_are_told_apart(other):
    steps = []
    for source in (layers(3), other):
        gm, ctx = read(source)
        steps.append(pipeline.differentiated(gm, ctx))
    assert difference(*steps) is not None


def _forget(pattern):
    """A form without what matches in types."""
    plain = kinds.Writer.type
    return "Writer.type", lambda self, found: re.sub(pattern, "", plain(self, found))


CAST = PLAIN.replace("use{n})", "use{n}.float())")
DENSE = PLAIN.rstrip() + " + c{n}.contiguous().sum(0)\n"
WRITES = PLAIN.rstrip() + """ + other{n}
    seen{n} = buffer{n}.add_(h{i}.detach().sum(0))
    g{n} = (other{n} * h{i}).sum()
"""
FAULTS = {
    "dtype": (layers(4, CAST).replace('w3: "f32', 'w3: "f64'), (), _forget(r"torch\.float\d\d")),
    "stride": (layers(4, DENSE, inputs="".join(f', q{n}: "f32[16, 16]"' for n in range(1, 5)), before="".join(
        f"    c{n} = q{n}.{'t()' if n == 3 else 'clone()'}\n" for n in range(1, 5))), (), _forget(r"strides \[.*?\]")),
    "gradient": (layers(4), ("w2",), _forget(" with gradient")),
    "memory": (layers(4, WRITES, inputs="".join(f', buffer{n}: "f32[16]"' for n in range(1, 5)), before="".join(
        f"    other{n} = {f'buffer{n}.view(16)' if n == 3 else f'buffer{n} + 1.0'}\n" for n in range(1, 5)),
        gives="h{count} + g1 + g2 + g3 + g4"), (), ("storage", lambda node: node.name)),
}  # fmt: skip


def test_what_reads_memory_that_its_layer_writes_stays_in_its_place():
    body = """
    seen{n} = buffer{n}.add_(h{i}.detach().sum(0))
    g{n} = buffer{n}.sum()
    h{n} = h{i} + F.silu(F.linear(h{i}, use{n}))
    """.strip(" ")
    buffers = "".join(f', buffer{n}: "f32[16]"' for n in range(1, 5))
    once, whole, _ = once_and_whole(layers(4, body, inputs=buffers, gives="h{count} + g1 + g2 + g3 + g4"))
    assert difference(once, whole) is None
    assert difference(whole, once) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_form_forgets_is_found(fault, monkeypatch):
    source, frozen, (name, forgetful) = FAULTS[fault]
    once, whole, said = once_and_whole(source, frozen=frozen)
    assert difference(once, whole) is None, "as it is"
    monkeypatch.setattr(f"moefx.analysis.kinds.{name}", forgetful)
    once, whole, said = once_and_whole(source, frozen=frozen)
    assert any("layers.3" in change or "layers.4" in change for change in said.changes), said
    assert difference(once, whole) is not None
    assert difference(whole, once) is not None


def test_what_is_computed_without_gradients_stays_so():
    body = """
    off{n} = torch._C._set_grad_enabled(False)
    q{n} = h{i}.sum()
    on{n} = torch._C._set_grad_enabled(True)
    h{n} = h{i} + F.silu(F.linear(h{i}, use{n})) * scale * q{n}
    """.strip(" ")
    before = "    sh = materialize(s, 'identity', 'dp', 0.5, 6)\n    h0 = xs + sh[0]\n"
    source = layers(5, body, before=before, inputs=', s: "f32[16, 16]"', gives="h{count} @ sh")
    source = source.replace("    h0 = xs.clone()\n", "").replace("    q1 =", "    scale = sh.sum()\n    q1 =")
    once, whole, _ = once_and_whole(source)
    assert difference(once, whole) is None
    assert difference(whole, once) is None
