"""The gates of four papers (IK score, SlimPLM, ADAPT-LLM, KBM), and two baselines that ask the proxy."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rgate_integrations.decision import DraftSource, Threshold
from rgate_integrations.errors import ConfigurationError, ScoreError, no_answer
from rgate_integrations.gates.base import GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.model_outputs import (
    CompletionSpec,
    DraftSpec,
    SamplesSpec,
    TargetsSpec,
)
from rgate_integrations.gates.probability import sigmoid
from rgate_integrations.gates.trained import AdapterGate
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.text import normalise_answers


class VerdictGate(AdapterGate):
    """A gate that asks the model for one of two verdicts, on the question or on a draft.

    P(known) is the first verdict's probability in a softmax over the log-probabilities of both.

    Attributes:
        verdicts: The two verdicts; the first one means known.
        question: The prompt that asks for the verdict, unless a subclass overrides `prompt`.
        tokens: Number of draft tokens to read; 0 for the question alone.
        source: Who writes the draft.
    """

    verdicts: ClassVar[tuple[str, str]] = ("Yes", "No")
    question: ClassVar[PromptTemplate]

    tokens: int = 0
    source: DraftSource = "proxy"

    @property
    def prompt(self) -> PromptTemplate:
        """The prompt that asks for the verdict."""
        return self.question

    @property
    def specs(self) -> Specs:
        """Specs of the draft, if one is read, and of the scores of the verdicts."""
        if not self.tokens:
            return (TargetsSpec(self.prompt, self.verdicts, adapter=self.adapter),)
        draft = DraftSpec(self.tokens, self.source)
        return (draft, TargetsSpec(self.prompt, self.verdicts, draft, self.adapter))

    def score(self, evidence: Evidence) -> Score:
        """Score by the softmax over the verdicts."""
        *drafts, targets = self.specs
        known, unknown = self.verdicts
        p = ik_score(*evidence[targets])
        draft = evidence[drafts[0]] if drafts else None
        reason = f"Asked for {known} or {unknown}, the model says {known} with probability {p:.2f}."
        return Score(p, reason, draft)


def ik_score(yes: float, no: float) -> float:
    """Return the probability of Yes in a softmax over the logits (or log-probabilities) of Yes and No.

    Args:
        yes: Logit or log-probability of "Yes".
        no: The same for "No".
    """
    return sigmoid(yes - no)


IK_QUESTION = PromptTemplate(
    name="ik-question",
    version=1,
    user="{question}\n\nDo you know the answer to this question? Reply Yes or No.",
)
IK_DRAFT = PromptTemplate(
    name="ik-draft",
    version=1,
    user=(
        "Question: {question}\nBeginning of an answer: {draft}\n\n"
        "Does the answer show that its author knows this? Reply Yes or No."
    ),
    cut="draft",
)


class IKGate(VerdictGate):
    """IK score (Déjean 2024, "Let your LLM generate a few tokens", sections 3.2 and 4.3).

    The model is asked whether it knows ("I know", IK), and P(known) is the probability of Yes against No. The paper
    trains the answering LLM with a LoRA adapter to make this judgment; without an adapter the score is zero-shot.

    Attributes:
        tokens: Number of draft tokens to read, 0 to 128; 0 for the question alone. The paper finds 32 or more best.
        source: Who writes the draft. In the paper, the answering LLM does (``"llm"``), which works by far the best.
        adapter: LoRA adapter of the proxy, or None for zero-shot.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "ik", "IK score (Déjean 2024)", "question + first draft tokens", "optional", "draft + judgment"
    )

    tokens: int = Field(default=32, ge=0, le=128)

    @property
    def prompt(self) -> PromptTemplate:
        """The prompt for the question and its draft or, if `tokens` is 0, for the question alone."""
        return IK_DRAFT if self.tokens else IK_QUESTION


JUDGMENT = PromptTemplate(
    name="slimplm-judgment",
    version=1,
    system=(
        "You are a helpful assistant. Your task is to parse user input into structured formats and accomplish "
        "the task according to the heuristic answer."
    ),
    user="Heuristic answer: {draft}\nQuestion: {question}\nRetrieval Necessity Judgment Output:",
    cut="draft",
)
"""The paper's prompt (section 3.2). If it is too long, the heuristic answer is truncated, never the question."""

TARGETS = ("Known(True)", "Known(False)")
_VERDICT = re.compile(r"^\s*Known\s*\(\s*(True|False)\s*\)")


class SlimPLMGate(VerdictGate):
    """SlimPLM's judgment model (Tan et al. 2024, section 3.2) on the question and its *heuristic answer*.

    Attributes:
        tokens: Maximum length of the heuristic answer, a draft, 1 to 1024 tokens.
        source: Who writes the heuristic answer; in the paper, a small proxy model does.
        adapter: LoRA adapter of the fine-tuned judgment model, or None for zero-shot.
        mode: ``"score"`` compares the log-probabilities of the two verdicts, which makes thresholds
            meaningful; ``"generate"`` lets the model write its verdict, as the paper does, and fails on other text.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "slimplm", "SlimPLM (Tan et al. 2024)", "question + heuristic answer", "optional", "draft + judgment"
    )

    verdicts = TARGETS
    question = JUDGMENT

    tokens: int = Field(default=64, ge=1, le=1024)
    mode: Literal["score", "generate"] = "score"

    @property
    def specs(self) -> Specs:
        """Specs of the heuristic answer and of the verdict on it."""
        if self.mode == "score":
            return super().specs
        draft = DraftSpec(self.tokens, self.source)
        return (draft, CompletionSpec(JUDGMENT, 12, draft, self.adapter))

    def score(self, evidence: Evidence) -> Score:
        """Score by the two verdicts' log-probabilities or, in mode ``"generate"``, by the one that the model writes.

        A written Known(True) scores 1, and a written Known(False) 0.

        Raises:
            ScoreError: In mode ``"generate"``, the model wrote neither verdict.
        """
        if self.mode == "score":
            return super().score(evidence)
        draft, written = self.specs
        text = evidence[written].text
        verdict = _VERDICT.match(text)
        if verdict is None:
            raise ScoreError(
                f"The model should have written Known(True) or Known(False), but wrote {text[:60]!r}.",
                hint='An untrained proxy rarely follows the format: use mode="score", or train an adapter.',
            )
        reason = f"The judgment model wrote Known({verdict[1]})."
        return Score(float(verdict[1] == "True"), reason, evidence[draft])


RET = "<RET>"
_ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n"
)

PARAMETRIC_PROMPT = PromptTemplate(
    name="adapt-parametric",
    version=1,
    user=_ALPACA
    + "answer the question Q. If you need help answer <RET> to get the context\n\n"
    + "### Input:\nQ: {question}\n\n### Response:\n",
    raw=True,
    stop_at_newline=True,
)
"""The paper's parametric prompt (appendix C.1)."""

CONTEXT_PROMPT = PromptTemplate(
    name="adapt-context",
    version=1,
    user=_ALPACA
    + "answer the question Q given the context C\n\n### Input:\nQ: {question}\n\nC: {context}\n\n### Response:\n",
    cut="context",
    raw=True,
    stop_at_newline=True,
)
"""The paper's context prompt (appendix C.2), used in training and to answer after retrieval."""


class AdaptGate(AdapterGate):
    """ADAPT-LLM's ``<RET>`` gate (Labruna et al. 2024, sections 3.1 and 3.2).

    The model writes ``<RET>`` to ask for context. P(known) is 0 if the model writes it, and otherwise one minus the
    probability of ``<RET>`` (on a server, of its first token). Any answer that the model writes instead is the
    decision's draft, so nothing is generated twice. The paper trains the model for this; without an adapter the score
    is zero-shot.

    Attributes:
        tokens: Maximum length of the answer, 1 to 1024 tokens.
        adapter: LoRA adapter trained with the paper's two prompts (without and with context), or None for zero-shot.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "adapt", "ADAPT-LLM (Labruna et al. 2024)", "P(<RET>) as the answer", "optional", "draft + judgment"
    )

    tokens: int = Field(default=32, ge=1, le=1024)

    @property
    def specs(self) -> Specs:
        """Specs of the probability of ``<RET>`` and of the model's own response."""
        return (
            TargetsSpec(PARAMETRIC_PROMPT, (RET,), adapter=self.adapter),
            CompletionSpec(PARAMETRIC_PROMPT, self.tokens, adapter=self.adapter),
        )

    def score(self, evidence: Evidence) -> Score:
        """Score by the probability of not asking for context.

        Raises:
            NoAnswerError: The model neither answers nor asks for context.
        """
        targets, response = self.specs
        answer = evidence[response]
        if RET in answer.text:
            return Score(0.0, "The model asked for context: it answered <RET>.")
        if answer.non_answer:
            raise no_answer(answer.non_answer, thinking=answer.is_cut_off, writer="proxy")
        p_ret = math.exp(evidence[targets][0])
        return Score(1 - p_ret, f"The model asks for context with probability {p_ret:.2g}.", answer)


NEED_SEARCH = PromptTemplate(
    name="need-search",
    version=1,
    system="You decide whether a question needs a search engine.",
    user="{question}\n\nDo you need to search for more information to answer this question? Reply Yes or No.",
)


class PromptGate(VerdictGate):
    """The prompt baseline of the Knowledge Boundary Model (section 3.2): the model says whether it must search.

    P(known) is the probability of No in a softmax over the Yes and No logits.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "prompt", "Knowledge Boundary Model's prompt baseline (2024)", "question", "no", "one pass"
    )

    verdicts = ("No", "Yes")
    question = NEED_SEARCH

    tokens: int = Field(default=0, ge=0, le=0)  # the prompt has no place for a draft


_ASK = "Question: {question}\nProposed answer: {draft}\nIs the proposed answer true or false?"

SELF_EVAL = PromptTemplate(
    name="self-eval",
    version=1,
    system="You check whether proposed answers are true or false.",
    user=_ASK,
    examples=(
        (
            _ASK.format(question="What is the capital of Italy?", draft="The capital of Italy is Rome."),
            "True",
        ),
        (
            _ASK.format(
                question="Who wrote War and Peace?", draft="War and Peace was written by Mark Twain."
            ),
            "False",
        ),
        (_ASK.format(question="how many legs does a spider have", draft="A spider has eight legs."), "True"),
        (
            _ASK.format(question="In which year did the Titanic sink?", draft="The Titanic sank in 1937."),
            "False",
        ),
    ),
    cut="draft",
)


class SelfEvalGate(VerdictGate):
    """Self-Eval: the model judges whether an answer is true (Kadavath et al. 2022; a SlimPLM baseline, section 4.3).

    Attributes:
        tokens: Maximum length of the answer that is evaluated, 1 to 1024 tokens.
        source: Who writes the answer.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "self_eval", "P(True) (Kadavath et al. 2022)", "question + own answer", "no", "draft + judgment"
    )

    verdicts = ("True", "False")
    question = SELF_EVAL

    tokens: int = Field(default=32, ge=1, le=1024)


BOUNDARY_QUESTION = PromptTemplate(
    name="boundary-question",
    version=1,
    user="{question}\n\nIs the answer to this question known to you? Reply known or unknown.",
)


def certainty(counts: Sequence[int]) -> float:
    """Return the certainty C = 1 - H / H_max of sampled answers (Knowledge Boundary Model, equations 1 and 2).

    H is the entropy of the distinct answers in bits. H_max is log2 of their number, so 15:15 is as uncertain as 30
    different answers.

    Args:
        counts: How often each distinct answer was given, each >= 1.

    Returns:
        Certainty in [0, 1]; 1 for a single distinct answer, where the formula is 0/0, or for none.

    Examples:
        >>> round(certainty([29, 1]), 3), round(certainty([28, 1, 1]), 3), certainty([15, 15])
        (0.789, 0.735, 0.0)
    """
    if len(counts) <= 1:
        return 1.0
    n = sum(counts)
    entropy = -sum(c / n * math.log2(c / n) for c in counts)
    # Clipped, because rounding may leave [0, 1].
    return min(max(1.0 - entropy / math.log2(len(counts)), 0.0), 1.0)


class BoundaryGate(AdapterGate):
    """Knowledge Boundary Model: scores by how certain, or how accurate, sampled answers are (sections 2.2 and 3.1).

    Without an adapter, ``label`` must be ``"certainty"``, and the score is the certainty of answers that are sampled
    on the spot. With an adapter, the model predicts the soft label from the question alone, in one pass. The accuracy
    label needs gold answers, which a new question lacks, so it needs an adapter.

    Attributes:
        threshold: The threshold; by default the paper's tau, 0.9.
        label: The soft label: ``"certainty"`` or ``"accuracy"`` of sampled answers.
        samples: Number of answers to sample, 2 to 200; 30 in the paper.
        temperature: Sampling temperature, above 0.
        tokens: Maximum length of a sampled answer, 1 to 256 tokens.
        seed: Seed of the sampling.
        adapter: LoRA adapter trained on soft labels, or None.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "boundary",
        "Knowledge Boundary Model (2024)",
        "sampled answers, or the question",
        "optional",
        "several samples",
    )
    argument = "label"

    threshold: Threshold = 0.9
    label: Literal["certainty", "accuracy"] = "certainty"
    samples: int = Field(default=30, ge=2, le=200)
    temperature: float = Field(default=1.0, gt=0)
    tokens: int = Field(default=16, ge=1, le=256)
    seed: int = 0

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if self.label == "accuracy" and self.adapter is None:
            raise ConfigurationError(
                "label='accuracy' needs an adapter: without one, the gate would need gold answers, which a new "
                "question lacks.",
                hint='Pass a trained adapter as adapter=, or use label="certainty".',
            )
        return self

    @property
    def specs(self) -> Specs:
        """The spec of the sampled answers or, with an adapter, of the trained model's verdict on the question."""
        if self.adapter is not None:
            return (TargetsSpec(BOUNDARY_QUESTION, ("known", "unknown"), adapter=self.adapter),)
        return (SamplesSpec(self.samples, self.temperature, self.tokens, self.seed),)

    def score(self, evidence: Evidence) -> Score:
        """Score by the certainty of the samples, or by the trained model.

        Raises:
            NoAnswerError: No sample is an answer.
        """
        (spec,) = self.specs
        if self.adapter is not None:
            p = ik_score(*evidence[spec])
            return Score(p, f"The boundary model predicts {self.label} {p:.2f}.")
        answers = evidence[spec]
        texts = normalise_answers([answer.text for answer in answers])
        counts = Counter(texts)
        p = certainty(list(counts.values()))
        most_frequent = answers[texts.index(counts.most_common(1)[0][0])]
        reason = f"{len(counts)} distinct answers in {len(answers)} samples: certainty {p:.2f}."
        return Score(p, reason, most_frequent)
