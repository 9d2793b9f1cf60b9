"""``rgate index``: build an index of your own passages, and search it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from rgate_integrations.cli.options import AsJson
from rgate_integrations.cli.output import Bar, Terminal, hit_as_json, print_json
from rgate_integrations.errors import DataFormatError

app = typer.Typer(help="Build and search an index of passages.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def build(
    corpus: Annotated[Path, typer.Option(help='JSONL, one {"id", "title", "text"} a line; may be gzipped.')],
    out: Annotated[Path, typer.Option(help="Folder for the index.")],
    embedder: Annotated[str, typer.Option(help="Catalogue name, folder or Hub id.")] = "all-minilm-l6-v2",
) -> None:
    """Embed the passages of a corpus and save the index; one that is there is kept until the new one is whole."""
    from rgate_integrations.index import PassageIndex, read_passages
    from rgate_integrations.index.embedder import SentenceEmbedder

    total = sum(1 for _ in read_passages(corpus))
    if not total:
        raise DataFormatError(f"The corpus {str(corpus)!r} holds no passages.")
    columns = (TextColumn("embedding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, what="embedding", total=total, transient=False) as bar:
        index = PassageIndex.build(read_passages(corpus), SentenceEmbedder(embedder), report=bar.count)
    index.save(out)
    Terminal(stderr=True).print(f"{len(index):,} passages in {out}", soft_wrap=True)


@app.command()
def search(
    folder: Annotated[Path, typer.Argument(help="Folder of the index.")],
    queries: Annotated[list[str], typer.Argument(help="What to search for.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Passages a query.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Print the passages nearest to each query."""
    from rgate_integrations.index import PassageIndex

    index = PassageIndex.load(folder)
    console = Terminal()
    for query, hits in zip(queries, index.search(queries, k), strict=True):
        if as_json:
            print_json({"query": query, "passages": list(map(hit_as_json, hits))})
            continue
        console.print(query, style="bold", markup=False)
        for hit in hits:
            title = f"{hit.passage.title}: " if hit.passage.title else ""
            console.print(f"  {hit.score:.2f}  {title}{hit.passage.text[:160]}", markup=False, soft_wrap=True)
