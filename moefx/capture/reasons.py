"""Why dynamo captures no graph, in the words of users: the reason and their line out of its long message."""

from __future__ import annotations

import linecache
import os
import re

from moefx import _torch_compat as compat
from moefx.capture.substitutes import ModuleMoves
from moefx.errors import CaptureError

_SETS_ITEM = re.compile(r"[\w.]+\[.*\]\s*[-+*/]?=[^=]")
_MOVES = re.compile(rf"{ModuleMoves.__name__}\([^'\"]*['\"]([^'\"]*)")
_WRONG_CALL = re.compile("missing a required|got an unexpected keyword|too many positional|multiple values for")
_OP_FAILS = re.compile(r"call_(?:function|method) (.+?)\(\*\(.*?: got \w+\((['\"])(.*?)\2\)", re.DOTALL)
_REWRITE = "write the line in a way that torch.compile(fullgraph=True) understands, or move it out of forward"

# What torch says, what is the matter, and what to do.
_SAYINGS = (
    ("backwards hooks", "a module that it calls has a backward hook",
     "hook a parameter or a tensor: x.register_hook(..)"),
    ("Pending unbacked symbols", "a custom autograd function picks rows by what a tensor holds (torch.where, x[mask])",
     "leave the loop over experts outside of the function, and put what one expert computes into it"),
    ("leaf Variable that requires grad", "it writes in place to an argument that needs a gradient and was computed of "
     "nothing", "write to a copy, x = x.clone(), or pass what was computed"),
    ("no fake impl|does not support running with fake tensors|Unsupported operator",
     "torch does not know the shape of what an op gives",
     "say it, by torch.library.register_fake(name), or use another op; sparse tensors have none"),
    ("Observed exception", "it raises an exception there, or leaves a context in a way that torch does not follow",
     f"see whether the plain model raises with these arguments; if not, {_REWRITE}"),
    ("Failed to convert args/kwargs to proxy", "an op is given an object that no graph can hold, such as a generator",
     _REWRITE),
)  # fmt: skip


def explain(error: Exception) -> CaptureError:
    """The error for users."""
    text = str(error)
    stack = [(frame.filename, str(frame.lineno), frame.name) for frame in getattr(error, "real_stack", None) or ()]
    lines = stack or re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    own = [line for line in lines if "/torch/" not in line[0] and not line[0].startswith(os.path.dirname(__file__))]
    file, number, function = (own or lines)[-1] if lines else ("", "0", "")
    code = linecache.getline(file, int(number)).strip()
    in_list = bool(lines) and lines[-1][2] == "_get_abs_string_index"
    if in_list and not re.search(r"index -?\d+ is out of range", text):
        reason = "it takes a module out of a list by a number that a tensor holds, so one token, or sample, at a time"
        hint = ("loop over all experts, and give each the rows that chose it: for e, expert in enumerate(experts): "
                "rows, k = torch.where(ids == e); out.index_add_(0, rows, expert(x[rows]) * w[rows, k, None])")
    elif compat.is_data_dependent(error) or "Data-dependent" in text:
        reason = "Python code depends on values of tensors"
        hint = ("write the line without Python control flow on tensor values (loop over all experts instead of the hit "
                "ones, use torch.where instead of if), or move it out of forward; numbers of numpy count as tensors, "
                "too: int(..), bool(..) outside of the forward")  # fmt: skip
        if _SETS_ITEM.match(code):
            hint = ("if an index of it is a tensor of no dims, which torch reads on the host, write "
                    "`rows.index_copy_(0, index.view(1), new[None])`")  # fmt: skip
    elif _WRONG_CALL.match(text):
        reason, hint = f"the call does not fit its forward: {text}", "call it with the arguments that its forward has"
    elif moves := _MOVES.search(text):
        reason = f"a module of it would be moved or converted ({moves[1]})"
        hint = "move and convert the model before moefx.compile; the forward may convert tokens, or use torch.autocast"
    else:
        reason, hint = _said(text)
    return CaptureError(
        f"the model cannot be captured as one graph: {reason}{f': `{code}`' if code else ''}",
        where=f"{file}:{number} in {function}" if lines else None,
        hint=hint,
    )


def _said(text: str) -> tuple[str, str]:
    """(reason, hint) of what torch says."""
    for pattern, reason, hint in _SAYINGS:
        if re.search(pattern, text):
            return reason, hint
    fails = _OP_FAILS.search(text)
    if fails is not None:
        op = re.sub(r"<.*(?:function|method) ([\w.]+).*>", r"\1", fails[1])
        said = fails[3].split("\\n")[0][:300]
        return f"{op} fails on what it is given ({said})", "see that the plain model runs with the same arguments"
    said = re.split("from user code|Hint:|Developer debug context", text)[0].replace("Explanation:", "-")
    return re.sub(r"\s+", " ", said).strip(" .")[:500], _REWRITE
