"""What to retrieve for a question: the claims of its draft, a search query for each, and the filter.

A rewriter (by sentence, or a model's) makes claims of question and draft, a gate drops those that the LLM knows, and
what is left is the plan of queries: SlimPLM, section 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain, dropwhile, islice
from typing import Literal, TypeAlias

from pydantic import Field

from rgate_integrations.decision import Decision, Draft, Frozen, Text
from rgate_integrations.engine.gate_like import GateLike, decide
from rgate_integrations.models.base import Proxy
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.flow import Call, Flow, run
from rgate_integrations.runtime.text import normalise


class Claim(Frozen):
    """One self-contained statement of a draft, or one sub-question of the question.

    Attributes:
        text: The statement or sub-question, on one line.
        query: The search query for it, on one line; None when the rewriter gave none.
        needs_search: What the rewriter said about searching for it; None when it said nothing.
        kind: ``"claim"`` of the draft or sub-``"question"`` of the question.
    """

    text: Text = Field(min_length=1)
    query: Text | None = None
    needs_search: bool | None = None
    kind: Literal["claim", "question"] = "claim"


class Query(Frozen):
    """A search query.

    Attributes:
        text: What to search for.
        claim: The claim or sub-question it is for; None for the question itself.
    """

    text: Text
    claim: Text | None = None


class JudgedClaim(Frozen):
    """A claim and what became of it.

    Attributes:
        claim: The claim.
        kept: Whether its query is searched.
        reason: Why, in one sentence.
        p_known: The gate's probability for (claim, query), if it was asked.
    """

    claim: Claim
    kept: bool
    reason: Text
    p_known: float | None = None


class QueryPlan(Frozen):
    """What to search for a question; empty when the question is known.

    Attributes:
        question: The question.
        queries: The queries, in order of importance: the question first, if it is included.
        claims: Every claim of the draft with its fate.
    """

    question: Text
    queries: tuple[Query, ...] = ()
    claims: tuple[JudgedClaim, ...] = ()

    @property
    def texts(self) -> list[str]:
        """The texts of the queries, in their order."""
        return [query.text for query in self.queries]


Rewriter: TypeAlias = Callable[[Sequence[str], Sequence[Draft | None]], list[list[Claim]]]
"""Turns questions and drafts into claims, one list a question, which may be empty; one call serves a batch."""


# --- the plan -----------------------------------------------------------------------------------------------


def plan_queries(
    decisions: Sequence[Decision],
    *,
    gate: GateLike | None = None,
    rewriter: Rewriter | None = None,
    always_include_question: bool = True,
    max_queries: int = 6,
) -> list[QueryPlan]:
    """Turn decisions into queries: the question and, where there is a draft, its claims.

    SlimPLM, section 3.3. With ``gate``, the claims are filtered: it judges each with its query in the place of the
    question and the claim in the place of the draft, and known claims are not searched. All claims of all questions
    are judged in one call. The paper searches claim queries only, its published code adds the question: that is the
    default.

    Args:
        decisions: Decisions of a gate; those that do not retrieve get an empty plan.
        gate: Judges claims; None keeps them all.
        rewriter: Makes the claims; by default sentence by sentence, without a model.
        always_include_question: Whether the question itself is always a query. Even when False it is one if
            nothing else is left: a question that needs retrieval is never left without a query.
        max_queries: Maximum number of queries a question, at least 1.

    Returns:
        One plan a decision, in order.
    """
    return run(
        planning(
            decisions,
            gate=gate,
            rewriter=rewriter,
            always_include_question=always_include_question,
            max_queries=max_queries,
        )
    )


def planning(
    decisions: Sequence[Decision],
    *,
    gate: GateLike | None = None,
    rewriter: Rewriter | None = None,
    always_include_question: bool = True,
    max_queries: int = 6,
) -> Flow[list[QueryPlan]]:
    """Plan as a flow, for callers on an event loop; see `plan_queries`."""
    questions = [decision.question for decision in decisions]
    drafts = [decision.draft if decision.retrieve else None for decision in decisions]
    rewritten: list[list[Claim]] = yield Call(rewriter or rewrite_by_sentence, None, questions, drafts)
    # The claims of all questions in one list: the gate judges them in one call.
    judged = iter((yield from _judge(list(chain(*rewritten)), gate)))
    plans = []
    for decision, claims in zip(decisions, rewritten, strict=True):
        own = list(islice(judged, len(claims)))
        plan = QueryPlan(question=decision.question)
        if decision.retrieve:
            plan = _plan(decision.question, own, always_include_question, max(max_queries, 1))
        plans.append(plan)
    return plans


def _judge(claims: Sequence[Claim], gate: GateLike | None) -> Flow[list[JudgedClaim]]:
    """Say of each claim whether it is searched, and why."""
    judged: list[JudgedClaim] = []
    asked: list[int] = []  # places of claims that the gate judges
    for claim in claims:
        reason = "Claims are not filtered."
        if not claim.query:
            reason = "It has no query."
        elif claim.needs_search is False:
            reason = "The rewriter says that it needs no search."
        elif claim.kind == "question":
            reason = "It is part of the question."
        elif gate is not None:
            asked.append(len(judged))
        kept = bool(claim.query) and claim.needs_search is not False
        judged.append(JudgedClaim(claim=claim, kept=kept, reason=reason))
    if gate is None or not asked:
        return judged
    # The claim takes the place of the draft, and its query that of the question.
    queries = [str(claims[place].query) for place in asked]
    drafts = [Draft(text=claims[place].text, source="recorded") for place in asked]
    decisions = yield from decide(gate, queries, drafts=drafts)
    for place, decision in zip(asked, decisions, strict=True):
        judged[place] = JudgedClaim(
            claim=claims[place],
            kept=decision.retrieve,
            reason=f"Judged {'unknown' if decision.retrieve else 'known'}: {decision.reason}",
            p_known=None if decision.error is not None else decision.p_known,
        )
    return judged


def _plan(
    question: str, claims: Sequence[JudgedClaim], include_question: bool, max_queries: int
) -> QueryPlan:
    """Take the queries of the claims that are kept, without near duplicates, up to the maximum."""
    queries = [Query(text=question)] if include_question else []
    judged = []
    for claim in claims:
        text = claim.claim.query
        if claim.kept and text is not None:
            problem = ""
            if any(_alike(query.text, text) for query in queries):
                problem = "Much the same is searched already."
            elif len(queries) >= max_queries:
                problem = f"There are {max_queries} queries already."
            if problem:
                claim = claim.model_copy(update={"kept": False, "reason": problem})
            else:
                queries.append(Query(text=text, claim=claim.claim.text))
        judged.append(claim)
    if not queries:  # a question that needs retrieval is never left without a query
        queries.append(Query(text=question))
    return QueryPlan(question=question, queries=tuple(queries), claims=tuple(judged))


def _alike(first: str, second: str) -> bool:
    """Whether two queries have at least four fifths of their words in common."""
    words, others = set(normalise(first).split()), set(normalise(second).split())
    return first == second or len(words & others) >= 0.8 * len(words | others) > 0


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
"""The paper's prompt, section 3.3: what a trained rewriter sees."""

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


def rewrite_by_sentence(questions: Sequence[str], drafts: Sequence[Draft | None]) -> list[list[Claim]]:
    """Make sentences of the drafts self-contained; deterministic, needs no model. The default."""
    return list(map(sentence_claims, questions, drafts))


class ModelRewriter:
    """SlimPLM's query rewriter (section 3.3): a model writes claims and queries in one round.

    Output that holds no readable claim falls back to `rewrite_by_sentence` for that question. A question without a
    draft has no claims, and the model is not asked.

    Args:
        proxy: The model. Prompting needs one of 1B or more; smaller ones want an adapter.
        adapter: LoRA adapter of a trained rewriter (then the paper's own prompt is used), or None to prompt
            with examples.
        tokens: Maximum length of the output.
    """

    def __init__(self, proxy: Proxy, *, adapter: str | None = None, tokens: int = 256) -> None:
        self.proxy = proxy
        self.adapter = adapter
        self.tokens = tokens
        self.prompt = REWRITE if adapter else REWRITE_FEW_SHOT

    def __call__(self, questions: Sequence[str], drafts: Sequence[Draft | None]) -> list[list[Claim]]:
        """Rewrite with the model, falling back sentence by sentence where it failed."""
        found: list[list[Claim]] = [[] for _ in questions]
        drafted = [(place, draft) for place, draft in enumerate(drafts) if draft is not None]
        if not drafted:
            return found
        values = []
        for place, draft in drafted:
            # What is quoted must plant no claims.
            values.append({"question": without_tags(questions[place]), "draft": without_tags(draft.text)})
        outputs = self.proxy.generate(self.prompt, values, tokens=self.tokens, adapter=self.adapter)
        for (place, draft), output in zip(drafted, outputs, strict=True):
            written = [claim for claim in parse_claims(output.text) if claim.query]
            found[place] = written or sentence_claims(questions[place], draft)
        return found


_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9])|;\s+|\n+")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|etc|No|Prof|Gen|Col|Lt|Capt|Sgt|[A-Z])\.$")
_PRONOUN = re.compile(r"^(?:he|she|it|they|this|that|these|those)\b(?!\s+(?:is why|means))", re.IGNORECASE)
_POSSESSIVE = re.compile(r"^(?:his|her|its|their)\b", re.IGNORECASE)
_LEAD_IN = re.compile(
    r"^(?:so|thus|therefore|hence|however|moreover|in addition|also|finally)[, ]+|^the answer is:?\s*",
    re.IGNORECASE,
)
_EMPTY = re.compile(
    r"^(?:i(?:'m| am)? (?:sorry|not sure|unable|do not know|don't know|cannot|can't)|as an ai|sure[,!]"
    r"|yes[.!]?$|no[.!]?$|there is no (?:information|record)|i don't have)",
    re.IGNORECASE,
)
_NAME = r"(?:[A-Z][\w'’.&-]*|\d+)(?=\s|[,?.!]|$)"
_ENTITY = re.compile(
    r"\"[^\"]{2,80}\"|“[^”]{2,80}”"
    rf"|(?:[A-Z][\w'’.&-]*|\d{{4}})(?:\s+(?:(?:of|the|de|la|van|von|and|in|for|on|&)\s+)*{_NAME})*"
)
_QUESTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """who what when where which why how whose whom is are was were did does do has have had can could
        in on at the a an name of for from to by with and or if i""",
    )
)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences; abbreviations and initials do not end one."""
    sentences: list[list[str]] = []  # each of one part or more
    goes_on = False
    for part in map(str.strip, _SENTENCE.split(text)):
        if goes_on:
            sentences[-1].append(part)
        elif part:
            sentences.append([part])
        goes_on = bool(sentences) and _ABBREVIATION.search(sentences[-1][-1]) is not None
    return [" ".join(parts) for parts in sentences]


def subject(question: str) -> str:
    """Return what a question is about: its longest name, or else its words without the question words.

    Names are quoted titles and runs of capitalised words.
    """
    longest = ""
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
    """Return the claims of a draft; without a draft there are none.

    A sentence that begins with a pronoun gets the subject of the question in its place; a claim that does not
    mention the subject has it added to its query. Refusals and phrases without content are left out, and so
    is a last sentence that the token limit cut off, unless it is the only one.
    """
    sentences = split_sentences(draft.text) if draft is not None else []
    if draft is not None and not draft.finished and len(sentences) > 1 and sentences[-1][-1] not in ".!?":
        sentences.pop()
    topic = subject(question)
    topic_words = set(re.findall(r"\w{3,}", topic.lower()))
    literal = topic.replace("\\", r"\\")  # in a replacement a backslash begins a reference to a group
    claims = []
    for sentence in sentences:
        # Twice: "So, however, …" has two lead-ins.
        text = _LEAD_IN.sub("", _LEAD_IN.sub("", sentence)).strip()
        if not text.strip(" .") or _EMPTY.search(text):
            continue
        text = _PRONOUN.sub(literal, text)
        text = _POSSESSIVE.sub(f"{literal}'s", text)
        query = text.rstrip(".")
        if not topic_words & set(re.findall(r"\w+", query.lower())):
            query = f"{topic} {query}"
        claims.append(Claim(text=text, query=query))
    return claims


# --- tagged claims ------------------------------------------------------------------------------------------

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
    """Read tagged claims out of a model's output, in either published form or a mixture.

    Never raises: text without tags has no claims, and a block that cannot be read costs that block only.
    Every text and query returned stands in ``text``, up to white space.

    Example:
        >>> parse_claims("<Claim> Paris is in France. <Query> Paris country")[0].query
        'Paris country'
    """
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
    """Return the first text with a tag in a block, on one line; None where it is missing or empty."""
    match = tagged.search(block)
    if match is None:
        return None
    return " ".join((match.group(1) or match.group(2)).split()) or None


def print_claims(claims: Sequence[Claim]) -> str:
    """Print claims as the annotated data have them, for training; `parse_claims` reads them back."""
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
    """Take the tags' opening marks out of a text, so that quoting it in a prompt cannot plant claims."""
    # With all that stands before the name: what is left of a mark inside a mark could be one again.
    return _MARK.sub(lambda mark: " " if mark["name"] else mark.group(), text)
