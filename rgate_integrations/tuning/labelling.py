"""Labels answers by gold answers, by a judge, or by agreement of both arms, and writes paired data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from rgate_integrations.decision import Draft, valid_choice
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.papers.verdicts import ik_score
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.runtime.files import check_output, expand, json_line, locked, write_atomically
from rgate_integrations.runtime.replies import describe_non_answer
from rgate_integrations.runtime.text import contains_answer, is_correct, logger, normalise
from rgate_integrations.tuning.arms import Arm, ModelArm
from rgate_integrations.tuning.collection import (
    Answered,
    Answers,
    ArmName,
    Progress,
    answers_file,
    check_continuable,
    no_progress,
)
from rgate_integrations.tuning.questions import Question, Questions, read_questions, without_repetitions

JUDGE = PromptTemplate(
    name="answer-judge",
    version=1,
    user=(
        "Question: {question}\nReference answers: {gold}\nAnswer to judge: {answer}\n\n"
        "Does the answer to judge agree with one of the reference answers? Reply Yes or No."
    ),
    cut="answer",
)
"""Prompt for a judge, a model that compares an answer with the gold answers; the IK paper's (section 3.1)."""

LabelKind: TypeAlias = Literal["auto", "gold", "judge", "agreement"]
"""How answers are labelled: right if they contain a gold answer (``"gold"``), if a model judges so
(``"judge"``), or if they agree with the answer with retrieval (``"agreement"``). ``"auto"`` means the judge
if one is given, or else gold if every question has a gold answer, or else agreement."""

Verdicts: TypeAlias = Mapping[tuple[ArmName, str], bool | None]
"""A judge's verdict on an arm's answer to a question, by arm and `Question.key`; None without a verdict."""

# Sentence vectors of unrelated answers are close together, too, so only near-paraphrases may pass.
SAME_MEANING = 0.96
"""Cosine similarity of embeddings at and above which two answers count as the same."""

_VERDICT = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)

_MAX_SHORT_WORDS = 12  # a longer text is a paragraph, and sharing one does not mean giving the same answer


@dataclass(frozen=True)
class Labels:
    """The labels of answers; questions without a label are left out.

    Attributes:
        kind: How the labels were made: ``"gold"``, ``"judge"`` or ``"agreement"``; see `LabelKind`.
        answered: The labelled questions.
        known: Whether the answer without retrieval is right, shape (n,).
        rag: Whether the answer with retrieval is right, shape (n,).
        target: The target of the fit, in [0, 1], shape (n,): the share of right samples of a question (KBM paper,
            section 2.2), or `known` if no sample has a label.
        unlabelled: Number of answered questions without a label.
        judge: Name of the model that compared the answers with gold ones; empty if `kind` is not ``"judge"``.
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
        """The largest number of sampled answers to a question; 0 if none were sampled."""
        return max((len(answered.answers) - 2 for answered in self.answered), default=0)

    @property
    def description(self) -> str:
        """What the labels mean, and what they do not mean."""
        text = {
            "gold": "An answer is right if it contains a gold answer, compared by whole words.",
            "judge": f"The model {self.judge} judged each answer against the gold ones.",
            "agreement": "Without gold answers, an answer without retrieval counts as right if it says the same as "
            "the one with retrieval, which always counts as right. This is a substitute, and "
            "agreement is not correctness.",
        }[self.kind]
        if not self.samples:
            return text
        between = ((self.target > 0) & (self.target < 1)).mean()
        return (
            f"{text} The gates were fitted to the share of right answers among up to {self.samples} samples per "
            f"question, which is neither 0 nor 1 for {between:.1%} of the questions. Threshold, guarantee and all "
            "figures here refer to the answer that was not sampled."
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
    """Return labels for the answers of all arms: without retrieval, with retrieval, and samples, if any.

    Args:
        answers: The answers; verdicts of a judge are kept with them, see `ask_judge`.
        kind: How to label; see `LabelKind`.
        judge: The model that judges; ``"judge"`` needs it, and ``"auto"`` uses it if there is one.
        embedder: Detects answers with the same meaning, for ``"agreement"``; when None, only words are compared.
        concurrency: Maximum concurrent calls of the judge.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``kind`` is unknown or lacks its judge, or the file has verdicts made with other settings.
        DataFormatError: Gold answers are needed, but no question has any.
        ServerError: The judge could not be reached, or too many calls failed.
        NoAnswerError: The judge's replies were cut off while it was still thinking.
    """
    complete = without_repetitions(answers.complete(), attrgetter("question"))
    with_gold = [answered for answered in complete if answered.question.gold]
    if valid_choice(kind, "labels", get_args(LabelKind)) == "auto":
        kind = "judge" if judge is not None else _choose_kind(len(with_gold), len(complete))
    usable = complete if kind == "agreement" else with_gold
    verdicts: Verdicts = {}
    if kind == "judge":
        verdicts = ask_judge(answers, judge, concurrency=concurrency, progress=progress)
    if complete and not usable:
        raise DataFormatError(
            f'labels="{kind}" needs gold answers, but no question has any.',
            hint='Add gold answers, or use labels="agreement" (--labels agreement).',
        )
    labelled, labels = [], []
    for answered in usable:
        right = _label_answers(answered, kind, verdicts, embedder)
        direct, retrieve = right.pop("direct"), right.pop("retrieve")
        # A question needs both labels, because thresholds are chosen on pairs.
        if direct is not None and retrieve is not None:
            # Without labelled samples, the answer itself is the target.
            samples = [is_right for is_right in right.values() if is_right is not None] or [direct]
            labelled.append(answered)
            labels.append((direct, retrieve, sum(samples) / len(samples)))
    known, rag, target = np.array(labels, dtype=np.float64).reshape(-1, 3).T
    return Labels(
        kind=kind,
        answered=tuple(labelled),
        known=known.astype(bool),
        rag=rag.astype(bool),
        target=target,
        unlabelled=len(complete) - len(labelled),
        judge=judge.name if kind == "judge" and judge is not None else "",
    )


def _choose_kind(with_gold: int, total: int) -> LabelKind:
    """Return the kind of label without a judge; warn if questions without gold answers decide it for the others."""
    if with_gold == total:
        return "gold"
    if with_gold:
        logger.warning(
            "%d of %d questions have no gold answers, so agreement labels all of them. "
            'labels="gold" (--labels gold) leaves these out instead.',
            total - with_gold,
            total,
        )
    return "agreement"


def _label_answers(
    answered: Answered, kind: LabelKind, verdicts: Verdicts, embedder: Embedder | None
) -> dict[ArmName, bool | None]:
    """Return whether each answer to a question is right, by arm; None if the judge gave no verdict."""
    right: dict[ArmName, bool | None] = {}
    for arm, answer in answered.answers.items():
        if kind == "judge":
            right[arm] = verdicts[arm, answered.question.key]
        elif kind == "gold":
            right[arm] = is_correct(answer.text, answered.question.gold)
        else:  # the answer with retrieval is the reference for the others
            right[arm] = arm == "retrieve" or agrees(answer.text, answered.retrieve.text, embedder)
    return right


def agrees(text: str, other: str, embedder: Embedder | None) -> bool:
    """Return whether two answers say the same thing.

    They do if the shorter one has at most 12 words and occurs in the other as whole words, after both are normalised.
    With an embedder, they also do if their cosine similarity is at least `SAME_MEANING`. A refusal, a tool call or an
    empty text never agrees.
    """
    short, long = sorted((normalise(text), normalise(other)), key=len)
    if not short or describe_non_answer(text) or describe_non_answer(other):
        return False
    if len(short.split()) <= _MAX_SHORT_WORDS and contains_answer(long, short):
        return True
    if embedder is None:
        return False
    first, second = embedder.embed([text, other])
    return bool(first @ second >= SAME_MEANING * np.linalg.norm(first) * np.linalg.norm(second))


@dataclass(frozen=True)
class JudgeArm(ModelArm):
    """An arm whose LLM judges answers, so that its verdicts are saved like answers (IK paper, section 3.1).

    A local model's verdict is Yes if P(Yes), from the logits of Yes and No, is at least 0.5. A remote model writes
    its verdict.

    Attributes:
        judged: The answers to judge, by `Question.key`.
    """

    judged: Mapping[str, str] = field(default_factory=dict)

    def answer(self, questions: Sequence[Question]) -> list[Draft]:
        """Return one draft per question, whose text is the verdict on its answer; an empty text means no verdict."""
        values = [
            {
                "question": question.text,
                "gold": "; ".join(question.gold),
                "answer": self.judged[question.key],
            }
            for question in questions
        ]
        if self.llm.is_remote:
            return self.llm.generate(self.prompt, values, tokens=self.tokens)
        drafts = []
        for scores in self.llm.score(self.prompt, values, ("Yes", "No")):
            p = ik_score(*scores.logprobs)
            text = "Yes" if p >= 0.5 else "No"
            drafts.append(Draft(text="" if math.isnan(p) else text))
        return drafts


def ask_judge(
    answers: Answers, judge: LanguageModel | None, *, concurrency: int = 4, progress: Progress = no_progress
) -> Verdicts:
    """Let a model judge the answers to all questions that have gold answers; save and return its verdicts.

    Refusals ("I do not know"), empty answers and tool calls count as wrong and are not sent to the judge. There is
    no verdict if the reply is neither Yes nor No, or if the call fails.

    Args:
        answers: The answers; verdicts are kept in the same file.
        judge: The judge.
        concurrency: Maximum concurrent calls.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: There is no judge, or verdicts in the file were made with other settings of it.
        ServerError: The judge could not be reached, or too many calls failed.
        NoAnswerError: The judge's replies were cut off while it was still thinking.
    """
    if judge is None:
        raise ConfigurationError('Labels of kind "judge" need a judge.', hint="Pass judge= (--judge).")
    with_gold = [answered for answered in answers.complete() if answered.question.gold]
    verdicts: dict[tuple[ArmName, str], bool | None] = {}
    for arm in list(answers.arms):
        judged = {
            answered.question.key: answered.answers[arm].text.strip()
            for answered in with_gold
            if arm in answered.answers
        }
        # Every answer starts as wrong. Refusals are not sent to the judge, so they stay wrong.
        verdicts |= {(arm, key): False for key in judged}
        questions = [
            answered.question
            for answered in with_gold
            if not describe_non_answer(judged.get(answered.question.key, ""))
        ]
        # Each judge and arm has its own verdicts, so another judge does not reuse them.
        name = f"judge {judge.name} of {arm}"
        # The prompt asks for one word, but some models write a few more.
        answers.add({name: JudgeArm(judge, tokens=8, prompt=JUDGE, judged=judged)})
        answers.ask(
            questions, arms=[name], concurrency=concurrency, label=f"judging {arm}", progress=progress
        )
        for question in questions:
            reply = answers.get(question, name)
            verdicts[arm, question.key] = None if reply is None else parse_verdict(reply.text)
    return verdicts


def parse_verdict(reply: str) -> bool | None:
    """Return whether the first word of a judge's reply is Yes; None if it is neither Yes nor No."""
    match = _VERDICT.match(reply)
    return None if match is None else match[1].lower() == "yes"


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
    """Ask an LLM questions without and with retrieval, and write paired data, one JSON record per line.

    Each answer is saved immediately in a file next to ``out``, so an interrupted run resumes without repeating
    answered calls. ``out`` is written atomically at the end, with all questions that have been answered so far.

    Args:
        questions: Questions with gold answers, as `rgate_integrations.tuning.questions.read_questions` reads them.
        llm: The answering LLM.
        out: The file to write.
        index: The index to search; with None, ``out`` has no answers with retrieval.
        k: Passages per question.
        tokens: Maximum length of an answer, in tokens.
        judge: A model that judges answers against the gold ones. Answers without a verdict are right if they contain
            a gold answer (`rgate_integrations.runtime.text.is_correct`).
        progress: Progress callback: ``(label, done, total)``.

    Returns:
        ``out``, which `rgate_integrations.tuning.questions.read_paired` reads; without an index, only
        `rgate_integrations.tuning.questions.read_examples` does.

    Raises:
        ConfigurationError: ``llm`` is no model, ``out`` is ``questions``, or earlier answers had other settings.
        DataFormatError: The questions or earlier answers cannot be read, a question has no gold answers, or
            ``out`` exists without its file of answers.
        ServerError: The LLM or the judge could not be reached, or too many calls failed.
        NoAnswerError: Answers were cut off, for example while the LLM or judge was still thinking.
        LockedError: Another process is writing to ``out`` or the file of answers.
        WriteError: A file could not be written, for example because the disk is full; the answers are kept.
    """
    if not isinstance(llm, LanguageModel):
        raise ConfigurationError(
            f"collect needs a model that answers with and without passages, not {type(llm).__name__}.",
            hint="Pass a model of this package, such as RemoteModel(URL, MODEL). tune takes functions, too.",
        )
    out = expand(out)
    check_output(out, questions)
    answers_path = answers_file(out)
    arms: dict[ArmName, Arm] = {"direct": ModelArm(llm, tokens=tokens)}
    if index is not None:
        arms["retrieve"] = ModelArm(llm, index, k=k, tokens=tokens)
    # Two locks, because `tune` may use the same answers.
    with locked(out), locked(answers_path):
        to_ask = read_questions(questions, gold=True)
        check_continuable(out)
        answers = Answers(answers_path, arms)
        answers.ask(to_ask, progress=progress)
        verdicts = {} if judge is None else ask_judge(answers, judge, progress=progress)
        records = [_as_record(answered, llm.name, verdicts) for answered in answers.complete()]
        return write_atomically(out, "".join(map(json_line, records)))


def _as_record(answered: Answered, llm: str, verdicts: Verdicts) -> dict[str, Any]:
    """Return a record of a question, its answers and their labels, for `read_paired`."""
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
    for arm, column in (("direct", "closed_book"), ("retrieve", "rag")):
        if arm in answered.answers:
            text = answered.answers[arm].text
            verdict = verdicts.get((arm, question.key))
            record[f"{column}_answer"] = text
            record[f"{column}_correct"] = is_correct(text, question.gold) if verdict is None else verdict
    return record
