"""Choosing the right one of several corpora, compared with other routers. Printed by corpora.py.

``others`` needs semantic-router (``pip install semantic-router``) and, with ``--llm URL``, a llama.cpp server.
"""

import random
import time
from collections.abc import Mapping, Sequence
from itertools import combinations, permutations, product
from pathlib import Path
from unittest.mock import patch

import numpy as np
from corpus_domains import DOCSTRINGS, SEED, Domain, embed, read_docstrings
from corpus_ways import DESCRIPTIONS
from templates import FOLDER, read_lines

from rgate_integrations import CorpusProfile
from rgate_integrations.corpus import profile as profile_module
from rgate_integrations.index import read_passages
from rgate_integrations.models.download import corpus_path
from rgate_integrations.models.encoder import EncoderProxy

UTTERANCES, ROUTER_SEEDS, LLM_QUESTIONS = 10, 5, 20
DESCRIPTIONS_OF_ALL = DESCRIPTIONS | {
    "encyclopaedia": "The first sentences of encyclopaedia articles, about everything.",
    "licences": "Licences of software packages.",
    "pandas": "API documentation of pandas, a library for tables: data frames, series, grouping, joining, files.",
    "sklearn": "API documentation of scikit-learn, a library for machine learning: estimators, pipelines, metrics.",
    "scipy": "API documentation of SciPy, a library for scientific computing: optimisation, signals, statistics.",
    "numpy": "API documentation of NumPy, a library for numeric arrays: shapes, types, random numbers, algebra.",
}
CLOSENESS = tuple(product((0.0, 0.1, 0.2, 0.3, 0.5), (0.0, 0.01, 0.02, 0.03, 0.05)))
"""Values of NAME_CLOSENESS and TERM_CLOSENESS of a profile, to choose from."""
Corpora = Mapping[str, tuple[Sequence[str], Sequence[str]]]
"""Passages and questions of each corpus, by its name."""


def read_unlike(domains: Sequence[Domain]) -> list[dict[str, tuple[Sequence[str], Sequence[str]]]]:
    """Return six unlike corpora twice: once with each half of the domains that are halved."""
    leads = [passage.searchable for passage in read_passages(corpus_path("encyclopedia-leads"))]
    extra = {"encyclopaedia": random.Random(SEED).sample(leads, 600), "licences": read_licences()}
    halves = []
    for half in (0, 1):
        corpora: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
        for domain in domains:
            passages, questions = domain.halves[half % len(domain.halves)]
            corpora[domain.name] = passages, questions if half < len(domain.halves) else []
        halves.append(corpora | {name: (passages, []) for name, passages in extra.items()})
    return halves


def read_libraries(file: str = "libraries.txt") -> dict[str, tuple[Sequence[str], Sequence[str]]]:
    """Return similar libraries: their docstrings, and the questions of a file in ``templates/``."""
    questions: dict[str, list[str]] = {}
    for line in read_lines(FOLDER / file):
        if line.startswith("["):
            questions[line.strip("[]")] = []
        else:
            list(questions.values())[-1].append(line)
    libraries = {}
    for name, library_questions in questions.items():
        docstrings = read_docstrings(name)
        libraries[name] = (
            random.Random(SEED).sample(docstrings, min(DOCSTRINGS, len(docstrings))),
            library_questions,
        )
    return libraries


def make_profiles(corpora: Corpora) -> list[CorpusProfile]:
    """Return a profile of each corpus."""
    return [CorpusProfile.from_texts(passages, name) for name, (passages, _) in corpora.items()]


def rank(corpora: Corpora, profiles: Sequence[CorpusProfile]) -> tuple[np.ndarray, np.ndarray]:
    """Return the corpora ranked for each question, best first, and the index of the right one."""
    questions = [question for _, corpus_questions in corpora.values() for question in corpus_questions]
    right = np.repeat(
        range(len(corpora)), [len(corpus_questions) for _, corpus_questions in corpora.values()]
    )
    close = np.stack([profile.closeness(embed(questions), questions) for profile in profiles], axis=1)
    return close.argsort(axis=1)[:, ::-1], right


def show_sources(domains: Sequence[Domain]) -> None:
    """Print how often a profile picks the right corpus, and what a decision costs."""
    unlike, libraries = read_unlike(domains), read_libraries()
    _report("six unlike", [rank(corpora, make_profiles(corpora)) for corpora in unlike])
    unasked = {name: (passages, []) for name, (passages, _) in libraries.items()}
    ten = [unlike[0] | libraries, unlike[1] | unasked]
    _report("ten, four alike", [rank(corpora, make_profiles(corpora)) for corpora in ten])
    pairs = []
    for half in unlike:
        for names in combinations(half, 2):
            pairs.append({name: half[name] for name in names})
    _report(
        "two of the six",
        [
            rank(pair, make_profiles(pair))
            for pair in pairs
            if any(corpus_questions for _, corpus_questions in pair.values())
        ],
    )
    show_cost(list(unlike[0].values()))


def show_libraries() -> None:
    """Print how often a profile picks the right one of four similar libraries, and the misses."""
    libraries = read_libraries()
    order, right = rank(libraries, make_profiles(libraries))
    _report("four alike", [(order, right)])
    questions = [question for _, library_questions in libraries.values() for question in library_questions]
    names = list(libraries)
    for question, chosen, expected in zip(questions, order[:, 0], right, strict=True):
        if chosen != expected:
            print(f"  {names[expected]} -> {names[chosen]}: {question}")


def show_choice(domains: Sequence[Domain]) -> None:
    """Print how often a profile picks the right corpus if the ranking's constants are chosen on the other group."""
    groups = {"six unlike": read_unlike(domains), "four alike": [read_libraries()]}
    shares = {}
    for group, parts in groups.items():
        profiles = list(map(make_profiles, parts))
        for constants in CLOSENESS:
            name, term = constants
            with patch.multiple(profile_module, NAME_CLOSENESS=name, TERM_CLOSENESS=term):
                ranked = list(map(rank, parts, profiles))
            shares[group, constants] = np.mean(
                np.concatenate([order[:, 0] == right for order, right in ranked])
            )
    for group, other in permutations(groups):
        chosen = max(CLOSENESS, key=lambda constants: shares[other, constants])
        print(f"{group}, with {chosen}, chosen on {other}: right {shares[group, chosen]:.3f}")


def _report(name: str, ranked: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    first = np.concatenate([order[:, 0] == right for order, right in ranked])
    second = np.concatenate([(order[:, :2] == right[:, None]).any(axis=1) for order, right in ranked])
    print(f"{name}: right {first.mean():.3f} of {len(first)}, in the first two {second.mean():.3f}")


def show_cost(corpora: Sequence[tuple[Sequence[str], Sequence[str]]]) -> None:
    """Print the median time that six corpora add to a decision, and that of encoding the question."""
    profiles = [CorpusProfile.from_texts(passages) for passages, _ in corpora]
    questions = [question for _, corpus_questions in corpora for question in corpus_questions][:200]
    reads, covers = [], []
    for question in questions:
        start = time.perf_counter()
        vector = EncoderProxy().encoder.vectors([question], "query: ")
        middle = time.perf_counter()
        for profile in profiles:
            profile.p_covered(vector, [question])
            profile.closeness(vector, [question])
        reads.append(middle - start)
        covers.append(time.perf_counter() - middle)
    read, cover = 1000 * np.median(reads), 1000 * np.median(covers)
    count = sum(len(profile.codes) for profile in profiles)
    print(
        f"{len(profiles)} corpora, {count:,} passages kept: {cover:.2f} ms a question, reading it {read:.2f} ms"
    )


def show_others(domains: Sequence[Domain], llm_url: str | None) -> None:
    """Print how often other routers choose right on the same questions."""
    groups = {"six unlike": read_unlike(domains), "four alike": [read_libraries()]}
    for name, parts in groups.items():
        shares = [
            np.mean([_route(corpora, seed).mean() for corpora in parts[:1]]) for seed in range(ROUTER_SEEDS)
        ]
        print(f"{name}: semantic-router {np.mean(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})")
        if llm_url is not None:
            _show_llm_selector(name, parts[0], llm_url)


def _route(corpora: Corpora, seed: int) -> np.ndarray:
    """Return whether semantic-router chooses right, with utterances drawn from each corpus, and our encoder."""
    from semantic_router.encoders.base import AsymmetricDenseMixin, DenseEncoder
    from semantic_router.route import Route
    from semantic_router.routers import IndexedRouter

    class RouterEncoder(DenseEncoder, AsymmetricDenseMixin):  # type: ignore[misc]  # its classes are untyped
        name: str = "encoder"

        def encode_queries(self, docs: list[str]) -> list[list[float]]:
            return embed(docs).tolist()

        def encode_documents(self, docs: list[str]) -> list[list[float]]:
            return EncoderProxy().encoder.vectors(docs, "passage: ").tolist()

    draw = random.Random(seed)
    routes = []
    for name, (passages, _) in corpora.items():
        utterances = [passage[:300] for passage in draw.sample(list(passages), UTTERANCES)]
        routes.append(Route(name=name, utterances=utterances))
    router = IndexedRouter(RouterEncoder(), routes)
    hits = []
    for name, (_, corpus_questions) in corpora.items():
        for question in corpus_questions:
            chosen = router(question)
            hits.append(chosen is not None and chosen.name == name)
    return np.array(hits)


def _show_llm_selector(name: str, corpora: Corpora, llm_url: str) -> None:
    """Print how often LlamaIndex's selector, which reads descriptions, chooses right, and how often we do."""
    from llama_index.core.output_parsers.base import OutputParserException
    from llama_index.core.selectors import LLMSingleSelector
    from llama_index.core.tools import ToolMetadata
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike("m", api_base=llm_url, api_key="none", is_chat_model=True, timeout=300, max_tokens=150)
    selector = LLMSingleSelector.from_defaults(llm=llm)
    names = list(corpora)
    choices = [
        ToolMetadata(name=corpus_name, description=DESCRIPTIONS_OF_ALL[corpus_name]) for corpus_name in names
    ]
    numbered = [
        (row, question)
        for row, (_, corpus_questions) in enumerate(corpora.values())
        for question in corpus_questions
    ]
    order, _ = rank(corpora, make_profiles(corpora))
    chosen = random.Random(SEED).sample(range(len(numbered)), LLM_QUESTIONS)
    hits, seconds = [], []
    for index in chosen:
        right, question = numbered[index]
        start = time.perf_counter()
        try:
            hits.append(selector.select(choices, question).ind == right)
        except (OutputParserException, ValueError):  # it wrote no JSON
            hits.append(False)
        seconds.append(time.perf_counter() - start)
    ours = np.mean([order[index, 0] == numbered[index][0] for index in chosen])
    print(
        f"{name}: LLMSingleSelector {np.mean(hits):.3f} of {len(hits)}, {np.median(seconds):.1f} s; ours {ours:.3f}"
    )


def read_licences() -> list[str]:
    """Return paragraphs of the licences of installed packages."""
    paragraphs: dict[str, None] = {}
    files = Path(np.__file__).parents[1].glob("*.dist-info/**/LICENSE*")
    for file in sorted(filter(Path.is_file, files)):
        for paragraph in file.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            if len(paragraph) > 100:
                paragraphs[" ".join(paragraph.split())] = None
    return list(paragraphs)[:600]
