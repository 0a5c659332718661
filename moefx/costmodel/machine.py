"""A machine as the cost model sees it: how fast it computes, copies and sends. From amounts it makes seconds.

A `Machine` is plain data with a JSON form. It is an input of the compiler, equal on all ranks (`digest`); it is made by
`python -m moefx calibrate` or taken from `moefx.costmodel.machines`, never measured while compiling.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import sympy

from moefx.axes import MeshSpec
from moefx.costmodel.alltoall import Algorithm, Group, Phase, phases, whole
from moefx.costmodel.amounts import Amounts, Gemm, Kind, Sent, at
from moefx.costmodel.curves import AlphaBeta, GemmModel, Name, Segment, number
from moefx.costmodel.tasks import COMPUTE, COPY
from moefx.errors import MoefxError
from moefx.ir.op import Stage

SCHEMA = 1
BUCKET_BYTES = 2.0**22  # where nobody knows better: between the first bucket of torch's DDP, 1 MiB, and others, 25 MiB
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # how often a ring goes round
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Provenance:
    """Where figures come from. kind: "measured" or "assumed"; date: YYYY-MM-DD."""

    kind: str
    text: str
    date: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("measured", "assumed"):
            raise MoefxError(f"figures are {self.kind!r}", hint="'measured' or 'assumed'")


@dataclass(frozen=True)
class Machine:
    """Figures of one kind of machine; times in seconds, sizes in bytes.

    gemm: by dtype ("float32", "bfloat16", ..). memory_bytes_per_s: what an elementwise op reads plus writes;
    rows_bytes_per_s: the same of rows that change their order, 0: as fast. launch_s: the host's time to issue one op;
    start_s: that for which a started exchange keeps what computes, at its start and its end. collectives: by
    (collective, link, algorithm), link "intra" within a node and "inter" between nodes, algorithm "ring", or for
    all_to_all "direct" and, between nodes and ranks of equal place alone, "2dh" (else taken to be as fast); all
    algorithms are made of these. The time per byte of "inter" is that of one rank while all ranks of its node send.
    copies: "d2h" and "h2d". ranks_per_node consecutive ranks share a node, which has nics_per_node network cards.
    pipe_rho: how much of the shorter of two exchanges, one inside and one between nodes, is not hidden when both run at
    once. interference: {(a, b): rate} at which resource a goes on while b is busy (1: undisturbed), of "compute",
    "intra", "inter", "d2h" and "h2d". codecs: "compress/int8", "decompress/int8", .. over the bytes of the rows in
    fp32; one that is not there reads and writes memory once. sources: where single figures come from, by the name of
    the field or by "gemm.float32", "all_to_all/inter/direct".
    """

    name: str
    provenance: Provenance
    gemm: Mapping[str, GemmModel]
    memory_bytes_per_s: float
    launch_s: float
    collectives: Mapping[Key, AlphaBeta] = field(default_factory=dict)
    copies: Mapping[str, AlphaBeta] = field(default_factory=dict)
    ranks_per_node: int = 1
    nics_per_node: int = 1
    pipe_rho: float = 0.0
    interference: Mapping[tuple[str, str], float] = field(default_factory=dict)
    sources: Mapping[str, Provenance] = field(default_factory=dict)
    rows_bytes_per_s: float = 0.0
    start_s: float = 0.0
    codecs: Mapping[str, AlphaBeta] = field(default_factory=dict)

    # -- what there is -------------------------------------------------------------------------------------------

    def group(self, mesh: Mapping[str, int], axes: Iterable[str]) -> Group:
        """The ranks that share a collective over `axes` of a mesh {name: size}, the last axis fastest. Raises MeshError
        where the axes are not in the mesh, MoefxError where they do not meet all nodes in equal numbers."""
        spec = MeshSpec(mesh, ranks_per_node=self.ranks_per_node)
        size, local = spec.nodes_of(axes)
        if local is None:
            raise MoefxError(
                f"the {size} ranks of axes {'+'.join(spec.dims(axes))} lie unevenly on nodes of {self.ranks_per_node}",
                hint="give the machine as many ranks_per_node as a node really runs",
            )
        return Group(size, local)

    def curve(self, collective: str, link: str, algorithm: str) -> AlphaBeta:
        key = (collective, link, algorithm)
        if key not in self.collectives:
            raise MoefxError(
                f"machine {self.name} has no times for {'/'.join(key)}",
                hint=f"calibrate on more nodes; there are {sorted('/'.join(k) for k in self.collectives)}",
            )
        return self.collectives[key]

    @property
    def bucket_bytes(self) -> float:
        """How many bytes of gradients an all-reduce is worth beginning for: over its slowest link, beginning takes a
        ninth of its time then."""
        ends = [curve.segments[-1] for (kind, _, _), curve in self.collectives.items() if kind == "all_reduce"]
        found = [8 * end.alpha_s / end.beta_s_per_byte for end in ends if end.beta_s_per_byte > 0]
        return max(found, default=BUCKET_BYTES)

    def gemm_model(self, dtype: str) -> GemmModel:
        """Of a dtype that was not measured, times of the one whose numbers are nearest in size."""
        if not self.gemm:
            raise MoefxError(f"machine {self.name} has no matmul times", hint="calibrate it")
        wanted = _bits(dtype)
        return self.gemm[min(self.gemm, key=lambda other: (other != dtype, abs(_bits(other) - wanted)))]

    def copy_curve(self, direction: str) -> AlphaBeta:
        if direction not in self.copies:
            raise MoefxError(f"machine {self.name} has no {direction} copies", hint=f"it has {list(self.copies)}")
        return self.copies[direction]

    def coding_seconds(self, stage: Stage, codec: str, nbytes: float, moved: float) -> float:
        """To compress or decompress rows of `nbytes` in fp32; `moved`: bytes read and written, at least."""
        curve = self.codecs.get(f"{stage.value}/{codec}")
        return self.launch_s + moved / self.memory_bytes_per_s if curve is None else curve.seconds(1, nbytes)

    def bytes_per_s(self, kind: Kind) -> float:
        """What an op of this kind reads plus writes."""
        return self.rows_bytes_per_s if kind is Kind.ROWS and self.rows_bytes_per_s else self.memory_bytes_per_s

    def _bandwidth(self, kind: Kind, how: Name) -> sympy.Expr:
        name = "bandwidth_rows" if kind is Kind.ROWS and self.rows_bytes_per_s else "bandwidth"
        return how(name, self.bytes_per_s(kind))

    # -- times ---------------------------------------------------------------------------------------------------

    def time_of(self, amounts: Amounts, sizes: Mapping[str, float], mesh: Mapping[str, int] | None = None, *,
                algorithm: Algorithm | str = Algorithm.DIRECT) -> float:
        """Seconds of a node at these sizes (symbols by name), alone on the machine. mesh: {axis: size}, wanted by
        collectives; algorithm: of all-to-alls."""
        times = [seconds for _, seconds in self.phases_of(amounts, sizes, mesh, algorithm=algorithm)]
        return float(whole(_used(amounts, algorithm), times, self.pipe_rho))

    def phases_of(self, amounts: Amounts, sizes: Mapping[str, float], mesh: Mapping[str, int] | None = None, *,
                  algorithm: Algorithm | str = Algorithm.DIRECT, reverse: bool = False) -> list[tuple[str, float]]:
        """(resource, seconds) of every phase of a node: one, or for all-to-alls those of the algorithm. Empty if
        nothing is done."""
        if amounts.kind is Kind.FREE:
            return []
        if amounts.kind is Kind.COLLECTIVE:
            numbers = replace(amounts, payload=at(amounts.payload, sizes), sent=_sent_at(amounts.sent, sizes))
            parts = self._phases(numbers, mesh, algorithm, reverse)
            return [(part.resource, self._seconds(part, amounts.collective)) for part in parts]
        nbytes = at(amounts.volume.hbm_bytes, sizes)
        if amounts.kind is Kind.HOST:
            return [(COPY, self.copy_curve(amounts.direction).seconds(1, nbytes))]
        moving = self.launch_s + nbytes / self.bytes_per_s(amounts.kind)
        if amounts.gemm is not None:
            g = amounts.gemm
            shape = [at(size, sizes) for size in (g.m, g.n, g.k, g.batch)]
            beside = at(g.beside, sizes) / self.memory_bytes_per_s
            return [(COMPUTE, self.gemm_model(g.dtype).seconds(*shape, self.launch_s) + beside)]
        if amounts.kind is Kind.GEMM:
            peak = self.gemm_model(amounts.dtype).peak_flops_per_s
            moving = max(moving, self.launch_s + at(amounts.volume.flops, sizes) / peak)
        return [(COMPUTE, moving)]

    def sent_by(self, amounts: Amounts, sizes: Mapping[str, float], mesh: Mapping[str, int]) -> dict[str, float]:
        """{"intra" or "inter": bytes that a rank sends} of a collective as it stands."""
        numbers = replace(amounts, payload=at(amounts.payload, sizes), sent=_sent_at(amounts.sent, sizes))
        found: dict[str, float] = {}
        for part in self._phases(numbers, mesh, Algorithm.DIRECT, False):
            if part.resource != COMPUTE:
                found[part.resource] = found.get(part.resource, 0.0) + float(part.nbytes)
        return found

    def formula(self, amounts: Amounts, mesh: Mapping[str, int] | None = None, *,
                algorithm: Algorithm | str = Algorithm.DIRECT, how: Name = number) -> sympy.Expr:
        """The time of a node as a formula in its sizes. how: `curves.number` puts the machine's figures in,
        `curves.symbol` leaves their names. Measured single shapes (`GemmModel.table`) are not in it."""
        if amounts.kind is Kind.FREE:
            return sympy.S.Zero
        if amounts.kind is Kind.COLLECTIVE:
            times = [time for _, time in self.formulas(amounts, mesh, algorithm=algorithm, how=how)]
            return sympy.sympify(whole(_used(amounts, algorithm), times, how("rho", self.pipe_rho)))
        if amounts.kind is Kind.HOST:
            curve = self.copy_curve(amounts.direction)
            return curve.formula(sympy.S.One, amounts.volume.hbm_bytes, amounts.direction, how)
        launch = how("launch", self.launch_s)
        if amounts.gemm is not None:
            g: Gemm = amounts.gemm
            beside = g.beside / self._bandwidth(amounts.kind, how)
            return launch + self.gemm_model(g.dtype).formula(g.m, g.n, g.k, g.batch, g.dtype, how) + beside
        moving = amounts.volume.hbm_bytes / self._bandwidth(amounts.kind, how)
        if amounts.kind is Kind.GEMM:
            peak = how(f"peak_{amounts.dtype}", self.gemm_model(amounts.dtype).peak_flops_per_s)
            moving = sympy.Max(moving, amounts.volume.flops / peak)
        return launch + moving

    def formulas(self, amounts: Amounts, mesh: Mapping[str, int] | None = None, *,
                 algorithm: Algorithm | str = Algorithm.DIRECT, how: Name = number) -> list[tuple[str, sympy.Expr]]:
        """(resource, its time) of every phase of a collective, as `formula`."""
        parts = self._phases(amounts, mesh, algorithm, False)
        return [(part.resource, self._formula(part, amounts.collective, how)) for part in parts]

    def _phases(self, amounts: Amounts, mesh: Mapping[str, int] | None, algorithm: Algorithm | str,
                reverse: bool) -> tuple[Phase, ...]:
        if amounts.sent is not None:
            return tuple(Phase(each.link, each.messages, each.nbytes, aligned=each.aligned) for each in amounts.sent
                         if each.messages)  # fmt: skip
        if mesh is None:
            raise MoefxError(f"the time of {amounts.collective} needs the mesh", hint="mesh={'ep': 8}")
        group = self.group(mesh, amounts.axes)
        if amounts.collective == "all_to_all":
            return phases(_used(amounts, algorithm), group, amounts.payload, reverse=reverse,
                          nics_per_rank=self.nics_per_node / self.ranks_per_node)
        rounds, n = ROUNDS[amounts.collective], group.size
        nbytes = rounds * amounts.payload * sympy.Rational(n - 1, n)
        return (Phase(group.link, rounds * (n - 1), nbytes),) if n > 1 else ()

    def _seconds(self, phase: Phase, collective: str) -> float:
        if phase.resource == COMPUTE:
            return self.launch_s + float(phase.nbytes) / self.bytes_per_s(Kind.ROWS)
        _, curve = self._curve_of(phase, collective)
        return _shared(curve, phase.share).seconds(phase.messages, float(phase.nbytes))

    def _formula(self, phase: Phase, collective: str, how: Name) -> sympy.Expr:
        if phase.resource == COMPUTE:
            return how("launch", self.launch_s) + phase.nbytes / self._bandwidth(Kind.ROWS, how)
        name, curve = self._curve_of(phase, collective)
        share = sympy.S.One if phase.share == 1 else sympy.Float(phase.share)
        return curve.formula(
            sympy.Integer(phase.messages), sympy.sympify(phase.nbytes), name,
            lambda name, figure: how(name, figure) * (share if name.startswith("beta") else 1),
        )  # fmt: skip

    def _curve_of(self, phase: Phase, collective: str) -> tuple[str, AlphaBeta]:
        """What formulas call the phase's link, and its times."""
        name = f"{collective}_{phase.resource}"
        if phase.aligned and (collective, phase.resource, "2dh") in self.collectives:
            return f"{name}_2dh", self.curve(collective, phase.resource, "2dh")
        algorithm = "direct" if collective == "all_to_all" else "ring"
        return name, self.curve(collective, phase.resource, algorithm)

    # -- files ---------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(
            {
                "moefx_machine": SCHEMA,
                **asdict(self),
                "collectives": {"/".join(key): asdict(curve) for key, curve in self.collectives.items()},
                "interference": {"|".join(pair): rate for pair, rate in self.interference.items()},
            },
            indent=1,
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: str, where: str | None = None) -> Machine:
        """Raises MoefxError for what is no machine, is damaged, or was written by a newer version."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise MoefxError(f"not a machine file: {error}", where=where, hint=_MAKE) from error
        version = data.pop("moefx_machine", None) if isinstance(data, dict) else None
        if version is None:
            raise MoefxError("not a machine file: it does not say moefx_machine", where=where, hint=_MAKE)
        if version != SCHEMA:
            raise MoefxError(f"a machine file of version {version}; this moefx reads {SCHEMA}", where=where, hint=_MAKE)
        try:
            return cls(**{name: _READ.get(name, lambda found: found)(found) for name, found in data.items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MoefxError(f"a damaged machine file: {error!r}", where=where, hint=_MAKE) from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        path = Path(path)
        if not path.is_file():
            raise MoefxError(f"there is no machine file {path}", hint=_MAKE)
        return cls.from_json(path.read_text(), where=str(path))

    def digest(self) -> str:
        """16 hex digits of the contents: ranks that compile with different machines would make different programs."""
        contents = json.dumps(json.loads(self.to_json()), sort_keys=True)
        return hashlib.sha256(contents.encode()).hexdigest()[:16]


_MAKE = "make one with python -m moefx calibrate --out machine.json"


def _used(amounts: Amounts, algorithm: Algorithm | str) -> Algorithm:
    """The algorithm of a collective: only a whole all-to-all has a choice."""
    if amounts.collective != "all_to_all" or amounts.sent is not None:
        return Algorithm.DIRECT
    try:
        return Algorithm(algorithm)
    except ValueError:
        known = [each.value for each in Algorithm]
        raise MoefxError(f"there is no formula for the all-to-all {algorithm!r}", hint=f"one of {known}") from None


def _sent_at(sent: tuple[Sent, ...] | None, sizes: Mapping[str, float]) -> tuple[Sent, ...] | None:
    return None if sent is None else tuple(replace(each, nbytes=at(each.nbytes, sizes)) for each in sent)


def _shared(curve: AlphaBeta, share: float) -> AlphaBeta:
    """The curve with its time per byte times `share`."""
    if share == 1:
        return curve
    return AlphaBeta(tuple(Segment(s.alpha_s, s.beta_s_per_byte * share, s.upto) for s in curve.segments), curve.mape)


def _curve(data: dict[str, Any]) -> AlphaBeta:
    return AlphaBeta(tuple(Segment(**segment) for segment in data["segments"]), data["mape"])


def _keys(text: str, separator: str, length: int) -> tuple[str, ...]:
    parts = tuple(text.split(separator))
    if len(parts) != length:
        raise ValueError(f"{text!r} has {len(parts)} parts, not {length}")
    return parts


# How the fields that are not plain numbers and names are read back.
_READ = {
    "provenance": lambda data: Provenance(**data),
    "sources": lambda data: {name: Provenance(**each) for name, each in data.items()},
    "gemm": lambda data: {dtype: GemmModel(**{**each, "table": tuple(map(tuple, each["table"]))})
                          for dtype, each in data.items()},
    "collectives": lambda data: {_keys(key, "/", 3): _curve(each) for key, each in data.items()},
    **dict.fromkeys(("copies", "codecs"), lambda data: {name: _curve(each) for name, each in data.items()}),
    "interference": lambda data: {_keys(pair, "|", 2): rate for pair, rate in data.items()},
}  # fmt: skip


def _bits(dtype: str) -> int:
    """Of a dtype's name: those of its numbers, as `float32` says."""
    found = re.search(r"\d+", dtype)
    return int(found.group()) if found else 32
