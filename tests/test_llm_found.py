"""Adapters find the name of the LLM that answers by themselves, and the gate judges what that one knows."""

from functools import partial
from types import SimpleNamespace

import pytest
from langchain.chat_models import init_chat_model
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    RunnableBranch,
    RunnableLambda,
    RunnablePassthrough,
)
from langchain_openai import AzureChatOpenAI, ChatOpenAI
from llama_index.core.llms import MockLLM
from llama_index.llms.openai_like import OpenAILike

from rgate_integrations import load_gate
from rgate_integrations.engine.loading import answer_first_gates
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import RetrievalGate, gated_rag
from rgate_integrations.langchain.chat_models import get_llm_name
from rgate_integrations.langchain.router import RetrievalRouter
from rgate_integrations.llama_index import GatedQueryEngine, RetrievalGateSelector
from tests.begun_answers import EventRecorder
from tests.langchain_fakes import INVOKES, each
from tests.llama_index_parts import Rag
from tests.scripted_proxy import ScriptedProxy


def openai(model, **options):
    return ChatOpenAI(model=model, api_key="none", **options)


def chosen_by_the_call(**defaults):
    return init_chat_model(configurable_fields=("model",), api_key="none", **defaults)


class Named(FakeListChatModel):
    """A chat model that keeps its name where some provider's package does."""

    model_id: str | None = None
    base_model_id: str | None = None
    deployment_name: str | None = None


PROMPT = ChatPromptTemplate.from_template("{question}")
BIG, SMALL, SMALLEST = openai("gpt-4o"), openai("gpt-4o-mini"), openai("llama-3.2-1b-instruct")


def asks_the_big_one(value):
    return BIG.invoke(value)


def asks_another(value):
    return ANOTHER.invoke(value)


def asks_back(value):
    return BACK.invoke(value)


BACK = RunnableLambda(asks_another)
ANOTHER = SMALL | RunnableLambda(asks_back)

ARMS = {
    "a model": (BIG, "gpt-4o"),
    "a chain": (PROMPT | BIG | StrOutputParser(), "gpt-4o"),
    "bound": (PROMPT | BIG.bind(stop=["\n"]), "gpt-4o"),
    "bound to another model": (BIG.bind(model="gpt-4o-mini"), "gpt-4o-mini"),
    "with tools and retries": (BIG.with_retry().with_config(tags=["x"]), "gpt-4o"),
    "with fallbacks": (PROMPT | BIG.with_fallbacks([SMALLEST, SMALL]), "llama-3.2-1b-instruct"),
    "with a fallback of no name": (BIG.with_fallbacks([FakeListChatModel(responses=["x"])]), ""),
    "with a weak fallback and one of no name": (
        BIG.with_fallbacks([FakeListChatModel(responses=["x"]), SMALLEST]),
        "llama-3.2-1b-instruct",
    ),
    "configurable": (BIG.configurable_fields(temperature=ConfigurableField("t")), "gpt-4o"),
    "configurable alternatives": (
        BIG.configurable_alternatives(ConfigurableField("llm"), small=SMALL),
        "gpt-4o-mini",
    ),
    "inside of a dict": (RunnablePassthrough.assign(answer=PROMPT | BIG).pick("answer"), "gpt-4o"),
    "the last of two": (PROMPT | SMALLEST | StrOutputParser() | PROMPT | BIG, "gpt-4o"),
    "a branch": (RunnableBranch((lambda x: True, PROMPT | BIG), PROMPT | SMALL), "gpt-4o-mini"),
    "a function around it": (RunnableLambda(asks_the_big_one), "gpt-4o"),
    "functions that call each other": (BACK, "gpt-4o-mini"),
    "a function": (RunnableLambda(lambda value: "x"), ""),
    "Azure, by its model": (
        AzureChatOpenAI(
            model="gpt-4o", azure_deployment="prod", api_key="x", azure_endpoint="https://x", api_version="1"
        ),
        "gpt-4o",
    ),
    "Azure, by its deployment": (
        AzureChatOpenAI(azure_deployment="gpt-4o", api_key="x", azure_endpoint="https://x", api_version="1"),
        "gpt-4o",
    ),
    "Bedrock": (
        Named(responses=[], model_id="anthropic.claude-3-haiku-20240307-v1:0"),
        "anthropic.claude-3-haiku-20240307-v1:0",
    ),
    "Bedrock, by a profile": (
        Named(
            responses=[],
            model_id="arn:aws:bedrock:us-east-1:1:application-inference-profile/ab12",
            base_model_id="amazon.nova-pro-v1:0",
        ),
        "amazon.nova-pro-v1:0",
    ),
    "chosen by the call, with a default": (
        chosen_by_the_call(model="gpt-4o", model_provider="openai"),
        "gpt-4o",
    ),
    # Regression: TypeError; this is the example in LangChain's docs.
    "chosen by the call": (chosen_by_the_call(temperature=0), ""),
    "chosen by the call, with tools": (PROMPT | chosen_by_the_call(temperature=0).bind_tools([]), ""),
    "another server's model": (openai("m.gguf", base_url="http://localhost:8080/v1"), "m.gguf"),
    "another server, whose model has no name": (
        ChatOpenAI(api_key="x", base_url="http://localhost:8080/v1"),
        "",
    ),
}


@pytest.mark.parametrize("what", ARMS)
def test_the_name_is_found_in_an_arm_of_langchain(what):
    arm, expected = ARMS[what]
    assert get_llm_name(arm) == expected


def ability_of(gate):
    """Of the engine's gate, or of the heads in it."""
    return getattr(gate.gate, "question", gate.gate).ability


def test_a_router_judges_the_llm_of_its_direct_arm():
    gate = RetrievalGate()
    router = gate.route(retrieve=PROMPT | BIG, direct=PROMPT | SMALLEST | StrOutputParser())
    assert ability_of(router.gate.gate).llm.startswith("llama-3.2-1b")
    assert router.gate.gate.gate.llm_name_source == "its chat model"
    assert ability_of(gate.gate) is None
    retrieve = RunnableLambda(lambda x: []) | PROMPT | BIG
    looking = gate.route(retrieve=retrieve, direct=PROMPT | BIG, look_first=True)
    assert ability_of(looking.gate.gate).llm.startswith("gpt-4o")


def test_a_gate_in_a_calls_config_or_a_loaded_router_judges_that_llm_too():
    """Regression: it assumed an LLM of 8B parameters."""
    arms = {"retrieve": PROMPT | BIG, "direct": PROMPT | SMALLEST}
    chain = RetrievalGate("constant:never").route(**arms).configurable_fields(gate=ConfigurableField("gate"))
    for given, judged in (("", "llama-3.2-1b"), ("phi-4", "phi-4")):
        gate = RetrievalGate(llm_name=given)
        called, _ = chain.prepare({"configurable": {"gate": gate}})
        for router in (called, RetrievalRouter(gate, **arms)):  # a router is loaded with its plain gate
            assert ability_of(router.gate.gate).llm.startswith(judged)
            assert router.gate.gate is called.gate.gate, "calls share its batches"
    configurable = gate.configurable_fields(threshold=ConfigurableField("t"))
    assert RetrievalRouter(configurable, **arms).gate is configurable


@pytest.mark.parametrize(("given", "judged"), [("", "gpt-4o"), ("phi-4", "phi-4")])
def test_every_gate_of_a_router_judges_the_same_llm_and_a_given_name_goes_first(given, judged):
    for gate in (RetrievalGate(llm_name=given), RetrievalGate(load_gate(llm_name=given))):
        router = gate.route(retrieve=PROMPT | BIG, direct=PROMPT | BIG, answer_first=True)
        for part in answer_first_gates(router.gate.gate):
            assert ability_of(part).llm.startswith(judged)


CHOSEN = {
    "by init_chat_model": (
        chosen_by_the_call(model="gpt-4o", model_provider="openai"),
        {"model": "llama-3.2-1b-instruct"},
    ),
    "by init_chat_model, without a default": (
        PROMPT | chosen_by_the_call(model_provider="openai"),
        {"model": "llama-3.2-1b-instruct"},
    ),
    "a field": (
        PROMPT | BIG.configurable_fields(model_name=ConfigurableField("m")).with_retry(),
        {"m": "llama-3.2-1b-instruct"},
    ),
    "a field of a binding": (
        BIG.configurable_fields(model_name=ConfigurableField("m")).with_config(
            configurable={"m": "llama-3.2-1b-instruct"}
        ),
        {},
    ),
    "an alternative": (
        BIG.configurable_alternatives(ConfigurableField("m"), small=SMALLEST, bad=SMALL),
        {"m": "small"},
    ),
}


@pytest.mark.model
@each(INVOKES)
@pytest.mark.parametrize("options", [{}, {"answer_first": True}], ids=["plain", "answer_first"])
@pytest.mark.parametrize("what", CHOSEN)
def test_the_llm_that_a_call_chooses_is_judged(call, options, what):
    """Regression: with gpt-4o by default, questions that llama-3.2-1b cannot answer were skipped for it, too."""
    direct, chosen = CHOSEN[what]
    events, judged = EventRecorder(), []
    always = RetrievalGate(threshold=1.1).route(
        retrieve=RunnableLambda(lambda question: question), direct=direct, **options
    )
    for configurable in ({}, chosen):
        call(always, "Who wrote Hiawatha?", {"configurable": configurable, "callbacks": [events]})
        judged.append(events.events[-1]["llm"].split(" ")[0])
    assert judged[1].startswith("llama-3.2-1b")
    assert judged[0].startswith("llama-3.2-1b") is (not chosen)
    unknown = {"configurable": {"m": "no such alternative"}, "callbacks": [events]}
    assert call(always, "Who wrote Hiawatha?", unknown) == "Who wrote Hiawatha?"


@pytest.mark.model
def test_a_batch_whose_items_choose_llms_judges_each_by_its_own():
    direct, chosen = CHOSEN["a field"]
    events = EventRecorder()
    chain = RetrievalGate(threshold=1.1).route(
        retrieve=RunnableLambda(lambda question: question), direct=direct
    )
    configs = [{"configurable": c, "callbacks": [events]} for c in ({}, chosen, {})]
    assert chain.batch(["one?", "two?", "three?"], configs) == ["one?", "two?", "three?"]
    judged = {event["question"]: event["llm"].startswith("llama") for event in events.events}
    assert judged == {"one?": False, "two?": True, "three?": False}


@pytest.mark.parametrize("arm", ["retrieve", "direct"])
def test_a_model_that_takes_the_whole_config_as_its_options_cannot_be_in_an_arm(arm):
    """Regression: each call failed in OpenAI's client: "unexpected keyword argument '__rgate_ahead'"."""
    options = {"model": "gpt-4o", "model_provider": "openai", "configurable_fields": "any", "api_key": "none"}
    arms = {"retrieve": BIG, "direct": BIG}
    with pytest.raises(ConfigurationError, match=rf"{arm}=.*every key.*Hint: .*config_prefix="):
        RetrievalGate("constant:never").route(**{**arms, arm: PROMPT | init_chat_model(**options)})
    prefixed = init_chat_model(**options, config_prefix="llm")
    RetrievalGate("constant:never").route(**{**arms, arm: PROMPT | prefixed})


def test_a_gate_that_judges_no_llm_takes_no_name():
    own = SimpleNamespace(decide_batch=lambda questions: [], adecide_batch=lambda questions: [])
    for gate in ("constant:never", own):
        with pytest.raises(ConfigurationError, match="cannot be adjusted to an LLM"):
            RetrievalGate(gate, llm_name="phi-4")
    assert RetrievalGate(own).route(retrieve=BIG, direct=BIG).gate.gate.gate is own


CANNOT_DRAFT = (
    r"llm= needs a method draft.*Hint: .*llm_name="  # regression: ignored, and another LLM was judged
)
NO_NAME = r"llm_name= must be a name, not \w+. Hint: .*llm="


@pytest.mark.parametrize(
    ("make", "why"),
    [
        *((partial(load_gate, llm=llm), CANNOT_DRAFT) for llm in ("gpt-4o", BIG, MockLLM())),
        *(
            (partial(load_gate, "ik", llm=llm, source="llm"), CANNOT_DRAFT)
            for llm in ("gpt-4o", BIG, MockLLM())
        ),
        (partial(load_gate, llm_name=BIG), NO_NAME),
        (partial(RetrievalGate, llm_name=BIG), NO_NAME),
        (partial(RetrievalGate, MockLLM()), "pass an LLM as llm="),
        (partial(RetrievalGateSelector, MockLLM()), "pass an LLM as llm="),
    ],
)
def test_an_llm_in_the_wrong_place_is_refused_with_the_argument_for_it(make, why):
    with pytest.raises(ConfigurationError, match=why):
        make()


def test_the_chat_model_that_drafts_or_answers_is_judged():
    assert ability_of(RetrievalGate(llm=PROMPT | BIG).gate).llm.startswith("gpt-4o")
    chain = gated_rag(RunnableLambda(lambda question: []), SMALL)
    assert ability_of(chain.last.gate.gate).llm.startswith("gpt-4o-mini")


def test_what_is_guarded_in_the_retrieve_arm_takes_the_decision_of_the_router():
    proxy = ScriptedProxy(fails_for="who?")
    gate = RetrievalGate(load_gate(proxy=proxy))
    guarded = gate.guard(lambda question: [])
    retrieve = RunnableLambda(lambda question: guarded.invoke(question))
    router = gate.route(retrieve=retrieve, direct=PROMPT | BIG)
    assert router.gate.gate is not gate.gate
    router.invoke("who?")
    assert proxy.calls == ["hidden"]


def test_llama_index_engines_judge_their_llm():
    llm = OpenAILike(model="gpt-4o", api_base="http://localhost:1/v1", api_key="x")
    engine = GatedQueryEngine.from_defaults(Rag(), llm=llm)
    for gate in answer_first_gates(engine.decider.gate):
        assert ability_of(gate).llm.startswith("gpt-4o")
    assert engine.decider.gate.gate.llm_name_source == "LlamaIndex's metadata"
    assert engine.decider.unadjusted.decides_like(RetrievalGateSelector().decider.unadjusted)
    given = GatedQueryEngine.from_defaults(Rag(), load_gate(llm_name="phi-4"), llm=llm)
    assert ability_of(given.decider.gate).llm == "phi-4"
    assert ability_of(GatedQueryEngine.from_defaults(Rag(), llm=MockLLM()).decider.gate) is None


def test_the_name_of_a_served_model_is_judged():
    served = ScriptedProxy()
    served.name = "meta-llama/Llama-3.2-1B-Instruct"
    assert ability_of(load_gate(llm=served)).llm == served.name
    assert ability_of(load_gate(llm=served, llm_name="phi-4")).llm == "phi-4"
