"""The compiled kernels that ship with the package: which exist, which fits a card, and that they are unchanged.

A cubin of sm_XY runs on every card X.Z with Z >= Y and on no other; there is no PTX to fall back to. The
manifest beside them carries sha256, registers and spills of each; an image is hashed before it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import CorruptionFound, DeviceRefused, DigestMismatch
from fabric_pipelines.given import value_of

FOLDER = Path(__file__).parent / "cubin"
MANIFEST_NAME = "manifest.json"
WHAT = "manifest of cubins"
REMEDY = "reinstall, or run `make -C cuda install`"
ELF_MACHINE_CUDA = 190
_FAMILY, _ARCH = re.compile(r"[a-z0-9_]{1,100}"), re.compile(r"sm_[0-9]{2,4}[a-z]?")
PTX_SECTIONS = (".nv_fatbin", ".nvFatBinSegment", ".nv_debug_ptx_txt")


@dataclass(frozen=True, slots=True)
class Entry:
    """One __global__ function: registers a thread, bytes spilled to local memory."""

    registers: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """One family compiled for one architecture. `ptx` is read from the file, never assumed."""

    family: str
    arch: str
    sha256: str
    size: int
    ptx: bool
    entries: Mapping[str, Entry]

    def __post_init__(self) -> None:
        """Both become names of files."""
        if not (_FAMILY.fullmatch(self.family) and _ARCH.fullmatch(self.arch)):
            raise CorruptionFound(f"it names a cubin {self.arch!r:.40}/{self.family!r:.40}")

    @property
    def path(self) -> Path:
        return FOLDER / self.arch / f"{self.family}.cubin"

    @property
    def registers(self) -> int:
        return max(entry.registers for entry in self.entries.values())

    @property
    def spills(self) -> int:
        return sum(entry.spill_stores + entry.spill_loads for entry in self.entries.values())

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("family", "arch", "sha256", "size", "ptx")},
            "registers": self.registers,
            "spills": self.spills,
            "entries": {name: asdict(entry) for name, entry in sorted(self.entries.items())},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], where: str = "a cubin's manifest") -> Cubin:
        entries = {
            name: value_of(Entry, entry, where, what=WHAT, remedy=REMEDY)
            for name, entry in fields["entries"].items()
        }
        names = ("family", "arch", "sha256", "size", "ptx")
        told = {name: fields[name] for name in names} | {"entries": entries}
        return value_of(cls, told, where, what=WHAT, remedy=REMEDY)


@dataclass(frozen=True, slots=True)
class CubinManifest:
    """compiler: version line of nvcc; sources: sha256 over the .cu and .cuh files, by file name."""

    compiler: str
    flags: str
    sources: Mapping[str, str]
    cubins: tuple[Cubin, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "compiler": self.compiler,
            "flags": self.flags,
            "sources": dict(sorted(self.sources.items())),
            "cubins": [cubin.as_json() for cubin in self.cubins],
        }


def read_manifest(folder: Path = FOLDER) -> CubinManifest:
    path = folder / MANIFEST_NAME
    try:
        fields = json.loads(path.read_text())
        cubins = tuple(Cubin.from_json(item, str(path)) for item in fields["cubins"])
        return CubinManifest(fields["compiler"], fields["flags"], fields["sources"], cubins)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise CorruptionFound(f"{path} cannot be read ({fault}); {REMEDY}") from fault


def kernels_list() -> dict[str, list[dict[str, Any]]]:
    """What `fabric kernels list --json` prints: {"kernels": [{family, arch, digest, registers, spills, ptx}]}."""
    return {
        "kernels": [
            {
                "family": cubin.family,
                "arch": cubin.arch,
                "digest": cubin.sha256,
                "registers": cubin.registers,
                "spills": cubin.spills,
                "ptx": cubin.ptx,
            }
            for cubin in read_manifest().cubins
        ]
    }


def architecture_for(capability: tuple[int, int], compiled: frozenset[str]) -> str:
    """The architecture of `compiled` ("sm_90") whose machine code runs on a card of this compute capability."""
    major, minor = capability
    fits = [
        number
        for number in (int(arch.removeprefix("sm_")) for arch in compiled)
        if number // 10 == major and number % 10 <= minor
    ]
    if not fits:
        raise DeviceRefused(
            f"no kernel was compiled for compute capability {major}.{minor} (there are "
            f"{', '.join(sorted(compiled))}): add it to ARCHS in cuda/Makefile and run "
            "`make -C cuda install`, or use the cpu backend"
        )
    return f"sm_{max(fits)}"


def image(family: str, capability: tuple[int, int]) -> bytes:
    """Verified bytes of the cubin of `family` for a card. Raises DeviceRefused, DigestMismatch."""
    own = [cubin for cubin in read_manifest().cubins if cubin.family == family]
    if not own:
        raise DeviceRefused(
            f"there is no kernel family {family!r}; `fabric kernels list` shows all"
        )
    arch = architecture_for(capability, frozenset(cubin.arch for cubin in own))
    cubin = next(cubin for cubin in own if cubin.arch == arch)
    content = cubin.path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != cubin.sha256:
        raise DigestMismatch(
            f"{cubin.path} has sha256 {found}, the manifest says {cubin.sha256}: reinstall the package"
        )
    return content


def section_names(content: bytes) -> list[str]:
    """Section names of a cubin, which is an ELF file for machine 190. Raises CorruptionFound."""
    if (
        content[:5] != b"\x7fELF\x02"
        or struct.unpack_from("<H", content, 18)[0] != ELF_MACHINE_CUDA
    ):
        raise CorruptionFound("not a cubin: no 64-bit ELF header for a CUDA machine")
    (table,) = struct.unpack_from("<Q", content, 40)
    size, count, names_index = struct.unpack_from("<HHH", content, 58)
    headers = [struct.unpack_from("<IIQQQQ", content, table + size * i) for i in range(count)]
    names_at = headers[names_index][4]
    return [
        content[names_at + head[0] : content.index(b"\0", names_at + head[0])].decode()
        for head in headers
    ]


def entry_names(content: bytes) -> list[str]:
    """Names of the __global__ functions inside a cubin."""
    return sorted(
        name.removeprefix(".text.") for name in section_names(content) if name.startswith(".text.")
    )


def holds_ptx(content: bytes) -> bool:
    """Whether a file carries PTX: a fat binary, a debug section with it, or its text."""
    return b".target sm_" in content or any(
        name.startswith(PTX_SECTIONS) for name in section_names(content)
    )
