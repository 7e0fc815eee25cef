"""`python -m fabric_pipelines.worker --engine NAME --device cpu:0`: one engine on one device, until SIGTERM.

stderr has the log, stdout one JSON object with the counters at the end. Exit codes are those of `fabric`.
"""

from __future__ import annotations

import argparse
import os
import sys

from fabric_pipelines import settings as settings_module
from fabric_pipelines.errors import FabricError, as_line
from fabric_pipelines.worker.service import log_to_stderr, print_report, run_engine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fabric-worker", description=__doc__)
    parser.add_argument("--engine", required=True, help="engine name, e.g. model@runtime")
    parser.add_argument("--device", default="cpu:0", help="cpu:N or cuda:N")
    parser.add_argument("--until-idle", action="store_true", help="end once nothing is ready")
    parser.add_argument(
        "--steps-ahead", type=int, help="of a vLLM engine, instead of the setting steps_ahead"
    )
    asked = parser.parse_args(argv)
    log_to_stderr()
    try:
        report = run_engine(
            asked.engine,
            settings_module.load(),
            device=asked.device,
            until_idle=asked.until_idle,
            steps_ahead=asked.steps_ahead,
        )
    except FabricError as fault:
        sys.stderr.write(as_line(fault) + "\n")
        if os.environ.get("FABRIC_DEBUG") == "1":
            raise
        return fault.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("ended by a second signal: what was leased runs out and is run again\n")
        return 130
    print_report(report)
    return 1 if report["undelivered"] else 0


if __name__ == "__main__":
    sys.exit(main())
