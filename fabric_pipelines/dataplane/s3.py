"""The S3 client: made in one place for lake, shards and cold tier, and its faults as ours.

An answer is waited for READ_S seconds and asked for ATTEMPTS times, so that a store that accepts and stays silent is told
within a minute. Repeats are botocore's alone, which knows from an answer whether one helps: those of s3fs above it would
multiply them, by five or by twenty-five. What may be asked again later is StoreUnreachable, what somebody must mend first is
terminal with the remedy. Refuses to guess by a message where the answer has a code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fabric_pipelines.errors import (
    FabricError,
    SettingsError,
    StorageFailed,
    StoreUnreachable,
    UsageError,
)

S3 = "s3://"
CONNECT_S, READ_S, ATTEMPTS = 5, 18, 3
CONFIG = {
    "connect_timeout": CONNECT_S,
    "read_timeout": READ_S,
    "retries": {"total_max_attempts": ATTEMPTS, "mode": "standard"},
}
CLIENT = ("botocore", "aiobotocore", "aiohttp", "asyncio")
"""botocore's and aiohttp's trees of errors have no common base with OSError."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
BUSY_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
BUSY_CODE = (
    *("SlowDown", "ServiceUnavailable", "InternalError", "TooManyRequests", "RequestTimeout"),
    *("Throttling", "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded"),
    *("OperationAborted", "ConditionalRequestConflict", "RequestTimeoutException"),
)
NO_BUCKET = "NoSuchBucket"
MISCONFIGURED = {
    "ConfigNotFound",
    "ConfigParseError",
    "InvalidConfigError",
    "InvalidRegionError",
    "NoCredentialsError",
    "NoRegionError",
    "ParamValidationError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "UnknownEndpointError",
}
"""By name, since its import costs most of a second: what botocore says before it asks anybody."""
CREDENTIALS = "check bucket and credentials (AWS_*), and this machine's clock"
SETTINGS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, and write bucket and endpoint as S3 has them"
NOT_S3 = "what answers there is no S3 store: check AWS_ENDPOINT_URL, and proxies on the way"


def root_of(url: str) -> str:
    """bucket/prefix of an s3:// URL. UsageError where it names no bucket that S3 could have."""
    if not url.startswith(S3):
        raise UsageError(f"{url!r} is no s3:// URL: write s3://bucket/prefix")
    bucket, slash, prefix = url.removeprefix(S3).rstrip("/").partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", bucket):
        raise UsageError(
            f"{url!r} names no bucket: write s3://bucket/prefix, as in s3://results/lake"
        )
    return bucket + slash + prefix


def files() -> Any:
    """A client without caches, which are process-wide: a listing cached earlier hides an object written since, and a
    pointer read from one is an old pointer. SettingsError for an endpoint that is none."""
    for name in ENDPOINTS:
        address = os.environ.get(name)
        if address and not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", address):
            raise SettingsError(
                f"{name} is {address!r}: write http:// or https:// and a host, as in http://127.0.0.1:8333"
            )
    import s3fs  # here: who keeps nothing in S3 needs no client, whose import costs most of a second

    made = s3fs.S3FileSystem(
        skip_instance_cache=True, use_listings_cache=False, config_kwargs=CONFIG
    )
    made.retries = 1
    return made


def is_of_the_client(fault: Exception) -> bool:
    """Whether its class is defined in the client."""
    return type(fault).__module__.startswith(CLIENT)


def lacks_bucket(fault: BaseException) -> bool:
    """Whether not the object is missing but all around it."""
    return _answer(fault)[0] == NO_BUCKET


@contextmanager
def asked(
    doing: str, where: str, *, otherwise: type[FabricError] = StorageFailed
) -> Iterator[None]:
    """Faults of the client, and of files, while we are `doing` something with `where`. FileNotFoundError is StorageFailed;
    otherwise: what an OSError is of which nothing is known."""
    try:
        yield
    except FabricError:
        raise
    except (
        Exception
    ) as fault:  # of boto, aiohttp or the file system: what is none of theirs goes on as it is
        found = _translated(fault, f"cannot {doing} {where}", where, otherwise)
        if found is None:
            raise
        raise found from fault


def _translated(
    fault: Exception, what: str, where: str, otherwise: type[FabricError]
) -> FabricError | None:
    code, status = _answer(fault)
    said = " ".join(str(fault).split()) or type(fault).__name__
    if code == NO_BUCKET:
        bucket = where.removeprefix(S3).partition("/")[0]
        return StorageFailed(f"{what}: there is no bucket {bucket!r}; make it, or name another")
    if code in BUSY_CODE or status in BUSY_STATUS:
        return StoreUnreachable(f"{what}: the store is busy ({code or status}: {said})")
    if {each.__name__ for each in type(fault).__mro__} & MISCONFIGURED:
        return SettingsError(f"{what}: {said.rstrip('.')}; {SETTINGS}")
    if isinstance(fault, ValueError) and re.match("Invalid endpoint", said):
        return SettingsError(f"{what}: {said}; {SETTINGS}")
    if isinstance(fault, FileNotFoundError):
        return StorageFailed(f"{what}: it is not there")
    # a question without a body (HEAD) is refused by its status alone, an expired token with 400
    if (code and isinstance(fault, PermissionError)) or code in ("400", "401"):
        return StorageFailed(f"{what}: it is refused ({said}): {CREDENTIALS}")
    # botocore's own timeouts are OSErrors as well
    if isinstance(fault, (ConnectionError, TimeoutError)) or is_of_the_client(fault):
        return StoreUnreachable(f"{what}: {said}")
    if isinstance(fault, OSError):
        return otherwise(f"{what}: {said}")
    if isinstance(fault, (KeyError, AttributeError)) and _is_of_an_answer(fault):
        return StorageFailed(f"{what}: the answer lacks {said}; {NOT_S3}")
    return None


def _is_of_an_answer(fault: Exception) -> bool:
    """Whether the client, or who calls it, missed what every answer of S3 has: no fault of those who use what it read."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return raised_in.startswith(("s3fs", "fsspec", *CLIENT, "fabric_pipelines.dataplane.objects"))


def _answer(fault: BaseException) -> tuple[str, int]:
    """Error code and status of an answer, where one is at the bottom of `fault`."""
    told: Any = getattr(fault, "response", None) or getattr(fault.__cause__, "response", None)
    if not isinstance(told, dict):
        return "", 0
    status = told.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(told.get("Error", {}).get("Code", "")), int(status)
