"""Arguments, records, tables and intervals that the benchmarks share."""

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from rgate_integrations.runtime.jsonl import read_jsonl

OUT = Path(__file__).parent / "out"
SETS = ("nq", "trivia", "squad", "hotpotqa", "musique", "2wikimultihopqa")
"""The question sets that have recorded answers of an 8B LLM."""
CONSOLE = Console(width=200, highlight=False)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help keeps the line breaks of the description."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def checksum(questions: Iterable[str]) -> str:
    """Return the hash by which a model card identifies a set of questions."""
    return hashlib.sha256(json.dumps(sorted(questions)).encode()).hexdigest()


def read_records(path: Path) -> list[Any]:
    """Return the records of a JSONL file, which may be gzipped."""
    return [record for _, record in read_jsonl(path)]


def read_answers(data: Path, name: str) -> list[Any]:
    """Return the recorded answers of an 8B LLM to one of `SETS`."""
    return read_records(data / f"adaptive_llama31_8b.{name}.dev.jsonl")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a Markdown table, as in the docs; the first column holds names."""
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a mean; for paired differences, pass the differences."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(values[rows].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
