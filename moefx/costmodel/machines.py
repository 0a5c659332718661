"""Machines to plan for without having them: the papers' testbeds and common clusters.

Nothing here was measured by us except for the emulated cluster. Every figure says in `Machine.sources` whether somebody
measured it or it is assumed, and where it comes from. Rates of links are those that one rank gets while all ranks of
its node send. Peaks are data sheet values of dense products: expect less.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from moefx.costmodel.curves import AlphaBeta, GemmModel
from moefx.costmodel.machine import ROUNDS, Key, Machine, Provenance
from moefx.errors import MoefxError

GB = 1e9
TF = 1e12
US = 1e-6
MESSAGES = (("all_to_all", "direct"), *((collective, "ring") for collective in ROUNDS))


@dataclass(frozen=True)
class _Link:
    """Seconds per message, bytes per second of one rank, and where both figures come from."""

    alpha_s: float
    bytes_per_s: float
    source: Provenance


@dataclass(frozen=True)
class _Device:
    """Data sheet of a processor. tf: peak TFLOP/s by dtype; half: the size at which a dim halves the rate."""

    name: str
    tf: dict[str, float]
    memory_gb_per_s: float
    half: float


def _assumed(text: str) -> Provenance:
    return Provenance("assumed", text)


_TUTEL_ROWS = "; a product with 8 rows reaches 8.8 % of it (Tutel, section 2), which sets the saturation of every dim"
A100 = _Device("A100", {"float32": 19.5, "bfloat16": 312, "float16": 312}, 1555, 83)
H100 = _Device("H100 SXM", {"float32": 67, "bfloat16": 989, "float16": 989}, 3350, 128)
RTX4090 = _Device("RTX 4090", {"float32": 82.6, "bfloat16": 165, "float16": 165}, 1008, 96)
RTX2080TI = _Device("RTX 2080 Ti", {"float32": 13.4, "float16": 53.8}, 616, 64)


def _cluster(name: str, device: _Device, intra: _Link, inter: _Link | None, *, ranks_per_node: int, nics: int = 1,
             text: str) -> Machine:
    links = {"intra": intra} | ({"inter": inter} if inter else {})
    keys: dict[Key, _Link] = {(c, link, algorithm): figures for link, figures in links.items()
                              for c, algorithm in MESSAGES}
    sheet = f"data sheet of the {device.name}"
    sources = {"/".join(key): link.source for key, link in keys.items()}
    for dtype in device.tf:
        more = _TUTEL_ROWS if device is A100 else "; saturation guessed"
        sources[f"gemm.{dtype}"] = _assumed(f"{sheet}, {device.tf[dtype]:g} TFLOP/s{more}")
    sources["memory_bytes_per_s"] = _assumed(sheet)
    sources["launch_s"] = _assumed("5 us per op, usual for PyTorch on CUDA")
    sources["start_s"] = _assumed("a launch: NCCL has its own stream, and what computes records or awaits an event")
    sources["rows_bytes_per_s"] = _assumed("as fast as memory: rows of tokens fill whole bursts of it, their indices "
                                           "are less than 1 % of the bytes")
    sources["copies"] = _assumed("10 us and 12 GB/s, pinned memory on PCIe")
    sources["pipe_rho"] = _assumed("the two exchanges of Pipe-A2A do not hinder each other")
    return Machine(
        name=name,
        provenance=_assumed(text),
        gemm={dtype: GemmModel(tf * TF, *[device.half] * 3) for dtype, tf in device.tf.items()},
        memory_bytes_per_s=device.memory_gb_per_s * GB,
        launch_s=5 * US,
        start_s=5 * US,
        rows_bytes_per_s=device.memory_gb_per_s * GB,
        collectives={key: AlphaBeta.of(link.alpha_s, 1 / link.bytes_per_s) for key, link in keys.items()},
        copies={direction: AlphaBeta.of(10 * US, 1 / (12 * GB)) for direction in ("d2h", "h2d")},
        ranks_per_node=ranks_per_node,
        nics_per_node=nics,
        sources=sources,
    )  # fmt: skip


def _with_all_gather(machine: Machine, alpha_s: float, beta_s: float) -> Machine:
    """Parm's fit alpha + beta*elements of an all-gather, read as 4 ranks (3 messages) and elements of 4 bytes."""
    ranks, element = 4, 4
    key = ("all_gather", "intra", "ring")
    curve = AlphaBeta.of(alpha_s / (ranks - 1), beta_s / element * ranks / (ranks - 1))
    source = Provenance("measured", f"Parm, section VI-B: {alpha_s:g} s + {beta_s:g} s per element; that elements have "
                        f"{element} bytes and the group {ranks} ranks is our reading")
    return replace(machine, collectives={**machine.collectives, key: curve},
                   sources={**machine.sources, "/".join(key): source})


def _parm_a() -> Machine:
    pcie = _Link(10 * US, 8 * GB, _assumed("PCIe 4.0 x16 without peer access, half of it reached"))
    machine = _cluster("parm-a", RTX4090, pcie, None, ranks_per_node=8, text="Parm, Table II, testbed A: 8 RTX 4090")
    return _with_all_gather(machine, 6.64e-4, 5.38e-10)


def _parm_b() -> Machine:
    machine = _cluster(
        "parm-b", RTX2080TI,
        _Link(10 * US, 6 * GB, _assumed("PCIe 3.0 x16, half of it reached")),
        _Link(20 * US, 12.5 / 4 * GB, _assumed("100 Gb/s per node, a quarter for each of 4 ranks")),
        ranks_per_node=4, text="Parm, Table II, testbed B: 8 nodes of 4 RTX 2080 Ti, 100 Gb/s",
    )  # fmt: skip
    return _with_all_gather(machine, 1.09e-4, 7.14e-10)


def _schemoe() -> Machine:
    """The cluster of ScheMoE's Table 3. Its Table 10 fixes one family of parameters only; this is the member that
    agrees with the all-to-all times of Table 1: 393 ms for 644 MB on 32 ranks; Pipe-A2A hides the shorter part."""
    payload, seconds, gain = 644e6, 0.393, 1.645
    longer = seconds / gain
    source = _assumed(
        "effective rates that give ScheMoE's Table 10: all-to-all of 644 MB in 393 ms, 1.645 times faster as Pipe-A2A"
    )
    machine = _cluster(
        "schemoe", RTX2080TI,
        _Link(0.0, payload * 3 / 32 / (seconds - longer), source),
        _Link(0.0, payload * 28 / 32 / longer, source),
        ranks_per_node=4, text="ScheMoE, Table 3: 8 nodes of 4 RTX 2080 Ti, 100 Gb/s",
    )  # fmt: skip
    rate = 1 / 1.04
    pairs = {("compute", "intra"): rate, ("compute", "inter"): rate,
             ("intra", "compute"): rate, ("inter", "compute"): rate}  # fmt: skip
    sources = {**machine.sources, "interference": _assumed("both 1.04 times slower, which gives Table 10's last row")}
    return replace(machine, interference=pairs, sources=sources)


def _tutel() -> Machine:
    return _cluster(
        "tutel-a100", A100,
        _Link(3 * US, 250 * GB, _assumed("NVLink 3, 300 GB/s each way, five sixths reached")),
        _Link(12 * US, 25 * GB, _assumed("one 200 Gb/s HDR card per GPU")),
        ranks_per_node=8, nics=8, text="Tutel, section 5: nodes of 8 A100 with 8 cards of 200 Gb/s",
    )  # fmt: skip


def _h100() -> Machine:
    return _cluster(
        "h100-8x400g", H100,
        _Link(3 * US, 370 * GB, _assumed("NVLink 4, 450 GB/s each way, five sixths reached")),
        _Link(12 * US, 50 * GB, _assumed("one 400 Gb/s card per GPU")),
        ranks_per_node=8, nics=8, text="nodes of 8 H100 with 8 cards of 400 Gb/s",
    )  # fmt: skip


def _pcie() -> Machine:
    return _cluster(
        "pcie-100g", RTX4090,
        _Link(10 * US, 8 * GB, _assumed("PCIe 4.0 x16 without peer access, half of it reached")),
        _Link(20 * US, 12.5 / 8 * GB, _assumed("100 Gb/s per node, an eighth for each of 8 ranks")),
        ranks_per_node=8, text="nodes of 8 PCIe cards and one 100 Gb/s network card",
    )  # fmt: skip


def _emulated() -> Machine:
    """Two ranks per network namespace, 200 Mbit/s between and 1600 Mbit/s inside of them; one core per rank."""
    sent = Provenance("measured", "all-to-all of 4 MiB per rank on 2x2 ranks over gloo takes 180 ms: the rates that "
                      "are set, shared by the two ranks of a node")
    rings = _assumed("the all-to-all's figures")
    cores = Provenance("measured", "one core of an AMD EPYC: 100 to 113 GFLOP/s in float32 (MKL), 445 to 494 in "
                       "bfloat16 (oneDNN); saturation guessed")
    piped = Provenance("measured", "inter 87 ms and intra 84 ms take 107 ms together, in two groups")
    links = {"intra": AlphaBeta.of(200 * US, 2 * 8 / 1600e6), "inter": AlphaBeta.of(200 * US, 2 * 8 / 200e6)}
    keys = {(c, link, algorithm): curve for link, curve in links.items() for c, algorithm in MESSAGES}
    sources = {"/".join(key): sent if key[0] == "all_to_all" else rings for key in keys}
    sources |= {f"gemm.{dtype}": cores for dtype in ("float32", "bfloat16")} | {"pipe_rho": piped}
    for figure in ("memory_bytes_per_s", "launch_s", "copies"):
        sources[figure] = _assumed("usual for one core of a server")
    sources["start_s"] = Provenance("measured", "two ranks over gloo: starting an all-to-all of 512 KiB keeps a rank "
                                    "for 23 to 45 us, waiting for one that is done for 11 to 13 us")
    sources["rows_bytes_per_s"] = Provenance("measured", "rows of 2 KiB change their order at 0.93 of a copy's rate")
    return Machine(
        name="emulated-200mbit", provenance=sent,
        gemm={"float32": GemmModel(105e9, 8, 8, 8), "bfloat16": GemmModel(450e9, 32, 32, 32)},
        memory_bytes_per_s=10 * GB, rows_bytes_per_s=9.3 * GB, launch_s=5 * US, start_s=30 * US, collectives=keys,
        copies={direction: AlphaBeta.of(5 * US, 1 / (5 * GB)) for direction in ("d2h", "h2d")},
        ranks_per_node=2, pipe_rho=20 / 84, sources=sources,
    )  # fmt: skip


PRESETS: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _parm_a(), _parm_b(), _schemoe(), _tutel(), replace(_tutel(), name="a100-8x200g"), _h100(), _pcie(),
        _emulated(),
    )
}  # fmt: skip


def preset(name: str) -> Machine:
    """The preset of this name. Raises MoefxError naming the nearest one."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        nearest = f"{near[0]!r}, the nearest of the presets" if near else "a preset"
        raise MoefxError(f"there is no machine {name!r}", where="machine",
                         hint=f"{nearest} ({', '.join(sorted(PRESETS))}), or a file: python -m moefx calibrate --out "
                              "machine.json")  # fmt: skip
    return PRESETS[name]
