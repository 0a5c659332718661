"""moefx: a plain MoE module in, a verified expert-parallel training program out."""

from moefx import checkpoint, errors, extend
from moefx.extend import register_all_to_all, register_codec, register_scheduler
from moefx.model.api import CompiledModule, compile
from moefx.options import Options
from moefx.report.explanation import explain
from moefx.report.inspection import inspect
from moefx.report.memory import memory
from moefx.report.timeline import profile, timeline
from moefx.report.what_if import plan

__all__ = [
    "CompiledModule",
    "Options",
    "checkpoint",
    "compile",
    "errors",
    "explain",
    "extend",
    "inspect",
    "memory",
    "plan",
    "profile",
    "register_all_to_all",
    "register_codec",
    "register_scheduler",
    "timeline",
]
