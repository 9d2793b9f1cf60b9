"""Metadata that depends on where the project lives: its addresses, and the links of the README on a package index.

A package index shows the README without the files beside it, so links to them need the repository's address. It is
taken from the environment: ``RGATE_REPOSITORY=https://… python -m build``. Without it, nothing is changed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A Markdown link or image, but neither an address nor a place on the same page.
_RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what is dynamic."""
        repository = os.environ.get("RGATE_REPOSITORY", "").rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if repository:
            text = with_addresses(text, repository)
            metadata["urls"] = addresses(repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def addresses(repository: str) -> dict[str, str]:
    """Return the project's addresses by their usual names."""
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def with_addresses(text: str, repository: str) -> str:
    """Make the links of a README to files beside it links into a repository; images become raw files."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}{link[2]}({repository}/{kind}/main/{link[3]})"

    return _RELATIVE.sub(absolute, text)
