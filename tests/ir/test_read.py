"""The reader: it restores every graph exactly, reads short graphs written by hand, and names the line it refuses."""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export

from moefx.errors import VerifyError
from moefx.ir.read import Spec, evaluate, example_inputs, read, read_graph, specs
from moefx.ir.text import BINARY, UNARY, text
from tests.ir.test_text import joint_graph


class Color(enum.Enum):
    RED = "r"


class Depth(enum.IntEnum):
    TWO = 2


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass(frozen=True)
class Plan:
    axis: str
    sizes: tuple[int, ...] = ()


def key(value: object) -> object:
    """What has to be equal: type and value of everything, nodes by name, nan equal to itself, 0.0 not to -0.0."""
    if isinstance(value, fx.Node):
        return "node", value.name
    if isinstance(value, slice):
        return "slice", key(value.start), key(value.stop), key(value.step)
    if isinstance(value, tuple | list):
        kind = list if isinstance(value, list) else type(value)  # fx makes its own lists and dicts of ours
        return kind, tuple(map(key, value))
    if isinstance(value, dict):
        return dict, tuple((key(k), key(v)) for k, v in value.items())
    return type(value), repr(value) if isinstance(value, float | complex) else value


def facts(graph: fx.Graph) -> list[object]:
    return [
        (n.op, n.name, n.target if callable(n.target) or n.op == "call_method" else "", key(n.args), key(n.kwargs))
        for n in graph.nodes
    ]


def assert_exact(gm: fx.GraphModule | fx.Graph) -> None:
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    for meta in (False, True):
        again = read_graph(text(graph, meta=meta, where=meta))
        assert text(again, meta=False) == text(graph, meta=False)
        assert facts(again) == facts(graph)


# A slow one once: two layers of a transformer, batch and sequence symbolic, captured at torch level.
@pytest.fixture(scope="module")
def mixtral() -> fx.GraphModule:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    torch._dynamo.mark_dynamic(tokens, 0)
    torch._dynamo.mark_dynamic(tokens, 1)
    return dynamo_graph_capture_for_export(model)(input_ids=tokens, labels=tokens)


@pytest.mark.filterwarnings("ignore:While compiling")
def test_mixtral_is_restored_and_runs_the_same(mixtral: fx.GraphModule) -> None:
    assert_exact(mixtral)
    whole = text(mixtral, where=True)
    assert 'l_kwargs_input_ids_: "i64[s0, s1]"' in whole
    assert "# f32[s0, s1, 32]" in whole
    assert "model.layers.1.mlp.experts  moe.py:" in whole
    assert len(whole.splitlines()) == len(mixtral.graph.nodes) + 2  # the two lines around the inputs
    inputs = example_inputs(mixtral, {"s0": 3, "s1": 5})
    loss, logits = read(whole)(*inputs)
    assert logits.shape == (3, 5, 64)
    plain = fx.Graph()  # without dynamo's own calling convention, which would put in the model's parameters
    plain.output(plain.graph_copy(mixtral.graph, {}))
    for mine, original in zip((loss, logits), fx.GraphModule(nn.Module(), plain)(*inputs)):
        assert torch.equal(mine, original)


def test_mlp_is_restored() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    assert_exact(dynamo_graph_capture_for_export(model)(torch.randn(3, 4)))


def test_joint_graph_is_restored() -> None:
    assert_exact(joint_graph())


def test_annotations_are_kept() -> None:
    gm = joint_graph()
    first = text(gm).splitlines()[0]
    assert first.count('"f32[') == 3
    assert text(read(text(gm))).splitlines()[0] == first


NAMES = st.sampled_from([torch.float32, torch.bool, torch.strided, torch.channels_last, torch.per_tensor_affine])
DEVICES = st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")])
OTHERS = st.sampled_from([Color.RED, Depth.TWO, Plan("ep"), Plan("dp", (1, 2)), torch.ops.aten.mm.default, F.silu, max])
ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.complex_numbers(), NAMES, DEVICES,
    OTHERS, st.just(...), st.just("<node x>"), st.builds(range, st.integers(-3, 3), st.integers(-3, 3)),
)  # fmt: skip
SLICES = st.builds(slice, *[st.one_of(st.none(), st.integers(), st.just("<node x>"))] * 3)
LITERALS = st.recursive(
    ATOMS | SLICES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


def with_node(value: object, node: fx.Node) -> object:
    """The literal with `node` where the marker stands."""
    if isinstance(value, str) and value == "<node x>":
        return node
    if isinstance(value, slice):
        return slice(*(with_node(part, node) for part in (value.start, value.stop, value.step)))
    if isinstance(value, Pair):
        return Pair(*(with_node(item, node) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(with_node(item, node) for item in value)
    if isinstance(value, dict):
        return {k: with_node(v, node) for k, v in value.items()}
    return value


@settings(max_examples=150, deadline=None)
@given(LITERALS, LITERALS)
def test_any_literal_is_restored(one: object, two: object) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, two = with_node(one, x), with_node(two, x)
    graph.call_function(operator.getitem, (x, one))
    graph.call_function(torch.add, (one, two))
    graph.call_function(torch.ops.aten.mm.default, (one,), {"out": two, "z": one})
    graph.call_method("new", (x, one), {"k": two})
    graph.output((one, two))
    assert facts(read_graph(text(graph))) == facts(graph)


OPERANDS = st.one_of(st.none(), st.integers(-3, 3), st.floats(-2, 2), st.just("<node x>"))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([*BINARY, *UNARY, operator.iadd, operator.getitem]), OPERANDS, OPERANDS)
def test_any_operator_is_restored(function: object, one: object, two: object) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    operands = (one,) if function in UNARY else (one, two)
    graph.output(graph.call_function(function, with_node(operands, x)))
    assert_exact(graph)


def test_infix_is_printed_where_it_can_be() -> None:
    gm = read("""
        def graph(x, y):
            a = x + y * 2
            b = -a ** 2
            c = (x @ y)[..., 1:, None]
            d = a <= b
            return (c, ~d)
        """)
    words = [line.split("=", 1)[1].strip() for line in text(gm).splitlines()[1:-1]]
    assert words == ["y * 2", "x + mul", "a ** 2", "-pow_1", "x @ y", "matmul[..., 1:, None]", "a <= b", "~d"]


def test_short_graphs_by_hand() -> None:
    """Nested calls, unpacking, constants, item assignment, rebinding, getattr: all become plain nodes."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    gm = read(
        """
        def graph(x: "f32[s0, 8]", w: f32[8, 4], bias=None):
            "what it does"
            k = 1 + 1
            values, ids = torch.topk(torch.softmax(x @ w, dim=-1), k)
            x = double(x)
            x[0] = 0.5
            n = x.shape[0]
            return (values.sum(dim=(0,)), ids, x, n)
        """,
        namespace={"double": double},
    )
    x, w = torch.randn(3, 8), torch.randn(8, 4)
    total, ids, x2, n = gm(x, w)
    values, wanted = torch.topk(torch.softmax(x @ w, -1), 2)
    assert torch.equal(total, values.sum(0))
    assert torch.equal(ids, wanted)
    assert torch.equal(x2[1:], 2 * x[1:])
    assert x2[0].eq(0.5).all()
    assert n == 3
    assert [node.name for node in gm.graph.nodes][:6] == ["x", "w", "bias", "matmul", "softmax", "topk"]


def test_imports_of_the_file_are_known() -> None:
    file = """
import torch.nn.functional as tnf
from operator import iadd as plus_is

def helper(x): return x

def graph(x):
    y = plus_is(x, 1)
    return tnf.silu(y)
"""
    assert [node.target for node in read(file).graph.nodes][1:3] == [operator.iadd, F.silu]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def graph(x):\n    y = torch.reluu(x)\n    return y", "called 'torch.reluu'(.|\n)*line 2: y = torch.reluu"),
        ("def graph(x):\n    return ops.moefx_no.such.default(x)", "nothing is called(.|\n)*line 2"),
        ("def graph(x):\n    return z", "nothing is called 'z'(.|\n)*line 2: return z"),
        ("def graph(x):\n    y = x if x else 1\n    return y", "no 'IfExp' expression(.|\n)*line 2"),
        ("def graph(x):\n    y = 0 < x < 1\n    return y", "no 'Compare' expression(.|\n)*line 2"),
        ("def graph(x):\n    y = torch.add(x, **k)\n    return y", "no 'Call' expression(.|\n)*line 2"),
        ("def graph(x):\n    y = torch.add(*x)\n    return y", "no 'Starred' expression(.|\n)*line 2"),
        ("def graph(x):\n\n    for y in x: pass\n    return x", "no 'For' statement(.|\n)*line 3: for y"),
        ("def graph(x):\n    x.y = 3\n    return x", "cannot assign(.|\n)*line 2"),
        ("def graph(x):\n    y = torch.float32(x)\n    return y", "'torch.float32' cannot be called(.|\n)*line 2"),
        ("def graph(x):\n    y = torch.relu(x)", "end with 'return'(.|\n)*line 2"),
        ("def graph(x):\n    y = = 2", "not Python(.|\n)*line 2: y = = 2"),
        ("def graph(x: 'f99[2]'):\n    return x", "not the type of an input(.|\n)*line 1"),
        ("def graph(x: 'f32[s0 < 1]'):\n    return x", "not the type of an input(.|\n)*line 1"),
        ("def graph(*x):\n    return x", "only plain parameters(.|\n)*line 1"),
        ("x = 1", "0 functions"),
        ("def f(x):\n    return x\ndef g(x):\n    return x", "2 functions"),
    ],
)
def test_refusals_name_the_line(source: str, said: str) -> None:
    with pytest.raises(VerifyError, match=said):
        read(source)


def test_specs() -> None:
    source = """def graph(x: "f32[s0, 2*s1]", i: "i64[]", n: "s0*s1", e: "f8?", c: "bf16[Max(1, s0)] @cuda"):
        return x"""
    with pytest.raises(VerifyError, match="'f8\\?' is not the type of an input"):
        specs(source)
    assert specs(source.replace('e: "f8?", ', "")) == {
        "x": Spec(torch.float32, ("s0", "2*s1")),
        "i": Spec(torch.int64),
        "n": Spec(None, size="s0*s1"),
        "c": Spec(torch.bfloat16, ("Max(1,s0)",), "cuda"),
    }
    with pytest.raises(VerifyError, match="'y' has no type"):
        specs("def graph(x: 'f32[]', y): return x")


def test_example_inputs() -> None:
    source = """def graph(x: "f32[T, s0]", i: "i64[T]", b: "bool[64]", n: "T*s0", h: "f8_e4m3[2]", c: "c64[s0//2]"):
        return x""".replace("f8_e4m3", "float8_e4m3fn")
    x, i, b, n, h, c = example_inputs(source, {"T": 50}, high=3)
    assert (x.shape, i.shape, n) == ((50, 6), (50,), 300)
    assert sorted(set(i.tolist())) == [0, 1, 2]
    assert sorted(set(b.tolist())) == [False, True]
    assert [t.dtype for t in (x, i, b, h, c)] == [
        torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64,
    ]  # fmt: skip
    assert c.shape == (3,)
    assert torch.equal(x, example_inputs(source, {"T": 50})[0])
    assert not torch.equal(x, example_inputs(source, {"T": 50}, seed=1)[0])


def test_sizes_are_evaluated() -> None:
    assert evaluate("2*s0 + Max(1, s1) - -s0//2", {"s0": 3, "s1": 5}) == 2 * 3 + 5 - -3 // 2
    with pytest.raises(KeyError, match="s2"):
        evaluate("s2", {})
    with pytest.raises(ValueError, match="not a size"):
        evaluate("open('x')", {})
    assert math.prod(evaluate(size, {}) for size in (2, 3)) == 6
