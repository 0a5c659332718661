"""What the core calls of this room."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from moefx.context.pass_types import Pass
from moefx.errors import UnsupportedUse
from moefx.features.fp8 import ops, scale_products
from moefx.ir.level import Level
from moefx.link import implementations
from moefx.options import Options
from moefx.rooms import Feature, Insertion

__all__ = ["FEATURE", "ops"]  # the latter registers its ops


def _check(options: Options) -> None:
    if options.fp8.wanted and implementations.chosen_mode() == "triton":
        raise UnsupportedUse("fp8 is True, but MOEFX_KERNELS is triton, whose products are not in fp8",
                             hint="MOEFX_KERNELS=auto, or fp8=False")  # fmt: skip


def _check_mesh(options: Options, mesh: DeviceMesh) -> None:
    missing = _missing() if options.fp8.wanted and mesh.device_type == "cuda" else None
    if missing is not None:
        raise UnsupportedUse(f"fp8 is True, but {missing}", hint="fp8=False")


def _missing() -> str | None:
    """Why CUDA has no product in fp8 here."""
    if not hasattr(F, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_grouped_mm"
    major, minor = torch.cuda.get_device_capability()
    return None if major in (9, 10) else f"this GPU has capability {major}.{minor}, not 9.0 or 10.0"


FEATURE = Feature(
    "fp8", check=_check, check_mesh=_check_mesh,
    passes=(Insertion("differentiate", Pass("scale-products", scale_products.run, Level.PLACED, Level.PLACED,
                                            asked=True)),),
)  # fmt: skip
