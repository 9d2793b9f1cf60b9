"""Labels for answers: by gold answers, by a judge, or by whether both arms say the same; and paired data of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.papers.verdicts import ik_score
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.runtime.files import json_line, locked, write_atomically
from rgate_integrations.runtime.replies import describe_non_answer
from rgate_integrations.runtime.text import contains_answer, is_correct, normalise
from rgate_integrations.tuning.arms import Arm, ModelArm
from rgate_integrations.tuning.collection import (
    Answered,
    Answers,
    ArmName,
    Progress,
    answers_file,
    no_progress,
)
from rgate_integrations.tuning.questions import Question, Questions, read_questions

JUDGE = PromptTemplate(
    name="answer-judge",
    version=1,
    user=(
        "Question: {question}\nReference answers: {gold}\nAnswer to judge: {answer}\n\n"
        "Does the answer to judge agree with one of the reference answers? Reply Yes or No."
    ),
    cut="answer",
)
"""The teacher's question of the IK paper (section 3.1), for a judge that is given question, gold and answer."""

LabelKind: TypeAlias = Literal["auto", "gold", "judge", "agreement"]
"""How answers are labelled; ``"auto"`` is by the judge if there is one, gold where every question has a gold answer,
else agreement."""

Verdicts: TypeAlias = Mapping[tuple[ArmName, str], bool | None]
"""What a judge says of the answer of an arm to a question, by `Question.key`; None if it does not say."""

SAME_MEANING = 0.96
"""Cosine similarity from which on two answers say the same."""

_VERDICT = re.compile(r"^\W*(yes|no)\b", re.IGNORECASE)

_SHORT = 12  # words: a text that is no longer is compared as an answer, not as a paragraph


@dataclass(frozen=True)
class Labels:
    """What the answers are worth; those without a label are left out.

    Attributes:
        kind: How they were made.
        answered: The questions that have labels.
        known: Whether the answer without retrieval is right, shape (n,).
        rag: Whether the answer with retrieval is right, shape (n,).
        target: What gates are fitted to, in [0, 1], shape (n,): which share of a question's samples is right (KBM,
            section 2.2). A question without a sample that has a label counts as its answer does.
        unlabelled: How many questions have no label.
        judge: Name of the model that judges, if there is one.
    """

    kind: str
    answered: tuple[Answered, ...]
    known: BoolArray
    rag: BoolArray
    target: Float64Array
    unlabelled: int
    judge: str = ""

    @property
    def samples(self) -> int:
        """The most samples that a question has, beside its two answers."""
        return max((len(each.answers) - 2 for each in self.answered), default=0)

    @property
    def description(self) -> str:
        """What the labels are, and what they are not."""
        text = {
            "gold": "An answer is right if it contains a gold answer, word by word.",
            "judge": f"The model {self.judge} judged each answer against the gold ones.",
            "agreement": "No gold answers: an answer without retrieval counts as right if it says the same as the "
            "one with retrieval, which always does. That stands in for correctness and is not correctness.",
        }[self.kind]
        if not self.samples:
            return text
        between = ((self.target > 0) & (self.target < 1)).mean()
        return (
            f"{text} The gates were fitted to the share of right answers among up to {self.samples} samples a "
            f"question, which is neither 0 nor 1 for {between:.1%} of the questions. Threshold, guarantee and all "
            "figures here are about the answer itself."
        )


def label(
    answers: Answers,
    kind: LabelKind = "auto",
    *,
    judge: LanguageModel | None = None,
    embedder: Embedder | None = None,
    concurrency: int = 4,
    progress: Progress = no_progress,
) -> Labels:
    """Label the answers of all arms.

    Args:
        answers: The answers; what a judge says is kept with them, see `ask_judge`.
        kind: How.
        judge: Judges them, for ``"judge"``.
        embedder: Finds answers that say the same in other words, for agreement; the words alone count when None.
        concurrency: Calls of the judge at a time.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: There is no judge.
        DataFormatError: Gold answers are needed, and no question has some.
        ServerError: The judge could not be asked.
    """
    answered = answers.complete()
    with_gold = [each for each in answered if each.question.gold]
    if kind == "auto":
        kind = "agreement"
        if judge is not None:
            kind = "judge"
        elif len(with_gold) == len(answered):
            kind = "gold"
    usable = answered if kind == "agreement" else with_gold
    verdicts: Verdicts = {}
    if kind == "judge":
        if judge is None:
            raise ConfigurationError("A judge is needed for labels by a judge.", hint="judge=, or --judge")
        verdicts = ask_judge(answers, judge, concurrency=concurrency, progress=progress)
    if not usable and answered:
        raise DataFormatError("No question has a gold answer.", hint="Give some, or label by agreement.")
    labelled, labels = [], []
    for each in usable:
        right = _right(each, kind, verdicts, embedder)
        direct, retrieve = right.pop("direct"), right.pop("retrieve")
        # A question counts only with both labels: thresholds are chosen on pairs.
        if direct is None or retrieve is None:
            continue
        samples = [is_right for is_right in right.values() if is_right is not None] or [direct]
        labelled.append(each)
        labels.append((direct, retrieve, sum(samples) / len(samples)))
    known, rag, target = np.array(labels, dtype=np.float64).reshape(-1, 3).T
    return Labels(
        kind=kind,
        answered=tuple(labelled),
        known=known.astype(bool),
        rag=rag.astype(bool),
        target=target,
        unlabelled=len(answered) - len(labelled),
        judge="" if judge is None else judge.name,
    )


def _right(
    each: Answered, kind: LabelKind, verdicts: Verdicts, embedder: Embedder | None
) -> dict[ArmName, bool | None]:
    """Return which answers to a question are right, by arm."""
    right: dict[ArmName, bool | None] = {}
    for arm, answer in each.answers.items():
        if kind == "judge":
            right[arm] = verdicts[arm, each.question.key]
        elif kind == "gold":
            right[arm] = is_correct(answer.text, each.question.gold)
        else:  # the answer with retrieval is what the others agree with
            right[arm] = arm == "retrieve" or agrees(answer.text, each.retrieve.text, embedder)
    return right


def agrees(text: str, other: str, embedder: Embedder | None) -> bool:
    """Return whether two answers say the same.

    They do if one contains the other, both normalised and word by word, or if their embeddings are near. What is no
    answer agrees with none.
    """
    short, long = sorted((normalise(text), normalise(other)), key=len)
    if not short or describe_non_answer(text) or describe_non_answer(other):
        return False
    if len(short.split()) <= _SHORT and contains_answer(long, short):
        return True
    if embedder is None:
        return False
    first, second = embedder.embed([text, other])
    length = np.linalg.norm(first) * np.linalg.norm(second)
    return bool(first @ second >= SAME_MEANING * length)


@dataclass(frozen=True)
class JudgeArm(ModelArm):
    """A judge as an arm, so that its verdicts are kept as answers are (IK, section 3.1).

    A local model judges by its Yes and No logits, binarised at 0.5; a remote one by what it writes.

    Attributes:
        judged: The answer to each question, by `Question.key`.
    """

    judged: Mapping[str, str] = field(default_factory=dict)

    def answer(self, questions: Sequence[Question]) -> list[Draft]:
        """Judge the answers to some questions."""
        values = []
        for question in questions:
            gold = "; ".join(question.gold)
            values.append({"question": question.text, "gold": gold, "answer": self.judged[question.key]})
        if self.llm.is_remote:
            return self.llm.generate(self.prompt, values, tokens=self.tokens)
        found = []
        for scores in self.llm.score(self.prompt, values, ("Yes", "No")):
            p = ik_score(*scores.logprobs)
            text = ""
            if p >= 0.5:
                text = "Yes"
            elif p < 0.5:  # NaN is neither
                text = "No"
            found.append(Draft(text=text))
        return found


def ask_judge(
    answers: Answers, judge: LanguageModel, *, concurrency: int = 4, progress: Progress = no_progress
) -> Verdicts:
    """Let a model judge every answer to a question with gold answers, and keep what it says.

    Refusals ("I do not know"), nothing at all and calls of tools count as wrong and are not sent to the judge. A
    reply that is neither Yes nor No, and a request that fails, gives no verdict.

    Args:
        answers: The answers; verdicts are kept in the same file.
        judge: The judge.
        concurrency: Calls at a time.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ServerError: The judge could not be asked.
    """
    answered = [each for each in answers.complete() if each.question.gold]
    verdicts: dict[tuple[ArmName, str], bool | None] = {}
    for arm in list(answers.arms):
        judged = {}
        for each in answered:
            if arm in each.answers:
                judged[each.question.key] = each.answers[arm].text.strip()
        name = f"judge {judge.name} of {arm}"
        # It is asked for a word, and may say a few.
        answers.add({name: JudgeArm(judge, tokens=8, prompt=JUDGE, judged=judged)})
        asked = [
            each.question for each in answered if not describe_non_answer(judged.get(each.question.key, ""))
        ]
        answers.ask(asked, arms=[name], concurrency=concurrency, what=f"judging {arm}", progress=progress)
        for key in judged:
            verdicts[arm, key] = False
        for question in asked:
            reply = answers.answer_of(question, name)
            verdicts[arm, question.key] = None if reply is None else verdict(reply.text)
    return verdicts


def verdict(reply: str) -> bool | None:
    """Return what a judge's reply says: whether its first word is Yes or No; None for anything else."""
    match = _VERDICT.match(reply)
    if match is None:
        return None
    return match[1].lower() == "yes"


def collect(
    questions: Questions,
    llm: LanguageModel,
    out: str | Path,
    *,
    index: Retriever | None = None,
    k: int = 3,
    tokens: int = 64,
    judge: LanguageModel | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Ask an LLM questions without and with retrieval, and write paired data, one JSON record a line.

    Answers are kept as they come, in a file beside ``out``; run again, it goes on, and no call that was answered is
    made again. ``out`` is written at the end, whole, with all questions that were answered so far.

    Args:
        questions: What `rgate_integrations.tuning.questions.read_questions` reads; each with gold answers.
        llm: Answers.
        out: The file.
        index: Finds passages; None asks without retrieval only.
        k: Passages a question.
        tokens: Maximum length of an answer.
        judge: A model that judges answers against the gold ones; what it does not say, and everything without a
            judge, is judged by containment (`rgate_integrations.runtime.text.is_correct`).
        progress: Progress callback: ``(label, done, total)``.

    Returns:
        ``out``; `rgate_integrations.tuning.questions.read_paired` reads it.

    Raises:
        ConfigurationError: Earlier answers were made otherwise, such as by another LLM.
        DataFormatError: A question has no gold answers, or ``out`` holds something else.
        ServerError: The LLM could not be asked.
        NoAnswerError: Its answers were cut off while it thought.
        LockedError: Another process is writing to the file.
        WriteError: A file could not be written, such as on a full disk; what was answered is kept.
    """
    out = Path(out)
    answers_path = answers_file(out)
    arms: dict[ArmName, Arm] = {"direct": ModelArm(llm, tokens=tokens)}
    if index is not None:
        arms["retrieve"] = ModelArm(llm, index, k=k, tokens=tokens)
    # The answers lie beside the file, so that one lock serves for both.
    with locked(out):
        asked = read_questions(questions, gold=True)
        if out.exists() and not answers_path.exists():
            raise DataFormatError(
                f"{str(out)!r} holds something else than what is collected now.", hint="Name another file."
            )
        answers = Answers(answers_path, arms)
        answers.ask(asked, progress=progress)
        verdicts = {} if judge is None else ask_judge(answers, judge, progress=progress)
        write_atomically(
            out, "".join(json_line(_record(each, llm.name, verdicts)) for each in answers.complete())
        )
    return out


def _record(answered: Answered, llm: str, verdicts: Verdicts) -> dict[str, Any]:
    """Return a question with its answers and whether they are right, as `read_paired` reads it."""
    question = answered.question
    record: dict[str, Any] = {
        "id": question.id or question.key,
        "question": question.text,
        "gold_answers": [*question.gold],
        "llm": llm,
        "dataset": question.dataset,
        "popularity": question.popularity,
        "closed_book_text": answered.direct.text,
        "closed_book_logprobs": answered.direct.logprobs,
    }
    if answered.direct.thinking_tokens:
        record["thinking_tokens"] = answered.direct.thinking_tokens
    for arm, column in (("direct", "closed_book"), ("retrieve", "rag")):
        if arm in answered.answers:
            text = answered.answers[arm].text
            verdict = verdicts.get((arm, question.key))
            record[f"{column}_answer"] = text
            record[f"{column}_correct"] = is_correct(text, question.gold) if verdict is None else verdict
    return record
