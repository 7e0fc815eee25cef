"""One device runs one engine: an exclusive flock per device, refused with the holder's pid.

The kernel drops a flock with its process, so a killed worker never leaves a device locked. A CUDA device is
locked for the whole machine, since every home shares the card, and by the card's own id (device.energy.card_of), whatever
number it has here; a "cpu:N" slot only within its home. A device has one spelling.

The lock file carries an id of its own beside its holder. With the machine's boot it names the place that the holder
has to itself, so that a broker which hears of a new holder need not wait for the one before.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
import uuid
from pathlib import Path
from types import TracebackType

from fabric_pipelines.errors import AlreadyRunning, StorageFailed, UsageError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PLACE_LINE = re.compile(r"place ([0-9a-f]{32})")
DEVICE_NAME = re.compile(r"(cpu|cuda):(0|[1-9][0-9]{0,5})")
NOT_IN_A_FILE_NAME = re.compile(r"[^A-Za-z0-9-]")


def device_kind(device: str) -> str:
    """ "cpu" or "cuda"; UsageError for a name that is neither cpu:N nor cuda:N."""
    match = DEVICE_NAME.fullmatch(device)
    if match is None:
        raise UsageError(f"device {device!r} is not a device name; use cpu:0, cpu:1, cuda:0, ...")
    return match.group(1)


def lock_path(device: str, runtime_dir: Path, card: str = "") -> Path:
    """card: id of the card that a CUDA device is; its number where nothing tells more."""
    kind = device_kind(device)
    which = NOT_IN_A_FILE_NAME.sub("_", card or device.partition(":")[2])
    name = f"device-{kind}-{which}.lock"
    return Path(tempfile.gettempdir()) / f"fabric-{name}" if kind == "cuda" else runtime_dir / name


class DeviceLock:
    """`with DeviceLock("cuda:0", engine, runtime_dir, card): ...`; AlreadyRunning names device, engine and pid."""

    def __init__(self, device: str, engine: str, runtime_dir: Path, card: str = "") -> None:
        self._device = device
        self._engine = engine
        self._path = lock_path(device, runtime_dir, card)
        self._fd = -1
        self.place = ""  # while the lock is held: what no other process of any machine holds

    def __enter__(self) -> DeviceLock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # O_NOFOLLOW: the machine-wide lock lies in a folder that others may write to.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o644)
        except OSError as fault:
            raise StorageFailed(
                f"the lock of device {self._device} cannot be opened at {self._path}: {fault.strerror}"
            ) from fault
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._text().partition("\n")[0].strip()
            self._close()
            raise AlreadyRunning(
                f"device {self._device} already runs an engine ({holder or 'holder starting'}): "
                "one device runs one engine, so stop that worker first or use another device"
            ) from None
        known = PLACE_LINE.search(self._text())
        mark = known[1] if known else uuid.uuid4().hex
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{self._engine}, pid {os.getpid()}\nplace {mark}\n".encode(), 0)
        # Two machines may hold copies of one file, but not one boot.
        self.place = hashlib.sha256(mark.encode() + BOOT_ID.read_bytes()).hexdigest()[:32]
        return self

    def _text(self) -> str:
        return os.pread(self._fd, 512, 0).decode(errors="replace")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The file stays: unlinking a flocked path lets two holders lock two inodes of one name.
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
