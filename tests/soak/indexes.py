"""The index under load: it is compared with a plain dict after every change, whole or failed."""

from __future__ import annotations

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from rgate_integrations.errors import RGateError
from rgate_integrations.index import Passage, PassageIndex
from tests.soak.scenario import Scenario, expect

_MANY = 400  # passages; from here on some are deleted


class HashEmbedder:
    """Embeds a text as numbers drawn from its hash: the same text is found at cosine 1, no other is near."""

    name = identity = "soak"

    def embed(self, texts):
        if any("RAISE" in text for text in texts):
            raise OSError("embedder down")
        return np.stack([self._vector(text) for text in texts])

    embed_queries = embed

    def _vector(self, text):
        seed = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "big")
        drawn = np.random.default_rng(seed).normal(size=32).astype(np.float32)
        return drawn / np.linalg.norm(drawn)


class Index(Scenario):
    """Adds, upserts, deletes, searches and saves, with writes that fail half way and readers beside them."""

    name = "index"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.index = PassageIndex(HashEmbedder())
        self.must: dict[str, str] = {}
        self.written = 0

    def step(self, chance: random.Random) -> None:
        acts = [self._add, self._add, self._upsert, self._delete, self._fail, self._beside, self._save]
        chance.choice(acts)(chance)
        self._compare(chance)

    def _new(self, chance: random.Random, count: int) -> list[Passage]:
        numbers = range(self.written, self.written + count)
        self.written += count
        return [Passage(str(number), f"text {number} {chance.random()}") for number in numbers]

    def _add(self, chance: random.Random) -> None:
        passages = self._new(chance, chance.randint(1, 40))
        self.index.add(passages)
        self._must_be_there(passages, "added")

    def _upsert(self, chance: random.Random) -> None:
        old = [Passage(each, f"again {chance.random()}") for each in self._some(chance)]
        passages = old + self._new(chance, 2)
        self.index.upsert(passages)
        self._must_be_there(passages, "upserted")

    def _must_be_there(self, passages: list[Passage], what: str) -> None:
        self.must.update({each.id: each.text for each in passages})
        self.counts[what] += len(passages)

    def _delete(self, chance: random.Random) -> None:
        ids = self._some(chance, _MANY // 4 if len(self.must) > _MANY else 5)
        gone = self.index.delete([*ids, "missing"])
        expect(gone == len(ids), "deleted", gone, "of", len(ids))
        for each in ids:
            del self.must[each]
        self.counts["deleted"] += gone

    def _fail(self, chance: random.Random) -> None:
        """A write that must fail, and change nothing: half of its passages are good."""
        bad = chance.choice(
            [
                Passage("bad", "RAISE"),
                Passage("bad", "text", metadata={"value": object()}),
                Passage("bad", "\ud800"),
            ]
        )
        write = chance.choice([self.index.add, self.index.upsert])
        good = [Passage(each, "changed") for each in self._some(chance)] if write == self.index.upsert else []
        try:
            write([*good, *self._new(chance, 2), bad])
        except RGateError:
            self.counts["failed writes"] += 1
        else:
            raise AssertionError(f"{bad} was written")

    def _beside(self, chance: random.Random) -> None:
        """Readers search while writers add and delete; what they find must be or have been there."""
        stable = self._some(chance, 10)
        fresh = self._new(chance, 30)
        with ThreadPoolExecutor(6) as pool:
            adds = pool.map(lambda passage: self.index.add([passage]), fresh)
            reads = pool.map(lambda identity: self.index.search([self.must[identity]], 3), stable)
            for identity, (hits,) in zip(stable, reads, strict=True):
                expect(hits[0].passage.id == identity, "a reader did not find", identity)
            list(adds)  # raises what failed
        self._must_be_there(fresh, "added")
        self.counts["reads beside writes"] += len(stable)

    def _save(self, chance: random.Random) -> None:
        saved = self.index.save(self.folder / "index")
        self.index = PassageIndex.load(saved, HashEmbedder())
        self.counts["saves"] += 1

    def _some(self, chance: random.Random, most: int = 5) -> list[str]:
        return chance.sample(sorted(self.must), min(most, len(self.must)))

    def _compare(self, chance: random.Random) -> None:
        held = {passage.id: passage.text for passage in self.index}
        expect(held == self.must, len(held), "passages are there, not", len(self.must))
        for each in self._some(chance):
            (hits,) = self.index.search([self.must[each]], 1)
            right = hits[0].passage.id == each and hits[0].score > 0.999
            expect(right, "searched for", each, "and found", hits)
        self.counts["comparisons"] += 1
