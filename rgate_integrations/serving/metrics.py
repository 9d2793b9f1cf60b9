"""What Prometheus reads at ``/metrics``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rgate_integrations.artifacts.folder import read_gate
from rgate_integrations.decision import Decision
from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.records import Record
from rgate_integrations.tuning.evaluation import measure_drift

_LATEST = 2_000  # decisions that drift is measured on
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters of one server.

    Args:
        gate_folder: Folder of a tuned or calibrated gate, with whose calibration decisions are compared; empty for
            none.
    """

    def __init__(self, gate_folder: str = "") -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._decisions = Counter(
            "rgate_decisions", "Decisions made.", ["outcome", "kind", "gate"], registry=registry
        )
        self._errors = Counter(
            "rgate_errors", "Decisions and requests that failed.", ["type"], registry=registry
        )
        self._requests = Counter(
            "rgate_gateway_requests", "Chat completions, by what became of them.", ["way"], registry=registry
        )
        self._seconds = Histogram(
            "rgate_decision_seconds", "Time to decide.", buckets=_SECONDS, registry=registry
        )
        self._sizes = Histogram(
            "rgate_questions_per_call", "Questions decided together.", buckets=_SIZES, registry=registry
        )
        self.waiting = Gauge("rgate_waiting_questions", "Questions being decided.", registry=registry)
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self._calibration: tuple[tuple[float, ...], float] | None = None
        if gate_folder:
            self._calibration = _calibration(gate_folder)
        if self._calibration is not None:
            drift = Gauge(
                "rgate_drift_psi", "Population stability index against the calibration.", registry=registry
            )
            drift.set_function(self._drift)

    def decided(self, decisions: Sequence[Decision], seconds: float) -> None:
        """Count decisions that were made together."""
        self._seconds.observe(seconds)
        self._sizes.observe(len(decisions))
        for decision in decisions:
            outcome = "retrieve" if decision.retrieve else "direct"
            if decision.error is not None:
                outcome = "failed"
                self.failed(decision.error.type)
            else:
                self._latest.append(decision.p_known)
            # The default gate has a signal for each kind of request, and one for what the LLM knows.
            kinds = {name: p for name, p in decision.signals.items() if name != "known"}
            kind = max(kinds, key=lambda name: kinds[name], default="")
            self._decisions.labels(outcome, kind, decision.gate).inc()

    def passed(self, way: str) -> None:
        """Count a chat completion: ``retrieve``, ``direct``, ``shadow``, ``untouched``, or ``off`` as it asked."""
        self._requests.labels(way).inc()

    def failed(self, kind: str) -> None:
        """Count a failure by the name of its type."""
        self._errors.labels(kind).inc()

    def text(self) -> bytes:
        """Return all of it in Prometheus's text format."""
        return generate_latest(self._registry)

    def _drift(self) -> float:
        assert self._calibration is not None  # noqa: S101  registered only then
        scores, threshold = self._calibration
        try:
            return measure_drift(scores, list(self._latest), threshold).psi
        except DataFormatError:  # too few decisions yet
            return 0.0


def _calibration(folder: str) -> tuple[tuple[float, ...], float] | None:
    """Return the scores that a gate was calibrated on, and its threshold; None for a gate that was not."""
    saved = read_gate(folder)
    if "scores" not in saved.provenance:
        return None
    record = Record(f"the calibration of {folder!r}", 1, saved.provenance)
    return record.numbers("scores"), saved.threshold
