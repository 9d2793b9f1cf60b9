"""How much decisions with a profile depend on the two thresholds by which a segment asks nothing."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from base import print_table
from corpus_domains import SEED, Domain

from rgate_integrations import CorpusProfile, load_gate
from rgate_integrations.corpus import profile as profile_module
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.gates import corpus as gate_module
from rgate_integrations.gates.base import Score
from rgate_integrations.gates.corpus import CorpusGate
from rgate_integrations.gates.evidence.base import Evidence

SHIPPED = (gate_module.GIVEN_TEXT, gate_module.NOTHING_ASKED)
GRID = tuple(itertools.product((0.2, 0.3, 0.4, 0.5, 0.6), (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)))
SPLITS = 20
"""How often the requests that need nothing are split into halves: one chooses, the other measures."""


class GridGate(CorpusGate):
    """Decides by the shipped thresholds, and records in the signals what each pair of `GRID` would decide."""

    def score(self, evidence: Evidence) -> Score:
        """Return the score of `CorpusGate`; each signal is 1 if its pair retrieves, otherwise 0."""
        retrieves = {}
        for pair in GRID:
            with patch.multiple(gate_module, GIVEN_TEXT=pair[0], NOTHING_ASKED=pair[1]):
                score = super().score(evidence)
            threshold = self.threshold if score.threshold is None else score.threshold
            by_p = score.p_known < threshold
            retrieves[str(pair)] = float(by_p if score.override is None else score.override.retrieve)
        return replace(super().score(evidence), signals=retrieves)


def decide(engine: DecisionEngine, questions: Sequence[str]) -> np.ndarray:
    """Return whether each pair of `GRID` retrieves for each question, shape (questions, pairs)."""
    rows = []
    for decision in engine.decide_batch(questions):
        row = np.array([decision.signals[str(pair)] for pair in GRID])
        # The engine retrieves for some requests, such as truncated ones, whatever the gate says.
        rows.append(np.ones_like(row) if decision.retrieve > decision.signals[str(SHIPPED)] else row)
    return np.stack(rows)


def show_asking(
    domains: Sequence[Domain],
    profiles: Mapping[str, Sequence[CorpusProfile]],
    constants: Mapping[str, tuple[float, float]],
    needless: Mapping[str, Sequence[str]],
) -> None:
    """Print each domain's shares with the shipped thresholds, and with thresholds that were chosen without it."""
    alone = load_gate(on_error="raise")
    own, skipped = {}, {}
    for domain in domains:
        slope, middle = constants[domain.name]
        with patch.multiple(profile_module, SLOPE=slope, MIDPOINT=middle):
            parts = []
            for profile, (_, questions) in zip(profiles[domain.name], domain.halves, strict=True):
                gate = GridGate.from_parameters({"inner": alone.gate, "profiles": (profile,)})
                engine = alone.with_options(gate=gate)
                parts.append(decide(engine, questions))
            own[domain.name] = np.concatenate(parts)
            skipped[domain.name] = [1 - decide(engine, texts) for texts in needless.values()]
    rows = []
    for name in own:
        shipped = [shares.mean(axis=0)[GRID.index(SHIPPED)] for shares in (own[name], *skipped[name])]
        values = zip(shipped, choose_elsewhere(name, own, skipped), strict=True)
        rows.append([name, *(f"{100 * value:.1f}" for pair in values for value in pair)])
    columns = ("own questions retrieved", *(f"{name} skipped" for name in needless))
    titles = [f"{column}, {way}" for column in columns for way in ("shipped", "chosen elsewhere")]
    print_table(("corpus", *titles), rows)


def choose_elsewhere(
    name: str, own: Mapping[str, np.ndarray], skipped: Mapping[str, Sequence[np.ndarray]]
) -> list[float]:
    """Return a domain's shares with the pair that is best on the other domains, and on other needless requests."""
    others = [other for other in own if other != name]
    retrieved = np.mean([own[other].mean(axis=0) for other in others], axis=0)
    generator = np.random.default_rng(SEED)
    shares = []
    for _ in range(SPLITS):
        halves = [np.array_split(generator.permutation(len(part)), 2) for part in skipped[name]]
        for chooses, measures in ((0, 1), (1, 0)):
            kept = [
                skipped[other][part][half[chooses]].mean(axis=0)
                for other in others
                for part, half in enumerate(halves)
            ]
            best = int(np.argmax(retrieved + np.mean(kept, axis=0)))
            tested = [
                part[half[measures]].mean(axis=0)[best]
                for part, half in zip(skipped[name], halves, strict=True)
            ]
            shares.append([own[name].mean(axis=0)[best], *tested])
    return list(np.mean(shares, axis=0))
