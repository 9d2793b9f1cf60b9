"""`CorpusProfile`: what a corpus is about, made from its passages, saved in a folder of at most 1 MB."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from rgate_integrations.corpus.searching import collect_passages
from rgate_integrations.errors import ProfileError
from rgate_integrations.models.download import downloaded_path
from rgate_integrations.models.encoder import ENCODER, FINGERPRINT, Encoder, shared_encoder
from rgate_integrations.runtime.arrays import Float32Array, Float64Array
from rgate_integrations.runtime.files import existing_folder, json_text, parse_json, read_file, write_folder

FORMAT = 1
CONFIG, WEIGHTS = "profile.json", "profile.safetensors"
NEAREST = 5
"""A question is as near to a corpus as the mean cosine to so many of its nearest passages."""
_MOST = 2_000  # passages that are kept

Source: TypeAlias = Literal["texts", "retriever", "description"]


@dataclass(frozen=True, eq=False)
class CorpusProfile:
    """What a corpus is about. Immutable.

    Attributes:
        name: The corpus's name, as decisions give it.
        vectors: Directions of a sample of its passages, shape (passages, 384), of length 1.
        terms: What is telling for it, such as names of products and identifiers; the most telling first.
        source: What it was made from.
        seen: How many passages were seen.
        sketch: Of the hashes of the passages that were seen the smallest: what it shares with other passages.
        about_something: Whether anything sets it apart from what everything is about. An encyclopaedia has nothing.
    """

    name: str
    vectors: Float32Array = field(repr=False)
    terms: tuple[str, ...] = field(default=(), repr=False)
    source: Source = "texts"
    seen: int = 0
    sketch: tuple[str, ...] = field(default=(), repr=False)
    about_something: bool = True
    middle: float = 0.8
    scale: float = 0.01

    @classmethod
    def from_texts(cls, texts: Iterable[str], name: str = "corpus") -> Self:
        """Make a profile of the passages of a corpus.

        Args:
            texts: The passages, in one pass.
            name: Name of the corpus.

        Raises:
            ProfileError: There is no passage.
        """
        kept = [text for text in dict.fromkeys(texts) if text.strip()]
        return cls._made(kept[:_MOST], name, "texts", len(kept))

    @classmethod
    def from_retriever(cls, retriever: Any, name: str = "corpus", searches: int = 100) -> Self:
        """Make a profile of what a search finds.

        Args:
            retriever: A retriever or vector store of LangChain or LlamaIndex, a `PassageIndex`, or a function from a
                query to texts.
            name: Name of the corpus.
            searches: How many searches it may take.

        Raises:
            ConfigurationError: It cannot be searched.
            ProfileError: Nothing was found.
        """
        found = collect_passages(retriever, searches)
        return cls._made(found[:_MOST], name, "retriever", len(found))

    @classmethod
    def from_description(cls, text: str, name: str = "corpus") -> Self:
        """Make a profile of a description, where the passages are out of reach. It tells less than these.

        Args:
            text: What the corpus is about, in a sentence or a few.
            name: Name of the corpus.

        Raises:
            ProfileError: It says nothing.
        """
        return cls._made([text] if text.strip() else [], name, "description", 1)

    @classmethod
    def _made(cls, texts: Sequence[str], name: str, source: Source, seen: int) -> Self:
        if not texts:
            raise ProfileError(f"The corpus {name!r} has no passages.", hint="Is it empty?")
        return cls(name, encoder().vectors(texts, "passage: "), (), source, seen)

    def __repr__(self) -> str:
        return f"CorpusProfile({self.name!r}, {len(self.vectors):,} of {self.seen:,} passages)"

    @property
    def fingerprint(self) -> str:
        """Changes with all that it holds."""
        digest = hashlib.sha256(json_text(self._facts()).encode())
        digest.update(self.vectors.tobytes())
        return digest.hexdigest()[:16]

    def nearness(self, vectors: Float32Array) -> Float64Array:
        """Return how near questions are to it: the mean cosine to the five nearest passages, shape (questions,).

        Args:
            vectors: The encoder's sentence vectors of the questions, shape (questions, 384).
        """
        cosines = vectors @ self.vectors.T
        count = min(NEAREST, cosines.shape[1])
        nearest: Float64Array = np.sort(cosines, axis=1)[:, -count:].mean(axis=1).astype(np.float64)
        return nearest

    def p_covered(self, vectors: Float32Array, texts: Sequence[str]) -> Float64Array:
        """Return P(the corpus has something on it) of questions, shape (questions,), each in [0, 1].

        Args:
            vectors: The encoder's sentence vectors of the questions, shape (questions, 384).
            texts: The questions.
        """
        found: Float64Array = 1 / (1 + np.exp((self.middle - self.nearness(vectors)) / self.scale))
        return found

    def terms_in(self, text: str) -> tuple[str, ...]:
        """Return its telling terms that a question names."""
        lower = text.lower()
        return tuple(term for term in self.terms if term in lower)

    def save(self, folder: str | Path) -> Path:
        """Save into a folder, which appears whole or not at all, and replaces a profile that was there.

        Raises:
            ConfigurationError: A file, or a folder with something else in it, is there.
            WriteError: It could not be written.
        """
        from safetensors.numpy import save

        weights = save({"vectors": np.ascontiguousarray(self.vectors)})
        facts = {**self._facts(), "weights_sha256": hashlib.sha256(weights).hexdigest()}
        return write_folder(folder, {CONFIG: json_text(facts), WEIGHTS: weights})

    def _facts(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "encoder": ENCODER,
            "encoder_fingerprint": FINGERPRINT,
            "name": self.name,
            "terms": list(self.terms),
            "source": self.source,
            "seen": self.seen,
            "sketch": list(self.sketch),
            "about_something": self.about_something,
            "middle": self.middle,
            "scale": self.scale,
        }

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load a profile.

        Args:
            folder: Where `save` put it.

        Raises:
            ProfileError: There is none, it is damaged, or it is of another encoder or format.
        """
        root = existing_folder(folder)
        if not os.path.isfile(root / CONFIG):
            raise ProfileError(f"There is no profile in {str(folder)!r}.", hint=_MAKE)
        try:
            from safetensors.numpy import load

            facts = dict(parse_json(read_file(root / CONFIG)))
            weights = read_file(root / WEIGHTS)
            if facts.pop("weights_sha256") != hashlib.sha256(weights).hexdigest():
                raise ValueError("its checksum is not the recorded one")
            if facts.pop("format") != FORMAT or facts.pop("encoder_fingerprint") != FINGERPRINT:
                raise ProfileError(
                    f"The profile in {str(folder)!r} is of another encoder or format.", hint=_MAKE
                )
            facts.pop("encoder")
            facts["terms"], facts["sketch"] = tuple(facts["terms"]), tuple(facts["sketch"])
            return cls(vectors=load(weights)["vectors"], **facts)
        except ProfileError:
            raise
        except Exception as error:  # the folder may come from anywhere
            raise ProfileError(
                f"The profile in {str(folder)!r} cannot be read: {str(error).partition(chr(10))[0]}.",
                hint=_MAKE,
            ) from error


_MAKE = "Make it again: rgate profile --corpus FILE.jsonl --out DIR"


def encoder() -> Encoder:
    """Return the encoder, shared in the process.

    Raises:
        ModelLoadError: It is not downloaded, or cannot be loaded.
    """
    return shared_encoder(downloaded_path(ENCODER, "gate's model"))
