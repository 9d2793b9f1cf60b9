"""Parses the name of an LLM as servers, clouds and files spell it: family, version, size, date.

Names are parsed by rules, never matched by similarity. In this order:

1. Case is ignored, and so is everything before the last ``/``: owners, providers, folders, ARNs; also the
   `PROVIDERS` before a colon (``openai:gpt-4o``), Bedrock's prefixes (``us.anthropic.``), and all but the
   model in the name of a fine-tune (``ft:MODEL:organisation:name:id``).
2. File endings, shard numbers, quantisations (``Q4_K_M``, ``q4f16_1``), tags (``:free``) and Bedrock's
   ``-v1:0`` are dropped.
3. One date or revision is cut out and stored separately: ``20241022``, ``2024-08-06``, ``08-2024``,
   ``06-05``, ``0613``, ``001``.
4. The rest is split into words at white space, any of ``-_:@,+()``, and dots outside numbers. A family's name
   and the number glued to it are two words (``llama3.1``, ``gpt4o``), and two numbers in a row are one
   version (``claude-3-5``, ``llama3-1``; Fireworks writes ``v3p1``, Azure ``gpt-35``).
5. Words that do not matter for what the LLM knows are dropped (`_NOISE`): ``instruct``, ``chat``, ``it``,
   ``awq``, context lengths, makers, and releases (``v0.2``) unless they follow a family's name. If a size is
   named, words for speed (``turbo``, ``instant``) and a mixture's active parameters and number of experts
   (``a3b``, ``16e``) are dropped, too.
6. Another name of an LLM is replaced by its usual one (`ALIASES`).

The order of the words does not matter: ``claude-sonnet-4`` and ``claude-4-sonnet`` are the same. Words for how long
an LLM thinks (``thinking``, ``high``) count only if the table has figures with and without them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


FAMILIES = _set(
    """
    aya chatglm chinchilla claude codellama codestral command davinci dbrx deepseek devstral ernie exaone falcon
    gemini gemma glam glm gopher gpt gpt-2 gpt-j gpt-neo gpt-oss granite grok hunyuan inkling internlm jamba kimi
    llama magistral minimax ministral mistral mixtral mpt muse-spark nemotron nova o olmo openchat palm phi
    pixtral qwen qwq smollm solar stablelm starling tinyllama titan vicuna yi zephyr
    """
)
"""Words for the families of LLMs, as parsed names contain them."""

PROVIDERS = _set(
    """
    anthropic azure azure_ai azure_openai bedrock bedrock_converse cohere deepseek fireworks google_anthropic_vertex
    google_genai google_vertexai groq huggingface ibm litellm mistralai nvidia ollama openai openrouter perplexity
    together upstage vertex_ai xai
    """
)

ALIASES = {
    "chatgpt-4o": "gpt-4o",
    "deepseek": "deepseek-v3",
    "deepseek-r1-671b": "deepseek-r1",
    "deepseek-reasoner": "deepseek-r1",
    "deepseek-v3-671b": "deepseek-v3",
    "gemini-pro": "gemini-1.0-pro",
    "kimi-k2-1t": "kimi-k2",
    "kimi-k2-thinking-turbo": "kimi-k2-thinking",
    "kimi-k2-turbo": "kimi-k2",
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
"""Usual names of LLMs by their other names, some of which only add the size."""

_NOISE = _set(
    """
    instruct instruction chat it base pt sft hf text vision only maas cloud hosted model models preview exp
    experimental latest beta
    gguf ggml gptq awq exl2 mlx mlc bnb qat ud i1 imat imatrix dynamic quantized quantised static optimized
    fp4 fp8 fp16 fp32 f16 f32 bf16 nf4 nvfp4 mxfp4 int4 int8 2bit 3bit 4bit 5bit 6bit 8bit 16bit 128g w4a16 w8a8 w8a16
    amazon anthropic azure bedrock cohere databricks google groq meta microsoft mistralai moonshotai nvidia openai
    unsloth
    """
)
# Words for how long the LLM thinks.
_EFFORT = _set("thinking reasoning non none minimal low high xhigh adaptive")
_TIERS_OR_EFFORT = _set("max medium")
_OTHER_TASKS = _set(  # words in the names of models that do not answer questions
    """
    bge clip e5 embed embedding embeddings gte guard image imagen moderation ocr rerank reranker reward speech
    transcribe tts whisper
    """
)
_SPEED = _set("turbo instant versatile lite fast reference free")  # servers add these words to a size

_MAX_CHARACTERS = 400  # limits the length of a name or path, because the rules below backtrack
_PROVIDER_NOISE = (
    (r".*models--[^/]+?--([^/]+).*", r"\1"),  # the Hugging Face Hub's cache
    (r".*/", ""),
    (r"^ft:([^:]*).*", r"\1"),  # ft:MODEL:organisation:name:id
    (r"(?<!claude)-v?\d+:\d+(:\d+k)?$", ""),  # Bedrock's version; Claude 2.1 is claude-v2:1
    (rf"^({'|'.join(PROVIDERS)}):", ""),
    (r"(?<!^):(latest|free|nitro|beta|extended|floor|online|exacto|thinking|cloud)$", ""),
    (r"[:@]", "-"),
    (r"(-\d{5}-of-\d{5})?\.(gguf|ggml|bin|safetensors|onnx|llamafile)$", ""),
    (
        r"^((us|eu|ap|apac|jp|au|ca|global|us-gov)\.)?"
        r"(ai21|amazon|anthropic|cohere|google|meta|minimax|mistral|moonshot(ai)?|nvidia|openai|qwen|writer|xai|zai)\.",
        "",
    ),
    (r"(^|[-._])(i1[-._]|ud[-._])?(iq|tq|q)\d+(f\d+)?(_[0-9a-z]+)*(?=$|[-.])", ""),  # quantisation
)
_DATES = (
    r"(?<!\d)(20\d\d)-?(0[1-9]|1[0-2])-?(0[1-9]|[12]\d|3[01])(?!\d)",
    r"(?<!\d)(0[1-9]|1[0-2])-(20\d\d)(?!\d)",
    r"(?<=-)(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])(?=$|-)",
    r"(?<=[-_])(\d{4})(?=$|[-_])",
    r"(?<=[-_])(00\d)(?=$|[-_])",
)
_DATE = "·"  # stands for a date, so that the numbers on both sides do not join into one version
_BETWEEN = r"[-_\s,+()]+|(?<!\d)\.|\.(?!\d)"
_ANY_FAMILY = "|".join(sorted(FAMILIES, key=len, reverse=True))
_JOIN_RULES = (  # for words separated by single spaces
    (r"(?<!\S)muse spark(?!\S)", "muse-spark"),
    (r"(?<!\S)command r(?=\d+b)", "command r "),
    (rf"(?<!\S)({_ANY_FAMILY})v?(?=\d)", r"\1 "),  # llama3.1
    (r"(?<!\S)v?([kr]?\d+)p(\d+)(b?)(?!\S)", r"\1.\2\3"),  # v3p1, for servers that take no dot
    (r"(?<!\S)gpt 35(?!\S)", "gpt 3.5"),
    (rf"(?<!\S)({_ANY_FAMILY}) v(\d+(\.\d+)?)(?!\S)", r"\1 \2"),
    (r"(?<!\S)v\d+(\.\d+)?(?!\S) ?", ""),  # the number of a release, such as Mistral's v0.2
    (r"(?<!\S)gpt (2|j|neo|oss)(?!\S)", r"gpt-\1"),
    (r"(?<!\S)([kr]?\d) (\d\d?)(?!\S)", r"\1.\2"),  # claude-3-5
    (r"(?<!\S)(\d+)\.0(?!\S)", r"\1"),
)
# Versions such as 3.1, r1, v3, k2 or 4o; sizes such as 8b, 8x7b or e4b.
_VERSION = r"([krv]?)(\d+(?:\.\d+)?)([a-z]?)"
_SIZE = r"e?(?:(\d{1,3})x)?(\d{1,5}(?:\.\d{1,5})?)([bmt])"
_ACTIVE = r"a\d+(\.\d+)?b|\d+e"  # in a mixture: active parameters, number of experts
_CONTEXT = rf"\d+k|1m|\d{{5,}}|{_DATE}"
_BILLIONS = {"m": 0.001, "b": 1.0, "t": 1000.0}
# The experts of a mixture share layers, so its size is about this fraction of the product: 8x7b has 47 billion.
_SHARED = 0.83


@dataclass(frozen=True)
class ModelName:
    """A parsed name.

    Attributes:
        words: The relevant words; two names with the same words mean the same LLM.
        families: Maps each of the `FAMILIES` in the name to its version, which is empty if unknown. A distilled
            LLM's name may have two families. A model that does not answer questions, such as an embedder, has none.
        size: Billions of parameters, the fewest if there are several sizes, as in ``8b-distilled-from-405b``; None
            if unknown.
        date: The digits of the date or revision; may be empty.
        numbered: The families whose version directly follows their name, as in ``gpt-5``; Claude's may follow one
            word later, as in ``claude-opus-5``. A number elsewhere may mean something else: in ``gpt-bot-5``, 5 may
            be the bot's version.
    """

    words: frozenset[str]
    families: dict[str, str]
    size: float | None
    date: str = ""
    numbered: frozenset[str] = frozenset()

    @property
    def unsized(self) -> frozenset[str]:
        """The words without the size."""
        return frozenset(word for word in self.words if re.fullmatch(_SIZE, word) is None)

    @property
    def without_effort(self) -> frozenset[str]:
        """The words without those that say how long the LLM thinks."""
        return self.words - _EFFORT

    @property
    def without_any_effort(self) -> frozenset[str]:
        """The words without those that say, or may say, how long the LLM thinks.

        For example, ``max`` says so in a name of Claude, but is a tier in a name of Qwen.
        """
        return self.words - _EFFORT - _TIERS_OR_EFFORT

    def version(self, family: str) -> float | None:
        """Return the version of one of the name's families as a number, without letters; None if it is unknown."""
        matched = re.fullmatch(_VERSION, self.families[family])
        return float(matched[2]) if matched else None

    def tier(self, family: str) -> frozenset[str]:
        """Return the words that tell this LLM from others of its family and version, such as ``opus``.

        A letter in the version, such as the ``r`` of ``r1``, is one of these words. So DeepSeek's R2 counts as the
        successor of R1, not of V1.
        """
        letters = re.sub(r"[\d.]", "", self.families[family])
        return self.without_effort - {family, self.families[family]} | frozenset(letters)


def parse_name(name: str) -> ModelName:
    """Return the parts of an LLM's name, found by the rules at the top of this module.

    Examples:
        >>> sorted(parse_name("us.meta.llama3-1-8b-instruct-v1:0").words)
        ['3.1', '8b', 'llama']
    """
    text, date = name[:_MAX_CHARACTERS].strip().casefold().replace("\\", "/").rstrip("/"), ""
    for pattern, replacement in _PROVIDER_NOISE:
        text = re.sub(pattern, replacement, text)
    for pattern in _DATES:
        match = re.search(pattern, text)
        if match is not None:
            text, date = f"{text[: match.start()]}-{_DATE}-{text[match.end() :]}", "".join(match.groups())
            break
    words = _split_words(text)
    return _parse_words(_aliases().get(tuple(words), words), date)


def sizes_left_out() -> list[tuple[ModelName, str]]:
    """Return those of the `ALIASES` that have a size, such as ``phi-4-14b``, although the usual name has none.

    Returns:
        Pairs of the parsed alias and the usual name.
    """
    names = [(_parse_words(_split_words(alias), ""), usual) for alias, usual in ALIASES.items()]
    return [
        (name, usual) for name, usual in names if name.size is not None and parse_name(usual).size is None
    ]


def _split_words(text: str) -> list[str]:
    """Split a name into its relevant words; a version is one word."""
    joined = " ".join(filter(None, re.split(_BETWEEN, text)))
    for pattern, replacement in _JOIN_RULES:
        joined = re.sub(pattern, replacement, joined)
    words = [word for word in joined.split() if word not in _NOISE and not re.fullmatch(_CONTEXT, word)]
    if any(re.fullmatch(_SIZE, word) for word in words):  # next to a size, these words add nothing
        words = [word for word in words if word not in _SPEED and not re.fullmatch(_ACTIVE, word)]
    return words


@cache
def _aliases() -> dict[tuple[str, ...], list[str]]:
    """Map the words of each alias to the words of the usual name."""
    return {tuple(_split_words(alias)): _split_words(usual) for alias, usual in ALIASES.items()}


def _parse_words(words: list[str], date: str) -> ModelName:
    """Return the name with these words: its families, their versions and the size."""
    first_number = next(filter(re.compile(r"\d+(\.\d+)?").fullmatch, words), "")
    families: dict[str, str] = {}
    numbered = set[str]()
    sizes: list[float] = []
    if words[:1] == ["claude"] and words[2:3] == [first_number]:  # claude-opus-5
        numbered.add("claude")
    for word, following in pairwise([*words, ""]):
        has_version = re.fullmatch(_VERSION, following) and not re.fullmatch(_SIZE, following)
        # marco-o1 is not OpenAI's.
        is_family = word in FAMILIES and (word != "o" or (has_version and word == words[0]))
        if is_family and word not in families:
            families[word] = first_number
            if has_version:
                families[word] = following
                numbered.add(word)
        sized = re.fullmatch(_SIZE, word)
        if sized is not None:  # such as 8x7b
            experts = int(sized[1]) * _SHARED if sized[1] else 1.0
            sizes.append(float(sized[2]) * _BILLIONS[sized[3]] * experts)
    if _OTHER_TASKS.intersection(words):
        families = {}
    return ModelName(frozenset(words), families, min(sizes, default=0.0) or None, date, frozenset(numbered))
