"""LlamaIndex: what the direct arm is asked, and what it gives."""

import copy
from functools import partial

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.indices.query.query_transform.base import IdentityQueryTransform
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import ChatPromptTemplate, RichPromptTemplate, SelectorPromptTemplate
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine, TransformQueryEngine
from pydantic import BaseModel, Field

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import GatedQueryEngine, GatedRetriever
from tests.begun_answers import Reader
from tests.llama_index_parts import Rag, ScriptedGate, Shelf, Writer, ask, both_ways, over

KNOWN, UNKNOWN = "a thing", "unknown thing"


class City(BaseModel):
    """A city."""

    name: str


class Listener(Writer):
    """Writes a city as JSON, and keeps what it was asked."""

    chats: bool = True
    prompts: list = Field(default_factory=list)

    def _chat(self, messages, options):
        self.prompts.append([(str(message.role.value), message.content) for message in messages])
        return super()._chat(messages, options)

    def _whole(self, prompt, options):
        return super()._whole(prompt, options).model_copy(update={"text": '{"name": "Oulu"}'})

    @property
    def asked(self):
        """The roles and texts of the last call."""
        return self.prompts[-1]


def engine_over(llm, **options):
    return RetrieverQueryEngine.from_args(Shelf(), llm, **options)


def gated(inner, llm, **options):
    return GatedQueryEngine.from_defaults(inner, ScriptedGate(), llm, **options)


# --- what it gives -------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("options", [{}, {"answer_first": True}, {"streaming": True}], ids=str)
def test_both_arms_give_the_output_class_of_the_engine(call, options):
    llm = Listener()
    engine = GatedQueryEngine.from_defaults(engine_over(llm, output_cls=City), Reader(), llm, **options)
    for question in (KNOWN, UNKNOWN):
        response = call(engine, "query", question)
        assert (type(response), response.response) == (PydanticResponse, City(name="Oulu"))
        assert response.metadata["rgate"]["question"] == question


def test_the_class_of_an_engine_inside_counts_too_and_an_llm_that_is_structured_stays_so():
    llm = Listener()
    wrapped = TransformQueryEngine(engine_over(llm, output_cls=City), IdentityQueryTransform())
    structured = gated(engine_over(llm), llm.as_structured_llm(City), answer_first=True)
    for engine in (gated(wrapped, llm), structured):
        assert engine.query(KNOWN).response == City(name="Oulu")
    assert type(gated(engine_over(llm), llm).query(KNOWN)) is Response


# --- what it is asked ------------------------------------------------------------------------------------------

PERSONA = 'You are a pirate. Answer as {"text": …}.'
LATEX = r"Write \frac{a}{b}, and {{name}} for a name."
QUESTION = "Passages: {context_str}\nQuestion: {query_str}"


def chat_prompt(*system, **options):
    messages = [ChatMessage(role="system", content=text) for text in system]
    return ChatPromptTemplate(message_templates=[*messages, ChatMessage(content=QUESTION)], **options)


RICH = RichPromptTemplate(
    '{% chat role="system" %}Be brief.{% endchat %}'
    '{% chat role="user" %}{{ context_str }} {{ query_str }}{% endchat %}'
)
SELECTED = SelectorPromptTemplate(PromptTemplate(QUESTION), [(lambda llm: True, chat_prompt("Be kind."))])
MAPPED = chat_prompt("Be {tone}.").partial_format(tone="bold")
TAKEN = {
    "LlamaIndex's own": ({}, []),
    "a persona": ({"text_qa_template": chat_prompt(PERSONA)}, [PERSONA]),
    "two": ({"text_qa_template": chat_prompt("Be brief.", "Be safe.")}, ["Be brief.", "Be safe."]),
    "a summary's": (
        {"summary_template": chat_prompt(PERSONA), "response_mode": "tree_summarize"},
        [PERSONA],
    ),
    "a rich one": ({"text_qa_template": RICH}, ["Be brief."]),
    "one that is selected": ({"text_qa_template": SELECTED}, ["Be kind."]),
    "one that is filled in": ({"text_qa_template": MAPPED}, ["Be bold."]),
    # Regression: it was taken for one with variables, and left out.
    "with LaTeX": ({"text_qa_template": chat_prompt(LATEX)}, [LATEX]),
    "with passages in it": (
        {"text_qa_template": chat_prompt("Read {context_str}.", "Be safe.")},
        ["Be safe."],
    ),
    "a text": ({"text_qa_template": PromptTemplate(f"You are a pirate. {QUESTION}")}, []),
    "a function that needs passages": (
        {"text_qa_template": chat_prompt(PERSONA, function_mappings={"context_str": lambda **given: 1 / 0})},
        [],
    ),
}


@both_ways
@pytest.mark.parametrize(("options", "system"), TAKEN.values(), ids=list(TAKEN))
def test_the_system_messages_of_the_engines_prompt_are_taken_over(call, options, system, caplog):
    llm = Listener()
    call(gated(engine_over(llm, **options), llm), "query", KNOWN)
    assert llm.asked == [*(("system", text) for text in system), ("user", KNOWN)]
    cannot_be_filled_in = options is TAKEN["a function that needs passages"][0]
    assert len(caplog.records) == cannot_be_filled_in


@both_ways
def test_a_developers_message_is_a_system_message(call):
    """Regression: OpenAI's newer name of the role was unknown, and the persona was lost."""
    llm = Listener()
    messages = [ChatMessage(role="developer", content=PERSONA), ChatMessage(role="user", content=QUESTION)]
    prompt = ChatPromptTemplate(message_templates=messages)
    call(gated(engine_over(llm, text_qa_template=prompt), llm), "query", KNOWN)
    assert llm.asked == [("developer", PERSONA), ("user", KNOWN)]


@both_ways
@pytest.mark.parametrize("through", ["", "query_engine:"], ids=["inner", "gated"])
def test_a_prompt_that_is_updated_later_counts_for_both_arms(call, through):
    """Regression: a known question got the old persona."""
    llm, days = Listener(), iter("ab")
    inner = engine_over(llm, text_qa_template=chat_prompt(PERSONA))
    engine = gated(inner, llm)
    changed = engine if through else inner
    old = copy.deepcopy(engine)
    dated = chat_prompt("Today is {day}.", function_mappings={"day": lambda **given: next(days)})
    for prompt, system in ((chat_prompt("Be kind."), "Be kind."), (dated, "Today is b.")):
        changed.update_prompts({f"{through}response_synthesizer:text_qa_template": prompt})
        call(engine, "query", KNOWN)
        assert llm.asked == [("system", system), ("user", KNOWN)]
    call(old, "query", KNOWN)
    asked = old.direct._response_synthesizer._llm.asked
    assert asked == [("system", PERSONA), ("user", KNOWN)]
    engine.update_prompts({"direct:response_synthesizer:simple_template": PromptTemplate("Say {query_str}")})
    call(engine, "query", KNOWN)
    assert llm.asked == [("user", f"Say {KNOWN}")]


def test_they_are_asked_for_in_a_stream_and_of_a_completion_model_too():
    for chats, streaming in ((True, True), (False, False)):
        llm = Writer(chats=chats)
        inner = engine_over(llm, text_qa_template=chat_prompt("Say what is unknown."), streaming=streaming)
        text, _ = ask(gated(inner, llm), KNOWN, "stream" if streaming else "query")
        assert text.startswith("Perhaps"), "the writer has read the system message"


@both_ways
def test_a_prompt_or_an_engine_of_your_own(call):
    llm = Listener()
    inner = engine_over(llm, text_qa_template=chat_prompt(PERSONA))
    prompt = chat_prompt("From memory.")
    call(gated(inner, llm, direct_prompt=prompt), "query", KNOWN)
    assert llm.asked[0] == ("system", "From memory.")
    own = Rag(answer="from memory")
    assert str(call(gated(inner, llm, direct=own), "query", KNOWN)) == "from memory"
    with pytest.raises(ConfigurationError, match="does not apply to the engine"):
        gated(inner, llm, direct=own, direct_prompt=prompt)


NO_QUESTION = r"direct_prompt= has no \{query_str\}.*PromptTemplate\("


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        # Regression: the LLM answered a prompt in which no question was.
        (PromptTemplate("Answer in one sentence."), NO_QUESTION),
        (PromptTemplate("Answer in one sentence: {question}"), NO_QUESTION),
        (
            ChatPromptTemplate(message_templates=[ChatMessage(role="system", content=PERSONA)]),
            NO_QUESTION,
        ),
        # Regression: the first known question failed, with an error of an event's fields.
        ("Say {query_str}", r"str cannot be used as a prompt: .* PromptTemplate\("),
    ],
)
def test_a_prompt_without_the_question_or_a_text_in_its_place_is_refused(prompt, why):
    with pytest.raises(ConfigurationError, match=why):
        gated(engine_over(Listener()), Listener(), direct_prompt=prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        RICH,
        SELECTED,
        PromptTemplate("Say {asked}", template_var_mappings={"query_str": "asked"}),
        PromptTemplate("Say {text}", function_mappings={"text": lambda query_str, **_: query_str}),
        chat_prompt(function_mappings={"context_str": lambda **given: 1 / 0}),
    ],
)
def test_a_prompt_may_take_the_question_in_any_way(prompt):
    assert gated(engine_over(Listener()), Listener(), direct_prompt=prompt)


class Fallback(CustomQueryEngine):
    """An engine of the user's own, with another to ask if it fails."""

    engine: object
    other: object = None

    def custom_query(self, query_str):
        return self.engine.query(query_str)


def test_of_engines_that_are_each_others_fallback_each_is_searched_once():
    """Regression: making the engine never ended."""
    first, second = Fallback(engine=Rag()), Fallback(engine=engine_over(Listener(), streaming=True))
    first.other, second.other = second, first
    assert gated(first, Listener()).streaming


# --- prompts by their keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda engine: engine,
        partial(gated, llm=Listener()),
        # Regression: "too many values to unpack", from LlamaIndex's own method.
        lambda engine: gated(TransformQueryEngine(engine, IdentityQueryTransform()), llm=Listener()),
    ],
    ids=["once", "twice", "in LlamaIndex's own"],
)
def test_prompts_are_changed_by_the_keys_that_they_are_read_by(wrap):
    engine = wrap(gated(over(Shelf()), Writer()))
    prompts = engine.get_prompts()
    engine.update_prompts({key: PromptTemplate(f"{key} {{query_str}}") for key in prompts})
    for key, prompt in engine.get_prompts().items():
        assert prompt.template == f"{key} {{query_str}}"
    first, *_, last = prompts
    lost = PromptTemplate("lost")
    for changed, why in (
        ({first: lost, "x": lost}, "Unknown prompt key 'x'"),
        ({first: lost, f"{first}_x": lost}, f"Unknown prompt key '{first}_x'"),
        ({first: lost, "nowhere:x": lost}, "Unknown prompt key 'nowhere:x'"),
        ({first: lost, last: "text"}, "str cannot be used as a prompt"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            engine.update_prompts(changed)
    assert "lost" not in {prompt.template for prompt in engine.get_prompts().values()}


def test_those_behind_a_guarded_retriever_too():
    guarded = GatedRetriever(Shelf(), ScriptedGate())
    with pytest.raises(ConfigurationError):
        guarded.update_prompts({"nowhere:x": PromptTemplate("")})
