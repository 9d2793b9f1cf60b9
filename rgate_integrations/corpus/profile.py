"""`CorpusProfile`: what a corpus is about, made from passages or a description; saved in at most 1 MB."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter

from rgate_integrations.corpus.pieces import drop_shared_beginning, embed_pieces, is_prose
from rgate_integrations.corpus.sampling import Sample, collect_passages, sample_texts
from rgate_integrations.corpus.terms import Terms, find_terms, tokenize
from rgate_integrations.errors import ConfigurationError, ProfileError, WriteError
from rgate_integrations.models.encoder import ENCODER, FINGERPRINT, Encoder, EncoderProxy
from rgate_integrations.runtime import files
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array, PositionArray, unit
from rgate_integrations.runtime.records import first_problem
from rgate_integrations.runtime.segments import segments
from rgate_integrations.runtime.text import encodable, logger
from rgate_integrations.runtime.threads import cached_property

FORMAT = 1
CONFIG, WEIGHTS = "profile.json", "profile.safetensors"
FOLDER = "profile"
"""Name of the folder in an index's folder in which the index's profile is cached."""
MAX_PASSAGES = 1_500
"""Maximum number of passages that a profile keeps, and of their pieces."""
NEIGHBOURS = 5
"""A question's nearness to a corpus is its mean cosine to this many nearest passages."""
SLOPE, MIDPOINT, NAME_LOGIT = 9.4, 0.59, 6.0
"""Logit of P(covered): ``SLOPE * (z - MIDPOINT)``, plus ``NAME_LOGIT`` if the question has a name from the corpus.

z is the question's nearness, scaled: 0 at that of unrelated requests, 1 at that of the corpus's own sentences.
Fitted by ``benchmarks/corpora.py``."""
NAME_CLOSENESS, TERM_CLOSENESS = 0.2, 0.02
"""What a name from the corpus adds to `CorpusProfile.closeness`, and what its telling words do: the latter times the
natural log of one plus their number."""


_MAX_SENTENCES = 200  # to measure `CorpusProfile.margin`
_MIN_COPY = 0.85
"""Minimum cosine of passages of which only one is measured, because near copies are nearer than any question."""
_PRIOR_MARGIN, _PRIOR_SENTENCES = 0.22, 10
"""The margin before any measurement, and the number of measured sentences that it counts as in the average."""
# The margin is clipped: otherwise a corpus of unrelated passages would cover everything, and one of near
# duplicates nothing.
_MIN_MARGIN, _MAX_MARGIN = 0.12, 0.4
_MIN_COMMON = 0.2
"""Minimum length of the mean of a corpus's vectors for `is_specific`: an encyclopaedia has 0.05, four unlike
corpora together have 0.4."""
_MIN_OVERLAP = 0.7  # with a smaller overlap of passages, a corpus needs a new profile
_ENCODER = f"{ENCODER} {FINGERPRINT}"
BACKGROUND_FILE = Path(__file__).with_name("background.npz")
_MAKE_AGAIN = "Make a new profile with rgate profile --corpus FILE.jsonl --out DIR."

Source: TypeAlias = Literal["texts", "retriever", "description"]


@dataclass(frozen=True, eq=False)
class CorpusProfile:
    """What a corpus is about. Immutable.

    Examples:
        >>> from rgate_integrations import load_gate
        >>> handbook = CorpusProfile.from_texts(["Staff travel second class.", "Claims are paid in May."], "handbook")
        >>> load_gate(corpus=handbook).decide("When are claims paid?").corpus
        'handbook'

    Attributes:
        name: The corpus's name in decisions.
        codes: Vectors of pieces of a sample of the corpus's passages, shape (pieces, 256), int8, not normalised.
        terms: Its telling words, far more frequent in it than elsewhere, and its names, such as error codes.
        baseline: Median `nearness` of unrelated requests, which ship with the package.
        margin: By how much the `nearness` of the corpus's own sentences to its other passages exceeds ``baseline``.
            It is the median over sentences of unlike passages, averaged with the value 0.22 (which weighs as much as
            10 sentences), and clipped to [0.12, 0.4]. Without such sentences, as for a description, it is 0.22.
        source: What the profile was made from. A description gives a weaker profile than passages.
        seen: Number of passages read, with repetitions.
        sketch: Hashes by which `is_outdated` compares the corpus with a later state.

    Raises:
        ConfigurationError: The name is not text, is empty, or has lone surrogates.
    """

    # The bounds are only checked in `load`, because a saved profile may come from anywhere.
    __pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    name: str
    codes: np.ndarray[Any, np.dtype[np.int8]] = field(repr=False)
    terms: Terms = field(repr=False)
    baseline: Annotated[float, Field(ge=-1, le=1)] = field(repr=False)
    margin: Annotated[float, Field(gt=0, le=2)] = field(repr=False)
    source: Source = "texts"
    seen: Annotated[int, Field(ge=0)] = 0
    sketch: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or self.name != encodable(self.name):
            raise ConfigurationError(
                f"The name of a corpus must be text that is not empty and that UTF-8 can encode, not {self.name!r}.",
                hint='For example, name="handbook".',
            )

    @classmethod
    def from_texts(cls, texts: Iterable[str], name: str = "corpus") -> Self:
        """Make a profile of a corpus from a sample of at most 1,500 different passages.

        Args:
            texts: The passages, read once; texts over 2,000 characters are split. Only the first 300 characters of
                each tell what it is about, or up to 1,200 of each of a few hundred; what most begin with, such as a
                header, is ignored. Remove HTML tags first: with them, fewer questions count as covered.
            name: Name of the corpus.

        Raises:
            ConfigurationError: The name is not text.
            ProfileError: There are no passages, or one is not a string, or ``texts`` is one string or a mapping.
            ModelLoadError: The encoder is missing and may not be downloaded here, or cannot be loaded.
            DownloadError: The encoder could not be downloaded.
        """
        return cls._from_sample(sample_texts(texts, MAX_PASSAGES), name, "texts")

    @classmethod
    def from_retriever(
        cls, retriever: Any, name: str = "corpus", searches: int = 100, timeout: float | None = 120.0
    ) -> Self:
        """Make a profile of a corpus from what searches find in it.

        Args:
            retriever: A retriever of LangChain or LlamaIndex, a vector store of LangChain, an index of
                LlamaIndex, a `PassageIndex`, or a function from a query to texts. Stores, indexes and their
                retrievers are asked for ten passages a search; other retrievers decide themselves how many they
                return. A guarded retriever is searched without its gate.
            name: Name of the corpus.
            searches: Maximum number of searches.
            timeout: Maximum time of all searches, in seconds; None sets no limit.

        Raises:
            ConfigurationError: The retriever cannot be searched, ``searches`` is below 1, ``timeout`` is not above 0,
                or the name is not text.
            ProfileError: A search failed, its results have no text, or no search found anything in time.
            ModelLoadError: The encoder is missing and may not be downloaded here, or cannot be loaded.
            DownloadError: The encoder could not be downloaded.
        """
        return cls._from_sample(
            sample_texts(collect_passages(retriever, searches, timeout), MAX_PASSAGES), name, "retriever"
        )

    @classmethod
    def from_description(cls, text: str, name: str = "corpus") -> Self:
        """Make a weaker profile from a description, for when the passages are not available.

        Args:
            text: What the corpus is about, in one or a few sentences.
            name: Name of the corpus.

        Raises:
            ConfigurationError: The name is not text.
            ProfileError: The description is blank, or not a string.
            ModelLoadError: The encoder is missing and may not be downloaded here, or cannot be loaded.
            DownloadError: The encoder could not be downloaded.
        """
        return cls._from_sample(sample_texts([text], MAX_PASSAGES), name, "description")

    @classmethod
    def _from_sample(cls, sample: Sample, name: str, source: Source) -> Self:
        if not sample.texts:
            raise ProfileError(
                f"The corpus {name!r} has no passages.",
                hint="Pass texts that are not blank, or a retriever that finds passages with text.",
            )
        encoder = EncoderProxy().encoder
        texts = drop_shared_beginning(sample.texts)
        projected, owners = embed_pieces(
            texts,
            MAX_PASSAGES,
            lambda pieces: background().project_passages(encoder.vectors(pieces, "passage: ")),
        )
        largest = np.abs(projected).max(axis=1, keepdims=True)
        codes = np.round(projected / np.maximum(largest, 1e-12) * 127).astype(np.int8)
        vectors = unit(codes.astype(np.float32))
        baseline = float(np.median(_mean_of_nearest(background().requests @ vectors.T)))
        # A description's sentences are unlike users' questions, so they cannot measure the margin.
        measured = () if source == "description" else texts
        margin = _measure_margin(measured, vectors, owners, baseline, encoder)
        return cls(
            name,
            codes,
            find_terms(sample.texts, encoder),
            baseline,
            margin,
            source,
            sample.seen,
            sample.sketch,
        )

    @cached_property
    def _vectors(self) -> Float32Array:
        return unit(self.codes.astype(np.float32))

    @cached_property
    def is_specific(self) -> bool:
        """Whether the corpus is about one or a few subjects, unlike an encyclopaedia."""
        return bool(np.linalg.norm(self._vectors.mean(axis=0)) >= _MIN_COMMON)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the profile's content."""
        digest = hashlib.sha256(files.json_text(self._facts()).encode())
        digest.update(self.codes.tobytes())
        return digest.hexdigest()[:16]

    def nearness(self, vectors: Float32Array) -> Float64Array:
        """Return each question's mean cosine to its five nearest passages, in [-1, 1], shape (questions,).

        Args:
            vectors: The encoder's sentence vectors of the questions, shape (questions, 384).
        """
        return _mean_of_nearest(background().project_questions(vectors) @ self._vectors.T)

    def closeness(self, vectors: Float32Array, texts: Sequence[str]) -> Float64Array:
        """Return the score by which corpora are ranked, shape (questions,).

        It is `nearness` minus half of ``baseline``, plus a little for a name from the corpus and for its telling
        words. A corpus about many things is nearer to every question, but also answers more of them. So only half
        is subtracted.

        Args:
            vectors: The encoder's sentence vectors of the questions, shape (questions, 384).
            texts: The questions.
        """
        terms = np.array([len(self.match_terms(text)) for text in texts])
        worded = NAME_CLOSENESS * self._is_named(texts) + TERM_CLOSENESS * np.log1p(terms)
        return self.nearness(vectors) - self.baseline / 2 + worded

    def p_covered(self, vectors: Float32Array, texts: Sequence[str]) -> Float64Array:
        """Return the probability, in [0, 1], that the corpus covers each question, shape (questions,).

        Args:
            vectors: The encoder's sentence vectors of the questions, shape (questions, 384).
            texts: The questions.
        """
        z = (self.nearness(vectors) - self.baseline) / self.margin
        logits = np.clip(SLOPE * (z - MIDPOINT) + NAME_LOGIT * self._is_named(texts), -50, 50)
        return 1 / (1 + np.exp(-logits))

    def _is_named(self, texts: Sequence[str]) -> BoolArray:
        """Return whether each question contains a name from the corpus, shape (questions,)."""
        return np.array([bool(self.match_names(text)) for text in texts])

    def judge(self, questions: str | Sequence[str]) -> Float64Array:
        """Return `p_covered` of one or several questions, shape (questions,), after embedding them.

        Raises:
            ModelLoadError: The encoder is missing and may not be downloaded here, or cannot be loaded.
            DownloadError: The encoder could not be downloaded.
        """
        texts = [questions] if isinstance(questions, str) else questions
        return self.p_covered(EncoderProxy().encoder.vectors(texts, "query: "), texts)

    def match_names(self, text: str) -> tuple[str, ...]:
        """Return the corpus's names, such as products and error codes, that a question contains, in lower case.

        A compound such as ``E-41-Meldung`` contains ``e-41``.
        """
        parts = ((word, word.rpartition("-")[0], word.partition("-")[2]) for word in tokenize(text))
        return tuple(dict.fromkeys(part for part in chain.from_iterable(parts) if part in self.terms.names))

    def match_terms(self, text: str) -> tuple[str, ...]:
        """Return the words of a question that characterise the corpus, in lower case.

        First come the corpus's names, then its telling words, the most telling first. Telling words are far more
        frequent in the corpus than elsewhere.
        """
        words = set(tokenize(text))
        telling = [word for word in self.terms.telling if word in words]
        return tuple(dict.fromkeys([*self.match_names(text), *telling]))

    def is_outdated(self, texts: Iterable[str]) -> bool:
        """Return whether the corpus has changed so much that it needs a new profile.

        That is so if more than about 30 % of all passages, old and current, were added or removed.

        Args:
            texts: The corpus's current passages.

        Raises:
            ProfileError: A passage is not a string.
        """
        ours, theirs = {*self.sketch}, {*sample_texts(texts, MAX_PASSAGES).sketch}
        # The smallest hashes of both together are a sample of all passages (MinHash).
        smallest = sorted(ours | theirs)[: max(len(ours), len(theirs))]
        return len(ours & theirs & {*smallest}) < _MIN_OVERLAP * len(smallest)

    def save(self, folder: str | Path) -> Path:
        """Save into a folder atomically, replacing an earlier profile, and return the folder.

        Raises:
            ConfigurationError: The path cannot name a folder, or is a file or a folder with other content.
            WriteError: The profile could not be written.
        """
        from safetensors.numpy import save

        weights = save({"codes": np.ascontiguousarray(self.codes)})
        facts = self._facts() | {"weights_sha256": hashlib.sha256(weights).hexdigest()}
        return files.write_folder(folder, {CONFIG: files.json_text(facts), WEIGHTS: weights})

    def _facts(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "encoder": _ENCODER,
            "name": self.name,
            "source": self.source,
            "seen": self.seen,
            "baseline": self.baseline,
            "margin": self.margin,
            "telling": list(self.terms.telling),
            "names": sorted(self.terms.names),
            "sketch": list(self.sketch),
        }

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load a profile that `save` wrote. Another process may replace it meanwhile.

        Args:
            folder: The folder that `save` wrote.

        Raises:
            ProfileError: The folder has no profile, or a damaged one, or one with another encoder or format.
        """
        try:
            return files.read_folder(folder, lambda: cls._read(files.find_folder(folder)))
        except Exception as error:  # the folder may come from anywhere
            if not os.path.isfile(files.find_folder(folder) / CONFIG):
                raise ProfileError(
                    f"{str(folder)!r:.200} contains no profile.",
                    hint=f"{_MAKE_AGAIN} For the texts themselves, use CorpusProfile.from_texts(texts).",
                ) from error
            raise ProfileError(
                f"The profile in {str(folder)!r} cannot be read: {first_problem(error)}.",
                hint=_MAKE_AGAIN,
            ) from error

    @classmethod
    def _read(cls, root: Path) -> Self:
        from safetensors.numpy import load

        facts = dict(files.parse_json(files.read_file(root / CONFIG)))
        for name, ours in (("format", FORMAT), ("encoder", _ENCODER)):
            if (theirs := facts.pop(name, None)) != ours:
                raise ValueError(f"it has the {name} {theirs!r}, but this version reads {ours!r}")
        weights = files.read_file(root / WEIGHTS)
        if facts.pop("weights_sha256", None) != hashlib.sha256(weights).hexdigest():
            raise ValueError("its checksum does not match the recorded one")
        facts["codes"] = load(weights)["codes"]
        facts["terms"] = {name: facts.pop(name, None) for name in Terms._fields}
        return TypeAdapter(cls).validate_python(facts)


def _mean_of_nearest(cosines: Float32Array, most: int = NEIGHBOURS) -> Float64Array:
    """Return the mean of the ``most`` largest cosines of each row, shape (rows,); of all if a row has fewer."""
    count = min(most, cosines.shape[1])
    return np.partition(cosines, -count, axis=1)[:, -count:].mean(axis=1, dtype=np.float64)


def _measure_margin(
    texts: Sequence[str], vectors: Float32Array, owners: PositionArray, baseline: float, encoder: Encoder
) -> float:
    """Return the margin of a profile with these passages; ``owners`` has the passage of each vector.

    See `CorpusProfile.margin`.
    """
    _, firsts = np.unique(owners, return_index=True)
    sentences: dict[int, str] = {}
    for row, text in enumerate(texts if len(texts) > 1 else ()):
        if len(sentences) == _MAX_SENTENCES:
            break
        fitting = list(filter(is_prose, segments(text)))
        is_copy = (vectors[firsts[list(sentences)]] @ vectors[firsts[row]] >= _MIN_COPY).any()
        if fitting and not is_copy:
            # Picked by the text's length, not at random, so that the result is always the same.
            sentences[row] = fitting[len(text) % len(fitting)]
    total = 0.0
    if sentences:
        questions = background().project_questions(encoder.vectors(list(sentences.values()), "query: "))
        cosines = questions @ vectors.T
        is_own = owners == np.array(list(sentences))[:, None]
        cosines[is_own] = -1.0  # a sentence's own passage does not count
        nearness = _mean_of_nearest(cosines, min(NEIGHBOURS, (~is_own).sum(axis=1).min()))
        total = len(sentences) * (float(np.median(nearness)) - baseline)
    margin = (total + _PRIOR_SENTENCES * _PRIOR_MARGIN) / (len(sentences) + _PRIOR_SENTENCES)
    return min(max(margin, _MIN_MARGIN), _MAX_MARGIN)


# --- of an index ---------------------------------------------------------------------------------------------------


def profile_index(index: Any, name: str) -> CorpusProfile:
    """Return the profile of an index: the cached one if it is up to date, otherwise a new one.

    Args:
        index: A `PassageIndex`, `HybridIndex` or `BM25Index`, or any object with ``passages``.
        name: Name of the corpus.

    Raises:
        ConfigurationError: The index has no ``passages``, or the name is not text.
        ProfileError: The index is empty.
        ModelLoadError: The encoder is missing and may not be downloaded here, or cannot be loaded.
        DownloadError: The encoder could not be downloaded.
    """
    index = getattr(index, "dense", index)
    passages = getattr(index, "passages", None)
    if passages is None:
        raise missing_passages(type(index).__name__)
    return profile_texts([passage.searchable for passage in passages], name, getattr(index, "folder", None))


def missing_passages(what: str) -> ConfigurationError:
    """Return the error for an object whose passages cannot be read; ``what`` names it, such as "a selector"."""
    return ConfigurationError(
        f"corpus=True needs one index whose passages can be read, but they cannot be read from {what}.",
        hint="Make the profile yourself: corpus=CorpusProfile.from_retriever(retriever).",
    )


def profile_texts(texts: Collection[str], name: str, folder: Path | None = None) -> CorpusProfile:
    """Return the profile of an index's passages: the cached one if it is up to date, otherwise a new one.

    A new profile is cached in the index's folder. If that fails, the failure is logged.

    Args:
        texts: The passages, each with its title.
        name: Name of the corpus.
        folder: The index's folder; None if the index is not saved.

    Raises:
        RGateError: See `profile_index`.
    """
    if folder is not None:
        with suppress(ProfileError):
            saved = CorpusProfile.load(folder / FOLDER)
            if not saved.is_outdated(texts):
                return replace(saved, name=name)
    profile = CorpusProfile.from_texts(texts, name)
    if folder is not None and folder.is_dir():  # it may have been moved
        try:
            profile.save(folder / FOLDER)
        except (WriteError, ConfigurationError) as error:
            # The cache is optional: the folder may be read-only.
            logger.warning("The profile of %r was not saved: %s", name, error)
    return profile


# --- what all profiles share ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Background:
    """A projection that spreads the encoder's sentence vectors apart, and requests that need no corpus.

    Sentence vectors are close together, and those of one language even closer. So the projection removes the mean of
    questions or passages and the directions that distinguish languages, and scales the other directions towards equal
    variance. ``benchmarks/corpora.py --write`` makes ``background.npz``.

    Attributes:
        question_mean: Mean vector of questions, shape (384,).
        passage_mean: Mean vector of passages, shape (384,).
        directions: Projection matrix, applied after one of these means is subtracted, shape (384, 256).
        requests: Projected vectors of requests that need no corpus, such as small talk, shape (requests, 256).
    """

    question_mean: Float32Array
    passage_mean: Float32Array
    directions: Float32Array
    requests: Float32Array

    def project_questions(self, vectors: Float32Array) -> Float32Array:
        """Return the projections, of length 1 and shape (questions, 256), of vectors of shape (questions, 384)."""
        return unit(np.float32(vectors - self.question_mean) @ self.directions)

    def project_passages(self, vectors: Float32Array) -> Float32Array:
        """Return the projections, of length 1 and shape (passages, 256), of vectors of shape (passages, 384)."""
        return unit(np.float32(vectors - self.passage_mean) @ self.directions)


@cache
def background() -> Background:
    """Return the shipped `Background`, which is loaded once per process."""
    saved = {name: array.astype(np.float32) for name, array in np.load(BACKGROUND_FILE).items()}
    return Background(**saved | {"requests": unit(saved["requests"])})
