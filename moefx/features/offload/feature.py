"""What the core calls of this room."""

from __future__ import annotations

from moefx.context.pass_types import Pass
from moefx.costmodel.machine import Machine
from moefx.errors import UnsupportedUse
from moefx.features.offload import offload, ops, rules
from moefx.features.offload.strategies import FORMULA, OFFLOAD, RINGS, STRATEGIES, by_equation_10
from moefx.options import Options
from moefx.rooms import Feature, Insertion, Keeping

__all__ = ["FEATURE", "ops"]  # the latter registers its ops

COPIES = (("forward", "d2h"), ("backward", "h2d"))  # in which pass, by which engine


def _check(options: Options) -> None:
    if options.formula == FORMULA and options.machine is None:
        raise UnsupportedUse(f"the formula '{FORMULA}' needs a machine to choose by",
                             hint=f"machine=.., see python -m moefx calibrate; or keep='{FORMULA}-s4'")  # fmt: skip


def _is_priced(machine: Machine) -> bool:
    return {"d2h", "h2d"} <= {*machine.copies}


def _loads(machine: Machine, nbytes: float) -> dict[tuple[str, str], float]:
    return {(name, engine): machine.copy_curve(engine).seconds(1, nbytes) for name, engine in COPIES}


def _rings(options: Options) -> int:
    return RINGS if options.keep in STRATEGIES or options.formula == FORMULA else 0


FEATURE = Feature(
    "offload", check=_check, passes=(Insertion("partition", Pass("offload", offload.run)),),
    rules=(rules.what_waits_on_the_host_comes_back,), keepings=(Keeping(OFFLOAD, _is_priced, _loads),),
    strategies=STRATEGIES, formulas={FORMULA: by_equation_10}, rings=_rings,
)  # fmt: skip
