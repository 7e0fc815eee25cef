"""`python -m fabric_pipelines.testing.scripted_worker '{"kind": "embed", ...}'`: a real worker process around
the scripted engine, for tests with a real broker.

The argument is a JSON object with fields of ScriptedEngine, plus `script` (fields of Script), `profile` (four
numbers), `device` and `until_idle`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from fabric_pipelines import settings as settings_module
from fabric_pipelines.errors import FabricError
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.testing.scripted_engine import Script, ScriptedEngine
from fabric_pipelines.worker.service import log_to_stderr, print_report, run_worker


def engine_from(fields: dict[str, Any]) -> ScriptedEngine:
    asked: dict[str, Any] = fields.pop("script", {})
    rows: dict[str, Any] = {
        name: frozenset(value) for name, value in asked.items() if name.endswith("_rows")
    }
    script = Script(**{**asked, **rows})
    if "profile" in fields:
        fields["profile"] = Profile(*fields["profile"])
    elif fields.get("kind", "generate") != "generate":
        fields["profile"] = Profile(4, 64, 0, 64)  # a single pass has no cache
    return ScriptedEngine(script=script, **fields)


def main(argument: str) -> int:
    fields = json.loads(argument)
    device = fields.pop("device", "cpu:0")
    until_idle = fields.pop("until_idle", False)
    log_to_stderr()
    try:
        report = run_worker(
            engine_from(fields), settings_module.load(), device=device, until_idle=until_idle
        )
    except FabricError as fault:
        sys.stderr.write(f"{fault}\n")
        return fault.exit_code
    print_report(report)
    return 1 if report["undelivered"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
