"""Splits thoughts from answers in every dialect, finds the answer's tokens, and recognises non-answers."""

import math

import pytest
from langchain_core.messages import AIMessage
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock

from rgate_integrations import Draft
from rgate_integrations.runtime.replies import describe_non_answer, is_truncated, split_thoughts

THOUGHT = "The capital of France is easy."
TAGS = {
    "think": f"<think>\n{THOUGHT}\n</think>\n\n",
    "opened by the prompt": f"{THOUGHT}\n</think>\n\n",
    "in capitals": f"<Thinking>{THOUGHT}</Thinking>",
    "Mistral": f"[THINK]{THOUGHT}[/THINK]",
    "Seed": f"<seed:think>{THOUGHT}</seed:think>",
    "Kimi": f"◁think▷{THOUGHT}◁/think▷",
    "Command A": f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_RESPONSE|>",
    "harmony": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>",
    "harmony without its tags": f"analysis{THOUGHT}assistantfinal",
    "Gemma": f"<|channel>thought\n{THOUGHT}<channel|>",
    "twice": f"<think>{THOUGHT}</think>\n<think>Sure.</think>",
}


@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
def test_tags_in_the_text_set_thoughts_apart_also_while_they_are_written(tags):
    draft = Draft(text=f"{tags}Paris.", finished=True)
    assert (draft.text, draft.non_answer) == ("Paris.", "")
    assert draft.thinking_tokens >= 6
    for end in range(
        tags.index("easy") if not tags.startswith("The") else len(tags), tags.index("easy.") + 5
    ):
        cut = Draft(text=tags[:end], finished=False)
        assert (cut.text, cut.non_answer, cut.thinking_tokens > 0) == ("", "nothing", True), tags[:end]
    assert Draft.model_validate_json(draft.model_dump_json()) == draft


@pytest.mark.parametrize(
    "text",
    [
        "The tag `</think>` ends it.",
        "I think that it is <think>.",
        "Analysis of it: Paris",
        "Paris <|channel|>",
        "",
        "<thin",
        "no thinking",
    ],
)
def test_an_answer_that_is_about_tags_is_an_answer(text):
    assert split_thoughts(text) == (None, text)
    assert Draft(text=text) == Draft.model_construct(**{**Draft(text="").__dict__, "text": text})


def test_hostile_tags_take_no_time():
    assert split_thoughts("<think>" * 50_000).answer == ""
    assert split_thoughts("<think></think>" * 50_000) == ("", "")
    assert split_thoughts("<|channel|>final" * 50_000).thoughts is None


@pytest.mark.parametrize(
    ("tokens", "text", "kept"),
    [
        (["<think>", "Paris", "?", "</think>", "\n\n", "Pa", "ris"], None, ["Pa", "ris"]),
        (["<think>", "Paris", "?"], None, []),
        (["Hm", ".", "\n\n", "Paris", "<|im_end|>"], "Paris", ["Paris", "<|im_end|>"]),
        (["Hm", "."], "Paris", []),  # they are not the answer's
    ],
)
def test_tokens_and_log_probabilities_are_those_of_the_answer(tokens, text, kept):
    logprobs = [-0.1 * number for number in range(len(tokens))]
    shown = text is not None
    draft = Draft(
        text=text if shown else "".join(tokens),
        tokens=tokens,
        token_ids=range(len(tokens)),
        logprobs=logprobs,
        thinking_tokens=3 * shown,
        response_id="x",
    )
    start = len(tokens) - len(kept)
    assert draft.tokens == tuple(kept)
    assert draft.logprobs == (tuple(logprobs[start:]) if kept else None)
    assert draft.token_ids == tuple(range(start, len(tokens)))
    assert draft.thinking_tokens == (3 if shown else len(tokens) - len(kept))
    assert draft.response_id == ""
    # Regression: a draft whose tokens have no log-probabilities could not be made.
    bare = Draft(text=text if shown else "".join(tokens), tokens=tokens, thinking_tokens=3 * shown)
    assert (bare.tokens, bare.logprobs, bare.token_ids) == (tuple(kept), None, ())


SUMMARY = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": THOUGHT}]}
USAGE = {"output_token_details": {"reasoning": 20}}
DIALECTS = {
    # message with X for the answer, usage, number of thinking tokens
    "vLLM, SGLang, llama.cpp": ({"content": "X", "reasoning_content": THOUGHT}, {"completion_tokens": 9}, 6),
    "vLLM's new name": ({"content": "X", "reasoning": THOUGHT}, None, 6),
    "OpenAI's chat": ({"content": "X"}, {"completion_tokens_details": {"reasoning_tokens": 20}}, 20),
    "SGLang's count": ({"content": "X"}, {"reasoning_tokens": 20}, 20),
    "Ollama": ({"content": "X", "thinking": THOUGHT}, None, 6),
    "OpenAI's Responses": (AIMessage([SUMMARY, {"type": "text", "text": "X"}]), USAGE, 20),
    "Responses, without a summary": (
        AIMessage([{**SUMMARY, "summary": []}, {"type": "text", "text": "X"}]),
        {},
        1,
    ),
    "Anthropic": (
        AIMessage(
            [{"type": "thinking", "thinking": THOUGHT, "signature": "s"}, {"type": "text", "text": "X"}]
        ),
        None,
        6,
    ),
    "Anthropic, redacted": (
        AIMessage([{"type": "redacted_thinking", "data": "EmwK"}, {"type": "text", "text": "X"}]),
        None,
        1,
    ),
    "Gemini": (
        AIMessage([{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": "X"}]),
        USAGE,
        20,
    ),
    "Gemini's parts": ({"content": [{"text": THOUGHT, "thought": True}, {"text": "X"}]}, None, 6),
    "LangChain": (AIMessage("X", additional_kwargs={"reasoning_content": THOUGHT}), None, 6),
    "LangChain's blocks": (AIMessage([{"type": "reasoning", "reasoning": THOUGHT}, "X"]), None, 6),
    "LlamaIndex": (ChatMessage(blocks=[ThinkingBlock(content=THOUGHT), TextBlock(text="X")]), None, 6),
    "LlamaIndex's Ollama": (ChatMessage("X", additional_kwargs={"thinking": THOUGHT}), None, 6),
}


def emptied(message):
    """The same message, cut off before its answer."""
    if isinstance(message, dict):
        content = message["content"]
        return {**message, "content": None if isinstance(content, str) else content[:1]}
    if isinstance(message, ChatMessage):
        return ChatMessage(blocks=message.blocks[:-1], additional_kwargs=message.additional_kwargs)
    content = "" if isinstance(message.content, str) else message.content[:1]
    return message.model_copy(update={"content": content})


@pytest.mark.parametrize(("message", "usage", "thinking"), DIALECTS.values(), ids=DIALECTS)
def test_thoughts_beside_the_answer_are_told_in_every_dialect(message, usage, thinking):
    draft = Draft.from_message(message, usage=usage, reason="stop", source="llm")
    assert (draft.text, draft.thinking_tokens, draft.finished, draft.non_answer) == ("X", thinking, True, "")
    cut = Draft.from_message(emptied(message), usage=usage, reason="max_tokens")
    assert (cut.text, cut.thinking_tokens, cut.finished, cut.non_answer) == ("", thinking, False, "nothing")


EMPTY_THOUGHTS = {"content": "<think>\n\n</think>\n\nX"}  # of a template whose thinking is off


@pytest.mark.parametrize(
    "message",
    [AIMessage("X"), {"content": "X"}, {"text": "X"}, ChatMessage("X"), AIMessage(["X"]), EMPTY_THOUGHTS],
)
def test_an_answer_without_thoughts_has_none(message):
    draft = Draft.from_message(message, usage={"completion_tokens_details": {"reasoning_tokens": 0}})
    assert (draft.text, draft.thinking_tokens, draft.finished) == ("X", 0, False)


@pytest.mark.parametrize(
    ("reason", "cut"),
    [("length", True), ("MAX_TOKENS", True), ("FinishReason.MAX_TOKENS", True), ("incomplete", True)]
    + [(reason, False) for reason in ("stop", "end_turn", "STOP", "completed", None, math.nan)],
)
def test_what_a_finish_reason_says(reason, cut):
    assert is_truncated(reason) is cut


DO_NOT_KNOW = """
No idea. / No idea who painted it. / I have no clue. / I lack the information needed to answer. / Not sure.
Beats me! / I'm not sure who painted it. / I am not certain. / I'm not entirely sure, sorry.
Hmm, I can't recall that one.
Honestly, I don't know. / I'm afraid I don't know. / Great question! I don't know, though. / Sorry, I don't remember.
Well, no idea. / I couldn't say. / I'm afraid that I really don't know. / My apologies, but I cannot be certain.
<UNKNOWN> / Unknown. / I'm not aware of any such film. / I'm not familiar with a song of this name.
Unable to determine. / There is no information about him. / I apologize for any confusion, but I couldn't verify it.
As of my last update, I can't confirm that. / That is unknown to me. / I would have to look that up.
Ich weiß es nicht. / Das weiß ich leider nicht. / Keine Ahnung. / Désolé, mais je ne sais pas. / No lo sé.
Non lo so. / Não sei. / К сожалению, я не знаю. / 我不知道。 / 抱歉，我不清楚。 / すみませんが、わかりません。
잘 모르겠습니다. / لا أعرف. / मुझे नहीं पता। / Bilmiyorum.
"""
ANSWERS = """
Not only Paris, but also Lyon. / No, it was Lyon. / No ideas are patentable. / No idea is born in a vacuum.
Notting Hill / Well, Paris. / Sorry, Lyon. / Unfortunately, he died in 1970. / Honestly, Paris. / Unknown Pleasures
The Unknown Soldier / There is no information paradox in classical physics. / I'm afraid of nothing but spiders.
I have information for you: Paris. / As of my last update, it was Lyon. / Nonso Anozie / No se rinde nunca
Non solo Roma / Der Film heißt 'Keine Ahnung'. / 抱歉，巴黎，我不知道。
"""

REFUSALS_OF_LLMS = """
Leider habe ich keinen Zugriff auf diese Informationen.
Ich kann diese Frage nicht beantworten, weil mir die Daten fehlen.
Leider kann ich Ihnen dazu keine Auskunft geben. / Es tut mir leid, ich weiß nicht, wann das Schwimmbad öffnet.
Lamentablemente no tengo acceso a esa información.
No puedo responder a esta pregunta porque me faltan los datos.
Desafortunadamente, no cuento con información actualizada sobre ese evento.
No sé quién es el director de esa escuela. / Malheureusement, je n'ai pas accès à ces données.
Je ne peux pas répondre à cette question. / Je n'ai malheureusement pas connaissance de cet événement.
Je ne sais pas qui dirige cette école. / Purtroppo non ho accesso a questi dati.
Non posso rispondere a questa domanda. / Sfortunatamente non dispongo di dati aggiornati su questo evento.
Scusa, non posso aiutarti con questo. / Infelizmente, não tenho acesso a esses dados.
Não posso responder a essa pergunta. / Infelizmente não possuo dados atualizados sobre esse evento.
Desculpa, não consigo ajudar com isso. / Helaas heb ik geen toegang tot die gegevens. / Ik weet het niet.
Helaas beschik ik niet over actuele gegevens. / Sorry, daar kan ik je niet mee helpen.
Niestety nie mam dostępu do tych informacji. / Nie mogę odpowiedzieć na to pytanie, ponieważ brakuje mi danych.
Niestety nie dysponuję aktualnymi danymi. / Przykro mi, nie mogę w tym pomóc.
К сожалению, у меня нет доступа к этим данным.
Я не могу ответить на этот вопрос.
К сожалению, я не обладаю актуальными данными.
Извините, я не могу помочь с этим. / Maalesef bu bilgilere erişimim yok.
Bu soruya cevap veremiyorum. / Ne yazık ki güncel verilere sahip değilim.
Kusura bakmayın, bu konuda yardımcı olamam. / 很遗憾，我无法访问这些数据。 / 对不起，我无法回答这个问题。
很抱歉，我没有最新的数据。 / 对不起，这个问题我无法回答。 / 残念ながら、その情報にアクセスできません。
データがないため、この質問にはお答えできません。 / あいにく最新のデータを持ち合わせておりません。
申し訳ございませんが、お手伝いできません。 / 죄송합니다. 해당 데이터에 접근할 수 없습니다.
그 질문에는 답변드릴 수 없습니다. / 아쉽게도 최신 데이터를 보유하고 있지 않습니다.
죄송합니다만 도와드릴 수 없습니다. / للأسف لا يمكنني الوصول إلى هذه المعلومات.
لا أستطيع الإجابة عن هذا السؤال لأن البيانات تنقصني. / مع الأسف، لا تتوفر لدي بيانات حديثة.
المعذرة، لا يمكنني مساعدتك في ذلك. / दुर्भाग्य से मेरे पास उस जानकारी तक पहुँच नहीं है।
मैं इस प्रश्न का उत्तर नहीं दे सकता क्योंकि मेरे पास डेटा नहीं है।
दुर्भाग्यवश मेरे पास नवीनतम आंकड़े नहीं हैं। / क्षमा करें, मैं इसमें आपकी मदद नहीं कर सकता।
"""
FOREIGN_ANSWERS = """
Leider hat das Museum montags geschlossen.
Es tut mir leid, dass Ihr Paket verspätet ist. Es kommt am Dienstag.
Ich kann Ihnen sagen, dass der Eintritt 5 Euro kostet.
Das Amt hat keine Informationen über die Tat veröffentlicht. / Lo siento, pero la respuesta es 42.
Lamentablemente, murió en 1970. / No se puede entrar los lunes. / No tengo duda: fue Cervantes.
Désolé, c'est Lyon. / Malheureusement, il est mort en 1970. / La Suisse n'a pas accès à la mer.
On ne peut pas répondre sans définir le mot. / Mi dispiace, è Roma. / Purtroppo è morto nel 1970.
Non ho dubbi: Dante. / Non sono un pirata è un romanzo. / Desculpe, é Lisboa.
Infelizmente, ele morreu em 1970. / Não tenho dúvida: Camões. / Lamento o atraso: a encomenda chega na terça.
Helaas is het museum maandag dicht. / Het spijt me dat je pakket te laat is; het komt dinsdag.
Zwitserland heeft geen toegang tot de zee. / Je kunt de vraag niet los zien van de oorlog.
Niestety muzeum jest w poniedziałki zamknięte. / Przykro mi, że paczka się spóźnia; dotrze we wtorek.
Czechy nie mają dostępu do morza. / Nie można wejść w poniedziałek.
К сожалению, он умер в 1970 году. / Извините, это Казань.
У меня нет сомнений: Пушкин. / Мне нравится ответ: 42.
Maalesef müze pazartesi günleri kapalı. / Üzgünüm, doğrusu Ankara. / Bu soruya cevap: 42.
Başkan bu konuda bilgim yok dedi. / 很遗憾，博物馆周一闭馆。 / 抱歉，应该是1998年。
我无法呼吸是2014年的一句口号。 / 没有他就没有新中国。 / 残念ながら、月曜日は休館です。
申し訳ありませんが、答えは42です。 / スイスは海に面していません。 / データがない場合は0と表示されます。
죄송하지만 정답은 42입니다. / 안타깝게도 박물관은 월요일에 쉽니다. / 서울입니다. 자세한 것은 모르겠습니다.
그는 모르겠다고 말했다. / للأسف المتحف مغلق يوم الاثنين. / عذراً، الجواب هو 42. / ليس لدى سويسرا منفذ على البحر.
ليس لدي شك: المتنبي. / मुझे खेद है कि आपका पार्सल देर से आ रहा है; वह मंगलवार को आएगा।
दुर्भाग्य से संग्रहालय सोमवार को बंद रहता है। / नेपाल की समुद्र तक पहुँच नहीं है। / माफ़ कीजिए, 1998 में।
東京です！他にお手伝いできることはありますか？ / もちろんです！喜んでお手伝いできます。
データが消えることはありません。
個人情報が漏れる心配はありません。 / 設定を変更してもデータに影響はありません。
I cookie tecnici non sono dati personali.
Policja nie znalazła danych sprawcy. / Комиссия НАСА не нашла никаких данных о жизни на Марсе.
不确定性原理告诉我们无法同时确定粒子的位置和动量。 / 无法访问共享文件夹时，请检查网络权限。
没有相关经验的人也可以申请。
Aucune information n'est transmise à des tiers. / Je ne suis pas juriste mais je peux vous aider.
Brak informacji na etykiecie oznacza coś innego. / Ich habe keine weiteren Daten geändert.
Ik heb geen gegevens verwijderd, alleen verplaatst.
"""


def phrases(text):
    return text.strip().replace("\n", " / ").split(" / ")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("  \n", "nothing"),
        ("I don’t know who that is.", "a refusal"),
        ("Sorry, but I can't help with that.", "a refusal"),
        ("I'm very sorry, I do not have access to your files.", "a refusal"),
        ("Unfortunately, I am unable to answer.", "a refusal"),
        ("As an AI language model, I have no opinion.", "a refusal"),
        ("I have no information about it.", "a refusal"),
        *[(text, "a refusal") for text in phrases(DO_NOT_KNOW) + phrases(REFUSALS_OF_LLMS)],
        ('```json\n{"name": "search", "arguments": {}}', "a tool call"),
        ("[TOOL_CALLS][{", "a tool call"),
        ("<|channel|>commentary to=functions.search <|constrain|>json<|message|>{", "a tool call"),
        ("I don't think that it was Paris; it was Lyon.", ""),
        ("I cannot recommend a better book than Hamlet.", ""),
        ("I'm sorry to hear that. Restart it.", ""),
        ("No.", ""),
        *[(text, "") for text in phrases(ANSWERS) + phrases(FOREIGN_ANSWERS)],
        ('{"capital": "Paris"}', ""),
        ('{"name": "Hamlet", "author": "Shakespeare"}', ""),
    ],
)
def test_what_is_no_answer(text, what):
    assert describe_non_answer(text) == what


def test_white_space_before_an_answer_is_walked_once():
    for start in ("", "```", "```["):
        assert describe_non_answer(start + " " * 1_000_000 + "Paris.") == ""
