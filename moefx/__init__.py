"""moefx: a plain MoE module in, a verified expert-parallel training program out."""

from moefx import errors
from moefx.api import CompiledModule, compile
from moefx.inspection import inspect
from moefx.options import Options

__all__ = ["CompiledModule", "Options", "compile", "errors", "inspect"]
