"""Evaluating parts of a graph on the CPU, where the model may run on a GPU."""

from __future__ import annotations

import torch
from torch import fx

from moefx.analysis.checking.evaluate import Evaluator


def test_what_the_cpu_has_no_kernel_for_is_done_in_double_precision():
    """On a GPU transformers counts the rows of experts by histc of integers."""
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    counts = graph.call_function(torch.histc, (ids,), {"bins": 4, "min": 0, "max": 3})
    graph.output(counts)
    given = torch.tensor([0, 3, 3, 1, 3], dtype=torch.int32)
    counts.meta["val"] = torch.empty(4, dtype=torch.int32)
    (found,) = Evaluator({}, {ids: given}).run([counts])
    assert torch.equal(found, torch.tensor([1, 1, 0, 3], dtype=torch.int32))


def test_what_a_model_makes_on_its_gpu_is_made_here():
    graph = fx.Graph()
    perm = graph.placeholder("perm")
    places = graph.call_function(torch.arange, (3,), {"device": torch.device("cuda", 0)})
    inverse = graph.call_method("index_put", (perm, [perm], places))
    graph.output(inverse)
    (found,) = Evaluator({}, {perm: torch.tensor([2, 0, 1])}).run([inverse])
    assert torch.equal(found, torch.tensor([1, 2, 0]))


def test_what_is_given_stays_as_it_is_where_ops_write_to_it():
    """A check runs a region several times on the same values: written to, they would be others in the second run."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    flat = graph.call_method("view", (rows, -1))
    written = graph.call_method("mul_", (flat, 2.0))
    graph.output((written, rows))
    given = torch.ones(2, 3, requires_grad=True)
    known = {rows: given}
    for _ in range(2):
        (found,) = Evaluator({}, known).run([written])
        assert torch.equal(found, torch.full((6,), 2.0))
    assert known == {rows: given}
    assert torch.equal(given, torch.ones(2, 3))
