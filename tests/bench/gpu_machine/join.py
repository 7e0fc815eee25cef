"""On the machine with the card: parts to an installation, checked. Standard library alone; see fetch.py.

    python3 join.py FOLDER TARGET

FOLDER holds part.000 and so on with parts.json; TARGET is new or empty. Every part is compared with its digest before anything is
unpacked; missing and damaged ones are named, and the same command is run again when they are there. Leaves TARGET/site (packages),
TARGET/src (the tree) and TARGET/env.sh, which a shell sources; nothing of the machine's own Python is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 20


class Stream:
    """The parts end to end, for tarfile; each is hashed while it is read."""

    def __init__(self, folder: Path, parts: list[dict[str, Any]]) -> None:
        self._blocks = self._read(folder, parts)
        self._left = b""

    def read(self, size: int) -> bytes:
        while len(self._left) < size and (block := next(self._blocks, b"")):
            self._left += block
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    @staticmethod
    def _read(folder: Path, parts: list[dict[str, Any]]) -> Iterator[bytes]:
        for part in parts:
            with (folder / part["name"]).open("rb") as file:
                while block := file.read(BLOCK):
                    yield block


def faults(folder: Path, parts: list[dict[str, Any]]) -> list[str]:
    """Of each part that is not there as it was sent, what is wrong."""
    found: list[str] = []
    for part in parts:
        path = folder / part["name"]
        if not path.is_file():
            found.append(f"{part['name']} is missing")
        elif path.stat().st_size != part["size"]:
            found.append(f"{part['name']} has {path.stat().st_size} bytes, not {part['size']}")
        elif digest(path) != part["sha256"]:
            found.append(f"{part['name']} changed on its way (sha256 differs)")
    return found


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(folder: Path, parts: list[dict[str, Any]], target: Path) -> None:
    with tarfile.open(fileobj=Stream(folder, parts), mode="r|") as stream:  # type: ignore[call-overload]
        stream.extractall(target, filter="data")


def install(target: Path) -> None:
    """The wheels into a folder of their own."""
    wheels = sorted(str(path) for path in (target / "wheels").glob("*.whl"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"),
            *("--no-index", "--no-deps", "--no-compile", "--no-cache-dir"),
            *("--target", str(target / "site"), *wheels),
        ],
        check=True,
    )
    shutil.rmtree(target / "wheels")


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    folder, target = Path(argv[0]).resolve(), Path(argv[1]).resolve()
    says: dict[str, Any] = json.loads((folder / "parts.json").read_bytes())
    python = ".".join(map(str, sys.version_info[:2]))
    wrong = [] if python == says["python"] else [f"this is Python {python}, not {says['python']}"]
    wrong += faults(folder, says["parts"])
    if target.exists() and any(target.iterdir()):
        wrong.append(f"{target} is not empty")
    if wrong:
        sys.stderr.write("nothing was unpacked:\n" + "".join(f"  {line}\n" for line in wrong))
        return 1
    target.mkdir(parents=True, exist_ok=True)
    unpack(folder, says["parts"], target)
    install(target)
    (target / "versions.json").write_text(json.dumps(says["versions"]))
    path = f"{target / 'site'}:{target / 'src'}"
    (target / "env.sh").write_text(f'cd "{target / "src"}"\nexport PYTHONPATH="{path}" PYTHONUNBUFFERED=1\n')  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.gpu_machine.check", str(target / "versions.json")],
        cwd=target / "src",
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode == 0:
        sys.stdout.write(f". {target / 'env.sh'}\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
