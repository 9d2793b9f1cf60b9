"""Counts, shows or writes the training text: labelled rows in many languages and in many frames.

    python benchmarks/training_text.py                       counts by file, part and kind, and by language
    python benchmarks/training_text.py --sample turns        30 rows of a file of templates
    python benchmarks/training_text.py --out rows.jsonl      all rows, one a line

The rows are made from ``templates/languages/``, ``templates/facts/``, ``howto.txt``, ``keywords.txt``,
``work.txt``, ``paragraphs.txt``, ``turns.txt``, ``helpers.txt`` and ``wrapped.txt``. The same seed gives the same
rows.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from base import argument_parser, print_table
from text_frames import (
    make_helper_rows,
    make_paragraph_rows,
    make_turn_rows,
    make_work_rows,
    make_wrapped_rows,
)
from text_rows import (
    KINDS,
    PARTS,
    TextRow,
    drop_duplicates,
    make_fact_rows,
    make_field_rows,
    make_language_rows,
)


def make_training_rows(seed: int = 0) -> list[TextRow]:
    """Return all rows, each text once."""

    def yield_all() -> Iterator[TextRow]:
        yield from make_language_rows(seed)
        yield from make_fact_rows(seed)
        yield from make_field_rows("howto", seed)
        yield from make_field_rows("keywords", seed)
        yield from make_work_rows(seed)
        yield from make_paragraph_rows(seed)
        yield from make_turn_rows(seed)
        yield from make_helper_rows(seed)
        yield from make_wrapped_rows(seed)

    return drop_duplicates(yield_all())


def main() -> None:
    """Count, show or write the rows."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", metavar="FILE", help="show 30 rows of a file, or of a language")
    parser.add_argument("--out", type=Path, help="write all rows to this JSONL file")
    options = parser.parse_args()
    rows = make_training_rows(options.seed)
    if options.sample:
        _show([row for row in rows if options.sample in (row.source, row.language)], options.seed)
    elif options.out:
        lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        _count(rows)


def _show(rows: list[TextRow], seed: int) -> None:
    for row in random.Random(seed).sample(rows, min(30, len(rows))):
        print(f"--- {row.kind} ({row.frame}, {row.part})")
        for turn in row.history:
            print(f"    {turn}")
        print(row.text)


def _count(rows: list[TextRow]) -> None:
    for title, get_name in (("file", lambda row: row.source), ("language", lambda row: row.language)):
        table = []
        for name in sorted({get_name(row) for row in rows}):
            matching = [row for row in rows if get_name(row) == name]
            kinds, parts = Counter(row.kind for row in matching), Counter(row.part for row in matching)
            frames = len({row.frame for row in matching})
            counts = [*(parts[part] for part in PARTS), *(kinds[kind] for kind in KINDS)]
            table.append([name, str(frames), str(len(matching)), *map(str, counts)])
        print_table((title, "frames", "rows", *PARTS, *KINDS), table)


if __name__ == "__main__":
    main()
