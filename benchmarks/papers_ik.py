"""IK: let your LLM generate a few tokens. What reading the beginning of an answer is worth; see `papers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from begun import CUTS
from begun import fit as fit_begun
from labels import SETS
from paper_data import (
    Options,
    SixSets,
    held_out_question,
    judgments,
    mixed,
    on_six_sets,
    question_probe,
    question_states,
    random_folds,
    read_rows,
)
from paper_tables import (
    FAILS,
    HOLDS,
    OPEN,
    UNTESTED,
    Claim,
    Estimate,
    PaperTable,
    Part,
    all_agree,
    auc_difference,
    auc_estimate,
    difference,
    estimated,
    mean_auc,
)

from rgate_integrations import Draft, load_gate
from rgate_integrations.models.local import DEFAULT_MODEL, shared_proxy
from rgate_integrations.runtime.text import is_correct

PAPER = "IK"
THEIRS = {0: "0.77, 0.84", 8: "0.78, 0.85", 16: "0.79, 0.87", 32: "0.82, 0.89", 64: "0.83, 0.90"}
"""Accuracy and AUC of Mistral-7B on NQ, by tokens of the answer (table 3 of the paper)."""
SIZES = (300, 600, 1_200)
LARGE_SIZES = (250, 500, 1_000, 2_000, 4_000, 8_000)
THEIR_CURVE = "AUC 0.80, 0.81, 0.82, 0.83, 0.84 with 5,000, 10,000, 20,000, 40,000, 83,000 labels"
ASKED = 100
"""Questions a set for the gate without training."""


@dataclass(frozen=True)
class Length:
    """Held-out results at one length of the answer.

    Attributes:
        tokens: How many tokens of the answer are read; 0 is the question alone.
        logits: Held-out logits.
        p: P(known), calibrated on other folds.
    """

    tokens: int
    logits: np.ndarray
    p: np.ndarray


def lengths_part(six: SixSets) -> Part:
    """Read ever more tokens of the answer (tables 1 and 3 of the paper)."""
    lengths = by_length(six)
    return lengths_table(six, lengths), length_claims(six, lengths)


def by_length(six: SixSets) -> list[Length]:
    """Return held-out results at each length."""
    found = []
    for tokens in (0, *CUTS):
        logits = six.question() if tokens == 0 else six.answer(CUTS.index(tokens))
        found.append(Length(tokens, logits, six.calibrated(logits)))
    return found


def lengths_table(six: SixSets, lengths: list[Length]) -> PaperTable:
    """Return accuracy, AUC and what a gate makes of them, by tokens."""
    closed, rag = six.arms.closed, six.arms.rag
    rows = []
    for each in lengths:
        half, best = each.p < 0.5, six.best(each.p)
        nq = six.sets == "nq"
        rows.append(
            [
                str(each.tokens),
                f"{np.mean((each.p >= 0.5) == closed):.3f}",
                str(auc_estimate(each.logits, closed, six.sets)),
                f"{mean_auc(each.logits, closed, np.zeros(len(closed))):.3f}",
                f"{mean_auc(each.logits[nq], closed[nq], six.sets[nq]):.3f}",
                f"{100 * six.arms.right(half).mean():.1f} ({100 * half.mean():.0f})",
                f"{100 * six.arms.right(best).mean():.1f} ({100 * best.mean():.0f})",
                THEIRS[each.tokens],
            ]
        )
    columns = [
        "tokens",
        "accuracy",
        "AUC, mean of the sets [95 %]",
        "AUC, pooled",
        "AUC, nq",
        "right at 0.5, % (retrieved)",
        "right at the best threshold, % (retrieved)",
        "the paper: accuracy, AUC",
    ]
    caption = (
        f"Probes on smollm2's states for {len(closed)} questions of six sets, whose answers an 8B LLM "
        "wrote; one probe a length, held out by question cluster. The LLM is right without retrieval on "
        f"{100 * closed.mean():.1f} % and with it on {100 * rag.mean():.1f} %. The best threshold is "
        "chosen on the other folds."
    )
    return PaperTable("lengths", caption, columns, rows)


def length_claims(six: SixSets, lengths: list[Length]) -> list[Claim]:
    """Return the claims about the number of tokens."""
    at = {each.tokens: each for each in lengths}
    gain = partial(_gain, six, at)
    more, early, late = gain(32, 0), gain(8, 0), gain(64, 32)
    half = at[32].p < 0.5
    against_always = difference(six.arms.right(half), six.arms.rag)
    best = six.best(at[32].p)
    best_against_always = difference(six.arms.right(best), six.arms.rag)
    return [
        Claim(
            PAPER,
            "32 tokens of the answer judge better than the question alone",
            "AUC 0.89 against 0.84",
            f"AUC {more.change}",
            more.verdict(),
        ),
        Claim(
            PAPER,
            "4 to 16 tokens help little; 32 are needed",
            "0, 8, 16, 32 tokens: AUC 0.84, 0.85, 0.87, 0.89",
            f"0 to 8 tokens {early.change}; 8 to 32 {gain(32, 8).change}",
            _early(six, at).verdict(),
        ),
        Claim(
            PAPER,
            "beyond 32 tokens the gain is marginal (at most 0.01)",
            "32 to 64 tokens: AUC +0.01",
            f"AUC {late.change}",
            _not_above(late, 0.01),
        ),
        Claim(
            PAPER,
            "at the threshold 0.5 the gate is more right than always retrieving",
            "0.77 against 0.76 at 36 % retrieval",
            f"{against_always.points} points at {100 * half.mean():.0f} % retrieval",
            against_always.verdict(),
        ),
        Claim(
            PAPER,
            "at its best threshold it is more right than always retrieving",
            "0.79 against 0.76 at 50 % retrieval",
            f"{best_against_always.points} points at {100 * best.mean():.0f} % retrieval",
            best_against_always.verdict(),
        ),
    ]


def _gain(six: SixSets, at: dict[int, Length], more: int, fewer: int) -> Estimate:
    return auc_difference(at[more].logits, at[fewer].logits, six.arms.closed, six.sets)


def _early(six: SixSets, at: dict[int, Length]) -> Estimate:
    """Return by how much more the tokens 9 to 32 bring than the first 8."""
    scores = [at[tokens].logits for tokens in (0, 8, 32)]

    def more(rows: np.ndarray) -> float:
        closed, sets = six.arms.closed[rows], six.sets[rows]
        none, few, many = (mean_auc(each[rows], closed, sets) for each in scores)
        return (many - few) - (few - none)

    return estimated(more, six.sets)


def _not_above(estimate: Estimate, bound: float) -> str:
    if estimate.high <= bound:
        return HOLDS
    return FAILS if estimate.low > bound else OPEN


# --- other data sets, and the number of labels ---------------------------------------------------------------


def sets_part(six: SixSets) -> Part:
    """Train on NQ alone, and judge the other sets (table 2 of the paper)."""
    place = CUTS.index(32)
    rows = []
    nq = six.sets == "nq"
    probe = fit_begun(six.begun, np.flatnonzero(nq), [place])
    foreign = probe(six.begun.states[:, [place]])[:, 0]
    own = six.answer(place)
    for name in dict.fromkeys(six.sets.tolist()):
        inside = six.sets == name
        closed, sets = six.arms.closed[inside], six.sets[inside]
        scores = own[inside] if name == "nq" else foreign[inside]
        rows.append(
            [
                name,
                f"{100 * closed.mean():.1f}",
                f"{100 * six.arms.rag[inside].mean():.1f}",
                f"{mean_auc(scores, closed, sets):.3f}",
                f"{mean_auc(own[inside], closed, sets):.3f}",
            ]
        )
    others = ~nq
    gap = auc_difference(own[others], foreign[others], six.arms.closed[others], six.sets[others])
    level = auc_estimate(foreign[others], six.arms.closed[others], six.sets[others])
    caption = (
        "32 tokens: a probe that was trained on NQ alone (497 questions; the paper has 79,000), and one "
        "that was trained on all six. The row of NQ is held out in both columns: the probe on all six."
    )
    table = PaperTable(
        "sets",
        caption,
        ["set", "right without retrieval, %", "with", "AUC, trained on NQ", "AUC, trained on all"],
        rows,
    )
    claim = Claim(
        PAPER,
        "a gate that was trained on NQ alone judges other sets, too",
        "AUC 0.82 to 0.92 on five other sets",
        f"AUC {level}, mean of five other sets; {gap.change} with labels of their own",
        level.verdict(0.5),
    )
    return table, [claim]


def curve_part(six: SixSets) -> Part:
    """Train on ever more answers, with and without tokens (table 5 of the paper)."""
    place = CUTS.index(32)
    closed, rows, logits = six.arms.closed, [], {}
    largest = round(len(closed) * 0.8)
    sizes = [size for size in SIZES if size < largest] + [largest]
    for size in sizes:
        trained = None if size == largest else size
        logits[size] = six.question(trained), six.answer(place, trained)
        cells = [str(auc_estimate(each, closed, six.sets)) for each in logits[size]]
        rows.append([f"{size:,}", *cells])
    few_with, all_without = logits[sizes[0]][1], logits[sizes[-1]][0]
    gap = auc_difference(few_with, all_without, closed, six.sets)
    caption = "Learning curve on the six sets, held out by question cluster: AUC, mean of the sets [95 %]."
    table = PaperTable("curve", caption, ["labels", "question alone", "32 tokens"], rows)
    claim = Claim(
        PAPER,
        "with 32 tokens, few labels do more than many without tokens",
        "AUC 0.86 with 5,000 labels, without tokens 0.84 with 83,000",
        f"{sizes[0]:,} with tokens against {sizes[-1]:,} without: AUC {gap.change}",
        gap.verdict(),
    )
    return table, [claim]


def large_curve_part(options: Options) -> Part:
    """Train on up to 8,000 labels of one LLM, on the question alone."""
    rows = [
        row
        for row in read_rows(options.data / "more" / "wack_base_models.jsonl.gz")
        if row["dataset"] == "triviaqa"
        and "Llama" in row["llm"]
        and row["closed_book_soft"] is not None
        and row["overlap"] is None
    ]
    rows = mixed(list({row["question"].strip(): row for row in rows}.values()), options.limit)
    questions = [row["question"].strip() for row in rows]
    states = question_states(questions, options.cache)
    soft = np.array([row["closed_book_soft"] for row in rows], float)
    return large_curve(states, soft)


def large_curve(states: np.ndarray, soft: np.ndarray) -> Part:
    """Return the learning curve of questions; a fifth of them are never trained on."""
    known, one_set = soft >= 0.5, np.zeros(len(soft))
    test = np.arange(len(soft)) < len(soft) // 5
    rest = int((~test).sum())
    sizes = [size for size in LARGE_SIZES if size < 0.9 * rest] + [rest]
    rows, scores = [], {}
    for size in sizes:
        chosen = np.flatnonzero(~test)[:size]
        probe = question_probe(states[chosen], soft[chosen], one_set[chosen])
        scores[size] = probe(states[test][:, None])[:, 0]
        rows.append([f"{size:,}", str(auc_estimate(scores[size], known[test], one_set[test]))])
    half = max((size for size in sizes if size <= sizes[-1] / 2), default=sizes[0])
    gain = auc_difference(scores[sizes[-1]], scores[half], known[test], one_set[test])
    caption = (
        f"Question alone, up to {rest:,} labels of one LLM (the base model Llama-3.1-8B on TriviaQA, "
        f"tried six times a question); AUC on {int(test.sum()):,} other questions. The paper, whose 7B "
        f"model is tuned on NQ: {THEIR_CURVE}."
    )
    claim = Claim(
        PAPER,
        "without tokens, doubling the labels still helps",
        "40,000 to 83,000: AUC 0.83 to 0.84",
        f"{half:,} to {sizes[-1]:,}: AUC {gain.change}",
        gain.verdict(),
    )
    return PaperTable("large-curve", caption, ["labels", "AUC [95 %]"], rows), [claim]


# --- teachers ------------------------------------------------------------------------------------------------


def teacher_part(options: Options) -> Part:
    """Learn from people's judgments and from string matches (table 4 of the paper)."""
    rows = read_rows(options.data / "more" / "evouna_nq_triviaqa.jsonl.gz")
    llms = list(dict.fromkeys(row["llm"] for row in rows))
    table_rows, gaps = [], []
    for llm in llms:
        own = mixed([row for row in rows if row["llm"] == llm], options.limit)
        states = question_states([row["question"].strip() for row in own], options.cache)
        people = np.array([row["closed_book_correct"] for row in own])
        matched = np.array([is_correct(row["closed_book_text"], row["gold_answers"]) for row in own])
        sets = np.array([row["dataset"] for row in own])
        cells, gap = teachers(states, people, matched, sets)
        table_rows.append([llm, f"{len(own):,}", *cells])
        gaps.append(gap)
    caption = (
        "Question alone, held out. The teacher is a person who judged the LLM's answer, or a string "
        "match: a gold answer is contained. AUC, mean of NQ and TriviaQA, against what the teacher says, "
        "and against the person."
    )
    columns = [
        "LLM",
        "questions",
        "teachers agree, %",
        "person, AUC against itself",
        "string match, AUC against itself",
        "string match, AUC against the person",
    ]
    shown = "; ".join(f"{llm} {gap.change}" for llm, gap in zip(llms, gaps, strict=True))
    claim = Claim(
        PAPER,
        "an LLM judge is a better teacher than string matches",
        "AUC 0.89 (judge), 0.84 and 0.80 (match, recall), each against itself",
        f"a person instead of the judge: AUC {shown}",
        all_agree([gap.verdict() for gap in gaps]),
    )
    return PaperTable("teachers", caption, columns, table_rows), [claim]


def teachers(
    states: np.ndarray, people: np.ndarray, matched: np.ndarray, sets: np.ndarray
) -> tuple[list[str], Estimate]:
    """Return the cells of one LLM, and by how much the person's labels are learned better than the string match's.

    Args:
        states: smollm2's states of the questions.
        people: What a person says of each answer.
        matched: Whether a gold answer is contained in it.
        sets: Data set of each.
    """
    fold = random_folds(len(people))
    by_person = held_out_question(states, people, sets, fold)
    by_match = held_out_question(states, matched, sets, fold)
    cells = [
        f"{100 * np.mean(people == matched):.1f}",
        f"{mean_auc(by_person, people, sets):.3f}",
        f"{mean_auc(by_match, matched, sets):.3f}",
        f"{mean_auc(by_match, people, sets):.3f}",
    ]

    def gain(rows: np.ndarray) -> float:
        own = mean_auc(by_person[rows], people[rows], sets[rows])
        return own - mean_auc(by_match[rows], matched[rows], sets[rows])

    return cells, estimated(gain, sets)


# --- without training ----------------------------------------------------------------------------------------


def untrained_part(options: Options) -> Part:
    """Ask smollm2 with the paper's prompt, without training."""
    records = []
    for name in SETS:
        path = options.data / f"adaptive_llama31_8b.{name}.dev.jsonl"
        records += mixed(read_rows(path), min(ASKED, options.limit or ASKED))
    known = np.array([row["closed_book_correct"] for row in records])
    sets = np.array([row["dataset"] for row in records])
    rows = []
    for tokens in (0, 32):
        p = judgments(
            options.out / f"ik.untrained.{tokens}.jsonl",
            [f"{row['dataset']} {row['id']}" for row in records],
            partial(_asked, records, tokens),
        )
        rows.append([str(tokens), str(auc_estimate(p, known, sets)), f"{np.mean((p >= 0.5) == known):.3f}"])
    caption = (
        f"Without training: smollm2 is asked with the paper's prompt whether it knows, {len(records)} questions. "
        f'"No" for all would be right for {np.mean(~known):.3f}.'
    )
    return PaperTable("untrained", caption, ["tokens", "AUC, mean of the sets [95 %]", "accuracy"], rows), []


def _asked(records: list[dict], tokens: int, places: list[int]) -> list[float]:
    proxy = shared_proxy(DEFAULT_MODEL)
    some = [records[place] for place in places]
    drafts = None
    gate = load_gate("ik", proxy=proxy, tokens=0, on_error="raise")
    if tokens:
        gate = load_gate("ik", proxy=proxy, tokens=tokens, source="recorded", on_error="raise")
        texts = [row["closed_book_text"] for row in some]
        drafts = [Draft(text=proxy.cut(text, tokens) or text, source="recorded") for text in texts]
    decisions = gate.decide_batch([row["question"] for row in some], drafts=drafts)
    return [decision.p_known for decision in decisions]


PARTS: dict[str, Callable[[Options], Part]] = {
    "lengths": on_six_sets(lengths_part),
    "sets": on_six_sets(sets_part),
    "curve": on_six_sets(curve_part),
    "large-curve": large_curve_part,
    "teachers": teacher_part,
    "untrained": untrained_part,
}

UNTESTABLE = [
    Claim(
        PAPER,
        "LoRA on the LLM itself beats a probe on its middle layers",
        "no figures given",
        "no 7B LLM here; LoRA on smollm2 was tried on 400 answers only (Quality of the shipped gates)",
        UNTESTED,
    ),
]
