"""A self-contained page that shows what `evaluate` measured, with a threshold that can be moved."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rgate_integrations.errors import DataFormatError

_NEEDED = ("gate", "sets", "pooled", "questions")


def read_results(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Read what ``rgate evaluate --json`` wrote.

    Raises:
        DataFormatError: A file cannot be read, or is something else; the message names it.
    """
    found = []
    for path in map(Path, paths):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataFormatError(f"The result {str(path)!r} cannot be read: {error}.") from error
        if not isinstance(result, dict) or not all(key in result for key in _NEEDED):
            raise DataFormatError(
                f"{str(path)!r} is no result of an evaluation.", hint="rgate evaluate … --json FILE"
            )
        found.append(result)
    return found


def report_page(results: Sequence[Mapping[str, Any]], *, texts: bool = True) -> str:
    """Return the page: one HTML document without any reference to the network.

    Args:
        results: Results of evaluations; the page shows one at a time.
        texts: Whether questions and drafts are in it; without them the page can be shown to anybody.
    """
    shown = [
        {
            "gate": r["gate"],
            "draft": r.get("draft", ""),
            "threshold": r["threshold"] if r.get("threshold") is not None else 0.5,
            "break_even": r.get("break_even"),
            "questions": [
                [
                    q["p_known"],
                    int(q["closed_book_correct"]),
                    int(bool(q["rag_correct"])),
                    q["dataset"],
                    q["question"] if texts else f"question {number}",
                    (q.get("draft") or "") if texts else "",
                ]
                for number, q in enumerate(r["questions"], start=1)
            ],
        }
        for r in results
    ]
    # "<" would end the script element, whatever a model wrote
    data = json.dumps(shown, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    template = files("rgate_integrations.evaluation").joinpath("report.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/[]", data)
