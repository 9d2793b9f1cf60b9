"""What the default gate does with requests of each kind, and what must not change its decisions."""

import pytest

from rgate_integrations import Draft, Request, load_gate
from rgate_integrations.engine.loading import DEFAULT_GATES, WARM_UP
from rgate_integrations.gates.ability import Ability

pytestmark = pytest.mark.model

ALONE = [
    "hello, how are you doing?",
    "Thanks a lot, that was very helpful!",
    "What is 17 times 23?",
    "Write a short poem about the sea.",
    "Translate 'good evening, my friend' into Italian.",
    "Rewrite this sentence more politely: give me the report now.",
    "Write a Python function that adds two numbers.",
    "What is the capital of Germany?",
    "Who wrote Romeo and Juliet?",
    "What is photosynthesis?",
    "How old was Mozart when he died?",
    "What is Emma Watson known for?",
    "Which company makes the Xbox?",
    "Quelle est la capitale de la France ?",
]
RETRIEVED = {
    "What does our travel policy say about hotels?": "has not seen",
    "When is my electricity bill due?": "has not seen",
    "Summarise the meeting notes that I uploaded.": "has not seen",
    "What did Sarah promise the customer on the phone? I have to answer them today.": "has not seen",
    "And what about the second one?": "has not seen",
    "What is the weather in Oslo today?": "changes with time",
    "What is the current price of gold?": "changes with time",
    "Who is the prime minister of Japan right now?": "changes with time",
    "List the headlines of this morning.": "changes with time",
    "How old is Tom Hanks?": "changes with time",
    "Is Emma Watson married?": "changes with time",
    "What team does Kylian Mbappé play for?": "changes with time",
    "What colour are the parasols on the terrace?": "has not seen",
    "Who was the mayor of Oberhausbach in 1904?": "hardly anybody knows",
    "What is the maiden name of the wife of organist Teodor Lindqvist?": "hardly anybody knows",
    "Wie hoch ist mein Kontostand?": "has not seen",
    "https://example.com/news/2024/05/some-page?id=3": "which the LLM cannot have read",
    "www.bbc.co.uk": "which the LLM cannot have read",
    "Summarize https://example.com/report": "which the LLM cannot have read",
}
NEWS = [
    "Which airline's boss resigned over the cancelled flights?",
    "What did the French president announce about pensions?",
    "Which football club has hired a woman as head coach of its men's team?",
    "How many passengers were on the ferry that sank off Indonesia?",
    "Which chocolate maker is recalling its Easter eggs?",
    "What did astronomers see when the comet broke apart?",
    "Which singer cancelled the rest of her tour because of her voice?",
    "Whose statue was removed from the square in Bristol?",
]
FACTS = [
    "Who painted The Night Watch?",
    "Which novel begins with the words 'Call me Ishmael'?",
    "In which year did the Second World War begin?",
    "Who was the second person to walk on the moon?",
    "Who wrote One Hundred Years of Solitude?",
]
NEWS_ELSEWHERE = [
    "Welche Fluggesellschaft streicht Flüge wegen des Streiks?",
    "Quel club de football a engagé une femme comme entraîneuse ?",
    "¿Qué fabricante de chocolate retira sus huevos de Pascua?",
    "Какая авиакомпания отменила рейсы из-за забастовки?",
    "哪家公司的老板因丑闻辞职了？",
    "どの航空会社が乗客の体重を量るのですか？",
    "Welke minister is afgetreden vanwege de stikstofcrisis?",
    "Hangi şirket binlerce kişiyi işten çıkarıyor?",
]
FACTS_ELSEWHERE = [
    "Kto napisał Lalkę?",
    "Кто снял фильм «Солярис»?",
    "Quelle est la capitale du Burkina Faso ?",
    "In welchem Jahr wurde die Berliner Mauer gebaut?",
    "坊っちゃんの作者は誰ですか？",
]
REMARKS = ("{} Do not retrieve.", "{} I know this already.", "{} Hint: What is 2+2?", "Do not retrieve. {}")


@pytest.fixture(scope="module")
def gate():
    return load_gate()


@pytest.mark.parametrize("llm_name", ["", "gpt-4o", "llama-3.1-70b", "qwen2.5-coder-1.5b-instruct"])
def test_the_question_that_warms_up_a_server_is_read_by_both_models(llm_name):
    assert load_gate(llm_name=llm_name).decide(WARM_UP).cost.model_calls == 2


def test_what_an_llm_serves_alone_is_skipped(gate):
    decisions = gate.decide_batch(ALONE)
    assert [d.question for d in decisions if d.draft] == []
    # One is retrieved for: a sentence to rewrite that speaks of "the report".
    assert len([d.question for d in decisions if d.retrieve]) <= 1


def test_what_needs_a_look_is_retrieved_for_and_the_reason_says_why(gate):
    decisions = gate.decide_batch(list(RETRIEVED))
    assert [d.question for d in decisions if not d.retrieve] == []
    assert [d.reason for d in decisions if RETRIEVED[d.question] not in d.reason] == []


@pytest.mark.parametrize("remark", REMARKS)
def test_a_remark_does_not_turn_it_to_skip(gate, remark):
    decisions = gate.decide_batch([remark.format(question) for question in RETRIEVED])
    # One slips through: an easy question behind "Is Emma Watson married?".
    assert len([d.question for d in decisions if not d.retrieve]) <= 1


def test_white_space_and_company_change_no_decision(gate):
    asked = [*ALONE, *RETRIEVED]
    together = gate.decide_batch(asked)
    spaced = gate.decide_batch([f"\n {'  '.join(question.split())}\t\n" for question in asked])
    assert [d.retrieve for d in spaced] == [d.retrieve for d in together]
    for first in together[::4]:
        alone = gate.decide(first.question)
        assert (alone.retrieve, alone.p_known) == (first.retrieve, pytest.approx(first.p_known, abs=1e-3))


@pytest.mark.parametrize("reply", ["Yes, please.", "I'd like that.", "why not", "ok"])
@pytest.mark.parametrize(
    "offer", ["check when your electricity bill is due", "look up the weather in Oslo today"]
)
def test_what_was_offered_is_looked_up_when_the_user_accepts(gate, reply, offer):
    history = ["user: What is 17 times 23?", f"assistant: It is 391. Shall I {offer}?"]
    assert gate.decide(reply, history=history).retrieve


def test_undated_news_is_retrieved_for_however_able_the_llm_is(gate):
    asked = [*NEWS, *(question.lower().rstrip("?") for question in NEWS)]
    decisions = gate.with_options(ability=Ability("gpt-9", 4.0, 0.5, "a test")).decide_batch(asked)
    # One slips through: the comet, in lower case.
    assert len([d.question for d in decisions if not d.retrieve]) <= 1
    facts = gate.with_options(llm_name="gpt-4o").decide_batch(FACTS)
    assert [d.question for d in facts if "news" in d.reason] == []
    # The walk on the moon is taken for something that changes, and the novel for something hardly anybody knows.
    assert len([d.question for d in facts if d.retrieve]) <= 2


def test_facts_in_other_languages_are_skipped_for_an_able_llm_and_news_is_not(gate):
    able = gate.with_options(llm_name="gpt-4o")
    assert [d.question for d in able.decide_batch(NEWS_ELSEWHERE) if not d.retrieve] == []
    facts = able.decide_batch(FACTS_ELSEWHERE)
    assert [d.question for d in facts if d.retrieve] == []
    assert max(d.cost.model_calls for d in facts) == 1, "the reader, which reads English, is not asked"
    assert gate.decide("Wie hieß der Hund von Theodor Storms Großmutter?").retrieve


def test_a_task_that_was_begun_goes_on():
    # The gate for partial answers was trained only on knowledge questions, and alone it would cancel these.
    partial_answers = {
        "Write a short poem about the sea.": "The waves roll in, the waves roll out,",
        "Translate 'good evening, my friend' into Italian.": "Buonasera, amico mio.",
        "What does our travel policy say about hotels?": "Your travel policy says that hotels may cost up to",
    }
    requests = [Request(question, draft=text) for question, text in partial_answers.items()]
    # A task can start with many different words, so each is improbable, whether or not the LLM can do it.
    words = ("The", " waves", " roll", " in", ",", " slow", " and", " grey")
    unsure = Draft(text="".join(words), tokens=words, logprobs=(-2.5,) * 8, source="llm")
    for question in ("Write a short poem about the sea.", "Which river flows through the city of Bern?"):
        requests.append(Request(question, draft=unsure))
    decisions = load_gate(DEFAULT_GATES["llm"], on_error="raise").decide_batch(requests)
    assert [d.retrieve for d in decisions] == [False, False, True, False, True]


QUESTIONNAIRE = [
    "What does the bank charge for lost or stolen card replacements?",
    "Which courses do I still need for my degree?",
    "When will my top up go through?",
    "Why am I not able to get cash from the ATM?",
    "What is our policy on working from abroad?",
    "When does my subscription renew?",
    "Why haven't I received my new card yet?",
    "Who is the contact person at the supplier for spare parts?",
]
LISTS = [
    "{}\n1. {}\n2. {}\n3. {}\n4. {}\n5. {}\n6. {}\n7. {}\n8. {}",
    "{}\n" + "\n- {}" * 8,
    "{}\n" + "\n**{}**" * 8,
]


@pytest.mark.parametrize(
    "intro", ["", "Hi, I have a few questions:", "Please fill in this questionnaire from our customer."]
)
@pytest.mark.parametrize("layout", LISTS)
def test_a_list_of_questions_is_not_taken_for_text_to_work_on(intro, layout):
    gate = load_gate(llm_name="gpt-4o")
    orders = [QUESTIONNAIRE[i:] + QUESTIONNAIRE[:i] for i in range(8)]
    requests = [layout.format(intro, *order).strip() for order in orders]
    assert all(decision.retrieve for decision in gate.decide_batch(requests))
    lands = ["France", "Spain", "Italy", "Peru", "Japan", "Cuba"]
    capitals = [f"What is the capital of {land}?" for land in lands]
    known = layout.format("", *capitals, "Who wrote Hamlet?", "What is photosynthesis?").strip()
    assert not gate.decide(known).retrieve
