"""Gates under load: threads and event loops, callers who leave, models that fail, inputs that are none."""

from __future__ import annotations

import math
import random
from pathlib import Path

from rgate_integrations import Decision, load_gate
from rgate_integrations.errors import InvalidQuestionError
from tests.scripted_proxy import ScriptedProxy
from tests.soak.callers import has_left, in_threads, on_a_loop
from tests.soak.inputs import NO_QUESTIONS, PLAIN, question
from tests.soak.scenario import Scenario, expect

FAILS = "the model fails: "
LONG = "word " * 4_000  # read in many windows, several at once
NAMES = ["ik", "prompt", "slimplm", "token_probability"]


class Unrecorded(ScriptedProxy):
    """A scripted proxy that does not keep a list of its calls, which would grow for ever."""

    def _called(self, name, values):
        # Of a question of emojis alone nothing is left behind the colon.
        if any(each["question"].startswith(FAILS.rstrip()) for each in values):
            raise RuntimeError("scripted failure")


class ScriptedGates(Scenario):
    """Every decision must be the one that its question gets alone, whoever asks beside it."""

    name = "gates"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gates = {name: load_gate(name, proxy=Unrecorded()) for name in NAMES}
        self.alone = {name: load_gate(name, proxy=Unrecorded()) for name in NAMES}
        self.known: dict[tuple[str, str], Decision] = {}

    def step(self, chance: random.Random) -> None:
        name = chance.choice(NAMES)
        texts = [question(chance) for _ in range(chance.randint(1, 24))]
        for place in range(len(texts)):
            if chance.random() < 0.05:
                texts[place] = FAILS + texts[place]
        way = chance.choice([self._in_threads, self._on_a_loop, self._as_batch])
        for text, decision in way(self.gates[name], texts, chance):
            self._check(name, text, decision)

    def _check(self, name: str, text: str, decision: Decision) -> None:
        self.counts["decisions"] += 1
        if text.startswith(FAILS):
            failed = decision.retrieve and decision.error is not None
            expect(failed, "a failing model must retrieve:", decision)
            return
        if (name, text) not in self.known:
            self.known[name, text] = self.alone[name].decide(text)
        must = self.known[name, text]
        same = math.isclose(must.p_known, decision.p_known, abs_tol=1e-6)
        expect(same and must.retrieve == decision.retrieve, name, repr(text[:80]), must, decision)

    def _in_threads(self, gate, texts, chance):
        return list(zip(texts, in_threads(gate.decide, texts), strict=True))

    def _as_batch(self, gate, texts, chance):
        """Every second batch has an invalid question, which must not affect the others."""
        asked = list(texts)
        if chance.random() < 0.5:
            place = chance.randrange(len(asked) + 1)
            asked.insert(place, chance.choice(NO_QUESTIONS))
        decisions = gate.decide_batch(asked)
        if len(asked) > len(texts):
            self.counts["no questions"] += 1
            refused = decisions.pop(place)
            error = refused.error and refused.error.type
            expect(refused.retrieve and error == InvalidQuestionError.__name__, repr(asked[place]), refused)
        return list(zip(texts, decisions, strict=True))

    def _on_a_loop(self, gate, texts, chance):
        """Some callers leave before they have an answer; it must not reach anybody else."""
        results = on_a_loop(gate.adecide, texts, chance)
        self.counts["callers who left"] += sum(map(has_left, results))
        return [pair for pair in zip(texts, results, strict=True) if not has_left(pair[1])]


class RealGate(Scenario):
    """The default gate on its real model: the same decisions alone and in company, and finite ones for anything."""

    name = "real-gate"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = load_gate()
        self.alone: dict[str, Decision] = {}

    def step(self, chance: random.Random) -> None:
        if not self.alone:  # the first step
            # ONNX Runtime keeps what this took, 50 MiB: it is there before the process is first looked at.
            self._check(LONG, self.gate.decide(LONG))
        texts = chance.sample(PLAIN, chance.randint(1, 6))
        for text, decision in zip(texts, self.gate.decide_batch(texts), strict=True):
            self._check(text, decision)
        if chance.random() < 0.1:
            hostile = question(chance)
            decision = self.gate.decide(hostile)
            self.counts["hostile"] += 1
            expect(math.isfinite(decision.p_known), repr(hostile[:80]), decision)

    def _check(self, text: str, decision: Decision) -> None:
        self.counts["decisions"] += 1
        expect(decision.error is None, decision)
        must = self.alone.setdefault(text, decision)
        # A batch is computed in another order than a single question; a draft may differ in its last words.
        near = abs(must.p_known - must.threshold) < 0.05
        expect(near or must.retrieve == decision.retrieve, text, must.p_known, decision.p_known)
