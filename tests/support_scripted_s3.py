"""An S3 server that says what a test wants: every request is answered as `says` has it, or well, out of a dictionary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


def fault(status: int, code: str) -> tuple[int, str]:
    return status, f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>said</Message></Error>'


class ScriptedStore:
    """says: status and body of every answer; None: as a store does. "" keeps silent until the end."""

    def __init__(self) -> None:
        self.says: tuple[int, str] | str | None = None
        self.objects: dict[str, bytes] = {}
        self.asked = 0
        self.over = threading.Event()
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words: object) -> None:
                pass

            def answer(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                store.asked += 1
                if store.says == "":
                    store.over.wait(30)
                    self.close_connection = True
                    return
                status, body, etag = store.answer(
                    self.command, self.path.partition("?")[0], content
                )
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if etag:
                    self.send_header("ETag", etag)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def answer(self, method: str, path: str, content: bytes) -> tuple[int, bytes, str]:
        if isinstance(self.says, tuple):
            return self.says[0], self.says[1].encode(), ""
        if method == "PUT":
            self.objects[path] = content
        found = self.objects.get(path)
        if found is None:
            return 404, fault(404, "NoSuchKey")[1].encode(), ""
        body = b"" if method == "PUT" else found
        return 200, body, f'"{md5(found, usedforsecurity=False).hexdigest()}"'

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def scripted_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedStore]:
    """It is where the environment says that S3 is, and is asked once and not waited for long."""
    from fabric_pipelines.dataplane import s3

    store = ScriptedStore()
    thread = threading.Thread(target=store.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": store.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    quick = {"read_timeout": 0.4, "retries": {"total_max_attempts": 1, "mode": "standard"}}
    monkeypatch.setattr(s3, "CONFIG", s3.CONFIG | quick)
    try:
        yield store
    finally:
        store.over.set()
        store.server.shutdown()
        store.server.server_close()
        thread.join()
