"""What a corpus covers: profiles, what they are made from, what is saved of them, and what gates decide by them."""

import asyncio
import json
import math
import pickle
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from pydantic import Field

from rgate_integrations import CorpusProfile, Decision, Gate, Request, Score, load_gate
from rgate_integrations.corpus import profile as profile_module
from rgate_integrations.corpus.pieces import drop_shared_beginning
from rgate_integrations.corpus.sampling import collect_passages, sample_texts
from rgate_integrations.corpus.terms import Terms, find_terms, tokenize
from rgate_integrations.decision import Draft
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.errors import ConfigurationError, ProfileError
from rgate_integrations.gates.corpus import CorpusGate, find_code
from rgate_integrations.gates.evidence.model_outputs import DraftSpec
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.models.encoder import EncoderProxy
from rgate_integrations.runtime.files import read_file
from tests.commands import printed, rgate
from tests.patience import PATIENCE

LOGGER = [
    "The X200 data logger samples temperature every ten seconds. Set sample_interval to change the rate.",
    "Error E-41 means that the battery of the logger is low. Replace it, then press reset.",
    "Firmware updates of the data logger are copied to the memory card as firmware.bin.",
    "The logger's probe is connected to port A. A second probe goes to port B.",
    "Export the readings of the data logger as CSV with the desktop program.",
    "The logger stores 60,000 readings, then overwrites the oldest ones.",
]
LEAVE = [
    "Employees have 28 days of annual leave. Requests for leave go to the line manager.",
    "Parental leave is paid for 16 weeks. Tell human resources three months before it begins.",
    "Sick leave needs a certificate from the third day on.",
    "Unused days of annual leave expire at the end of March.",
    "Travel expenses are paid back with the salary of the next month.",
    "The company pays half of the pension contributions of employees.",
]


class Encoder:
    """Counts the letters of a text: enough to compare texts with each other."""

    def vectors(self, texts, prefix):
        counts = [[text.lower().count(chr(97 + i % 26)) + 0.01 * i for i in range(384)] for text in texts]
        return np.array(counts, np.float32)

    def log_frequency(self, word):
        return -6.0 if word in ("the", "of", "is", "to", "a") else -14.0


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(EncoderProxy, "encoder", Encoder())


@pytest.fixture(scope="module")
def profiles():
    return CorpusProfile.from_texts(LOGGER, "logger"), CorpusProfile.from_texts(LEAVE, "leave")


# --- samples and terms -------------------------------------------------------------------------------------------


def test_a_sample_has_each_passage_once_whatever_the_order():
    texts = [f"passage {i}" for i in range(1000)]
    one, other = sample_texts(texts, 50), sample_texts([*reversed(texts), *texts], 50)
    assert one.texts == other.texts
    assert len(one.texts) == len(set(one.texts)) == 50
    assert (one.seen, other.seen) == (1000, 2000)
    assert sample_texts(iter(texts), 5_000).seen == len(sample_texts(texts, 5_000).texts) == 1000
    assert sorted(map(len, sample_texts(["x" * 5_000, " \n", "x" * 5_000], 50).texts)) == [1_000, 2_000]


def test_terms_are_what_the_corpus_has_oftener_and_names_are_identifiers_and_codes():
    terms = find_terms(
        [*LOGGER, "See ray.put and RayJob, of the 19th and the 3rd. 60,000 at 2-year."], Encoder()
    )
    assert "logger" in terms.telling
    assert "the" not in terms.telling
    assert terms.names == {"x200", "sample_interval", "e-41", "firmware.bin", "ray.put", "rayjob"}


@pytest.mark.model
def test_words_are_not_cut_at_vowel_signs_and_names_need_capitals():
    """Regression: the words of a Hindi corpus were pieces such as "टर", and its names pieces of "can" and "his"."""
    texts = ["छात्र पुस्तकें ले सकते हैं।", "वह उसका कार्ड दिखा सकते हैं।", "शुल्क अब दे सकते हैं।"]
    assert tokenize(texts[0]) == ["छात्र", "पुस्तकें", "ले", "सकते", "हैं"]
    assert tokenize("יְרוּשָׁלַיִם E-41") == ["יְרוּשָׁלַיִם", "e-41"]
    assert find_terms(texts, EncoderProxy().encoder).names == frozenset()


@pytest.mark.parametrize(
    "text",
    [
        "E-41が出ます",
        "错误E-41表示",
        "E-41이 표시",
        "خطأ وE-41",
        "שגיאה בE-41",
        "รหัสE-41แสดง",
        "Ｅ－４１：電池",
        "E\u201141",
        "e\u221241",
    ],
)
def test_a_code_is_a_name_whatever_script_it_touches(fake, text):
    """Regression: in Japanese, a name was a whole clause, so that no question had it."""
    profile = CorpusProfile.from_texts([text, "x"])
    assert profile.terms.names == {"e-41"}
    asked = ["What is E-41?", "E-41とは何ですか", "E-41은?", "What is E\u201141?"]
    asked += ["Was heißt die E-41-Meldung?", "Akku-E-41"]  # a compound names it, too
    assert [profile.match_names(question) for question in asked] == [("e-41",)] * len(asked)
    assert profile.match_names("What is E-4, A-E-41-B or E-412?") == ()


@pytest.mark.model
@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (
            ["Take Pantol an hour before a meal, with water. Ask a doctor.", "Pantol has French milk in it."],
            {"pantol"},
        ),
        (["He likes to take Pantol with milk.", "A pantol is a word here, and so is Pantol in it."], set()),
        (["Only one passage speaks of Pantol.", "The other one does not."], set()),
        (["Nehmen Sie Pantol mit Wasser und Brot.", "Wenn Pantol im Schrank mit Brot war."], set()),
        (["D'Leit vun Ostrivik ginn an d'Schoul.", "Si sinn zu Ostrivik vun der Gemeng."], set()),
        # Regression: texts that live on names had none, so "Pim dead?" was answered from memory.
        (
            [
                "At dawn Pim meets Corvin and Queen Isarre by the Tashkel.",
                "Then Pim tells Corvin of Mossgran.",
            ],
            {"pim", "corvin"},
        ),
        (["See How To Take Your Pantol With Milk.", "Now Ask Your Doctor For Pantol And More."], set()),
        (["Den Pantolpass braucht man für Pantolgeld.", "Das Pantolgeld gibt es auf den Pantolpass."], set()),
        (
            ["At dawn Auntie Pim met Auntie Corvin by the lake.", "Then Pim rode off; Corvin slept."],
            {"pim", "corvin"},
        ),
        (["Потом Корвин пошёл с Пимом домой.", "Тут Корвин увидел Пимом данный меч."], {"корвин", "пимом"}),
        (
            ["The area of the campus is 3 km², without the park.", "It has CO₂ filters by Javatm™, No. №5."],
            set(),
        ),
        (["The code is Ｘ２００.", "Error E\u201141 is rare."], {"x200", "e-41"}),
        # Regression: "Write a job in flumen" was no task about its docs.
        (
            ["flumen.run starts a job.", "Open it with flumen.connect, and app.run it."],
            {"flumen", "flumen.run", "flumen.connect", "app.run"},
        ),
        (["Call app.run first.", "Then app.stop it."], {"app.run", "app.stop"}),
        # Regression: "What is FMLA?" was answered from memory, with a handbook that has a rule about it.
        (
            [
                "Under FMLA, leave is unpaid.",
                "FREE PARKING: ask HR by HTTP or PDF, at any time of day, in any of the offices.",
            ],
            {"fmla"},
        ),
        (["The ESPP opens in May.", "An Espp is also written so."], set()),
        (["Программа ESPP открывается в мае."], {"espp"}),
        (["THE ESPP OPENS IN MAY.", "ASK HR ABOUT FMLA."], set()),
    ],
    ids=[
        "a product",
        "also in lower case",
        "once",
        "nouns with capitals",
        "nouns with capitals in Luxembourgish",
        "many names",
        "Title Case",
        "nouns with capitals without an and",
        "titles before names",
        "many names in Cyrillic",
        "units and signs",
        "wide codes",
        "a library",
        "a common word",
        "an acronym",
        "an acronym in other letters, too",
        "an acronym in Russian",
        "everything in capitals",
    ],
)
def test_names_of_products_libraries_and_rare_acronyms(texts, names):
    assert find_terms(texts, EncoderProxy().encoder).names == names


# --- searches ----------------------------------------------------------------------------------------------------


def test_searches_go_on_with_what_they_find_and_are_bounded():
    asked = []

    def search(query):
        asked.append(query)
        return [f"{query} and more", "The same."]

    assert len(collect_passages(search, 30)) == 31
    assert len(asked) == len(set(asked)) == 30
    asked.clear()
    collect_passages(lambda query: asked.append(query) or ["The same. And more."], 1_000)
    assert len(asked) < 50, "nothing new comes back"


@pytest.mark.parametrize(
    "texts",
    [
        ["BR-1001; M8 x 40 hex bolt; 0.18; 10", "BR-1002; M8 nyloc nut; 0.06; 10", "GD-6010; Secateurs; 41"],
        ["内なべの水加減は目盛に合わせます。", "本体の吸気口がふさがっています。"],
        ["Chinon rouge 2025, 75 cl, 11,90 €", "Livraison offerte dès 120 €"],
    ],
)
def test_a_keyword_index_is_searched_in_any_language_and_as_a_table(texts):
    """Regression: only English words were asked for, so that the corpus had no passages."""

    def search(query):
        return [text for text in texts if any(word in text for word in query.split())]

    assert sorted(collect_passages(search)) == sorted(texts)


def test_all_passages_of_a_search_count_even_if_it_finds_more_than_it_is_asked_for():
    """Regression: of a LlamaIndex `SummaryIndex`, which always returns all of its nodes, only ten were read."""
    assert len(collect_passages(lambda query: [f"Passage {number}." for number in range(30)], 2)) == 30


from_retriever = partial(CorpusProfile.from_retriever, timeout=0.05)


@pytest.mark.parametrize(
    ("make", "given", "error", "said"),
    [
        (from_retriever, 3, ConfigurationError, None),
        (
            CorpusProfile.from_retriever,
            lambda query: [],
            ProfileError,
            "None of the 7. searches found anything.* Hint: ",
        ),
        (
            partial(CorpusProfile.from_retriever, searches=3),
            lambda query: [],
            ProfileError,
            "None of the 3 searches",
        ),
        (from_retriever, lambda query: 1 / 0, ProfileError, None),
        (from_retriever, lambda query: time.sleep(1), ProfileError, None),
        *(
            (CorpusProfile.from_retriever, lambda query, results=results: results, ProfileError, "TypeError")
            for results in (None, "text", {"answer": "text"}, [3], [SimpleNamespace(text=None)])
        ),
        # Regression: nothing was said until the timeout, and then that no search found anything.
        (
            partial(CorpusProfile.from_retriever, timeout=PATIENCE),
            lambda query: sys.exit("bye"),
            ProfileError,
            "SystemExit: bye",
        ),
        *(
            (
                partial(CorpusProfile.from_retriever, timeout=timeout),
                lambda query: pytest.fail("searched"),
                ConfigurationError,
                "number of seconds above 0",
            )
            for timeout in ("2", 0, -1.0, math.nan)
        ),
        *(
            (CorpusProfile.from_texts, texts, ProfileError, None)
            for texts in ([], ["", " \n"], [None], [b"bytes"])
        ),
        # Regression: bare TypeErrors, another typed error, and one that quoted the whole text.
        # Regression: a user of LlamaIndex read what to do with LangChain's documents.
        (
            CorpusProfile.from_texts,
            [object()],
            ProfileError,
            r"not object.* Hint: .* node\.get_content\(\) in Ll",
        ),
        (CorpusProfile.from_texts, 3, ProfileError, "must be several strings, not int.* Hint: "),
        (CorpusProfile.from_texts, None, ProfileError, "must be several strings, not NoneType.* Hint: "),
        # Regression: a path, and the keys of a mapping, were taken for passages.
        (CorpusProfile.from_texts, "handbook.jsonl", ProfileError, "several strings, not str"),
        (CorpusProfile.from_texts, {"id": "A passage."}, ProfileError, "several strings, not dict"),
        (CorpusProfile.load, "missing/..", ProfileError, "'missing/..' contains no profile.* Hint: "),
        (
            CorpusProfile.load,
            "A passage. " * 99,
            ProfileError,
            "^'A passage[^']{,200} contains no profile.* Hint: ",
        ),
    ],
)
def test_what_has_or_finds_no_passages_is_a_typed_error(make, given, error, said):
    with pytest.raises(error, match=said):
        make(given)


def test_what_was_found_before_a_search_hung_is_enough(fake):
    answers = iter([LOGGER[:3], LOGGER[3:]])
    profile = CorpusProfile.from_retriever(lambda query: next(answers, None) or time.sleep(1), timeout=0.2)
    assert (profile.seen, profile.source) == (6, "retriever")


# --- profiles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [LOGGER[:1], LOGGER[:2], LOGGER * 10, ["x"], ["", "🙂"]])
def test_few_passages_are_a_profile(fake, texts):
    profile = CorpusProfile.from_texts(texts)
    p = profile.judge(["How do I change the battery?", "🙂"])
    assert profile.judge("🙂").shape == (1,)
    assert ((p >= 0) & (p <= 1)).all()


def test_a_saved_profile_is_the_same(fake, tmp_path):
    made = CorpusProfile.from_texts(LOGGER, "logger")
    read = CorpusProfile.load(made.save(tmp_path / "logger"))
    assert read.fingerprint == made.fingerprint
    assert (read.terms, read.sketch, read.name) == (made.terms, made.sketch, "logger")
    assert np.array_equal(read.judge(LEAVE), made.judge(LEAVE))
    assert sum(file.stat().st_size for file in (tmp_path / "logger").iterdir()) < 1_000_000


def test_a_profile_that_is_replaced_while_it_is_read_is_the_new_one(fake, tmp_path, monkeypatch):
    """Regression: of loads during saves, one in a thousand found the profile damaged or missing."""
    folder = CorpusProfile.from_texts(LOGGER, "old").save(tmp_path / "p")
    replacing = [CorpusProfile.from_texts(LEAVE, "new")]

    def read(path):
        content = read_file(path)
        if replacing:
            replacing.pop().save(folder)
        return content

    monkeypatch.setattr(profile_module.files, "read_file", read)
    assert CorpusProfile.load(folder).name == "new"


def rewrite(folder, **changes):
    file = folder / profile_module.CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "profile.json").unlink(), "no profile"),
        (lambda folder: (folder / "profile.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "profile.safetensors").unlink(), "cannot be read"),
        (lambda folder: (folder / "profile.safetensors").write_bytes(b"0" * 99), "checksum"),
        (lambda folder: rewrite(folder, margin=0), "cannot be read"),
        (lambda folder: rewrite(folder, baseline=float("nan")), "cannot be read"),
        (lambda folder: rewrite(folder, encoder="another"), "'another'"),
        (lambda folder: rewrite(folder, format=2), "format 2"),
    ],
    ids=["missing", "no JSON", "no weights", "weights", "zero", "NaN", "another encoder", "newer"],
)
def test_a_damaged_profile_is_a_typed_error(fake, tmp_path, damage, message):
    damage(CorpusProfile.from_texts(LOGGER).save(tmp_path / "p"))
    with pytest.raises(ProfileError, match=f"{message}.* Hint: "):
        load_gate("constant:always", corpus=tmp_path / "p")


def test_texts_are_read_once(fake):
    """Regression: whether they are texts was found out by beginning to read them, which may run a query."""
    texts = MagicMock(**{"__iter__.side_effect": [iter(LOGGER)]})
    assert CorpusProfile.from_texts(texts).fingerprint == CorpusProfile.from_texts(LOGGER).fingerprint


@pytest.mark.parametrize(
    ("texts", "outdated"), [(LOGGER, False), ([*LOGGER, LEAVE[0]], False), (LEAVE, True)]
)
def test_a_profile_knows_when_its_corpus_has_changed(fake, texts, outdated):
    assert CorpusProfile.from_texts(LOGGER).is_outdated(texts) is outdated


@pytest.mark.model
def test_a_corpus_covers_what_it_is_about_in_any_language(profiles):
    logger, leave = profiles
    about = ["How do I change the battery of the logger?", "Wie exportiere ich die Messwerte des Loggers?"]
    others = [
        "How many days of annual leave do I have?",
        "Who wrote Hamlet?",
        "thanks!",
        "Boil an egg for me",
    ]
    assert (logger.judge(about) > 0.5).all()
    assert (logger.judge(others) < 0.5).all()
    assert leave.judge(others)[0] > 0.5
    assert logger.judge(["What is E-41?", "sample_interval?", "What is E-42?"]).round() == pytest.approx(
        [1, 1, 0]
    )


# --- gates -------------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize(
    "copies",
    [
        [
            f"2025-03-{day} 07:{day}:09Z cart INFO GET /cart 200 {day} ms user={7 * day}"
            for day in range(10, 31)
        ],
        [
            f"The guard has closed gate {number} of the northern car park for the night."
            for number in range(20)
        ],
    ],
    ids=["log lines", "sentences"],
)
def test_passages_that_are_like_each_other_do_not_hide_the_others(copies):
    """Regression: the corpus's sentences seemed so near to it that no question was."""
    profile = CorpusProfile.from_texts([*LOGGER, *copies])
    assert profile.judge("How do I change the battery of the logger?") > 0.9


HEADER = "Riverside School. Internal, confidential. Printed copies are uncontrolled. " * 5


@pytest.mark.model
@pytest.mark.parametrize(
    "texts",
    [[HEADER + text for text in LOGGER], [text if "X200" in text else HEADER + text for text in LOGGER]],
    ids=["all", "most"],
)
def test_a_header_does_not_hide_the_passages(texts):
    """Regression: only the header was read."""
    assert CorpusProfile.from_texts(texts).judge("How do I change the battery of the logger?") > 0.9


def test_a_beginning_that_few_share_is_kept():
    few = [*LOGGER[:4], *(HEADER + text for text in LOGGER[4:])]
    assert drop_shared_beginning(few) == few
    assert drop_shared_beginning([f"The same dozen words: {word}" for word in "abcde"]) == [*"abcde"]


@pytest.mark.model
def test_a_long_passage_is_read_beyond_its_beginning():
    """Regression: of each passage, 300 characters were read, however few there were."""
    profile = CorpusProfile.from_texts([" ".join(LEAVE + LOGGER)])
    assert profile.judge("How often does the logger sample the temperature?") > 0.9
    assert CorpusProfile.from_texts([LOGGER[0] * 9]).codes.shape == (1, 256), "more of the same says nothing"


def test_names_of_corpora_differ_and_a_mapping_gives_them(fake, tmp_path):
    one = CorpusProfile.from_texts(LOGGER)
    with pytest.raises(ConfigurationError, match="needs a unique name"):
        load_gate("constant:always", corpus=[one, one])
    gate = load_gate("constant:always", corpus={"a": one, "b": one.save(tmp_path / "p")})
    assert gate.corpora == ("a", "b")
    for name in (2, " ", "half a pair: \ud83d"):  # each decision failed, or what was saved could not be read
        with pytest.raises(ConfigurationError, match="name"):
            load_gate("constant:always", corpus={name: one})


@pytest.mark.parametrize(
    "wrong", [{"top": 0}, {"prefer": "both"}, {"when_uncovered": "cry"}, {"corpus": []}, {"corpus": [3]}]
)
def test_wrong_options_are_refused(fake, wrong):
    options = {"corpus": CorpusProfile.from_texts(LOGGER), **wrong}
    with pytest.raises(ConfigurationError):
        load_gate("constant:always", **options)
    with pytest.raises(ConfigurationError, match=r"^prefer= needs a corpus"):
        load_gate(prefer="llm")


def test_an_adapter_may_change_the_options_of_a_gate_with_corpora(fake):
    """Regression: it said that top= needs a corpus."""
    gate = load_gate("constant:always", corpus=CorpusProfile.from_texts(LOGGER))
    changed = resolve_gate(gate, top=2, prefer="llm").gate
    assert (changed.top, changed.prefer, changed.corpora) == (2, "llm", gate.corpora)


class Says(Gate):
    """Says what a test wants, of whatever kind."""

    p: float = 0.0
    kinds: dict[str, float] = Field(default_factory=dict)

    @property
    def specs(self):
        return ()

    def score(self, evidence):
        return Score(self.p, "Says so.", signals=self.kinds)


def covering(p, name="docs", near=0.5, about=True):
    """A profile that covers everything with a probability."""
    profile = CorpusProfile(name, np.ones((1, 256), np.int8), Terms((), frozenset()), 0.0, 0.2)
    object.__setattr__(profile, "p_covered", lambda vectors, texts: np.full(len(texts), p))
    object.__setattr__(profile, "closeness", lambda vectors, texts: np.full(len(texts), near))
    profile.__dict__["is_specific"] = about
    return profile


def decide(profiles, p_known=0.0, kinds=None, **options):
    gate = load_gate(Says(p=p_known, kinds=kinds or {}), corpus=profiles, on_error="raise", **options)
    return gate.decide("How is the widget made?")


@pytest.mark.model
@pytest.mark.parametrize(
    ("p_covered", "p_known", "options", "retrieve", "outcome"),
    [
        (0.9, 1.0, {}, True, None),
        (0.9, 1.0, {"prefer": "llm"}, False, None),
        (0.9, 0.1, {"prefer": "llm"}, True, None),
        (0.9, 1.0, {"about": False}, False, None),
        (0.9, 1.0, {"about": False, "prefer": "corpus"}, True, None),
        (0.1, 1.0, {}, False, None),
        (0.1, 0.1, {}, True, None),
        (0.1, 0.1, {"when_uncovered": "direct"}, False, "direct"),
        (0.1, 0.1, {"when_uncovered": "abstain"}, False, "abstain"),
        (0.1, 0.1, {"when_uncovered": "abstain", "kinds": {"fresh": 0.8}}, True, None),
        (0.1, 0.1, {"when_uncovered": "direct", "kinds": {"private": 0.4, "fresh": 0.3}}, True, None),
    ],
)
def test_the_table_of_decisions(p_covered, p_known, options, retrieve, outcome):
    about = options.pop("about", True)
    decision = decide(covering(p_covered, about=about), p_known, **options)
    assert (decision.retrieve, decision.outcome) == (retrieve, outcome)
    assert decision.p_covered == p_covered
    assert decision.corpus == ("docs" if retrieve else None)


class ReadsDraft(Says):
    """Knows what the LLM begins to answer."""

    p: float = 1.0

    @property
    def specs(self):
        return (DraftSpec(source="recorded"),)


@pytest.mark.model
@pytest.mark.parametrize("threshold", [None, 0.0])
@pytest.mark.parametrize(
    ("p_covered", "options", "retrieve", "outcome", "why"),
    [
        (0.9, {}, True, None, "The question is about what *docs* covers (probability 0.90)."),
        (0.9, {"prefer": "llm"}, True, None, "The LLM wrote that it does not know, or cannot answer."),
        (0.1, {}, True, None, "The LLM wrote that it does not know, or cannot answer."),
        (
            0.1,
            {"when_uncovered": "direct"},
            True,
            None,
            "The LLM wrote that it does not know, or cannot answer.",
        ),
    ],
)
def test_an_llm_that_does_not_know_does_not_say_where_to_search(
    p_covered, options, retrieve, outcome, why, threshold
):
    """Regression: after "I don't know", no corpus was chosen, so another one was searched."""
    corpora = [covering(0.1, "hr", 0.2), covering(p_covered, "docs", 0.4)]
    gate = load_gate(ReadsDraft(), corpus=corpora, on_error="raise", **options)
    known, unknown = gate.decide_batch(
        Request("How is the widget made?", draft=Draft(text=text), threshold=threshold)
        for text in ("It is made of steel.", "I'm sorry, but I don't know.")
    )
    assert known.p_known == 1.0
    assert (unknown.retrieve, unknown.outcome, unknown.p_known) == (retrieve, outcome, 0.0)
    assert (unknown.corpora, unknown.p_covered, unknown.error) == (("docs",), p_covered, None)
    assert unknown.override.reason.startswith(why)


@pytest.mark.model
def test_after_i_dont_know_only_a_gate_with_heads_leaves_uncovered_questions_to_the_llm():
    """Regression: without heads, nothing told that a question was private or fresh, and it was skipped."""
    weather, obscure = "What is the weather in Oslo today?", "Where was Aarno Maliniemi born?"
    requests = [Request(question, draft=Draft(text="I don't know.")) for question in (weather, obscure)]
    answer = load_gate("answer").gate
    calibrated = load_gate("calibrated", inner=answer).gate
    outcomes = [
        [decision.outcome for decision in gate.decide_batch(requests)]
        for gate in (
            load_gate(inner, corpus=covering(0.1), when_uncovered="direct", on_error="raise")
            for inner in (answer, calibrated)
        )
    ]
    assert outcomes == [[None, "direct"], [None, None]]


@pytest.mark.model
def test_a_code_that_only_one_corpus_has_goes_there():
    """Regression: the question was nearer to the other corpus, and its code did not count."""
    pump = ["Fill the pump with oil.", "Clean its filter each month.", "E-4711: the oil is low. Add oil."]
    boiler = [
        "Press reset to clear a fault.",
        "The display shows the boiler's pressure. If it shows a fault, wait.",
    ]
    corpora = [CorpusProfile.from_texts(pump, "pump"), CorpusProfile.from_texts(boiler, "boiler")]
    gate = load_gate(corpus=corpora, on_error="raise")
    assert gate.decide("The display shows a fault. What do I do?").corpora == ("boiler",)
    assert gate.decide("The display shows fault E-4711. What do I do?").corpora == ("pump",)


@pytest.mark.model
def test_code_with_a_name_from_the_corpus_is_about_it():
    """Regression: pasted text asks nothing, so that a library's own questions about code were skipped."""
    docs = ["start_pump(speed) starts the pump. The speed is from 0 to 9.", "stop_pump() stops it at once."]
    gate = load_gate(corpus=CorpusProfile.from_texts(docs, "pump"), llm_name="gpt-4o", on_error="raise")
    ask = "Why does this fail?\n```python\n{}\n```".format
    decisions = gate.decide_batch([ask("start_pump(speed=-1)"), ask("print(1 / 0)")])
    assert [decision.corpus for decision in decisions] == ["pump", None]


def test_code_in_a_prompt_of_many_words_is_a_chats():
    code = "~~~\nstart_pump(speed=-1)\n~~~"
    assert find_code(f"Why?\n{code}\nThanks, {'really ' * 37}") == code
    assert find_code(f"Why?\n{code}\nThanks, {'really ' * 40}") == ""
    assert find_code("Why?\n```js\nstart()") == "```js\nstart()"


@pytest.mark.model
def test_the_threshold_of_a_call_says_what_is_known():
    gate = load_gate(Says(p=0.7), corpus=covering(0.1), when_uncovered="direct", on_error="raise")
    outcomes = [gate.decide("How is the widget made?", threshold=each).outcome for each in (0.6, 0.8)]
    assert outcomes == [None, "direct"]


@pytest.mark.model
@pytest.mark.parametrize(
    ("ps", "top", "corpora"),
    [
        ((0.9, 0.8, 0.7), 1, ("c",)),
        ((0.9, 0.8, 0.7), 2, ("c", "b")),
        ((0.9, 0.8, 0.1), 3, ("b", "a")),
        # Regression: only one was searched, whatever `top` was.
        ((0.1, 0.2, 0.1), 2, ("c", "b")),
    ],
)
def test_the_nearest_that_cover_it_are_searched(ps, top, corpora):
    profiles = [covering(p, name, near) for p, name, near in zip(ps, "abc", (0.1, 0.2, 0.3), strict=True)]
    decision = decide(profiles, top=top)
    assert (decision.corpora, decision.corpus) == (corpora, corpora[0])


@pytest.mark.model
@pytest.mark.parametrize(
    ("question", "corpus"),
    [
        ("How do I export the readings as CSV?", "logger"),
        ("And how long does that take?", "leave"),
        ("Why?", "leave"),
    ],
)
def test_earlier_turns_say_where_to_search_only_for_a_follow_up(profiles, question, corpus):
    """Regression: a question about another corpus went to the one that the turns before it were about."""
    turns = ["user: How many days of annual leave do I have?", "assistant: 28 days."]
    assert load_gate(corpus=profiles).decide(question, history=turns).corpus == corpus


@pytest.mark.model
def test_a_profile_that_fails_retrieves():
    broken = covering(0.1)
    object.__setattr__(broken, "p_covered", lambda vectors, texts: 1 / 0)
    decision = load_gate(Says(p=1.0), corpus=broken).decide("What about this?")
    assert decision.retrieve
    assert decision.error is not None


def test_another_threshold_says_where_to_search():
    decision = Decision(question="q", retrieve=False, p_known=0.6, corpora=("a", "b"))
    assert decision.with_threshold(0.9).corpus == "a"
    assert decision.with_threshold(0.9).with_threshold(0.1).corpus is None


@pytest.mark.model
def test_the_default_gate_reads_a_question_once_and_decides_by_the_corpus(profiles):
    gate = load_gate(corpus=profiles, llm_name="gpt-4o", on_error="raise")
    about, elsewhere, thanks = gate.decide_batch(
        [
            "How do I change the battery of the logger?",
            "Who wrote Hamlet?",
            "Thanks a lot!",
        ]
    )
    assert (about.retrieve, about.corpus) == (True, "logger")
    assert "*logger* covers" in about.reason
    assert "(probability 1.00: logger)" in about.reason
    assert not elsewhere.retrieve
    assert not thanks.retrieve
    alone = load_gate(llm_name="gpt-4o").decide("Who wrote Hamlet?")
    assert (elsewhere.cost.tokens_in, elsewhere.p_known) == (alone.cost.tokens_in, alone.p_known)
    assert [d.corpus for d in asyncio.run(gate.adecide_batch(["How much annual leave is there?"]))] == [
        "leave"
    ]


@pytest.mark.model
def test_what_asks_nothing_is_not_searched_unless_it_names_something_of_the_corpus(profiles, monkeypatch):
    """Such as a text to translate that is about the corpus."""

    def is_task(gate, evidence, *names):
        return np.ones(1) if "no_knowledge" in names else np.zeros(1)

    monkeypatch.setattr(HeadsGate, "p_kinds", is_task)
    gate = load_gate(corpus=profiles, threshold=0.0, on_error="raise")
    task, named = gate.decide_batch(
        ["Translate this: the battery of the logger is low.", "Translate this: E-41 is shown."]
    )
    assert task.p_covered > 0.5
    assert not task.retrieve
    assert named.retrieve


@pytest.mark.model
def test_a_question_about_the_corpus_retrieves_however_much_it_looks_like_a_task():
    """Regression: everybody knows how to bake a cake, but not how long Aunt Mette bakes hers."""
    recipes = [
        "Aunt Mette's carrot cake: flour, sugar and three carrots. Bake at 175 degrees for 50 minutes.",
        "Pancakes: two eggs, 300 ml of milk, flour. Fry them in butter.",
        "Lentil soup: simmer red lentils with cumin for 25 minutes.",
    ]
    gate = load_gate(corpus=CorpusProfile.from_texts(recipes, "recipes"), on_error="raise")
    asked = ["How long do I bake the carrot cake?", "Thanks! And how long do I bake the carrot cake?"]
    assert [decision.corpus for decision in gate.decide_batch(asked)] == ["recipes", "recipes"]
    assert not any(d.retrieve for d in gate.decide_batch(["What is 7 times 8?", "Thanks for the cake!"]))


@pytest.mark.model
@pytest.mark.parametrize(
    "prompt",
    [
        "### Task\nWrite a title of at most five words for the conversation.\n### Conversation\n<chat>\n"
        "USER: What does error E-41 of the logger mean?\nASSISTANT: I do not know.\n</chat>",
        '### Job:\nList one to three tags for the chat, as JSON.\n### Format:\n{"tags": ["a"]}\n### Chat:\n<chat>\n'
        "USER: How do I replace the battery when E-41 is shown?\nASSISTANT: It is under the lid.\n"
        "USER: Thanks!\nASSISTANT: You are welcome.\n</chat>",
    ],
)
def test_a_chat_that_is_pasted_into_a_prompt_is_not_searched_for(profiles, prompt):
    gate = load_gate(corpus=profiles, on_error="raise")
    assert not gate.decide(prompt).retrieve
    assert gate.decide("What does error E-41 of the logger mean?").retrieve


@pytest.mark.model
def test_a_gate_with_a_corpus_is_pickled_and_changed_like_another(profiles):
    gate = load_gate(corpus=profiles, threshold=0.3)
    copy = pickle.loads(pickle.dumps(gate))  # noqa: S301  our own
    assert copy.decides_like(gate)
    assert copy.decide(LOGGER[1]).corpus == "logger"
    assert gate.with_options(threshold=0.7).gate.inner.threshold == 0.7
    assert gate.for_llm("gpt-4o").gate.inner.llm_name == "gpt-4o"
    assert not gate.decides_like(load_gate(corpus=replace(profiles[0], name="other"), threshold=0.3))


@pytest.mark.model
def test_begun_answers_are_judged_with_the_corpus(profiles):
    judge = load_gate(corpus=profiles).answer_gate()
    assert isinstance(judge.gate, CorpusGate)
    decision = judge.decide("How do I change the battery of the logger?", draft="You open the case and")
    assert (decision.retrieve, decision.corpus) == (True, "logger")
    assert judge.question_gate().gate.reads_drafts is False


@pytest.mark.model
@pytest.mark.parametrize(
    ("asked", "corpora", "outcome"),
    [
        ("How many days of annual leave do I have?", ("leave",), None),
        ("Where was Aarno Maliniemi born?", None, "abstain"),
        # No LLM knows it: a source without a profile may hold it.
        ("What did my landlord write in his last letter to me?", None, None),
        ("According to our wiki, who may open the safe?", None, None),
    ],
)
def test_a_refused_answer_is_searched_for_where_the_question_belongs(profiles, asked, corpora, outcome):
    judge = load_gate(corpus=profiles, when_uncovered="abstain", on_error="raise").answer_gate()
    decision = judge.decide(asked, draft="I'm sorry, but I don't have access to that information.")
    assert (decision.outcome, decision.retrieve, decision.p_known) == (outcome, outcome is None, 0.0)
    assert decision.corpora == (corpora or decision.corpora) != ()


# --- the command line --------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_command_says_what_it_understood(tmp_path):
    corpus = tmp_path / "passages.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in LOGGER))
    shown = printed("profile", "--corpus", corpus, "--out", tmp_path / "logger", "--name", "manual")
    assert "manual: profile of 6 passages" in shown
    shown = printed("profile", "--description", "Manual of the X200 data logger", "--out", tmp_path / "d")
    assert shown.startswith("d: ")
    decided = json.loads(printed("decide", "--corpus", tmp_path / "logger", "--json", "What does E-41 mean?"))
    assert (decided["corpus"], decided["retrieve"]) == ("manual", True)


@pytest.mark.parametrize(
    "options",
    [[], ["--description", "x", "--index", "y"], ["--retriever", "nothing:here"], ["--corpus", "none.jsonl"]],
)
def test_the_command_refuses_what_it_cannot_profile(options, tmp_path):
    assert rgate("profile", "--out", tmp_path / "p", *options).exit_code != 0
    assert not (tmp_path / "p").exists()
