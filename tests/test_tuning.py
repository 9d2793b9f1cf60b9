"""Tuning: the fit and its guarantee, the gates that come out, how they are loaded, and the report about them."""

import json
import re
import shutil
import sys
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from rgate_integrations import CorpusProfile, Request, load_gate
from rgate_integrations.decision import Draft
from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    EvidenceError,
    MissingDependencyError,
    ModelLoadError,
)
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.composite import draft_features
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.models.remote import RemoteModel
from rgate_integrations.tuning import Budget, MaxLoss, TuneOptions, tune
from rgate_integrations.tuning.calibration import ALWAYS
from rgate_integrations.tuning.evaluation import auc
from rgate_integrations.tuning.fitting import Table, crossfit, fit_correction, ridge_logistic
from rgate_integrations.tuning.report import write_notes
from rgate_integrations.tuning.training import TrainingOptions
from tests.commands import printed, rgate
from tests.saved_gates import change
from tests.tuning_parts import (
    Direct,
    Model,
    N,
    Reader,
    number,
    questions,
    retrieve,
    says_what_it_knows,
    tuned,
    write,
)

# --- the fit -----------------------------------------------------------------------------------------------


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def simulated(n, rng, directions=6):
    """Questions of which the prior knows a little, and the states a little more."""
    states = rng.normal(size=(n, directions)) / np.sqrt(directions)
    prior = rng.normal(size=n)
    right = rng.random(n) < sigmoid(0.7 * prior + 3 * states[:, 0])
    return Table(prior, states, np.zeros((n, 0)), right, right.astype(float)), rng.random(n) < 0.85


def test_the_guarantee_holds_for_new_questions():
    broken = made = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        table, rag = simulated(200, rng)
        chosen = MaxLoss(0.1, confidence=0.9).choose(sigmoid(crossfit(table, seed)), table.known, rag)
        made += chosen.guaranteed
        new, new_rag = simulated(4_000, rng)
        skipped = sigmoid(fit_correction(table, seed)(new)) >= chosen.threshold
        broken += np.where(skipped, new_rag.astype(float) - new.known, 0.0).mean() > 0.1
    assert made >= 10
    assert broken <= 2


def test_the_newton_steps_end_at_the_minimum():
    rng = np.random.default_rng(0)
    columns, offset = rng.normal(size=(80, 5)), rng.normal(size=80)
    right = rng.random(80) < 0.5
    found = ridge_logistic(columns, right, np.full(5, 0.5), offset)
    gradient = columns.T @ (sigmoid(offset + columns @ found) - right) + 0.5 * found
    assert gradient == pytest.approx(np.zeros(5), abs=2e-3)
    separable = np.linspace(-1, 1, 40)[:, None] * 1e3
    assert np.isfinite(ridge_logistic(separable, separable[:, 0] > 0, [1e-6], np.zeros(40))).all()


def test_few_questions_leave_the_shipped_order_alone():
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(40, 20)) * 1e-3
    prior, right = rng.normal(size=40), rng.random(40) < 0.5
    table = Table(prior, noise, np.zeros((40, 0)), right, right.astype(float))
    assert fit_correction(table).weights[0] > -1  # the slope is above 0


@pytest.mark.parametrize("seed", range(8))
def test_what_the_log_has_none_of_is_not_raised(seed):
    """Regression: by a log of facts that the LLM knew alike, the slope was 0, and private questions skipped."""
    rng = np.random.default_rng(seed)
    table, _ = simulated(240, rng)
    known = rng.random(240) < 0.96
    correction = fit_correction(replace(table, known=known, target=known.astype(float)))
    private = replace(table, prior=np.full(240, table.prior[known].min() - 1.1))
    assert (correction(private) <= private.prior).all()
    assert (correction(table) > table.prior)[known].mean() > 0.5


def test_samples_give_the_order_and_answers_the_level():
    table, _ = simulated(400, np.random.default_rng(0))
    soft = replace(table, target=0.5 * table.known)
    assert sigmoid(fit_correction(soft)(soft)).mean() == pytest.approx(table.known.mean(), abs=1e-3)


def test_features_of_log_probabilities_by_hand():
    found = draft_features(Draft(text="x", logprobs=(-1.0, -50.0, -3.0)))
    assert found == pytest.approx([-1.0, -8.0, -20.0, -24.0, np.log(3)])
    assert draft_features(Draft(text="", logprobs=())) == pytest.approx([-20.0, -20.0, -20.0, -20.0, 0.0])
    with pytest.raises(EvidenceError):
        draft_features(Draft(text="x"))


# --- the gates ---------------------------------------------------------------------------------------------


def test_a_gate_comes_out_that_knows_what_the_llm_knows(tmp_path, prior):
    found = tuned(tmp_path / "a" / "b", prior)  # folders that are missing are made
    fitted = found.question
    assert (fitted.auc > 0.95, fitted.auc_before, fitted.choice.guaranteed) == (True, 0.5, True)
    assert str(found).splitlines()[1] == f"question alone: {fitted.choice.guarantee}"
    written = ["README.md", "answer-first", "gate.json", "prior", "report.html", "weights.safetensors"]
    assert sorted(path.name for path in found.folder.iterdir()) == written
    page = (found.folder / "report.html").read_text()
    for sentence in (fitted.choice.guarantee, "tuned, answer first"):
        assert json.dumps(sentence) in page
    # Regression: a gate of one's own was called "shipped", and shown with the threshold 0.5, which was not its own.
    assert '"gate": "before tuning", "draft": "", "threshold": 0.6' in page
    shutil.rmtree(tmp_path / "shipped")  # the shipped gate is kept in the folder
    gate = load_gate(str(found.folder), proxy=Reader(), on_error="raise")
    even, odd = gate.decide_batch(["what is number 102?", "what is number 103?"])
    assert even.p_known > 0.5 > odd.p_known
    drafts = [Draft(text="x", tokens=("a", "b"), logprobs=values) for values in ((-0.1, -0.2), (-2.0, -3.0))]
    requests = [Request(even.question, draft=draft) for draft in drafts]
    sure, unsure = load_gate(f"{found.folder}/answer-first", proxy=Reader()).decide_batch(requests)
    assert sure.p_known > unsure.p_known
    # The saved gate scores as the fit did: the prior's logit is 0.
    (read,) = Reader().hidden(None, [{"question": even.question}], None, fitted.artifact.layers)
    logit = (fitted.artifact.weight * read.states).sum() + fitted.artifact.bias
    assert even.p_known == pytest.approx(sigmoid(logit), abs=1e-6)


def test_the_log_that_a_gate_was_tuned_on_is_no_other_traffic(tmp_path, prior):
    """Regression: logged scores, of the final fit, were compared with held-out ones: "calibrate again"."""
    rng = np.random.default_rng(0)
    knows = {f"n{i}" for i in range(N) if rng.random() < 0.5}

    def says(question):
        draft = says_what_it_knows(question)
        return draft.model_copy(
            update={"text": f"n{number(question)}" if f"n{number(question)}" in knows else "?"}
        )

    folder = f"{tuned(tmp_path, prior, direct=Direct(says=says)).folder}/answer-first"
    requests = [Request(line["question"], draft=says(line["question"])) for line in questions()]
    decisions = load_gate(folder, proxy=Reader(), on_error="raise").decide_batch(requests)
    log = write(tmp_path / "log.jsonl", *({"p_known": each.p_known} for each in decisions))
    output = printed("monitor", log, "--gate", folder)
    rate, expected = (float(each) for each in re.findall(r"([0-9.]+)%", output)[:2])
    assert rate == pytest.approx(expected, abs=2)
    assert "difference at any threshold 0.0" in output


def test_monitoring_refuses_the_decisions_of_another_tuned_gate(tmp_path, prior):
    """Regression: the log of the gate for the question alone was compared with the answer-first gate's: "changed"."""
    folder = tuned(tmp_path, prior).folder
    gates = {name: load_gate(f"{folder}{name}", proxy=Reader()) for name in ("", "/answer-first")}
    requests = [Request(line["question"], draft=says_what_it_knows(line["question"])) for line in questions()]
    failed = gates["/answer-first"].decide("what is number 1?").model_dump(mode="json")
    assert failed["error"], "without a draft"
    logs = {}
    for name, gate in gates.items():
        lines = [decision.model_dump(mode="json") for decision in gate.decide_batch(requests)]
        logs[name] = write(tmp_path / f"{len(logs)}.jsonl", *lines, failed)
        assert "60 decisions" in printed("monitor", logs[name], "--gate", f"{folder}{name}")
    for name, log, said in (("", "/answer-first", "with a draft"), ("/answer-first", "", "without a draft")):
        error = rgate("monitor", logs[log], "--gate", f"{folder}{name}").exception
        assert isinstance(error, DataFormatError)
        assert re.search(f"line 1: a gate that judged .* {said} decided, not ", error.message)
    other = [{**line, "llm": "another LLM (the gate was tuned on it)"} for line in lines]
    error = rgate(
        "monitor", write(tmp_path / "o.jsonl", *other), "--gate", f"{folder}/answer-first"
    ).exception
    assert "line 1: a gate that judged 'another LLM (the gate was tuned on it)'" in error.message


def test_a_gate_that_is_updated_keeps_its_policy_unless_another_is_given(tmp_path, prior):
    """Regression: without the option, the default took its place, and said so only when all was done."""
    policies = []
    for given in (None, Budget(0.9), None):
        found = tuned(tmp_path, prior, options={"policy": given}, update=True)
        policies.append(load_gate(str(found.folder)).gate.trained.provenance["policy"])
    default, kept = ({"name": each.name, **vars(each)} for each in (MaxLoss(0.02), Budget(0.9)))
    assert policies == [default, kept, kept]
    change(found.folder, provenance={"policy": {"rate": "a lot"}})
    with pytest.raises(ModelLoadError, match=r"cannot be read: .*rate"):
        tuned(tmp_path, prior, direct=pytest.fail, update=True)


@pytest.mark.parametrize(
    ("update", "why"), [(False, "exists.* Hint: If it is a .*update=True"), (True, "not a tuned gate")]
)
@pytest.mark.parametrize("held", ["another gate", "nothing"])
def test_an_existing_folder_is_left_alone_before_anything_is_asked(tmp_path, prior, update, why, held):
    if held == "nothing":
        (tmp_path / "my-gate").mkdir()
    else:
        save_gate(SavedGate(method="calibrated"), tmp_path / "my-gate")
    with pytest.raises(ConfigurationError, match=why):
        tuned(tmp_path, prior, direct=pytest.fail, update=update)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TuneOptions, {"concurrency": 0}),
        (TuneOptions, {"tokens": 0}),
        (TuneOptions, {"max_questions": 0}),
        (TuneOptions, {"num_samples": -1}),
        (TuneOptions, {"seed": -1}),
        (TuneOptions, {"labels": "guess"}),
        # Regression: a bare TypeError of the comparison.
        (TuneOptions, {"tokens": "5"}),
        # Regression: a bare KeyError, and errors of scikit-learn, while the gate was trained.
        (TrainingOptions, {"draft": "guess"}),
        (TrainingOptions, {"folds": 0}),
        (TrainingOptions, {"tokens": 0}),
        (TrainingOptions, {"seed": 2**32}),
        (Budget, {"rate": 1.5}),
        (Budget, {"rate": 0.5, "confidence": 0}),
        (MaxLoss, {"loss": 0}),
        # Regression: these were TypeErrors without a name.
        (MaxLoss, {"loss": "0.02"}),
        (Budget, {"rate": None}),
        (MaxLoss, {"loss": 0.1, "confidence": 1.0}),
    ],
)
def test_options_and_guarantees_out_of_range_are_refused_by_name_and_value(kind, options):
    *_, (name, value) = options.items()
    with pytest.raises(ConfigurationError, match=f"(?i){name}.*{value}"):
        kind(**options)


def test_what_the_fit_lacks_is_said_before_the_llm_is_asked(tmp_path, prior, monkeypatch):
    """Regression: it was missed after all answers were paid for."""
    stateless = RemoteModel("http://localhost:9/v1", "blind")
    with pytest.raises(EvidenceError, match="needs hidden states, which the model 'blind' does not provide"):
        tuned(tmp_path, prior, direct=pytest.fail, options={"proxy": stateless})
    monkeypatch.setitem(sys.modules, "sklearn.model_selection", None)
    with pytest.raises(MissingDependencyError, match="sklearn"):
        tuned(tmp_path, prior, direct=pytest.fail)


def test_a_tuned_gate_is_not_replaced_by_another_command(tmp_path, prior):
    """Regression: calibrate and train removed its prior, its report and its answer-first gate."""
    folder = tuned(tmp_path, prior).folder
    present, data = sorted(folder.rglob("*")), write(tmp_path / "data.jsonl", {})
    for command in ("calibrate", "train"):
        error = rgate(command, "--data", data, "--out", folder).exception
        assert isinstance(error, ConfigurationError)
        assert "contains other files, such as 'answer-first'" in error.message
    with pytest.raises(ConfigurationError, match="contains other files"):
        save_gate(SavedGate(method="calibrated"), folder)
    assert sorted(folder.rglob("*")) == present


def test_too_small_for_a_guarantee_says_how_many_would_do(tmp_path, prior):
    choice = tuned(tmp_path, prior, options={"policy": MaxLoss(0.05)}).question.choice
    assert (choice.guaranteed, choice.threshold) == (False, ALWAYS)
    assert re.search(r"n = \d+.*questions like these would be enough", choice.guarantee)


@pytest.mark.model
def test_the_shipped_gate_is_tuned_with_its_own_model(tmp_path, smollm2):
    found = tune(questions(24), direct=Direct(), retrieve=retrieve, out=tmp_path / "my-gate")
    assert found.question.artifact.weight.shape == (3, 384)
    assert load_gate(str(found.folder), on_error="raise").decide("what is number 3?").gate == "tuned"
    partial_answer = Draft(text="a b", tokens=("a", " b"), logprobs=(-0.1, -0.2))
    gate = load_gate(f"{found.folder}/answer-first", on_error="raise")
    assert gate.decide("what is number 3?", draft=partial_answer).draft == partial_answer


@pytest.mark.model
def test_what_overrides_retrieve_counts_in_the_guarantee_and_the_report(tmp_path, smollm2):
    """Regression: a quarter of the questions has a URL, and 20 % were guaranteed."""
    asked = questions(60)
    for index, row in enumerate(asked):
        named = "a" if index % 4 else "https://example.com"
        row["question"] = row["question"].replace("what is number", f"is this {named} number:")
    options = TuneOptions(policy=Budget(0.2))
    found = tune(asked, direct=Direct(), retrieve=retrieve, out=tmp_path / "my-gate", options=options)
    choice = found.question.choice
    assert (choice.threshold, choice.guaranteed, choice.facts["retrieval_rate"]) == (0.0, False, 0.25)
    assert found.question.retrieves.tolist() == [index % 4 == 0 for index in found.question.indices]
    decisions = load_gate(str(found.folder), on_error="raise").decide_batch(
        [row["question"] for row in asked]
    )
    assert [decision.retrieve for decision in decisions] == [index % 4 == 0 for index in range(60)]
    page = (found.folder / "report.html").read_text()
    assert "Threshold 0.000: retrieves for 25.0%." in page
    # Regression: the page's own numbers left the overrides out, and contradicted this note.
    assert [page.count(f'"override": {value}') for value in ("true", "null")] == [15 * 3, 45 * 3]
    # Regression: the AUC in the notes left them out, and was not the one of the page.
    shown = [
        0.0 if retrieve else p for retrieve, p in zip(found.question.retrieves, found.question.p, strict=True)
    ]
    labels = found.labels.known[found.question.indices]
    assert found.question.auc == pytest.approx(auc(shown, labels))
    assert found.question.auc != pytest.approx(auc(found.question.p, labels))


def test_a_gate_that_tuning_did_not_improve_says_so(tmp_path, prior):
    """Regression: the report printed both AUCs, and drew no conclusion."""
    found = tuned(tmp_path, prior).question
    notes = write_notes(Mock(answered=[Mock(seconds={"direct": 1, "retrieve": 2})] * N), found, None)
    assert not any("keep that one" in note for note in notes["question alone"])
    worse = replace(found, auc=0.4, auc_before=0.5, retrieves=np.ones(N, bool))
    notes = write_notes(Mock(answered=[Mock(seconds={"direct": 1, "retrieve": 2})] * N), worse, None)
    assert notes["question alone"][-2:] == [
        "No better than the gate before tuning (AUC 0.400, not above 0.500, on held-out questions): keep that one.",
        "Retrieving for 100.0%, this gate saves next to nothing.",
    ]


@pytest.mark.model
def test_the_prior_is_that_of_the_llm_that_answers_if_its_name_is_known(tmp_path):
    for name, options, llm in (
        ("gpt-4o", {}, "gpt-4o"),
        ("one", {"llm_name": "gpt-4o"}, "gpt-4o"),
        ("one", {}, ""),
    ):
        shutil.rmtree(tmp_path / "my-gate", ignore_errors=True)
        (tmp_path / "my-gate.answers.jsonl").unlink(missing_ok=True)
        direct = Model(lambda question, seed: says_what_it_knows(question).text, name)
        found = tuned(tmp_path, "default", direct=direct, options={"proxy": None, **options})
        prior = load_gate(str(found.folder)).gate._prior
        assert (prior.llm_name, prior.ability is None) == (llm, not llm)


def test_a_question_in_other_punctuation_is_not_tuned_on_twice(tmp_path, prior):
    """Regression: it was asked and counted again, and was in several folds: 40 questions had a guarantee."""
    direct, asked = Direct(), questions()
    more = [
        {**row, "question": f"What  is the {row['question'][8:]}{ends}"} for row in asked for ends in "?!"
    ]
    plain = tuned(tmp_path / "plain", prior, asked)
    repeated = tuned(tmp_path / "repeated", prior, [*asked, *more], direct=direct)
    assert (repeated.question.choice, sorted(direct.asked)) == (
        plain.question.choice,
        sorted(row["question"] for row in asked),
    )
    assert len(tuned(tmp_path / "plain", prior, more, update=True).labels.known) == N


@pytest.mark.model
def test_a_corpus_changes_the_report_but_neither_the_guarantee_nor_the_gate(tmp_path, prior):
    """Regression: what a corpus covered counted as retrieved, but the saved gate has no corpora, and skipped it."""
    asked = questions()
    for row in asked[::4]:
        row["question"] = row["question"].replace("number", "the weight of the Acme X200 number")
    corpus = CorpusProfile.from_description("Handbook of the Acme X200.")
    plain, covered = (
        tuned(tmp_path / str(number), prior, asked, options={"policy": Budget(0.7), "corpus": given})
        for number, given in enumerate((None, corpus))
    )
    assert covered.question.choice == plain.question.choice
    assert covered.question.retrieves.tolist() == plain.question.retrieves.tolist()
    pages = [(found.folder / "report.html").read_text() for found in (plain, covered)]
    assert ['"p_covered": 0.9' in page for page in pages] == [False, True]


@pytest.mark.parametrize(
    ("given", "labels", "why"),
    [
        (questions(19), "agreement", "Only 19 questions; at least 20"),
        (
            [{"question": row["question"]} for row in questions()],
            "gold",
            "Only 0 questions have gold answers",
        ),
        ([*questions(19), {"question": "what is number 99?"}], "gold", "Only 19 questions have gold answers"),
    ],
)
def test_what_cannot_be_labelled_is_said_before_the_llm_is_asked(tmp_path, prior, given, labels, why):
    """Regression: all calls were paid for first."""
    with pytest.raises(DataFormatError, match=why):
        tuned(tmp_path, prior, given, direct=pytest.fail, options={"labels": labels})
