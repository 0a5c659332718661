"""Hecate's layer-wise speed-ups from `moefx.placement`: its algorithms, its baselines and ours under one score.

    python benchmarks/papers/hecate.py [--out benchmarks/results/hecate_papers.md]

GPT-MoE-S on the paper's clusters: A, 4 nodes of 8 V100 and 100 Gb/s per node; B, 4 nodes of 8 A100 and 400 Gb/s per
node. 64 experts, top 2, width 768, hidden 1536 without gates, 2048 tokens a sequence. Assumed, since the paper does not
say: 4 sequences per GPU (its figure 14 goes up to 6) and 12 heads; 40 % of the data sheet's half-precision rate for
products and 80 % of the links' rates; attention that is not fused, so scores go through memory 6 times; parameters and
gradients of two bytes; room for 9 copies per GPU, which makes its parameters of experts 5.5 times those of expert
parallelism (5.73 in section 5.3); copies gathered again for the backward, behind attention, by broadcasts that reach
one node after the other (NCCL's), and reduced likewise.

Loads are synthetic: for each of 12 layers a Zipf law over experts in an order that is drawn, whose logarithms walk by
0.03 per step. Plans are made from the mean of five steps, the last of them two steps old, and scored on real loads.

    EP        experts where they are
    Smart     SmartMoE-like: homes permuted, the heaviest expert with the lightest, no copies
    Flex      FlexMoE-like: 2 copies per GPU by greedy slots that stay; rows go evenly to all copies of an expert; the
              gradients' all-reduce is exposed
    Faster    FasterMoE-like: the hottest experts on all GPUs, as many as pay off, known after the gate, hence exposed
    Hecate    algorithms 1 and 2 and its dispatch
    auto      moefx: `decide.plan("auto")` on the same homes as Hecate

The baselines are crude: ideas of the papers, without their systems' own costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from common import Claim, claims_table, write

from moefx.features.hecate.materialise import materialise
from moefx.features.rehoming.reshard import reshard
from moefx.placement import balance, decide, quotas, score, tables
from moefx.placement.loads import Window
from moefx.placement.score import Costs

RANKS, PER_NODE, EXPERTS, LAYERS, SPARE = 32, 8, 64, 12, 9
WIDTH, HIDDEN, LENGTH, BATCH, HEADS, TOP = 768, 1536, 2048, 4, 12, 2
TOKENS = BATCH * LENGTH
SKEWS = (0.5, 1.0, 1.5, 2.0)
SYSTEMS = ("Smart", "Flex", "Faster", "Hecate", "auto")
PAPER = {"A": (1.34, 1.78), "B": (1.26, 1.7)}  # the whole step, 32 GPUs


@dataclass(frozen=True)
class Broadcasts(Costs):
    """Copies go from node to node, and from rank to rank within a node: nobody sends an expert to two ranks there."""

    def gathers(self, held: np.ndarray, owners: Sequence[int], per_node: int) -> tuple[float, float]:
        new = held & ~balance.homes(owners, RANKS)
        inner = new.sum(0).max()  # what a rank receives, at most
        nodes = held.reshape(len(held), -1, per_node).any(2)
        nodes[np.arange(len(held)), np.asarray(owners) // per_node] = False
        outer = nodes.sum(0).max() / per_node
        calls = inner * self.message[0] + outer * per_node * self.message[1]
        each = inner * self.byte[0] + outer * self.byte[1]
        forward = calls + each * self.expert_bytes
        return forward, calls + each * self.gradient_bytes + (forward if self.again else 0.0)


@dataclass(frozen=True)
class Cluster:
    """Data sheet: FLOP/s in half precision; bytes per second of a GPU's memory, of a GPU within its node, and of a
    node's network; GPUs that share a network card."""

    flops: float
    memory: float
    within: float
    between: float
    per_card: int

    @property
    def attention(self) -> float:
        """Seconds of a forward: four products of the width, two of the length, half of them masked; six times scores of
        two bytes."""
        products = TOKENS * (8 * WIDTH**2 + 2 * LENGTH * WIDTH) / (0.4 * self.flops)
        return products + 6 * 2 * HEADS * TOKENS * LENGTH / self.memory

    @property
    def costs(self) -> Costs:
        expert = 2 * WIDTH * HIDDEN
        return Broadcasts(
            row=3 * 2 * expert / (0.4 * self.flops), row_bytes=2 * WIDTH, expert_bytes=2 * expert,
            gradient_bytes=2 * expert, byte=(1 / (0.8 * self.within), PER_NODE / (0.8 * self.between)),
            message=(3e-6, 12e-6), per_card=self.per_card, hidden=(self.attention, 2 * self.attention), again=True,
        )  # fmt: skip


CLUSTERS = {"A": Cluster(125e12, 900e9, 150e9, 12.5e9, 8), "B": Cluster(312e12, 1555e9, 300e9, 50e9, 2)}


@dataclass(frozen=True)
class Layer:
    """Rows [n, E] as expected and as they come; where Hecate's homes are."""

    expected: np.ndarray
    real: np.ndarray
    homes: tuple[int, ...]


def layers(s: float) -> list[Layer]:
    rng, even = np.random.default_rng(int(10 * s)), tables.contiguous(EXPERTS, RANKS)
    traces = [[*trace(rng, s)] for _ in range(LAYERS)]
    windows = [Window() for _ in traces]
    for window, each in zip(windows, traces):
        for loads in each[:5]:
            window.add(loads)
    expected = [window.mean() for window in windows]
    homes = reshard(np.stack([each.sum(0) for each in expected]), [even] * LAYERS, RANKS, PER_NODE, [4] * LAYERS)
    return [Layer(one, each[-1], at) for one, each, at in zip(expected, traces, homes)]


def trace(rng: np.random.Generator, s: float, steps: int = 7) -> Iterator[np.ndarray]:
    popular = rng.permutation(-s * np.log(np.arange(1, EXPERTS + 1)))
    for _ in range(steps):
        popular = popular + 0.03 * rng.standard_normal(EXPERTS)
        yield rng.multinomial(TOP * TOKENS, np.exp(popular) / np.exp(popular).sum(), size=RANKS)


def under(plan: tables.Plan, layer: Layer, costs: Costs, room: int, spare: int) -> tuple[float, float]:
    """Seconds of the layer and of its exchanges under a plan."""
    seconds = score.of(plan, layer.real, room + spare, costs, PER_NODE)
    return seconds, score.EXCHANGES * costs.exchange(plan.traffic(layer.real, room + spare), PER_NODE)


def ep(layer: Layer, costs: Costs) -> tuple[float, float]:
    return under(tables.homes_only(tables.contiguous(EXPERTS, RANKS), RANKS, 2), layer, costs, 2, 0)


def smart(layer: Layer, costs: Costs) -> tuple[float, float]:
    order = np.argsort(-layer.expected.sum(0), kind="stable")
    ranks = np.arange(RANKS).reshape(-1, PER_NODE).T.flatten()  # nodes in turn
    owners = np.zeros(EXPERTS, dtype=int)
    owners[order[:RANKS]], owners[order[: RANKS - 1 : -1]] = ranks, ranks
    return under(tables.homes_only(tuple(owners), RANKS, 2), layer, costs, 2, 0)


def flex(layer: Layer, costs: Costs) -> tuple[float, float]:
    owners, spare = tables.contiguous(EXPERTS, RANKS), 2
    held = balance.greedy(layer.expected.sum(0), owners, RANKS, spare, RANKS, EXPERTS)
    [quota] = quotas.dispatch(["node"], layer.expected, held, owners, RANKS)  # as if all were one node: evenly
    plan = _plan(quota, held, owners, 2, spare)
    return under(plan, layer, replace(costs, hidden=(0, 0), again=False), 2, spare)


def faster(layer: Layer, costs: Costs) -> tuple[float, float]:
    owners, found = tables.contiguous(EXPERTS, RANKS), ep(layer, costs)
    for top in range(1, 33):
        held = materialise(layer.real.sum(0), owners, RANKS, top, top, PER_NODE)
        [quota] = quotas.dispatch(["local"], layer.real, held, owners, PER_NODE)
        plan = _plan(quota, held, owners, 2, top)
        found = min(found, under(plan, layer, replace(costs, hidden=(0, 0), again=False), 2, top))
    return found


def ours(policy: str, layer: Layer, costs: Costs) -> tuple[float, float]:
    plan = decide.plan(policy, layer.expected, layer.homes, (4, SPARE), costs, PER_NODE)
    return under(plan, layer, costs, 4, SPARE)


def _plan(quota: np.ndarray, held: np.ndarray, owners: tuple[int, ...], room: int, spare: int) -> tables.Plan:
    return tables.of(quota, quotas.copied(held), tables.slots_of(held, owners, room, spare), room + spare)


def times(layer: Layer, costs: Costs) -> dict[str, tuple[float, float]]:
    return {"EP": ep(layer, costs), "Smart": smart(layer, costs), "Flex": flex(layer, costs),
            "Faster": faster(layer, costs), "Hecate": ours("hecate", layer, costs),
            "auto": ours("auto", layer, costs)}  # fmt: skip


def mean(values: list[float]) -> float:
    """The geometric one."""
    return float(np.exp(np.mean(np.log(values))))


Found = dict[tuple[str, float], list[dict[str, tuple[float, float]]]]


@cache
def made(s: float) -> list[Layer]:
    return layers(s)


@cache
def found() -> Found:
    """`times` of every layer, by (cluster, skew); takes a minute."""
    return {(name, s): [times(layer, cluster.costs) for layer in made(s)]
            for name, cluster in CLUSTERS.items() for s in SKEWS}  # fmt: skip


def whole_step(name: str, s: float) -> float:
    """Hecate over EP with attention counted, of all layers."""
    rest, here = 3 * CLUSTERS[name].attention, found()[name, s]
    return sum(each["EP"][0] + rest for each in here) / sum(each["Hecate"][0] + rest for each in here)


def report() -> str:
    """The tables in Markdown."""
    lines = [
        "# Hecate: layer-wise speed-ups from the score of placement", "",
        "Made by `python benchmarks/papers/hecate.py`, whose docstring says what was assumed.", "",
        *claims_table(claims()), "", "Over all four skews: the paper does not say how skewed its layers are.", "",
        f"`auto` takes {auto_share():.2f} of Hecate's time (geometric mean of all layers).", "",
        "A speed-up of 11.87 of single layers with one of 1.70 for the whole step means that these layers are less "
        "than half of a step under EP; but figure 12 of the paper has the exchange dominate. Under this model the "
        "layers are most of the step, so both figures cannot hold at once: the paper's may be of different baselines.",
        "", "## All skews", "",
        "Speed-ups over expert parallelism, geometric means over 12 layers; in brackets the layers' least and largest.",
        "",
        "| cluster | zipf | busiest rank under EP / mean | " + " | ".join(SYSTEMS)
        + " | exchanges, Hecate | whole step, Hecate | paper's |", "|---" * (len(SYSTEMS) + 6) + "|",
    ]  # fmt: skip
    for (name, s), here in found().items():
        rows = [each.real.sum(0).reshape(RANKS, -1).sum(1) for each in made(s)]
        busy = np.mean([each.max() / each.mean() for each in rows])
        cells = []
        for system in SYSTEMS:
            gains = [each["EP"][0] / each[system][0] for each in here]
            band = f" ({min(gains):.1f} to {max(gains):.1f})" if system in ("Hecate", "auto") else ""
            cells.append(f"{mean(gains):.2f}{band}")
        exchanges = mean([each["EP"][1] / each["Hecate"][1] for each in here])
        lines.append(f"| {name} | {s} | {busy:.1f} | {' | '.join(cells)} | {exchanges:.1f} | {whole_step(name, s):.2f} "
                     f"| {PAPER[name][0]:.2f} to {PAPER[name][1]:.2f} |")  # fmt: skip
    return "\n".join([*lines, ""])


def auto_share() -> float:
    return mean([each["auto"][0] / each["Hecate"][0] for layers in found().values() for each in layers])


def claims() -> list[Claim]:
    """The paper's figures of single layers, and of whole steps, beside ours."""
    band = [each["EP"][0] / each["Hecate"][0] for s in SKEWS for each in found()["B", s]]
    sent = mean([each["EP"][1] / each["Hecate"][1] for s in SKEWS for each in found()["B", s]])
    best = mean([min(each[system][0] for system in SYSTEMS[:3]) / each["Hecate"][0]
                 for s in SKEWS for each in found()["A", s]])  # fmt: skip
    skews, mild = "", "the mildest of the four skews"
    return [
        Claim("fig. 11", "layers of GPT-MoE-S on B, over EP, least", 2.8, min(band), 0.25, skews),
        Claim("fig. 11", "largest", 18.8, max(band), 0.25, skews, "the steepest skew is steeper than theirs"),
        Claim("fig. 11", "geometric mean", 11.87, mean(band), 0.25, skews),
        Claim("fig. 12", "exchanges on B, over EP", 12.3, sent, 0.25, skews, "the paper: BERT-MoE-Deep"),
        Claim("5.2", "over the best baseline, A, 32 GPUs", 2.05, best, 0.25, skews,
              "the paper: whole steps; our baselines lack their systems' own costs"),
        *(Claim(where, f"whole step on {name}, over EP", PAPER[name], whole_step(name, SKEWS[0]), 0.1, mild)
          for name, where in (("A", "fig. 9"), ("B", "fig. 10"))),
    ]  # fmt: skip


if __name__ == "__main__":
    write(report, "hecate_papers.md", __doc__)
