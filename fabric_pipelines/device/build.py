"""Collect what cuda/Makefile compiled: `python -m fabric_pipelines.device.build report|install BUILD SOURCES`.

`report` prints registers and spills of each entry; `install` also copies the cubins into the package and
writes the manifest. The compiler itself is called by the Makefile; numbers come from its own log.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fabric_pipelines.device.cubins import (
    FOLDER,
    MANIFEST_NAME,
    Cubin,
    CubinManifest,
    Entry,
    entry_names,
    holds_ptx,
)
from fabric_pipelines.errors import CheckFailed, MissingDependency, UsageError

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_\d+\w?'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
FLAGS = re.compile(r"^FLAGS := (.*)$", re.MULTILINE)


def parse_log(text: str) -> dict[str, Entry]:
    """Entries of one `-Xptxas -v` log."""
    return {
        found["name"]: Entry(int(found["registers"]), int(found["stores"]), int(found["loads"]))
        for found in ENTRY.finditer(text)
    }


def compiler_version(nvcc: str = "nvcc") -> str:
    """Release line of the compiler, e.g. "release 13.0, V13.0.88"."""
    path = shutil.which(nvcc)
    if path is None:
        raise MissingDependency("nvcc", "gpu", "building kernels")
    text = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"release .*", text)
    assert found, text
    return found[0]


def source_digests(sources: Path) -> dict[str, str]:
    """sha256 of every .cu and .cuh below `sources`, and of the Makefile that holds the flags."""
    files = [*sources.glob("*.cu"), *sources.glob("include/*.cuh"), sources / "Makefile"]
    return {
        str(path.relative_to(sources)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


def _collect(build: Path) -> Iterator[Cubin]:
    for path in sorted(build.glob("sm_*/*.cubin")):
        content = path.read_bytes()
        entries = parse_log(path.with_suffix(".log").read_text())
        if sorted(entries) != entry_names(content):
            raise CheckFailed(
                f"{path} holds the entries {entry_names(content)}, its log speaks of "
                f"{sorted(entries)}: run `make -C cuda clean` and build again"
            )
        yield Cubin(
            family=path.stem,
            arch=path.parent.name,
            sha256=hashlib.sha256(content).hexdigest(),
            size=len(content),
            ptx=holds_ptx(content),
            entries=entries,
        )


def collect(build: Path, sources: Path) -> CubinManifest:
    flags = FLAGS.search((sources / "Makefile").read_text())
    assert flags, "cuda/Makefile has lost its FLAGS line"
    cubins = sorted(_collect(build), key=lambda cubin: (cubin.family, int(cubin.arch[3:])))
    return CubinManifest(compiler_version(), flags[1], source_digests(sources), tuple(cubins))


def install(manifest: CubinManifest, build: Path, folder: Path = FOLDER) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    for cubin in manifest.cubins:
        target = folder / cubin.arch / f"{cubin.family}.cubin"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(build / cubin.arch / target.name, target)
    text = json.dumps(manifest.as_json(), indent=1)
    (folder / MANIFEST_NAME).write_text(text + "\n")


def table(manifest: CubinManifest) -> str:
    lines = [f"{'entry':<32}{'arch':<8}{'registers':>10}{'spill bytes':>13}{'ptx':>6}"]
    for cubin in manifest.cubins:
        lines += [
            f"{name:<32}{cubin.arch:<8}{entry.registers:>10}"
            f"{entry.spill_stores + entry.spill_loads:>13}{'yes' if cubin.ptx else 'no':>6}"
            for name, entry in sorted(cubin.entries.items())
        ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 3 or arguments[0] not in ("report", "install"):
        raise UsageError(
            "usage: python -m fabric_pipelines.device.build report|install BUILD SOURCES"
        )
    build, sources = Path(arguments[1]), Path(arguments[2])
    manifest = collect(build, sources)
    sys.stdout.write(table(manifest))
    if arguments[0] == "install":
        install(manifest, build)


if __name__ == "__main__":
    main(sys.argv[1:])
