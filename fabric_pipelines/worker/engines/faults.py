"""What a fault of a library says: of the tasks that it was given, or of the engine.

An engine's own thread, step or submit may meet any exception. A judgement of what was given (a wrong value, type or index)
fails its tasks, however often it comes: one submission must not cost a worker. Other faults fail their tasks too, and mean a
broken engine when several come in a row. A lost device means it at once, since nothing runs on it any more.
"""

from __future__ import annotations

import re

from fabric_pipelines.errors import EngineFailed, MissingDependency

# No AttributeError: that is what an engine meets whose session is gone.
JUDGEMENTS = (ValueError, TypeError, LookupError, ArithmeticError)
LOST_DEVICE = re.compile(r"CUDA (error|failure)|cudaError|CUDNN_STATUS|EngineDead", re.IGNORECASE)
NO_ROOM = re.compile(r"out of memory|MemoryAllocation", re.IGNORECASE)


def ends_engine(fault: BaseException) -> bool:
    """Whether nothing can run on this engine after `fault`. Too little memory for one step is no such thing."""
    if isinstance(fault, EngineFailed | MissingDependency):
        return True
    said = f"{type(fault).__name__}: {fault}"
    return bool(LOST_DEVICE.search(said)) and not NO_ROOM.search(said)


def is_judgement(fault: BaseException) -> bool:
    """Whether the library says that what it was given is wrong, and nothing of itself."""
    return isinstance(fault, JUDGEMENTS) and not ends_engine(fault)


def told(fault: BaseException) -> str:
    """For the task that failed by it, or as the end of a sentence: a MemoryError and many others say nothing of themselves."""
    kind, text = type(fault).__name__, str(fault).strip()
    if not text:
        return kind
    return text if type(fault) is RuntimeError else f"{kind}: {text}"
