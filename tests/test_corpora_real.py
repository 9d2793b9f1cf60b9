"""Three real corpora and the real encoder: chains, a LlamaIndex router and the gateway find the right one."""

import json
import logging
import re
from types import SimpleNamespace

import httpx
import pytest
from langchain_core.load import dumpd
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RouterQueryEngine
from llama_index.core.schema import TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores import MetadataFilters

from rgate_integrations import CorpusProfile, load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.corpus.profile import FOLDER, profile_index
from rgate_integrations.corpus.sampling import collect_passages
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import BM25Index, HybridIndex, Passage, PassageIndex
from rgate_integrations.langchain import FaissVectorStore, IndexRetriever, RetrievalGate
from rgate_integrations.langchain.corpora import CorpusChain
from rgate_integrations.llama_index import (
    GatedQueryEngine,
    GatedRetriever,
    RetrievalGateSelector,
)
from rgate_integrations.llama_index import IndexRetriever as NodeRetriever
from rgate_integrations.tuning import Budget, TuneOptions, tune
from tests import llama_index_parts
from tests.begun_answers import KNOWN, TEXT, Knowing, Shelf
from tests.commands import printed, rgate
from tests.http_servers import listening
from tests.langchain_fakes import texts
from tests.llama_index_parts import ask, blocking, every_style, over
from tests.scripted_upstream import ScriptedUpstream
from tests.test_index import Letters
from tests.test_langchain_runnables import READABLE, loaded, pickled
from tests.test_vectorstore import Letters as Embeddings
from tests.three_corpora import QUESTIONS, TEXTS, profiles
from tests.tuning_parts import write

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("smollm2")]
SMALL_TALK = "Thank you very much, that was all!"


def passages(name):
    return [Passage(str(number), text) for number, text in enumerate(TEXTS[name])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, smollm2):
    root = tmp_path_factory.mktemp("profiles")
    return {name: str(profile.save(root / name)) for name, profile in profiles().items()}


# --- LangChain ---------------------------------------------------------------------------------------------------


def rag(name):
    """A chain that answers with what it found first."""
    find = IndexRetriever(index=BM25Index(passages(name)), k=1) | (lambda found: found[0].page_content)
    return {"found": find, "question": RunnablePassthrough()} | RunnableLambda(
        lambda read: f"<{read['found']}>"
    )


def chain(folders, **options):
    gate = RetrievalGate(corpus=folders)
    retrieve = {name: rag(name) for name in folders}
    return gate.route(retrieve=retrieve, direct=Knowing() | StrOutputParser(), **options)


def test_a_langchain_router_over_three_corpora_is_written_read_and_pickled(folders):
    prompts = {name: ChatPromptTemplate.from_template(f"{name} {{question}}") for name in folders}
    gate = RetrievalGate(corpus=folders, top=2)
    router = gate.route(retrieve=prompts, direct=ChatPromptTemplate.from_template("direct {question}"))
    again = loaded(json.loads(json.dumps(dumpd(router))), [*READABLE, CorpusChain])
    for name, question in QUESTIONS.items():
        for each_router in (router, again, pickled(router)):
            assert each_router.invoke({"question": question}).to_string() == f"Human: {name} {question}"
    assert again.gate.top == 2


def test_another_gate_that_screens_does_not_hide_what_is_covered(folders):
    router = chain(folders, answer_first=AnswerFirst(question_gate="constant:never"))
    assert router.invoke(QUESTIONS["leave"]).strip("<>") in TEXTS["leave"]
    assert router.invoke("What does my contract say?").strip() == KNOWN


def test_what_a_rule_retrieves_is_searched_where_it_belongs(folders):
    gate = load_gate(corpus=folders, always=[re.compile("Hamlet"), QUESTIONS["canteen"]])
    for asked, name in ((f"{QUESTIONS['leave']} Ask Hamlet.", "leave"), (QUESTIONS["canteen"], "canteen")):
        decision = gate.decide(asked)
        assert decision.override.reason.startswith("A rule in always=")
        assert (decision.corpus, decision.p_known) == (name, 0.0)


RECIPES = [
    "Blueberry pancakes: whisk two eggs with 200 g of flour and 250 ml of buttermilk, and fry them in butter.",
    "Leek quiche: line a tin with shortcrust pastry, fill it with leeks, eggs and cream, and bake for 35 minutes.",
    "Sourdough bread: feed the starter in the evening, fold the dough four times, and let it rest overnight.",
    "Chickpea curry: fry onions and garlic, add a tin of chickpeas and coconut milk, and simmer for 20 minutes.",
    "Tiramisu: dip sponge fingers in espresso, layer them with mascarpone, and chill for six hours.",
]


@pytest.mark.parametrize(
    ("asked", "retrieves"),
    [
        # Regression: the heads for kinds take these for tasks like the others, so the recipes were not searched.
        *((asked, True) for asked in ("Give me a recipe for pancakes", "Gib mir ein Rezept für Quiche")),
        *(
            (asked, True)
            for asked in ("パンケーキのレシピを教えて", "Suggest a vegetarian dinner with chickpeas")
        ),
        ("Fix the grammar: I likes bread. Also, how long does your sourdough have to rest?", True),
        ("Translate 'bread' into German, and tell me how long your sourdough has to rest", True),
        ("Translate into French: How long do I bake the bread?", False),
        ("Fix my text:\nWhisk the egg with the flour.\nThen fries them in butter.", False),
        *((asked, False) for asked in ("How many ml is one cup?", "Tell me a joke about tomatoes", "Danke!")),
    ],
)
def test_a_corpus_is_searched_for_tasks_unless_they_are_self_contained(asked, retrieves):
    profile = CorpusProfile.from_texts(RECIPES, name="recipes")
    assert load_gate(corpus=profile, llm_name="gpt-4o").decide(asked).retrieve == retrieves


TRAINS = [
    "Which gauge should a beginner choose? HO (1:87) has the widest range; N (1:160) suits small flats.",
    "Starter set Alpina: oval of track, regional train with two coaches, digital controller; 189 euros.",
    "Minimum radius: 360 mm for short wagons, 420 mm for express coaches in HO.",
    "Track plans: figure eight on 120 x 80 cm, dogbone on 200 x 100 cm, shelf station on 240 x 30 cm.",
    "Signals: connect the red wire to output 1, the green to output 2, common to plus.",
]


def test_a_question_with_numbers_of_its_own_is_no_sum():
    """Regression: it was taken for one, so the corpus was not searched."""
    gate = load_gate(corpus=CorpusProfile.from_texts(TRAINS, "trains"), llm_name="gpt-4o", on_error="raise")
    asked = [
        "My table is 2 m by 1 m. Which plan fits?",
        "What's 120 x 80 in inches and which plan fits there?",
    ]
    sums = ["What is 420 minus 360?", "189 + 29 = ?", "How many cm are 12 feet?"]
    assert [decision.retrieve for decision in gate.decide_batch([*asked, *sums])] == [True] * 2 + [False] * 3


TAGS = """### Task:
Generate 1-3 broad tags categorizing the main themes of the chat history, along with 1-3 more specific subtopic tags.

### Guidelines:
- Start with high-level domains (e.g. Science, Technology, Arts, Politics, Business, Health, Sports, Education)
- Consider including relevant subfields/subdomains if they are strongly represented throughout the conversation
- If content is too short (less than 3 messages) or too diverse, use only ["General"]
- Use the chat's primary language; default to English if multilingual
- Prioritize accuracy over specificity

### Output:
JSON format: { "tags": ["tag1", "tag2", "tag3"] }

### Chat History:
<chat_history>
USER: What radius do my wagons need?
ASSISTANT: Minimum radius: 360 mm for short wagons, 420 mm for express coaches in HO.
</chat_history>"""
FOLLOW_UPS = """### Task:
Suggest 3-5 relevant follow-up questions or prompts that the user might naturally ask next in this conversation as a \
**user**, based on the chat history, to help continue or deepen the discussion.
### Guidelines:
- Write all follow-up questions from the user's point of view, directed to the assistant.
- Make questions concise, clear, and directly related to the discussed topic(s).
- Only suggest follow-ups that make sense given the chat content and do not repeat what was already covered.
- If the conversation is very short or not specific, suggest more general (but relevant) follow-ups.
### Output:
JSON format: { "follow_ups": ["Question 1?", "Question 2?", "Question 3?"] }
### Chat History:
<chat_history>
USER: Suggest a track plan
ASSISTANT: Figure eight on 120 x 80 cm, dogbone on 200 x 100 cm.
</chat_history>"""


@pytest.mark.parametrize("prompt", [TAGS, FOLLOW_UPS])
def test_a_programs_task_around_a_chat_is_not_searched_for(prompt):
    """Regression: its instructions are read together with the chat, so they counted as tasks about the corpus."""
    gate = load_gate(corpus=CorpusProfile.from_texts(TRAINS, "trains"), llm_name="gpt-4o", on_error="raise")
    assert not gate.decide(prompt).retrieve
    assert gate.decide("Suggest a track plan").retrieve


# --- LlamaIndex --------------------------------------------------------------------------------------------------


def engine(name, style):
    return over(NodeRetriever(BM25Index(passages(name)), similarity_top_k=1), streaming="stream" in style)


@every_style
def test_a_llama_index_router_over_three_corpora(style, folders):
    selector = RetrievalGateSelector(direct="direct", corpus=folders)
    tools = [
        QueryEngineTool.from_defaults(engine(name, style), name=name, description="d") for name in folders
    ]
    direct = llama_index_parts.Rag(answer="from the LLM")
    tools.append(QueryEngineTool.from_defaults(direct, name="direct", description="d"))
    router = RouterQueryEngine(pickled(selector), tools, llm=MockLLM())
    for name, question in QUESTIONS.items():
        text, response = ask(router, question, style)
        assert [node.node.text in TEXTS[name] for node in response.source_nodes] == [True]
        assert response.source_nodes[0].node.text in text
    assert str(blocking(router, "query", SMALL_TALK)) == "from the LLM"


# --- the passages at hand ------------------------------------------------------------------------------------------


def indexed(name):
    return PassageIndex.build(passages(name), Letters())


AT_HAND = {
    "PassageIndex": lambda name: IndexRetriever(index=indexed(name)),
    "HybridIndex in a chain": lambda name: (
        RunnablePassthrough() | IndexRetriever(index=HybridIndex(indexed(name)))
    ),
    "FaissVectorStore": lambda name: FaissVectorStore.from_texts(TEXTS[name], Embeddings()).as_retriever(),
    "BM25Index": lambda name: IndexRetriever(index=BM25Index(passages(name))),
}


@pytest.mark.parametrize("retriever", AT_HAND.values(), ids=list(AT_HAND))
def test_langchain_makes_the_profiles_of_the_passages_that_are_at_hand(retriever):
    guard = RetrievalGate(corpus=True).guard({name: retriever(name) for name in TEXTS})
    found = [guard.invoke(question)[0].metadata["rgate_corpus"] for question in QUESTIONS.values()]
    assert found == list(QUESTIONS)
    gate = RetrievalGate(corpus=True, prefer="llm", threshold=0.0, llm_name="gpt-4o")
    one = gate.route(retrieve=retriever("leave") | texts, direct=lambda _: [])
    assert one.invoke(QUESTIONS["leave"]) == [], "its other options hold"
    assert one.invoke(QUESTIONS["leave"], {"configurable": {"retrieval_threshold": 1.1}})


def test_llama_index_makes_the_profiles_of_the_passages_that_are_at_hand():
    retrievers, shared = {}, SimpleDocumentStore()  # in which the texts of all three are
    for name, each_text in TEXTS.items():
        documents = [Document(text=text) for text in each_text]
        index = VectorStoreIndex.from_documents(
            documents, embed_model=MockEmbedding(8), storage_context=StorageContext.from_defaults(shared)
        )
        retrievers[name] = index.as_retriever(similarity_top_k=1)
    assert CorpusProfile.from_retriever(index).seen == 8  # by default, a search would find two
    guard = GatedRetriever(retrievers, corpus=True)
    for name, question in QUESTIONS.items():
        assert guard.retrieve(question)[0].node.text in TEXTS[name]
    gated = GatedQueryEngine.from_defaults(over(retrievers["leave"]), llm=MockLLM(), corpus=True)
    assert gated.query(QUESTIONS["leave"]).metadata["rgate"]["corpus"] == "corpus"


def filtered_by_llama_index():
    """Return LlamaIndex's retrievers of three corpora that are in one index."""
    nodes = [TextNode(text=text, metadata={"of": name}) for name in TEXTS for text in TEXTS[name]]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))
    return {name: index.as_retriever(filters=MetadataFilters.from_dict({"of": name})) for name in TEXTS}


def filtered_by_langchain():
    """Return LangChain's retrievers of three corpora that are in one store."""
    store = FaissVectorStore(Embeddings())
    for name in TEXTS:
        store.add_texts(TEXTS[name], [{"of": name} for _ in TEXTS[name]])
    return {name: store.as_retriever(search_kwargs={"filter": {"of": name}}) for name in TEXTS}


def test_a_retriever_of_one_passage_is_asked_for_more_of_what_passes_its_filter():
    """Regression: a profile had few passages, because each search found one."""
    chain, nodes = filtered_by_langchain()["leave"], filtered_by_llama_index()["leave"]
    chain.search_kwargs["k"] = nodes.similarity_top_k = 1
    for retriever in (chain, nodes):
        assert sorted(collect_passages(retriever, 1)) == sorted(TEXTS["leave"])
    assert (len(chain.invoke("leave")), len(nodes.retrieve("leave"))) == (1, 1), "itself, it stays as it is"


@pytest.mark.parametrize(
    ("retrievers", "guard", "first_found"),
    [
        (
            filtered_by_llama_index(),
            lambda searched, corpus: GatedRetriever(searched, corpus=corpus),
            lambda guard, question: guard.retrieve(question)[0].metadata["of"],
        ),
        (
            filtered_by_langchain(),
            lambda searched, corpus: RetrievalGate(corpus=corpus).guard(searched),
            lambda guard, question: guard.invoke(question)[0].metadata["of"],
        ),
    ],
    ids=["LlamaIndex", "LangChain"],
)
def test_corpora_that_only_a_filter_tells_apart_need_profiles_of_their_own(retrievers, guard, first_found):
    """Regression: with corpus=True, each had the profile of the whole index, so the first was always searched."""
    for searched in (retrievers, retrievers["leave"]):
        with pytest.raises(ConfigurationError, match=r"which filters .*CorpusProfile\.from_retriever"):
            guard(searched, True)
    profiles = {name: CorpusProfile.from_retriever(retriever) for name, retriever in retrievers.items()}
    guarded = guard(retrievers, profiles)
    assert {name: first_found(guarded, question) for name, question in QUESTIONS.items()} == {
        name: name for name in QUESTIONS
    }


@pytest.mark.parametrize(
    "guard",
    [
        lambda: RetrievalGate("constant:never").guard(Shelf(), known_message="You know this."),
        lambda: GatedRetriever(llama_index_parts.Shelf(), "constant:never"),
        lambda: GatedRetriever(GatedRetriever(llama_index_parts.Shelf(), "constant:never"), "constant:never"),
    ],
    ids=["LangChain", "LlamaIndex", "twice"],
)
def test_a_guarded_retriever_is_searched_for_a_profile_whatever_the_llm_knows(guard):
    """Regression: the note for what is known was a passage of the corpus."""
    assert collect_passages(guard()) == [TEXT]


def test_a_profile_is_kept_beside_its_index_and_made_again_when_much_has_changed(tmp_path, caplog):
    index = indexed("leave")
    assert profile_index(index, "leave").seen == 8
    index.save(tmp_path)
    profile = profile_index(index, "leave")
    assert CorpusProfile.load(tmp_path / FOLDER).fingerprint == profile.fingerprint
    index.add([Passage("8", "A new passage.")])
    kept = profile_index(index, "staff")
    assert (kept.seen, kept.name) == (8, "staff"), "one more of nine is not much"
    index.upsert(passages("canteen"))
    changed = profile_index(index, "leave")
    assert changed.seen == 9
    (tmp_path / FOLDER / "profile.json").write_text("{")
    assert profile_index(index, "leave").fingerprint == changed.fingerprint, "a damaged one is made again"


def test_a_profile_that_cannot_be_kept_is_used_all_the_same(tmp_path, caplog):
    index = indexed("leave")
    index.save(tmp_path)
    (tmp_path / FOLDER).write_text("something else")
    with caplog.at_level(logging.WARNING):
        assert profile_index(index, "leave").seen == 8
    assert "was not saved" in caplog.text
    assert (tmp_path / FOLDER).read_text() == "something else"


def test_the_folder_of_a_moved_index_is_not_made_again(tmp_path):
    """Regression: a folder with nothing but a profile was left, into which the index could not be saved."""
    index = indexed("leave")
    index.save(tmp_path / "old").rename(tmp_path / "new")
    assert profile_index(index, "leave").seen == 8
    assert not (tmp_path / "old").exists()


# --- the gateway --------------------------------------------------------------------------------------------------


def test_the_gateway_searches_the_index_of_the_corpus(tmp_path, embedder_model, monkeypatch):
    upstream, apps = ScriptedUpstream(), []
    options = []
    for name in TEXTS:
        PassageIndex.build(passages(name)).save(tmp_path / name)
        options += ["--index", f"{name}={tmp_path / name}"]

    def keep(app, *_, **options):
        return SimpleNamespace(run=lambda: apps.append(app))

    monkeypatch.setattr("rgate_integrations.serving.server.make_server", keep)
    with listening(upstream.app) as behind:
        printed("serve", "--upstream", f"{behind}/v1", "--timeout", 600, "-k", 1, *options)
        assert all((tmp_path / name / FOLDER).is_dir() for name in TEXTS)
        # Regression: the named indexes' profiles replaced those of --corpus without a word.
        error = rgate(
            "serve", "--upstream", f"{behind}/v1", *options, "--corpus", tmp_path / "mine"
        ).exception
        assert isinstance(error, ConfigurationError)
        assert "cannot be combined" in error.message
        with listening(apps[0]) as url:
            for name, question in QUESTIONS.items():
                body = {"model": "m", "messages": [{"role": "user", "content": question}]}
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
                assert (answer.headers["x-rgate-corpus"], answer.headers["x-rgate-passages"]) == (name, "1")
                assert any(text in upstream.requests[-1]["messages"][-1]["content"] for text in TEXTS[name])
                decided = httpx.post(f"{url}/v1/decide", json={"questions": [question]}, timeout=600).json()
                assert decided["decisions"][0]["corpus"] == name


NAME_EACH = "Hint: Name each: --index NAME=FOLDER."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--index a --index b", NAME_EACH),
        ("--index a=x --index b", NAME_EACH),
        ("--index a=x --index a=y", NAME_EACH),
        # Regression: the retriever was ignored.
        ("--index folder --retriever module:search", "cannot be combined"),
    ],
)
def test_indexes_without_a_name_of_their_own_or_beside_a_retriever_are_refused(options, said):
    error = rgate("serve", "--upstream", "http://127.0.0.1:1", *options.split()).exception
    assert isinstance(error, ConfigurationError)
    assert said in str(error)


# --- evaluation and logs -------------------------------------------------------------------------------------------


def test_evaluation_and_log_say_what_is_covered(tmp_path, folders):
    questions = [*QUESTIONS.values(), "Who wrote Hamlet?", "What did my neighbour say yesterday?"] * 12
    rows = [
        {"question": f"{question} ({number})", "closed_book_correct": number % 2 == 0, "rag_correct": True}
        for number, question in enumerate(questions)
    ]
    data = write(tmp_path / "paired.jsonl", *rows)
    options = [part for folder in folders.values() for part in ("--corpus", folder)]
    out = tmp_path / "result.json"
    output = printed("evaluate", "--data", data, "--out", out, *options)
    assert "questions that a corpus covers: " in output
    first = json.loads(out.read_text())["questions"][0]
    assert (first["corpus"], first["override"], first["p_covered"] > 0.5) == ("logger", True, True)
    page = tmp_path / "report.html"
    printed("report", out, "--html", page)
    assert '"p_covered": 0.9' in page.read_text()


def test_the_report_of_a_tuned_gate_says_what_is_covered(tmp_path, folders):
    asked = [f"{QUESTIONS['leave']} ({number})" for number in range(12)]
    asked += [f"Who wrote the play number {number}?" for number in range(12)]
    answers = {question: "yes" if number % 2 else "no" for number, question in enumerate(asked)}
    result = tune(
        [{"question": question, "gold_answers": ["yes"]} for question in asked],
        direct=answers.__getitem__,
        retrieve=lambda question: "yes",
        out=tmp_path / "gate",
        options=TuneOptions(policy=Budget(0.9), corpus=folders),
    )
    page = (result.folder / "report.html").read_text()
    shown = json.loads(re.search("const RESULTS = (.*)", page)[1])
    rows = {row["question"]: row for row in shown[0]["questions"]}
    assert (rows[asked[0]]["corpus"], rows[asked[0]]["p_covered"] > 0.5) == ("leave", True)
    assert rows[asked[-1]]["p_covered"] < 0.5
    assert load_gate(str(result.folder), corpus=folders).decide(asked[0]).corpus == "leave"
