"""Volumes of the dialect: every op has one, and what it says is what the shapes say, counted by hand."""

from __future__ import annotations

import pytest
import sympy

from docs.make_map import home_of
from moefx.ir.op import REGISTRY, Volume, expr, lookup, value
from tests.support.graphs import graph
from tests.support.volumes import at, check_volume

# Every op of the dialect once or more, on an axis of 4 ranks with 2 slots each; s0 tokens, u0 rows received.
EVERY = """
def graph(x: "f32[s0, 16]", idx: "i64[s0, 2]", weights: "f32[s0, 2]", gate: "f32[8, 16]", up: "f32[2, 24, 16]",
          bias: "f32[2, 24]", stacked: "f32[8, 24, 16]", static: "f32[8, s1, 16]", table: "i64[8, 1]",
          twelve: "f32[2, 16, 12]", moves: "i64[8, 4]", old: "f32[8]", new: "f32[8]", capacity: "s1"):
    use_gate = materialize(gate, 'identity', 'ep', 0.25, 3)
    mine = expert_parameter(stacked, 0)
    both = stack([up, up])
    route = m.route.default(idx, 8, table)
    perm = route[0]
    counts = route[1]
    rows = m.dispatch.default(x, perm, 2)
    inside = enter(rows, counts, -1, -1, 0)
    outside = leave(inside, counts, -1, -1, 0)
    edge = layer_edge(x)
    again = layer_again([edge], [x], [x])
    choices = m.dispatch_choices.default(weights, perm)
    collected = m.collect_choices.default(choices, perm, 2)
    combined = m.combine.default(rows, perm, 2, weights)
    plain = m.combine.default(rows, perm, 2)
    grads = m.combine_backward.default(x, rows, weights, perm, 2)
    hot = m.one_hot.default(idx, 8)
    known = m.listed.default(idx.reshape(-1))
    seen = m.bincount.default(idx.reshape(-1), 8)
    traffic = m.exchange_counts.default(counts, 4, 'ep')
    copied = m.dump_counts.default(traffic, 4, 2, 'esp')
    copies = m.dump.default(rows, counts, 4, 2, -1, 'esp')
    added = m.local_combine.default(copies, counts, 4, 2, -1, 'esp')
    host = m.counts_to_host.default(traffic, 'ep')
    received = m.received_rows.default(host, 4, 'ep')
    leaving = m.sent_rows.default(host, 24, 4, 'ep')
    slots = m.slot_counts.default(traffic, 4, 'ep')
    arrived = m.all_to_all.default(rows, host, received, 4, 'ep', False)
    grouped = m.regroup.default(arrived, host, 4, 'ep', False)
    hidden = m.grouped_linear.default(grouped, up, slots, False)
    shifted = m.grouped_linear.default(grouped, up, slots, False, bias)
    back = m.grouped_linear.default(hidden, up, slots, True)
    wgrad = m.grouped_wgrad.default(grouped, hidden, slots, False)
    summed = m.grouped_wgrad.default(grouped, hidden, slots, False, wgrad)
    acted = m.gated.default('swiglu', [hidden], False, None, None)
    unacted = m.gated_backward.default(acted, 'swiglu', [hidden], False, None, None)
    clamped = m.gated.default('clamped', [hidden, shifted], False, 7.0, 1.7)
    layer = m.expert_layer.default('swiglu', x, weights, up, twelve, perm, slots, False, None, None)
    unlayer = m.expert_layer_backward.default(x, 'swiglu', x, weights, up, twelve, perm, slots, layer[1], False,
                                              None, None)
    spread = m.expert_rows.default(bias, slots, received)
    gathered = m.expert_rows_backward.default(hidden, slots)
    sizes = m.exchange_sizes.default(capacity, 4, 'ep')
    total = m.total_size.default(sizes)
    blocks = m.all_to_all_capacity.default(static, sizes, total, 0, 1, 4, 'ep', False)
    reduced = m.reduce_gradient.default(wgrad, 'dp+ep', 0.25, 4)
    bucket = m.reduce_gradients.default([wgrad, gate], 'dp+ep', 0.25, [4, 5])
    statistic = m.sum_statistic.default(old, new, 'ep')
    between = m.phase_rows.default(host, 4, 'ep', 2, '2dh', 'intra', False)
    phase = m.exchange_phase.default(rows, host, between, 4, 'ep', 2, '2dh', 'intra', False)
    packed = m.repack.default([phase], host, between, 4, 'ep', 2, '2dh', 'by_node', False)
    coded = m.encode.default(rows, 'int8')
    decoded = m.decode.default(coded, 'int8', 16, torch.float32)
    pairs = m.block_traffic.default(sizes, [8, 3, 16], 0, 1, 4, 'ep', False)
    flat = m.pack_blocks.default(static, sizes, 0, 1, 4, 'ep', False)
    unflat = m.unpack_blocks.default(flat, sizes, [2, 12, 16], 0, 1, 4, 'ep', False)
    own = m.own_experts.default(static, 4, 'ep')
    shared = m.shared_rows.default(idx, table)
    load = m.expert_load.default(traffic, table)
    by_table = m.own_experts.default(static, 4, 'ep', table, 3)
    others = m.own_experts_backward.default(own, 4, 'ep')
    varied = vary(static, 'mp')
    cut = m.own_part.default(varied, 2, [16], 4, 'mp')
    whole = m.own_part_backward.default(cut, 2, [16], 4, 'mp')
    summed = m.sum_parts.default(whole, 'mp')
    mine = m.own_copy.default(rows, 4, 'mp')
    common = m.common_copy.default(mine, 4, 'mp')
    share = m.num_own_rows.default(x, 0, 4, 'mp')
    of_chunk = m.num_chunk_rows.default(x, 0, 1, 4)
    mine_rows = m.own_rows.default(x, share, 0, 4, 'mp')
    all_of_x = m.all_rows.default(mine_rows, x.size(0), 0, 4, 'mp')
    for_columns = m.vary_rows.default(mine_rows, x.size(0), 0, 4, 'mp')
    sum_of_mine = m.sum_own_rows.default(for_columns, share, 0, 4, 'mp')
    other_sizes = m.exchange_sizes.default(x.size(0), 4, 'esp')
    rows_of_all = m.total_size.default(other_sizes)
    of_all = m.gather_rows.default(x, other_sizes, rows_of_all, 0, 4, 'esp')
    of_one = m.scatter_rows.default(of_all, other_sizes, x.size(0), 0, 4, 'esp')
    kept = m.keep_rows.default(of_all, other_sizes, x.size(0), 0, 4, 'esp')
    with_zeros = m.keep_rows_backward.default(kept, other_sizes, rows_of_all, 0, 4, 'esp')
    rows_sum = m.sum_rows.default(grouped, slots, -1, 'esp')
    near = m.all_to_all.default(rows, host, received, 4, 'ep', False, 'intra', 2)
    across = m.across_places.default(host, 4, 'esp')
    within = m.within_place.default(host, 4, 'ep')
    at_all = m.gather_parts.default(x, other_sizes, rows_of_all, 0, 4, 'esp')
    at_one = m.scatter_parts.default(at_all, other_sizes, x.size(0), 0, 4, 'esp')
    looked = m.own_embedding.default(gate, idx, -1, 4, 'mp')
    unlooked = m.own_embedding_backward.default(looked, idx, 8, -1, 4, 'mp')
    terms = m.label_terms.default(x, idx[:, 0], -100, 4, 'mp')
    unterms = m.label_terms_backward.default(terms, x, idx[:, 0], terms, -100, 4, 'mp')
    lost = loss_of_parts(x, idx[:, 0], torch.float32, -100, 'mean', 0.0, 4, 'mp')
    fetched = m.gather_experts.default([up, bias], moves, 2, 3, 4, 'ep', None, None)
    more = m.add_experts.default([fetched[0], fetched[1]], [up, bias], moves, moves, 2, 3, 4, 'ep', None)
    sent_home = m.scatter_experts.default([fetched[0], fetched[1]], moves, 2, 3, 4, 'ep', None)
    put_together = m.gather_weights.default(up, 'dim 1 of 96 over ep', 4, 'ep', None)
    cut_again = m.scatter_weights.default(put_together, [2, 24, 16], 'dim 1 of 96 over ep', 4, 'ep', torch.float32)
    begun = start(m.all_to_all.default, rows, host, received, 4, 'ep', False)
    done = wait(begun)
    return (done,)
"""
# Tokens, places per expert, rows received, rows held between two steps, rows of a share.
T, C, R, HELD, SHARE = 12, 6, 28, 20, 3
F32, I64 = 4, 8


@pytest.fixture(scope="module")
def nodes():
    gm, _ = graph(EVERY)
    return {node.name: node for node in gm.graph.nodes}


def numbers(nodes) -> dict[sympy.Symbol, int]:
    """The numbers above for the symbols of the graph."""
    (tokens,) = expr(value(nodes["x"]).shape[0]).free_symbols
    found = {tokens: T}
    for name, number in (("capacity", C), ("received", R), ("share", SHARE), ("between", HELD), ("total", 4 * C),
                         ("rows_of_all", 4 * T)):  # fmt: skip
        found[expr(value(nodes[name]))] = number
    return found


def volume(nodes, name: str) -> Volume:
    return lookup(nodes[name]).volume(nodes[name])


def test_every_op_has_a_volume_that_is_a_number_once_the_sizes_are(nodes):
    of_core = {op.target for op in REGISTRY.values() if not home_of(op).__name__.startswith("moefx.features.")}
    assert {n.target for n in nodes.values()} & set(REGISTRY) == of_core
    known = numbers(nodes)
    for node in nodes.values():
        check_volume(node, known)


@pytest.mark.parametrize(("name", "rows", "inner", "outer"), [
    ("hidden", R, 16, 24),
    ("back", R, 24, 16),  # of a transposed weight
    ("wgrad", R, 16, 24),
])  # fmt: skip
def test_flops_of_grouped_matmuls(nodes, name, rows, inner, outer):
    multiplications = sum(1 for _ in range(rows) for _ in range(inner) for _ in range(outer))
    found, known = volume(nodes, name), numbers(nodes)
    assert at(found.flops, known) == 2 * multiplications
    weights = 2 * inner * outer  # of two slots: read, or written as their gradient
    assert at(found.hbm_bytes, known) == F32 * (rows * inner + rows * outer + weights)


def test_twice_the_rows_are_twice_the_flops(nodes):
    known = numbers(nodes)
    doubled = {**known, expr(value(nodes["received"])): 2 * R}
    for name in ("hidden", "back", "wgrad"):
        assert at(volume(nodes, name).flops, doubled) == 2 * at(volume(nodes, name).flops, known)


@pytest.mark.parametrize(("name", "axis", "nbytes", "messages"), [
    # every one of 3 others gets my 8 counts
    ("traffic", "ep", 3 * 8 * I64, 3),
    # 2 choices per token, 16 wide; of 4 equal parts one stays
    ("arrived", "ep", 3 * (2 * T // 4) * 16 * F32, 3),
    # 8 experts, 2 stay
    ("blocks", "ep", (8 - 2) * C * 16 * F32, 3),
    ("sizes", "ep", 3 * I64, 3),
    # a ring: every part of the buffer leaves twice
    ("reduced", "dp+ep", 2 * (2 * 24 * 16) * F32, 1),
    ("statistic", "ep", 2 * 8 * F32, 1),
    # as many experts as a rank has room for copies: one
    ("fetched", "ep", (24 * 16 + 24) * F32, 1),
    ("sent_home", "ep", (24 * 16 + 24) * F32, 1),
    # of 30 rows of 16 the first rank has 8, and all send as many to 3 others; a gradient stays with 30 / 4 on average
    # within nodes of two ranks: half of the rows
    ("near", "ep", (2 * T // 2) * 16 * F32, 1),
    ("phase", "ep", (2 * T // 2) * 16 * F32, 1),
])  # fmt: skip
def test_bytes_on_the_wire(nodes, name, axis, nbytes, messages):
    found, known = volume(nodes, name), numbers(nodes)
    assert {a: at(b, known) for a, b in found.wire_bytes.items()} == {axis: nbytes}
    assert {a: at(b, known) for a, b in found.messages.items()} == {axis: messages}
    assert found.flops == found.hbm_bytes == 0


def test_half_the_bytes_in_half_the_precision(nodes):
    half = EVERY
    for name in ("x", "weights", "gate", "up", "bias", "stacked", "static"):
        assert f'{name}: "f32[' in half
        half = half.replace(f'{name}: "f32[', f'{name}: "bf16[')
    gm, _ = graph(half.replace("torch.float32)", "torch.bfloat16)"))
    halves = {node.name: node for node in gm.graph.nodes}
    for name in ("arrived", "blocks", "reduced", "phase"):
        (whole,) = volume(nodes, name).wire_bytes.values()
        (found,) = volume(halves, name).wire_bytes.values()
        assert 2 * at(found, numbers(halves)) == at(whole, numbers(nodes))
    for name in ("hidden", "wgrad"):
        whole, found = volume(nodes, name), volume(halves, name)
        assert at(found.flops, numbers(halves)) == at(whole.flops, numbers(nodes))
        assert 2 * at(found.hbm_bytes, numbers(halves)) == at(whole.hbm_bytes, numbers(nodes))


@pytest.mark.parametrize(("name", "flops", "nbytes"), [
    ("rows", 0, F32 * (T * 16 + 2 * T * 16) + I64 * 2 * T),
    ("combined", 2 * 2 * T * 16, F32 * (2 * T * 16 + 2 * T + T * 16) + I64 * 2 * T),
    ("choices", 0, F32 * (2 * T + 2 * T) + I64 * 2 * T),
    ("route", 0, I64 * (2 * T + 8 + 2 * T + 8)),  # choices and table, order and counts
    ("grouped", 0, 2 * R * 16 * F32),
    ("spread", 0, F32 * (2 * 24 + R * 24) + I64 * 2),
    ("acted", 0, F32 * R * (24 + 12)),
    ("unacted", 0, F32 * R * (12 + 24 + 24)),
    ("layer", 6 * 2 * T * 12 * 16, F32 * (T * 16 + 2 * T + 2 * (24 + 12) * 16 + 4 * T * (16 + 12) + T * 16 + 2 * T * 24)
     + I64 * (2 * T + 2)),
    ("clamped", 0, F32 * R * 3 * 24),
    ("host", 0, 4 * 8 * I64),
    ("coded", None, F32 * 2 * T * 16 + 2 * T * (16 + F32)),  # int8 and a float as scale, per row
])  # fmt: skip
def test_bytes_of_memory(nodes, name, flops, nbytes):
    found, known = volume(nodes, name), numbers(nodes)
    assert at(found.hbm_bytes, known) == nbytes
    assert flops is None or at(found.flops, known) == flops


def test_a_sum_over_no_axis_sends_nothing():
    gm, _ = graph("""
        def graph(grad: "f32[8, 16]"):
            alone = m.reduce_gradient.default(grad, '', 1.0, 0)
            return (alone,)
    """)
    node = next(n for n in gm.graph.nodes if n.name == "alone")
    assert lookup(node).volume(node) == Volume()


def test_markers_halves_and_homes_move_nothing(nodes):
    for name in ("use_gate", "mine", "both", "inside", "outside", "begun", "done", "received", "leaving", "total"):
        assert volume(nodes, name) == Volume(), name
