"""The four papers, held to their tables: one command each, on recorded answers of larger LLMs.

    python benchmarks/papers.py slimplm --data FOLDER --index FOLDER    when and what to retrieve, by a small model
    python benchmarks/papers.py ik --data FOLDER                        what a few tokens of the answer are worth
    python benchmarks/papers.py adapt --data FOLDER                     an LLM that asks for context
    python benchmarks/papers.py kbm --data FOLDER                       knowledge boundaries from sampled answers
    python benchmarks/papers.py self --data FOLDER                      an LLM that judges itself
    python benchmarks/papers.py claims                                  what became of all claims

Prints every table, and every claim of a paper that can be tested, with 95 % intervals by bootstrap over questions.
``--markdown docs/papers`` writes them into their places of the pages, ``--show`` prints what earlier runs found.
Several papers may be named at once, and some of their tables (``--only``). Hidden states, judgments of gates and the
result of each part are kept as they are made (``--cache``, ``--out``), so that a run that was stopped goes on from
there; ``--fresh`` does all anew. ``--limit 50`` takes 50 questions of each data set. The folder is that of `heads`.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import papers_adapt
import papers_ik
import papers_kbm
import papers_self
import papers_slimplm
from heads import OUT as STATES
from paper_data import OUT, Options
from paper_tables import Claim, PaperTable, claims_table, insert
from rich.console import Console
from rich.table import Table

from rgate_integrations.runtime.files import write_atomically

CONSOLE = Console(width=200, highlight=False)
PIPELINES = {
    "slimplm": papers_slimplm,
    "ik": papers_ik,
    "adapt": papers_adapt,
    "kbm": papers_kbm,
    "self": papers_self,
}
PAGES = {
    "slimplm": "slimplm.md",
    "ik": "ik.md",
    "adapt": "adapt_llm.md",
    "kbm": "kbm.md",
    "self": "itself.md",
    "claims": "index.md",
}
Found = tuple[list[PaperTable], list[Claim]]


def found_by(name: str, options: Options, *, fresh: bool = False, only: list[str] | None = None) -> Found:
    """Run the parts of a pipeline that are not kept yet; return what all found.

    Args:
        name: The pipeline.
        options: How it runs.
        fresh: Whether to run them anew.
        only: The parts to run; None for all.
    """
    for part, run in PIPELINES[name].PARTS.items():
        path = part_file(options.out, name, part)
        if only is not None and part not in only:
            continue
        if not fresh and path.is_file() and json.loads(path.read_text())["limit"] == options.limit:
            continue
        print(f"{name}: {part}", flush=True)
        table, claims = run(options)
        kept = {"limit": options.limit, "table": asdict(table), "claims": [asdict(each) for each in claims]}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return kept_of(name, options.out)


def part_file(out: Path, name: str, part: str) -> Path:
    """Return where the result of a part is kept."""
    return out / name / f"{part}.json"


def kept_of(name: str, out: Path) -> Found:
    """Return what the parts of a pipeline found that have been run."""
    tables: list[PaperTable] = []
    claims: list[Claim] = []
    for part in PIPELINES[name].PARTS:
        path = part_file(out, name, part)
        if path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            tables.append(PaperTable(**kept["table"]))
            claims += [Claim(**each) for each in kept["claims"]]
    claims += PIPELINES[name].UNTESTABLE
    return [*tables, claims_table(claims)], claims


def all_claims(out: Path) -> Found:
    """Return the claims of all papers."""
    claims = [claim for name in PIPELINES for claim in kept_of(name, out)[1]]
    return [claims_table(claims, papers=True)], claims


def show(tables: list[PaperTable]) -> None:
    """Print tables."""
    for each in tables:
        table = Table(title=each.caption, title_justify="left", box=None)
        for number, column in enumerate(each.columns):
            table.add_column(column, justify="right" if number and each.name != "claims" else "left")
        for row in each.rows:
            table.add_row(*row)
        CONSOLE.print(table, "")


def main(given: list[str] | None = None) -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=[*PIPELINES, "claims"])
    parser.add_argument("--data", type=Path, help="the folder with the question sets")
    parser.add_argument("--index", type=Path, help="index of the corpus, made if it is not there (slimplm)")
    parser.add_argument("--cache", type=Path, default=STATES, help="where hidden states are kept")
    parser.add_argument("--out", type=Path, default=OUT, help="where judgments and results are kept")
    parser.add_argument("--limit", type=int, help="questions a data set")
    parser.add_argument("--only", nargs="+", metavar="TABLE", help="run these parts alone")
    parser.add_argument("--show", action="store_true", help="print what earlier runs found")
    parser.add_argument(
        "--fresh", action="store_true", help="run all parts anew; states and judgments are kept"
    )
    parser.add_argument("--markdown", type=Path, help="write the tables into the pages of this folder")
    arguments = parser.parse_args(given)
    if arguments.data is None and not arguments.show and arguments.what != ["claims"]:
        parser.error("--data is needed")
    options = Options(arguments.data, arguments.cache, arguments.out, arguments.index, arguments.limit)
    for what in arguments.what:
        if what == "claims":
            found = all_claims(arguments.out)
        elif arguments.show:
            found = kept_of(what, arguments.out)
        else:
            found = found_by(what, options, fresh=arguments.fresh, only=arguments.only)
        show(found[0])
        if arguments.markdown is not None:
            insert(arguments.markdown / PAGES[what], found[0])


if __name__ == "__main__":
    main()
