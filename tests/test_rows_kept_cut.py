"""Rows that stay cut over `mp` between layers (sequence parallelism): numbers of the whole model, and what travels."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest

import moefx
from tests.support.models import chosen, shallow
from tests.support.scenarios import (
    check_accumulation,
    check_compiled,
    check_rounding,
    check_steps,
    compiled_case,
    reads,
    reference_rounding,
    steps_of,
)
from tests.support.sharing import run_sharing

UNEVEN, FEW = [(2, 6), (3, 5)], [(1, 3), (3, 7)]
MP, MP_EP, DP_MP = ((2,), ("mp",)), ((2, 2), ("mp", "ep")), ((2, 2), ("dp", "mp"))
MP4 = ((4,), ("mp",))


def rows(**options):
    return partial(moefx.compile, options=moefx.Options.named(rows=True, **options))


# A loss of the router; sinks and biases; low ranks and shared experts; norms of heads; norms over heads.
STYLES = ["mixtral-router_logits", "gpt_oss-grouped_mm", "deepseek_v3-eager", "qwen3_moe-eager", "olmoe-grouped_mm",
          "loop-shared", "gshard-grouped"]  # fmt: skip


@pytest.mark.parametrize("name", chosen(["loop-shared"], STYLES))
def test_every_style(name):
    case = shallow(name)
    shapes = [[(2, 8), (2, 8)]] if name.startswith("gshard") else [UNEVEN, FEW]
    run_sharing(4, check_steps, MP_EP, case, steps_of(case, shapes), rows())


@pytest.mark.parametrize(("layout", "options"), [
    (DP_MP, {"ep": 2, "esp": 2, "split": "s1", "chunks": 2}),
    pytest.param(MP4, {"ep": 2, "esp": 2}, marks=pytest.mark.full),
    pytest.param(((2, 2), ("mp", "esp")), {"split": "s1"}, marks=pytest.mark.full),
    pytest.param(((2, 2), ("mp", "esp")), {"split": "s3"}, marks=pytest.mark.full),
    pytest.param(MP4, {"dynamic": False}, marks=pytest.mark.full),
    pytest.param(DP_MP, {"verify": 2}, marks=pytest.mark.full),
    pytest.param(DP_MP, {"keep": "lean", "split": "s2-tokens"}, marks=pytest.mark.full),
    pytest.param(MP, {"split": "baseline"}, marks=pytest.mark.full),
], ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else "-".join(each[1]))  # fmt: skip
def test_meshes_and_options(layout, options):
    case = shallow("gpt_oss-grouped_mm")
    world = 2 if layout == MP else 4
    shapes = [UNEVEN[:1]] if "dynamic" in options else [FEW[: 1 + reads(world - 1, layout)]]
    run_sharing(world, check_steps, layout, case, steps_of(case, shapes), rows(**options))


@pytest.mark.full
def test_several_forwards():
    case = shallow("mixtral-router_logits")
    run_sharing(4, check_accumulation, MP_EP, case, steps_of(case, [UNEVEN, FEW]), rows())


def _travels(rank: int, world: int, layout, case, steps) -> list[list[tuple[str, int]]]:
    """The collectives over mp of a forward and of a backward."""
    with closing(compiled_case(case, layout, rows())) as compiled:
        check_compiled(rank, layout, case, steps, compiled)
        compiled._session.trace.clear()
        out = compiled(**steps[0][0][0])
        forward = list(compiled._session.trace)
        compiled._session.trace.clear()
        out.loss.backward()
        return [[(sent.kind, sent.num_bytes) for sent in part if sent.region in ("rows", "tokens", "partial sums")]
                for part in (forward, compiled._session.trace)]  # fmt: skip


def test_what_travels():
    """Of T tokens and D numbers each, (n-1)/n T D numbers by a gather before attention, and as many by a
    reduce-scatter behind it; nothing around the experts. What is read whole at the end is gathered; the embeddings'
    gradient is."""
    case = shallow("mixtral-grouped_mm")
    config = case.build().config
    layers = config.num_hidden_layers
    half = 2 * 6 * config.hidden_size * 4 // 2
    for forward, backward in run_sharing(2, _travels, MP, case, steps_of(case, [[(2, 6)]])):
        wanted = sorted([("all_gather", half)] * (layers + 1) + [("reduce_scatter", half)] * layers)
        assert sorted(forward) == sorted(backward) == wanted


@pytest.mark.full
def test_half_precision():
    case = shallow("mixtral-grouped_mm")
    run_sharing(2, _rounds, case, reference_rounding(case, 1))


def _rounds(rank: int, world: int, case, wanted) -> None:
    check_rounding(0, world, MP, case, wanted, rows())
