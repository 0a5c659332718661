"""moefx: a plain MoE module in, a verified expert-parallel training program out."""

from moefx import checkpoint, errors, extend
from moefx.api import CompiledModule, compile
from moefx.explanation import explain
from moefx.extend import register_all_to_all, register_codec, register_scheduler
from moefx.inspection import inspect
from moefx.options import Options
from moefx.timeline import profile, timeline

__all__ = [
    "CompiledModule",
    "Options",
    "checkpoint",
    "compile",
    "errors",
    "explain",
    "extend",
    "inspect",
    "profile",
    "register_all_to_all",
    "register_codec",
    "register_scheduler",
    "timeline",
]
