"""``rgate profile``: makes the profile of a corpus, and shows its telling words and P(covered) of questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rgate_integrations.cli.terminal import load_object, say
from rgate_integrations.errors import ConfigurationError

if TYPE_CHECKING:
    from rgate_integrations.corpus import CorpusProfile

_TERMS, _QUESTIONS = 10, 5
_QUESTIONS_ABOUT_TERMS = ("What is {}?", "How does {} work?")
_OTHER_QUESTIONS = (
    "Who won the election?",
    "What is the capital of France?",
    "How do I boil an egg?",
    "What will the weather be like tomorrow?",
    "Which film got the award for best picture?",
    "How tall is the highest mountain?",
    "When does the next train leave?",
    "What is 17 times 23?",
    "Which team plays tonight?",
    "Who painted the Mona Lisa?",
)


def profile(
    out: Annotated[Path, typer.Option(help="Folder for the profile.")],
    corpus: Annotated[
        Path | None,
        typer.Option(help='JSONL of its passages, one {"title", "text"} per line; may be gzipped.'),
    ] = None,
    index: Annotated[Path | None, typer.Option(help="Or the folder of an index.")] = None,
    retriever: Annotated[
        str, typer.Option(help="Or MODULE:OBJECT, an object that searches, called up to --searches times.")
    ] = "",
    description: Annotated[
        str, typer.Option(help="Or a description of the corpus in a sentence, which gives a weaker profile.")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the corpus; by default the folder's name.")] = "",
    searches: Annotated[int, typer.Option(min=1, help="Maximum number of searches.")] = 100,
) -> None:
    """Make the profile of a corpus, from which gates estimate what it covers, and show a summary.

    The summary has the corpus's most telling words, and P(covered) of made-up questions.
    """
    from rgate_integrations.corpus import CorpusProfile
    from rgate_integrations.corpus.profile import CONFIG
    from rgate_integrations.index import PassageIndex, read_passages
    from rgate_integrations.runtime.files import check_output

    if sum(map(bool, (corpus, index, retriever, description))) != 1:
        raise ConfigurationError(
            "A profile needs exactly one source.",
            hint="Use one of --corpus, --index, --retriever and --description.",
        )
    check_output(out, corpus, index, files=(CONFIG,))
    name = name or out.resolve().name
    if corpus is not None:
        corpus_profile = CorpusProfile.from_texts(
            (passage.searchable for passage in read_passages(corpus)), name
        )
    elif index is not None:
        corpus_profile = CorpusProfile.from_texts(
            (passage.searchable for passage in PassageIndex.load(index)), name
        )
    elif retriever:
        say(f"Searching at most {searches} times.", err=True)
        corpus_profile = CorpusProfile.from_retriever(load_object(retriever), name, searches)
    else:
        corpus_profile = CorpusProfile.from_description(description, name)
    corpus_profile.save(out)
    _show(corpus_profile, out)


def _show(profile: CorpusProfile, out: Path) -> None:
    """Print the most telling words, and examples of questions that the corpus covers and does not cover."""
    words = list(
        dict.fromkeys([*profile.terms.telling, *sorted(profile.terms.names)])
    )  # a name may be telling
    questions = [form.format(word) for word in words[: 2 * _TERMS] for form in _QUESTIONS_ABOUT_TERMS]
    questions += _OTHER_QUESTIONS
    # Questions about the terms, and about other things, show where the boundary is.
    covered = dict(zip(questions, profile.judge(questions).tolist(), strict=True))
    ranked = sorted(covered, key=covered.__getitem__)
    inside = [question for question in reversed(ranked) if covered[question] >= 0.5]
    outside = [question for question in ranked if covered[question] < 0.5]
    say(
        f"{profile.name}: profile of {len(profile.codes):,} of {profile.seen:,} passages, in {out}", bold=True
    )
    say(f"telling words  {', '.join(words[:_TERMS])}")
    if not profile.is_specific:
        say("The corpus has no single topic, so the gate skips what the LLM knows unless prefer='corpus'.")
    for title, examples in (("covered", inside), ("not covered", outside)):
        for question in examples[:_QUESTIONS]:
            say(f"{title:14} {covered[question]:.2f}  {question}")
            title = ""
