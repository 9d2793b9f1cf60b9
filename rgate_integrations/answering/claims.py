"""Claims of a draft, the rewriters that find them, and the two tag formats that the authors of SlimPLM published.

A rewriter splits the draft of an answer into claims, each with a search query (SlimPLM, section 3.3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import dropwhile
from typing import Literal, TypeAlias

from pydantic import Field

from rgate_integrations.decision import Decision, Draft, Frozen, Text
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.replies import describe_non_answer
from rgate_integrations.runtime.segments import segments


class Claim(Frozen):
    """A self-contained statement of a draft, or a sub-question of the question.

    Attributes:
        text: The statement or sub-question, on one line.
        query: The search query for it, on one line; None without one.
        needs_search: Whether the claim needs a search, according to the rewriter; None if it does not say.
        kind: ``"claim"`` for a statement, ``"question"`` for a sub-question.
    """

    text: Text = Field(min_length=1)
    query: Text | None = None
    needs_search: bool | None = None
    kind: Literal["claim", "question"] = "claim"


# The paper (section 3.3) writes ``<Claim> text <Query> text ...``. The annotated data (appendix, table 8) write
# ``<Claims> <Claim(text)> <Search(True)> <Query(text)> ... </Claims>`` and, for the question itself, the same with
# ``<Question(text)>`` inside ``<Questions> ... </Questions>``.
_NAMES = r"Claims?|Questions?|SubQuestion|Search|NeedSearch|Query"
_MARK = re.compile(rf"<[</\s]*(?P<name>(?:{_NAMES})\b)?", re.IGNORECASE)
_BLOCK = re.compile(r"<\s*(Claim|Question|SubQuestion)\s*(?=[(>])", re.IGNORECASE)
_TEXT = rf"((?:(?!</?\s*(?:{_NAMES})\b|\)\s*>).)+)"
_TAGGED = r"<\s*(?:{name})\s*(?:\({text}\)\s*>|>{text})"
_STATEMENT = re.compile(
    _TAGGED.format(name="Claim|Question|SubQuestion", text=_TEXT), re.IGNORECASE | re.DOTALL
)
_QUERY = re.compile(_TAGGED.format(name="Query", text=_TEXT), re.IGNORECASE | re.DOTALL)
_SEARCH = re.compile(r"<\s*(?:Need)?Search\s*\(\s*(True|False)\s*\)\s*>", re.IGNORECASE)


def parse_claims(text: str) -> list[Claim]:
    """Return the tagged claims in a model's output, in either format of SlimPLM's authors or a mixture.

    Never raises: text without tags has no claims, and malformed blocks are skipped. Apart from white space, every
    claim and query is a substring of ``text``.

    Examples:
        >>> parse_claims("<Claim> Paris is in France. <Query> Paris country")[0].query
        'Paris country'
    """
    # A block lasts until the next one starts, so a malformed block cannot swallow its successors.
    starts = list(_BLOCK.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    claims = []
    for start, end in zip(starts, ends, strict=False):
        block = text[start.start() : end]
        statement = _first(_STATEMENT, block)
        if statement is None:
            continue
        search = _SEARCH.search(block)
        claim = Claim(
            text=statement,
            query=_first(_QUERY, block),
            needs_search=None if search is None else search.group(1).lower() == "true",
            kind="claim" if start.group(1).lower() == "claim" else "question",
        )
        claims.append(claim)
    return claims


def _first(tagged: re.Pattern[str], block: str) -> str | None:
    """Return the text that the pattern ``tagged`` finds first in a block, on one line; None if missing or empty."""
    match = tagged.search(block)
    if match is None:
        return None
    return " ".join((match.group(1) or match.group(2)).split()) or None


def format_claims(claims: Sequence[Claim]) -> str:
    """Return claims in the format of SlimPLM's training data, which writes sub-questions like claims; "" for none."""
    blocks = []
    for claim in claims:
        block = f"<Claim({claim.text})>"
        if claim.needs_search is not None:
            block += f" <Search({claim.needs_search})>"
        if claim.query is not None:
            block += f" <Query({claim.query})>"
        blocks.append(block)
    return f"<Claims> {' '.join(blocks)} </Claims>" if blocks else ""


def without_tags(text: str) -> str:
    """Return a text without openings of tags, such as ``<Query``, so that quoting it in a prompt plants no claims."""
    # The pattern includes everything before the name: otherwise the rest of a nested tag could form a tag again.
    return _MARK.sub(lambda mark: " " if mark["name"] else mark.group(), text)


# --- rewriters ----------------------------------------------------------------------------------------------

REWRITE = PromptTemplate(
    name="slimplm-rewrite",
    version=1,
    system=(
        "You are a helpful assistant. Your task is to parse user input into structured formats and accomplish "
        "the task according to the heuristic answer."
    ),
    user="Heuristic answer: {draft}\nQuestion: {question}\nQuery Rewrite Output:",
    cut="draft",
)
"""The prompt of the SlimPLM paper (section 3.3), for a rewriter trained on it."""

REWRITE_FEW_SHOT = PromptTemplate(
    name="slimplm-rewrite-few-shot",
    version=1,
    system=(
        "Split the heuristic answer into brief, self-contained claims and give each a search query that checks it. "
        "Write nothing but <Claim> and <Query> tags."
    ),
    user=REWRITE.user,
    examples=(
        (
            REWRITE.user.format(
                draft="Hamlet was written by William Shakespeare. It was first printed in 1603.",
                question="who wrote hamlet and when was it printed?",
            ),
            "<Claim> Hamlet was written by William Shakespeare. <Query> author of Hamlet "
            "<Claim> Hamlet was first printed in 1603. <Query> Hamlet first printed edition year",
        ),
        (
            REWRITE.user.format(
                draft="The Danube flows through ten countries.",
                question="How many countries does the Danube cross?",
            ),
            "<Claim> The Danube flows through ten countries. <Query> Danube number of countries",
        ),
    ),
    cut="draft",
)


Rewriter: TypeAlias = Callable[[Sequence[Decision]], list[list[Claim]]]
"""Turns the questions and drafts of decisions into claims: one list per decision, which may be empty."""


def rewrite_by_sentence(decisions: Sequence[Decision]) -> list[list[Claim]]:
    """Return the sentences of each draft as self-contained claims. This default rewriter needs no model."""
    return [sentence_claims(decision.question, decision.draft) for decision in decisions]


class ModelRewriter:
    """SlimPLM's query rewriter (section 3.3): a model writes claims and queries in one call.

    If the output has no readable claim with a query, `rewrite_by_sentence` is used for that question. A
    question without a draft has no claims.

    Args:
        proxy: The model. Without an adapter it should have at least 1B parameters.
        adapter: Folder or Hub id of a LoRA adapter trained on the paper's prompt; None for a prompt with
            examples.
        tokens: Maximum number of tokens of the output, at least 1.
    """

    def __init__(self, proxy: LanguageModel, *, adapter: str | None = None, tokens: int = 256) -> None:
        self.proxy = proxy
        self.adapter = adapter
        self.tokens = tokens
        self.prompt = REWRITE if adapter else REWRITE_FEW_SHOT

    def __call__(self, decisions: Sequence[Decision]) -> list[list[Claim]]:
        """Return the claims of each decision's draft."""
        claims = rewrite_by_sentence(decisions)
        values = {
            # Tags in the quoted texts must not plant claims.
            index: {"question": without_tags(decision.question), "draft": without_tags(decision.draft.text)}
            for index, decision in enumerate(decisions)
            if decision.draft is not None
        }
        if values:
            prompts = list(values.values())
            outputs = self.proxy.generate(self.prompt, prompts, tokens=self.tokens, adapter=self.adapter)
            for index, output in zip(values, outputs, strict=True):
                parsed = [claim for claim in parse_claims(output.text) if claim.query]
                claims[index] = parsed or claims[index]
        return claims


# The Markdown of LLMs' answers: code, headings, and the marks of lists, quotations, tables and emphasis.
_CODE_BLOCK = re.compile(r"^ *(```|~~~).*?(?:^ *\1|\Z)", re.DOTALL | re.MULTILINE)
_MARKS = re.compile(r"^[ \t]*(?:#+ .*|(?:(?:[-*+•>]|\d{1,3}[.)])[ \t]+)+)|^[ \t|:-]+$|\*\*|`", re.MULTILINE)
_ABBREVIATION = re.compile(
    r"(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|etc|No|Prof|Gen|Col|Lt|Capt|Sgt|[A-Z]|\w(?:\.\w)+)\.$"
)
_PRONOUN = re.compile(r"^(?:he|she|it|they|this|that|these|those)\b(?!\s+(?:is why|means))", re.IGNORECASE)
_POSSESSIVE = re.compile(r"^(?:his|her|its|their)\b", re.IGNORECASE)
# Words that connect a sentence to the one before it, which its query does not include.
_LEAD_IN = re.compile(
    r"^(?:so|thus|therefore|hence|however|moreover|in addition|also|finally)[, ]+|^the answer is:?\s*",
    re.IGNORECASE,
)
# Fillers make no claim that could be searched for, nor do refusals, which `describe_non_answer` finds.
_EMPTY = re.compile(
    r"^(?:i(?:'m| am)? (?:sorry|cannot|can't|don't have)|sure[,!]|yes[.!]?$|no[.!]?$|there is no record)",
    re.IGNORECASE,
)
_NAME = r"(?:[A-Z][\w'’.&-]*|\d+)(?=\s|[,?.!]|$)"
_ENTITY = re.compile(
    r"\"[^\"]{2,80}\"|“[^”]{2,80}”"
    rf"|(?:\b[a-z]{{0,3}}[A-Z][\w'’.&-]*|\d{{4}})(?:\s+(?:(?:of|the|de|la|van|von|and|in|for|on|&)\s+)*{_NAME})*"
)
# What a request begins with; its capital letter makes no name of it.
_ASKS = re.compile(
    r"^(?:please )?(?:tell|give|list|name|explain|describe|show|find|compare|define|summari[sz]e)\b(?: me\b)?"
    r"(?=\W+\w)",  # unless nothing follows
    re.IGNORECASE,
)
_QUESTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """who what when where which why how whose whom is are was were did does do has have had can could
        in on at the a an name of for from to by with and or if i""",
    )
)


def split_sentences(text: str) -> list[str]:
    """Return the parts of a text, split at the ends of sentences and lines, at semicolons, and after 60 words."""
    return [sentence for part in re.split(r";\s+", text) for sentence in segments(part, _ABBREVIATION)]


def subject(question: str) -> str:
    """Return the subject of a question: its longest name, or else its words without question words.

    Names are quoted titles, years, and runs of capitalised words.
    """
    longest = ""
    question = _ASKS.sub("", question)
    for match in _ENTITY.finditer(question):
        words = match.group().strip('"“”').rstrip("?.,!").split()
        named = dropwhile(lambda word: word.lower() in _QUESTION_WORDS, words)
        name = " ".join(named).removesuffix("'s").removesuffix("’s")
        if len(name) > max(len(longest), 1):
            longest = name
    if longest:
        return longest
    others = [word for word in re.findall(r"[\w'’-]+", question) if word.lower() not in _QUESTION_WORDS]
    return " ".join(others) or question.strip()


def sentence_claims(question: str, draft: Draft | None) -> list[Claim]:
    """Return the sentences of a draft as claims; empty without a draft.

    A pronoun at the beginning of a sentence is replaced by the subject of the question, and the subject is
    added to queries that lack it. Refusals, introductory words such as "However,", and a truncated last
    sentence (unless it is the only one) are left out.
    """
    text = "" if draft is None else _MARKS.sub("", _CODE_BLOCK.sub("", draft.text))
    sentences = split_sentences(text)
    if draft is not None and not draft.finished and len(sentences) > 1 and sentences[-1][-1] not in ".!?":
        sentences.pop()
    topic = subject(question)
    topic_words = set(re.findall(r"\w{3,}", topic.lower()))
    literal = topic.replace("\\", r"\\")  # in a replacement, a backslash would start a group reference
    claims = []
    for sentence in sentences:
        # Twice, because "So, however, …" has two lead-ins.
        text = _LEAD_IN.sub("", _LEAD_IN.sub("", sentence)).strip()
        if not text.strip(" .") or _EMPTY.search(text) or describe_non_answer(text):
            continue
        text = _PRONOUN.sub(literal, text)
        text = _POSSESSIVE.sub(f"{literal}'s", text)
        query = text.rstrip(".")
        if not topic_words & set(re.findall(r"\w+", query.lower())):
            query = f"{topic} {query}"
        claims.append(Claim(text=text, query=query))
    return claims
