"""cuVS, loaded when an index asks for it: the modules that are called, the arrays they take, and the version.

cuVS's wheels look for CUDA's libraries beside themselves. Where those came with another package into another folder (torch's do), they are
loaded first by CuPy's own finder, and the loader takes what is there. Nothing here computes.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fabric_pipelines.device import gpu
from fabric_pipelines.errors import DeviceRefused, MissingDependency

# What libcuvs and libraft name as needed, each after those it needs itself.
CUDA = ("nvJitLink", "cublasLt", "cublas", "cusparse", "cusolver", "curand", "nvrtc", "nccl")


@dataclass(frozen=True, slots=True)
class Library:
    """cupy makes the arrays on the card; refine is a function, the others are modules of cuvs.neighbors. Fault: what
    cuVS raises for all that it refuses."""

    cupy: ModuleType
    brute_force: ModuleType
    cagra: ModuleType
    ivf_pq: ModuleType
    filters: ModuleType
    refine: Any
    Fault: type[Exception]
    version: str


def library(why: str = "a search by cuVS") -> Library:
    """Raises MissingDependency without CuPy or cuVS, DeviceRefused without a card and where cuVS cannot be loaded."""
    cupy = gpu.import_cupy()
    if gpu.device_count() < 1:
        raise DeviceRefused(f"{why} needs a CUDA device, and none is there: use another kind")
    if "cuvs" not in sys.modules:
        _load_cuda()
    try:
        cuvs = importlib.import_module("cuvs")
        neighbors = importlib.import_module("cuvs.neighbors")
        exceptions = importlib.import_module("cuvs.common.exceptions")
    except ModuleNotFoundError as fault:
        raise MissingDependency("cuvs-cu13", "cuvs", why) from fault
    except ImportError as fault:
        raise DeviceRefused(
            f"cuVS is there but cannot be loaded ({fault}): install the library that it names "
            '(`pip install "fabric-pipelines[cuvs]"` brings all), or use another kind'
        ) from fault
    return Library(
        cupy, neighbors.brute_force, neighbors.cagra, neighbors.ivf_pq, neighbors.filters,
        neighbors.refine, exceptions.CuvsException, str(cuvs.__version__),
    )  # fmt: skip


def _load_cuda() -> None:
    """What the finder does not find may still be where the loader looks: cuVS says so itself, by name."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
    except ImportError:
        return
    for name in CUDA:
        try:
            pathfinder.load_nvidia_dynamic_lib(name)
        except (
            RuntimeError,
            ValueError,
        ):  # not found, or a name that an older finder does not know
            continue
