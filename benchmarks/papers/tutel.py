"""Tutel's crossovers from the cost model: parallelism r (figure 12), 2DH (figure 18), the layout's 11x (section 2.4),
and what its parts bring one layer (figure 14, table 6). Figures of the paper: Hwang et al., MLSys 2023.

    python benchmarks/papers/tutel.py [--out benchmarks/results/tutel_papers.md]

The machine is the preset `tutel-a100`: data sheets, with two figures that are assumed, 3 us and 12 us a message within
and between nodes, and one from this paper: a product of 8 rows reaches 8.8 % of a large one's rate, which makes a dim
of 83 halve the rate. Half precision everywhere; k = 2 where the paper gives none, which its section 5.2 has.

    r       T(r) of `features.adaptive.closed_form`, the paper's table 4 with both directions. Ranks of one expert are
            neighbours, as in Tutel's code, so gathers stay on a node ("near"), or lie on different nodes ("far").
    2DH     direct: n - 1 messages; 2DH: a copy, an exchange in the node, a copy, an exchange between nodes.
    layer   forward and backward of one layer: 4 exchanges of S bytes; products of E_g experts on rows that lie as the
            all-to-all leaves them, one product of each source's rows (Fairseq), or as one (flexible); encoding and
            decoding as dense products [E C, T] x [T, D] (Fairseq, figure 20a; two forward, three backward, and six
            passes over their mask) or as one pass over the rows. Pipelining in OptSche's order, which Tutel's is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

import sympy
from common import Claim, all_to_all, claims_table, pipelined, table, write

from moefx.axes import MeshSpec
from moefx.costmodel.curves import AlphaBeta
from moefx.costmodel.machine import Machine
from moefx.costmodel.machines import preset
from moefx.costmodel.ways import Q
from moefx.features.adaptive import closed_form as adaptive
from moefx.features.adaptive.closed_form import P

A100 = preset("tutel-a100")
MIB, HALF = 2**20, 2
PER_NODE = A100.ranks_per_node
FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
RANKS, EXPERTS, WIDTH = 64, 16, 2048  # W, E and D of figure 12
CONFIGS = {"Base": (4096, 2048), "Large": (1024, 32768)}  # tokens and H
DEGREES, ALGORITHMS = (1, 2, 4, 8), ("direct", "2dh")
MESSAGE_US = 1e6 * A100.curve("all_to_all", "inter", "direct").segments[0].alpha_s


# ---- r


def mesh(near: bool) -> MeshSpec:
    sizes = {"ep": EXPERTS, "esp": RANKS // EXPERTS}
    return MeshSpec.named(sizes if near else dict(reversed(sizes.items()))).divided()


@cache
def _formula(r: int, near: bool) -> Callable[[float, float], float]:
    """T(r) in seconds, of bytes of rows and of weights on a rank."""
    return sympy.lambdify((Q, P), adaptive.seconds(mesh(near), r, A100), "math")


def _bytes(factor: float, config: str, k: int) -> tuple[float, float]:
    """Of a rank's rows, and of the experts' weights that live on it."""
    tokens, hidden = CONFIGS[config]
    return factor * k * tokens * WIDTH * HALF, 2 * WIDTH * hidden * HALF * EXPERTS / RANKS


def step_of_r(r: int, factor: float, config: str, k: int = 1, *, near: bool = True) -> float:
    """Seconds of communication of a step, forward and backward."""
    return _formula(r, near)(*_bytes(factor, config, k))


def best_r(factor: float, config: str, k: int, *, near: bool) -> int:
    return min((0, 1, 2, 4), key=lambda r: step_of_r(r, factor, config, k, near=near))


@cache
def crossover_of_p1(config: str, k: int, *, near: bool) -> float:
    """The capacity factor above which r = 1 (P1: expert and data parallel) is faster than r = W / E (P2)."""
    return adaptive.crossover(mesh(near), A100, *_bytes(1.0, config, k))


@cache
def found_r() -> dict[tuple[str, int, bool], list[int]]:
    """The best r of every factor, by (configuration, k, near)."""
    return {(config, k, near): [best_r(f, config, k, near=near) for f in FACTORS]
            for near, config, k in itertools.product((True, False), CONFIGS, (1, 2))}  # fmt: skip


# ---- 2DH


@cache
def exchange(nbytes: float, ranks: int, algorithm: str, message_us: float = MESSAGE_US) -> float:
    return all_to_all(_with_messages(message_us), nbytes, ranks, algorithm)


@cache
def _with_messages(microseconds: float) -> Machine:
    """The machine where a message between nodes takes so long."""
    key = ("all_to_all", "inter", "direct")
    curve = AlphaBeta.of(1e-6 * microseconds, A100.collectives[key].segments[0].beta_s_per_byte)
    return replace(A100, collectives={**A100.collectives, key: curve})


def gain_of_2dh(mebibytes: int, ranks: int, message_us: float = MESSAGE_US) -> float:
    times = [exchange(mebibytes * MIB, ranks, algorithm, message_us) for algorithm in ALGORITHMS]
    return times[0] / times[1]


def crossover_of_2dh(mebibytes: int) -> int | None:
    """The least number of nodes of 8 ranks, as ranks, from which on 2DH is faster, up to 4096."""
    return next((8 * nodes for nodes in range(2, 513) if gain_of_2dh(mebibytes, 8 * nodes) > 1), None)


def slowest_message_us(mebibytes: int, ranks: int) -> float:
    """Microseconds per message between nodes up to which the direct exchange is not slower than 2DH."""
    spared = (ranks - PER_NODE) - (ranks // PER_NODE - 1)
    excess = exchange(mebibytes * MIB, ranks, "direct") - exchange(mebibytes * MIB, ranks, "2dh")
    return MESSAGE_US - 1e6 * excess / spared


def within_node(mebibytes: int) -> float:
    return exchange(mebibytes * MIB, PER_NODE, "direct")


NAIVE_S = (5e-3 - 600e-6) / (2048 / PER_NODE - 1)  # of each further access of the naive aggregation, from the paper


# ---- the layout


def experts_seconds(ranks: int, *, flexible: bool, tokens: int = 16384, k: int = 2, width: int = 2048,
                    hidden: int = 2048, local: float = 2) -> float:  # fmt: skip
    """Forward of this rank's experts on k * tokens rows: one product of every expert's rows, or one for each source."""
    each = max(local, 1)
    rows = k * tokens / each
    batch = each if flexible else each * ranks
    model = A100.gemm_model("float16")
    return sum(model.seconds(rows * each / batch, *shape, batch, A100.launch_s)
               for shape in ((hidden, width), (width, hidden)))  # fmt: skip


# ---- layers


@dataclass(frozen=True)
class Setting:
    """A layer and how it runs. tokens: of a rank in a step; local: experts of a rank."""

    ranks: int
    tokens: int = 16384
    width: int = 2048
    hidden: int = 2048
    local: float = 2
    factor: float = 1.0
    sparse: bool = True
    flexible: bool = True
    algorithm: str = "direct"
    degree: int = 1
    message_us: float = MESSAGE_US

    @property
    def rows(self) -> float:
        return 2 * self.factor * self.tokens

    @property
    def nbytes(self) -> float:
        return self.rows * self.width * HALF

    def seconds(self) -> float:
        """Of a step, forward and backward."""
        n = self.degree
        sent = exchange(self.nbytes / n, self.ranks, self.algorithm, self.message_us)
        experts = experts_seconds(self.ranks, flexible=self.flexible, tokens=self.rows / 2 / n, width=self.width,
                                  hidden=self.hidden, local=self.local)  # fmt: skip
        coding = self._coding()
        return sum(pipelined(sent, share * experts, 0.0, n) for share in (1, 2)) + coding

    def _coding(self) -> float:
        if self.sparse:
            return 4 * (A100.launch_s + 2 * self.nbytes / A100.memory_bytes_per_s)
        mask = self.rows * self.tokens * HALF
        product = A100.gemm_model("float16").seconds(self.rows, self.width, self.tokens, 1, A100.launch_s)
        return 5 * product + 6 * mask / A100.memory_bytes_per_s


def best(**setting: float) -> float:
    """Adaptive pipelining: of all degrees and both all-to-alls."""
    return min(Setting(**setting, algorithm=a, degree=n).seconds() for a in ALGORITHMS for n in DEGREES)


STEPS = {  # figure 14: settings before and after what a step adds; the paper's gains, by ranks
    "kernels": (dict(sparse=False, flexible=False), dict(flexible=False), {16: 3.52, 2048: 1.04}),
    "2DH": (dict(flexible=False), dict(flexible=False, algorithm="2dh"), {2048: 4.25}),
    "flexible": (dict(flexible=False, algorithm="2dh"), dict(algorithm="2dh"), {2048: 1.24}),
}
WHOLE = {16: 4.96, 128: 3.11, 2048: 5.75}
PIPELINING = {16: 1.43, 2048: 1.04}


def gain(step: str, ranks: int, message_us: float = MESSAGE_US) -> float:
    before, after, _ = STEPS[step]
    times = [Setting(ranks, **each, message_us=message_us).seconds() for each in (before, after)]
    return times[0] / times[1]


def whole(ranks: int, message_us: float = MESSAGE_US) -> float:
    old = Setting(ranks, sparse=False, flexible=False, message_us=message_us)
    return old.seconds() / best(ranks=ranks, message_us=message_us)


def implied_exchange_ms() -> float:
    """What a 2DH exchange on 2048 ranks takes if the flexible layout gains 1.24 of a step there and saves the paper's
    own 30.2 - 2.67 ms of every one of three passes."""
    gained, (slow, fast) = STEPS["flexible"][2][2048], (3 * 30.2, 3 * 2.67)
    return (slow - gained * fast) / (gained - 1) / 4


def pipelining(ranks: int) -> float:
    """What degrees and the better all-to-all add to the fourth step, which has 2DH."""
    return Setting(ranks, algorithm="2dh").seconds() / best(ranks=ranks)


@cache
def table_6(message_us: float = MESSAGE_US) -> dict[int, dict[tuple[str, int], tuple[float, float]]]:
    """Mean and largest improvement of adaptive pipelining over every static strategy, by ranks, of 81 layers."""
    found = {}
    for ranks in (16, 64, 256):
        gains: dict[tuple[str, int], list[float]] = {each: [] for each in itertools.product(ALGORITHMS, DEGREES)}
        for local, width, hidden, tokens in itertools.product(
            (0.5, 1, 2), (1024, 2048, 4096), (1024, 2048, 4096), (4096, 16384, 65536)
        ):
            setting = dict(ranks=ranks, local=local, width=width, hidden=hidden, tokens=tokens, message_us=message_us)
            times = {(a, n): Setting(**setting, algorithm=a, degree=n).seconds() for a, n in gains}
            for each, seconds in times.items():
                gains[each].append(seconds / min(times.values()) - 1)
        found[ranks] = {each: (mean(all_), max(all_)) for each, all_ in gains.items()}
    return found


def largest_mean(message_us: float = MESSAGE_US) -> float:
    return max(each[0] for at in table_6(message_us).values() for each in at.values())


def improvement(factor: float) -> float:
    """Figure 13: over degree 1 and the direct exchange, at most over 16 to 256 ranks."""
    setting = dict(tokens=4096, width=4096, hidden=4096, factor=factor)
    return max(Setting(ranks=n, **setting).seconds() / best(ranks=n, **setting) for n in (16, 32, 64, 128, 256)) - 1


# ---- the report


def claims() -> list[Claim]:
    found, yes = found_r(), "yes"
    falls = all(_falls(each) for each in found.values())
    rows = experts_seconds(2048, flexible=False), experts_seconds(2048, flexible=True)
    sheet = "nothing but the saturation, from 8.8 % (8 rows)"
    six = table_6()
    over_base = [100 * each["direct", 1][0] for each in six.values()]
    worst = [100 * each[1] for at in six.values() for each in at.values()]
    slow = (f"these gains imply {implied_exchange_ms():.0f} ms for a 2DH exchange on 2048 ranks, here it takes "
            f"{1e3 * exchange(Setting(2048).nbytes, 2048, '2dh'):.0f}")
    winner = {size: "2DH" if gain_of_2dh(size, 64) > 1 else "linear" for size in (1, 32, 256)}
    return [
        Claim("fig. 12", "r falls towards 1, then 0, as f rises", yes, yes if falls else "no"),
        Claim("fig. 12", "Base: r is 0 or 1", yes, yes if _values("Base") <= {0, 1} else "no"),
        Claim("fig. 12", "Large: r takes other values, too", yes, yes if _values("Large") - {0, 1} else "no"),
        Claim("fig. 18", "1 MiB on 64 ranks: the faster one", "2DH", winner[1]),
        Claim("fig. 18", "32 MiB on 64 ranks: the faster one", "linear", winner[32], note=
              f"a message of {slowest_message_us(32, 64):.1f} us or less, not of the assumed 12, would make it linear"),
        Claim("fig. 18", "256 MiB on 64 ranks: the faster one", "linear", winner[256]),
        Claim("fig. 18", "256 MiB: 2DH is faster on many ranks", yes, yes if crossover_of_2dh(256) else "no"),
        Claim("A.2", "exchange of 128 MiB in a node, us", 600, 1e6 * within_node(128), 0.2),
        Claim("A.2", "naive aggregation of it on 2048 ranks, us", 5000,
              1e6 * (within_node(128) + (2048 // PER_NODE - 1) * NAIVE_S), 0.05, "time of an access in memory"),
        Claim("2.4", "experts slower at 8 rows for each source", 11.3, rows[0] / rows[1], 0.1, sheet),
        Claim("2.4", "experts on 2048 ranks, ms", 30.2, 1e3 * rows[0], 0.1, sheet, "data sheet's peak"),
        Claim("2.4", "experts on 1 rank, ms", 2.67, 1e3 * rows[1], 0.1, sheet, "data sheet's peak"),
        *(Claim("fig. 14", f"gain of {step} on {ranks} ranks", theirs, gain(step, ranks), 0.25,
                note=slow if ranks == 2048 else "")
          for step, (_, _, papers) in STEPS.items() for ranks, theirs in papers.items()),
        *(Claim("fig. 14", f"gain of pipelining on {ranks} ranks", theirs, pipelining(ranks), 0.25)
          for ranks, theirs in PIPELINING.items()),
        *(Claim("fig. 14", f"Tutel over Fairseq on {ranks} ranks", theirs, whole(ranks), 0.25,
                note="its parts are off, both ways" if ranks == 2048 else "") for ranks, theirs in WHOLE.items()),
        Claim("fig. 13", "pipelining at f = 4, at most, %", 39, 100 * improvement(4.0), 0.25),
        Claim("fig. 13", "pipelining at f = 8, at most, %", 57, 100 * improvement(8.0), 0.25),
        Claim("tab. 6", "over linear, degree 1: mean by ranks, least, %", 9, min(over_base), 0.25),
        Claim("tab. 6", "the same, largest, %", 101, max(over_base), 0.25),
        Claim("tab. 6", "over any static strategy: largest mean, %", 107, 100 * largest_mean(), 0.25,
              note="with shorter messages it comes out (tutel_papers.md)"),
        Claim("tab. 6", "over any static strategy: worst layer, %", 599, max(worst), 0.25),
    ]  # fmt: skip


def _falls(order: list[int]) -> bool:
    """r = 0 comes after all others."""
    ranked = [r or 0.5 for r in order]
    return ranked == sorted(ranked, reverse=True)


def _values(config: str) -> set[int]:
    return {r for (name, _, _), each in found_r().items() if name == config for r in each}


def report() -> str:
    """The tables in Markdown."""
    lines = ["# Tutel: crossovers from the cost model", "",
             "Made by `python benchmarks/papers/tutel.py`, whose docstring says how.", "", *claims_table(claims()), "",
             "Not tried: the gap of 7.39 to 27.76 % between P1 and P2 (figure 3), of which the paper gives neither W "
             "nor E nor the tokens.", "", "## The best r by capacity factor (figure 12)", ""]  # fmt: skip
    rows = [[config, str(k), "near" if near else "far", *map(str, each),
             f"{crossover_of_p1(config, k, near=near):.2f}"]
            for (config, k, near), each in found_r().items()]  # fmt: skip
    lines += table(["layer", "k", "ranks of an expert", *(f"f = {f:g}" for f in FACTORS), "P1 is faster above f"], rows)
    lines += ["", "The paper's figure has no numbers; its text says what the claims above say. T(r) for Large, far, "
              "k = 1, in ms:", ""]  # fmt: skip
    lines += table(["f", "r = 0", "r = 1", "r = 2", "r = 4"],
                   [[f"{f:g}", *(f"{1e3 * step_of_r(r, f, 'Large', near=False):.2f}" for r in (0, 1, 2, 4))]
                    for f in FACTORS])  # fmt: skip
    lines += ["", "## Linear over 2DH (figure 18)", ""]
    many = (16, 64, 256, 1024, 2048, 4096)
    lines += table(["MiB a rank", *(f"{n} ranks" for n in many), "2DH is faster from"],
                   [[str(size), *(f"{gain_of_2dh(size, n):.2f}" for n in many), str(crossover_of_2dh(size) or "never")]
                    for size in (1, 8, 32, 128, 256, 1024)])  # fmt: skip
    lines += ["", "## Layouts (section 2.4)", "", "Forward of the experts, ms. 16384 tokens, k = 2, D = H = 2048, two "
              "experts a rank: the layer of section 5.2.", ""]  # fmt: skip
    lines += table(["ranks", "rows of a product", "as the all-to-all leaves them", "flexible", "slower by"],
                   [[str(n), str(16384 // n), *(f"{1e3 * t:.2f}" for t in both), f"{both[0] / both[1]:.1f}"]
                    for n in (1, 16, 64, 256, 1024, 2048)
                    for both in [[experts_seconds(n, flexible=each) for each in (False, True)]]])  # fmt: skip
    lines += ["", "## Adaptive pipelining (table 6)", "", "Mean improvement over static strategies, of 81 layers each; "
              "in brackets the largest.", ""]  # fmt: skip
    lines += table(["ranks", *(f"{a} {n}" for a, n in itertools.product(ALGORITHMS, DEGREES))],
                   [[str(ranks), *(f"{each[0]:.0%} ({each[1]:.0%})" for each in at.values())]
                    for ranks, at in table_6().items()])  # fmt: skip
    lines += ["", "## The time of a message", "",
              "Between nodes; the first is the assumed one. None gives all of the paper's figures: what it measured at "
              "64 to 256 ranks wants shorter messages, at 2048 longer ones.", ""]  # fmt: skip
    lines += table(["us", "linear over 2DH, 32 MiB, 64 ranks (below 1)", "table 6, largest mean (107 %)",
                    "gain of 2DH, 2048 ranks (4.25)", "Tutel over Fairseq, 2048 ranks (5.75)"],
                   [[f"{us:g}", f"{gain_of_2dh(32, 64, us):.2f}", f"{largest_mean(us):.0%}",
                     f"{gain('2DH', 2048, us):.2f}", f"{whole(2048, us):.2f}"]
                    for us in (MESSAGE_US, 2, 4, 6, 50)])  # fmt: skip
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    write(report, "tutel_papers.md", __doc__)
