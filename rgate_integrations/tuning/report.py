"""A self-contained page that shows what `evaluate` measured, with a threshold that can be moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.files import json_line, parse_json
from rgate_integrations.runtime.records import Record

_HINT = "rgate evaluate … --out FILE"
_NEEDED = ("gate", "sets", "pooled", "questions")


def read_results(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Read what ``rgate evaluate --out`` wrote.

    Raises:
        DataFormatError: A file cannot be read, or is something else; the message names it.
    """
    found = []
    for path in map(Path, paths):
        try:
            result = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataFormatError(f"The result {str(path)!r} cannot be read: {error}.") from error
        if not isinstance(result, dict) or not all(key in result for key in _NEEDED):
            raise DataFormatError(f"{str(path)!r} is no result of an evaluation.", hint=_HINT)
        found.append({**result, "questions": _questions(result["questions"], path)})
    return found


def _questions(given: Any, path: Path) -> list[dict[str, Any]]:
    """Return the questions of a result, of which each part is what it must be."""
    checked = []
    for number, fields in enumerate(given if isinstance(given, list) else [None], start=1):
        where = f"{path}, question {number}"
        record = Record(where, number, fields if isinstance(fields, dict) else {}, _HINT)
        checked.append(
            {
                "question": record.text("question"),
                "dataset": record.optional_text("dataset"),
                "draft": record.optional_text("draft"),
                "p_known": record.optional_number("p_known") or 0.0,
                "closed_book_correct": record.fields.get("closed_book_correct") is True,
                "rag_correct": record.fields.get("rag_correct") is True,
            }
        )
    return checked


def report_page(results: Sequence[Mapping[str, Any]], *, texts: bool = True) -> str:
    """Return the page: one HTML document without any reference to the network.

    Args:
        results: Results of evaluations; the page shows one at a time.
        texts: Whether questions and drafts are in it; without them the page can be shown to anybody.
    """
    shown = []
    for result in results:
        rows = []
        for number, question in enumerate(result["questions"], start=1):
            text, draft = f"question {number}", ""
            if texts:
                text, draft = question["question"], question.get("draft") or ""
            right = [int(bool(question["closed_book_correct"])), int(bool(question["rag_correct"]))]
            rows.append([question["p_known"], *right, question["dataset"], text, draft])
        notes, threshold = result.get("notes"), result.get("threshold")
        about = {
            "gate": result["gate"],
            "draft": result.get("draft", ""),
            "threshold": 0.5 if threshold is None else threshold,
            "break_even": result.get("break_even"),
            "notes": list(map(str, notes))
            if isinstance(notes, list)
            else [],  # a file may hold something else
            "questions": rows,
        }
        shown.append(about)
    # "<" would end the script element, whatever a model wrote
    data = json_line(shown).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    template = files("rgate_integrations.tuning").joinpath("report.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/[]", data)
