"""How a run is spread over processes: a file stays in one, and so do all files that start whole fabrics."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

# Two that start at the same moment would find the same port free for their UI; one process starts them in turn.
WHOLE_FABRICS = re.compile(
    r"tests/(browser|pipelines)/|tests/services/test_(first_use|kill_matrix|supervise|standby|submit_midway|waiting_shown)"
)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "whole fabrics" if WHOLE_FABRICS.match(file) else file
