"""Which faults come from the S3 client below s3fs: botocore's and aiohttp's trees have no common base with OSError."""

from __future__ import annotations

CLIENT = ("botocore", "aiobotocore", "aiohttp")


def is_of_the_client(fault: Exception, *also: str) -> bool:
    """Whether its class is defined in the client, or in a module whose name begins with one of `also`."""
    return type(fault).__module__.startswith((*CLIENT, *also))
