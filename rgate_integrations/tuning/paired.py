"""Paired data: for each question the LLM's answers without and with retrieval, and which of them are right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgate_integrations.decision import Draft
from rgate_integrations.errors import DataFormatError
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.models.base import Proxy
from rgate_integrations.runtime.files import json_line, locked, write_atomically
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.runtime.text import Correctness, is_correct
from rgate_integrations.tuning.arms import Arm, ModelArm
from rgate_integrations.tuning.collection import Answered, Answers, ArmName
from rgate_integrations.tuning.labelling import Verdicts, ask_judge
from rgate_integrations.tuning.questions import Questions, read_questions

_COLUMNS = {"direct": "closed_book", "retrieve": "rag"}


@dataclass(frozen=True)
class Paired:
    """One question with both arms.

    Attributes:
        id: Id of the question; its line number when the file has none.
        question: The question.
        dataset: Which set it is from.
        closed_book_correct: Whether the answer without retrieval is right.
        rag_correct: Whether the answer with retrieval is right; None when there is none.
        closed_book_text: What the LLM wrote without retrieval; empty when it was not recorded.
        closed_book_logprobs: Its token log-probabilities, or None.
        popularity: Popularity of the question's entity, or None.
    """

    id: str
    question: str
    dataset: str
    closed_book_correct: bool
    rag_correct: bool | None
    closed_book_text: str = ""
    closed_book_logprobs: tuple[float, ...] | None = None
    popularity: float | None = None

    def draft(self) -> Draft | None:
        """Return what the LLM wrote without retrieval as a recorded draft, or None."""
        if not self.closed_book_text:
            return None
        return Draft(text=self.closed_book_text, logprobs=self.closed_book_logprobs, source="recorded")


@dataclass(frozen=True)
class PairedFile:
    """A file of paired data.

    Attributes:
        name: Name of the file, without folders.
        sha256: Its checksum.
        records: Its questions.
    """

    name: str
    sha256: str
    records: tuple[Paired, ...]


def collect(
    questions: Questions,
    llm: Proxy,
    out: str | Path,
    *,
    index: Retriever | None = None,
    k: int = 3,
    tokens: int = 64,
    judge: Proxy | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Path:
    """Ask an LLM questions without and with retrieval, and write paired data, one JSON record a line.

    Answers are kept as they come, in `answers_file`; run again, it goes on, and no call that was answered is made
    again. ``out`` is written at the end, whole, with all questions that were answered so far.

    Args:
        questions: What `rgate_integrations.tuning.questions.read_questions` reads; each with gold answers.
        llm: Answers.
        out: The file.
        index: Finds passages; None asks without retrieval only.
        k: Passages a question.
        tokens: Maximum length of an answer.
        judge: A model that judges answers against the gold ones; what it does not tell, and everything without a
            judge, is judged by containment (`rgate_integrations.runtime.text.is_correct`).
        report: Told how many calls are done, and how many there are.

    Returns:
        ``out``; `read_paired` reads it.

    Raises:
        ConfigurationError: Earlier answers were made otherwise, such as by another LLM.
        DataFormatError: A question has no gold answers, or ``out`` holds something else.
        ServerError: The LLM could not be asked.
        LockedError: Another process is writing to the file.
        WriteError: A file could not be written, such as on a full disk; what was answered is kept.
    """
    out, kept = Path(out), answers_file(out)
    arms: dict[ArmName, Arm] = {"direct": ModelArm(llm, tokens=tokens)}
    if index is not None:
        arms["retrieve"] = ModelArm(llm, index, k=k, tokens=tokens)
    # The answers lie beside the file, so that one lock serves for both.
    with locked(out):
        asked = read_questions(questions, gold=True)
        if out.exists() and not kept.exists():
            raise DataFormatError(
                f"{str(out)!r} holds something else than what is collected now.", hint="Name another file."
            )
        answers = Answers(kept, arms)
        answers.ask(asked, report=report)
        verdicts = {} if judge is None else ask_judge(answers, judge)
        lines = [json_line(_record(each, llm.name, verdicts)) for each in answers.whole()]
        write_atomically(out, "".join(lines))
    return out


def answers_file(out: str | Path) -> Path:
    """Return where the answers for a file of paired data, or for a folder, are kept: beside it."""
    path = Path(out)
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.answers.jsonl")


def _record(answered: Answered, llm: str, verdicts: Verdicts) -> dict[str, Any]:
    """Return a question with its answers and whether they are right, as `read_paired` reads it."""
    question = answered.question
    record: dict[str, Any] = {
        "id": question.id or question.key,
        "question": question.text,
        "gold_answers": [*question.gold],
        "llm": llm,
    }
    if question.dataset:
        record["dataset"] = question.dataset
    if question.popularity is not None:
        record["popularity"] = question.popularity
    for arm, column in _COLUMNS.items():
        if arm in answered.answers:
            text, said = answered.answers[arm].text, verdicts.get((arm, question.key))
            record[f"{column}_answer"] = text
            record[f"{column}_correct"] = is_correct(text, question.gold) if said is None else said
    record["closed_book_text"] = answered.direct.text
    record["closed_book_logprobs"] = answered.direct.logprobs
    return record


def read_paired(
    paths: Sequence[str | Path], *, correctness: Correctness = "contained", rag: bool = True
) -> list[PairedFile]:
    """Read paired data, one JSON record a line.

    A record needs ``question`` and, for each arm, ``*_correct`` or the answer (``closed_book_answer``,
    ``rag_answer``) with ``gold_answers``. Optional: ``id``, ``dataset``, ``closed_book_text``,
    ``closed_book_logprobs``, ``popularity``.

    Args:
        paths: JSONL files, also gzipped.
        correctness: How answers are judged where the file does not say, by ``*_correct``, whether they are right;
            see `rgate_integrations.runtime.text.Correctness`.
        rag: Whether the arm with retrieval is needed.

    Raises:
        DataFormatError: A file cannot be read or is empty, or a record lacks what is needed, or an id occurs
            twice in a file; the message names file and line.
    """
    files = []
    for path in map(Path, paths):
        found: dict[str, Paired] = {}
        for record in read_records(path, hint='Each line is {"question": "…", …}.'):
            item = _paired(record, path.name.split(".")[0], correctness, rag)
            if item.id in found and found[item.id] != item:
                raise record.wrong(f"the id {item.id!r} occurs twice with different contents")
            found[item.id] = item
        if not found:
            raise DataFormatError(f"{path} holds no questions.")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(PairedFile(path.name, digest, tuple(found.values())))
    return files


def _paired(record: Record, dataset: str, correctness: Correctness, rag: bool) -> Paired:
    question = record.text("question")
    correct: dict[str, bool | None] = {}
    for column in _COLUMNS.values():
        correct[column] = _correct(record, column, correctness)
        if correct[column] is None and (rag or column == "closed_book"):
            raise DataFormatError(
                f"{record.where}: no {column}_correct.", hint=f"Give it, or {column}_answer and gold_answers."
            )
    text = record.optional_text("closed_book_text") or record.optional_text("closed_book_answer")
    return Paired(
        id=record.optional_text("id") or str(record.number),
        question=question,
        dataset=record.optional_text("dataset") or dataset,
        closed_book_correct=bool(correct["closed_book"]),
        rag_correct=correct["rag"],
        closed_book_text=text,
        closed_book_logprobs=record.logprobs("closed_book_logprobs"),
        popularity=record.optional_number("popularity"),
    )


def _correct(record: Record, arm: str, correctness: Correctness) -> bool | None:
    """Return what a record says of an arm's answer, or what its gold answers say; None if neither does."""
    given = record.fields.get(f"{arm}_correct")
    if given is not None and not isinstance(given, bool):
        raise record.wrong(f"{arm}_correct is {repr(given)[:40]}, not true or false")
    answer, gold = record.fields.get(f"{arm}_answer"), record.texts("gold_answers")
    if given is not None or not isinstance(answer, str) or not gold:
        return given
    return is_correct(answer, gold, correctness)
