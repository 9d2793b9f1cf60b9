"""Collects answers: sends every question to every arm, several concurrently, and saves each answer immediately.

The file is JSONL, used by `collect`, `tune`, `measure_ability` and `rgate train`. A line records the settings
of arms, an answer, or a failure. An interrupted run resumes: it repeats failed calls, but not answered ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

from rgate_integrations.decision import Draft
from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    NoAnswerError,
    RGateError,
    ServerError,
    no_answer,
)
from rgate_integrations.models.download import cache_dir
from rgate_integrations.models.remote import RemoteModel
from rgate_integrations.runtime.files import expand, find_folder, json_line, locked
from rgate_integrations.runtime.jsonl import JsonlLog
from rgate_integrations.runtime.records import Record, first_problem
from rgate_integrations.tuning.arms import SAMPLE, Arm, ModelArm
from rgate_integrations.tuning.questions import Question

Progress: TypeAlias = Callable[[str, int, int], None]
"""Progress callback: ``(label, done, total)``."""

ArmName: TypeAlias = str
"""``"direct"``, ``"retrieve"``, ``"sample 1"``, ``"sample 2"``, … for more answers without retrieval, and
``"judge NAME of ARM"`` for a judge's verdicts."""

STOP_AFTER = 10
"""Consecutive failures of one kind of arm (see `arm_kind`) after which the run stops: the LLM must be down."""

_T = TypeVar("_T")
_CHUNK = 64
_Job: TypeAlias = tuple[int, ArmName, list[Question]]
_Outcome: TypeAlias = tuple[Draft | Exception, float]


def no_progress(label: str, done: int, total: int) -> None:
    """Do nothing; the default progress callback."""


def in_chunks(items: Sequence[_T], label: str, progress: Progress) -> Iterator[Sequence[_T]]:
    """Yield items in chunks of 64, and report after each chunk how many of them were processed."""
    for start in range(0, len(items), _CHUNK):
        yield items[start : start + _CHUNK]
        progress(label, min(start + _CHUNK, len(items)), len(items))


@dataclass(frozen=True)
class Answered:
    """A question with its answers.

    Attributes:
        question: The question.
        answers: The answers, by arm; samples that failed are missing.
        seconds: Seconds per answer, by arm.
    """

    question: Question
    answers: Mapping[ArmName, Draft]
    seconds: Mapping[ArmName, float]

    @property
    def direct(self) -> Draft:
        """The answer without retrieval."""
        return self.answers["direct"]

    @property
    def retrieve(self) -> Draft:
        """The answer with retrieval."""
        return self.answers["retrieve"]


class Answers:
    """The answers of several arms (ways to answer: without retrieval, with retrieval, …), stored in a file.

    Args:
        path: The file; answers already in it are kept.
        arms: The arms, by name.

    Raises:
        ConfigurationError: An arm's answers in the file were made with other settings.
        DataFormatError: The file holds something other than answers.
        WriteError: The file cannot be written.
    """

    def __init__(self, path: Path, arms: Mapping[ArmName, Arm]) -> None:
        self.arms: dict[ArmName, Arm] = {}
        self._log = JsonlLog(path)
        self._made_with: dict[ArmName, Any] = {}
        self._questions: dict[str, Question] = {}
        self._answers: dict[tuple[ArmName, str], tuple[Draft, float]] = {}
        self._failed: set[tuple[ArmName, str]] = set()
        for number, line in enumerate(self._log.values(), start=1):
            fields = line if isinstance(line, dict) else {}
            if isinstance(fields.get("made_with"), dict):
                self._made_with |= fields["made_with"]  # each run adds its new arms
            elif number == 1:
                raise DataFormatError(
                    f"{str(path)!r} contains something other than answers.",
                    hint="Move it away, or choose another output path.",
                )
            else:
                self._load(
                    Record(
                        f"{path}, line {number}", fields, "Remove the line; the next run repeats its call."
                    )
                )
        self.add(arms)

    def add(self, arms: Mapping[ArmName, Arm]) -> None:
        """Add arms, such as samples or a judge.

        Raises:
            ConfigurationError: An arm's answers in the file were made with other settings.
            WriteError: The file cannot be written.
        """
        for name, arm in arms.items():
            earlier, facts = self._made_with.get(name), dict(arm.facts)
            if earlier == facts:
                continue
            if earlier is not None and any(answered_by == name for answered_by, _ in self._answers):
                raise ConfigurationError(
                    f"The answers of arm {name!r} in {str(self._log.path)!r} were made with {earlier}, but the "
                    f"arm's settings are now {facts}.",
                    hint="Use the earlier settings, or another output path: answers must not be mixed.",
                )
            self._made_with[name] = facts
            self._log.append([{"made_with": {name: facts}}])
        self.arms |= arms

    def complete(self) -> list[Answered]:
        """Return the questions that both the direct and the retrieve arm have answered, those of this run first.

        If only one of these two arms was added, the questions that it has answered are returned. Samples may be
        missing.
        """
        complete = []
        needed = {"direct", "retrieve"} & self.arms.keys()
        for key, question in self._questions.items():
            drafts, seconds = {}, {}
            for arm in self.arms:
                if arm_kind(arm) in ("direct", "retrieve", SAMPLE) and (arm, key) in self._answers:
                    drafts[arm], seconds[arm] = self._answers[arm, key]
            if needed <= drafts.keys():
                complete.append(Answered(question, drafts, seconds))
        return complete

    def get(self, question: Question, arm: ArmName) -> Draft | None:
        """Return an arm's answer, or None if it has not answered yet."""
        return self._answers.get((arm, question.key), (None, 0.0))[0]

    def missing(self, questions: Sequence[Question], arm: ArmName) -> list[Question]:
        """Return the questions that an arm has not answered; those on which it failed before come last."""
        missing = [question for question in questions if self.get(question, arm) is None]
        # A question that breaks the server would otherwise stop every run at its first call.
        return sorted(missing, key=lambda question: (arm, question.key) in self._failed)

    def count_missing(self, questions: Sequence[Question]) -> Counter[str]:
        """Return the number of missing answers, by kind of arm, such as ``"direct"``; see `arm_kind`."""
        missing: Counter[str] = Counter()
        for arm in self.arms:
            missing[arm_kind(arm)] += len(self.missing(questions, arm))
        return missing

    def ask(
        self,
        questions: Sequence[Question],
        *,
        arms: Sequence[ArmName] | None = None,
        concurrency: int = 4,
        label: str = "asking the LLM",
        progress: Progress = no_progress,
    ) -> int:
        """Make the calls whose answers are missing, and return how many failed.

        A failed call is recorded, and the others continue. An answer cut off during thinking counts as failed.

        Args:
            questions: The questions.
            arms: Names of the arms; all when None.
            concurrency: Maximum concurrent calls.
            label: Label for the progress callback.
            progress: Progress callback.

        Raises:
            ServerError: Ten calls of one kind failed in a row. Or the first call or all calls failed, and not only
                calls that an earlier run had made.
            NoAnswerError: The calls that stopped the run, or all direct answers, were cut off.
            WriteError: An answer could not be written, for example because the disk is full.
        """
        if arms is None:
            # Results must not depend on which answer arrived first.
            earlier, self._questions = self._questions, {}
            for question in (*questions, *earlier.values()):
                self._remember(question)
            arms = list(self.arms)
        jobs = self._plan_jobs(questions, arms)
        total = sum(len(batch) for *_, batch in jobs)
        failed_before = frozenset(self._failed)  # the LLM may always refuse them
        failures = new_failures = 0
        in_a_row: Counter[str] = Counter()
        for done, (arm, question, outcome, seconds) in enumerate(self._run_jobs(jobs, concurrency), start=1):
            line = _as_line(arm, question, outcome, seconds)
            # First, so that an answer that was paid for survives if the process is killed.
            self._log.append([line])
            self._load(Record(str(self._log.path), line))
            progress(label, done, total)
            kind = arm_kind(arm)
            if not isinstance(outcome, Exception):
                in_a_row[kind] = 0
                continue
            failures += 1
            new_failures += (arm, question.key) not in failed_before
            in_a_row[kind] += 1
            all_failed = failures == total or (done == 1 and isinstance(outcome, ServerError))
            if in_a_row[kind] == STOP_AFTER or (all_failed and new_failures):
                raise self._give_up(failures, outcome)
        if "direct" in arms:
            self._check_finished(self.arms["direct"])
        return failures

    def _give_up(self, failures: int, last: Exception) -> RGateError:
        """Return the error that stops a run after failed calls. Its hint begins with that of the last error."""
        kind = NoAnswerError if isinstance(last, NoAnswerError) else ServerError
        kept = f"The answers so far are kept in {str(self._log.path)!r}. Fix the cause, then try again."
        return kind(
            f"Giving up. Number of failed calls: {failures}. The last error: {type(last).__name__}: "
            f"{getattr(last, 'message', last)}",
            hint=f"{getattr(last, 'hint', '')} {kept}".strip(),
        )

    def _check_finished(self, direct: Arm) -> None:
        """Raise `NoAnswerError` if a server cut off every direct answer, of at least three.

        Such answers may contain nothing but thinking.
        """
        finished = [draft.finished for (name, _), (draft, _) in self._answers.items() if name == "direct"]
        is_served = isinstance(direct, ModelArm) and isinstance(direct.llm, RemoteModel)
        if is_served and len(finished) > 2 and not any(finished):  # one or two may be chance
            raise NoAnswerError(
                f"All {len(finished)} answers were cut off at the token limit: the LLM thinks first, or its answers "
                "are too long.",
                hint="Turn thinking off (--think off), or allow longer answers (--answer-tokens of rgate tune and "
                "rgate collect). Choose another --out, because this one keeps the answers that were cut off.",
            )

    def _plan_jobs(self, questions: Sequence[Question], arms: Sequence[ArmName]) -> list[_Job]:
        """Return the calls to make; the calls of one question are close together."""
        jobs: list[_Job] = []
        for name in arms:
            missing, batch = self.missing(questions, name), self.arms[name].batch
            starts = range(0, len(missing), batch)
            jobs += [(start, name, missing[start : start + batch]) for start in starts]
        # Sorting by start puts the batches of all arms for the same questions together.
        return sorted(jobs, key=lambda job: job[0])

    def _run_jobs(
        self, jobs: Sequence[_Job], concurrency: int
    ) -> Iterator[tuple[ArmName, Question, Draft | Exception, float]]:
        """Yield the outcome of each call as it ends; at most ``concurrency`` calls run at once."""
        waiting = deque(jobs)
        running: dict[Future[list[_Outcome]], _Job] = {}
        # The first call runs alone, because one call is enough to show that a server does not work.
        at_once = 1
        # Leaving the pool waits for running calls, whose threads must not outlive this generator.
        with ThreadPoolExecutor(concurrency, thread_name_prefix="rgate-collect") as pool:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.popleft()
                    running[pool.submit(self._answer, *job[1:])] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    _, arm, batch = running.pop(future)
                    for question, (outcome, seconds) in zip(batch, future.result(), strict=True):
                        yield arm, question, outcome, seconds
                at_once = concurrency

    def _answer(self, arm: ArmName, batch: Sequence[Question]) -> list[_Outcome]:
        """Return the answer or the error, and the seconds, for each question of a batch.

        After an error, the questions are asked one at a time, so that only those that cause it fail.
        """
        start = perf_counter()
        try:
            drafts = self.arms[arm].answer(batch)
        except Exception as error:  # an application's object may raise anything
            if len(batch) == 1:
                return [(error, 0.0)]
            return [self._answer(arm, [question])[0] for question in batch]
        seconds = (perf_counter() - start) / len(batch)
        cut_off = no_answer("nothing", thinking=True)
        return [(cut_off if draft.is_cut_off else draft, seconds) for draft in drafts]

    def _remember(self, question: Question) -> None:
        """Store a question; replace one that is already stored if only the new one has gold answers."""
        earlier = self._questions.get(question.key)
        if earlier is None or (question.gold and not earlier.gold):
            self._questions[question.key] = question

    def _load(self, record: Record) -> None:
        """Store the answer or failure that a line of the file records."""
        question, arm = Question.from_record(record), record.text("arm")
        self._remember(question)
        if "error" in record.fields:
            self._failed.add((arm, question.key))
            return
        try:
            draft = Draft.model_validate(record.fields.get("draft"))
        except ValueError as error:
            raise record.error(f"draft is not a valid answer ({first_problem(error)})") from error
        self._answers[arm, question.key] = (draft, record.optional_number("seconds") or 0.0)


def answers_file(out: str | Path) -> Path:
    """Return the path of the file of answers for ``out``, a file or folder: ``NAME.answers.jsonl`` next to it."""
    path = expand(out)
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.answers.jsonl")


def check_continuable(out: Path) -> None:
    """Check that an output that exists, a file or folder, has its file of answers: without it, they would be lost.

    Raises:
        DataFormatError: The file of answers is missing.
    """
    path = answers_file(out)
    if find_folder(out).exists() and not path.exists():
        raise DataFormatError(
            f"{str(out)!r} cannot be continued, because its file of answers, {str(path)!r}, is missing.",
            hint="Restore that file, or choose another output path.",
        )


def arm_kind(arm: ArmName) -> str:
    """Return the kind of an arm: the first word of its name, such as ``"sample"``."""
    return arm.partition(" ")[0]


def cached_answers(
    what: str, arms: Mapping[ArmName, Arm], questions: Sequence[Question], progress: Progress = no_progress
) -> list[Mapping[ArmName, Draft]]:
    """Return a local model's answers, which are cached, so that a restarted run does not repeat them.

    Args:
        what: Name of the kind of answer, such as ``"drafts"``.
        arms: The arms, by name. Arms with other settings use another cache file.
        questions: The questions.
        progress: Progress callback: ``(label, done, total)``.

    Returns:
        One mapping per question: its answers, by arm.

    Raises:
        ServerError: A question could not be answered; the other answers stay in the cache.
        NoAnswerError: The model was cut off while it was still thinking.
    """
    made_with = json_line({name: dict(arm.facts) for name, arm in arms.items()})
    # The name is a hash of the facts, so each model, prompt and seed has its own file.
    path = cache_dir() / what / f"{hashlib.sha256(made_with.encode()).hexdigest()[:16]}.jsonl"
    waiting = partial(progress, f"waiting for another run that writes the same {what}", 0, len(questions))
    # Two runs on the same questions share the file: the second waits for the lock, then reads the answers.
    with locked(path, waiting=waiting):
        answers = Answers(path, arms)
        failed = answers.ask(questions, concurrency=1, label=f"writing {what}", progress=progress)
    if failed:
        raise ServerError(
            f"The model could not write all {what}: {failed} calls failed.",
            hint=f"See the errors in {str(path)!r}, then run the training again.",
        )
    by_key = {answered.question.key: answered.answers for answered in answers.complete()}
    return [by_key[question.key] for question in questions]


def _as_line(arm: ArmName, question: Question, outcome: Draft | Exception, seconds: float) -> dict[str, Any]:
    """Return the line of the file that records a call's outcome, as JSON values."""
    line = {
        "arm": arm,
        "question": question.text,
        "gold_answers": [*question.gold],
        "id": question.id,
        "dataset": question.dataset,
        "popularity": question.popularity,
    }
    if isinstance(outcome, Exception):
        return line | {"error": f"{type(outcome).__name__}: {outcome}"}
    # The id of a response is only valid in this process.
    draft = outcome.model_dump(mode="json", exclude_defaults=True, exclude={"response_id"})
    return line | {"draft": {"text": outcome.text, **draft}, "seconds": round(seconds, 4)}
