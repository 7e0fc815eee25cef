"""A wire that can be cut at the worst moment: a proxy in front of a Postgres socket that sees COMMIT pass."""

from __future__ import annotations

import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, quote, urlsplit

COMMIT = b"commit\0"


class WireCutter:
    """Cuts each connection at its first COMMIT: before the server sees it, or after the server answered and
    before the client hears. `heal` lets everything pass from then on."""

    def __init__(self, url: str, *, deliver_commit: bool) -> None:
        self._target = str(Path(parse_qs(urlsplit(url).query)["host"][0]) / ".s.PGSQL.5432")
        self._folder = tempfile.TemporaryDirectory(prefix="fabric-wire-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(Path(self._folder.name) / ".s.PGSQL.5432"))
        self._listener.listen(8)
        self._deliver = deliver_commit
        self._cut = True
        self._threads = [threading.Thread(target=self._accept)]
        head = url.partition("?")[0]
        self.url = f"{head}?host={quote(self._folder.name, safe='')}"

    def heal(self) -> None:
        self._cut = False

    def __enter__(self) -> WireCutter:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            done = threading.Event()
            for work in (self._towards_server, self._towards_client):
                thread = threading.Thread(target=work, args=(client, server, done))
                self._threads.append(thread)
                thread.start()

    def _towards_server(
        self, client: socket.socket, server: socket.socket, cut: threading.Event
    ) -> None:
        with suppress(OSError):  # the other direction closes both ends once the wire is cut
            while data := client.recv(1 << 16):
                if self._cut and COMMIT in data:
                    cut.set()
                    if not self._deliver:
                        break
                server.sendall(data)
                if cut.is_set():
                    break
        if not (cut.is_set() and self._deliver):
            with suppress(OSError):  # the other direction may have closed it already
                server.shutdown(socket.SHUT_RDWR)

    def _towards_client(
        self, client: socket.socket, server: socket.socket, cut: threading.Event
    ) -> None:
        with client, server:
            while data := server.recv(1 << 16):
                if cut.is_set():
                    break  # the server has answered COMMIT, and nobody will hear it
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
