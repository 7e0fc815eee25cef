"""Settings: flags, then FABRIC_* variables, then fabric.toml, then defaults; every value knows where it came from.

One frozen value, made once per process and handed down. An unknown key in fabric.toml is refused: a typo
must not silently become a default.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import Refused, SettingsError

UNIX_PATH_BYTES_MAX = 107  # sizeof(sun_path) - 1 on Linux
PLAIN_PATH = re.compile(
    r"[A-Za-z0-9._~/-]+"
)  # what a URL takes as it is, and a Postgres option too


def _setting(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class Settings:
    """All paths are absolute once loaded. `origin[name]` is "flag", "environment", "fabric.toml" or "default"."""

    home: Path = _setting(Path(".fabric"), "folder that holds everything the fabric keeps")
    pg_url: str = _setting("", "a Postgres server (>= 15); empty: the embedded one under home")
    lake: str = _setting("", "folder or s3:// URL for artifacts; empty: <home>/lake")
    broker_url: str = _setting("", "Arrow Flight endpoint; empty: a Unix socket of this home")
    broker_listen: str = _setting(
        "",
        "grpc+tls://address:port where the broker serves other machines too; empty: this one only",
    )
    tls_ca: str = _setting("", "PEM file of the private CA that both sides' certificates come from")
    tls_cert: str = _setting("", "PEM certificate chain of this machine, towards the other side")
    tls_key: str = _setting("", "PEM private key of tls_cert")
    models: Path = _setting(
        Path("~/.cache/fabric-pipelines/models"), "model cache, shared by all homes"
    )
    tenant: str = _setting("default", "owner of what is submitted")
    segment_bytes: int = _setting(256 << 20, "size of one journal segment")
    journal_high_water_bytes: int = _setting(8 << 30, "above it the broker refuses new tasks")
    tenant_high_water_bytes: int = _setting(
        0, "bytes of one tenant's unfinished tasks above which it is refused new ones; 0: no share"
    )
    room_wait_s: int = _setting(
        600, "seconds that a submission waits for a broker that is full or away"
    )
    checkpoint_bytes: int = _setting(256 << 20, "journal bytes after which a checkpoint is taken")
    broker_cold: str = _setting("", "folder or s3:// URL that sealed journal segments move to")
    broker_hot_high_water_bytes: int = _setting(
        4 << 30, "with a cold tier: journal bytes on this disk above which segments move there"
    )
    broker_hot_low_water_bytes: int = _setting(2 << 30, "and how many of them stay")
    computed_high_water_tasks: int = _setting(
        100_000, "computed but not yet landed tasks that workers may pile up"
    )
    write_rate_floor_bytes: int = _setting(
        1_000_000, "write cost a second that bulk results always get, also without signals"
    )
    write_rate_most_bytes: int = _setting(
        0, "write cost a second that they never exceed; 0: what the database takes"
    )
    replication_lag_bytes: int = _setting(
        64 << 20, "a standby further behind than this slows bulk results down"
    )
    lease_ms: int = _setting(30_000, "a lease not renewed for so long goes back")
    attempts_max: int = _setting(3, "failed attempts after which a task is dead")
    metrics_port: int = _setting(
        0, "loopback port of the broker's Prometheus counters; 0: none are served"
    )
    ui_host: str = _setting(
        "127.0.0.1", "address of the Dagster UI; loopback unless told otherwise"
    )
    ui_port: int = _setting(3000, "first port tried for the Dagster UI; the next free one is taken")
    threads: int = _setting(0, "CPU threads of one embedded engine; 0: all cores")
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def runtime_dir(self) -> Path:
        """Sockets, locks and pid files. Short and plain on purpose: a Unix socket path ends at 107 bytes, and
        gRPC decodes %20 in one twice."""
        candidate = self.home / "run"
        longest = os.fsencode(candidate / "postgres" / ".s.PGSQL.65432")
        if len(longest) <= UNIX_PATH_BYTES_MAX and PLAIN_PATH.fullmatch(str(candidate)):
            return candidate
        mark = hashlib.sha256(os.fsencode(self.home)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"fabric-{os.getuid()}-{mark}"

    @property
    def waits_dir(self) -> Path:
        return self.runtime_dir / "waits"

    @property
    def journal_dir(self) -> Path:
        return self.home / "journal"

    @property
    def log_dir(self) -> Path:
        return self.home / "logs"

    @property
    def shards_dir(self) -> Path:
        return self.home / "shards"

    @property
    def dagster_home(self) -> Path:
        return self.home / "dagster"

    @property
    def lake_url(self) -> str:
        return self.lake or str(self.home / "lake")

    @property
    def broker_endpoint(self) -> str:
        return self.broker_url or f"grpc+unix://{self.runtime_dir / 'broker.sock'}"

    def described(self) -> list[dict[str, str]]:
        """One row a setting: name, value, origin, doc. A password in a URL is not shown."""
        return [
            {
                "name": item.name,
                "value": redact(str(getattr(self, item.name))),
                "origin": self.origin.get(item.name, "default"),
                "doc": item.metadata["doc"],
            }
            for item in fields(self)
            if item.name != "origin"
        ]

    def as_environment(self) -> dict[str, str]:
        """FABRIC_* variables that make a child process load equal settings."""
        return {
            f"FABRIC_{item.name.upper()}": str(getattr(self, item.name))
            for item in fields(self)
            if item.name != "origin"
        }


def make_runtime_folder(folder: Path) -> None:
    """Make the folder of sockets and locks, and refuse one that somebody else could have put there: under a
    shared temporary folder its name can be guessed."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700 if _is_shared(folder.parent) else 0o755)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Refused(
            f"{folder} is not a folder that only this user may write to: remove it, or choose another home "
            "with FABRIC_HOME"
        )


def _is_shared(folder: Path) -> bool:
    return bool(folder.exists() and folder.stat().st_mode & stat.S_ISVTX)


def redact(url: str) -> str:
    head, at, tail = url.rpartition("@")
    scheme, slashes, login = head.partition("://")
    if not at or not slashes or ":" not in login:
        return url
    return f"{scheme}://{login.split(':', 1)[0]}:***@{tail}"


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """Settings as seen from `folder` (default: the working folder). Raises SettingsError naming the key."""
    environ = os.environ if environ is None else environ
    folder = Path.cwd() if folder is None else folder
    known = {item.name: item for item in fields(Settings) if item.name != "origin"}
    if unknown := sorted(set(flags or {}) - set(known)):
        raise SettingsError(f"there are no settings {unknown}; known are {sorted(known)}")
    from_file = _read_toml(folder / "fabric.toml", known)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, item in known.items():
        sources = (
            ("flag", (flags or {}).get(name)),
            ("environment", environ.get(f"FABRIC_{name.upper()}")),
            ("fabric.toml", from_file.get(name)),
        )
        won = next(((where, value) for where, value in sources if value not in (None, "")), None)
        where, value = won if won else ("default", item.default)
        values[name] = _convert(name, value, type(item.default))
        origin[name] = where
    for name in ("home", "models"):
        values[name] = _absolute(name, folder, values[name])
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if values[name]:
            values[name] = str(_absolute(name, folder, Path(values[name])))
    return Settings(**values, origin=origin)


def _absolute(name: str, folder: Path, path: Path) -> Path:
    try:
        return (folder / path.expanduser()).resolve()
    except RuntimeError as fault:
        raise SettingsError(
            f"setting {name} is {path}, and this user has no home folder: set HOME or FABRIC_{name.upper()}"
        ) from fault


def _read_toml(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as fault:
        raise SettingsError(f"{path} cannot be read: {fault}") from fault
    unknown = sorted(set(content) - set(known))
    if unknown:
        raise SettingsError(f"{path} has unknown settings {unknown}; known are {sorted(known)}")
    return content


def _convert(name: str, value: Any, kind: type) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    if kind is int:
        try:
            number = int(value)
        except (TypeError, ValueError) as fault:
            raise SettingsError(
                f"setting {name} is {value!r}; it must be a whole number"
            ) from fault
        if number < 0:
            raise SettingsError(f"setting {name} is {number}; it must not be negative")
        return number
    return str(value)
