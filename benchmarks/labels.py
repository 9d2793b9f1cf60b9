"""Labelled requests for the heads of the default gate, from many sources, each with its licence.

``read_labels`` reads ``practical.dev.jsonl``, ``adaptive_llama31_8b.*.dev.jsonl`` and the files under ``more/`` and
``strong/``, and adds the requests of `templates`. In every row:

- ``kind`` is empty if the source does not label the kind of request;
- ``known`` is NaN if no LLM answered the question, and k/n if an LLM answered n times;
- ``group`` names source and data set, since prompts and judges differ;
- ``llm`` ends with ``(selected)`` if the source chose the share of right answers: such rows rank questions, but do
  not show how much the LLM knows.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from base import SETS, read_answers, read_records
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from templates import LICENCE, make_requests

LLAMA = "Llama-3.1-8B-Instruct"


@dataclass(frozen=True)
class Source:
    """A file of recorded closed-book answers.

    Attributes:
        path: Below the folder of data.
        name: Short name.
        licence: As its repository states it; it permits shipping weights that are trained on the data.
        soft: Whether several answers were sampled, so that the label is the share of right ones.
        selected: Whether the source chose the share of right answers.
    """

    path: str
    name: str
    licence: str
    soft: bool = False
    selected: bool = False


RECORDED = (
    Source("more/wack_base_models.jsonl.gz", "wack", "Apache-2.0", soft=True, selected=True),
    Source("more/evouna_nq_triviaqa.jsonl.gz", "qa-eval", "Apache-2.0"),
    Source("more/gemma2b_triviaqa.jsonl.gz", "gemma-2b", "Apache-2.0", soft=True),
    Source("more/simpleqa_czech.jsonl.gz", "simpleqa", "MIT"),
    Source("more/halueval_hotpot_llama31.jsonl.gz", "halueval", "MIT"),
    Source("strong/calib_nq_tqa_sciq_wikiqa.jsonl.gz", "calib", "MIT"),
    # Left out: BoolQ (half right by chance), TruthfulQA (misconceptions), RealTimeQA (news).
)

_SET_NAMES = {
    "triviaqa": "trivia",
    "simpleqa (asked in Czech)": "simpleqa",
    "hotpotqa (HaluEval)": "hotpotqa",
}
_LLM_NAMES = {
    "ChatGPT-3.5 (March 2023)": "ChatGPT-3.5",
    "Llama-3.1-8B-Instruct (Groq)": "Llama-3.1-8B-Instruct",
    "google-gemini-2-5-flash": "gemini-2.5-flash",
    "google-gemini-2-5-pro": "gemini-2.5-pro",
    "google-gemma-3-4b-it": "gemma-3-4b-it",
    "gpt-4o-2024-11-20": "gpt-4o",
    "gpt-4o-mini-2024-07-18": "gpt-4o-mini",
    "gpt-5-1": "gpt-5.1",
    "llama2-7b-chat": "Llama-2-7B-chat",
    "meta-llama-llama-3-1-8b-instruct": "Llama-3.1-8B-Instruct",
    "meta-llama-llama-3-3-70b-instruct": "Llama-3.3-70B-Instruct",
    "mistralai-mistral-7b-instruct-v0-3": "Mistral-7B-Instruct-v0.3",
    "qwen-qwen2-5-72b-instruct": "Qwen2.5-72B-Instruct",
    "qwen-qwen3-32b": "Qwen3-32B",
    "qwen-qwen3-8b": "Qwen3-8B",
}

KIND_OF = {
    "task": "no_knowledge",
    "common": "common_knowledge",
    "obscure": "obscure_knowledge",
    "private": "private",
    "fresh": "fresh",
    "language": "other_language",
    "knowledge": "knowledge",
    "given": "given",
}
"""The heads' names of the kinds, by the names in data and templates."""
_NEVER, _ALWAYS = 0.02, 0.98
"""P(known) of what no LLM of this size knows, and of what all of them know."""

NEAR = 0.955
"""Two questions count as the same from this cosine of their encoder vectors."""


@dataclass(frozen=True)
class Label:
    """One request with the labels of one source.

    Attributes:
        question: The request.
        source: Short name of the source.
        licence: As the source states it.
        ships: Whether weights that are trained on the row may ship.
        kind: Name of the kind, or empty.
        what: The finer kind of `practical.dev.jsonl` (task, common, obscure, private, fresh), the data set, or empty.
        known: P(the LLM answers rightly alone), or NaN.
        llm: The LLM that ``known`` is about; empty if it holds for every LLM.
        group: See the module.
        weight: How much the row counts.
        template: Index of its template; -1 without one.
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
    template: int = -1


TABLE_NAMES = {
    "ChatGPT-3.5": "gpt-3.5-turbo-0125",
    "GPT-4": "gpt-4-0613",
    "Gemma-2-27B-it": "gemma-2-27b-it",
    "Gemma-2-2B-it": "gemma-2-2b-it",
    "Gemma-2-9B-it": "gemma-2-9b-it",
    "Llama-3-70B (base)": "llama-3-70b (base)",
    "Llama-3-70B-Instruct": "llama-3-70b-instruct",
    "Llama-3-8B-Instruct": "llama-3-8b-instruct",
    "Llama-3.1-8B-Instruct": "llama-3.1-8b-instruct",
    "Llama-3.3-70B-Instruct": "llama-3.3-70b-instruct",
    "Phi-3.5-mini-instruct": "phi-3.5-mini-instruct",
    "Qwen2.5-72B-Instruct": "qwen-2.5-72b-instruct",
    "Qwen2.5-7B-Instruct": "qwen-2.5-7b-instruct",
    "Qwen3-32B": "qwen3-32b",
    "gpt-4o": "gpt-4o-2024-11-20",
    "gpt-4o-mini": "gpt-4o-mini-2024-07-18",
    "gpt-4t": "gpt-4-turbo-2024-04-09",
    "gpt-5.1": "gpt-5.1-2025-11-13",
}
"""LLMs that the tables of ``strong/`` spell differently."""
TABLE = Path(__file__).parents[1] / "rgate_integrations" / "weights" / "abilities.json"


def table_name(llm: str) -> str:
    """Return an LLM's name in the table of abilities, from its name in the labels."""
    return TABLE_NAMES.get(llm, llm.lower())


def read_abilities() -> dict[str, float]:
    """Return the shipped abilities by `table_name`."""
    return {name: line["theta"] for name, line in json.loads(TABLE.read_text(encoding="utf-8")).items()}


def read_labels(data: Path) -> list[Label]:
    """Read all sources that may ship, and other practical requests to test on."""
    return [*read_adarague(data), *read_practical(data), *read_template_labels(), *read_recorded(data)]


def read_recorded(data: Path) -> Iterator[Label]:
    """Read the recorded closed-book answers of many LLMs whose licence permits shipping.

    Leaves out questions that are close to one of the six sets, and the NQ rows of WACK, which are all right.
    """
    for source in RECORDED:
        for record in read_records(data / source.path):
            if record["overlap"] is None and (source.name, record["dataset"]) != ("wack", "nq"):
                yield from read_record(record, source)


def cluster_questions(labels: pd.DataFrame, vectors: np.ndarray) -> np.ndarray:
    """Cluster requests that ask nearly the same: same text, same template, or close vectors.

    Args:
        labels: The rows, with the columns of `Label`.
        vectors: The encoder's vector of each row's question, shape (n, d), normalised; unused for templates.

    Returns:
        The cluster of each row, shape (n,).
    """
    n = len(labels)
    # Nodes of the graph: the rows, then the texts, then the templates.
    texts, _ = labels.question.map(_strip_punctuation).factorize()
    templated = np.flatnonzero(labels.source == "templates")
    sources, targets = [np.arange(n), templated], [n + texts, 2 * n + labels.template.to_numpy()[templated]]
    recorded = np.flatnonzero(labels.source != "templates")
    for start in range(0, len(recorded), 1_000):
        batch = recorded[start : start + 1_000]
        row, other = np.nonzero(vectors[batch] @ vectors[recorded].T >= NEAR)
        sources.append(batch[row])
        targets.append(recorded[other])
    edges = np.concatenate(sources), np.concatenate(targets)
    size = 2 * n + labels.template.max() + 1
    graph = coo_matrix((np.ones(len(edges[0])), edges), shape=(size, size))
    _, clusters = connected_components(graph, directed=False)
    return clusters[:n]


def read_adarague(data: Path) -> Iterator[Label]:
    """Read the six sets: questions, and whether an 8B LLM's answer without retrieval is right."""
    for name in SETS:
        for record in read_answers(data, name):
            known = float(record["closed_book_correct"])
            question = record["question"].strip()
            yield Label(
                question, "adarague", "MIT", True, "knowledge", name, known, LLAMA, f"adarague:{name}"
            )


def read_practical(data: Path) -> Iterator[Label]:
    for record in read_records(data / "practical.dev.jsonl"):
        ships = not record["licence"].startswith("none")
        yield _label_request(record["question"], record["source"], record["licence"], ships, record["kind"])


def read_template_labels() -> Iterator[Label]:
    for request in make_requests():
        label = _label_request(request.question, "templates", LICENCE, True, request.kind)
        yield replace(label, template=request.template)


def _label_request(question: str, source: str, licence: str, ships: bool, what: str) -> Label:
    known = {"common": _ALWAYS, "obscure": _NEVER}.get(what, math.nan)
    group = f"{source}:" if not math.isnan(known) else ""
    return Label(question.strip(), source, licence, ships, KIND_OF[what], what, known, "", group)


def read_record(record: dict, source: Source) -> Iterator[Label]:
    """Yield the label of a recorded answer, if it was judged."""
    soft = record["closed_book_soft"] if source.soft else None
    known = record["closed_book_correct"] if soft is None else soft
    if known is None or (source.name == "wack" and soft is None):
        return
    name = _SET_NAMES.get(record["dataset"], record["dataset"])
    if record.get("label_quality") == "low":
        name += " (low quality)"
    llm = _LLM_NAMES.get(record["llm"], record["llm"])
    if source.selected:
        llm += " (selected)"
    label = Label(record["question"].strip(), source.name, source.licence, True, what=name)
    yield replace(label, known=float(known), llm=llm, group=f"{source.name}:{name}")


def _strip_punctuation(question: str) -> str:
    """Return the words in lower case, to compare texts."""
    return " ".join(re.sub(r"[\W_]+", " ", question.casefold()).split())
