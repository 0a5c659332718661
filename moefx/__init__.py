"""moefx: a plain MoE module in, a verified expert-parallel training program out."""

from importlib.metadata import PackageNotFoundError, version

from moefx import accelerators as _accelerators
from moefx import checkpoint, errors, extend, features
from moefx import uncaught as _uncaught
from moefx.extend import register_all_to_all, register_codec, register_kernel, register_scheduler
from moefx.model.api import CompiledModule, compile
from moefx.options import Options
from moefx.options.groups import AllToAll, Debug, Parallel, Placement
from moefx.report import run as _run
from moefx.report.explanation import explain
from moefx.report.inspection import inspect
from moefx.report.lint import lint
from moefx.report.memory import memory
from moefx.report.timeline import profile, timeline
from moefx.report.what_if import plan

try:
    __version__ = version("moefx")
except PackageNotFoundError:  # run from a folder, not installed
    __version__ = "unknown"

features.load()
_accelerators.install()
_run.install()
_uncaught.install()

_groups = {each.metadata["group"].__name__: each.metadata["group"] for each in features.option_fields().values()}
globals().update(_groups)

__all__ = [
    "AllToAll",
    "CompiledModule",
    "Debug",
    "Options",
    "Parallel",
    "Placement",
    "checkpoint",
    "compile",
    "errors",
    "explain",
    "extend",
    "inspect",
    "lint",
    "memory",
    "plan",
    "profile",
    "register_all_to_all",
    "register_codec",
    "register_kernel",
    "register_scheduler",
    "timeline",
    *_groups,
]
