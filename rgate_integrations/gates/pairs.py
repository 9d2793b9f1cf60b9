"""Which gates belong together under answer first: one reads the question, the other judges begun answers."""

from __future__ import annotations

import os
from pathlib import Path

from rgate_integrations.gates.answer import AnswerGate
from rgate_integrations.gates.artifacts.folder import CONFIG, saved_folder
from rgate_integrations.gates.artifacts.tuned import ANSWER_FIRST
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.constant import ConstantGate
from rgate_integrations.gates.evidence.base import expand_specs
from rgate_integrations.gates.evidence.draft import DraftSpec
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.gates.registry import make_gate
from rgate_integrations.gates.remote import RemoteGate
from rgate_integrations.gates.tuned import TunedGate


def answer_gate_of(gate: Gate) -> Gate | None:
    """Return the gate that judges begun answers: this one, if it reads them, or else the one that belongs to it.

    Returns:
        The gate; None where there is none, since this one reads the question alone.
    """
    # A constant reads nothing: it is as good a baseline for begun answers as for questions. A server has both gates.
    if _reads_answers(gate) or isinstance(gate, ConstantGate | RemoteGate):
        return gate
    if isinstance(gate, HeadsGate):
        begun = AnswerGate(question=gate, proxy=gate.proxy)
        # Each has a threshold of its own, but one that the caller chose holds for both.
        return begun if gate.threshold == gate.trained.threshold else begun.changed(threshold=gate.threshold)
    if isinstance(gate, TunedGate):
        folder = saved_folder(gate.artifact).resolve() / ANSWER_FIRST
        return _gate_in(folder, gate.proxy)
    return None


def question_gate_of(gate: Gate) -> Gate | None:
    """Return the gate of the same family that reads the question alone; None where there is none."""
    if isinstance(gate, AnswerGate):
        return gate.question
    if isinstance(gate, TunedGate) and _reads_answers(gate):
        return _gate_in(saved_folder(gate.artifact).resolve().parent, gate.proxy)
    return gate if isinstance(gate, HeadsGate | TunedGate | RemoteGate) else None


def _reads_answers(gate: Gate) -> bool:
    return any(isinstance(spec, DraftSpec) and spec.tokens > 0 for spec in expand_specs(gate.specs))


def _gate_in(folder: Path, proxy: str) -> Gate | None:
    return make_gate(str(folder), proxy=proxy) if os.path.isfile(folder / CONFIG) else None
