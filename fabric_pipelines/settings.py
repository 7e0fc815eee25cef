"""Settings: flags, then FABRIC_* variables, then fabric.toml, then defaults; every value knows where it came from.

One frozen value, made once per process and handed down. An unknown name is refused wherever it stands: a typo
must not silently become a default. So is a value out of its range, here and by name: a process that finds
out later would be started again and again by its supervisor.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import Refused, SettingsError
from fabric_pipelines.folders import make_folders
from fabric_pipelines.redaction import redact as redact

UNIX_PATH_BYTES_MAX = 107  # sizeof(sun_path) - 1 on Linux
PLAIN_PATH = re.compile(
    r"[A-Za-z0-9._~/-]+"
)  # what a URL takes as it is, and a Postgres option too

PREFIX = "FABRIC_"
SUPERVISOR_LOCK = (
    "supervisor.lock"  # in runtime_dir; held as long as a supervisor of the home lives
)
BYTES_MAX = 1 << 62
PAGE_BYTES = 4096  # a segment's file counts in these
DAY_MS = 24 * 3600 * 1000
YEAR_S = 365 * 24 * 3600
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHOWN_MAX = 60  # characters of a wrong value in a sentence
NEAR = 0.75  # of difflib's ratio: a typo is nearer, another word is not

OTHER_VARIABLES: Mapping[str, str] = {
    "FABRIC_DEBUG": "1: traces instead of one sentence",
    "FABRIC_PG_BIN": "bin folder of the Postgres binaries to use",
    "FABRIC_SUPERVISED": "set by `fabric up`: which home's supervisor a process belongs to",
    "FABRIC_SUPERVISED_BY": "set by `fabric up`: its pid and the process's name",
    "FABRIC_REQUIRE_GPU": "tests, 1: no usable card is a failure",
    "FABRIC_GPU_REPORT": "tests: file for a report of card, kernels and outcomes",
    "FABRIC_REQUIRE_PARITY": "tests in CI, 1: a missing reference implementation is a failure",
    "FABRIC_PG_AWAY_S": "tests: seconds that Postgres stays away in its outage",
}
"""Variables that are no settings; every name that starts with FABRIC_ is here or in Settings."""

# What Kubernetes and Docker links put into every container beside a service called `fabric` or `fabric-...`.
OF_A_SERVICE = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
ADDRESS_OF_A_SERVICE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `least` to `most`, multiples of `step`."""

    least: int
    most: int
    step: int = 1

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return self.least <= value <= self.most and value % self.step == 0

    def __str__(self) -> str:
        steps = "" if self.step == 1 else f", a multiple of {self.step}"
        return f"a whole number from {self.least} to {self.most}{steps}"


@dataclass(frozen=True, slots=True)
class Form:
    """Text that `pattern` matches as a whole; `words` say so to a person."""

    pattern: re.Pattern[str]
    words: str

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and self.pattern.fullmatch(value) is not None

    def __str__(self) -> str:
        return self.words


PLACE = Form(re.compile(r"[^\x00-\x1f\x7f]*"), "a path without control characters")
FOLDER_OR_S3 = Form(
    re.compile(
        r"(s3://[^\x00-\x20\x7f/][^\x00-\x1f\x7f]*|(?![A-Za-z0-9+.-]*://)[^\x00-\x1f\x7f]*)"
    ),
    "a folder or s3://bucket/prefix",
)
ENDPOINT = Form(
    re.compile(r"(grpc(\+unix|\+tls)?://[^\x00-\x1f\x7f]+)?"),
    "grpc+unix://<path>, grpc://127.0.0.1:<port> or grpc+tls://<host>:<port>",
)
DATABASE = Form(
    re.compile(r"(postgres(ql)?://[^\x00-\x1f\x7f]*|[^\x00-\x1f\x7f:/]+=[^\x00-\x1f\x7f]*)?"),
    "postgresql://user:password@host:port/database, or host=... dbname=...",
)
HOST = Form(re.compile(r"[A-Za-z0-9.:%_-]+"), "a host name or an address")
TENANT_NAME = Form(
    TENANT,
    "a name of at most 64 letters, digits, '.', '_' and '-', which starts with one of the first two",
)


def _setting(default: Any, doc: str, within: Range | Form) -> Any:
    return field(default=default, metadata={"doc": doc, "within": within})


@dataclass(frozen=True, slots=True)
class Settings:
    """All paths are absolute once loaded. `origin[name]` is "flag", "environment", "fabric.toml" or "default"."""

    home: Path = _setting(Path(".fabric"), "folder that holds everything the fabric keeps", PLACE)
    pg_url: str = _setting(
        "", "a Postgres server (>= 15); empty: the embedded one under home", DATABASE
    )
    lake: str = _setting("", "folder or s3:// URL for artifacts; empty: <home>/lake", FOLDER_OR_S3)
    broker_url: str = _setting(
        "", "Arrow Flight endpoint; empty: a Unix socket of this home", ENDPOINT
    )
    broker_listen: str = _setting(
        "",
        "grpc+tls://address:port where the broker serves other machines too; empty: this one only",
        ENDPOINT,
    )
    tls_ca: str = _setting(
        "", "PEM file of the private CA that both sides' certificates come from", PLACE
    )
    tls_cert: str = _setting(
        "", "PEM certificate chain of this machine, towards the other side", PLACE
    )
    tls_key: str = _setting("", "PEM private key of tls_cert", PLACE)
    models: Path = _setting(
        Path("~/.cache/fabric-pipelines/models"), "model cache, shared by all homes", PLACE
    )
    tenant: str = _setting("default", "owner of what is submitted", TENANT_NAME)
    segment_bytes: int = _setting(
        256 << 20, "size of one journal segment", Range(1 << 16, 1 << 40, PAGE_BYTES)
    )
    journal_high_water_bytes: int = _setting(
        8 << 30, "above it the broker refuses new tasks", Range(1, BYTES_MAX)
    )
    tenant_high_water_bytes: int = _setting(
        0,
        "bytes of one tenant's unfinished tasks above which it is refused new ones; 0: no share",
        Range(0, BYTES_MAX),
    )
    room_wait_s: int = _setting(
        600, "seconds that a submission waits for a broker that is full or away", Range(0, YEAR_S)
    )
    checkpoint_bytes: int = _setting(
        256 << 20, "journal bytes after which a checkpoint is taken", Range(1 << 16, BYTES_MAX)
    )
    broker_cold: str = _setting(
        "", "folder or s3:// URL that sealed journal segments move to", FOLDER_OR_S3
    )
    broker_hot_high_water_bytes: int = _setting(
        4 << 30,
        "with a cold tier: journal bytes on this disk above which segments move there",
        Range(0, BYTES_MAX),
    )
    broker_hot_low_water_bytes: int = _setting(
        2 << 30, "and how many of them stay", Range(0, BYTES_MAX)
    )
    computed_high_water_tasks: int = _setting(
        100_000, "computed but not yet landed tasks that workers may pile up", Range(1, 1 << 40)
    )
    write_rate_floor_bytes: int = _setting(
        1_000_000,
        "write cost a second that bulk results always get, also without signals",
        Range(1, BYTES_MAX),
    )
    write_rate_most_bytes: int = _setting(
        0,
        "write cost a second that they never exceed; 0: what the database takes",
        Range(0, BYTES_MAX),
    )
    replication_lag_bytes: int = _setting(
        64 << 20, "a standby further behind than this slows bulk results down", Range(0, BYTES_MAX)
    )
    lease_ms: int = _setting(
        30_000, "a lease not renewed for so long goes back", Range(100, DAY_MS)
    )
    start_full_ms: int = _setting(
        2000,
        "ms that a worker's first batch waits at most for a full one, while more keeps coming; 0: not at all",
        Range(0, 600_000),
    )
    attempts_max: int = _setting(3, "failed attempts after which a task is dead", Range(1, 255))
    metrics_port: int = _setting(
        0, "loopback port of the broker's Prometheus counters; 0: none are served", Range(0, 65_535)
    )
    ui_host: str = _setting(
        "127.0.0.1", "address of the Dagster UI; loopback unless told otherwise", HOST
    )
    ui_port: int = _setting(
        3000, "first port tried for the Dagster UI; the next free one is taken", Range(1, 65_535)
    )
    shard_generations_kept: int = _setting(
        3, "newest generations of a shard whose bytes are kept", Range(1, 1 << 40)
    )
    health_rules: str = _setting(
        "", "TOML file with the rules that judge clusters; empty: the shipped ones", PLACE
    )
    threads: int = _setting(0, "CPU threads of one embedded engine; 0: all cores", Range(0, 1024))
    steps_ahead: int = _setting(
        2, "steps that vLLM's scheduler may run ahead of the card; 1: as vLLM has it", Range(1, 8)
    )
    stall_s: int = _setting(
        600,
        "seconds without a result, a step or a token after which an engine with tasks inside is taken for hung, "
        "or four times the longest that it has come back from, ten times this at most",
        Range(10, 86_400),
    )
    origin: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "origin":
                _require(item.name, getattr(self, item.name), item.default, item.metadata["within"])
        low, high = self.broker_hot_low_water_bytes, self.broker_hot_high_water_bytes
        if low > high:
            raise SettingsError(
                f"setting broker_hot_low_water_bytes is {low}; it must not be above broker_hot_high_water_bytes, "
                f"which is {high}"
            )

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
        """One row a setting: name, value, origin, doc, range. A password in a URL is not shown."""
        return [
            {
                "name": item.name,
                "value": redact(str(getattr(self, item.name))),
                "origin": self.origin.get(item.name, "default"),
                "doc": item.metadata["doc"],
                "range": str(item.metadata["within"]),
            }
            for item in fields(self)
            if item.name != "origin"
        ]

    def as_environment(self) -> dict[str, str]:
        """FABRIC_* variables that make a child process load equal settings."""
        return {
            f"{PREFIX}{item.name.upper()}": str(getattr(self, item.name))
            for item in fields(self)
            if item.name != "origin"
        }


def range_of(name: str) -> Range:
    """What the number `name` may be."""
    within = next(item.metadata["within"] for item in fields(Settings) if item.name == name)
    assert isinstance(within, Range), f"setting {name} is no number"
    return within


def make_runtime_folder(folder: Path) -> None:
    """Make the folder of sockets and locks, and refuse one that somebody else could have put there: under a
    shared temporary folder its name can be guessed."""
    make_folders(folder, mode=0o700 if _is_shared(folder.parent) else 0o755)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Refused(
            f"{folder} is not a folder that only this user may write to: remove it, or choose another home "
            "with FABRIC_HOME"
        )


def _is_shared(folder: Path) -> bool:
    return bool(folder.exists() and folder.stat().st_mode & stat.S_ISVTX)


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
        raise SettingsError(f"there are no settings {unknown}{_nearest(unknown, known)}")
    _require_known(environ, known)
    from_file = _read_toml(folder / "fabric.toml", known)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, item in known.items():
        sources = (
            ("flag", (flags or {}).get(name)),
            ("environment", environ.get(f"{PREFIX}{name.upper()}")),
            ("fabric.toml", from_file.get(name)),
        )
        won = next(((where, value) for where, value in sources if value not in (None, "")), None)
        where, value = won if won else ("default", item.default)
        values[name] = _convert(value, type(item.default))
        _require(name, values[name], item.default, item.metadata["within"])
        origin[name] = where
    for name in ("home", "models"):
        values[name] = _absolute(name, folder, values[name])
    for name in ("tls_ca", "tls_cert", "tls_key", "health_rules"):
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
        raise SettingsError(f"{path} has unknown settings {unknown}{_nearest(unknown, known)}")
    return content


def _require_known(environ: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise SettingsError for FABRIC_* variables that nothing reads."""
    names = {f"{PREFIX}{name.upper()}" for name in known} | set(OTHER_VARIABLES)
    unknown = sorted(
        name
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in names and not _of_a_service(name, value)
    )
    if unknown:
        raise SettingsError(
            f"nothing reads the variable{'s' * (len(unknown) > 1)} {', '.join(unknown)}"
            f"{_nearest(unknown, names, PREFIX)}: correct the name or unset it"
        )


def _of_a_service(name: str, value: str) -> bool:
    return bool(OF_A_SERVICE.fullmatch(name) or ADDRESS_OF_A_SERVICE.fullmatch(value))


def _nearest(unknown: Sequence[str], known: Iterable[str], prefix: str = "") -> str:
    """What was probably meant by each; all that there is where nothing is near. The prefix that all of them share
    would make any two look alike."""
    words = sorted(name.removeprefix(prefix) for name in known)
    near = [get_close_matches(name.removeprefix(prefix), words, 1, NEAR) for name in unknown]
    if not all(near):
        return f"; known are {', '.join(prefix + word for word in words)}"
    return f"; did you mean {', '.join(prefix + found[0] for found in near)}?"


def _convert(value: Any, kind: type) -> Any:
    """The value of a flag, a variable or a key as its setting's type; nothing is rounded or spelled out for it."""
    if issubclass(kind, Path) and isinstance(value, str | Path):
        return Path(value)
    if kind is str and isinstance(value, Path):
        return str(value)
    if kind is int and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return value  # refused with its range, as any value that is no number
    return value


def _require(name: str, value: Any, default: Any, within: Range | Form) -> None:
    """Raise SettingsError, naming the range, for a value out of it or of another type than the default's."""
    if isinstance(default, Path):
        fits = isinstance(value, Path) and str(value) in within
    else:
        fits = value in within
    if fits:
        return
    shown = redact(str(value)) if isinstance(value, str | Path) else value
    found = repr(shown) if len(repr(shown)) <= SHOWN_MAX else f"{repr(shown)[:SHOWN_MAX]}..."
    raise SettingsError(f"setting {name} is {found}; it must be {within}")
