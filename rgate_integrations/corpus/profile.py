"""`CorpusProfile`: what a corpus is about, made from its passages, saved in a folder of at most 1 MB."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field

from rgate_integrations.corpus.background import background, unit
from rgate_integrations.corpus.sampling import Sample, likeness, sample_texts
from rgate_integrations.corpus.searching import collect_passages
from rgate_integrations.corpus.terms import Terms, find_terms, tokenize
from rgate_integrations.decision import Frozen
from rgate_integrations.errors import ProfileError
from rgate_integrations.models.download import fetch_path
from rgate_integrations.models.encoder import ENCODER, FINGERPRINT, Encoder, shared_encoder
from rgate_integrations.runtime.arrays import Float32Array, Float64Array
from rgate_integrations.runtime.files import find_folder, json_text, read_file, write_folder
from rgate_integrations.runtime.segments import segments

FORMAT = 1
CONFIG, WEIGHTS = "profile.json", "profile.safetensors"
MOST = 1_500
"""How many passages are kept at most."""
NEAREST = 5
"""A question is as near to a corpus as the mean cosine to so many of its nearest passages."""
SLOPE, MIDDLE, NAMED = 9.3, 0.59, 6.0
"""The logit of P(covered) is ``SLOPE * (z - MIDDLE)``, and ``NAMED`` more if a question has a name of the corpus.

Here z is 0 for a question that is as near as requests that have nothing to do with the corpus, and 1 for one that is
as near as sentences of its own passages. Fitted by ``benchmarks/corpora.py``."""

_READ = 300  # characters of a passage that are embedded: more say the same
_LEFT_OUT, _SHORTEST, _LONGEST = 200, 20, 200
"""So many sentences of so many characters tell how near the corpus is to what it holds."""
_USUAL, _USUAL_COUNTS = 0.22, 10
"""How much nearer these usually are than other requests, and for how many sentences that counts."""
_LEAST, _GREATEST = 0.12, 0.4  # where passages have nothing in common, or are nearly all the same
_SETS_APART = 0.2
"""Length of the mean direction of passages that are about something: 0.05 of an encyclopaedia, 0.4 of four unlike
corpora in one."""
_MUCH_CHANGED = 0.7  # of its passages in common, and below, a corpus needs a new profile
_ENCODER = f"{ENCODER} {FINGERPRINT}"
_MAKE = "Make it again: rgate profile --corpus FILE.jsonl --out DIR"

Source: TypeAlias = Literal["texts", "retriever", "description"]


@dataclass(frozen=True, eq=False)
class CorpusProfile:
    """What a corpus is about. Immutable.

    Example:
        >>> from rgate_integrations import load_gate
        >>> handbook = CorpusProfile.from_texts(["Staff travel second class.", "Claims are paid in May."], "handbook")
        >>> load_gate(corpus=handbook).decide("When are claims paid?").corpus
        'handbook'

    Attributes:
        name: The corpus's name, as decisions give it.
        codes: Directions of a sample of its passages, shape (passages, 256), int8; their length says nothing.
        terms: Its telling words, the most telling first; and its names, such as identifiers and error codes.
        needless: How near it is to requests that have nothing to do with it: median over those that ship.
        own: How much nearer sentences of its passages are, when these are left out.
        source: What it was made from. A description tells less than passages.
        seen: How many passages were seen.
        sketch: What tells later whether the corpus has changed; see `is_outdated`.
    """

    name: str
    codes: np.ndarray[Any, np.dtype[np.int8]] = field(repr=False)
    terms: Terms = field(repr=False)
    needless: float = field(repr=False)
    own: float = field(repr=False)
    source: Source = "texts"
    seen: int = 0
    sketch: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def from_texts(cls, texts: Iterable[str], name: str = "corpus") -> Self:
        """Make a profile of the passages of a corpus: of at most 1,500 different ones, the others are passed over.

        Args:
            texts: The passages, in one pass; a document counts as several.
            name: Name of the corpus.

        Raises:
            ProfileError: There is no passage, or one is no text.
            ModelLoadError: The encoder is not downloaded.
        """
        return cls._from_sample(sample_texts(texts, MOST), name, "texts")

    @classmethod
    def from_retriever(
        cls, retriever: Any, name: str = "corpus", searches: int = 100, timeout: float = 120.0
    ) -> Self:
        """Make a profile of what searches find.

        Args:
            retriever: A retriever or vector store of LangChain or LlamaIndex, a `PassageIndex`, or a function from a
                query to texts.
            name: Name of the corpus.
            searches: How many searches it may take.
            timeout: How long they may take in all, in seconds.

        Raises:
            ConfigurationError: It cannot be searched.
            ProfileError: A search failed, or nothing was found in time.
            ModelLoadError: The encoder is not downloaded.
        """
        return cls._from_sample(
            sample_texts(collect_passages(retriever, searches, timeout), MOST), name, "retriever"
        )

    @classmethod
    def from_description(cls, text: str, name: str = "corpus") -> Self:
        """Make a profile of a description, where the passages are out of reach. It tells less than these.

        Args:
            text: What the corpus is about, in a sentence or a few.
            name: Name of the corpus.

        Raises:
            ProfileError: It says nothing.
            ModelLoadError: The encoder is not downloaded.
        """
        return cls._from_sample(sample_texts([text], MOST), name, "description")

    @classmethod
    def _from_sample(cls, sample: Sample, name: str, source: Source) -> Self:
        if not sample.texts:
            raise ProfileError(f"The corpus {name!r} has no passages.", hint="Is it empty, or its text?")
        encoder = corpus_encoder()
        compared = background().compare_passages(
            encoder.vectors([text[:_READ] for text in sample.texts], "passage: ")
        )
        largest = np.abs(compared).max(axis=1, keepdims=True)
        codes = np.round(compared / np.maximum(largest, 1e-12) * 127).astype(np.int8)
        vectors = unit(codes.astype(np.float32))
        needless = float(np.median(_nearness(background().requests @ vectors.T)))
        # A description has no sentence whose like may be asked for.
        own = _USUAL if source == "description" else _own_nearness(sample.texts, vectors, needless, encoder)
        terms = find_terms(sample.texts, encoder)
        return cls(name, codes, terms, needless, own, source, sample.seen, sample.sketch)

    def __repr__(self) -> str:
        return f"CorpusProfile({self.name!r}, {len(self.codes):,} of {self.seen:,} passages)"

    @cached_property
    def _vectors(self) -> Float32Array:
        return unit(self.codes.astype(np.float32))

    @cached_property
    def about_something(self) -> bool:
        """Whether anything sets it apart from what everything is about; an encyclopaedia has nothing."""
        return bool(np.linalg.norm(self._vectors.mean(axis=0)) >= _SETS_APART)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with all that it holds."""
        digest = hashlib.sha256(json_text(self._facts()).encode())
        digest.update(self.codes.tobytes())
        return digest.hexdigest()[:16]

    def nearness(self, vectors: Float32Array) -> Float64Array:
        """Return how near questions are to it: the mean cosine to the five nearest passages, shape (questions,).

        Args:
            vectors: The encoder's sentence vectors of the questions, shape (questions, 384).
        """
        return _nearness(background().compare_questions(vectors) @ self._vectors.T)

    def closeness(self, vectors: Float32Array) -> Float64Array:
        """Return what corpora are ranked by, shape (questions,): the nearness, less what anything is near to it.

        Half of that: a corpus about many things is nearer to all questions, also to its own.

        Args:
            vectors: The encoder's sentence vectors of the questions, shape (questions, 384).
        """
        return self.nearness(vectors) - self.needless / 2

    def p_covered(self, vectors: Float32Array, texts: Sequence[str]) -> Float64Array:
        """Return P(the corpus has something on it) of questions, shape (questions,), each in [0, 1].

        Args:
            vectors: The encoder's sentence vectors of the questions, shape (questions, 384).
            texts: The questions.
        """
        z = (self.nearness(vectors) - self.needless) / self.own
        named = np.array([bool(self.names_in(text)) for text in texts])
        logits = np.clip(SLOPE * (z - MIDDLE) + NAMED * named, -50, 50)
        found: Float64Array = 1 / (1 + np.exp(-logits))
        return found

    def judge(self, questions: Sequence[str]) -> Float64Array:
        """Read questions, and return P(the corpus has something on it) of each, shape (questions,).

        Raises:
            ModelLoadError: The encoder is not downloaded.
        """
        vectors = corpus_encoder().vectors(questions, "query: ")
        return self.p_covered(vectors, questions)

    def names_in(self, text: str) -> tuple[str, ...]:
        """Return its names that a question has, such as identifiers and error codes."""
        return tuple(dict.fromkeys(word for word in tokenize(text) if word in self.terms.names))

    def terms_in(self, text: str) -> tuple[str, ...]:
        """Return its names and telling words that a question has, the most telling first."""
        words = set(tokenize(text))
        telling = [word for word in self.terms.telling if word in words]
        return tuple(dict.fromkeys([*self.names_in(text), *telling]))

    def is_outdated(self, texts: Iterable[str]) -> bool:
        """Return whether a corpus has changed much since it was profiled: 30 % of its passages, or more.

        Args:
            texts: Its passages as they are now.
        """
        return likeness(self.sketch, sample_texts(texts, MOST).sketch) < _MUCH_CHANGED

    def save(self, folder: str | Path) -> Path:
        """Save into a folder, which appears whole or not at all, and replaces a profile that was there.

        Raises:
            ConfigurationError: A file, or a folder with something else in it, is there.
            WriteError: It could not be written.
        """
        from safetensors.numpy import save

        weights = save({"codes": np.ascontiguousarray(self.codes)})
        facts = {**self._facts(), "weights_sha256": hashlib.sha256(weights).hexdigest()}
        return write_folder(folder, {CONFIG: json_text(facts), WEIGHTS: weights})

    def _facts(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "encoder": _ENCODER,
            "name": self.name,
            "source": self.source,
            "seen": self.seen,
            "needless": self.needless,
            "own": self.own,
            "telling": list(self.terms.telling),
            "names": sorted(self.terms.names),
            "sketch": list(self.sketch),
        }

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load a profile.

        Args:
            folder: Where `save` put it.

        Raises:
            ProfileError: There is none, it is damaged, or it is of another encoder or format.
        """
        root = find_folder(folder)
        if not os.path.isfile(root / CONFIG):
            raise ProfileError(f"There is no profile in {str(folder)!r}.", hint=_MAKE)
        try:
            return cls._read(root)
        except ProfileError:
            raise
        except Exception as error:  # the folder may come from anywhere
            raise ProfileError(
                f"The profile in {str(folder)!r} cannot be read: {str(error).splitlines()[0]}.", hint=_MAKE
            ) from error

    @classmethod
    def _read(cls, root: Path) -> Self:
        from safetensors.numpy import load

        saved = _Saved.model_validate_json(read_file(root / CONFIG))
        for name, theirs, ours in (("format", saved.format, FORMAT), ("encoder", saved.encoder, _ENCODER)):
            if theirs != ours:
                raise ProfileError(
                    f"The profile in {str(root)!r} has the {name} {theirs!r}, not {ours!r}.", hint=_MAKE
                )
        weights = read_file(root / WEIGHTS)
        if saved.weights_sha256 != hashlib.sha256(weights).hexdigest():
            raise ValueError("its checksum is not the recorded one")
        codes = load(weights)["codes"]
        width = background().directions.shape[1]
        if codes.dtype != np.int8 or codes.ndim != 2 or codes.shape[1] != width or not len(codes):
            raise ValueError(f"its codes have the shape {codes.shape}")
        terms = Terms(saved.telling, frozenset(saved.names))
        return cls(
            saved.name, codes, terms, saved.needless, saved.own, saved.source, saved.seen, saved.sketch
        )


class _Saved(Frozen):
    """The JSON file of a profile."""

    format: int
    encoder: str
    name: str
    source: Source
    seen: int = Field(ge=0)
    needless: float = Field(ge=-1, le=1)
    own: float = Field(gt=0, le=2)
    telling: tuple[str, ...]
    names: tuple[str, ...]
    sketch: tuple[int, ...]
    weights_sha256: str


def _nearness(cosines: Float32Array, most: int = NEAREST) -> Float64Array:
    """Return the mean of each row's largest cosines, shape (rows,)."""
    count = min(most, cosines.shape[1])
    nearest: Float64Array = np.partition(cosines, -count, axis=1)[:, -count:].mean(axis=1, dtype=np.float64)
    return nearest


def _own_nearness(texts: Sequence[str], vectors: Float32Array, needless: float, encoder: Encoder) -> float:
    """Return how much nearer sentences of passages are to the other passages than requests that need nothing."""
    sentences: dict[int, str] = {}
    for row, text in enumerate(texts):
        fitting = [each for each in segments(text) if _SHORTEST <= len(each) <= _LONGEST]
        if fitting and len(sentences) < _LEFT_OUT:
            sentences[row] = fitting[len(text) % len(fitting)]  # any of them
    measured = 0.0
    if sentences and len(texts) > 1:
        asked = background().compare_questions(encoder.vectors(list(sentences.values()), "query: "))
        cosines = asked @ vectors.T
        cosines[np.arange(len(sentences)), list(sentences)] = -1.0
        near = _nearness(cosines, min(NEAREST, len(texts) - 1))
        measured = len(sentences) * (float(np.median(near)) - needless)
    else:
        sentences = {}
    own = (measured + _USUAL_COUNTS * _USUAL) / (len(sentences) + _USUAL_COUNTS)
    return min(max(own, _LEAST), _GREATEST)


def corpus_encoder() -> Encoder:
    """Return the encoder, shared in the process.

    Raises:
        ModelLoadError: It is not downloaded, or cannot be loaded.
    """
    return shared_encoder(fetch_path(ENCODER, "gate's model"))
