"""Makes paired data: asks an LLM every question without and with retrieval, resumably."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rgate_integrations.decision import Decision
from rgate_integrations.errors import DataFormatError, missing_dependency
from rgate_integrations.files import JsonlLog, read_jsonl
from rgate_integrations.index import Searches
from rgate_integrations.prompts import ANSWER
from rgate_integrations.proxy.base import Proxy
from rgate_integrations.text import is_correct
from rgate_integrations.training.labels import judge as labels_of

_CHUNK = 16
DATASETS: dict[str, dict[str, str]] = {
    "nq_open": {"question": "question", "gold": "answer", "split": "validation"},
    "akariasai/PopQA": {
        "question": "question",
        "gold": "possible_answers",
        "popularity": "s_pop",
        "id": "id",
        "split": "test",
    },
    "trivia_qa": {
        "question": "question",
        "gold": "answer.aliases",
        "id": "question_id",
        "config": "rc.nocontext",
        "split": "validation",
    },
    "hotpotqa/hotpot_qa": {
        "question": "question",
        "gold": "answer",
        "id": "id",
        "config": "fullwiki",
        "split": "validation",
    },
}
"""Columns of Hugging Face data sets: a dot reaches into a column, and gold answers may be one or several."""


def read_questions(source: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Return questions with their gold answers.

    Args:
        source: A JSONL file with ``question`` and ``gold_answers`` (or ``answer``) a line, or the name of a Hugging
            Face data set in `DATASETS`, which needs the library ``datasets`` and the network.
        limit: How many; all when None.

    Returns:
        Objects with ``id, question, gold_answers, dataset`` and, where known, ``popularity``.

    Raises:
        DataFormatError: A line lacks a key; the message names file and line.
    """
    if source in DATASETS:
        return list(from_rows(_rows(source), DATASETS[source], source, limit))
    path = Path(source)
    if not path.exists():
        raise DataFormatError(
            f"There is no file {source!r}.", hint=f"Give a JSONL file, or one of {', '.join(DATASETS)}."
        )
    found = []
    for number, record in read_jsonl(path):
        gold = record.get("gold_answers", record.get("answer")) if isinstance(record, dict) else None
        if gold is None or not isinstance(record.get("question"), str):
            raise DataFormatError(
                f"{path}, line {number}: no {'question' if gold is not None else 'gold_answers'}.",
                hint='Each line is {"question": "…", "gold_answers": ["…"]}.',
            )
        item = {
            "id": str(record.get("id") or number),
            "question": record["question"].strip(),
            "gold_answers": [str(g) for g in ([gold] if isinstance(gold, str) else gold)],
            "dataset": str(record.get("dataset") or path.name.split(".")[0]),
        }
        if record.get("popularity") is not None:
            item["popularity"] = record["popularity"]
        found.append(item)
        if limit and len(found) == limit:
            break
    return found


def from_rows(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], dataset: str, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Turn rows of a data set into questions, by the mapping of its columns.

    Raises:
        DataFormatError: A row lacks a column.
    """
    for number, row in enumerate(rows, start=1):
        if limit and number > limit:
            return
        try:
            gold = _reach(row, columns["gold"])
            if isinstance(gold, str) and gold.startswith("["):
                gold = json.loads(gold)  # PopQA keeps its lists as text
            item: dict[str, Any] = {
                "id": str(_reach(row, columns["id"]) if "id" in columns else number),
                "question": str(_reach(row, columns["question"])).strip(),
                "gold_answers": [str(g) for g in ([gold] if isinstance(gold, str) else gold)],
                "dataset": dataset,
            }
            if "popularity" in columns:
                item["popularity"] = float(_reach(row, columns["popularity"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataFormatError(
                f"Row {number} of {dataset} is not as expected: {type(error).__name__}: {error}."
            ) from error
        yield item


def _reach(row: Any, column: str) -> Any:
    for part in column.split("."):
        row = row[part]
    return row


def _rows(name: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise missing_dependency("datasets", "datasets") from error
    columns = DATASETS[name]
    return load_dataset(name, columns.get("config"), split=columns["split"])


def collect(
    questions: Sequence[Mapping[str, Any]],
    llm: Proxy,
    out: Path,
    *,
    index: Searches | None = None,
    k: int = 3,
    tokens: int = 64,
    judge: Proxy | None = None,
    report: Callable[[int], None] | None = None,
) -> Path:
    """Answer questions without and with retrieval, and append what came out, one JSON record a line.

    A run that is started again continues after the last whole line; a line that a kill left half written is
    dropped. Answers are judged by containment (`rgate_integrations.text.is_correct`), or by a model.

    Args:
        questions: What `read_questions` returned.
        llm: Answers.
        out: The file.
        index: Finds passages; None asks without retrieval only.
        k: Passages a question.
        tokens: Maximum length of an answer.
        judge: A model that judges answers against the gold ones (see `rgate_integrations.training.labels.judge`);
            what it gives no label, such as a refusal, is judged by containment.
        report: Told how many questions are done.

    Returns:
        ``out``; its keys are those of `rgate_integrations.evaluation.paired.read_paired`.
    """
    log = JsonlLog(out)
    done = {str(record["id"]) for record in log.values()}
    missing = [q for q in questions if q["id"] not in done]
    for start in range(0, len(missing), _CHUNK):
        some = missing[start : start + _CHUNK]
        log.append(_answered(some, llm, index, k, tokens, judge))
        if report is not None:
            report(len(questions) - len(missing) + start + len(some))
    return out


def _answered(
    questions: Sequence[Mapping[str, Any]],
    llm: Proxy,
    index: Searches | None,
    k: int,
    tokens: int,
    judge: Proxy | None,
) -> list[dict[str, Any]]:
    from rgate_integrations.answer import answer_all

    asked = [str(q["question"]) for q in questions]
    closed = llm.generate(ANSWER, [{"question": q} for q in asked], tokens=tokens)
    found: list[dict[str, Any]] = [
        {
            **question,
            "closed_book_answer": draft.text,
            "closed_book_text": draft.text,
            "closed_book_logprobs": [round(v, 4) for v in draft.logprobs or ()],
            "closed_book_correct": right,
            "llm": llm.name,
        }
        for question, draft, right in zip(
            questions, closed, _correct(questions, [d.text for d in closed], judge), strict=True
        )
    ]
    if index is None:
        return found
    passages = [[hit.passage for hit in hits] for hits in index.search(asked, k)]
    decisions = [Decision(question=q, retrieve=True, p_known=0.0) for q in asked]
    answers = answer_all(llm, decisions, passages, tokens=tokens)
    for record, answer, right, given in zip(
        found, answers, _correct(questions, answers, judge), passages, strict=True
    ):
        record["rag_answer"], record["rag_correct"] = answer, right
        record["passage_ids"] = [p.id for p in given]
    return found


def _correct(
    questions: Sequence[Mapping[str, Any]], answers: Sequence[str], judge: Proxy | None
) -> list[bool]:
    gold = [q["gold_answers"] for q in questions]
    right = [is_correct(a, g) for a, g in zip(answers, gold, strict=True)]
    if judge is None:
        return right
    labels = labels_of(judge, [str(q["question"]) for q in questions], gold, answers).labels
    return [r if label is None else label for r, label in zip(right, labels, strict=True)]
