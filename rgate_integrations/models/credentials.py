"""Server credentials, which are never shown: an API key, or the login in a URL."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

from pydantic import SecretStr

from rgate_integrations.errors import ConfigurationError, needs_extra

_MAX_PORT = 65535


@dataclass(frozen=True)
class Credentials:
    """An API key, a login, or neither. ``repr`` hides them; a pickle contains them, for worker processes.

    Attributes:
        headers: The headers to send.
        secrets: The texts to redact.
    """

    headers: dict[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def redact(self, text: str) -> str:
        """Replace the credentials in a text, because servers may echo them.

        Redact before truncating, because half a key would not be found.
        """
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def read_credentials(url: str, api_key: str | SecretStr | None) -> tuple[str, Credentials]:
    """Return a server's base URL without its login, and the credentials: that login, or the API key.

    Args:
        url: An http or https URL, without query and fragment.
        api_key: The key, which is stripped; None or an empty one means no key.

    Raises:
        ConfigurationError: The URL or the key is invalid, or both a key and a login were given. The message does not
            quote them.
        MissingDependencyError: The extra ``openai`` is not installed.
    """
    with needs_extra("openai"):
        import httpx
    try:
        parts = httpx.URL(url.strip())
    except httpx.InvalidURL:  # its message may quote a part of the password
        parts = httpx.URL("")
    is_server = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) <= _MAX_PORT
    # An @ in the path means an unencoded password: `http://user:1/2@host` parses as host, port and path, so the
    # password would be shown.
    if not is_server or parts.query or parts.fragment or "@" in parts.path:
        raise ConfigurationError(
            "The server's URL is invalid.",
            hint="Use one such as http://localhost:8000, or http://localhost:8000/v1 for an LLM's server. It may not "
            f"contain ? or #, and its port may be at most {_MAX_PORT}. In its user and password, write / as %2F "
            "and @ as %40.",
        )
    # The login is sent as a header, because URLs are logged.
    bare = str(parts.copy_with(username="", password="")).rstrip("/")
    key = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key or ""
    if not (isinstance(key, str) and key.strip().isascii() and key.strip().isprintable()):
        raise ConfigurationError(
            "The token or API key must be printable ASCII text.",
            hint="Copy it again into the argument or environment variable (such as RGATE_API_KEY or RGATE_TOKEN), "
            "without extra characters such as a second line or a byte order mark.",
        )
    key = key.strip()
    secret = parts.password or parts.username  # a user name without a password is a token
    if key and secret:
        raise ConfigurationError(
            "Both an API key and a login in the URL were given, but a request can send only one.",
            hint="Remove the login from the URL, or the key: the argument, or the environment variable "
            "(RGATE_API_KEY, RGATE_JUDGE_API_KEY or RGATE_TOKEN).",
        )
    if key:
        return bare, Credentials({"Authorization": f"Bearer {key}"}, (key,))
    if secret:
        # The encoded form is a secret, too: anyone can decode it.
        basic = base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
        return bare, Credentials({"Authorization": f"Basic {basic}"}, (basic, secret))
    return bare, Credentials()
