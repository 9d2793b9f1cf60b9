"""Completes a message of a conversation with the turns that it refers to, before a gate reads it.

A question that is a pasted transcript, and ends with an unanswered user message, is read as a conversation; JSON
and markup are read as lines.
Consecutive user turns are one request. A reply is read together with the question or offer that it answers, a
retry with the question that it repeats. A remark about the answer, such as thanks, is read alone, unless it
replies to a specific question or offer; "ok" may also accept an offer that is no question. If the gate uses the
encoder, retries, remarks and offers are recognised in any language, by their similarity to a few examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from rgate_integrations.decision import Request
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.evidence.base import Context, Sources
from rgate_integrations.gates.evidence.model_outputs import encoder_passes
from rgate_integrations.gates.rules import read_text_states, to_directions
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.proxies import require_states
from rgate_integrations.runtime.closings import question_before
from rgate_integrations.runtime.segments import (
    ASSISTANT,
    USER,
    count_words,
    drop_label,
    is_question,
    segments,
    split_transcript,
    user_turns,
)
from rgate_integrations.runtime.unfolding import unfold

# Minimum cosine of a message that is similar to an example; chosen by benchmarks/conversations.py.
_MIN_COSINE = 0.53
_MIN_OFFER_COSINE = 0.45  # the same for `OFFER`, whose examples cannot name all that may be searched
_MAX_WORDS = 12  # maximum words of a message to compare; longer messages say what they want
_MAX_TURNS = 8  # number of user turns to search for the question that a retry repeats
_SHORT = 5  # maximum words of a question that may be a reply, such as "Why not?", and of a reply such as "order 4411"
_MAX_CLOSING_CHARS = 2_000  # at the end of the assistant's turn, what is split into sentences
RETRY, REMARK, ACCEPT, OPEN, OFFER, OTHER = "retry", "remark", "accept", "open", "offer", "other"
_EXAMPLES = {
    RETRY: (
        "Try that again.",
        "Please try it one more time.",
        "Regenerate your answer.",
        "Redo it.",
        "Once more, please.",
        "Answer again.",
        "Again!",
        "Nochmal!",
        "That was not my question.",
        "You have not answered what I asked.",
        "This is not what I wanted to know.",
        "That's wrong.",
        "No, that is not right, answer correctly.",
        "Are you certain about that?",
        "Check your answer again.",
        "Wrong answer.",
        "Hm, is that true?",
        "Incorrect.",
        "That did not work.",
        "No luck.",
        "It is still the same problem.",
        "Das hat leider nicht geholfen.",
        "Bitte versuche es nochmal.",
        "Das war nicht meine Frage.",
        "Réessayez.",
        "Ce n'est pas ce que j'ai demandé.",
        "Prueba otra vez.",
        "Esa no es la respuesta.",
        "Prova ancora.",
        "Tente novamente.",
        "Попробуйте снова.",
        "Это неправильно.",
        "重试",
        "重新生成。",
        "你没有回答我的问题。",
        "もう一度お願いします。",
        "다시 해 줘",
        "حاول مرة أخرى",
        "फिर से कोशिश करो",
        "Tekrar dene",
    ),
    REMARK: (
        "Thanks!",
        "Thank you very much, that helped me.",
        "Great!",
        "I see.",
        "Perfect, thanks.",
        "Cool, good to know.",
        "Haha, nice.",
        "That is all, bye.",
        "You are wonderful.",
        "Good job!",
        "Got it.",
        "It works now, thank you.",
        "That fixed it.",
        "Jetzt geht es, danke.",
        "Danke schön!",
        "Merci bien !",
        "Gracias, perfecto.",
        "Grazie mille!",
        "Obrigado!",
        "Спасибо!",
        "Понятно.",
        "谢谢！",
        "知道了。",
        "ありがとう！",
        "고마워!",
        "شكرا جزيلا",
        "धन्यवाद",
        "Make your answer shorter.",
        "Say this in simpler words.",
        "Translate that into Italian.",
        "Put it in a table.",
        "Write it as bullet points.",
        "Rewrite this in a friendlier tone.",
        "Summarise your answer.",
        "Make it longer and more formal.",
        "Now as an email.",
        "Fix the grammar.",
        "Kürzer, bitte.",
        "Übersetze das ins Englische.",
        "Traduis-le en anglais.",
        "Plus court, s'il te plaît.",
        "Tradúcelo al inglés.",
        "Ponlo en una lista.",
        "Traducilo in tedesco.",
        "Переведи это на английский.",
        "Сделай короче.",
        "翻译成英文。",
        "短一点。",
        "英語に訳して。",
        "Możesz to streścić?",
        "En forma de lista, por favor.",
        "В виде списка.",
        "Certo, entendido.",
        "Спасибо, помогло.",
        "Skriv det mer formellt.",
        "Nic więcej, na razie.",
        "Schrijf het wat formeler.",
        "写得正式一点。",
        "더는 없어요, 안녕히 계세요.",
        "Kan du sammanfatta?",
        "As bullet points.",
    ),
    ACCEPT: (
        "Okay.",
        "OK",
        "fine",
        "Alles klar.",
        "D'accord.",
        "Vale.",
    ),
    OPEN: (
        "How can I help you?",
        "What can I do for you?",
        "Is there anything else that I can do for you?",
        "Do you have another question?",
        "Anything else?",
        "What would you like to know?",
        "Does that help?",
        "Wie kann ich dir helfen?",
        "Kann ich sonst noch etwas für Sie tun?",
        "Comment puis-je vous aider ?",
        "Y a-t-il autre chose ?",
        "¿En qué puedo ayudarle?",
        "¿Algo más?",
        "Come posso aiutarti?",
        "Como posso ajudar?",
        "Чем я могу помочь?",
        "有什么可以帮您的吗？",
        "还有其他问题吗？",
        "何かお手伝いできますか？",
        "무엇을 도와드릴까요?",
        "كيف يمكنني مساعدتك؟",
        "मैं आपकी क्या मदद कर सकता हूँ?",
    ),
    OFFER: (
        "Shall I look it up for you?",
        "Do you want me to check your contract?",
        "Should I search for the date?",
        "Soll ich nachsehen?",
        "Voulez-vous que je vérifie ?",
        "¿Quiere que lo busque?",
        "Посмотреть?",
        "要我查一下吗？",
        "お調べしましょうか？",
        "I can also check the shared folder.",
        "I could look into the tickets for you.",
        "I need your permission to open the file.",
        "Please confirm before I run the query.",
        "This step needs your approval.",
        "Please confirm that I may look into it.",
        "I would need your go-ahead for that.",
        "I am waiting for your approval.",
        "I can look that up.",
        "I can do the same for last year's files.",
        "Confirm and I will open the file.",
        "Approval is required before I can search.",
        "Ich würde jetzt die Datenbank durchsuchen.",
        "Mit Ihrem Einverständnis öffne ich die Datei.",
        "Avec votre accord, j'ouvre le fichier.",
        "Espero su confirmación.",
        "Posso verificarlo.",
        "If you agree, I will search for it.",
        "Veuillez confirmer que je peux regarder.",
        "Confirme que puedo mirarlo.",
        "Podría mirar en el sistema.",
        "Preciso da sua autorização.",
        "Next, I would look into the mailbox.",
        "Ich kann auch im Ordner nachsehen.",
        "Ich brauche Ihre Erlaubnis, um die Datei zu öffnen.",
        "Bitte bestätigen Sie, dass ich die Suche starten soll.",
        "Je peux aussi regarder dans le dossier partagé.",
        "Il me faut votre permission pour ouvrir le fichier.",
        "También puedo mirar en la carpeta.",
        "Necesito su autorización para abrir el documento.",
        "Posso anche guardare nella cartella.",
        "Também posso ver na pasta.",
        "Я могу также посмотреть в папке.",
        "我也可以查一下文件夹。",
        "フォルダも確認できます。",
    ),
    OTHER: (
        "You can also filter by date.",
        "She can also sing.",
        "The staff can look it up for you.",
        "I can see why.",
        "I would choose the first one.",
        "I cannot open it.",
        "Your request was approved.",
        "Bitte bestätigen Sie Ihre Telefonnummer.",
        "Veuillez confirmer votre numéro.",
        "I can help you with orders and invoices.",
        "You could look into the folder, too.",
        "Your manager must approve it.",
        "I looked into the folder and found it.",
        "Please confirm your e-mail address.",
        "You find it in your profile.",
        "Sie können auch nach Datum filtern.",
        "Die Leitung muss zustimmen.",
        "Vous pouvez aussi filtrer par date.",
        "También puede filtrar por fecha.",
        "Puoi anche filtrare per data.",
        "Would you like to hear more about it?",
        "Which one do you mean?",
        "For which year?",
        "Welchen meinst du?",
        "Lequel ?",
        "¿Cuál?",
        "Explain.",
        "Tell me more about it.",
        "Go on.",
        "Continue.",
        "More details, please.",
        "Why is that?",
        "How come?",
        "What else?",
        "Anything else about that?",
        "Who exactly?",
        "And what about the others?",
        "And then?",
        "How much exactly?",
        "Since when?",
        "And when?",
        "Where was that?",
        "Any exceptions?",
        "Erzähl mir mehr darüber.",
        "Und warum?",
        "Und wer noch?",
        "Dis-m'en plus.",
        "Et pourquoi ?",
        "Cuéntame más.",
        "¿Y por qué?",
        "¿Y cuándo?",
        "Dimmi di più.",
        "E quando?",
        "Расскажи подробнее.",
        "А почему?",
        "告诉我更多。",
        "为什么？",
        "もっと詳しく教えて。",
        "أخبرني المزيد",
        "No, thank you.",
        "No thanks, I don't need that.",
        "No, leave it.",
        "Not now, thanks.",
        "Nothing else, thank you.",
        "Nein, danke.",
        "Nein, nicht nötig.",
        "Non merci.",
        "Non, ça ira.",
        "No, gracias.",
        "No, no hace falta.",
        "No, grazie.",
        "Нет, спасибо.",
        "不用了，谢谢。",
        "いいえ、結構です。",
        "لا، شكرا",
        "Yes, please.",
        "Yes, please do that.",
        "Sure, that would be nice.",
        "Go ahead.",
        "That would be great.",
        "I would like that very much.",
        "Please do.",
        "Ja, bitte.",
        "Ja, gerne.",
        "Oui, s'il vous plaît.",
        "Oui, volontiers.",
        "Sí, por favor.",
        "Sì, grazie.",
        "Да, пожалуйста.",
        "好的，请。",
        "はい、お願いします。",
        "نعم من فضلك",
    ),
}
"""Example messages by kind. `ACCEPT` has remarks that accept what was offered, if anything was. `OPEN` has general
offers that end answers, `OFFER` specific ones. `OTHER` has messages that look similar to those of the other kinds,
but are none."""


def resolve_turns(gate: Gate, requests: Sequence[Request], sources: Sources) -> list[Request | Exception]:
    """Return each request with the earlier turns that it refers to moved from its history to its question.

    If the encoder fails, its error is returned in place of each request whose history has a turn by someone other
    than the user.

    Args:
        gate: A gate that reads turns. Retries ("Try again"), remarks ("Thanks") and general offers of help are only
            detected if this gate uses the encoder.
        requests: The requests.
        sources: The sources of evidence, which include the encoder.
    """
    joined = [join_user_turns(_read_transcript(request)) for request in requests]
    messages = list(chain.from_iterable(map(_messages, joined))) if encoder_passes(gate.specs) else []
    try:
        kinds = _classify(messages, sources)
    except Exception as error:  # the encoder or its loading may fail
        return [error if request.history else request for request in joined]
    return [_resolve(request, kinds) for request in joined]


def _read_transcript(request: Request) -> Request:
    """Return a request with a pasted transcript split into its last message and, as history, the turns before it.

    JSON and markup are unfolded first, and a label such as ``User:`` before a single line is left out. Without a
    transcript, or with a history of its own, nothing else changes.
    """
    unfolded = unfold(request.question)
    turns = None if request.history else split_transcript(unfolded)
    if turns is None:
        question = drop_label(unfolded)
        return request if question == request.question else replace(request, question=question)
    question, history = turns
    return replace(request, question=question, history=history)


def join_user_turns(request: Request) -> Request:
    r"""Return a request joined with the user's turns right before it, or unchanged if there are none.

    >>> join_user_turns(Request("Thanks!", ["assistant: Hi!", "user: When is it due?"])).question
    'When is it due?\nThanks!'
    """
    if not request.history or not request.history[-1].startswith(USER):
        return request
    turns, before = next(user_turns(request.history))
    return replace(request, question=f"{turns}\n{request.question}", history=before)


def _resolve(request: Request, kinds: Mapping[str, str]) -> Request:
    """Return a request joined with the earlier question that it refers to.

    A mere remark loses its history, and a reply to a general offer loses the offer. Any other request is returned
    unchanged.
    """
    kind = kinds.get(request.question, OTHER)
    # A retry repeats the latest question that is not itself a retry or remark, however far back it is.
    if kind == RETRY:
        for turns, before in user_turns(request.history):
            if kinds.get(turns, OTHER) in (OFFER, OTHER):
                return replace(request, question=f"{turns}\n{request.question}", history=before)
    question = question_before(request.history)
    if not question and any(map(str.isdigit, request.question)) and count_words(request.question) <= _SHORT:
        question = question_before(request.history, before_any=True)
        if kinds.get(question) == OPEN:
            return request
    is_open = kinds.get(question) == OPEN
    waits = is_question(question)
    if kind == ACCEPT:
        closing = _closing_sentence(request.history)
        question = question or (closing if kinds.get(closing) == OFFER else "")
        waits = bool(question)
    # Thanks and edits are complete by themselves, unless they answer a question ("Shall I translate it?").
    if kind in (REMARK, ACCEPT) and (is_open or not waits):
        return replace(request, history=())
    if not question or (is_question(request.question) and count_words(request.question) > _SHORT):
        return request
    # Move the question from the end of the assistant's turn to the front of the user's reply; drop a general
    # offer.
    *before, last = request.history
    rest = last.replace(question, "").strip()
    if rest != ASSISTANT.strip():
        before.append(rest)
    text = request.question if is_open else f"{question.strip('*_')}\n{request.question}"
    return replace(request, question=text, history=before)


def _closing_sentence(history: Sequence[str]) -> str:
    """Return the last sentence of the last turn, if that turn is the assistant's and has words; empty otherwise."""
    if not history or not history[-1].startswith(ASSISTANT):
        return ""
    return next(reversed(segments(history[-1].removeprefix(ASSISTANT)[-_MAX_CLOSING_CHARS:])), "")


def _messages(request: Request) -> Iterable[str]:
    """Yield the texts for `_classify`: the last question and sentence of the assistant's turn, and short messages.

    Without earlier turns, there are none.
    """
    if question := question_before(request.history, before_any=True):
        yield question
    if count_words(request.question) <= _SHORT and (closing := _closing_sentence(request.history)):
        yield closing
    messages = [request.question] if request.history else []
    messages += [turns for turns, _ in islice(user_turns(request.history), _MAX_TURNS - 1)]
    for message in messages:
        if message and count_words(message) <= _MAX_WORDS:
            yield message


def _classify(messages: Iterable[str], sources: Sources) -> dict[str, str]:
    """Map each message that is similar to one of the `_EXAMPLES` to its kind; other messages are left out."""
    distinct = sorted(set(messages))
    if not distinct:
        return {}
    encoder = require_states(sources.proxy(ENCODER))
    kinds = [kind for kind, examples in _EXAMPLES.items() for _ in examples]
    texts = [example for examples in _EXAMPLES.values() for example in examples]
    # The examples are read once per engine.
    known = Context([], sources).memory(
        resolve_turns, lambda: to_directions(read_text_states(texts, encoder))
    )
    likeness = to_directions(read_text_states(distinct, encoder)) @ known.T
    nearest = zip(
        distinct, [kinds[best] for best in likeness.argmax(axis=1)], likeness.max(axis=1), strict=True
    )
    return {
        text: kind
        for text, kind, cosine in nearest
        if cosine >= (_MIN_OFFER_COSINE if kind == OFFER else _MIN_COSINE)
    }
