"""The printer: what a text looks like, and that it says the same on every run."""

from __future__ import annotations

import ast
import operator
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from moefx.errors import VerifyError
from moefx.ir.printed import Known, diff, op_count_diff, op_counts, printed
from moefx.ir.read import example_inputs, read
from moefx.ir.text import module_path, path_of, resolve, source_line, text


def mlp_step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Loss and gradients of a two-layer MLP."""
    w, v = w.detach().requires_grad_(), v.detach().requires_grad_()
    y = torch.relu(x @ w) @ v
    loss = (y.view(-1) ** 2).sum() / x.shape[0]
    return loss, *torch.autograd.grad(loss, (w, v))


def joint_graph() -> fx.GraphModule:
    return make_fx(mlp_step, tracing_mode="symbolic")(torch.randn(5, 4), torch.randn(4, 6), torch.randn(6, 3))


def test_golden_of_an_aten_graph() -> None:
    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w).view(-1) * x.shape[0]

    assert_expected_inline(
        text(make_fx(scaled, tracing_mode="symbolic")(torch.randn(5, 4), torch.randn(4, 6))),
        """\
def graph(x_1: "f32[s0, s1]", w_1: "f32[s1, s2]"):
    mm = ops.aten.mm.default(x_1, w_1)                                  # f32[s0, s2]
    relu = ops.aten.relu.default(mm)                                    # f32[s0, s2]
    view = ops.aten.view.default(relu, [-1])                            # f32[s0*s2]
    sym_size_int = ops.aten.sym_size.int(x_1, 0)                        # s0
    mul = ops.aten.mul.Tensor(view, sym_size_int)                       # f32[s0*s2]
    return mul
""",
    )


def test_texts_of_two_traces_are_equal() -> None:
    assert text(joint_graph()) == text(joint_graph())


def test_symbols_are_renamed_in_order_of_appearance() -> None:
    def rows(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x[mask.nonzero()[:, 0]]])

    gm = make_fx(rows, tracing_mode="symbolic")(torch.tensor([True, False, True]), torch.randn(3, 7))
    assert_expected_inline(
        text(gm),
        """\
def graph(mask_1: "bool[s0]", x_1: "f32[s0, s1]"):
    nonzero = ops.aten.nonzero.default(mask_1)                          # i64[u0, 1]
    select = ops.aten.select.int(nonzero, 1, 0)                         # i64[u0]
    index = ops.aten.index.Tensor(x_1, [select])                        # f32[u0, s1]
    cat = ops.aten.cat.default([x_1, index])                            # f32[s0 + u0, s1]
    return cat
""",
    )


def test_types_of_tuples_sizes_and_devices() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    top = graph.call_function(torch.topk, (x, 1))
    top.meta["example_value"] = torch.topk(torch.zeros(2, 3), 1)
    one = graph.call_method("size", (x, 0))
    one.meta["val"] = 2
    scalar = graph.call_function(torch.sum, (x,))
    scalar.meta["val"] = (torch.tensor(1), None)
    graph.output((top, one))
    assert_expected_inline(
        text(graph),
        """\
def graph(x: "bf16[2, 3] @meta"):
    topk = torch.topk(x, 1)                                             # (f32[2, 1], i64[2, 1])
    size = x.size(0)                                                    # 2
    sum_1 = torch.sum(x)                                                # (i64[], None)
    return (topk, size)
""",
    )


def test_where_names_module_and_user_line() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    y.meta["nn_module_stack"] = {"1": ("L['self']", object), "2": ("L['self'].model._modules['layers'][0].mlp", object)}
    y.meta["stack_trace"] = (
        f'  File "/a/model.py", line 7, in f\n    h(x)\n  File "{torch.__file__}", line 9, in forward\n    g(x)\n'
    )
    graph.output(y)
    assert (module_path(y), source_line(y)) == ("model.layers.0.mlp", "model.py:7")
    assert (module_path(x), source_line(x)) == ("", "")
    x.meta["nn_module_stack"] = {"1": ("L['self'].__dict__['base'].__dict__['model'].layers[0]", object)}
    assert module_path(x) == "base.model.layers.0", "peft's models are found in __dict__"
    del x.meta["nn_module_stack"]
    assert "# model.layers.0.mlp  model.py:7\n" in text(graph, where=True)
    assert "#" not in text(graph)


def test_comments_stand_in_one_column_that_a_long_line_leaves_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for width in (4, 60):
        x = graph.create_node("call_function", torch.relu, (x,), name="n" * width)
        x.meta["val"] = torch.zeros(1)
    graph.output(x)
    columns = [line.index("#") for line in text(graph).splitlines() if "#" in line]
    assert columns[0] == 72
    assert columns[1] > 72
    assert columns[1] % 8 == 0


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (torch.arange, "torch.arange"),
        (F.linear, "F.linear"),
        (F.silu, "F.silu"),
        (operator.iadd, "operator.iadd"),
        (getattr, "getattr"),
        (torch.Tensor.add_, "torch.Tensor.add_"),
        (torch._C._set_grad_enabled, "torch._C._set_grad_enabled"),
        (torch.ops.aten.sym_size.int, "ops.aten.sym_size.int"),
        (torch.ops.aten.mm, "ops.aten.mm"),
        (torch.ops.higher_order.cond, "ops.higher_order.cond"),
        (torch.ops.higher_order.auto_functionalized_v2, "ops.higher_order.auto_functionalized_v2"),
        (mlp_step, "tests.ir.test_text.mlp_step"),
        (lambda x: x, None),
    ],
)
def test_paths(target: object, path: str | None) -> None:
    assert path_of(target) == path
    if path:
        assert resolve(path) is target


def test_names_that_hide_a_root() -> None:
    graph = fx.Graph()
    x = graph.placeholder("operator")
    y = graph.create_node("call_function", operator.iadd, (x, 1), name="F")
    z = graph.create_node("call_function", F.silu, (y,), {}, name="ops")
    graph.output(graph.call_function(torch.ops.aten.mm.default, (z, z)))
    assert_expected_inline(
        text(graph),
        """\
def graph(operator):
    F = __import__('operator').iadd(operator, 1)
    ops = __import__('torch').nn.functional.silu(F)
    mm_default = __import__('torch').ops.aten.mm.default(ops, ops)
    return mm_default
""",
    )
    again = read(text(graph))
    assert text(again) == text(graph)
    assert [node.target for node in again.graph.nodes] == [node.target for node in graph.nodes]


def refused(build: object) -> fx.Graph:
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return graph


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda graph, x: graph.get_attr("weight"), "'get_attr' has no text form(.|\n)*node weight"),
        (lambda graph, x: graph.call_module("mlp", (x,)), "'call_module' has no text form(.|\n)*node mlp"),
        (lambda graph, x: graph.call_method("item", (3,)), "'item' of a literal(.|\n)*node item"),
        (lambda graph, x: graph.create_node("call_function", lambda y: y, (x,), name="n"), "importable(.|\n)*node n"),
        (lambda graph, x: graph.call_function(torch.add, (x, torch.ones(1))), "type Tensor(.|\n)*node add"),
    ],
)
@pytest.mark.filterwarnings("ignore:Attempted to insert")
def test_refusals_name_the_node(build: object, said: str) -> None:
    with pytest.raises(VerifyError, match=said):
        text(refused(build))


def test_runnable_file_is_python_that_computes_the_same() -> None:
    gm = joint_graph()
    file = printed(gm).file(title='Step 3 of "x" \\ y', notes=["ranks = 2", 'said """so"""'])
    module = ast.parse(file)
    assert ast.get_docstring(module) == "Step 3 of \"x\" \\ y\n\nranks = 2\nsaid '''so'''"
    scope: dict[str, object] = {"__name__": "dump"}
    exec(compile(file, "dump.py", "exec"), scope)
    inputs = example_inputs(file, {"s0": 3})
    for mine, read_back, original in zip(scope["graph"](*inputs), read(file)(*inputs), gm(*inputs)):
        assert torch.equal(mine, original)
        assert torch.equal(read_back, original)


def test_runnable_imports_what_it_names() -> None:
    gm = read("def graph(x):\n    y = moefx.ir.printed.diff(F.silu(x), 'b')\n    return ops.aten.neg.default(y)")
    head = printed(gm).file(title="t").split("def graph")[0]
    assert head == '"""t\n"""\n\nimport moefx.ir.printed\nimport torch.nn.functional as F\nfrom torch import ops\n\n\n'


def test_runnable_file_of_the_dialect_stands_alone(tmp_path: Path) -> None:
    source = """def graph(x: "f32[3, 2]", perm: "i64[6]"):
        y = ops.moefx.dispatch.default(x, perm, 2)
        return y"""
    file = tmp_path / "dump.py"
    file.write_text(printed(read("import moefx.ir.ops\n\n" + source.replace("\n    ", "\n"))).file(title="t"))
    script = "import dump, torch; print(dump.graph(torch.arange(6.0).view(3, 2), torch.arange(6))[:, 0].tolist())"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "[0.0, 0.0, 2.0, 2.0, 4.0, 4.0]\n", done.stderr


def test_rows_in_which_nothing_changed_are_kept() -> None:
    def twice(x, w):
        long = torch.relu(torch.cat([x, x]))
        return long @ w, x.sum()

    gm = make_fx(twice, tracing_mode="symbolic")(torch.randn(5, 4), torch.randn(4, 6))
    known = Known()

    def made() -> set[str]:
        """Nodes whose rows are made anew. All rows say what a first print says."""
        before = [each.row for each in known.seen.values()]
        now, first = printed(gm, known), printed(gm)
        assert (now.full, now.imports, now.sizes) == (first.full, first.imports, first.sizes)
        return {node.name for node, each in known.seen.items() if not any(each.row is old for old in before)}

    assert made() == {"cat", "relu", "mm", "sum_1", "output"}
    assert made() == {"cat"}, "sizes get their names where they are seen first"
    relu = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)[0]
    relu.name = "other"
    assert made() == {"cat", "other", "mm"}
    relu.target = torch.ops.aten.neg.default
    assert made() == {"cat", "other"}
    relu.meta["val"] = relu.meta["val"][:1]
    assert made() == {"cat", "other"}
    relu.args = (gm.graph.find_nodes(op="placeholder")[0],)
    gm.graph.eliminate_dead_code()
    assert made() == {"other", "mm"}, "that size is seen first there now"
    relu.name = "ops"
    assert made() == {"ops", "mm", "sum_1", "output"}, "a name hides torch.ops"


def test_diff_and_op_counts() -> None:
    before = read("def graph(x):\n    y = torch.relu(x)\n    z = y + 1\n    return (z,)")
    after = read(
        "def graph(x):\n    y = torch.relu(x)\n    z = y + 2\n    u = ops.aten.neg.default(z)\n    return (u,)"
    )
    assert_expected_inline(
        diff(text(before), text(after)),
        """\
--- before
+++ after
@@ -1,4 +1,5 @@
 def graph(x):
     y = torch.relu(x)
-    z = y + 1
-    return (z,)
+    z = y + 2
+    u = ops.aten.neg.default(z)
+    return (u,)
""",
    )
    assert diff(text(before), text(before)) == ""
    assert op_count_diff(op_counts(before), op_counts(after)) == ["nodes: 4 -> 5 (+1)", "neg: 0 -> 1 (+1)"]
    assert op_count_diff(op_counts(after), op_counts(before.graph)) == ["nodes: 5 -> 4 (-1)", "neg: 1 -> 0 (-1)"]
    assert op_count_diff(op_counts(before), op_counts(before)) == []
