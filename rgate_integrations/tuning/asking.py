"""Asks both arms every question, several at a time, and keeps each answer at once: nothing is asked twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError, RGateError, ServerError
from rgate_integrations.runtime.files import JsonlLog
from rgate_integrations.runtime.records import Record
from rgate_integrations.tuning.arms import Arm
from rgate_integrations.tuning.questions import Question

ArmName: TypeAlias = str
"""``"direct"``, ``"retrieve"``, and ``"sample 1"``, ``"sample 2"``, … for further answers without retrieval."""

SAMPLE = "sample"
STOP_AFTER = 10
"""So many failures of an arm in a row mean that there is no use in asking on; all samples are one arm here."""

_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_SHORTEST_SECRET = 6


@dataclass(frozen=True)
class Answered:
    """A question with the answers of both arms.

    Attributes:
        question: The question.
        direct: The answer without retrieval.
        retrieve: The answer with retrieval.
        seconds: How long each took, by arm.
        samples: Further answers without retrieval, drawn at random; those that failed are not among them.
    """

    question: Question
    direct: Draft
    retrieve: Draft
    seconds: dict[str, float]
    samples: tuple[Draft, ...] = ()


class Answers:
    """The file of answers: a line for each answer, and one for each failure, which is asked again next time.

    Args:
        path: The file; an existing one is continued.
        arms: What answers, by name.

    Raises:
        ConfigurationError: Something else gave the answers that are in it.
        DataFormatError: It holds something else than answers.
        WriteError: It cannot be written to.
    """

    def __init__(self, path: Path, arms: dict[ArmName, Arm]) -> None:
        self.path = path
        self.arms = arms
        self.failed: dict[tuple[str, str], str] = {}
        self._log = JsonlLog(path)
        self._questions: dict[str, Question] = {}
        self._found: dict[tuple[str, str], tuple[Draft, float]] = {}
        made_with: dict[ArmName, dict[str, Any]] = {name: dict(arm.facts) for name, arm in arms.items()}
        found: dict[ArmName, Any] = {}
        for number, line in enumerate(self._log.values(), start=1):
            fields = line if isinstance(line, dict) else {}
            if isinstance(fields.get("made_with"), dict):
                found |= fields["made_with"]
            elif number == 1:
                raise DataFormatError(
                    f"{str(path)!r} holds something else than answers.", hint="Name another file."
                )
            else:
                self._take(Record(f"{path}, line {number}", number, fields))
        self._check(found, made_with)
        new = {name: facts for name, facts in made_with.items() if name not in found}
        if new:  # a later run may ask for samples, or for more of them
            self._log.append([{"made_with": new}])

    def whole(self) -> list[Answered]:
        """Return the questions that both arms answered, in the order in which they were asked first."""
        found = []
        for key, question in self._questions.items():
            direct, retrieve = self._found.get((key, "direct")), self._found.get((key, "retrieve"))
            if direct is not None and retrieve is not None:
                seconds = {"direct": direct[1], "retrieve": retrieve[1]}
                found.append(Answered(question, direct[0], retrieve[0], seconds, self._samples(key)))
        return found

    def answers_of(self, arm: ArmName) -> dict[str, Draft]:
        """Return what an arm has answered so far, by the key of the question."""
        return {key: draft for (key, name), (draft, _) in self._found.items() if name == arm}

    def _samples(self, key: str) -> tuple[Draft, ...]:
        """Return the samples of a question that this run asks for, as far as they are there."""
        found = []
        for name in self.arms:
            if _kind(name) == SAMPLE and (key, name) in self._found:
                found.append(self._found[key, name][0])
        return tuple(found)

    def missing(self, questions: Sequence[Question], arm: ArmName) -> list[Question]:
        """Return the questions that an arm has not answered yet."""
        return [question for question in questions if (question.key, arm) not in self._found]

    def ask(
        self,
        questions: Sequence[Question],
        *,
        concurrency: int,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        """Ask what is missing. A failure is kept as one, and the others go on.

        Args:
            questions: The questions.
            concurrency: Requests at a time.
            report: Told how many calls are done, and how many there are.

        Raises:
            ServerError: Ten calls of an arm in a row failed, or all did; what was answered is kept.
            WriteError: An answer could not be kept, such as on a full disk.
        """
        jobs = list(self._jobs(questions))
        total = sum(len(some) for _, some in jobs)
        done = 0
        in_a_row = {_kind(name): 0 for name in self.arms}
        self.failed.clear()
        for arm, line in self._asked(jobs, concurrency):
            self._log.append([line])
            self._take(Record(str(self.path), 0, line))
            kind = _kind(arm)
            in_a_row[kind] = in_a_row[kind] + 1 if "error" in line else 0
            done += 1
            if report is not None:
                report(done, total)
            if in_a_row[kind] == STOP_AFTER:
                raise _of_no_use(self.failed, self.path)
        if done and len(self.failed) == done:
            raise _of_no_use(self.failed, self.path)

    def _asked(
        self, jobs: Sequence[tuple[ArmName, list[Question]]], concurrency: int
    ) -> Iterator[tuple[ArmName, dict[str, Any]]]:
        """Yield the line of each call as it ends; no more calls are begun than are waited for."""
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="rgate-tune")
        begun: dict[Future[list[tuple[Draft | Exception, float]]], tuple[ArmName, list[Question]]] = {}
        left = iter(jobs)
        try:
            while True:
                for arm, some in islice(left, concurrency - len(begun)):
                    begun[pool.submit(self._answer, arm, some)] = (arm, some)
                if not begun:
                    return
                for future in wait(begun, return_when=FIRST_COMPLETED).done:
                    arm, some = begun.pop(future)
                    for line in self._lines(future, arm, some):
                        yield arm, line
        finally:
            # Those that are under way are waited for: their threads must not outlive the call.
            pool.shutdown(wait=True, cancel_futures=True)

    def _jobs(self, questions: Sequence[Question]) -> Iterator[tuple[ArmName, list[Question]]]:
        """Yield what is to be asked, the arms of a question close to each other."""
        jobs: list[tuple[int, ArmName, list[Question]]] = []
        for name, arm in self.arms.items():
            missing, batch = self.missing(questions, name), arm.batch
            for start in range(0, len(missing), batch):
                jobs.append((start, name, missing[start : start + batch]))
        for _, name, some in sorted(jobs, key=lambda job: job[0]):
            yield name, some

    def _answer(self, arm: ArmName, some: Sequence[Question]) -> list[tuple[Draft | Exception, float]]:
        """Answer some questions; with an error, one by one, so that only those fail that must."""
        start = perf_counter()
        try:
            drafts = self.arms[arm].answer([question.text for question in some])
        except Exception as error:  # whatever the user's own object raises
            if len(some) == 1:
                return [(error, 0.0)]
            return [self._answer(arm, [question])[0] for question in some]
        seconds = (perf_counter() - start) / len(some)
        return [(draft, seconds) for draft in drafts]

    def _lines(
        self, future: Future[list[tuple[Draft | Exception, float]]], arm: ArmName, some: Sequence[Question]
    ) -> Iterator[dict[str, Any]]:
        for question, (outcome, seconds) in zip(some, future.result(), strict=True):
            line: dict[str, Any] = {"arm": arm, "question": question.text, "gold_answers": [*question.gold]}
            if isinstance(outcome, Exception):
                yield line | {"error": without_secrets(f"{type(outcome).__name__}: {outcome}")}
                continue
            line |= {"text": outcome.text, "tokens": [*outcome.tokens], "seconds": round(seconds, 4)}
            if outcome.logprobs is not None and not outcome.scored_by:
                line["logprobs"] = [round(logprob, 4) for logprob in outcome.logprobs]
            if outcome.prompt_tokens:
                line["prompt_tokens"] = outcome.prompt_tokens
            yield line

    def _take(self, record: Record) -> None:
        """Take a line of the file into memory."""
        question = Question(record.text("question"), tuple(record.texts("gold_answers")))
        known = self._questions.get(question.key)
        if known is None or (question.gold and not known.gold):
            self._questions[question.key] = question
        place = (question.key, record.text("arm"))
        if "error" in record.fields:
            self.failed[place] = record.optional_text("error")
            return
        self.failed.pop(place, None)
        tokens, logprobs = record.texts("tokens"), record.logprobs("logprobs")
        if logprobs is not None and len(logprobs) != len(tokens):
            tokens = ()
        draft = Draft(
            text=record.optional_text("text"),
            tokens=tokens,
            logprobs=logprobs,
            source="llm",
            prompt_tokens=max(int(record.optional_number("prompt_tokens") or 0), 0),
        )
        self._found[place] = (draft, record.optional_number("seconds") or 0.0)

    def _check(self, theirs: dict[ArmName, Any], made_with: dict[ArmName, dict[str, Any]]) -> None:
        """Refuse a file whose answers are from elsewhere."""
        for name, facts in made_with.items():
            if name in theirs and theirs[name] != facts:
                raise ConfigurationError(
                    f"The answers in {str(self.path)!r} were made with {theirs}; now it is {made_with}.",
                    hint="Write to another place: mixed answers would train a wrong gate.",
                )


def _kind(arm: ArmName) -> str:
    """Return what an arm is: all samples are of one kind."""
    return arm.partition(" ")[0]


def _of_no_use(failed: dict[tuple[str, str], str], path: Path) -> RGateError:
    last = list(failed.values())[-1]
    return ServerError(
        f"Asking was given up: {len(failed)} calls failed, the last with: {last}",
        hint=f"What was answered is kept in {str(path)!r}: repair it, and run the same again.",
    )


def without_secrets(text: str) -> str:
    """Return a text without the secrets of the environment, whoever quotes them."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and name.upper().endswith(_SECRET):
            text = text.replace(value, "***")
    return text
