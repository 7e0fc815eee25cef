"""`fabric up`, `down` and `status`: one supervisor process that starts, watches, restarts and stops the rest.

One idea: the supervisor runs a table of processes and knows nothing of what they do. It keeps no data; killing
it loses nothing, since its processes end with it and each of them recovers alone.
"""

from fabric_pipelines.supervise.control import UpReport, down, fallen, join, let_go, state, up
from fabric_pipelines.supervise.place import ProcessState, SupervisorState
from fabric_pipelines.supervise.spec import Backoff, ProcessSpec, Ready
from fabric_pipelines.supervise.table import DEFAULT_ENGINES

__all__ = [
    "DEFAULT_ENGINES",
    "Backoff",
    "ProcessSpec",
    "ProcessState",
    "Ready",
    "SupervisorState",
    "UpReport",
    "down",
    "fallen",
    "join",
    "let_go",
    "state",
    "up",
]
