"""What a server lets us in by: an API key, or user and password of its URL. It is sent, and shown nowhere."""

from __future__ import annotations

import base64
import html
import json
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from pydantic import SecretStr

from rgate_integrations.errors import ConfigurationError

__all__ = ["Credentials", "checked_key", "split_login"]

_HIDDEN = "***"
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Credentials:
    """An API key, or a login, or neither.

    They are kept as `SecretStr`, so that no ``repr`` shows them. A pickle has them in full: workers need them.

    Attributes:
        key: Sent as a bearer token.
        login: ``user:password``, percent-encoded as in a URL; sent as basic authentication.
    """

    key: SecretStr | None = None
    login: SecretStr | None = None

    def __post_init__(self) -> None:
        if self.key and self.login:
            raise ConfigurationError(
                "An API key was given, and a user in the URL: a request can be sent with only one of them.",
                hint="Leave one of them out.",
            )

    def headers(self) -> dict[str, str]:
        """Return the header that a request is sent with; none without credentials."""
        if self.key:
            return {"Authorization": f"Bearer {self.key.get_secret_value()}"}
        if self.login:
            return {"Authorization": f"Basic {_basic(self.login.get_secret_value())}"}
        return {}

    def redact(self, text: str) -> str:
        """Return ``text`` without the credentials, however it spells them, and without the logins of any URL.

        Servers echo what they were sent. Redact before cutting: half a key would not be found.
        """
        spellings: set[str] = set()
        for secret in self._secrets():
            spellings |= {
                secret,
                quote(secret, safe=""),
                html.escape(secret),
                json.dumps(secret)[1:-1],
                json.dumps(secret, ensure_ascii=False)[1:-1],
            }
        # The longest first: a key may be a part of its own escaped form.
        for spelling in sorted(spellings, key=len, reverse=True):
            text = re.sub(re.escape(spelling), _HIDDEN, text, flags=re.IGNORECASE)
        return _WORD.sub(_without_login, text)

    def _secrets(self) -> list[str]:
        if self.key:
            return [self.key.get_secret_value()]
        if not self.login:
            return []
        login = self.login.get_secret_value()
        user, _, password = login.partition(":")
        # A user without a password is a token. With one it is only a name, and hiding it would garble the text.
        secret = password or user
        return [_basic(login), login, unquote(login), secret, unquote(secret)]


def checked_key(key: str | SecretStr | None) -> SecretStr | None:
    """Return an API key without the white space around it, or None for none or an empty one.

    Raises:
        ConfigurationError: It is no string, or has characters that a header cannot have. The key is not quoted.
    """
    if key is None:
        return None
    if isinstance(key, SecretStr):
        key = key.get_secret_value()
    if not isinstance(key, str):
        raise ConfigurationError(f"api_key must be a string, not {type(key).__name__}.")
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationError(
            "The API key has control characters, or ones that are not ASCII.",
            hint="Was it copied with something else, such as a second line or a byte order mark?",
        )
    return SecretStr(key) if key else None


def split_login(url: str) -> tuple[str, SecretStr | None]:
    """Split a server's base URL into the URL without its login, and the login.

    Raises:
        ConfigurationError: It is no URL that paths can be added to. A login in it is not quoted.
    """
    url = url.strip()
    problem = _problem(url)
    if problem:
        # Not inside an `except`: urlsplit's own error, which quotes parts of the login, would be chained.
        raise ConfigurationError(f"{_harmless(url)!r} {problem}", hint="Such as http://localhost:8000/v1")
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    bare = urlunsplit((parts.scheme, host, parts.path, "", ""))
    return bare.rstrip("/"), SecretStr(login) if login.strip(":") else None


def _problem(url: str) -> str:
    """Say what is wrong with a URL; empty if it can be used."""
    if not url.startswith(("http://", "https://")):
        return "is no URL."
    if not url.isprintable() or " " in url:
        return "is no URL: it has spaces or control characters."
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "is no URL."
    if not usable:
        return "is no URL: it has no host, or port 0."
    if parts.query or parts.fragment:
        return "has a query or fragment, and paths cannot be added to it."
    if "@" in parts.path:
        # `http://user:1/2@host`: the password would pass for a port and a path, and be shown.
        return "has an @ behind a slash: percent-encode user and password (/ is %2F), or the path's @ (%40)."
    return ""


def _harmless(url: str) -> str:
    """Return a broken URL without all that may be a secret: whatever stands before an ``@``, and the query."""
    _, at, rest = url.rpartition("@")
    shown = re.split("[?#]", rest)[0]
    return f"{_HIDDEN}@{shown}" if at else shown


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


def _basic(login: str) -> str:
    user, _, password = login.partition(":")
    return base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
