"""What the papers' gates share: a LoRA adapter, and a verdict by the odds of two targets; and two baselines."""

from __future__ import annotations

import math
import os
from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr

from rgate_integrations.decision import DraftSource
from rgate_integrations.gates.artifacts.folder import CONFIG, read_gate
from rgate_integrations.gates.artifacts.gate_file import SavedGate
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence, EvidenceSpec
from rgate_integrations.gates.evidence.draft import DraftSpec
from rgate_integrations.gates.evidence.model_outputs import TargetsSpec
from rgate_integrations.gates.trained import check_model
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.files import existing_folder


class AdapterGate(Gate):
    """A gate whose model may have an adapter.

    Attributes:
        adapter: Folder or Hub id of a LoRA adapter of the proxy, or None for zero-shot. What ``rgate train`` made
            says on which model, and a decision on another one fails.
    """

    adapter: str | None = None

    _saved: SavedGate | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Read once what the adapter was trained on; one from elsewhere does not say it."""
        if self.adapter is not None:
            folder = existing_folder(self.adapter)
            self._saved = read_gate(folder) if os.path.isfile(folder / CONFIG) else None

    def changed(self, **parameters: Any) -> Self:
        """Return a copy with other parameters; what the same adapter was trained on is known already."""
        copy = super().changed(**parameters)
        if copy.adapter == self.adapter:
            copy._saved = self._saved
        return copy

    def check_model(self, evidence: Evidence, spec: EvidenceSpec[Any]) -> tuple[str, ...]:
        """Check that a piece was computed with the model that the adapter was trained on; returns warnings.

        Raises:
            ModelLoadError: It was another model.
        """
        saved = self._saved
        if self.adapter is None or saved is None:
            return ()
        return check_model(self.adapter, saved.base_model, saved.fingerprint, evidence.made_by(spec))


class VerdictGate(AdapterGate):
    """A gate that asks the model for one of two verdicts, on the question or on a draft of an answer to it.

    P(known) is the softmax over the log-probabilities of the two, taken at the first.

    Attributes:
        verdicts: The two, the one for known first.
        question: What the model is asked, unless `prompt` says something else.
        tokens: Draft tokens that are read; 0 for the question alone.
        source: Who writes the draft.
    """

    verdicts: ClassVar[tuple[str, str]] = ("Yes", "No")
    question: ClassVar[PromptTemplate]

    tokens: int = 0
    source: DraftSource = "proxy"

    @property
    def prompt(self) -> PromptTemplate:
        """What the model is asked."""
        return self.question

    @property
    def specs(self) -> Specs:
        """The draft, if one is read, and the scores of the verdicts behind it."""
        draft = DraftSpec(self.tokens, self.source) if self.tokens else None
        targets = TargetsSpec(self.prompt, self.verdicts, draft, self.adapter)
        return (targets,) if draft is None else (draft, targets)

    def score(self, evidence: Evidence) -> Score:
        """Score by the softmax over the verdicts."""
        *drafts, targets = self.specs
        warnings = self.check_model(evidence, targets)
        p = ik_score(*evidence[targets])
        draft = evidence[drafts[0]] if drafts else None
        known, unknown = self.verdicts
        return Score(
            p, f"Asked for {known} or {unknown}, the model says {known} with {p:.2f}.", draft, warnings
        )


def ik_score(yes: float, no: float) -> float:
    """Return the softmax over the two logits (or log-probabilities) of Yes and No, taken at Yes.

    Args:
        yes: Logit of "Yes".
        no: Logit of "No".
    """
    difference = no - yes
    return 0.0 if difference > 700 else 1.0 / (1.0 + math.exp(difference))  # NaN stays NaN


NEED_SEARCH = PromptTemplate(
    name="need-search",
    version=1,
    system="You decide whether a question needs a search engine.",
    user="{question}\n\nDo you need to search for more information to answer this question? Reply Yes or No.",
)


class PromptGate(VerdictGate):
    """The prompt baseline of the Knowledge Boundary Model (section 3.2): the model says whether it must search.

    P(known) is the softmax over the Yes and No logits, taken at No.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "prompt", "KBM's prompt baseline (2024)", "question", "no", "one pass"
    )

    verdicts = ("No", "Yes")
    question = NEED_SEARCH


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
    """Self-Eval, P(True) (Kadavath et al. 2022; a baseline of SlimPLM, section 4.3).

    Attributes:
        tokens: Maximum length of the answer that is evaluated.
        source: Who writes it.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "self_eval", "P(True) (Kadavath et al. 2022)", "question + own answer", "no", "draft + judgment"
    )

    verdicts = ("True", "False")
    question = SELF_EVAL

    tokens: int = Field(default=32, ge=1, le=1024)
