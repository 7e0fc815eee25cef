"""A stand-in for a card that runs the kernels' own sources on the CPU: cuda/*.cu compiled as C++ against host_cuda.h.

It shows that a kernel's arithmetic, borders, barriers and launches are right, and nothing about speed or about what
nvcc makes of it: a run here is never a run on a card. Every launch runs twice, with threads and blocks in one order
and in the opposite one, and must leave the same bytes. Memory is NaN until written, ends at a page that nobody may
touch, and only arrays taken from this card may be handed to a kernel.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import math
import mmap
import re
import shutil
import subprocess
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.device.card import DeviceArray, Lent, Memory
from fabric_pipelines.device.gpu import THREADS
from fabric_pipelines.errors import CheckFailed, DeviceRefused, MissingDependency

HEADER = Path(__file__).with_name("host_cuda.h")
# No sanitiser's library: it would have to be loaded before Python. Traps need none, guard pages find what is outside.
FLAGS = (
    "-x", "c++", "-std=c++17", "-O1", "-g1", "-w", "-fPIC", "-shared", "-march=native", "-ffp-contract=off",
    "-fno-strict-aliasing", "-fno-exceptions", "-fno-threadsafe-statics", "-fno-gnu-unique",
    "-fvisibility=hidden", "-ftrivial-auto-var-init=pattern",
    "-fsanitize=bounds,alignment,shift,signed-integer-overflow,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
)  # fmt: skip
RACES = ("-fsanitize=thread", "-DHOST_RACES")
ENTRY = re.compile(
    r"__global__\s+void\s+(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\("
)
GUARD_BYTES = 64 << 20  # never touched, so they cost addresses only
NORESERVE = 0x4000  # of Linux's mmap, which Python does not name before 3.13
MULTIPROCESSORS = 2
UNORDERED = (
    "flat_take_cosine",
    "flat_take_l2",
    "csr_select_insert",
    "knn_graph_hook_32",
    "knn_graph_hook_64",
)
_ONE_AT_A_TIME = (
    threading.Lock()
)  # threadIdx and its kin are variables of the library, the stacks are the process's
_stacks: int | None = None  # of the threads of a block


class _Report(ctypes.Structure):
    _fields_ = (
        ("failed", ctypes.c_int),
        ("message", ctypes.c_char * 1000),
        ("address", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
    )


def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    place, size, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (place, size, word, word, word, ctypes.c_long)
    library.mprotect.argtypes = (place, size, word)
    library.munmap.argtypes = (place, size)
    return library


class _Pages:
    """Memory whose last byte is followed, and whose first page is preceded, by pages that trap."""

    _libc = _c_library()

    def __init__(self, size: int, *, sparse: bool = False) -> None:
        inner = -(-max(1, size) // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = inner + 2 * GUARD_BYTES
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (NORESERVE if sparse else 0)
        start = self._libc.mmap(None, whole, 0, kind, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise DeviceRefused(f"the host has no room for {size:,} bytes")
        weakref.finalize(self, self._libc.munmap, start, whole)
        if self._libc.mprotect(start + GUARD_BYTES, inner, mmap.PROT_READ | mmap.PROT_WRITE):
            raise DeviceRefused(f"the host has no room for one more array, of {size:,} bytes")
        self.size, self.address = size, start + GUARD_BYTES + inner - size
        self.slack = (start + GUARD_BYTES, inner - size)
        ctypes.memset(start + GUARD_BYTES, 0xFF, inner - size if sparse else inner)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def untouched_before(self) -> bool:
        return not ctypes.string_at(*self.slack).strip(b"\xff")


class HostGpu:
    """sources: folder of the .cu files; build: folder for what is compiled from them, shared by processes.
    unordered: kernels whose output may come in any order, by their contract: each launch takes the other order.
    races: refuse a launch in which two threads touch a value, one of them writes it, and nothing orders them; some 10 times
    as slow, and not asked of `unordered` kernels, whose plain loads may see what atomics write."""

    name = "host stand-in (no card)"
    address = "host-0"

    def __init__(
        self,
        sources: Path,
        build: Path,
        *,
        unordered: Sequence[str] = UNORDERED,
        races: bool = False,
    ) -> None:
        self._compiler = compiler()
        self._sources, self._build, self._unordered = sources, build, frozenset(unordered)
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._races = races
        self._pages: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()
        self._kept: Lent | None = None
        self.launches: Counter[str] = Counter()

    def memory(self) -> Memory:
        return Memory(1 << 30, 1 << 30)

    def require_memory(self, size: int, what: str, remedy: str) -> None:
        """Whatever a test asks for is there; `empty` refuses what the host has not."""

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Uninitialised: every byte 0xff, which is NaN or -1."""
        kind = np.dtype(dtype)
        sides = (shape,) if isinstance(shape, int) else tuple(shape)
        pages = _Pages(math.prod(sides) * kind.itemsize)
        self._pages[pages.address] = pages
        return np.asarray(pages).view(kind).reshape(sides)

    def sparse(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Zeros that take memory where they are touched only: for arrays larger than this machine. A kernel may read
        them, not write them, since what it writes is copied; unless its output may come in any order."""
        kind = np.dtype(dtype)
        pages = _Pages(math.prod(shape) * kind.itemsize, sparse=True)
        self._pages[pages.address] = pages
        return np.asarray(pages).view(kind).reshape(shape)

    def lend(self, size: int) -> Lent:
        """Every byte 0xff again, as of `empty`."""
        kept, self._kept = self._kept, None
        if kept is None or kept.block.nbytes < size:
            return Lent(self.empty(size, np.uint8))
        kept.block[...] = 0xFF
        return kept

    def take_back(self, lent: Lent) -> None:
        self._kept = lent

    def trim(self) -> None:
        """Memory went back with its last reference, but for what is kept to be lent."""
        self._kept = None

    def upload(self, host: npt.NDArray[Any]) -> DeviceArray:
        target = self.empty(host.shape, host.dtype)
        self.store(target, host)
        return target

    def store(self, target: DeviceArray, host: npt.NDArray[Any]) -> None:
        assert target.shape == host.shape
        assert target.dtype == host.dtype
        target[...] = host

    def download(self, source: DeviceArray) -> npt.NDArray[Any]:
        copied: npt.NDArray[Any] = np.array(source)
        return copied

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        assert target.nbytes == source.nbytes
        _bytes_of(target)[:] = _bytes_of(source)

    def fill(self, target: DeviceArray, byte: int) -> None:
        _bytes_of(target)[:] = byte

    def products(
        self, left: DeviceArray, right: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        """A library's work on a card, so numpy's here."""
        found = left.astype(np.float32) @ right.astype(np.float32).T
        part = out[: len(left), : len(right)]
        part[...] = part + found if add else found

    def offset_of(self, array: DeviceArray) -> int:
        return int(array.ctypes.data)

    def blocks_for(self, warps: int) -> int:
        return max(1, min(-(-warps * 32 // THREADS), MULTIPROCESSORS * 16))

    def synchronize(self) -> None:
        """A launch is over when it returns."""

    def close(self) -> None:
        """Nothing is held beyond the arrays."""

    def launch(self, family: str, symbol: str, blocks: int, arguments: Sequence[Any]) -> None:
        """CheckFailed names the kernel, and the line where there is one, of what a card would not have told."""
        library = self._library(family)
        try:
            signature = getattr(library, f"host_signature_{symbol}")
        except AttributeError as fault:
            raise CheckFailed(f"cuda/{family}.cu has no kernel {symbol}") from fault
        signature.restype = ctypes.c_char_p
        kinds = signature().decode("latin-1")
        held = self._checked(symbol, kinds, arguments)
        self.launches[symbol] += 1
        if symbol in self._unordered:
            falling = self.launches[symbol] % 2 == 0
            self._run(library, family, symbol, blocks, arguments, held, falling=falling)
            return
        changing = [array for array, kind in zip(arguments, kinds[::3], strict=True) if kind == "w"]
        before = [array.copy() for array in changing]
        self._run(library, family, symbol, blocks, arguments, held, falling=False)
        after = [array.copy() for array in changing]
        for array, old in zip(changing, before, strict=True):
            array[...] = old
        self._run(library, family, symbol, blocks, arguments, held, falling=True)
        for array, first in zip(changing, after, strict=True):
            if array.tobytes() != first.tobytes():
                number = next(at for at, other in enumerate(arguments) if other is array)
                raise CheckFailed(
                    f"{symbol}: argument {number} depends on the order in which threads run: "
                    f"a barrier or an atomic is missing"
                )

    def _checked(self, symbol: str, kinds: str, arguments: Sequence[Any]) -> list[Any]:
        """Arguments as the kernel will read them, each of the size that its parameter has."""
        if len(kinds) != 3 * len(arguments):
            raise CheckFailed(
                f"{symbol} takes {len(kinds) // 3} arguments, the launch gives {len(arguments)}"
            )
        held = []
        for number, item in enumerate(arguments):
            expected = kinds[3 * number : 3 * number + 3]
            if not _fits(item, *expected):
                raise CheckFailed(
                    f"{symbol}: argument {number} is {_in_words(item)}, the kernel reads {expected}"
                )
            if isinstance(item, np.ndarray):
                self._owner(symbol, number, item)
            held.append(_as_argument(item))
        return held

    def _owner(self, symbol: str, number: int, array: npt.NDArray[Any]) -> _Pages:
        start = array.ctypes.data
        if array.flags.c_contiguous:
            for pages in list(self._pages.values()):
                if pages.address <= start and start + array.nbytes <= pages.address + pages.size:
                    return pages
        raise CheckFailed(
            f"{symbol}: argument {number}, {_in_words(array)}, is not memory of this card"
        )

    def _run(
        self, library: ctypes.CDLL, family: str, symbol: str, blocks: int,
        arguments: Sequence[Any], held: Sequence[Any], *, falling: bool,
    ) -> None:  # fmt: skip
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        report = _Report()
        with _ONE_AT_A_TIME:
            if self._races:
                areas = [] if symbol in self._unordered else _areas(arguments)
                library.host_watch((ctypes.c_uint64 * len(areas))(*areas), len(areas) // 4)
            getattr(library, f"host_launch_{symbol}")(
                ctypes.c_uint(blocks), ctypes.c_uint(THREADS), places, int(falling), ctypes.byref(report)
            )  # fmt: skip
        if report.failed:
            message = report.message.decode(errors="replace")
            if report.failed > 1:
                message += self._place(library, report, arguments)
            raise CheckFailed(message)
        for number, item in enumerate(arguments):
            if (
                isinstance(item, np.ndarray)
                and not self._owner(symbol, number, item).untouched_before()
            ):
                raise CheckFailed(f"{symbol} wrote before the start of argument {number}")

    def _place(self, library: ctypes.CDLL, report: _Report, arguments: Sequence[Any]) -> str:
        """Where in the source a signal came from, and next to which argument it touched."""
        text = ""
        for number, item in enumerate(arguments):
            if isinstance(item, np.ndarray):
                start, past = item.ctypes.data, report.address - item.ctypes.data - item.nbytes
                if 0 <= past < GUARD_BYTES or 0 < start - report.address < GUARD_BYTES:
                    where = f"{past:,} past the end" if past >= 0 else "before the start"
                    text += f", byte {where} of argument {number} ({_in_words(item)})"
        tool = shutil.which("addr2line")
        if tool:
            found = subprocess.run(
                [tool, "-i", "-s", "-e", library._name, hex(report.offset)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            lines = [line.split(" ")[0] for line in found.stdout.splitlines()]
            own = [line for line in lines if ".cu" in line]
            text += f", at {' called from '.join(own)}" if own else ""
        return text

    def _library(self, family: str) -> ctypes.CDLL:
        if family not in self._libraries:
            library = ctypes.CDLL(str(self._compiled(family)))
            _give_stacks(library)
            self._libraries[family] = library
        return self._libraries[family]

    def _compiled(self, family: str) -> Path:
        source = self._sources / f"{family}.cu"
        texts = [HEADER, source, *sorted(self._sources.glob("include/*.cuh"))]
        digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in texts))
        digest.update(" ".join((*FLAGS, *RACES)).encode())
        kind = "races-" if self._races else ""
        target = self._build / f"{family}-{kind}{digest.hexdigest()[:16]}.so"
        with _locked(self._build / f"{family}.lock"):
            if not target.exists():
                self._compile(source, target)
        return target

    def _compile(self, source: Path, target: Path) -> None:
        include = f"-I{self._sources / 'include'}"
        whole = _call([self._compiler, "-x", "c++", "-std=c++17", "-E", "-P", include, str(source)])
        names = ENTRY.findall(whole)
        unit = target.with_suffix(".cc")
        lines = [f'#include "{HEADER}"', f'#include "{source.resolve()}"']
        unit.write_text("\n".join([*lines, *(f"HOST_ENTRY({name})" for name in names)]) + "\n")
        fresh = target.with_suffix(".part")
        if self._races:  # linked by itself, without the sanitiser's own library
            piece = target.with_suffix(".o")
            flags = [flag for flag in FLAGS if flag != "-shared"]
            _call([self._compiler, *flags, *RACES, "-c", include, str(unit), "-o", str(piece)])
            _call(
                [self._compiler, "-shared", "-Wl,-Bsymbolic", str(piece), "-o", str(fresh), "-ldl"]
            )
        else:
            _call([self._compiler, *FLAGS, include, str(unit), "-o", str(fresh), "-ldl"])
        fresh.rename(target)


def _give_stacks(library: ctypes.CDLL) -> None:
    """Of 2,048 mappings each, so one area for all libraries: 32 with their own were more than a process may have."""
    global _stacks
    library.host_stacks.restype = ctypes.c_void_p
    library.host_stacks.argtypes = (ctypes.c_void_p,)
    with _ONE_AT_A_TIME:
        _stacks = library.host_stacks(_stacks)
    if _stacks is None:
        raise DeviceRefused("the host has no room for the stacks of a block's threads")


def compiler() -> str:
    """Path of g++. MissingDependency without it."""
    path = shutil.which("g++")
    if path is None:
        raise MissingDependency("g++", "dev", "kernels on the CPU")
    return path


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailed(
            f"{Path(command[-1]).name} does not compile for the host: {done.stderr[-3000:]}"
        )
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _fits(item: Any, mode: str, kind: str, size: str) -> bool:
    """Whether a parameter (letters of host_cuda.h) reads this as what it is. Unsigned words may be anything."""
    if isinstance(item, np.ndarray):
        same = item.dtype.kind == kind and item.dtype.itemsize == int(size)
        return mode != "v" and (same or (kind == "u" and item.nbytes % int(size) == 0))
    return mode + kind + size == ("vf8" if isinstance(item, float) else "vi8")


def _as_argument(item: Any) -> Any:
    """As Gpu.launch sends it: an array by its address, integers as int64, floats as float64."""
    if isinstance(item, np.ndarray):
        return ctypes.c_void_p(item.ctypes.data)
    if isinstance(item, bool):
        raise TypeError("kernels take no booleans")
    return ctypes.c_double(item) if isinstance(item, float) else ctypes.c_int64(int(item))


def _areas(arguments: Sequence[Any]) -> list[int]:
    """As host_watch takes them."""
    return [
        part
        for number, item in enumerate(arguments)
        if isinstance(item, np.ndarray)
        for part in (item.ctypes.data, item.nbytes, item.itemsize, number)
    ]


def _in_words(item: Any) -> str:
    if isinstance(item, np.ndarray):
        return f"{item.dtype} {list(item.shape)}"
    return f"{type(item).__name__} {item}"


def _bytes_of(array: DeviceArray) -> npt.NDArray[np.uint8]:
    assert array.flags.c_contiguous
    flat: npt.NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    return flat
