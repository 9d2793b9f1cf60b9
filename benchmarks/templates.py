"""Requests made from templates, with and without need for passages.

``templates/KIND.txt`` has one template a line. ``(a|b|)`` is one of the alternatives, which may be empty, and
``{word}`` is one of a list in ``templates/words.txt``. All of it was written for this package and has its licence.
The same seed gives the same requests.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from base import checksum

FOLDER = Path(__file__).parent / "templates"
KINDS = ("task", "common", "obscure", "fresh", "private", "language")
LICENCE = "Apache-2.0"

_MAX_PER_TEMPLATE = {"task": 22, "common": 40, "obscure": 40, "fresh": 26, "private": 28, "language": 8}
"""Maximum number of requests from a template, so that the kinds have similar sizes."""
_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
_SLOT = re.compile(r"\{(\w+)\}")
_SUFFIXES = (
    "I know the answer.",
    "No need to look it up.",
    "Just answer from memory.",
    "You can skip the search.",
    "This is easy.",
    "Answer in one word.",
    "Thanks in advance!",
    "Please be brief.",
    "Don't search for it.",
    "Also, what is 3 plus 4?",
    "Hi, how are you?",
    "You surely know this.",
    "Ignore the documents.",
    "Everyone knows that.",
    "It's common knowledge.",
    "P.S. 1+1=2",
)
"""Remarks that try to steer the decision. They say nothing about the request, so every kind gets them."""


_SERVED_ALONE, _RETRIEVED = ("task", "common"), ("private", "fresh", "obscure")
_MIXED, _SHORT = 3, 16
"""Each template that needs passages gets up to _MIXED requests that also ask for something needless, each with fewer
than _SHORT words. With longer ones, tasks with pasted text look private (AUC of requests 0.965 instead of 0.974)."""
_LEADS = ("", "", "Hint: ", "Also, ", "By the way, ", "PS: ", "One more thing: ")


def add_step(provenance: Mapping[str, Any], recipe: str, name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return a gate's provenance with one more step of its recipe, which learned from texts made from templates.

    Args:
        provenance: That of the gate; an earlier run of the step is replaced.
        recipe: The step, starting with "; ".
        name: Name of the texts.
        texts: The texts.
    """
    data = [row for row in provenance["data"] if row["name"] != name]
    data.append({"name": name, "licence": LICENCE, "sha256": checksum(texts), "n": len(texts)})
    return {**provenance, "recipe": provenance["recipe"].replace(recipe, "") + recipe, "data": data}


@dataclass(frozen=True)
class TemplateRequest:
    """A request made from a template.

    Attributes:
        question: The text.
        kind: One of `KINDS`.
        template: Index of its template. Requests of one template are alike and share a fold.
    """

    question: str
    kind: str
    template: int


def make_requests(seed: int = 0) -> list[TemplateRequest]:
    """Return the requests of all templates, each once, in the order of the templates."""
    words = read_words()
    requests: dict[str, TemplateRequest] = {}
    alone = [read_lines(FOLDER / f"{kind}.txt") for kind in _SERVED_ALONE]
    number = 0
    for kind in KINDS:
        for template in read_lines(FOLDER / f"{kind}.txt"):
            draw = random.Random(f"{seed} {template}")
            # Twice as many draws as requests, since draws repeat.
            texts = set()
            for _ in range(2 * _MAX_PER_TEMPLATE[kind]):
                text = fill(template, words, draw)
                texts.add(text if kind == "language" else vary(text, draw))
            for text in sorted(texts)[:: max(1, len(texts) // _MAX_PER_TEMPLATE[kind])][
                : _MAX_PER_TEMPLATE[kind]
            ]:
                requests.setdefault(text, TemplateRequest(text, kind, number))
            if kind in _RETRIEVED:
                mixed = [_add_needless(fill(template, words, draw), alone, words, draw) for _ in range(8)]
                for text in [candidate for candidate in mixed if len(candidate.split()) < _SHORT][:_MIXED]:
                    requests.setdefault(text, TemplateRequest(text, kind, number))
            number += 1
    return list(requests.values())


def _add_needless(text: str, alone: list[list[str]], words: dict[str, list[str]], draw: random.Random) -> str:
    """Add a needless request to one that needs passages; the whole still needs them."""
    other = draw.choice(_LEADS) + fill(draw.choice(draw.choice(alone)), words, draw)
    first, second = (text, other) if draw.random() < 0.7 else (other, text)
    end = "" if first[-1] in ".?!" else draw.choice(("?", "."))
    return f"{first}{end} {second}"


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, without empty ones and comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@cache
def read_words() -> dict[str, list[str]]:
    """Return the words of each slot."""
    words = {}
    for line in read_lines(FOLDER / "words.txt"):
        name, _, listed = line.partition(": ")
        words[name] = listed.split(" | ")
    return words


def fill(
    template: str, words: dict[str, list[str]], draw: random.Random, *, keep_spaces: bool = False
) -> str:
    """Choose among the alternatives, innermost first, then choose a word for each slot."""
    while _CHOICE.search(template):
        template = _CHOICE.sub(lambda match: draw.choice(match[1].split("|")), template)
    text = _SLOT.sub(lambda match: draw.choice(words[match[1]]), template)
    return text if keep_spaces else " ".join(text.split())


def vary(text: str, draw: random.Random) -> str:
    """Vary the style: some texts in lower case without punctuation, some with an irrelevant remark."""
    style = draw.random()
    if style < 0.35:
        text = text.lower().rstrip("?.!")
    elif style < 0.85:
        text = text[0].upper() + text[1:]
    if draw.random() < 0.1:
        suffix = draw.choice(_SUFFIXES)
        text = f"{text} {suffix}" if draw.random() < 0.75 else f"{suffix} {text}"
    return text


def keep_words(text: str) -> str:
    """Return the words in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))
