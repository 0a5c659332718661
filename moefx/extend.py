"""What a user needs to add a scheduler, an all-to-all algorithm, a codec or a kernel. `docs/extending.md` walks through
it.

Register on every rank, before `moefx.compile`; then name it in `moefx.compile(.., scheduler=, alltoall=, codec=)`. A
kernel needs no name: programs call it wherever it takes a call.
"""

from moefx.costmodel.schedulers import Scheduler, register_scheduler
from moefx.costmodel.tasks import Schedule, Task, TaskGraph
from moefx.link.implementations import register_kernel
from moefx.transport.algorithms import INPUT, Algorithm, Blocks, Exchange, Local, register_all_to_all
from moefx.transport.codecs import Codec, register_codec

__all__ = [
    "INPUT",
    "Algorithm",
    "Blocks",
    "Codec",
    "Exchange",
    "Local",
    "Schedule",
    "Scheduler",
    "Task",
    "TaskGraph",
    "register_all_to_all",
    "register_codec",
    "register_kernel",
    "register_scheduler",
]
