"""Claims of a draft, the rewriters that find them, and the two tag formats that the authors of SlimPLM published.

A rewriter splits the draft of an answer into claims, each with a search query (SlimPLM, section 3.3).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from itertools import dropwhile
from typing import Literal, TypeAlias

from pydantic import Field

from rgate_integrations.decision import Decision, Draft, Frozen, Text
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.replies import describe_non_answer
from rgate_integrations.runtime.segments import FOREIGN_ABBREVIATIONS, segments
from rgate_integrations.runtime.text import normalise


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


# The Markdown of LLMs' answers: code, headings, headers of tables, and the marks of lists, quotations and emphasis.
_CODE_BLOCK = re.compile(r"^ *(```|~~~).*?(?:^ *\1|\Z)", re.DOTALL | re.MULTILINE)
_SEPARATOR = r"[ \t|:-]*-[ \t|:-]*$"
_MARKS = re.compile(
    rf"^[^|\n]*\|.*\n(?={_SEPARATOR})|^[ \t|:-]+$"
    r"|^[ \t]*(?:#+ .*|(?:(?:[-*+•>]|\d{1,3}[.)])[ \t]+)+)|\*\*|`",
    re.MULTILINE,
)
_ROW = re.compile(r"^[ \t]*\|.*", re.MULTILINE)
_CAPITALS = "".join(filter(str.isupper, map(chr, range(0x2000))))  # all but those of rare scripts
_ABBREVIATION = re.compile(
    rf"(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|etc|No|Prof|Gen|Col|Lt|Capt|Sgt|[{_CAPITALS}]|\w(?:\.\w)+"
    rf"|[dpsuz]|os|ok|prof|{FOREIGN_ABBREVIATIONS})\.$"
)
_PRONOUN = re.compile(
    r"^(?:(?P<person>he|she|they|(?P<possessor>his|her|their))|it|this|that|these|those|(?P<owner>its))\b"
    r"(?!\s+(?:is why|means))",
    re.IGNORECASE,
)
_GENDERS = {"he": "male", "his": "male", "she": "female", "her": "female"}
# Words that connect a sentence to the one before it, which its query does not include, and hedges.
_LEAD_IN = re.compile(
    r"^(?:so|thus|therefore|hence|however|moreover|in addition|also|finally|as far as i know)[, ]+"
    r"|^the answer is:?\s*"
    r"|^i(?:'m|’m| am) not (?:\w+ )?(?:sure|certain)[^.]{0,40}\bbut\b[, ]*"
    r"|^i (?:think|believe|guess)(?: that)?[, ]+",
    re.IGNORECASE,
)
# Fillers make no claim that could be searched for; nor do questions, what announces a list, and refusals, most of
# which `describe_non_answer` finds.
_EMPTY = re.compile(
    r"^(?:i(?:['’]m| am)? (?:sorry|cannot|can['’]t|don['’]t have)|as an ai|sure[,!]|yes[.!]?$|no[.!]?$"
    r"|there is no record|(?:please )?let me know|feel free|i? ?hope (?:this|that)|(?:great|good) question)"
    r"|[?？؟:：]$",
    re.IGNORECASE,
)
_NAME = rf"(?:[{_CAPITALS}][\w'’.&-]*|\d+)(?=\s|[,?.!]|$)"
_RUN = (
    rf"(?:\b[a-z]{{0,3}}[{_CAPITALS}][\w'’.&-]*|\b\d{{4}})"
    rf"(?:\s+(?:(?:of|the|de|la|van|von|and|in|for|on|&)\s+)*{_NAME})*"
)
_ENTITY = re.compile(
    r"\"[^\"]{2,80}\"|(?<!\w)'[^']{2,80}'(?!\w)|“[^”]{2,80}”|„[^“”]{2,80}[“”]|«[^»]{2,80}»|《[^》]{2,80}》"
    rf"|{_RUN}"
)
# "the capital of Mali", of which "Mali" is not the subject.
_DESCRIBED = re.compile(
    r"(?:what|who)(?:'s|’s| is| was| are| were) (the [^,;?]+?)(?=[,;?]| and |$)", re.IGNORECASE
)
# Whoever did something to what the question names is someone else.
_WHO = re.compile(rf"(?i:who)\b(?!(?:'s|’s| is| was| are| were) (?:the |[{_CAPITALS}]))")
_AGENT = re.compile(rf"\bby (?!\d)({_RUN})")
# What a request begins with; its capital letter makes no name of it.
_ASKS = re.compile(
    r"^(?:(?:please )?(?:tell|give|list|name|explain|describe|show|find|compare|define|summari[sz]e)\b(?: me\b)?"
    r"|\w+ Sie\b(?: (?:mir|uns|bitte|vielleicht|zufällig|sagen|erklären)\b)*,?)"  # "Könnten Sie mir sagen, …"
    r"(?=\W+\w)",  # unless nothing follows
    re.IGNORECASE,
)
_REFERRING = frozenset(
    re.findall(
        r"\w+",
        """he she it they him her them his its their this that these those er sie ihn ihm ihr sein seine ihre
        il elle ils elles lui son sa él ella su sus ele ela seu sua lei suo он она оно они его её их hij zij""",
    )
)
_FUNCTION_WORDS = _REFERRING | frozenset(
    re.findall(
        r"\w+",
        """who what when where which why how whose whom is are was were did does do has have had can could
        in on at the a an name of for from to by with and or if about but you your me my i we us our explain there
        after before during since while then because as although both all some most many""",
    )
)
_FOREIGN_QUESTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """ist wer wo wann welche welcher welches welchen wie wem wen wessen warum woher wieviel wieviele
        qui que quoi où quand quel quelle quels quelles comment combien pourquoi
        quién quiénes qué dónde cuándo cuál cuáles cómo cuánto cuánta cuántos cuántas
        quem onde quando qual quais como quanto quantos quantas chi che dove quale quali quanti quante
        wat waar wanneer welke hoe hoeveel kto co gdzie kiedy jaki jaka jakie który która które ile
        vem vad vilken vilket hvem hvad hvor hvilken kuka mikä missä milloin nerede
        кто что где когда какой какая какое какие сколько как чей""",
    )
)
_GERMAN_ARTICLES = ("der", "die", "das")  # before nouns, which have capitals
_LEADING_WORDS = _FUNCTION_WORDS | _FOREIGN_QUESTION_WORDS
_PUNCTUATION = string.punctuation + "¿¡«»“”„‘’…？！。،؟।《》"


def split_sentences(text: str) -> list[str]:
    """Return the parts of a text, split at the ends of sentences and lines, at semicolons, and after 60 words."""
    return [sentence for part in re.split(r";\s+", text) for sentence in segments(part, _ABBREVIATION)]


def subject(question: str) -> str:
    """Return the subject of a question; empty if it names none, such as "And when was he born?".

    It is what "Who is the …?" describes, or else the longest name, or else the words without question words. Names
    are quoted titles and runs of capitalised words; of several lines, the last that has one decides.
    """
    for line in reversed(question.splitlines()):
        described = _DESCRIBED.match(line)
        names = _list_names(line)
        if described and names:
            return described.group(1)
        if names:
            return max(names, key=len)
    return " ".join(_content_words(question))


def _list_names(question: str) -> list[str]:
    """Return the names in a question, in order."""
    question = _ASKS.sub("", question)
    is_foreign = not _FOREIGN_QUESTION_WORDS.isdisjoint(_words(question))
    names = []
    for match in _ENTITY.finditer(question):
        words = match.group().strip("\"'“”„«»《》").rstrip("?.,!’").split()
        first = words[:1] if match.start() == 0 else []
        is_quoted = not match.group()[0].isalnum()
        if not is_quoted:
            words = list(dropwhile(lambda word: word.lower() in _LEADING_WORDS, words))
        name = " ".join(words).removesuffix("'s").removesuffix("’s")
        # A single capitalised word may be no name: at the beginning, or where all nouns have a capital.
        is_doubtful = len(words) == 1 and (is_foreign or words == first) and not is_quoted
        if len(name) > 1 and not name.isdigit() and not is_doubtful:
            names.append(name)
    return names


def _content_words(question: str) -> list[str]:
    """Return the words of a question without names that say what it is about; none if they refer back."""
    words = [word.strip(_PUNCTUATION) for word in _ASKS.sub("", question).split()]
    if not _REFERRING.isdisjoint(part for word in words for part in word.lower().split("-")):
        return []
    return [word for word in words if word and word.lower() not in _LEADING_WORDS]


def _words(text: str) -> set[str]:
    """Return the words of a text in lower case, without punctuation and genitive endings."""
    return {word.strip("¿¡") for word in normalise(re.sub("['’]s\\b", "", text)).split()}


def _leading_name(sentence: str, names: set[str]) -> str:
    """Return the name that is a sentence's subject: one word of ``names``, or at least two words; else ""."""
    match = _ENTITY.match(sentence)
    if match is None or not sentence[match.end() :].lstrip()[:1].islower():
        return ""
    name = match.group()
    words = name.split()
    capitalised = [word for word in words if word[0].isupper() and word.lower() not in _GERMAN_ARTICLES]
    is_name = len(capitalised) > 1 and (words[0] == "The" or words[0].lower() not in _LEADING_WORDS)
    return name if is_name or not names.isdisjoint(_words(name)) else ""


def _clean(text: str) -> str:
    """Return a text without marks of Markdown; the cells of a table's row are separated by commas."""
    text = _MARKS.sub("", _CODE_BLOCK.sub("", unicodedata.normalize("NFC", text)))
    return _ROW.sub(lambda row: ", ".join(filter(None, map(str.strip, row.group().split("|")))), text)


class _Referents:
    """What pronouns refer to: at first the subject of the question, then what the draft's sentences are about.

    Attributes:
        topic: What is added to queries without a name: a name of the question, or its words.
        names: The words of the question's names; with one of them, a query stands alone.
    """

    def __init__(self, question: str) -> None:
        self.topic = subject(question)
        self._listed = _list_names(question)
        capitalised = [word for word in self.topic.split() if word[:1].isupper()]
        self.names = _words(" ".join(self._listed or capitalised or [self.topic])) - _FUNCTION_WORDS
        self._required = 1 if self._listed else len(self.names) // 2 + 1
        # "What did they call Oulu?": they are not Oulu.
        self._others = _words(question[: question.find(self.topic)]) & _REFERRING
        self._thing = self.topic
        self._person = "" if _WHO.match(question) else self.topic
        self._genders: dict[str, str] = {}

    def resolve(self, sentence: str) -> str:
        """Return a sentence with a pronoun at its beginning replaced if possible; "" if it cannot stand alone."""
        pronoun = _PRONOUN.match(sentence)
        if pronoun is None or not self.topic:
            first = sentence.partition(" ")[0].lower()
            return sentence if self.topic or first not in _REFERRING else ""
        referent = self._person if pronoun["person"] else self._thing
        is_someone = not pronoun["person"] and referent in self._genders
        if not referent or is_someone or pronoun.group().lower() in self._others:
            return sentence
        if pronoun["person"]:
            gender = _GENDERS.get(pronoun["person"].lower(), "")
            if self._genders.setdefault(referent, gender) != gender:  # someone else
                return ""
        possessive = "'s" if pronoun["possessor"] or pronoun["owner"] else ""
        return f"{referent}{possessive}{sentence[pronoun.end() :]}"

    def is_named_in(self, sentence: str) -> bool:
        """Return whether a sentence has a name of the question or, without names, most of its words."""
        return len(self.names & _words(sentence)) >= self._required

    def update(self, sentence: str, leading: str) -> None:
        """Take note of what a sentence, which begins with the name ``leading``, is about."""
        if leading:
            self._thing = leading
            for name in self._listed:
                if _words(name) & _words(leading) & self.names:
                    self.topic = self._thing = name
            self._person = "" if leading.startswith("The ") else self._thing
        agent = _AGENT.search(sentence)
        if agent is not None:
            self._person = agent.group(1).rstrip(".,")


def sentence_claims(question: str, draft: Draft | None) -> list[Claim]:
    """Return the sentences of a draft as claims; empty without a draft.

    An English pronoun at the beginning of a sentence is replaced by the name it seems to refer to, and the subject of
    the question is added to queries without a name. Refusals, fillers, introductory words such as "However,", and a
    truncated last sentence (unless it is the only one) are left out, and so are pronouns without a referent.
    """
    sentences = [] if draft is None else split_sentences(_clean(draft.text))
    if draft is not None and not draft.finished and len(sentences) > 1 and sentences[-1][-1] not in ".!?":
        sentences.pop()
    referents = _Referents(unicodedata.normalize("NFC", question))
    claims = []
    for sentence in sentences:
        # Twice, because "So, however, …" has two lead-ins.
        sentence = _LEAD_IN.sub("", _LEAD_IN.sub("", sentence)).strip()
        if not sentence.strip(" .") or _EMPTY.search(sentence) or describe_non_answer(sentence):
            continue
        text = referents.resolve(sentence)
        leading = _leading_name(sentence, referents.names)
        referents.update(sentence, leading)
        stands_alone = bool(leading) or text != sentence or referents.is_named_in(text)
        # An exclamation without a name is a filler, in any language.
        if not text or (text[-1] in "!！" and not stands_alone):
            continue
        query = text.rstrip(".")
        if referents.topic and not stands_alone:
            query = f"{referents.topic} {query}"
        claims.append(Claim(text=text, query=query))
    return claims
