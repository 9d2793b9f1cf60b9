"""What the name of an LLM says, however a server, a cloud or a file spells it: family, version, size, date.

Names are read by rules, never by likeness. In this order:

1. Case and what stands before the last ``/`` do not count: owners, providers, folders, ARNs. Nor do the prefixes of
   `PROVIDERS` with a colon (``openai:gpt-4o``), of Bedrock (``us.anthropic.``) and of a fine-tune (``ft:``).
2. File endings, shard numbers, quantisations (``Q4_K_M``, ``q4f16_1``, ``AWQ``) and Bedrock's ``-v1:0`` are dropped.
3. Dates are taken out and kept apart: ``20241022``, ``2024-08-06``, ``08-2024``, ``06-05``, ``0613``, ``001``.
4. The rest is split into words at ``-``, ``_``, ``:``, ``@`` and white space. A family's name and the number glued to
   it are two words (``llama3.1``, ``gpt4o``), and two numbers in a row are one version (``claude-3-5``,
   ``llama3-1``; Fireworks writes ``v3p1``, Azure ``gpt-35``).
5. Words that say nothing of what the LLM knows are dropped (`_NOISE`): ``instruct``, ``chat``, ``it``, lengths of
   contexts, makers. Where a size is named, so are the words for speed (``turbo``, ``instant``) and the active
   experts of a mixture.

The order of the words does not matter: ``claude-sonnet-4`` and ``claude-4-sonnet`` are one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


FAMILIES = _set(
    """
    aya chatglm claude codellama codestral command davinci dbrx deepseek devstral ernie exaone falcon gemini gemma glm
    gpt gpt-2 gpt-j gpt-neo gpt-oss granite grok hunyuan internlm jamba kimi llama magistral minimax ministral mistral
    mixtral nemotron nova o1 o3 o4 olmo openchat palm phi pixtral qwen qwq smollm solar stablelm starling tinyllama
    titan vicuna yi zephyr
    """
)
"""The first words of names, by which LLMs of a maker belong together."""

PROVIDERS = _set(
    """
    anthropic azure azure_ai azure_openai bedrock bedrock_converse cohere deepseek fireworks google_anthropic_vertex
    google_genai google_vertexai groq huggingface ibm litellm mistralai nvidia ollama openai openrouter perplexity
    together upstage vertex_ai xai
    """
)

ALIASES = {
    "chatgpt-4o": "gpt-4o",
    "deepseek-chat": "deepseek-v3",
    "deepseek-r1-671b": "deepseek-r1",
    "deepseek-reasoner": "deepseek-r1",
    "deepseek-v3-671b": "deepseek-v3",
    "gemini-pro": "gemini-1.0-pro",
    "kimi-k2-1t": "kimi-k2",
    "llama-4-maverick-17b": "llama-4-maverick",
    "llama-4-scout-17b": "llama-4-scout",
    "mistral": "mistral-7b",
    "mistral-large": "mistral-large-2",
    "mistral-large-123b": "mistral-large-2",
    "mistral-large2": "mistral-large-2",
    "mistral-nemo-12b": "mistral-nemo",
    "mixtral": "mixtral-8x7b",
    "open-mistral-7b": "mistral-7b",
    "open-mistral-nemo": "mistral-nemo",
    "open-mixtral-8x22b": "mixtral-8x22b",
    "open-mixtral-8x7b": "mixtral-8x7b",
    "phi-3.5-3.8b": "phi-3.5-mini",
    "phi-4-14b": "phi-4",
    "phi-4-mini-3.8b": "phi-4-mini",
}
"""LLMs that makers and servers also call by another name, and sizes that the usual name leaves out."""

_NOISE = _set(
    """
    instruct instruction it base pt sft hf text vision only maas cloud hosted model models preview exp
    experimental latest beta
    gguf ggml gptq awq exl2 mlx mlc bnb qat ud i1 imat imatrix dynamic quantized quantised static optimized
    fp4 fp8 fp16 fp32 f16 f32 bf16 nf4 nvfp4 mxfp4 int4 int8 2bit 3bit 4bit 5bit 6bit 8bit 16bit 128g w4a16 w8a8 w8a16
    amazon anthropic azure bedrock cohere databricks google groq meta microsoft mistralai moonshotai nvidia openai
    unsloth
    """
)
_SPEED = _set("turbo instant versatile lite fast reference free")  # servers' words, beside a size
_TAGS = _set("latest free nitro beta extended floor online exacto thinking cloud")  # behind a colon
_COMPOUNDS = {
    ("gpt", "2"): "gpt-2",
    ("gpt", "j"): "gpt-j",
    ("gpt", "neo"): "gpt-neo",
    ("gpt", "oss"): "gpt-oss",
}

_LONGEST = 400  # characters of a name, or of the path of a file
_CACHE_FOLDER = re.compile(r"models--[^/]+?--([^/]+)")  # of the Hugging Face Hub
_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.(gguf|ggml|bin|safetensors|onnx|llamafile)$")
_BEDROCK_OWNER = re.compile(
    r"^((us|eu|ap|apac|jp|au|ca|global|us-gov)\.)?"
    r"(ai21|amazon|anthropic|cohere|google|meta|minimax|mistral|moonshot|nvidia|openai|qwen|writer)\."
)
_BEDROCK_VERSION = re.compile(r"(?<!claude)-v?\d+:\d+(:\d+k)?$")  # Claude 2.1 is claude-v2:1
_QUANTISATION = re.compile(r"(^|[-._])(i1[-._]|ud[-._])?(iq|tq|q)\d+(f\d+)?(_[0-9a-z]+)*(?=$|[-.])")
_DATES = (
    re.compile(r"(?<!\d)(20\d\d)-?(0[1-9]|1[0-2])-?(0[1-9]|[12]\d|3[01])(?!\d)"),
    re.compile(r"(?<!\d)(0[1-9]|1[0-2])-(20\d\d)(?!\d)"),
    re.compile(r"(?<=-)(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])(?=$|-)"),
    re.compile(r"(?<=[-_])(\d{4})(?=$|[-_])"),
    re.compile(r"(?<=[-_])(00\d)(?=$|[-_])"),
)
_BETWEEN = re.compile(r"[-_\s,+()]+|(?<!\d)\.|\.(?!\d)")
_GLUED = re.compile(r"([a-z]+?)v?(\d.*)")
_WITH_P = re.compile(r"v?(\d+)p(\d+)(b?)")  # a dot, for servers that take none
_VERSION = re.compile(r"[krv]?\d+(\.\d+)?[a-z]?")
_SIZE = re.compile(r"e?(?:(\d+)x)?(\d+(?:\.\d+)?)([bmt])")
_ACTIVE = re.compile(r"a\d+(\.\d+)?b|\d+e")  # of a mixture: active parameters, number of experts
_CONTEXT = re.compile(r"\d+k|1m|\d{5,}")
_BILLIONS = {"m": 0.001, "b": 1.0, "t": 1000.0}
_SHARED = 0.83  # of a mixture's parameters, about: 8x7b has 47 billion


@dataclass(frozen=True)
class ModelName:
    """What a name says.

    Attributes:
        words: The words of the name that count; two names with the same words are of one LLM.
        families: Those of `FAMILIES` that are named, in order; a distilled LLM may name two.
        versions: The version of each family; empty where none is named.
        size: Billions of parameters; None where none is named.
        date: The date, digits only; empty where none is named.
    """

    words: frozenset[str]
    families: tuple[str, ...]
    versions: tuple[str, ...]
    size: float | None
    date: str = ""

    @property
    def unsized(self) -> frozenset[str]:
        """The words without the size."""
        return frozenset(word for word in self.words if _SIZE.fullmatch(word) is None)


def parse_name(name: str) -> ModelName:
    """Read a name; see the module for the rules.

    >>> sorted(parse_name("us.meta.llama3-1-8b-instruct-v1:0").words)
    ['3.1', '8b', 'llama']
    """
    text, date = _without_date(_bare(name))
    words = _words(text)
    words = _counting(_called_usually(words))
    return _read(_called_usually(words), date)


def sizes_left_out() -> list[tuple[ModelName, str]]:
    """Return the names of `ALIASES` that have a size, each with the usual name, which has none."""
    read = [(_read(_words(alias), ""), usual) for alias, usual in ALIASES.items()]
    return [(name, usual) for name, usual in read if name.size is not None and parse_name(usual).size is None]


def _called_usually(words: list[str]) -> list[str]:
    usual = _aliases().get(tuple(words))
    return words if usual is None else _words(usual)


@cache
def _aliases() -> dict[tuple[str, ...], str]:
    """Return `ALIASES` by their words."""
    return {tuple(_words(alias)): usual for alias, usual in ALIASES.items()}


def _read(words: list[str], date: str) -> ModelName:
    """Find families, their versions and the size among words."""
    families: list[str] = []
    versions: list[str] = []
    for place, word in enumerate(words):
        if word in FAMILIES and word not in families:
            families.append(word)
            versions.append(_version(words, place))
    sizes = [_billions(word) for word in words if _SIZE.fullmatch(word)]
    return ModelName(frozenset(words), tuple(families), tuple(versions), max(sizes, default=None), date)


def _bare(name: str) -> str:
    """Return a name without what tells where the LLM runs, and in what form."""
    text = name[:_LONGEST].strip().casefold().replace("\\", "/")
    cached = _CACHE_FOLDER.search(text)
    text = text.rstrip("/").rpartition("/")[2] if cached is None else cached[1]
    if text.startswith("ft:"):  # ft:MODEL:organisation:name:id
        text = text.split(":")[1]
    text = _BEDROCK_VERSION.sub("", text)
    head, colon, tag = text.partition(":")
    if colon and head in PROVIDERS:
        text = tag
        head, colon, tag = text.partition(":")
    if colon and tag in _TAGS:
        text = head
    text = text.replace(":", "-").replace("@", "-")
    text = _ENDING.sub("", text)
    text = _BEDROCK_OWNER.sub("", text)
    return _QUANTISATION.sub("", text)


def _without_date(text: str) -> tuple[str, str]:
    """Return a name without its date, and the date's digits."""
    for pattern in _DATES:
        found = pattern.search(text)
        if found is not None:
            return text[: found.start()] + text[found.end() :], "".join(found.groups())
    return text, ""


def _words(text: str) -> list[str]:
    """Split a name into words, each version one of them."""
    words: list[str] = []
    for part in filter(None, _BETWEEN.split(text)):
        glued = _GLUED.fullmatch(part)
        if part not in FAMILIES and glued is not None and glued[1] in FAMILIES:
            words += [glued[1], glued[2]]
        else:
            words.append(part)
    found: list[str] = []
    for word in words:
        before = found[-1] if found else ""
        after_family = before in FAMILIES
        dotted = _WITH_P.fullmatch(word)
        if dotted is not None:
            word = f"{dotted[1]}.{dotted[2]}{dotted[3]}"
        elif word == "35" and before == "gpt":
            word = "3.5"
        elif re.fullmatch(r"v\d+(\.\d+)?", word):
            if not after_family:  # the number of a release, such as Mistral's v0.2
                continue
            word = word[1:]
        if (before, word) in _COMPOUNDS:
            found[-1] = _COMPOUNDS[before, word]
        elif re.fullmatch(r"\d", before) and re.fullmatch(r"\d", word):
            found[-1] = f"{before}.{word}"
        else:
            found.append(word.removesuffix(".0") if re.fullmatch(r"\d+\.0", word) else word)
    return [word for word in found if word not in _NOISE]


def _counting(words: list[str]) -> list[str]:
    """Drop what counts only beside other words."""
    sized = any(_SIZE.fullmatch(word) for word in words)
    kept = []
    for word in words:
        if _CONTEXT.fullmatch(word) or word == "chat":  # not before: DeepSeek-V3 is deepseek-chat
            continue
        if sized and (word in _SPEED or _ACTIVE.fullmatch(word)):
            continue
        kept.append(word)
    return kept


def _version(words: list[str], place: int) -> str:
    """Return the version of the family at a place: the next word if it is a number, or else the first number."""
    after = words[place + 1] if place + 1 < len(words) else ""
    if _VERSION.fullmatch(after) and not _SIZE.fullmatch(after):
        return after
    numbers = [word for word in words if re.fullmatch(r"\d+(\.\d+)?", word)]
    return numbers[0] if numbers else ""


def _billions(word: str) -> float:
    """Return the size that a word such as ``8x7b`` names."""
    found = _SIZE.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} is no size")
    size = float(found[2]) * _BILLIONS[found[3]]
    return size * int(found[1]) * _SHARED if found[1] else size
