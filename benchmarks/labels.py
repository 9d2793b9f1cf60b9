"""Labelled requests from many sources for the heads of the default gate: who labelled what, under which licence.

``read_labels`` reads ``practical.dev.jsonl``, ``adaptive_llama31_8b.*.dev.jsonl`` and the files under ``more/``, and
adds the requests of `templates`. Every row says what it is good for:

- ``kind`` is empty where a source says nothing about the kind of request;
- ``known`` is NaN where nobody tried; it is k of n where an LLM was asked n times;
- ``group`` names source, data set and LLM, so that each has an intercept of its own: prompts and judges differ. It
  begins with ``selected`` where the source chose the share of right answers: such rows rank questions, their base
  rate says nothing.
"""

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from templates import LICENCE, template_requests

LLAMA = "Llama-3.1-8B-Instruct"
SETS = ("nq", "trivia", "squad", "hotpotqa", "musique", "2wikimultihopqa")

_KIND_OF = {
    "task": "no_knowledge",
    "common": "common_knowledge",
    "obscure": "obscure_knowledge",
    "private": "private",
    "fresh": "fresh",
    "language": "other_language",
}
_NEVER, _ALWAYS = 0.02, 0.98
"""P(known) of what no LLM of this size knows, and of what all know."""

NEAR = 0.85
"""Cosine of MiniLM from which on two questions count as one."""


@dataclass(frozen=True)
class Label:
    """One request, and what one source says about it.

    Attributes:
        question: The request.
        source: Short name of the source.
        licence: As the source states it.
        ships: Whether weights that are trained on it may ship.
        kind: Name of the kind, or empty.
        what: The finer kind of `practical.dev.jsonl` (task, common, obscure, private, fresh), the data set, or empty.
        known: P(the LLM answers rightly alone), or NaN.
        llm: The LLM of that label; empty if it holds for every LLM.
        group: See the module.
        weight: How much the row counts.
        cluster: Requests of one cluster ask (nearly) the same and share a fold; before `clustered`, the template.
    """

    question: str
    source: str
    licence: str
    ships: bool
    kind: str = ""
    what: str = ""
    known: float = math.nan
    llm: str = ""
    group: str = ""
    weight: float = 1.0
    cluster: int = -1


def read_labels(data: Path, everything: bool = False) -> list[Label]:
    """Read all sources: those that may ship, and practical requests of others, to test on.

    Args:
        data: The folder with the files.
        everything: Also the recorded answers that may not ship, to measure what they would bring.
    """
    labels = [*read_adarague(data), *_practical(data), *_templates(), *_wack(data), *_qa_eval(data)]
    if everything:
        labels += [*_faclens(data), *_sce(data)]
    return labels


def clustered(labels: list[Label], vectors: np.ndarray) -> list[Label]:
    """Put requests that ask nearly the same into one cluster: same text, same template, or near embeddings.

    Args:
        labels: The rows.
        vectors: MiniLM's embedding of each row's question, shape (n, d), normalised; not read of templates.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    pairs: list[tuple[int, int]] = []
    first: dict[str, int] = {}
    for row, label in enumerate(labels):
        template = f"template {label.cluster}" if label.source == "templates" else ""
        for name in filter(None, (_plain(label.question), template)):
            pairs.append((first.setdefault(name, row), row))
    recorded = np.array([i for i, label in enumerate(labels) if label.source != "templates"])
    for start in range(0, len(recorded), 1_000):
        some = recorded[start : start + 1_000]
        near = vectors[some] @ vectors[recorded].T >= NEAR
        pairs += [(int(some[a]), int(recorded[b])) for a, b in zip(*np.nonzero(near), strict=True)]
    left, right = np.array(pairs).T
    graph = coo_matrix((np.ones(len(pairs)), (left, right)), shape=(len(labels), len(labels)))
    _, clusters = connected_components(graph, directed=False)
    return [replace(label, cluster=int(c)) for label, c in zip(labels, clusters, strict=True)]


def read_adarague(data: Path) -> Iterator[Label]:
    """Read the six sets: questions, and whether an 8B LLM answered them rightly without retrieval."""
    for name in SETS:
        for record in _records(data / f"adaptive_llama31_8b.{name}.dev.jsonl"):
            known = float(record["closed_book_correct"])
            group = f"adarague:{name}:{LLAMA}"
            yield Label(
                record["question"].strip(), "adarague", "MIT", True, "knowledge", name, known, LLAMA, group
            )


def _practical(data: Path) -> Iterator[Label]:
    for record in _records(data / "practical.dev.jsonl"):
        ships = not record["licence"].startswith("none")
        yield _requested(record["question"], record["source"], record["licence"], ships, record["kind"], "")


def _templates() -> Iterator[Label]:
    for request in template_requests():
        label = _requested(request.question, "templates", LICENCE, True, request.kind, "")
        yield replace(label, cluster=request.template)


def _requested(question: str, source: str, licence: str, ships: bool, what: str, llm: str) -> Label:
    known = {"common": _ALWAYS, "obscure": _NEVER}.get(what, math.nan)
    group = f"{source}::" if not math.isnan(known) else ""
    return Label(question.strip(), source, licence, ships, _KIND_OF[what], what, known, llm, group)


def _wack(data: Path) -> Iterator[Label]:
    """Llama-3.1-8B, the base model, on TriviaQA; the rows of NQ hold right answers only, which teach nothing."""
    for record in _records(data / "more" / "wack_base_models.jsonl.gz"):
        soft, llm = record["closed_book_soft"], record["llm"]
        if (
            record["dataset"] == "triviaqa"
            and "Llama" in llm
            and soft is not None
            and record["overlap"] is None
        ):
            group = f"selected-wack:trivia:{llm}"
            label = Label(record["question"].strip(), "wack", "Apache-2.0", True, what="trivia")
            yield replace(label, known=float(soft), llm=llm, group=group)


def _qa_eval(data: Path) -> Iterator[Label]:
    for record in _records(data / "more" / "evouna_nq_triviaqa.jsonl.gz"):
        if record["overlap"] is None:
            name = "nq" if record["dataset"] == "nq" else "trivia"
            yield _recorded(
                record, "qa-eval", "Apache-2.0", True, name, f"qa-eval:{name}:{record['llm']}", 0.1
            )


def _faclens(data: Path) -> Iterator[Label]:
    for record in _records(data / "more" / "faclens_nq_eq.jsonl.gz"):
        if record["llm"].startswith("Llama-3") and record["overlap"] is None:
            group = f"faclens:{record['dataset']}:{record['llm']}"
            yield _recorded(record, "faclens", "none stated", False, record["dataset"], group, 0.2)


def _sce(data: Path) -> Iterator[Label]:
    for record in _records(data / "more" / "sce_triviaqa_sciq.jsonl.gz"):
        if record["llm"].startswith("Llama") and record["overlap"] is None:
            group = f"selected-sce:{record['dataset']}:{record['llm']}"
            yield _recorded(record, "sce", "none stated", False, record["dataset"], group, 0.2)


def _recorded(
    record: dict, source: str, licence: str, ships: bool, what: str, group: str, weight: float
) -> Label:
    known = float(record["closed_book_correct"])
    return Label(
        record["question"].strip(), source, licence, ships, "", what, known, record["llm"], group, weight
    )


def _records(path: Path) -> Iterable[dict]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in data.decode().split("\n"):
        if line:
            yield json.loads(line)


def _plain(question: str) -> str:
    """Return the words alone, for comparison."""
    return " ".join("".join(c if c.isalnum() else " " for c in question.casefold()).split())
