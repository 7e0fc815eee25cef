"""What a machine with a card needs to run tests/gpu and tests/bench/*_on_cuda.py, as parts that are small enough to carry.

    python -m tests.bench.gpu_machine.fetch OUT [--with base,tests,postgres,vllm] [--part-mib 60]

The other machine has Linux on x86-64, Python 3.12 and torch with CUDA, and reaches no index. Everything else is pinned in
packages/*.txt, one file a group, with the sha256 of the one wheel that fits it; pip refuses other bytes. The wheels and this
tree as git knows it become one stream, cut into parts; OUT then holds part.000 and so on, parts.json with their digests, and
join.py. There, when all of it has arrived, in one go or in several:

    python3 join.py FOLDER TARGET

Anything that git does not know stays here: results of a run, models, a home.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TREE = HERE.parents[2]
GROUPS = ("base", "tests", "postgres", "numpy", "cupy", "cuvs", "peers", "transformers", "vllm")
USUAL = "base,tests,postgres"
PYTHON = "3.12"
GLIBCS = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)
PLATFORMS = ("any", "manylinux1_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in GLIBCS))  # fmt: skip
CARRIED = ("fabric_pipelines", "assets", "resources", "tests", "pyproject.toml", "LICENSE")
PIN = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})"
)


def pins(group: str) -> dict[str, str]:
    """Distribution to version, of one group. ValueError names a line that pins nothing."""
    found: dict[str, str] = {}
    for line in (HERE / "packages" / f"{group}.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = PIN.fullmatch(line)
        if pin is None:
            raise ValueError(f"{group}.txt: {line!r} is no name==version with one digest")
        found[pin["name"]] = pin["version"]
    return found


def download(groups: Sequence[str], to: Path) -> None:
    """The wheels of `groups` into `to`; CalledProcessError when pip finds other bytes, or none."""
    said = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    said += [word for platform in PLATFORMS for word in ("--platform", platform)]
    for group in groups:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"),
                *("--no-deps", "--require-hashes", "-d", str(to), *said),
                *("-r", str(HERE / "packages" / f"{group}.txt")),
            ],
            check=True,
        )


class Parts:
    """A stream that becomes files of at most `bytes_max`."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max
        self._buffer = io.BytesIO()
        self.written: list[dict[str, Any]] = []

    def write(self, given: bytes) -> int:
        left = memoryview(given)
        while left:
            took = left[: self._bytes_max - self._buffer.tell()]
            self._buffer.write(took)
            left = left[len(took) :]
            if self._buffer.tell() == self._bytes_max:
                self._end()
        return len(given)

    def close(self) -> None:
        if self._buffer.tell():
            self._end()

    def _end(self) -> None:
        content, name = self._buffer.getvalue(), f"part.{len(self.written):03d}"
        (self._folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        self.written.append({"name": name, "size": len(content), "sha256": digest})
        self._buffer = io.BytesIO()


def pack(
    files: Iterable[tuple[Path, str]], out: Path, bytes_max: int, says: Mapping[str, Any]
) -> list[str]:
    """`files` (where it lies, its name in the stream) as parts in `out`, beside parts.json, which holds `says` too, and join.py;
    the names of the parts. `out` is empty or new."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty: parts of two fetches must not mix")
    parts = Parts(out, bytes_max)
    with tarfile.open(fileobj=parts, mode="w|") as stream:  # type: ignore[call-overload]
        for path, name in files:
            stream.add(path, name, recursive=False)
    parts.close()
    (out / "parts.json").write_text(json.dumps({**says, "parts": parts.written}, indent=1))
    shutil.copy(HERE / "join.py", out)
    return [part["name"] for part in parts.written]


def tree_files(tree: Path) -> list[tuple[Path, str]]:
    """What git knows of the carried folders, as it lies here now."""
    told = subprocess.run(
        ["git", "-C", str(tree), "ls-files", "-z", "--", *CARRIED], check=True, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    names = sorted(name for name in told.stdout.split("\0") if name)
    return [(tree / name, f"src/{name}") for name in names if (tree / name).is_file()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("out", type=Path)
    parser.add_argument("--with", dest="groups", default=USUAL, help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--part-mib", type=int, default=60)
    given = parser.parse_args(argv)
    groups: list[str] = given.groups.split(",")
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown or given.part_mib < 1:
        parser.error(f"groups {unknown} are unknown, or --part-mib {given.part_mib} is below 1")
    with tempfile.TemporaryDirectory(prefix="fabric-") as folder:
        wheels = Path(folder)
        download(groups, wheels)
        files = [(path, f"wheels/{path.name}") for path in sorted(wheels.iterdir())]
        versions = {name: version for group in groups for name, version in pins(group).items()}
        says = {"python": PYTHON, "groups": groups, "versions": versions}
        parts = pack([*files, *tree_files(TREE)], given.out, given.part_mib << 20, says)
    size = sum(path.stat().st_size for path in given.out.iterdir())
    sys.stdout.write(
        f"{len(files)} wheels of {', '.join(groups)} and the tree: {len(parts)} parts, {size / 1e6:.1f} MB in {given.out}\n"
        f"there: python3 join.py FOLDER TARGET\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
