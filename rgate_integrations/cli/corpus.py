"""``rgate index`` and ``rgate profile``: make and search an index of passages, and make the profile of a corpus."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rgate_integrations.cli.terminal import NOT_WRITTEN, load_object, progress_bar, say, shorten
from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    IndexMismatchError,
    IndexNotFoundError,
)

if TYPE_CHECKING:
    from rgate_integrations.index import PassageIndex

DEMO_CORPUS = "encyclopedia-leads"
_SHOWN_TERMS = 10

index = typer.Typer(
    help="Build and search an index of passages.", no_args_is_help=True, rich_markup_mode=None
)


@index.command()
def build(
    corpus: Annotated[
        Path, typer.Option(help='JSONL, one {"id", "title", "text"} per line; may be gzipped.')
    ],
    out: Annotated[Path, typer.Option(help="Folder for the index.")],
    embedder: Annotated[
        str, typer.Option(help="Embedding model: name (rgate download), folder or Hub id.")
    ] = "multilingual-e5-small",
) -> None:
    """Embed the passages of a corpus and save the index; an earlier one is replaced once the new one is complete."""
    from rgate_integrations.index import PassageIndex, read_passages
    from rgate_integrations.index.embedder import SentenceEmbedder
    from rgate_integrations.index.passage_index import FILE
    from rgate_integrations.runtime.files import check_output, check_replaceable, expand

    check_replaceable(expand(out), (FILE,))
    check_output(
        out / FILE
    )  # only the file is replaced: the folder may be the current one, or a mounted volume
    passages = list(read_passages(corpus))  # once, because a pipe cannot be read again
    if not passages:
        raise DataFormatError(
            f"The corpus {str(corpus)!r} has no passages.",
            hint='Add one per line: {"id": "1", "title": "…", "text": "…"}.',
        )
    with progress_bar("embedding", stopped=NOT_WRITTEN) as report:
        passage_index = PassageIndex.build(
            passages,
            SentenceEmbedder(embedder),
            report=partial(report, "embedding", total=len(passages)),
        )
    passage_index.save(out)
    say(f"{len(passage_index):,} passages in {out}", err=True)


@index.command()
def search(
    folder: Annotated[Path, typer.Argument(help="Folder of the index.")],
    queries: Annotated[list[str], typer.Argument(help="What to search for.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Passages per query.")] = 5,
) -> None:
    """Print the passages nearest to each query."""
    for query, hits in zip(queries, open_index(folder).search(queries, k), strict=True):
        say(query, bold=True)
        for hit in hits:
            say(f"  {hit.score:.2f}  {shorten(hit.passage.searchable, 160)}")


def open_index(folder: Path | None) -> PassageIndex:
    """Load an index; without a folder, the demo's index, which is built if it is missing or outdated.

    Raises:
        IndexNotFoundError: The folder has no index.
        LockedError: Another process is building the demo's index.
        RGateError: The index is damaged; the folder's index was made with another embedder or in another format; or
            the demo's corpus cannot be downloaded.
    """
    from rgate_integrations.index import PassageIndex, read_passages
    from rgate_integrations.models.download import cache_dir, corpus_path
    from rgate_integrations.runtime.files import locked

    if folder is not None:
        return PassageIndex.load(folder)
    home = cache_dir() / f"index-{DEMO_CORPUS}"
    try:
        return PassageIndex.load(home)
    except (IndexNotFoundError, IndexMismatchError):
        # Missing, or made by an earlier version or with another embedder.
        passages = list(read_passages(corpus_path(DEMO_CORPUS)))
        label = "building the index, once"
        with locked(home), progress_bar(label, stopped=NOT_WRITTEN) as report:
            PassageIndex.build(passages, report=partial(report, label, total=len(passages))).save(home)
        return PassageIndex.load(home)


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
    """Make the profile of a corpus, from which gates estimate what it covers, and show its most telling words."""
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
    size = f"{corpus_profile.seen:,} passages"
    say(f"{corpus_profile.name}: profile of {size}, in {out}", bold=True)
    # A name may be telling.
    words = list(dict.fromkeys([*corpus_profile.terms.telling, *sorted(corpus_profile.terms.names)]))
    if words:
        say(f"telling words  {', '.join(words[:_SHOWN_TERMS])}")
    if not corpus_profile.is_specific:
        say("The corpus has no single topic, so the gate skips what the LLM knows unless prefer='corpus'.")
