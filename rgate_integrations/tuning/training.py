"""Training options, drafts and labels to learn from, the papers' recipes, and training pairs for LoRA adapters."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from rgate_integrations.answering.claims import REWRITE, Claim, format_claims, parse_claims
from rgate_integrations.decision import Draft, valid_choice, valid_count
from rgate_integrations.errors import DataFormatError, NoAnswerError
from rgate_integrations.gates.papers.verdicts import (
    BOUNDARY_QUESTION,
    CONTEXT_PROMPT,
    IK_DRAFT,
    IK_QUESTION,
    JUDGMENT,
    PARAMETRIC_PROMPT,
    RET,
    TARGETS,
    certainty,
)
from rgate_integrations.models.base import LanguageModel, Proxy
from rgate_integrations.models.proxies import language_model
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER, PromptTemplate, answer_prompt
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.runtime.text import is_correct, normalise_answers
from rgate_integrations.tuning.arms import ModelArm, sampling_arms
from rgate_integrations.tuning.collection import Progress, cached_answers, no_progress
from rgate_integrations.tuning.evaluation import MAX_SEED
from rgate_integrations.tuning.questions import (
    LABEL,
    DataFile,
    DraftKind,
    Example,
    Question,
    read_examples,
    recorded_drafts,
)


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of fine-tuning on pairs of a prompt and its target.

    Attributes:
        epochs: Passes over the pairs.
        learning_rate: Peak learning rate.
        batch_size: Pairs per optimizer step.
        rank: LoRA rank.
        alpha: LoRA scaling.
        dropout: LoRA dropout.
        schedule: Name of a learning rate schedule in transformers.
        warmup: Share of the steps for warm-up, in [0, 1].
        per_device: Pairs per forward pass; a step may take several passes.
    """

    epochs: float
    learning_rate: float
    batch_size: int = 16
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05
    schedule: str = "linear"
    warmup: float = 0.0
    per_device: int = 8


RECIPES: dict[str, Recipe] = {
    "slimplm": Recipe(epochs=2, learning_rate=1e-4),
    "ik": Recipe(epochs=1, learning_rate=1e-4),
    "adapt": Recipe(epochs=3, learning_rate=3e-4, batch_size=128),
    "boundary": Recipe(epochs=3, learning_rate=1e-5, batch_size=4, schedule="cosine", warmup=0.02),
    "rewriter": Recipe(epochs=2, learning_rate=1e-4),
}
"""The papers' settings, by gate: SlimPLM section 4.4, IK section 3.1, ADAPT-LLM section 4.3, KBM appendix. Where a
paper fine-tunes all weights, we use LoRA of rank 8; where it names no batch size, 16 pairs per step."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options for training a gate, and details for its model card.

    Attributes:
        draft: ``"proxy"`` reads the proxy's own drafts, ``"recorded"`` the LLM's, ``"none"`` only the question.
        tokens: Number of draft tokens to read, at least 1.
        folds: Number of folds of the cross-validation that measures and calibrates a probe; at least 2.
        seed: Seed of all random choices.
        label: Name of the label, its key in the data, such as ``"closed_book_correct"``.
        labelled_by: Source of the labels, for the model card; empty if they came with the data.
        llm: Name of the LLM whose answers were labelled.
        system: System message of the prompt for drafts and answers (probes only); None keeps the default.
        recipe: Hyperparameters of fine-tuning; when None, those of the gate's paper (`RECIPES`).
        resume: Whether to continue an interrupted fine-tuning run.

    Raises:
        ConfigurationError: ``draft`` is not one of `DraftKind`, or a number is out of range.
    """

    draft: DraftKind = "proxy"
    tokens: int = 32
    folds: int = 5
    seed: int = 0
    label: str = LABEL
    labelled_by: str = ""
    llm: str = "the LLM of the training data"
    system: str | None = None
    recipe: Recipe | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        valid_choice(self.draft, "draft", get_args(DraftKind))
        for name, least in {"tokens": 1, "folds": 2, "seed": 0}.items():
            valid_count(getattr(self, name), name, least=least, most=MAX_SEED)

    @property
    def prompt(self) -> PromptTemplate:
        """The prompt with which drafts are written."""
        return answer_prompt(self.system)

    @property
    def reads(self) -> dict[str, Any]:
        """The parameters ``tokens`` and ``source`` of the trained gate, which say what drafts it reads."""
        if self.draft == "none":
            return {"tokens": 0, "source": "proxy"}
        return {"tokens": self.tokens, "source": self.draft}

    def provenance(self, files: Sequence[DataFile], recipe: str, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the provenance of a trained gate, as JSON values.

        Args:
            files: The training data.
            recipe: How it was trained, in words or JSON.
            metrics: Metrics of the cross-validation; empty without one.
        """
        versions = {"python": platform.python_version()}
        for package in ("torch", "transformers", "peft", "scikit-learn", "numpy"):
            with suppress(PackageNotFoundError):  # a probe of the encoder needs no transformers
                versions[package] = version(package)
        return {
            "label": f"{self.label} of {self.labelled_by}" if self.labelled_by else self.label,
            "seed": self.seed,
            "folds": self.folds if metrics else 0,
            "recipe": recipe,
            "data": list(map(DataFile.as_provenance, files)),
            "metrics": metrics,
            "versions": versions,
            "licence": "that of the training data",
        }


def drafts_for(
    proxy: Proxy, questions: Sequence[Question], options: TrainingOptions, progress: Progress = no_progress
) -> list[Draft] | None:
    """Return one draft per question, or None if ``options.draft`` is ``"none"``.

    The proxy's drafts are cached, so a restarted run resumes. Recorded ones are cut to ``options.tokens``.

    Raises:
        DataFormatError: ``options.draft`` is ``"recorded"``, and a question has no recorded draft.
        EvidenceError: The proxy must write drafts, but cannot generate text.
        ServerError: The proxy failed to write a draft.
        NoAnswerError: The proxy was cut off while it was still thinking.
    """
    recorded = recorded_drafts(questions, options.draft)
    if options.draft == "none":
        return None
    if options.draft == "proxy":
        arm = ModelArm(language_model(proxy), tokens=options.tokens, prompt=options.prompt)
        answers = cached_answers("drafts", {"direct": arm}, questions, progress)
        return [drafts["direct"] for drafts in answers]
    drafts = []
    for draft in filter(None, recorded):
        head = proxy.truncate(draft.text, options.tokens)
        # `truncate` returns None for a draft that is short enough.
        drafts.append(Draft(text=(head or draft.text).strip(), source="recorded", finished=head is None))
    return drafts


# --- labels by a model's own answers -------------------------------------------------------------------------------

SampledLabel = Literal["accuracy", "certainty"]
"""``accuracy``: the share of samples that are right, which needs gold answers. ``certainty``: how much they agree."""

SELF_LABEL = "own_answer_correct"
"""Name of the label that is true if the most likely answer contains a gold answer."""

SAMPLES = 30
"""Number of sampled answers per question, at temperature 1, as in the KBM paper (section 2.2)."""


def needs_sampling(paths: Sequence[Path], label: str) -> bool:
    """Return whether answers must be sampled: ``label`` is a `SampledLabel`, and no line of the files has it yet."""
    records = chain.from_iterable(map(read_records, paths))
    return label in get_args(SampledLabel) and not any(label in record.fields for record in records)


def label_own_answers(
    paths: Sequence[Path],
    proxy: LanguageModel,
    label: str = SELF_LABEL,
    *,
    prompt: PromptTemplate = ANSWER,
    seed: int = 0,
    progress: Progress = no_progress,
) -> list[DataFile]:
    """Read questions, let a model answer them, label each by its answers, and return one `DataFile` per path.

    The answers are cached, so a restarted run resumes. Prompt, temperature and length of samples are those of the
    ``boundary`` gate.

    Args:
        paths: JSONL files, plain or gzipped, with ``question`` and, except for certainty, ``gold_answers``.
        proxy: The model whose knowledge is labelled.
        label: `SELF_LABEL`, or a `SampledLabel`.
        prompt: Prompt for the model's most likely answer, with `SELF_LABEL`.
        seed: Seed of the samples.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        DataFormatError: A file cannot be read or has no new question, or a line lacks a key; the message names the
            file.
        ServerError: The model could not answer a question.
        NoAnswerError: The model was cut off while it was still thinking.
    """
    questions = []
    for record in chain.from_iterable(map(read_records, paths)):
        question = Question.from_record(record)
        if not question.gold and label != "certainty":
            raise record.error(
                'gold_answers is missing: add it, or use label="certainty" (--label certainty, without --self-label)'
            )
        questions.append(question)
    if label == SELF_LABEL:
        answers = cached_answers("answers", {"direct": ModelArm(proxy, prompt=prompt)}, questions, progress)
    else:
        # The same settings as the boundary gate, which learns to predict these labels.
        arm = ModelArm(proxy, tokens=16, prompt=SHORT_ANSWER)
        answers = cached_answers("samples", sampling_arms(arm, SAMPLES, seed), questions, progress)
    targets = {}
    for question, drafts in zip(questions, answers, strict=True):
        texts = [draft.text for draft in drafts.values()]
        if label == "certainty":
            targets[question.text] = sampled_certainty(texts)
        else:
            # The accuracy label of the KBM paper, section 2.2: the share of samples that are right.
            targets[question.text] = sum(is_correct(text, question.gold) for text in texts) / len(texts)
    return read_examples(paths, label, targets)


def sampled_certainty(samples: Sequence[str]) -> float:
    """Return the certainty label: how much sampled answers agree, in [0, 1].

    It is `boundary.certainty` of the answers' counts (KBM paper, equations 1 and 2). It is 0 if each sample is empty,
    a refusal or a tool call.
    """
    try:
        texts = normalise_answers(samples)
    except NoAnswerError:
        return 0.0
    return certainty(list(Counter(texts).values()))


# --- training pairs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A prompt and the text that should continue it.

    Attributes:
        prompt: The template.
        values: Values of its fields.
        target: The text that the model should write.
        weight: Weight of the pair in the loss; a soft label becomes two pairs.
        ends: Whether the model also learns to end its answer after the target: with a line feed if the template
            stops at one, otherwise with the stop token. False for verdicts that are scored and never written.
    """

    prompt: PromptTemplate
    values: Mapping[str, str]
    target: str
    weight: float = 1.0
    ends: bool = True


_VERDICTS = {
    "ik": ("Yes", "No"),
    "slimplm": TARGETS,
    "boundary": ("known", "unknown"),
}
"""The verdicts that each gate learns to write for known and unknown questions."""

PROMPTS = {
    "ik": IK_QUESTION,
    "slimplm": JUDGMENT,
    "adapt": PARAMETRIC_PROMPT,
    "boundary": BOUNDARY_QUESTION,
}
"""The prompt of each gate that is trained by fine-tuning; ``ik`` has another one with a draft."""


def verdict_prompt(gate: str, drafted: bool) -> PromptTemplate:
    """Return the prompt with which a fine-tuned gate, such as ``"ik"``, gives its verdict.

    ``drafted`` says whether the gate reads drafts.
    """
    return IK_DRAFT if gate == "ik" and drafted else PROMPTS[gate]


def pairs_for(gate: str, example: Example, draft: Draft | None) -> list[Pair]:
    """Return the training pairs of a labelled question.

    The target is a verdict, and a soft label becomes two weighted pairs. ADAPT-LLM (section 3.1, algorithm 1) is
    different: if the LLM was right, the target is the first gold answer. If it was wrong, the target is ``<RET>``,
    and a question with a context gives a second pair, which has the context in the prompt and the first gold
    answer as the target.

    Args:
        gate: ``"ik"``, ``"slimplm"``, ``"adapt"`` or ``"boundary"``.
        example: The question.
        draft: Its draft, for gates that read drafts, or None.

    Raises:
        DataFormatError: ADAPT-LLM needs gold answers, and the question has none.
    """
    question = example.question
    values = {"question": question.text}
    if gate != "adapt":
        prompt = verdict_prompt(gate, draft is not None)
        if draft is not None:
            values["draft"] = draft.text
        # A hard label gives only one pair, because the other's weight is 0.
        verdicts = zip(_VERDICTS[gate], (example.target, 1 - example.target), strict=True)
        return [
            Pair(prompt, values, text, weight, gate == "slimplm") for text, weight in verdicts if weight > 0
        ]
    if not question.gold:
        raise DataFormatError(
            f"The question {question.text[:60]!r} has no gold_answers.",
            hint='Add "gold_answers": ["…"], because the adapt gate also learns to answer.',
        )
    if example.known:
        return [Pair(PARAMETRIC_PROMPT, values, question.gold[0])]
    pairs = [Pair(PARAMETRIC_PROMPT, values, RET)]
    if question.context:
        pairs.append(Pair(CONTEXT_PROMPT, {**values, "context": question.context}, question.gold[0]))
    return pairs


def rewriter_pairs(paths: Sequence[Path]) -> list[Pair]:
    """Read annotated claims (SlimPLM, section 3.3), and return the pairs that train the claim rewriter.

    Each line needs ``question`` and ``claims``, a list of objects with the text ``claim`` and, optionally, ``query``
    and ``needs_search``. ``closed_book_text``, the draft of the answer, is optional. Items without a claim are
    ignored. A line is left out if it has no claims, or if `parse_claims` could not read them back from the text that
    the rewriter should write.

    Raises:
        DataFormatError: A file cannot be read, a line lacks ``question`` or ``claims``, or a value has the
            wrong type; the message names the file and, for a line, its number.
    """
    pairs = []
    for path in paths:
        for record in read_records(path, hint='Each line needs "question" and "claims": [{"claim": "…"}].'):
            values = {"question": record.text("question"), "draft": record.optional_text("closed_book_text")}
            tagged = _print_claims(record)
            if tagged:
                pairs.append(Pair(REWRITE, values, tagged))
    return pairs


def _print_claims(record: Record) -> str:
    """Return the text that the rewriter should write: a record's claims, with their tags.

    The text is empty if ``claims`` holds no claim with text, or if `parse_claims` would not find all claims in it.

    Raises:
        DataFormatError: ``claims`` is missing or not a list of objects, or a value of a claim has the wrong type.
    """
    annotated = record.fields.get("claims")
    if not isinstance(annotated, list) or not all(isinstance(fields, dict) for fields in annotated):
        raise record.error("claims is missing or not a list of objects")
    claims = []
    for fields in annotated:
        annotation = Record(record.where, fields, record.hint)
        text, needs_search = annotation.optional_text("claim"), annotation.fields.get("needs_search")
        if text and not isinstance(needs_search, bool | None):
            raise record.error(
                f"needs_search of a claim must be true, false or null, not {needs_search!r:.60}"
            )
        query = annotation.optional_text("query") or text
        if text:
            claims.append(
                Claim(text=" ".join(text.split()), query=" ".join(query.split()), needs_search=needs_search)
            )
    printed = format_claims(claims)
    # A rewriter must not learn output that our own parser cannot read.
    return printed if len(parse_claims(printed)) == len(claims) else ""
