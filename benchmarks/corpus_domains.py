"""Corpora with passages and questions: domains of applications, and docstrings of installed packages."""

import ast
import importlib.util
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from base import read_records

from rgate_integrations import CorpusProfile
from rgate_integrations.corpus import profile as profile_module
from rgate_integrations.models.encoder import EncoderProxy

DOCSTRINGS, SEED = 1_000, 0


@dataclass(frozen=True)
class Domain:
    """Questions of one application, and passages of its corpus that do not answer them.

    Attributes:
        name: Short name.
        halves: Passages, and the questions that they judge.
    """

    name: str
    halves: tuple[tuple[list[str], list[str]], ...]

    @property
    def questions(self) -> list[str]:
        """The questions of all halves."""
        return [question for _, questions in self.halves for question in questions]


@dataclass(frozen=True)
class Judged:
    """How near questions are to a corpus, by its profile.

    Attributes:
        z: Standardised nearness of each question; see `SLOPE` of the package.
        named: Whether the question contains a name of the corpus.
    """

    z: np.ndarray
    named: np.ndarray

    def logits(self, slope: float, middle: float) -> np.ndarray:
        """Return the logits of P(covered)."""
        return slope * (self.z - middle) + profile_module.NAME_LOGIT * self.named

    def decide(self) -> np.ndarray:
        """Return whether the corpus covers each question, by the shipped constants."""
        return self.logits(profile_module.SLOPE, profile_module.MIDPOINT) >= 0


def read_domains(data: Path, docstring_count: int = DOCSTRINGS) -> list[Domain]:
    domains = []
    for name in ("health_plan", "medicine", "library_docs", "papers"):
        records = read_records(data / "domain" / f"{name}.dev.jsonl")
        questioned = [record for record in records if record["question"]]
        passages = [record["passage"] for record in records if record["passage"] and not record["question"]]
        if name == "library_docs":
            docstrings = read_docstrings("ray")
            passages = random.Random(SEED).sample(docstrings, docstring_count)
        if passages:
            domains.append(Domain(name, ((passages, [record["question"] for record in questioned]),)))
            continue
        random.Random(SEED).shuffle(questioned)
        halves = questioned[::2], questioned[1::2]
        domains.append(Domain(name, tuple(_judge_by(*order) for order in (halves, halves[::-1]))))
    return domains


def _judge_by(
    indexed: Sequence[dict[str, str]], judged: Sequence[dict[str, str]]
) -> tuple[list[str], list[str]]:
    return [record["passage"] for record in indexed], [record["question"] for record in judged]


def read_docstrings(package: str) -> list[str]:
    """Return the docstrings of an installed package, each prefixed with the function's or class's name."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"pip install {package}: its docstrings are a corpus.")
    docstrings: dict[str, None] = {}
    for file in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
        if {"tests", "test", "thirdparty_files", "_private", "_vendor"} & set(file.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 80:
                    docstrings[f"{node.name}: {text}"] = None
    return list(docstrings)


def judge(profile: CorpusProfile, questions: Sequence[str]) -> Judged:
    z = (profile.nearness(embed(questions)) - profile.baseline) / profile.margin
    return Judged(z, np.array([bool(profile.match_names(question)) for question in questions]))


_vectors: dict[str, np.ndarray] = {}


def embed(questions: Sequence[str]) -> np.ndarray:
    new = [question for question in dict.fromkeys(questions) if question not in _vectors]
    _vectors.update(zip(new, EncoderProxy().encoder.vectors(new, "query: "), strict=True))
    return np.stack([_vectors[question] for question in questions])
