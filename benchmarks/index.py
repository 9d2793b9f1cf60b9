"""Search of many queries over many passages, beside langchain_community's FAISS store in the same run.

    python benchmarks/index.py               beside langchain_community, 100,000 passages
    python benchmarks/index.py --grow                 build and search 10,000 to 1,000,000 passages

Vectors are made up and handed out by a precomputed embedder, so that embedding costs nothing on either side.
The comparison needs `pip install langchain-community`.
"""

import resource
import time
import warnings

import numpy as np
from base import CONSOLE, argument_parser, print_table
from langchain_core.embeddings import Embeddings

from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.langchain import FaissVectorStore

PASSAGES, QUERIES, DIMENSION = 100_000, 1_000, 384


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


def made_up(n: int) -> np.ndarray:
    """Vectors in clusters, normalised, made in parts to save memory."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(max(8, n // 200), DIMENSION)).astype(np.float32)
    vectors = centres[rng.integers(0, len(centres), n)]
    for start in range(0, n, 50_000):
        part = vectors[start : start + 50_000]
        part += 0.6 * rng.normal(size=part.shape).astype(np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return vectors


def compare() -> None:
    """Print the queries a second of both stores."""
    vectors = made_up(PASSAGES)
    embeddings = Precomputed(vectors)
    texts = [str(i) for i in range(PASSAGES)]
    ours = FaissVectorStore(embeddings)
    for at in range(0, PASSAGES, 10_000):
        ours.add_texts(texts[at : at + 10_000], ids=texts[at : at + 10_000])
    asked = [str(i) for i in np.random.default_rng(1).integers(0, PASSAGES, QUERIES)]
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
    ours_s, theirs_s = np.median(rounds, axis=0)
    names = ("FaissVectorStore.batch_similarity_search", "langchain_community FAISS, one by one")
    rows = [[name, f"{QUERIES / s:,.0f}"] for name, s in zip(names, (ours_s, theirs_s), strict=True)]
    print_table(["store", "queries/s"], rows)
    CONSOLE.print(f"{theirs_s / ours_s:.1f} times; the same first result for {same:.1%} of the queries")


def grow() -> None:
    """Print time and memory of ever larger indexes."""
    rows = []
    for n in (10_000, 100_000, 1_000_000):
        vectors = made_up(n)
        index = PassageIndex(_Vectors(vectors))
        start = time.perf_counter()
        for at in range(0, n, 20_000):
            some = range(at, min(n, at + 20_000))
            index.add([Passage(str(i), f"passage {i}") for i in some], vectors[some.start : some.stop])
        built = time.perf_counter()
        index.optimise()
        optimised = time.perf_counter()
        index.search_vectors(vectors[:: n // QUERIES][:QUERIES], 5)
        rate = QUERIES / (time.perf_counter() - optimised)
        recall = "exact" if index.approximation is None else f"{index.approximation['recall']:.3f}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        seconds = [f"{built - start:.1f} s", f"{optimised - built:.1f} s"]
        rows.append([f"{n:,}", *seconds, f"{rate:,.0f}", recall, f"{peak:.2f} GiB"])
    columns = ["passages", "built in", "made approximate in", "queries/s", "recall", "peak memory"]
    print_table(columns, rows)


class _Vectors:
    name = identity = "made up"

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors

    def embed(self, texts: list[str]) -> np.ndarray:
        raise NotImplementedError


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--grow", action="store_true")
    if parser.parse_args().grow:
        grow()
    else:
        compare()


if __name__ == "__main__":
    main()
