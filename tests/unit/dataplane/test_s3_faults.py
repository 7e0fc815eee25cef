"""What an object store says, told apart: what heals by itself may be asked again, what somebody must mend names the remedy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fabric_pipelines.dataplane import s3
from fabric_pipelines.dataplane.cold_store import BucketStore
from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.dataplane.objects import Objects
from fabric_pipelines.errors import (
    FabricError,
    SettingsError,
    StorageFailed,
    StoreUnreachable,
    UsageError,
)
from tests.support_scripted_s3 import ScriptedStore, fault, scripted_store

URL = "s3://bucket/p"
CALLS = {
    "lake": lambda: Lake(URL).put("a/x.bin", b"123"),
    "lake read": lambda: Lake(URL).read(f"{URL}/a/x.bin"),
    "objects": lambda: Objects(URL).create("x", b"123"),
    "objects read": lambda: Objects(URL).read("x"),
    "cold": lambda: BucketStore(URL).put("x", [memoryview(b"123")], 3),
}
ANSWERS = {
    "slow down": (fault(503, "SlowDown"), StoreUnreachable, "busy"),
    "too many": (fault(429, "TooManyRequests"), StoreUnreachable, "busy"),
    "internal": (fault(500, "InternalError"), StoreUnreachable, "busy"),
    "a gateway": ((502, "<html>nobody home</html>"), StoreUnreachable, "cannot"),
    "silence": ("", StoreUnreachable, "imed? ?out"),
    "wrong keys": (fault(403, "SignatureDoesNotMatch"), StorageFailed, "check bucket and cred"),
    "old keys": (fault(400, "ExpiredToken"), StorageFailed, "check bucket and credentials"),
    "skew": (fault(403, "RequestTimeTooSkewed"), StorageFailed, "clock"),
    "no bucket": (fault(404, "NoSuchBucket"), StorageFailed, "there is no bucket 'bucket'"),
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedStore]:
    with scripted_store(monkeypatch) as made:
        yield made


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("call", ["lake", "objects", "cold"])
def test_an_answer_says_whether_asking_again_helps(
    store: ScriptedStore, call: str, answer: str
) -> None:
    store.says, kind, words = ANSWERS[answer]
    with pytest.raises(FabricError, match=words) as told:
        CALLS[call]()
    assert type(told.value) is kind
    assert "bucket/p" in str(told.value)


def test_a_page_for_people_is_no_store(store: ScriptedStore) -> None:
    store.says = (200, "<html>captive portal</html>")
    with pytest.raises(StorageFailed, match=r"no S3 store: check AWS_ENDPOINT_URL"):
        CALLS["objects read"]()
    with pytest.raises(StorageFailed, match=r"27 bytes after 3 were written; it is not used"):
        CALLS["lake"]()


def test_a_missing_object_of_a_bucket_that_is_there_is_none(store: ScriptedStore) -> None:
    assert Objects(URL).read("x") is None
    with pytest.raises(StorageFailed, match="is not in the lake; it was moved or deleted"):
        CALLS["lake read"]()


@pytest.mark.parametrize("call", ["lake", "objects", "cold"])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_ENDPOINT_URL", "127.0.0.1:8333", "AWS_ENDPOINT_URL is '127.0.0.1:8333': write http"),
        ("AWS_ENDPOINT_URL", "htp://x", "AWS_ENDPOINT_URL is 'htp://x'"),
        ("AWS_ENDPOINT_URL", "http://no such host", "AWS_ENDPOINT_URL is"),
        ("AWS_PROFILE", "nope", "profile"),
        ("AWS_ACCESS_KEY_ID", None, "set AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_is_set_wrong_is_said_at_once_with_its_remedy(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch, call: str, name: str, value: str | None,
    words: str,
) -> None:  # fmt: skip
    if value is None:
        for each in (name, "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(each)
        monkeypatch.setenv("HOME", "/nonexistent")
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=words):
        CALLS[call]()
    assert store.asked == 0


@pytest.mark.parametrize("url", ["s3://", "s3:///p", "s3://B_\u00fc/p", "s3://b q/p"])
@pytest.mark.parametrize("made", [Lake, Objects, BucketStore])
def test_a_url_without_a_bucket_is_refused(made: type, url: str) -> None:
    with pytest.raises(UsageError, match="names no bucket"):
        made(url)


def test_a_silent_store_is_told_within_a_minute(store: ScriptedStore) -> None:
    assert s3.ATTEMPTS * (s3.CONNECT_S + 1) < s3.ATTEMPTS * s3.READ_S <= 60
    files = s3.files()
    assert (files.retries, files.config_kwargs) == (1, s3.CONFIG)
    store.says = ""
    for call in ("lake", "cold", "objects read"):
        before = store.asked
        with pytest.raises(StoreUnreachable):
            CALLS[call]()
        assert store.asked == before + 1
