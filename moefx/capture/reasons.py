"""Why dynamo captures no graph, in the words of users: the reason and their line out of its long message."""

from __future__ import annotations

import linecache
import re

from moefx import _torch_compat as compat
from moefx.errors import CaptureError

_SETS_ITEM = re.compile(r"[\w.]+\[.*\]\s*[-+*/]?=[^=]")
_WRONG_CALL = re.compile("missing a required|got an unexpected keyword|too many positional|multiple values for")


def explain(error: Exception) -> CaptureError:
    """The error for users."""
    text = str(error)
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    own = [line for line in lines if "/torch/" not in line[0]]
    file, number, function = (own or lines)[-1] if lines else ("", "0", "")
    code = linecache.getline(file, int(number)).strip()
    if compat.is_data_dependent(error) or "Data-dependent" in text:
        reason = "Python code depends on values of tensors"
        hint = ("write the line without Python control flow on tensor values (loop over all experts instead of the hit "
                "ones, use torch.where instead of if), or move it out of forward; numbers of numpy count as tensors, "
                "too: int(..), bool(..) outside of the forward")  # fmt: skip
        if _SETS_ITEM.match(code):
            hint = ("if an index of it is a tensor of no dims, which torch reads on the host, write "
                    "`rows.index_copy_(0, index.view(1), new[None])`")  # fmt: skip
    elif _WRONG_CALL.match(text):
        reason, hint = f"the call does not fit its forward: {text}", "call it with the arguments that its forward has"
    elif "backwards hooks" in text:
        reason, hint = "a module that it calls has a backward hook", "hook a parameter or a tensor: x.register_hook(..)"
    else:
        said = re.split("from user code|Hint:|Developer debug context", text)[0].replace("Explanation:", "-")
        reason = re.sub(r"\s+", " ", said).strip(" .")[:500]
        hint = "write the line in a way that torch.compile(fullgraph=True) understands, or move it out of forward"
    return CaptureError(
        f"the model cannot be captured as one graph: {reason}{f': `{code}`' if code else ''}",
        where=f"{file}:{number} in {function}" if lines else None,
        hint=hint,
    )
