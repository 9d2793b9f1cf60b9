"""What corpora cover: whether a question is about a corpus, and which; and how a gate with a corpus decides.

    python benchmarks/corpora.py --data FOLDER             prints the tables
    python benchmarks/corpora.py --data FOLDER --parts     only fits the package's SLOPE and MIDPOINT
    python benchmarks/corpora.py --write                   makes background.npz, what corpora are compared with

``FOLDER/domain`` has questions that users asked real RAG applications, with passages; ``FOLDER/practical.dev.jsonl``
has requests that need none. A passage that answers a question is not in the profile that judges it. If all passages
of a domain answer a question, each half judges the other. The docstrings of the installed package ``ray`` judge
users' questions about Ray. Each domain is measured with the SLOPE and MIDPOINT that were fitted to the others.
``papers`` is only measured.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
from base import argument_parser, print_table, read_records
from corpus_asking import show_asking
from corpus_domains import SEED, Domain, Judged, judge, read_domains
from corpus_sources import show_choice, show_libraries, show_others, show_sources
from corpus_ways import COUNTS, show_ways
from sklearn.linear_model import LogisticRegression
from text_rows import TRAIN
from training_text import make_training_rows

from rgate_integrations import CorpusProfile, load_gate
from rgate_integrations.corpus import profile as profile_module
from rgate_integrations.corpus.profile import BACKGROUND_FILE
from rgate_integrations.gates.corpus import CorpusGate
from rgate_integrations.index import read_passages
from rgate_integrations.models.download import corpus_path
from rgate_integrations.models.encoder import EncoderProxy
from rgate_integrations.runtime.arrays import unit
from rgate_integrations.tuning.evaluation import auc

PARTS = ("domains", "gates", "asking", "sources", "chosen", "libraries", "ways", "others")
DIRECTIONS, LANGUAGES = 256, 20
NEEDLESS = ("task", "common", "thanks")
KINDS = (*NEEDLESS, "particular", "private", "fresh", "obscure")
EACH, OTHERS, LEADS, ENGLISH, FOREIGN = 700, 2_500, 1_500, 400, 200
FITS = ("health_plan", "medicine", "library_docs")
"""The domains whose licences allow training."""


def fit_constants(rows: Sequence[tuple[Judged, Judged]]) -> tuple[float, float]:
    """Return the SLOPE and MIDPOINT that separate covered questions from others; all domains count the same."""
    z, labels, weights = [], [], []
    for covered, uncovered in rows:
        for judged, label in ((covered, 1), (uncovered, 0)):
            z += list(judged.z)
            labels += [label] * len(judged.z)
            weights += [1000 / len(judged.z)] * len(judged.z)
    fitted = LogisticRegression().fit(np.array(z)[:, None], labels, sample_weight=weights)
    slope = float(fitted.coef_[0, 0])
    return slope, float(-fitted.intercept_[0] / slope)


def read_needless(data: Path) -> tuple[list[str], list[str]]:
    """Return needless requests: those of practical.dev, which trained the default gate, and of held-out frames."""
    practical = [
        record["question"] for record in read_records(data / "practical.dev.jsonl") if not record["retrieve"]
    ]
    rows = [
        row for row in make_training_rows() if row.part != TRAIN and not row.history and row.kind in NEEDLESS
    ]
    return practical, [row.text for row in random.Random(SEED).sample(rows, 300)]


def measure(data: Path, parts: Sequence[str], llm_url: str | None) -> None:
    domains = read_domains(data)
    needless, frames = read_needless(data)
    profiles, covered, uncovered, fits = {}, {}, {}, {}
    for domain in domains:
        name = domain.name
        profiles[name] = [CorpusProfile.from_texts(passages, name) for passages, _ in domain.halves]
        covered[name] = _judge_halves(profiles[name], [questions for _, questions in domain.halves])
        elsewhere = [question for other in domains if other is not domain for question in other.questions]
        uncovered[name] = judge(profiles[name][0], [*elsewhere, *needless])
        trains = [
            question
            for other in domains
            if other.name in FITS and other is not domain
            for question in other.questions
        ]
        fits[name] = covered[name], judge(profiles[name][0], [*trains, *frames])
    slope, middle = fit_constants([fits[name] for name in FITS])
    print(f"SLOPE, MIDPOINT = {slope:.1f}, {middle:.2f} by {', '.join(FITS)}")
    constants = {
        domain.name: fit_constants([fits[name] for name in FITS if name != domain.name]) for domain in domains
    }
    if "domains" in parts:
        show_domains(domains, covered, uncovered, constants)
    unneeded = {"practical.dev": needless, "held-out frames": frames}
    if "gates" in parts:
        show_gates(domains, profiles, constants, unneeded)
    if "asking" in parts:
        show_asking(domains, profiles, constants, unneeded)
    if "sources" in parts:
        show_sources(domains)
    if "chosen" in parts:
        show_choice(domains)
    if "libraries" in parts:
        show_libraries()
    if "ways" in parts:
        show_ways(read_domains(data, max(COUNTS)), needless)
    if "others" in parts:
        show_others(domains, llm_url)


def show_domains(
    domains: Sequence[Domain],
    covered: dict[str, Judged],
    uncovered: dict[str, Judged],
    constants: dict[str, tuple[float, float]],
) -> None:
    """Print how well P(covered) separates a domain's questions from others, with constants fitted elsewhere."""
    rows = []
    for domain in domains:
        covered_logits = covered[domain.name].logits(*constants[domain.name])
        other_logits = uncovered[domain.name].logits(*constants[domain.name])
        p = 1 / (1 + np.exp(-np.concatenate([covered_logits, other_logits])))
        labels = np.repeat([1.0, 0.0], [len(covered_logits), len(other_logits)])
        weights = np.repeat(
            [0.5 / len(covered_logits), 0.5 / len(other_logits)], [len(covered_logits), len(other_logits)]
        )
        values = (
            auc(p, labels > 0),
            (covered_logits > 0).mean(),
            (other_logits <= 0).mean(),
            (weights * (p - labels) ** 2).sum(),
        )
        rows.append([domain.name, str(len(covered_logits)), *(f"{value:.3f}" for value in values)])
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
    """Print the shares that the default gate retrieves and skips, without and with a profile."""
    rows = []
    for llm_name in ("", "gpt-4o"):
        alone = load_gate(llm_name=llm_name, on_error="raise")
        before = {
            name: np.array([d.retrieve for d in alone.decide_batch(texts)])
            for name, texts in needless.items()
        }
        for domain in domains:
            slope, middle = constants[domain.name]
            with patch.multiple(profile_module, SLOPE=slope, MIDPOINT=middle):
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


def _judge_halves(profiles: Sequence[CorpusProfile], questions: Sequence[Sequence[str]]) -> Judged:
    parts = [judge(*pair) for pair in zip(profiles, questions, strict=True)]
    return Judged(np.concatenate([part.z for part in parts]), np.concatenate([part.named for part in parts]))


def write_background() -> None:
    rng = random.Random(SEED)
    rows = [row for row in make_training_rows() if not row.history and len(row.text) < 300]
    english = []
    for kind in KINDS:
        candidates = [row for row in rows if row.language == "en" and row.kind == kind and row.part == TRAIN]
        english += rng.sample(candidates, min(EACH, len(candidates)))
    foreign = rng.sample([row for row in rows if row.language != "en" and row.part == TRAIN], OTHERS)
    requests = english + foreign
    leads = rng.sample(
        [passage.searchable for passage in read_passages(corpus_path("encyclopedia-leads"))], LEADS
    )
    questions = EncoderProxy().encoder.vectors([row.text for row in requests], "query: ")
    passages = EncoderProxy().encoder.vectors([lead[:400] for lead in leads], "passage: ")
    centred = np.vstack([questions - questions.mean(0), passages - passages.mean(0)]).astype(np.float64)
    languages = np.array([row.language for row in requests])
    means = np.stack(
        [
            questions[languages == language].mean(0)
            for language in sorted(set(languages))
            if (languages == language).sum() > 20
        ]
    )
    _, _, language_axes = np.linalg.svd(means - means.mean(0), full_matrices=False)
    rest = np.eye(centred.shape[1]) - language_axes[:LANGUAGES].T @ language_axes[:LANGUAGES]
    _, spread, axes = np.linalg.svd(centred @ rest, full_matrices=False)
    deviation = spread[:DIRECTIONS] / np.sqrt(len(centred))
    directions = rest @ (axes[:DIRECTIONS].T / np.sqrt(deviation))
    needless = [i for i, row in enumerate(requests) if row.kind in NEEDLESS]
    chosen = rng.sample([i for i in needless if languages[i] == "en"], ENGLISH)
    chosen += rng.sample([i for i in needless if languages[i] != "en"], FOREIGN)
    compared = unit((questions[chosen] - questions.mean(0)) @ directions.astype(np.float32))
    codes = np.round(compared / np.abs(compared).max(axis=1, keepdims=True) * 127).astype(np.int8)
    np.savez_compressed(
        BACKGROUND_FILE,
        question_mean=questions.mean(0),
        passage_mean=passages.mean(0),
        directions=(directions / np.abs(directions).max()).astype(np.float16),
        requests=codes,
    )
    print(f"{BACKGROUND_FILE.name}: {BACKGROUND_FILE.stat().st_size:,} bytes")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=PARTS, help="tables to print; none: fit alone"
    )
    parser.add_argument("--llm", help="URL of an OpenAI-compatible server, which also chooses in `others`")
    parser.add_argument("--write", action="store_true", help="make background.npz")
    options = parser.parse_args()
    if options.write:
        write_background()
    if options.data is not None:
        measure(options.data, options.parts, options.llm)


if __name__ == "__main__":
    main()
