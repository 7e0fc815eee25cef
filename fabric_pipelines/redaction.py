"""What of a URL or a connection string may be shown: everything but its secrets.

libpq takes `postgresql://user:password@host/db?key=value` and `key=value key='a b'`. Where one cannot be read as either, nobody
can say where a secret in it ends, so all behind its key is hidden. Refuses to guess what looks like a secret under
another key: a path of a password file is none.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

HIDDEN = "***"
SECRET = re.compile(r"passw(or)?d|secret|scram_\w+_key", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PAIR = re.compile(
    r"(\s*([^\s=]+)\s*=\s*)('(?:[^'\\]|\\.)*'(?=\s|$)|(?!')(?:[^\s\\]|\\.)*(?=\s|$))", re.DOTALL
)
_PAIRS = re.compile(rf"(?:{_PAIR.pattern})*\s*", re.DOTALL)
_ANY_KEY = re.compile(r"[^\s=?&']+(?=\s*=)")
_QUERY = re.compile(r"([?&]([^?&=]+)=)([^&]*)")
_WELL_FORMED = re.compile(r"(?:&[^&=]+=[^&=]*)*")
_NO_PORT = re.compile(r"(postgres(?:ql)?://[^/?#:@,\[]*:)(?!\d{0,5}(?:[/?,]|$))[^/?]+")
_QUOTED = re.compile(r"""(["'])(.+?)\1""")


def redact(text: str) -> str:
    """`text` as it may be shown. Anything else than a URL or a connection string comes back as it is."""
    if _SCHEME.match(text):
        return _without_login(_without_query_secrets(text))
    if _PAIRS.fullmatch(text):
        return _PAIR.sub(
            lambda pair: pair[1] + (HIDDEN if SECRET.search(pair[2]) else pair[3]), text
        )
    return _cut(text)


def redact_words(said: str, url: str) -> str:
    """`said` about `url`, without what it quotes of the hidden parts."""
    shown = redact(url)
    if shown == url:
        return said

    def quoted(found: re.Match[str]) -> str:
        hidden = found[2] not in shown and (found[2] in url or found[2] in unquote(url))
        return f"{found[1]}{HIDDEN}{found[1]}" if hidden else found[0]

    return _QUOTED.sub(quoted, said)


def _without_query_secrets(url: str) -> str:
    for found in _QUERY.finditer(url):
        if SECRET.search(unquote(found[2])):
            rest = url[found.end() :]
            after = _without_query_secrets(rest) if _WELL_FORMED.fullmatch(rest) else ""
            return url[: found.end(1)] + HIDDEN + after
    return url


def _without_login(url: str) -> str:
    head, at, tail = url.rpartition("@")
    scheme, _, login = head.partition("://")
    if not at:
        return _NO_PORT.sub(rf"\1{HIDDEN}", url)
    if ":" not in login:
        return url
    return f"{scheme}://{login.split(':', 1)[0]}:{HIDDEN}@{tail}"


def _cut(text: str) -> str:
    """All behind the first key of a secret, in what cannot be read."""
    for found in _ANY_KEY.finditer(text):
        if SECRET.search(found[0]):
            return f"{text[: found.end()]}={HIDDEN}"
    return text
