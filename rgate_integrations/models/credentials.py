"""What a server lets us in by: an API key, or user and password of its URL. It is sent, and shown nowhere."""

from __future__ import annotations

import base64
import html
import json
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from pydantic import SecretStr

from rgate_integrations.errors import ConfigurationError

_HIDDEN = "***"
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Credentials:
    """An API key, or a login, or neither.

    They are kept as `SecretStr`, so that no ``repr`` shows them. A pickle has them in full: workers need them.

    Attributes:
        authorization: The value of the header that they are sent in; None without credentials.
        hidden: What must not be shown.
    """

    authorization: SecretStr | None = None
    hidden: tuple[SecretStr, ...] = ()

    def headers(self) -> dict[str, str]:
        """Return the headers that a request is sent with."""
        return {"Authorization": self.authorization.get_secret_value()} if self.authorization else {}

    def redact(self, text: str) -> str:
        """Return ``text`` without the credentials, however it spells them, and without the logins of any URL.

        Servers echo what they were sent. Redact before cutting: half a key would not be found.
        """
        spellings: set[str] = set()
        for each in self.hidden:
            secret = each.get_secret_value()
            spellings |= {secret, quote(secret, safe=""), html.escape(secret)}
            spellings |= {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
        # The longest first: a key may be a part of its own escaped form.
        for spelling in sorted(spellings, key=len, reverse=True):
            text = re.sub(re.escape(spelling), _HIDDEN, text, flags=re.IGNORECASE)
        return _WORD.sub(_without_login, text)


def read_credentials(url: str, api_key: str | SecretStr | None) -> tuple[str, Credentials]:
    """Split a server's base URL into the URL without its login, and the credentials.

    Args:
        url: The URL.
        api_key: The key; white space around it is dropped, and an empty one is none.

    Raises:
        ConfigurationError: It is no URL that paths can be added to, the key cannot be sent, or both a key and a login
            were given. None of them is quoted.
    """
    url = url.strip()
    parts = _split(url)
    if parts is None:
        # Not inside an `except`: urlsplit's own error, which quotes parts of the login, would be chained.
        _, at, rest = url.rpartition("@")
        shown = re.split("[?#]", rest)[0]
        raise ConfigurationError(
            f"{_HIDDEN + at + shown if at else shown!r} is no URL that paths can be added to.",
            hint="Such as http://localhost:8000/v1; percent-encode user and password (/ is %2F, @ is %40).",
        )
    login, _, host = parts.netloc.rpartition("@")
    bare = urlunsplit((parts.scheme, host, parts.path, "", "")).rstrip("/")
    key = _checked_key(api_key)
    user, _, password = login.partition(":")
    if key and (user or password):
        raise ConfigurationError(
            "An API key was given, and a user in the URL: a request can be sent with only one of them.",
            hint="Leave one of them out.",
        )
    if key:
        return bare, Credentials(SecretStr(f"Bearer {key}"), (SecretStr(key),))
    if not (user or password):
        return bare, Credentials()
    basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    # A user without a password is a token. With one it is only a name, and hiding it would garble the text.
    secret = password or user
    hidden = (basic, login, unquote(login), secret, unquote(secret))
    return bare, Credentials(SecretStr(f"Basic {basic}"), tuple(map(SecretStr, hidden)))


def _split(url: str) -> SplitResult | None:
    """Return the parts of a URL, or None if it cannot be used."""
    try:
        parts = urlsplit(url)
        bool(parts.port)  # raises where it is no number
    except ValueError:
        return None
    # An @ in the path: of `http://user:1/2@host` the password would pass for a port and a path, and be shown.
    has_more = parts.query or parts.fragment or "@" in parts.path
    is_server = parts.scheme in ("http", "https") and parts.hostname and url.isprintable() and " " not in url
    return parts if is_server and not has_more else None


def _checked_key(key: str | SecretStr | None) -> str:
    if isinstance(key, SecretStr):
        key = key.get_secret_value()
    if not isinstance(key, str | None):
        raise ConfigurationError(f"api_key must be a string, not {type(key).__name__}.")
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationError(
            "The API key has control characters, or ones that are not ASCII.",
            hint="Was it copied with something else, such as a second line or a byte order mark?",
        )
    return key


def _without_login(word: re.Match[str]) -> str:
    """Return a word without what stands between its first ``://`` and its last ``@``.

    A password with a slash that nobody encoded is a part of it, too. One pattern for all would look for the ``@``
    again from each ``://``: a server that sends many of them would stop every thread.
    """
    text = word.group()
    start, end = text.find("://"), text.rfind("@")
    if start < 0 or end < start:
        return text
    return f"{text[:start]}://{_HIDDEN}{text[end:]}"
