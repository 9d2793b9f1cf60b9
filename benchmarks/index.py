"""Search of many queries over many passages, beside langchain_community's FAISS store in the same run.

    python benchmarks/index.py [--passages 100000] [--queries 1000]
    python benchmarks/index.py --grow                 build and search 10,000 to 1,000,000 passages

Vectors are made up and handed out by a precomputed embedder, so that embedding costs nothing on either side.
The comparison needs `pip install langchain-community`.
"""

import argparse
import json
import resource
import time
import warnings
from pathlib import Path

import numpy as np
from langchain_core.embeddings import Embeddings
from rich.console import Console

from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.langchain import FaissVectorStore

CONSOLE = Console(width=110, highlight=False)
OUT = Path(__file__).parent / "out" / "index.json"


class Precomputed(Embeddings):
    """Embeds "17" as row 17 of a matrix."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Look vectors up."""
        return self.vectors[[int(t) for t in texts]]

    def embed_query(self, text: str) -> list[float]:
        """Look a vector up."""
        return self.vectors[int(text)]


def made_up(n: int, dimension: int = 384, seed: int = 0) -> np.ndarray:
    """Vectors in clusters, normalised, made in parts to save memory."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(8, n // 200), dimension)).astype(np.float32)
    vectors = centres[rng.integers(0, len(centres), n)]
    for start in range(0, n, 50_000):
        part = vectors[start : start + 50_000]
        part += 0.6 * rng.normal(size=part.shape).astype(np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return vectors


def compare(passages: int, queries: int) -> dict:
    vectors = made_up(passages)
    embeddings = Precomputed(vectors)
    texts = [str(i) for i in range(passages)]
    ours = FaissVectorStore(embeddings)
    start = time.perf_counter()
    for at in range(0, passages, 10_000):
        ours.add_texts(texts[at : at + 10_000], ids=texts[at : at + 10_000])
    found = {"passages": passages, "queries": queries, "build_s": round(time.perf_counter() - start, 2)}
    asked = [str(i) for i in np.random.default_rng(1).integers(0, passages, queries)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_community.vectorstores import FAISS

        theirs = FAISS.from_embeddings(list(zip(texts, vectors.tolist(), strict=True)), embeddings)
        rounds = []
        for _ in range(3):  # in turns
            start = time.perf_counter()
            mine = ours.batch_similarity_search(asked, k=5)
            middle = time.perf_counter()
            other = [theirs.similarity_search(q, k=5) for q in asked]
            rounds.append((middle - start, time.perf_counter() - middle))
    same = np.mean([a[0].page_content == b[0].page_content for a, b in zip(mine, other, strict=True)])
    ours_s, theirs_s = np.median(rounds, axis=0).tolist()
    found |= {
        "ours_queries_per_s": round(queries / ours_s, 1),
        "langchain_community_queries_per_s": round(queries / theirs_s, 1),
        "ratio": round(theirs_s / ours_s, 2),
        "same_first_result": float(same),
    }
    CONSOLE.print(found)
    return found


def grow() -> list[dict]:
    rows = []
    for n in (10_000, 100_000, 1_000_000):
        vectors = made_up(n)
        index = PassageIndex(_Vectors(vectors))
        start = time.perf_counter()
        for at in range(0, n, 20_000):
            some = range(at, min(n, at + 20_000))
            index.add([Passage(str(i), f"passage {i}") for i in some], vectors[some.start : some.stop])
        built = time.perf_counter() - start
        start = time.perf_counter()
        index.optimise()
        optimised = time.perf_counter() - start
        start = time.perf_counter()
        index.search_vectors(vectors[:: n // 1_000][:1_000], 5)
        rows.append(
            {
                "passages": n,
                "build_s": round(built, 1),
                "optimise_s": round(optimised, 1),
                "queries_per_s": round(1_000 / (time.perf_counter() - start), 1),
                "approximation": index.approximation,
                "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
            }
        )
        CONSOLE.print(rows[-1])
    return rows


class _Vectors:
    name = identity = "made up"

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors

    def embed(self, texts: list[str]) -> np.ndarray:
        raise NotImplementedError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=1_000)
    parser.add_argument("--grow", action="store_true")
    arguments = parser.parse_args()
    found = {"grow": grow()} if arguments.grow else compare(arguments.passages, arguments.queries)
    OUT.parent.mkdir(exist_ok=True)
    OUT.with_stem("index-grow" if arguments.grow else "index").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
