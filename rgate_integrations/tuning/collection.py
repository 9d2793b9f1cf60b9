"""Collects answers: asks every arm every question, several at a time, and keeps each answer at once.

One file of answers serves `collect`, `tune`, `measure_ability` and the trainings. A line is an answer, or a failure,
which is asked again next time. So a run that was killed goes on, and no call that was answered is made again.
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
from typing import Any, TypeAlias

from rgate_integrations.decision import Draft
from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    NoAnswerError,
    ServerError,
    no_answer,
)
from rgate_integrations.models.download import cache_dir
from rgate_integrations.models.served import ServedProxy
from rgate_integrations.runtime.files import JsonlLog, json_line, locked
from rgate_integrations.runtime.records import Record
from rgate_integrations.tuning.arms import SAMPLE, Arm, ModelArm
from rgate_integrations.tuning.questions import Question

Progress: TypeAlias = Callable[[str, int, int], None]
"""Progress callback: ``(label, done, total)``."""

ArmName: TypeAlias = str
"""``"direct"``, ``"retrieve"``, and ``"sample 1"``, ``"sample 2"``, … for further answers without retrieval."""

STOP_AFTER = 10
"""Failures in a row, of one kind of arm, after which asking stops."""

STOP_IF_CUT_OFF = 3
"""Answers that are cut off before they begin, of one kind of arm that has given none, after which asking stops."""

_Job: TypeAlias = tuple[int, ArmName, list[Question]]
_Outcome: TypeAlias = tuple[Draft | Exception, float]


def no_progress(label: str, done: int, total: int) -> None:
    """Report nothing: the default `Progress`."""


@dataclass(frozen=True)
class Answered:
    """A question with its answers.

    Attributes:
        question: The question.
        answers: What each arm answered, by its name; samples that failed are not among them.
        seconds: How long each took, by arm.
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
    """The file of answers.

    Args:
        path: The file; an existing one is continued.
        arms: What answers, by name.

    Raises:
        ConfigurationError: Something else gave the answers that are in it.
        DataFormatError: It holds something else than answers.
        WriteError: It cannot be written to.
    """

    def __init__(self, path: Path, arms: Mapping[ArmName, Arm]) -> None:
        self.path = path
        self.arms: dict[ArmName, Arm] = {}
        self._log = JsonlLog(path)
        self._made_with: dict[ArmName, Any] = {}
        self._questions: dict[str, Question] = {}
        self._answers: dict[tuple[ArmName, str], tuple[Draft, float]] = {}
        self._failed: set[tuple[ArmName, str]] = set()
        for number, line in enumerate(self._log.values(), start=1):
            fields = line if isinstance(line, dict) else {}
            if isinstance(fields.get("made_with"), dict):
                self._made_with |= fields["made_with"]  # each run writes what it newly asked with
            elif number == 1:
                raise DataFormatError(
                    f"{str(path)!r} holds something else than answers.", hint="Name another file."
                )
            else:
                self._load(Record(f"{path}, line {number}", fields))
        self.add(arms)

    def add(self, arms: Mapping[ArmName, Arm]) -> None:
        """Add what answers; a later run may ask for samples, or for a judge.

        Raises:
            ConfigurationError: Another arm of that name gave answers in the file.
        """
        for name, arm in arms.items():
            facts = dict(arm.facts)
            if self._made_with.get(name) == facts:
                continue
            if name not in self._made_with or not any(arm == name for arm, _ in self._answers):
                self._made_with[name] = facts
                self._log.append([{"made_with": {name: facts}}])
            else:
                raise ConfigurationError(
                    f"The answers in {str(self.path)!r} were made with {self._made_with[name]}; now it is {facts}.",
                    hint="Write to another place: mixed answers would train a wrong gate.",
                )
        self.arms |= arms

    def complete(self) -> list[Answered]:
        """Return the questions that both arms answered (or the one there is), in the order of asking."""
        complete = []
        needed = {"direct", "retrieve"} & self.arms.keys()
        for key, question in self._questions.items():
            drafts, seconds = {}, {}
            for arm in self.arms:
                if kind_of(arm) in ("direct", "retrieve", SAMPLE) and (arm, key) in self._answers:
                    drafts[arm], seconds[arm] = self._answers[arm, key]
            if needed <= drafts.keys():
                complete.append(Answered(question, drafts, seconds))
        return complete

    def answer_of(self, question: Question, arm: ArmName) -> Draft | None:
        """Return what an arm answered, or None if it has not."""
        draft, _ = self._answers.get((arm, question.key), (None, 0.0))
        return draft

    def missing(self, questions: Sequence[Question], arm: ArmName) -> list[Question]:
        """Return the questions that an arm has not answered yet; those that it failed at before come last."""
        missing = [question for question in questions if self.answer_of(question, arm) is None]
        return sorted(missing, key=lambda question: (arm, question.key) in self._failed)

    def count_missing(self, questions: Sequence[Question]) -> Counter[str]:
        """Return how many answers are missing, by the kind of arm."""
        missing: Counter[str] = Counter()
        for arm in self.arms:
            missing[kind_of(arm)] += len(self.missing(questions, arm))
        return missing

    def ask(
        self,
        questions: Sequence[Question],
        *,
        arms: Sequence[ArmName] | None = None,
        concurrency: int = 4,
        what: str = "asking the LLM",
        progress: Progress = no_progress,
    ) -> int:
        """Ask what is missing, and return how many calls failed. A failure is kept as one, and the others go on.

        An answer that is cut off before it begins is a failure, and neither right nor wrong. The first call is made
        alone: a server that cannot be used at all is found by one call.

        Args:
            questions: The questions.
            arms: Whom to ask; everyone when None.
            concurrency: Calls at a time.
            what: What is done, in words.
            progress: Progress callback, with ``what`` as its label.

        Raises:
            ServerError: The server cannot be used, ten calls in a row failed, or all did; what was answered is kept.
            NoAnswerError: Three answers were cut off before they began, and there is none of that kind of arm.
            WriteError: An answer could not be kept, such as on a full disk.
        """
        if arms is None:  # results do not depend on whose answer came first
            known, self._questions = self._questions, {}
            for question in (*questions, *known.values()):
                self._remember(question)
            arms = list(self.arms)
        jobs = self._jobs(questions, arms)
        total = sum(len(some) for *_, some in jobs)
        done = failures = 0
        in_a_row: Counter[str] = Counter()
        cut_off: Counter[str] = Counter()
        for arm, question, outcome, seconds in self._outcomes(jobs, concurrency):
            line = _line(arm, question, outcome, seconds)
            # On disk first: what was paid for survives a kill before the next line.
            self._log.append([line])
            self._load(Record(str(self.path), line))
            done += 1
            progress(what, done, total)
            kind = kind_of(arm)
            if not isinstance(outcome, Exception):
                in_a_row[kind] = 0
                continue
            failures += 1
            in_a_row[kind] += 1
            cut_off[kind] += isinstance(outcome, NoAnswerError)
            if cut_off[kind] == STOP_IF_CUT_OFF:
                self._check_answered(kind)
            unusable = done == 1 and isinstance(outcome, ServerError)
            if unusable or in_a_row[kind] == STOP_AFTER or failures == total:
                raise ServerError(
                    f"Giving up after {failures} failed calls, the last with: {line['error']}",
                    hint=f"What was answered is kept in {str(self.path)!r}: repair it, and run the same again.",
                )
        self._check_finished(arms)
        return failures

    def _check_finished(self, arms: Sequence[ArmName]) -> None:
        """Raise an error if no answer of a server has ended: thoughts that the prompt opens look like that."""
        arm = self.arms.get("direct")
        finished = [draft.finished for (name, _), (draft, _) in self._answers.items() if name == "direct"]
        is_served = isinstance(arm, ModelArm) and isinstance(arm.llm, ServedProxy)
        if is_served and "direct" in arms and len(finished) >= STOP_IF_CUT_OFF and not any(finished):
            raise NoAnswerError(
                f"All {len(finished)} answers were cut off: the LLM thinks first, or is wordy.",
                hint="Switch its thinking off (--think off), and write to another place.",
            )

    def _check_answered(self, kind: str) -> None:
        """Raise an error for arms that have given no answer yet: all were cut off."""
        if not any(kind_of(name) == kind for name, _ in self._answers):
            raise NoAnswerError(
                f"{STOP_IF_CUT_OFF} answers were cut off before they began: the LLM thinks first.",
                hint="Switch its thinking off (--think off), or give it more tokens (--thinking-tokens).",
            )

    def _jobs(self, questions: Sequence[Question], arms: Sequence[ArmName]) -> list[_Job]:
        """Return the calls that are left to make, those of one question close to each other."""
        jobs: list[_Job] = []
        for name in arms:
            missing, batch = self.missing(questions, name), self.arms[name].batch
            for start in range(0, len(missing), batch):
                jobs.append((start, name, missing[start : start + batch]))
        return sorted(jobs, key=lambda job: job[0])

    def _outcomes(
        self, jobs: Sequence[_Job], concurrency: int
    ) -> Iterator[tuple[ArmName, Question, Draft | Exception, float]]:
        """Yield the outcome of each call as it ends; at most ``concurrency`` calls run at once."""
        waiting = deque(jobs)
        running: dict[Future[list[_Outcome]], _Job] = {}
        at_once = 1
        # Calls that are under way when it ends are waited for: their threads must not outlive it.
        with ThreadPoolExecutor(concurrency, thread_name_prefix="rgate-collect") as pool:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.popleft()
                    running[pool.submit(self._answer, *job[1:])] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    _, arm, some = running.pop(future)
                    for question, (outcome, seconds) in zip(some, future.result(), strict=True):
                        yield arm, question, outcome, seconds
                at_once = concurrency

    def _answer(self, arm: ArmName, some: Sequence[Question]) -> list[_Outcome]:
        """Answer some questions; with an error, one by one, so that only those fail that must."""
        start = perf_counter()
        try:
            drafts = self.arms[arm].answer(some)
        except Exception as error:  # whatever the user's own object raises
            if len(some) == 1:
                return [(error, 0.0)]
            return [self._answer(arm, [question])[0] for question in some]
        seconds = (perf_counter() - start) / len(some)
        outcomes: list[_Outcome] = []
        for draft in drafts:
            outcomes.append((no_answer("nothing", thinking=True) if draft.is_cut_off else draft, seconds))
        return outcomes

    def _remember(self, question: Question) -> None:
        known = self._questions.get(question.key)
        if known is None or (question.gold and not known.gold):
            self._questions[question.key] = question

    def _load(self, record: Record) -> None:
        """Take a line of the file into memory."""
        question, arm = Question.from_record(record), record.text("arm")
        self._remember(question)
        if "error" in record.fields:
            self._failed.add((arm, question.key))
            return
        try:
            draft = Draft.model_validate(record.fields.get("draft"))
        except ValueError as error:
            raise record.wrong("no answer that could have been kept") from error
        self._answers[arm, question.key] = (draft, record.optional_number("seconds") or 0.0)


def answers_file(out: str | Path) -> Path:
    """Return where the answers for a file of paired data, or for a folder, are kept: beside it."""
    path = Path(out)
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.answers.jsonl")


def kind_of(arm: ArmName) -> str:
    """Return what an arm is: all samples are of one kind."""
    return arm.partition(" ")[0]


def cached_answers(
    what: str, arms: Mapping[ArmName, Arm], questions: Sequence[Question], progress: Progress = no_progress
) -> list[dict[ArmName, Draft]]:
    """Ask a local model, and keep its answers in the cache: a training that is started again continues.

    Args:
        what: What is asked for, such as ``"drafts"``.
        arms: What answers; another model, even of the same name, has a file of its own.
        questions: The questions.
        progress: Progress callback: ``(label, done, total)``.

    Returns:
        The answers to each question, by arm.

    Raises:
        ServerError: A question could not be answered; the others are kept.
    """
    made_with = json_line({name: dict(arm.facts) for name, arm in arms.items()})
    path = cache_dir() / what / f"{hashlib.sha256(made_with.encode()).hexdigest()[:16]}.jsonl"
    waiting = f"waiting for another training that writes the same {what}"
    # Two trainings on the same questions would both write this file: the second waits, and then finds the answers.
    with locked(path, waiting=partial(progress, waiting, 0, len(questions))):
        answers = Answers(path, arms)
        failed = answers.ask(questions, concurrency=1, what=f"writing {what}", progress=progress)
    if failed:
        raise ServerError(f"{failed} {what} could not be written.", hint="Run the same again.")
    by_key = {each.question.key: dict(each.answers) for each in answers.complete()}
    return [by_key[question.key] for question in questions]


def _line(arm: ArmName, question: Question, outcome: Draft | Exception, seconds: float) -> dict[str, Any]:
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
    draft = outcome.model_dump(mode="json", exclude_defaults=True, exclude={"response_id"})
    return line | {"draft": {"text": outcome.text, **draft}, "seconds": round(seconds, 4)}
