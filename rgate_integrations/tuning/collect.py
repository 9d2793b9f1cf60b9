"""Makes paired data: asks an LLM every question without and with retrieval, resumably."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rgate_integrations.answering.pipeline import Pipeline
from rgate_integrations.decision import Draft
from rgate_integrations.engine.loading import load_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError, missing_dependency
from rgate_integrations.index.retriever import Retriever, told_apart
from rgate_integrations.models.base import Proxy
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES
from rgate_integrations.runtime.files import JsonlLog, parsed_json
from rgate_integrations.runtime.locks import locked
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.training.labels import judge_answers
from rgate_integrations.tuning.paired import record_id

_CHUNK = 16  # questions that are lost when a run is killed
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
    for record in read_records(path, hint='Each line is {"question": "…", "gold_answers": ["…"]}.'):
        found.append(_question(record, path))
        if limit and len(found) == limit:
            break
    return found


def _question(record: Record, path: Path) -> dict[str, Any]:
    """Return a line of a JSONL file as a question."""
    key = "gold_answers" if "gold_answers" in record.fields else "answer"
    if record.fields.get(key) is None:
        raise record.wrong("no gold_answers")
    question: dict[str, Any] = {
        "id": record_id(record.fields, record.number),
        "question": record.text("question"),
        "gold_answers": list(record.texts(key)),
        "dataset": record.optional_text("dataset") or path.name.split(".")[0],
    }
    popularity = record.optional_number("popularity")
    if popularity is not None:
        question["popularity"] = popularity
    return question


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
            yield _from_row(row, columns, dataset, number)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise DataFormatError(
                f"Row {number} of {dataset} is not as expected: {type(error).__name__}: {error}."
            ) from error


def _from_row(
    row: Mapping[str, Any], columns: Mapping[str, str], dataset: str, number: int
) -> dict[str, Any]:
    gold = _reach(row, columns["gold"])
    if isinstance(gold, str) and gold.startswith("["):
        gold = parsed_json(gold)  # PopQA keeps its lists as text
    name = _reach(row, columns["id"]) if "id" in columns else number
    question: dict[str, Any] = {
        "id": str(name),
        "question": str(_reach(row, columns["question"])).strip(),
        "gold_answers": _texts(gold),
        "dataset": dataset,
    }
    if "popularity" in columns:
        question["popularity"] = float(_reach(row, columns["popularity"]))
    return question


def _reach(row: Any, column: str) -> Any:
    for part in column.split("."):
        row = row[part]
    return row


def _texts(gold: Any) -> list[str]:
    """Return gold answers, of which there may be one or several, as a list of texts."""
    if isinstance(gold, str):
        return [gold]
    return [str(answer) for answer in gold]


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
    index: Retriever | None = None,
    k: int = 3,
    tokens: int = 64,
    judge: Proxy | None = None,
    report: Callable[[int], None] | None = None,
) -> Path:
    """Answer questions without and with retrieval, and append what came out, one JSON record a line.

    A run that is started again continues after the last whole line; a line that a kill left half written is
    dropped. Each record says what it was made with, and a run that differs is refused. Answers are judged by
    containment (`rgate_integrations.runtime.text.is_correct`), or by a model.

    Args:
        questions: What `read_questions` returned.
        llm: Answers.
        out: The file.
        index: Finds passages; None asks without retrieval only.
        k: Passages a question.
        tokens: Maximum length of an answer.
        judge: A model that judges answers against the gold ones
            (see `rgate_integrations.training.labels.judge_answers`); what it gives no label, such as a refusal, is
            judged by containment.
        report: Told how many questions are done.

    Returns:
        ``out``; its keys are those of `rgate_integrations.tuning.paired.read_paired`.

    Raises:
        ConfigurationError: The file has answers that were made otherwise, such as by another LLM.
        LockedError: Another process is writing to the file.
        WriteError: The file could not be written, such as on a full disk; what is in it stays.
    """
    # No gate has a say here: both arms are wanted, the one with passages as a plain RAG application has it.
    pipeline = Pipeline(load_gate("constant:always"), index, llm, k=k, tokens=tokens, claims=False)
    with locked(out):
        log = JsonlLog(out)
        there = [_collected(record, out) for record in log.values()]
        done = {str(record["id"]) for record in there}
        missing = [question for question in questions if question["id"] not in done]
        if not missing:
            return out
        made_with = _made_with(llm, index, k, tokens, judge)
        for record in there:
            _check_made_alike(record, made_with, out)
        count = len(questions) - len(missing)
        for start in range(0, len(missing), _CHUNK):
            some = missing[start : start + _CHUNK]
            log.append(record | {"made_with": made_with} for record in _answered(some, pipeline, judge))
            count += len(some)
            if report is not None:
                report(count)
    return out


def _collected(record: Any, out: Path) -> dict[str, Any]:
    """Return a record of an earlier run, which must at least say to which question it is."""
    if not isinstance(record, dict) or "id" not in record:
        raise DataFormatError(
            f"{str(out)!r} holds something else than collected answers.", hint="Write to another file."
        )
    return record


def _made_with(
    llm: Proxy, index: Retriever | None, k: int, tokens: int, judge: Proxy | None
) -> dict[str, str | int]:
    """Return what decides the answers and how they are judged, as a record keeps it."""
    facts: dict[str, str | int] = {
        "llm": llm.name,
        "weights": llm.fingerprint,
        "prompt": ANSWER.hash,
        "tokens": tokens,
        "judge": "" if judge is None else judge.name,
    }
    if index is not None:
        facts |= {"index": told_apart(index), "k": k, "prompt_with_passages": ANSWER_WITH_PASSAGES.hash}
    return facts


def _check_made_alike(record: Mapping[str, Any], made_with: Mapping[str, str | int], out: Path) -> None:
    """Refuse to go on with a file whose answers were made otherwise."""
    theirs = record.get("made_with")
    if not isinstance(theirs, dict):  # of an earlier version, which kept the name of the LLM alone
        theirs = {**made_with, "llm": record.get("llm", made_with["llm"])}
    for name in dict.fromkeys([*made_with, *theirs]):
        if theirs.get(name) != made_with.get(name):
            raise ConfigurationError(
                f"{str(out)!r} has answers with {name}={theirs.get(name)!r}; now it is {made_with.get(name)!r}.",
                hint="Write to another file, or go on as it was begun: mixed answers would train a wrong gate.",
            )


def _answered(
    questions: Sequence[Mapping[str, Any]], pipeline: Pipeline, judge: Proxy | None
) -> list[dict[str, Any]]:
    """Return questions with both answers and whether they are right."""
    arms = pipeline.both_arms([str(question["question"]) for question in questions])
    closed = [each.closed_book or Draft(text="") for each in arms]
    closed_correct = _correct(questions, [draft.text for draft in closed], judge)
    found: list[dict[str, Any]] = []
    for question, draft, right in zip(questions, closed, closed_correct, strict=True):
        record = {
            **question,
            "closed_book_answer": draft.text,
            "closed_book_text": draft.text,
            "closed_book_logprobs": [round(logprob, 4) for logprob in draft.logprobs or ()],
            "closed_book_correct": right,
            "llm": pipeline.llm.name,
        }
        found.append(record)
    if pipeline.index is None:
        return found
    opened = [each.with_passages or Draft(text="") for each in arms]
    opened_correct = _correct(questions, [draft.text for draft in opened], judge)
    for record, draft, right, each in zip(found, opened, opened_correct, arms, strict=True):
        record["rag_answer"] = draft.text
        record["rag_correct"] = right
        record["passage_ids"] = [hit.passage.id for hit in each.hits]
    return found


def _correct(
    questions: Sequence[Mapping[str, Any]], answers: Sequence[str], judge: Proxy | None
) -> list[bool]:
    """Judge answers, by a model where there is one and it has a judgment."""
    gold = [question["gold_answers"] for question in questions]
    correct = [is_correct(answer, expected) for answer, expected in zip(answers, gold, strict=True)]
    if judge is None:
        return correct
    asked = [str(question["question"]) for question in questions]
    for position, label in enumerate(judge_answers(judge, asked, gold, answers).labels):
        if label is not None:
            correct[position] = label
    return correct
