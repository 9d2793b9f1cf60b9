"""Separates an LLM's thoughts from its answer, and recognises replies that do not answer."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

_OPENING = re.compile(
    r"\s*(?:<\|start\|>assistant)?(?:<(?:seed:)?think(?:ing)?>|<thought>|<reasoning>|\[THINK\]|◁think▷|<\|START_THINKING\|>"
    r"|<\|channel\|>(?:analysis|commentary)[^<]{0,99}<\|message\|>|<\|channel>thought|(?-i:analysis(?=[A-Z])))",
    re.IGNORECASE,
)
_FINAL = (
    r"◁/think▷|<\|END_THINKING\|>(?:<\|START_RESPONSE\|>)?"
    r"|(?:<\|end\|>)?(?:<\|start\|>assistant)?<\|channel\|>final[^<]{0,99}<\|message\|>"
)
_CLOSING = re.compile(
    rf"</(?:seed:)?think(?:ing)?>|</thought>|</reasoning>|\[/THINK\]|<channel\|>|assistantfinal|{_FINAL}",
    re.IGNORECASE,
)
# If the prompt has opened the tag, the reply has only the closing one. A tag in quotes is part of an answer.
_CLOSING_ALONE = re.compile(rf"(?<![`'\"])</think>|{_FINAL}", re.IGNORECASE)
_TURN_END = re.compile(r"(?:<\|(?:return|end|END_RESPONSE)\|>)+\s*\Z")

THINKING_OFF = "thinking off"
"""Added to an LLM's name, in a measured ability or a tuned gate, if the LLM's thinking was turned off for it."""

_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_THOUGHT_TYPES = frozenset(("reasoning", "thinking", "redacted_thinking", "reasoning_content", "thought"))
# Providers have different words for an answer that was cut off at its maximum length.
_CUT = frozenset(("length", "max_tokens", "max_output_tokens", "incomplete", "model_length"))

# What may come before "I don't know".
_LEAD_IN = (
    r"(?:(?:(?:i am|i'm) (?:very |so |really )?sorry|sorry|i apologi[sz]e|(?:my )?apologies|for (?:any|the) confusion"
    r"|unfortunately|i'm afraid|i am afraid|honestly|to be honest|actually|hmm+|well|oh|(?:good|great) question"
    r"|based on my knowledge|as of my [\w ]{1,30}|(?:es )?tut mir (?:sehr )?leid|entschuldigung|verzeihung|leider"
    r"|lo (?:siento|lamento)(?: mucho)?|lamentablemente|desafortunadamente|perdón|disculp[ae]"
    r"|(?:je suis )?(?:vraiment )?désolée?|malheureusement|excusez-moi|mi (?:di)?spiace|spiacente|purtroppo"
    r"|sfortunatamente|scus[ai]|desculp[ae]|(?:sinto|lamento)(?: muito)?|infelizmente|peço desculpas?"
    r"|het spijt me|helaas|przykro mi|niestety|przepraszam|к сожалению|извините|простите|прошу прощения|мне жаль"
    r"|üzgünüm|maalesef|ne yazık ki|özür dilerim|kusura bakmayın|很?(?:抱歉|遗憾)|对不起|不好意思"
    r"|(?:申し訳(?:あり|ござい)|すみ)ませんが?|残念ながら|あいにく|죄송(?:하지만|합니다만?)|안타깝게도|아쉽게도"
    r"|(?:أنا )?آسف|عذر\W?ا\W?|للأسف|مع الأسف|أعتذر|المعذرة|(?:मुझे )?खेद है|दुर्भाग्य(?:वश| से)"
    r"|(?:क्षमा|माफ़?) (?:करें|कीजिए)"
    # "As a language model, …"
    r"|(?:como (?:modelo|ia)|en tant qu|in quanto (?:ia|modello)|jako (?:model|ai)|как (?:языковая|ии)|作为|بصفتي)"
    r"[^.,،，;:!?]{0,40}[,،，])"
    r"\W*(?:(?:but|that|mais|pero|aber|ma|mas|maar|ale|но|ancak|ama|लेकिन|و?لكن(?:ني)?)\b[, ]*|但是?)?){0,3}"
)
# Of these languages, only what an LLM says of itself: "I have no information", "I cannot answer", "I do not know".
# A few words, but no comma, may come first: "Zu Ihrem Vertrag habe ich keine Informationen."
_TOPIC = r"[^.,;:!?。、！？，；：،؛।\"'«»„“”「『\n]{0,60}?"
_SPACED = (
    # German
    r"(?:(?:ich (?:habe|finde|kann|konnte|verfüge)|(?:habe|finde|kann|konnte|verfüge) ich|(?:es|mir) liegen"
    r"|liegen mir)(?: \w+){0,4}? kein\w*(?: (?!falsch)\w+)??"
    r" (?:information|angabe|daten|zugriff|zugang|auskunft|kenntnis|unterlagen)"
    # What the assistant has done is an answer: "keine Daten geändert".
    r"(?!\w*(?: \w+){0,3}? (?:ge(?!funden)\w+t|ver\w+t|ausgelassen|beigefügt|löschen|weiter))"
    r"|(?:ich kann|kann ich)(?: \w+){0,4}? nichts?(?: \w+)?? (?:beantworten|sagen|helfen|zugreifen|finden)"
    r"|(?:ich weiß|weiß ich)(?: \w+){0,2}? nicht\b|(?:ist mir|mir ist)(?: \w+)?? (?:nicht bekannt|nicht möglich)"
    # Spanish
    r"|no (?:tengo|dispongo|cuento|poseo|encuentro|encontré|he encontrado|(?:puedo|pude|he podido) encontrar)"
    r"(?: \w+){0,3}? (?:información|datos?|acceso|conocimiento|respuesta)"
    r"|no (?:puedo|soy capaz de|me es posible)(?: \w+)?? (?:responder|decir|ayudar|acceder|confirmar)|desconozco\b"
    r"|no hay información (?:disponible|sobre)|não há informações (?:disponíveis|sobre)"
    # French
    r"|je n(?:e |')\w+(?: \w+)?? (?:pas|d'aucune|aucune)(?: \w+){0,2}? (?:[dl]')?"
    r"(?:information|données|accès|connaissance|réponse)"
    r"|je ne (?:peux|suis|saurais) (?:(?!mais|que)\w+ ){0,6}?(?:répondre|dire|aider|accéder)"
    r"|il n'y a (?:pas d'|aucune )information"
    # Italian
    r"|non (?:ho|dispongo|possiedo|trovo|conosco|riesco)(?: \w+){0,3}?"
    r" (?:informazion|dati\b|accesso|conoscenza|la risposta|possibilità di accedere)"
    r"|non sono (?:in grado di (?:rispond|dire|forni|aiuta|acced|conferma)|a conoscenza)"
    r"|non (?:posso|riesco a)(?: \w+)?? (?:rispond|dire|aiutar|accedere)"
    # Portuguese
    r"|não (?:tenho|disponho|possuo|encontrei|encontro|consigo)(?: \w+){0,3}?"
    r" (?:informaç|dados|acesso|conhecimento|resposta)"
    r"|não (?:posso|consigo|sou capaz de|estou em condições de)(?: \w+)?? (?:responder|dizer|ajud|acessar|aceder)"
    # Dutch
    r"|(?:ik (?:heb|kan|vind|beschik)|(?:heb|kan|vind|beschik) ik)(?: \w+){0,3}? (?:geen|niet over)(?: \w+)??"
    r" (?:informatie|gegevens|toegang|antwoord|idee)\b(?! (?:ge(?!vonden)|ver)\w+)"
    r"|(?:ik kan|kan ik)(?: \w+){0,3}? niets?(?: \w+)?? (?:beantwoorden|zeggen|helpen|vinden)"
    r"|(?:ik weet|weet ik)(?: \w+)?? niet\b|ik ben niet op de hoogte"
    # Polish
    r"|nie (?:mam|posiadam|dysponuję|znalazł[ae]m|znam|mogę znaleźć)(?: \w+){0,3}?"
    r" (?:informacj|dostępu|dany(?:ch|mi)|wiedzy|odpowiedzi|pojęcia)"
    r"|nie (?:mogę|jestem w stanie|potrafię)(?: \w+){0,2}? (?:odpowiedzieć|powiedzieć|pomóc|znaleźć)"
    # Russian
    r"|у меня нет(?: \w+){0,2}? (?:информаци|доступа|данных|сведений)"
    r"|(?:не (?:имею|располагаю|обладаю)|я не наш(?:[её]л|ла)|мне не удалось найти)(?: \w+){0,2}?"
    r" (?:информаци|доступ|данны|сведени)"
    r"|не могу(?: (?!не\b)\w+){0,2}? (?:ответить|сказать|помочь|найти)|мне (?:ничего )?не ?известно"
    r"|понятия не имею"
    # Turkish, whose verbs come last
    r"|(?:(?:bilgim|erişimim|fikrim) yok|sahip değilim|bilgi (?:bulamadım|bulunamadı)|(?:cevap|yanıt) veremiyorum"
    r"|(?:cevap|yanıt)layam(?:am|ıyorum)|erişemiyorum|yardımcı olam(?:am|ıyorum)|bilmiyorum)(?=\W*$|[.,;!])"
    # Arabic
    r"|(?:ليس|ليست|لا (?:تتوفر|يتوفر|توجد)) لدي(?: \w+)?? (?:ال)?(?:معلومات|بيانات|علم|إمكانية)"
    r"|لا أملك(?: \w+)?? (?:معلومات|بيانات)|لم (?:أجد|أتمكن من العثور على)(?: \w+)?? معلومات"
    r"|لا (?:يمكنني|أستطيع) (?:الوصول|الإجابة|مساعدت|الجزم|تقديم)|لا (?:أعرف|أعلم)\b"
    # Hindi, where `\w` does not match the signs of vowels
    r"|मेरे [^।,.]{0,60}?(?:जानकारी|पहुँच|पहुंच|डेटा|आंकड़े|उत्तर)(?: \S+)?? नहीं"
    r"|मुझे [^।,.]{0,60}?(?:(?:जानकारी|पता) नहीं|नहीं (?:पता|मालूम))"
    r"|मैं [^।,.]{0,60}?नहीं (?:(?:कह|दे|बता|कर|पहुँच|पहुंच) सक|जानत))"
)
_UNSPACED = (
    # Chinese
    r"(?:(?<!自)我(?!国|们|的?建议)[^。，！？]{0,8}?(?:没有|找不到|查不到)[^。，！？]{0,25}?(?:信息|资料|数据|记录)"
    r"|(?<!自)我(?!国|们|的?建议)[^。，！？]{0,8}?(?:无法|不能)[^。，！？]{0,4}?(?:回答|访问|查看|获取|提供|确定|帮)"
    r"|(?<!自)我(?!们)[^。，！？]{0,4}?不太?(?:知道|清楚|了解)"
    # Japanese: humble forms, or "information" before the verb
    r"|(?:[分わ]かり|存じ(?:上げ)?)ません(?!という)|[分わ]かりかね"
    r"|(?:情報|データ)(?![^。]{0,12}(?:必要|問題|では|ことはあり|心配|影響|違い|誤り|上限|正しく|%))[^。、]{0,12}?(?:(?:あり|ござい|持ってい|持っており|見つかり)ません"
    r"|持ち合わせて(?:い|おり)ません|(?:アクセス|確認)(?:することは)?できません)"
    r"|私[はに][^。]{0,40}?できません|確かなことは言えません)"
)
# What counts only at the beginning, because after other words it may be said of someone else.
_WITHOUT_TOPIC = (
    r"(?:keine ahnung|je ne sais pas|aucune idée|no (?:lo )?sé\b|ni idea|non (?:lo )?so\b|(?:eu )?não sei|geen idee\b"
    r"|nie wiem\b|(?:я )?не знаю|不太?(?:知道|清楚)(?=[。，！]|$)|(?:无法|不能)(?:回答|(?:访问|提供)[该此这任])"
    r"|(?:目前)?没有(?:找到)?(?:关于|相关)[^，。！？]{0,25}?(?:信息|资料|数据|记录)(?=[。，]|$)"
    r"|ich bin mir nicht sicher|no estoy segur|je ne suis pas sûr|non sono sicur|não tenho certeza|nie jestem pew"
    r"|(?:я )?не уверен|我?不确定(?!性)|emin değilim|لست متأكد|मुझे यकीन नहीं"
    r"|aucune information (?:n'est )?(?:disponible|trouvée)|brak informacji na (?:ten )?temat"
    r"|нет информации об?\b(?![^.]*\?)"
    r"|[^。「！？!?\n]{0,60}?お(?:答え|手伝い)(?:でき(?:ません|かね|ない)|しかね)"
    # No word before the Korean verb is a subject, which would be someone else.
    r"|(?:저는 |[^\s.,]*[^\s.,은는도] |[^\s.,]+에(?: 대해서)?는 ){0,6}?(?:(?:정보|데이터|자료)\S*(?: \S+)??"
    r" (?:찾을 수 없|찾지 못|접근할 수 없|(?:가지고|보유하고) 있지 않)|\S+에 대한 (?:정보|자료)\S* 없습니다"
    r"|(?:답|도와)\S* 수 없|저는 [^.]{0,40}수 없|모르겠[습어네]|모릅니다|알지 못합니다|알 수 없습니다))"
)
_REFUSAL = re.compile(
    rf"\W*{_LEAD_IN}(?:as an ai\b|i (?:have no|lack(?: the| any)?) (?:idea|clue|information|knowledge|record)"
    r"|no (?:idea|clue)(?=[^\w\s]|\s*$| (?:wh|how|about|sorry))|beats me\b|i'm (?:unable|not able)\b"
    r"|i(?: would|'d) (?:have|need) to (?:look|search)|(?:that is|that's|it is|it's) (?:unknown to me|beyond my)"
    r"|unable to (?:answer|determine)|there is no information (?:about|available|on)|unknown\W*$"
    r"|(?:(?:i am|i'm) )?(?:really )?not (?:really |entirely |completely |quite )?(?:sure|certain|aware|familiar)\b"
    r"|i (?:really |honestly )?(?:do not|don't|cannot|can't|can not|could not|couldn't|am unable|am not able|won't)"
    r"(?= ?(?:know|have (?:any |access|enough|information|that|the|specific)|help|assist|answer|provide|find|comply"
    r"|share|determine|identify|confirm|recall|remember|verify|access|tell you|say|be (?:sure|certain)|to |[.,!]|$))"
    rf"|{_WITHOUT_TOPIC}|{_TOPIC}(?:(?<!\w){_SPACED}|{_UNSPACED}))"
)
_TOOL_CALL = re.compile(
    r"(?:<\|?(?:tool|function)[_▁ ]?calls?|\[TOOL_CALLS\]|<\|python_tag\|>|<｜tool▁calls?▁begin｜>"
    r"|<\|channel\|>commentary to="
    r'|(?:```\w*)?\s*(?:\[\s*)?\{\s*"(?:tool_calls?"|function(?:_call)?"'
    r'|name"\s*:\s*"[^"]{0,99}"\s*,\s*"(?:arguments|parameters)")\s*:)',
    re.IGNORECASE,
)
_READ = 300  # characters, which are enough to recognise a refusal


class Reply(NamedTuple):
    """An LLM's reply.

    Attributes:
        thoughts: The text of its thoughts. None if it has none: empty tags before an answer do not count. Empty if
            the API hides their text, or if the whole reply is empty tags.
        answer: The rest of the reply; empty if the reply ends while the LLM is still thinking.
    """

    thoughts: str | None
    answer: str


def split_thoughts(text: str) -> Reply:
    """Separate thoughts from the answer at tags such as ``<think>`` and those of OpenAI's harmony format.

    >>> split_thoughts("<think>Easy.</think> Paris")
    Reply(thoughts='Easy.', answer=' Paris')
    >>> split_thoughts("<think>The capital")
    Reply(thoughts='The capital', answer='')
    """
    thoughts: list[str] = []
    end = 0
    opening = _OPENING.match(text)
    if opening is None:
        closing = _CLOSING_ALONE.search(text)
        if closing is None:
            return Reply(None, text)
        thoughts.append(text[: closing.start()])
        end = closing.end()
        opening = _OPENING.match(text, end)
    # An LLM may think several times before it answers, so an opening tag may directly follow a closing one.
    while opening is not None:
        start = opening.end()
        closing = _CLOSING.search(text, start)
        if closing is None:
            thoughts.append(text[start:])
            end = len(text)
            break
        thoughts.append(text[start : closing.start()])
        end = closing.end()
        opening = _OPENING.match(text, end)
    thought = "".join(thoughts).strip()
    return Reply(thought or (None if end < len(text) else ""), _TURN_END.sub("", text[end:]))


def read_reply(message: Any) -> Reply:
    """Return the thoughts and the answer in a message or in a chunk of one.

    The message is a server's JSON or a framework's object. Its thoughts are in a field (``reasoning_content``,
    ``reasoning``, ``thinking``), or in a block of the content (OpenAI's Responses, Anthropic, Gemini, LangChain,
    LlamaIndex). For thoughts in the text itself, use `split_thoughts`.
    """
    content = get_field(message, "content") or get_field(message, "text")
    blocks = get_field(message, "blocks") or content
    thoughts: list[str] = []
    answers: list[str] = []
    for holder in (message, get_field(message, "additional_kwargs")):
        value = next(filter(None, (get_field(holder, name) for name in _THOUGHT_FIELDS)), None)
        if value:
            thoughts.append("".join(_texts(value)))
    for block in [blocks] if isinstance(blocks, str) else blocks or ():
        kind = get_field(block, "type") or get_field(block, "block_type")
        if kind in _THOUGHT_TYPES or get_field(block, "thought") is True:
            thoughts.append("".join(_texts(block)))
        else:
            text = block if isinstance(block, str) else get_field(block, "text")
            answers.append(text if isinstance(text, str) else "")
    return Reply("".join(thoughts) if thoughts else None, "".join(answers))


def _texts(value: Any) -> Iterable[str]:
    """Yield the texts in a block of thoughts, which may be nested in fields such as ``summary`` and ``content``."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)
    else:
        for name in ("text", "summary", *_THOUGHT_FIELDS, "content"):
            yield from _texts(get_field(value, name) or ())


def get_field(thing: Any, name: str) -> Any:
    """Return a mapping's value or an object's attribute of this name; None if there is none."""
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def count_thinking(usage: Any) -> int:
    """Return an API's count of thinking tokens, from the usage of OpenAI, SGLang or LangChain; 0 if it has none."""
    counts = (
        get_field(usage, "reasoning_tokens"),
        get_field(get_field(usage, "output_token_details"), "reasoning"),
        get_field(get_field(usage, "completion_tokens_details"), "reasoning_tokens"),
        get_field(get_field(usage, "output_tokens_details"), "reasoning_tokens"),
    )
    return max([count for count in counts if isinstance(count, int)], default=0)


def is_truncated(reason: object) -> bool:
    """Return whether a finish reason means that an answer was cut off at its maximum length."""
    return str(reason).rpartition(".")[2].lower() in _CUT


def describe_non_answer(text: str) -> str:
    """Return ``"nothing"``, ``"a tool call"`` or ``"a refusal"`` for texts that are not answers; empty for an answer.

    Refusals are recognised in English; in 14 other languages, only the commonest.

    >>> describe_non_answer("I'm sorry, but I cannot help with that.")
    'a refusal'
    >>> describe_non_answer("I can't wait to see Rome.")
    ''
    """
    if not text.strip():
        return "nothing"
    if _TOOL_CALL.match(text.lstrip()):
        return "a tool call"
    # A refusal is clear from its first words. Matching only at the start avoids matches inside an answer.
    return "a refusal" if _REFUSAL.match(text[:_READ].lower().replace("’", "'")) else ""


def find_answer_start(tokens: Sequence[str], answer: str) -> int:
    """Return the index of the token in which the last occurrence of an answer begins.

    It is ``len(tokens)`` if the answer is empty or does not occur, or if a token is not a string.
    """
    if not answer or not all(isinstance(token, str) for token in tokens):
        return len(tokens)
    start = "".join(tokens).rfind(answer)
    if start < 0:
        return len(tokens)
    return bisect_right(list(accumulate(map(len, tokens))), start)
