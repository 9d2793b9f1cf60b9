"""``rgate profile``: what a corpus is about, for gates that decide by it; and what they would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rgate_integrations.cli.terminal import AsJson, load_object, print_json, say
from rgate_integrations.errors import ConfigurationError

if TYPE_CHECKING:
    from rgate_integrations.corpus import CorpusProfile

_TERMS, _QUESTIONS = 10, 5
_ABOUT_TERMS = ("What is {}?", "How does {} work?")
_ABOUT_OTHER_THINGS = (
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
        Path | None, typer.Option(help='JSONL of its passages, one {"title", "text"} a line; may be gzipped.')
    ] = None,
    index: Annotated[Path | None, typer.Option(help="Or the folder of an index.")] = None,
    retriever: Annotated[
        str, typer.Option(help="Or an object that searches, as module:object; it is asked --searches times.")
    ] = "",
    description: Annotated[str, typer.Option(help="Or what it is about, in a sentence: weaker.")] = "",
    name: Annotated[str, typer.Option(help="Name of the corpus; by default that of the folder.")] = "",
    searches: Annotated[int, typer.Option(min=1, help="Searches at most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Make the profile of a corpus, by which gates tell what it covers, and say what was understood."""
    from rgate_integrations.corpus import CorpusProfile
    from rgate_integrations.index import PassageIndex, read_passages

    if sum(map(bool, (corpus, index, retriever, description))) != 1:
        raise ConfigurationError(
            "Give one thing to make the profile of.", hint="--corpus, --index, --retriever or --description"
        )
    name = name or out.resolve().name
    if corpus is not None:
        made = CorpusProfile.from_texts((each.searchable for each in read_passages(corpus)), name)
    elif index is not None:
        made = CorpusProfile.from_texts((each.searchable for each in PassageIndex.load(index)), name)
    elif retriever:
        say(f"Searching at most {searches} times.", err=True)
        made = CorpusProfile.from_retriever(load_object(retriever), name, searches)
    else:
        made = CorpusProfile.from_description(description, name)
    made.save(out)
    _show(made, out, as_json=as_json)


def _show(made: CorpusProfile, out: Path, *, as_json: bool) -> None:
    """Print the telling words, and questions that are about the corpus and that are not."""
    words = [*made.terms.telling, *sorted(made.terms.names)]
    asked = [form.format(word) for word in words[: 2 * _TERMS] for form in _ABOUT_TERMS]
    questions = [*asked, *_ABOUT_OTHER_THINGS]
    covered = dict(zip(questions, made.judge(questions).tolist(), strict=True))
    ranked = sorted(covered, key=covered.__getitem__)
    there = [each for each in reversed(ranked) if covered[each] >= 0.5][:_QUESTIONS]
    elsewhere = [each for each in ranked if covered[each] < 0.5][:_QUESTIONS]
    if as_json:
        print_json(
            {
                "name": made.name,
                "folder": str(out),
                "seen": made.seen,
                "is_specific": made.is_specific,
                "terms": words[:_TERMS],
                "covered": {each: round(covered[each], 3) for each in there},
                "not_covered": {each: round(covered[each], 3) for each in elsewhere},
            }
        )
        return
    say(f"{made.name}: {len(made.codes):,} of {made.seen:,} passages, in {out}", bold=True)
    say(f"telling words  {', '.join(words[:_TERMS])}")
    if not made.is_specific:
        say("Nothing sets it apart: what the LLM knows is not searched for. prefer='corpus' changes that.")
    for title, some in (("searched there", there), ("not there", elsewhere)):
        for question in some:
            say(f"{title:14} {covered[question]:.2f}  {question}")
            title = ""
