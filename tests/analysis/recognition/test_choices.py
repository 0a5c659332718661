"""choices: what values are of a routing, by what they are on drawn inputs."""

from __future__ import annotations

import operator
from unittest import mock

import pytest
import torch

from moefx.analysis.checking.evaluate import run_here
from moefx.analysis.recognition import choices, draws
from moefx.analysis.recognition.draws import Draws
from moefx.analysis.recognition.facts import Mask, Read
from tests.support.graphs import graph

LOOP = """
def graph(x: "f32[s0, 8]", ids: "i64[s0, 2]"):
    own = ids.clone()
    first = own == 0
    {between}
    second = own == 1
    return (first, second)
"""


@pytest.mark.parametrize(("between", "known"), [
    ("third = own == 2", {"first", "third", "second"}),
    ("own[first] = -1", set()),
    ("filled = own.clamp_(0, 1)", set()),
    ("other = ids.clone()\n    other[first] = -1", {"first", "second"}),
    ("view = own.view(-1)\n    view[0] = 1", set()),
], ids=["steady", "written by a mask", "written in place", "another tensor", "written by a view"])  # fmt: skip
def test_masks_of_ids_that_are_written_to_later_are_not_understood(between, known):
    gm, _ = graph(LOOP.format(between=between))
    assert {node.name for node, fact in choices.facts(gm).items() if isinstance(fact, Mask)} == known


@pytest.mark.parametrize("mask", [
    "ids == 1", "(ids - 1) == 0", "~(ids != 1)", "(ids >= 1) & (ids < 2)", "(2 * ids) == 2", "(ids == 1).float() > 0",
    "F.one_hot(ids, 3)[..., 1].bool()", "(torch.arange(3) == ids[..., None])[:, :, 1]", "(ids ^ 1) == 0",
])  # fmt: skip
def test_masks_in_other_words(mask):
    assert named(f"    mask = {mask}\n    return (mask, w, x, ids == 2)")["mask"] == ("ids", 1, ("t0", "k"))


@pytest.mark.parametrize("mask", [
    "ids >= 1", "(ids == 1) & ((ids == 1).cumsum(0) <= 300)", "(ids == 1) & ((ids == 1).cumsum(0) <= 5)",
    "(ids == 1) & ((ids == 1).cumsum(0) <= 5000)", "(ids == 1) & (4096 > (ids == 1).cumsum(0))",
    "(ids == 1) & (w > 1e-5)",
    "(ids == 1) | (ids == 2)", "(ids == 1).flip(0)", "(ids == 1)[:-1]", "w > 0.5",
])  # fmt: skip
def test_other_masks_are_of_no_expert(mask):
    assert "mask" not in named(f"    mask = {mask}\n    return (mask, w, x, ids == 2)")


READ = """    t = (ids == 1).any(-1)
    other = torch.flip(x[:, 0], [0]).argsort()
    mine = ids[t] == 1
    scores = torch.where(mine, w[t], torch.zeros_like(w[t])).sum(-1, keepdim=True)
    return (x[t] * scores, ids == 2)"""


@pytest.mark.parametrize("source", [
    READ,
    READ.replace("torch.where(mine, w[t], torch.zeros_like(w[t]))", "(w[t] * mine.float())"),
    READ.replace("torch.where(mine, w[t], torch.zeros_like(w[t]))", "w[t].masked_fill(~mine, 0)"),
    READ.replace("sum(-1, keepdim=True)", "sum(1)[:, None]"),
], ids=["where", "product", "fill", "sum"])  # fmt: skip
def test_scores_at_the_tokens_of_an_expert(source):
    assert any(isinstance(fact, Read) for fact in facts_of(source).values())


@pytest.mark.parametrize("change", [
    ("ids[t]", "ids[other]"),
    ("mine = ids[t] == 1", "mine = ids[t] == ids[t]"),
    ("mine = ids[t] == 1", "mine = w[t] == 1"),
    ("    mine = ids[t] == 1", "    read = ids[t]\n    ids.add_(1)\n    mine = read == 1"),
], ids=["an order", "no number", "floats", "changed between"])  # fmt: skip
def test_other_scores_are_of_no_expert(change):
    assert change[0] in READ
    assert not any(isinstance(fact, Read) for fact in facts_of(READ.replace(*change)).values())


HEAD = """
def graph(x: "f32[s0, 8]", x_scores: "f32[s0, 3]"):
    topk = torch.topk(x_scores.softmax(-1), 2)
    w = topk[0]
    ids = topk[1]
"""


def facts_of(body):
    gm, _ = graph(HEAD + body)
    return choices.facts(gm)


def named(body):
    """{name: (routing, expert, dims)} of masks."""
    return {node.name: (fact.idx.name, fact.expert, fact.dims) for node, fact in facts_of(body).items()
            if isinstance(fact, Mask)}  # fmt: skip


def test_what_the_cpu_has_no_kernel_for_is_run_in_double():
    """Counts by histc of integers, as transformers has them on a GPU."""
    whole = torch.fx.Graph()
    ids = whole.placeholder("ids")
    counts = whole.call_function(torch.histc, (ids, 3, 0, 2))
    counts.meta["val"] = torch.empty(3, dtype=torch.int64)
    assert run_here(counts, {ids: torch.tensor([0, 1, 1])}).tolist() == [1, 2, 0]


@pytest.mark.parametrize("expert", range(12))
@pytest.mark.parametrize("k", [1, 4])
def test_a_bound_of_some_of_the_tokens_takes_tokens_away_of_each(expert, k):
    """Of the expert's share of the tokens, and a fourth of it."""
    source = HEAD.replace("[s0, 3]", "[s0, 12]").replace("(-1), 2)", f"(-1), {k})")
    body = f"""    own = (ids == {expert}).any(-1)
    mask = own & (own.cumsum(0) <= 5 * {k} * x.shape[0] // 48)
    return (mask, w, {", ".join(f"ids == {e}" for e in range(12))})"""
    gm, _ = graph(source + body)
    assert not any(node.name == "mask" for node in choices.facts(gm))


def test_a_bound_that_is_an_input_takes_tokens_away():
    body = """    own = ids == 1
    mask = own & (own.cumsum(0) <= bound)
    return (mask, w, x, ids == 2)"""
    gm, _ = graph(HEAD.replace('s0, 3]"', 's0, 3]", bound: "s1"') + body, sizes={"s0": 16, "s1": 64})
    assert [node.name for node, fact in choices.facts(gm).items() if isinstance(fact, Mask)] == ["own", "eq"]


def test_a_graph_that_did_not_change_is_not_run_again():
    gm, _ = graph(LOOP.format(between=""))
    found = choices.facts(gm)
    second = next(node for node in gm.graph.nodes if node.name == "second")
    with mock.patch.object(Draws, "learn", autospec=True, side_effect=Draws.learn) as learned:
        assert choices.facts(gm) == found
        assert learned.call_count == 0
        second.update_arg(1, 0)
        assert choices.facts(gm)[second].expert == 0
    assert [call.args[1] for call in learned.call_args_list] == [second, *second.users]


WRITTEN = """
def graph(x: "f32[s0, 8]", ids: "i64[s0]"):
    perm = ids.argsort(stable=True)
    places = torch.arange(x.shape[0])
    inverse = torch.empty_like(perm)
    inverse[perm] = places
    back = inverse.clone()
    return (back, x, ids == 0, ids == 1)
"""


def test_what_is_written_to_is_run_again_where_a_write_changed_and_only_there():
    gm, _ = graph(WRITTEN)
    found = choices.facts(gm)
    by_name = {node.name: node for node in gm.graph.nodes}
    with mock.patch.object(Draws, "learn", autospec=True, side_effect=Draws.learn) as learned:
        assert choices.facts(gm) == found
        assert learned.call_count == 0
        (write,) = gm.graph.find_nodes(op="call_function", target=operator.setitem)
        write.update_arg(1, by_name["places"])
        choices.facts(gm)
    again = [call.args[1].name for call in learned.call_args_list]
    assert again[:2] == ["inverse", write.name]  # which was written to: empty once more
    assert not {"perm", "places"} & set(again)


@pytest.mark.parametrize("between", ["", "x = x + F.one_hot(own, 8).sum(1)"])
def test_what_is_forgotten_is_known_again_where_it_is_asked_for(between):
    found, values = [], []
    for kept in (0, 2**30):
        gm, _ = graph(LOOP.format(between=between))
        with mock.patch.object(draws, "_KEPT", kept):
            found.append({node.name: str(fact) for node, fact in choices.facts(gm).items()})
            values.append({node.name: choices.drawn(gm, node) for node in gm.graph.nodes})
    assert found[0] == found[1]
    assert values[0].keys() == values[1].keys()
    for name, wanted in values[1].items():
        assert (values[0][name] is None) == (wanted is None)
        for each, other in zip(values[0][name] or (), wanted or ()):
            torch.testing.assert_close(each, other, rtol=0, atol=0)


def test_the_users_random_numbers_stay():
    gm, _ = graph(LOOP.format(between="own = own + torch.rand_like(x)[:, :2].long()"))
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    choices.facts(gm)
    torch.testing.assert_close(torch.rand(3), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("never", ["(ids == 2)", "F.one_hot(ids, 3)[..., 2].bool()"])
def test_experts_that_nobody_ever_chooses_have_masks(never):
    """Zeros and ones that are read as ids, as in NLLB-MoE: of four experts, two have no tokens in any call."""
    source = HEAD.replace("topk[1]", "(topk[1] > 0).long()") + f"    mask = {never}\n    return (mask, w, ids == 0)"
    gm, _ = graph(source)
    assert choices.facts(gm)[next(node for node in gm.graph.nodes if node.name == "mask")].expert == 2


def test_a_part_of_a_routing_is_none():
    """A column of one-hot ids that a capacity cut holds zeros and ones, which are no ids."""
    body = """    some = F.one_hot(ids, 3) * (F.one_hot(ids, 3).cumsum(0) <= 3)
    mask = some[:, :, 1].bool()
    return (mask, w, x)"""
    assert "mask" not in named(body)
