"""Server credentials: an API key, or user and password of its URL. They are sent, and shown nowhere."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

from pydantic import SecretStr

from rgate_integrations.errors import ConfigurationError, missing_dependency


@dataclass(frozen=True)
class Credentials:
    """An API key, or a login, or neither. A ``repr`` does not show them; a pickle has them, since workers need them.

    Attributes:
        headers: The headers that they are sent in.
        secrets: What must not be shown.
    """

    headers: dict[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def redact(self, text: str) -> str:
        """Return ``text`` without the credentials: servers echo what they were sent.

        Redact before cutting: half a key would not be found.
        """
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def read_credentials(url: str, api_key: str | SecretStr | None) -> tuple[str, Credentials]:
    """Split a server's base URL into the URL without its login, and the credentials.

    Args:
        url: The URL.
        api_key: The key; white space around it is dropped, and an empty one is none.

    Raises:
        ConfigurationError: It is no URL that paths can be added to, the key cannot be sent, or both a key and a login
            were given. None of them is quoted.
        MissingDependencyError: The extra ``served`` is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise missing_dependency("httpx", "served") from error
    try:
        parts = httpx.URL(url.strip())
    except httpx.InvalidURL:  # its message may quote a part of the password
        parts = httpx.URL("")
    is_server = parts.scheme in ("http", "https") and parts.host
    # An @ in the path: of `http://user:1/2@host` the password would pass for a port and a path, and be shown.
    if not is_server or parts.query or parts.fragment or "@" in parts.path:
        raise ConfigurationError(
            "The server's URL is invalid.",
            hint="Such as http://localhost:8000/v1; percent-encode user and password (/ is %2F, @ is %40).",
        )
    bare = str(parts.copy_with(username="", password="")).rstrip("/")
    key = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key or ""
    if not (isinstance(key, str) and key.strip().isascii() and key.strip().isprintable()):
        raise ConfigurationError(
            "The API key must be printable ASCII text.",
            hint="Was it copied with something else, such as a second line or a byte order mark?",
        )
    key = key.strip()
    secret = parts.password or parts.username  # a user without a password is a token
    if key and secret:
        raise ConfigurationError(
            "An API key was given, and a user in the URL: a request can be sent with only one of them.",
            hint="Leave one of them out.",
        )
    if key:
        return bare, Credentials({"Authorization": f"Bearer {key}"}, (key,))
    if secret:
        basic = base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
        return bare, Credentials({"Authorization": f"Basic {basic}"}, (basic, secret))
    return bare, Credentials()
