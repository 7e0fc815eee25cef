"""How a run is spread over processes: a file stays in one, and so do all files that start whole fabrics."""

from __future__ import annotations

import re
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Two that start at the same moment would find the same port free for their UI; one process starts them in turn.
WHOLE_FABRICS = re.compile(
    r"tests/(browser|pipelines)/|tests/services/test_(first_use|kill_matrix|supervise|standby|submit_midway|waiting_shown)"
)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """A process that dies costs the test it ran and nothing else: its other tests run in the next one.

    The scheduler underneath (xdist 3.8) would run that test again, and leaves runs that never end: it hands on finished files,
    of which a process has nothing to report, and is sent nothing more; and a new process gets one file, whose only test waits for
    a second one or for the end."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "whole fabrics" if WHOLE_FABRICS.match(file) else file

    def remove_node(self, node: Any) -> str | None:
        work = self.assigned_work[node]
        left = {
            scope: [test for test, done in tests.items() if not done]
            for scope, tests in work.items()
        }
        died_in = next((test for tests in left.values() for test in tests), None)
        for scope, tests in left.items():
            if died_in in tests:
                work[scope][died_in] = True
            if tests in ([], [died_in]):
                del work[scope]
        super().remove_node(node)
        return died_in

    def _reschedule(self, node: Any) -> None:
        if (
            node not in self.registered_collections
        ):  # a new process, which is asked again once it has collected
            return
        super()._reschedule(node)
        while (
            self.workqueue
            and not node.shutting_down
            and self._pending_of(self.assigned_work[node]) < 2
        ):
            super()._reschedule(node)
        if not self.workqueue:
            super()._reschedule(node)  # which tells it that nothing will follow
