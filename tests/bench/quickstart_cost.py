"""What `fabric quickstart` costs here: seconds of a first and a second run, peak memory of all processes, disk.

    python tests/bench/quickstart_cost.py [--folder DIR]

Memory is the sum of proportional set sizes (shared pages counted once over all who share them), sampled twice a
second over every process of the run. Models are taken from the cache; pull them first for a fair figure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


def pss_bytes(home: Path) -> int:
    """Of all processes that work for this home, by the FABRIC_HOME that they carry."""
    total = 0
    for process in psutil.process_iter():
        try:
            if process.environ().get("FABRIC_HOME") == str(home):
                total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return total


def run(home: Path) -> tuple[dict[str, object], float, int]:
    """(report, wall seconds, peak bytes) of one quickstart."""
    begin, peak = time.monotonic(), 0
    with subprocess.Popen(
        [sys.executable, "-m", "fabric_pipelines", "quickstart", "--json"],
        cwd=home.parent,
        env={**os.environ, "FABRIC_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None:
            peak = max(peak, pss_bytes(home))
            time.sleep(0.5)
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
    return report, time.monotonic() - begin, peak


def size_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_symlink())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the home of the run is made"
    )
    folder = Path(tempfile.mkdtemp(prefix="fabric-cost-", dir=parser.parse_args().folder))
    folder.chmod(0o755)
    home = folder / "home"
    try:
        print(f"load before: {os.getloadavg()[0]:.1f}, CPUs: {os.cpu_count()}")  # noqa: T201
        print("| run | seconds | whole command | tasks run | peak memory | home on disk |")  # noqa: T201
        print("|---|---|---|---|---|---|")  # noqa: T201
        for name in ("first", "second"):
            report, wall_s, peak = run(home)
            print(  # noqa: T201
                f"| {name} | {report['seconds']:.0f} | {wall_s:.0f} | {report['tasks']} "
                f"| {peak / 1e9:.2f} GB | {size_bytes(home) / 1e6:.0f} MB |",
                flush=True,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
