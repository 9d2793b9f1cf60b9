"""Decisions of the default gate on requests in other languages, from templates that its heads did not learn from.

    python benchmarks/languages.py [--frames] [--facts FOLDER]

A fifth of each language's templates is held out, and all templates of some languages (see `text_rows`). ``--frames``
adds requests in other held-out frames: work, paragraphs, conversations, prompts of programs. ``--facts`` adds 300
questions that LLMs answered in English, each translated into one of twelve languages (`translations.jsonl`; every
line names its licence). It shows whether the gate predicts in other languages as well what an LLM knows. FOLDER has
``adaptive_llama31_8b.*.dev.jsonl``, ``retrievalqa.jsonl`` and the recorded answers of ``strong`` and ``more``.
"""

from pathlib import Path

import pandas as pd
from base import argument_parser, print_table, read_records
from heads import hash_question
from labels import read_adarague, read_recorded
from text_rows import FRAMES, GROUPS, KNOWLEDGE, TextRow
from training_text import make_training_rows

from rgate_integrations import Request, load_gate
from rgate_integrations.tuning.evaluation import auc

NAMES = {
    "ar": "Arabic",
    "ar-latn": "Arabic, romanised",
    "cs": "Czech",
    "de": "German",
    "es": "Spanish",
    "fi": "Finnish",
    "fr": "French",
    "hi": "Hindi",
    "hi-latn": "Hindi, romanised",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ja-latn": "Japanese, romanised",
    "ko": "Korean",
    "mixed": "several at once",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ru": "Russian",
    "ru-latn": "Russian, romanised",
    "sv": "Swedish",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "vi": "Vietnamese",
    "zh": "Chinese",
    "zh-latn": "Chinese, romanised",
}
LEARNED, UNLEARNED = "learned from", "never learned from"
BATCH = 64
FACT_KINDS = ["knowledge", "obscure_knowledge"]
NEEDLESS_KINDS = ["common_knowledge", "no_knowledge"]
TRANSLATIONS = Path(__file__).parent / "translations.jsonl"


def decide_all(rows: list[TextRow]) -> pd.DataFrame:
    """Return whether each request needs passages, and whether the gate retrieves for it."""
    gate = load_gate(on_error="raise")
    outcomes = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        decisions = gate.decide_batch([Request(row.text, row.history) for row in batch])
        for row, decision in zip(batch, decisions, strict=True):
            outcomes.append((row.source, row.language, row.part, row.needs_passages, decision.retrieve))
    return pd.DataFrame(outcomes, columns=["source", "language", "part", "needs", "retrieve"])


def format_shares(rows: pd.DataFrame) -> list[str]:
    """Return the cells of a row of the table."""
    needy, needless = rows.retrieve[rows.needs], rows.retrieve[~rows.needs]
    retrieved = f"{needy.mean():.1%}" if len(needy) else ""
    return [retrieved, str(len(needy)), f"{1 - needless.mean():.1%}", str(len(needless))]


def read_translated(data: Path) -> pd.DataFrame:
    """Return translations with the English question and the share of LLMs that answered it rightly alone."""
    labels = pd.DataFrame(map(vars, read_recorded(data)))
    labelled = pd.concat([pd.DataFrame(map(vars, read_adarague(data))), labels[labels.source == "simpleqa"]])
    share_known = labelled.groupby("question").known.mean().to_dict()
    for record in read_records(data / "retrievalqa.jsonl"):
        share_known.setdefault(
            record["question"].strip(), 0.0
        )  # its authors chose questions that no LLM knew
    english = {hash_question(question): question for question in share_known}
    rows = pd.DataFrame(read_records(TRANSLATIONS))
    rows["english"] = rows.of.map(english)
    return rows.assign(known=rows.english.map(share_known))


def print_facts(data: Path) -> None:
    """Print how well the gate predicts what an LLM knows, from English questions and from their translations."""
    rows = read_translated(data)
    known = (rows.known >= 0.5).to_numpy()
    gate, table = load_gate(on_error="raise"), []
    for column in ("english", "question"):
        decisions = gate.decide_batch(rows[column].tolist())
        outcomes = pd.DataFrame(
            {
                "p": [decision.p_known for decision in decisions],
                "skip": [not decision.retrieve for decision in decisions],
            }
        )
        kinds = [
            max(NEEDLESS_KINDS + FACT_KINDS, key=lambda kind: decision.signals[kind])
            for decision in decisions
        ]
        kind_shares = [
            f"{sum(kind in group for kind in kinds) / len(kinds):.1%}"
            for group in (FACT_KINDS, NEEDLESS_KINDS)
        ]
        title = {"english": "English", "question": "twelve others"}[column]
        skipped = [f"{outcomes.skip[chosen].mean():.1%}" for chosen in (known, ~known)]
        table.append(
            [title, f"{auc(outcomes.p.to_numpy(), known.astype(float)):.3f}", *skipped, *kind_shares]
        )
    columns = [
        "asked in",
        "AUC",
        "skipped of the known",
        "of the unknown",
        "taken for facts",
        "for what all know",
    ]
    print_table(columns, table)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--facts", type=Path, metavar="FOLDER", help="also measure translated questions")
    parser.add_argument("--frames", action="store_true", help="also measure requests in frames")
    arguments = parser.parse_args()
    rows = [row for row in make_training_rows() if row.part in (FRAMES, GROUPS) and row.kind != KNOWLEDGE]
    singles = decide_all([row for row in rows if row.source == "languages"])
    columns = ["passages needed: retrieved", "n", "not needed: skipped", "n"]
    table = []
    for part, title in ((FRAMES, LEARNED), (GROUPS, UNLEARNED)):
        of_part = singles[singles.part == part]
        for language, language_rows in of_part.groupby("language"):
            table.append([NAMES[str(language)], title, *format_shares(language_rows)])
        unusual = of_part.language.str.endswith("-latn") | (of_part.language == "mixed")
        table.append(["neither romanised nor mixed", title, *format_shares(of_part[~unusual])])
        table.append(["romanised or mixed", title, *format_shares(of_part[unusual])])
    print_table(["language", "its other templates were", *columns], table)
    if arguments.facts:
        print_facts(arguments.facts)
    if arguments.frames:
        framed = decide_all([row for row in rows if row.source != "languages"])
        table = [
            [str(source), *format_shares(source_rows)] for source, source_rows in framed.groupby("source")
        ]
        print_table(["frames", *columns], table)


if __name__ == "__main__":
    main()
