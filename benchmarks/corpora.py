"""What corpora cover: whether a question is about one, and about which; and what a gate that knows decides.

    python benchmarks/corpora.py --data FOLDER             prints the tables
    python benchmarks/corpora.py --data FOLDER --parts     fits SLOPE and MIDDLE of `rgate_integrations.corpus` alone
    python benchmarks/corpora.py --write                   makes background.npz, with which corpora are compared

``FOLDER/domain`` has questions put to real RAG applications, with passages. A passage that answers a question is not
in the profile that judges it: of a domain whose passages all answer one, each half judges the other. Questions of
people about the library Ray are judged by the docstrings of the package ``ray``, read where it is installed.
SLOPE and MIDDLE are those that were fitted to the other domains. ``papers`` fits nothing.
"""

import ast
import importlib.util
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
from base import argument_parser, print_table, read_records
from sklearn.linear_model import LogisticRegression
from templates import FOLDER, read_lines
from text_rows import TRAIN
from training_text import training_rows

from rgate_integrations import CorpusProfile, load_gate
from rgate_integrations.corpus import profile as profile_module
from rgate_integrations.corpus.background import FILE, unit
from rgate_integrations.corpus.profile import corpus_encoder
from rgate_integrations.gates.corpus import CorpusGate
from rgate_integrations.index import BM25Index, Passage, PassageIndex, read_passages
from rgate_integrations.models.download import corpus_path
from rgate_integrations.tuning.evaluation import auc

PARTS = ("domains", "gates", "sources", "ways")
DIRECTIONS, LANGUAGES, SEED = 256, 20, 0
NEEDLESS = ("task", "common", "thanks")
KINDS = (*NEEDLESS, "particular", "private", "fresh", "obscure")
EACH, OTHERS, LEADS, ENGLISH, FOREIGN = 700, 2_500, 1_500, 400, 200
DOCSTRINGS = 1_000
FITS = ("health_plan", "medicine", "library_docs")
"""The domains whose licences allow that they train."""
DESCRIPTIONS = {
    "health_plan": "Health plans and employee benefits of the company Contoso: Northwind Health Plus and Standard.",
    "medicine": "Diseases and conditions: symptoms, causes, inheritance, diagnosis and treatment.",
    "library_docs": "API documentation of Ray, a library for distributed Python: tasks, actors, Serve, Tune.",
    "papers": "Research papers on large language models: BERT, LLaMA, GPT, their training and evaluation.",
}


@dataclass(frozen=True)
class Domain:
    """Questions of one application, and passages that its corpus has beside those that answer them.

    Attributes:
        name: Its name.
        halves: Passages and the questions that are judged by them.
    """

    name: str
    halves: tuple[tuple[list[str], list[str]], ...]

    @property
    def questions(self) -> list[str]:
        """All its questions."""
        return [question for _, questions in self.halves for question in questions]


@dataclass(frozen=True)
class Judged:
    """What profiles of a domain say of questions.

    Attributes:
        z: Of each question, see `SLOPE`.
        named: Whether it has a name of the corpus.
    """

    z: np.ndarray
    named: np.ndarray

    def logits(self, slope: float, middle: float) -> np.ndarray:
        """Return the logits of P(covered)."""
        return slope * (self.z - middle) + profile_module.NAMED * self.named


def read_domains(data: Path) -> list[Domain]:
    domains = []
    for name in ("health_plan", "medicine", "library_docs", "papers"):
        records = read_records(data / "domain" / f"{name}.dev.jsonl")
        asked = [record for record in records if record["question"]]
        passages = [record["passage"] for record in records if record["passage"] and not record["question"]]
        if name == "library_docs":
            passages = random.Random(SEED).sample(read_docstrings("ray"), DOCSTRINGS)
        if passages:
            domains.append(Domain(name, ((passages, [record["question"] for record in asked]),)))
            continue
        random.Random(SEED).shuffle(asked)
        halves = asked[::2], asked[1::2]
        domains.append(Domain(name, tuple(_judge_by(*each) for each in (halves, halves[::-1]))))
    return domains


def _judge_by(
    known: Sequence[dict[str, str]], judged: Sequence[dict[str, str]]
) -> tuple[list[str], list[str]]:
    return [record["passage"] for record in known], [record["question"] for record in judged]


def read_docstrings(package: str) -> list[str]:
    """Return the docstrings of an installed package, each behind the name of what it is about."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"pip install {package}: its docstrings are a corpus.")
    found: dict[str, None] = {}
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
                    found[f"{node.name}: {text}"] = None
    return list(found)


def judge(profile: CorpusProfile, questions: Sequence[str]) -> Judged:
    z = (profile.nearness(_vectors(questions)) - profile.needless) / profile.own
    return Judged(z, np.array([bool(profile.names_in(each)) for each in questions]))


_kept: dict[str, np.ndarray] = {}


def _vectors(questions: Sequence[str]) -> np.ndarray:
    new = [each for each in dict.fromkeys(questions) if each not in _kept]
    _kept.update(zip(new, corpus_encoder().vectors(new, "query: "), strict=True))
    return np.stack([_kept[each] for each in questions])


def fit(rows: Sequence[tuple[Judged, Judged]]) -> tuple[float, float]:
    """Return SLOPE and MIDDLE by which own questions are told from others; each domain counts as much."""
    z, labels, weights = [], [], []
    for own, others in rows:
        for judged, label in ((own, 1), (others, 0)):
            z += list(judged.z)
            labels += [label] * len(judged.z)
            weights += [1000 / len(judged.z)] * len(judged.z)
    fitted = LogisticRegression().fit(np.array(z)[:, None], labels, sample_weight=weights)
    slope = float(fitted.coef_[0, 0])
    return slope, float(-fitted.intercept_[0] / slope)


def read_needless(data: Path) -> tuple[list[str], list[str]]:
    """Return needless requests: of practical.dev, which trained the default gate, and of held-out frames."""
    practical = [
        each["question"] for each in read_records(data / "practical.dev.jsonl") if not each["retrieve"]
    ]
    rows = [row for row in training_rows() if row.part != TRAIN and not row.history and row.kind in NEEDLESS]
    return practical, [row.text for row in random.Random(SEED).sample(rows, 300)]


def measure(data: Path, parts: Sequence[str]) -> None:
    domains = read_domains(data)
    needless, frames = read_needless(data)
    profiles, own, others, fits = {}, {}, {}, {}
    for domain in domains:
        name = domain.name
        profiles[name] = [CorpusProfile.from_texts(passages, name) for passages, _ in domain.halves]
        own[name] = _judge_halves(profiles[name], [questions for _, questions in domain.halves])
        elsewhere = [question for other in domains if other is not domain for question in other.questions]
        others[name] = judge(profiles[name][0], [*elsewhere, *needless])
        trains = [
            each
            for other in domains
            if other.name in FITS and other is not domain
            for each in other.questions
        ]
        fits[name] = own[name], judge(profiles[name][0], [*trains, *frames])
    slope, middle = fit([fits[name] for name in FITS])
    print(f"SLOPE, MIDDLE = {slope:.1f}, {middle:.2f} by {', '.join(FITS)}")
    constants = {domain.name: fit([fits[name] for name in FITS if name != domain.name]) for domain in domains}
    if "domains" in parts:
        show_domains(domains, own, others, constants)
    if "gates" in parts:
        show_gates(domains, profiles, constants, {"practical.dev": needless, "held-out frames": frames})
    if "sources" in parts:
        show_sources(domains, profiles)
        show_libraries()
    if "ways" in parts:
        show_ways(domains, needless)


def show_domains(
    domains: Sequence[Domain],
    own: dict[str, Judged],
    others: dict[str, Judged],
    constants: dict[str, tuple[float, float]],
) -> None:
    """Print how well P(covered) tells a domain's questions from all others, with constants of the other domains."""
    rows = []
    for domain in domains:
        mine = own[domain.name].logits(*constants[domain.name])
        theirs = others[domain.name].logits(*constants[domain.name])
        p = 1 / (1 + np.exp(-np.concatenate([mine, theirs])))
        labels = np.repeat([1.0, 0.0], [len(mine), len(theirs)])
        weights = np.repeat([0.5 / len(mine), 0.5 / len(theirs)], [len(mine), len(theirs)])
        values = (
            auc(p, labels > 0),
            (mine > 0).mean(),
            (theirs <= 0).mean(),
            (weights * (p - labels) ** 2).sum(),
        )
        rows.append([domain.name, str(len(mine)), *(f"{value:.3f}" for value in values)])
    print_table(
        ("corpus", "questions", "AUC against all others", "covered", "others not covered", "Brier score"),
        rows,
    )


def show_gates(
    domains: Sequence[Domain],
    profiles: dict[str, list[CorpusProfile]],
    constants: dict[str, tuple[float, float]],
    needless: dict[str, list[str]],
) -> None:
    """Print what the default gate retrieves for, without and with a profile."""
    rows = []
    for llm_name in ("", "gpt-4o"):
        alone = load_gate(llm_name=llm_name, on_error="raise")
        before = {
            name: np.array([d.retrieve for d in alone.decide_batch(texts)])
            for name, texts in needless.items()
        }
        for domain in domains:
            slope, middle = constants[domain.name]
            with patch.multiple(profile_module, SLOPE=slope, MIDDLE=middle):
                retrieved, without, skipped = [], [], []
                for profile, (_, questions) in zip(profiles[domain.name], domain.halves, strict=True):
                    gate = alone.with_options(
                        gate=CorpusGate.from_parameters({"inner": alone.gate, "profiles": (profile,)})
                    )
                    retrieved += [d.retrieve for d in gate.decide_batch(questions)]
                    without += [d.retrieve for d in alone.decide_batch(questions)]
                for texts in needless.values():
                    skipped.append(np.mean([not d.retrieve for d in gate.decide_batch(texts)]))
            values = [np.mean(without), np.mean(retrieved)]
            for name, share in zip(needless, skipped, strict=True):
                values += [1 - before[name].mean(), share]
            rows.append([domain.name, llm_name or "-", *(f"{100 * value:.1f}" for value in values)])
    columns = [f"{name} skipped, {when}" for name in needless for when in ("alone", "with")]
    print_table(("corpus", "llm_name", "retrieved, alone", "with a profile", *columns), rows)


def show_ways(domains: Sequence[Domain], elsewhere: Sequence[str]) -> None:
    """Print the AUC by the number of passages, and by what a profile is made from."""
    rows = []
    for domain in domains:
        passages, questions = domain.halves[0]
        texts = [*elsewhere, *(each for other in domains if other is not domain for each in other.questions)]
        ways = {str(count): passages[:count] for count in (20, 100, 500, DOCSTRINGS)}
        made = {name: CorpusProfile.from_texts(some) for name, some in ways.items()}
        indexed = [Passage(str(number), text) for number, text in enumerate(passages)]
        for name, index in (("dense", PassageIndex.build(indexed)), ("BM25", BM25Index(indexed))):
            for searches in (30, 100):
                made[f"{name}, {searches}"] = CorpusProfile.from_retriever(index, searches=searches)
        made["description"] = CorpusProfile.from_description(DESCRIPTIONS[domain.name])
        values = []
        for profile in made.values():
            mine, theirs = judge(profile, questions).logits(1, 0), judge(profile, texts).logits(1, 0)
            labels = np.repeat([True, False], [len(mine), len(theirs)])
            values.append(f"{auc(np.concatenate([mine, theirs]), labels):.3f} ({profile.seen})")
        rows.append([domain.name, *values])
    print_table(("AUC (passages seen)", *made), rows)


def show_sources(domains: Sequence[Domain], profiles: dict[str, list[CorpusProfile]]) -> None:
    """Print how often the right one of several corpora is chosen, and what a decision and a profile cost."""
    leads = [passage.searchable for passage in read_passages(corpus_path("encyclopedia-leads"))]
    more = {
        "encyclopaedia": CorpusProfile.from_texts(random.Random(SEED).sample(leads, 600), "encyclopaedia"),
        "licences": CorpusProfile.from_texts(read_licences(), "licences"),
    }
    first = second = count = 0
    for domain in domains:
        for half, (_, questions) in enumerate(domain.halves):
            all_profiles = [profiles[other.name][half % len(profiles[other.name])] for other in domains]
            near = np.stack([each.closeness(_vectors(questions)) for each in [*all_profiles, *more.values()]])
            order = near.argsort(axis=0)[::-1]
            right = domains.index(domain)
            first += (order[0] == right).sum()
            second += (order[:2] == right).any(axis=0).sum()
            count += len(questions)
    print(
        f"right of six corpora: {first / count:.3f} of {count} questions, in the first two {second / count:.3f}"
    )
    largest = max((each for some in profiles.values() for each in some), key=lambda each: len(each.codes))
    six = [largest] * 6
    vector = _vectors([domains[0].questions[0]])
    began = time.perf_counter()
    for _ in range(200):
        for profile in six:
            profile.p_covered(vector, ["How is it covered?"])
            profile.closeness(vector)
    print(
        f"six corpora of {len(largest.codes):,} passages: {(time.perf_counter() - began) * 5:.2f} ms a decision"
    )


def show_libraries() -> None:
    """Print how often the right one of four libraries that do like things is chosen, by their docstrings."""
    questions: dict[str, list[str]] = {}
    for line in read_lines(FOLDER / "libraries.txt"):
        if line.startswith("["):
            questions[line.strip("[]")] = []
        else:
            list(questions.values())[-1].append(line)
    profiles = []
    for name in questions:
        docstrings = read_docstrings(name)
        chosen = random.Random(SEED).sample(docstrings, min(DOCSTRINGS, len(docstrings)))
        profiles.append(CorpusProfile.from_texts(chosen, name))
    first = second = 0
    for right, asked in enumerate(questions.values()):
        near = np.stack([each.closeness(_vectors(asked)) for each in profiles])
        order = near.argsort(axis=0)[::-1]
        first += (order[0] == right).sum()
        second += (order[:2] == right).any(axis=0).sum()
    count = sum(map(len, questions.values()))
    names = ", ".join(questions)
    print(
        f"right of {names}: {first / count:.3f} of {count} questions, in the first two {second / count:.3f}"
    )


def read_licences() -> list[str]:
    """Return paragraphs of the licences of installed packages."""
    found: dict[str, None] = {}
    files = Path(np.__file__).parents[1].glob("*.dist-info/**/LICENSE*")
    for file in sorted(filter(Path.is_file, files)):
        for paragraph in file.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            if len(paragraph) > 100:
                found[" ".join(paragraph.split())] = None
    return list(found)[:600]


def _judge_halves(profiles: Sequence[CorpusProfile], questions: Sequence[Sequence[str]]) -> Judged:
    parts = [judge(*each) for each in zip(profiles, questions, strict=True)]
    return Judged(np.concatenate([part.z for part in parts]), np.concatenate([part.named for part in parts]))


def write_background() -> None:
    rng = random.Random(SEED)
    rows = [row for row in training_rows() if not row.history and len(row.text) < 300]
    english = []
    for kind in KINDS:
        own = [row for row in rows if row.language == "en" and row.kind == kind and row.part == TRAIN]
        english += rng.sample(own, min(EACH, len(own)))
    others = rng.sample([row for row in rows if row.language != "en" and row.part == TRAIN], OTHERS)
    asked = english + others
    leads = rng.sample([each.searchable for each in read_passages(corpus_path("encyclopedia-leads"))], LEADS)
    questions = corpus_encoder().vectors([row.text for row in asked], "query: ")
    passages = corpus_encoder().vectors([lead[:400] for lead in leads], "passage: ")
    centred = np.vstack([questions - questions.mean(0), passages - passages.mean(0)]).astype(np.float64)
    languages = np.array([row.language for row in asked])
    means = np.stack(
        [
            questions[languages == each].mean(0)
            for each in sorted(set(languages))
            if (languages == each).sum() > 20
        ]
    )
    _, _, of_languages = np.linalg.svd(means - means.mean(0), full_matrices=False)
    rest = np.eye(centred.shape[1]) - of_languages[:LANGUAGES].T @ of_languages[:LANGUAGES]
    _, spread, axes = np.linalg.svd(centred @ rest, full_matrices=False)
    deviation = spread[:DIRECTIONS] / np.sqrt(len(centred))
    directions = rest @ (axes[:DIRECTIONS].T / np.sqrt(deviation))
    needless = [i for i, row in enumerate(asked) if row.kind in NEEDLESS]
    chosen = rng.sample([i for i in needless if languages[i] == "en"], ENGLISH)
    chosen += rng.sample([i for i in needless if languages[i] != "en"], FOREIGN)
    compared = unit((questions[chosen] - questions.mean(0)) @ directions.astype(np.float32))
    codes = np.round(compared / np.abs(compared).max(axis=1, keepdims=True) * 127).astype(np.int8)
    np.savez_compressed(
        FILE,
        question_mean=questions.mean(0),
        passage_mean=passages.mean(0),
        directions=(directions / np.abs(directions).max()).astype(np.float16),
        requests=codes,
    )
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=PARTS, help="tables to print; none: fit alone"
    )
    parser.add_argument("--write", action="store_true", help="make background.npz")
    options = parser.parse_args()
    if options.write:
        write_background()
    if options.data is not None:
        measure(options.data, options.parts)


if __name__ == "__main__":
    main()
