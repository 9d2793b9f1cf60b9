"""Servers of providers, as LangChain's chat models speak to them: whole answers and streamed, thinking and not."""

import json

from tests.fake_server import Fake
from tests.test_thinking_servers import say

THOUGHT = "Let me see what I know of that name . "
THINKING = 120
MODEL = {"model": "m"}


class Provider:
    """What a provider's server answers: how it is asked for a length, and what its answers look like.

    Attributes:
        thinks: How many tokens its LLM thinks.
        say: Called with a request's body as text, returns the answer.
    """

    package = "langchain_openai"
    settings: dict = {}  # noqa: RUF012

    def __init__(self, thinks=THINKING, say=say):
        self.thinks = thinks
        self.say = say

    def __call__(self, body):
        limit = self.limit(body)
        answer = self.say(json.dumps(body, ensure_ascii=False))
        written = answer.split()[: max((limit or 9_999) - self.thinks, 0)]
        is_cut = len(written) < len(answer.split())
        thought = THOUGHT if self.thinks else ""
        reply = self.reply(thought, " ".join(written), is_cut, self.thinks + len(written))
        is_streamed = body.get("stream") or "stream" in Fake.seen[-1][0]
        return self.stream(reply) if is_streamed and isinstance(reply, dict) else reply

    def events(self, reply):
        """Yield the events of a reply that is streamed."""
        yield reply

    def stream(self, reply):
        lines = []
        for event in self.events(reply):
            name = f"event: {event['type']}\n" if "type" in event else ""
            lines.append(f"{name}data: {json.dumps(event)}\n\n")
        return 200, "".join(lines), ("Content-Type", "text/event-stream")

    def settings_for(self, url):
        return {"base_url": f"{url}/v1", "max_retries": 0, **self.settings}


class Chat(Provider):
    name = "openai:gpt-5"

    def limit(self, body):
        return body.get("max_completion_tokens")

    def reply(self, thought, answer, is_cut, tokens):
        message = {"role": "assistant", "content": answer}
        reason = "length" if is_cut else "stop"
        details = {"reasoning_tokens": self.thinks}
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        usage["completion_tokens_details"] = details
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            **MODEL,
            "choices": [choice],
            "usage": usage,
        }

    def events(self, reply):
        """Thoughts are hidden: the first chunk has no text, and they are counted in the last."""
        (choice,) = reply["choices"]
        shared = {"id": "x", "object": "chat.completion.chunk", "created": 0, **MODEL}
        role = {"role": "assistant", "content": ""}
        for delta in (role, {"content": choice["message"]["content"]}):
            yield {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**shared, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
        yield {**shared, "choices": [], "usage": reply["usage"]}


class Tags(Chat):
    """A served model that is asked as OpenAI's, with its thoughts in the text."""

    def reply(self, thought, answer, is_cut, tokens):
        text = f"<think>{thought}{'</think>' * bool(answer)}{answer}" if thought else answer
        reply = super().reply(thought, text, is_cut, tokens)
        del reply["usage"]["completion_tokens_details"]
        return reply


class Uncounted(Chat):
    """A served model that is asked as OpenAI's: LangChain hides its ``reasoning_content`` and does not count it."""

    def reply(self, thought, answer, is_cut, tokens):
        reply = super().reply(thought, answer, is_cut, tokens)
        reply["choices"][0]["message"]["reasoning_content"] = thought
        del reply["usage"]["completion_tokens_details"]
        return reply


class Responses(Provider):
    name = "openai:gpt-5"
    settings = {"use_responses_api": True}  # noqa: RUF012

    def limit(self, body):
        return body.get("max_output_tokens")

    def reply(self, thought, answer, is_cut, tokens):
        output = []
        if thought:
            summary = [{"type": "summary_text", "text": thought}]
            output.append({"type": "reasoning", "id": "rs", "summary": summary})
        if answer:
            text = {"type": "output_text", "text": answer, "annotations": []}
            output.append(
                {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
            )
        usage = {"input_tokens": 7, "output_tokens": tokens, "total_tokens": 7 + tokens}
        usage["input_tokens_details"] = {"cached_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": self.thinks}
        ended = {"status": "completed", "incomplete_details": None}
        if is_cut:
            ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        fixed = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}
        return {
            "id": "r",
            "object": "response",
            "created_at": 0,
            **MODEL,
            **fixed,
            **ended,
            "output": output,
            "usage": usage,
        }

    def events(self, reply):
        yield {"type": "response.created", "response": {**reply, "status": "in_progress", "output": []}}
        for index, item in enumerate(reply["output"]):
            at = {"item_id": item["id"], "output_index": index}
            parts = item.get("summary") or item["content"]
            started = {**item, "summary": []} if "summary" in item else {**item, "content": []}
            yield {"type": "response.output_item.added", "output_index": index, "item": started}
            if "summary" in item:
                delta = {"summary_index": 0, "delta": parts[0]["text"]}
                part = {"summary_index": 0, "part": {"type": "summary_text", "text": ""}}
                yield {"type": "response.reasoning_summary_part.added", **at, **part}
                yield {"type": "response.reasoning_summary_text.delta", **at, **delta}
            else:
                delta = {"content_index": 0, "delta": parts[0]["text"], "logprobs": []}
                yield {"type": "response.output_text.delta", **at, **delta}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{reply['status']}", "response": reply}

    def stream(self, reply):
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(self.events(reply))]
        lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in numbered]
        return 200, "".join(lines), ("Content-Type", "text/event-stream")


class Anthropic(Provider):
    name, package = "anthropic:claude-opus-4-5", "langchain_anthropic"

    def limit(self, body):
        return body["max_tokens"]

    def reply(self, thought, answer, is_cut, tokens):
        content = [{"type": "thinking", "thinking": thought, "signature": "s"}] if thought else []
        if answer:
            content.append({"type": "text", "text": answer})
        reason = {"stop_reason": "max_tokens" if is_cut else "end_turn", "stop_sequence": None}
        usage = {"input_tokens": 7, "output_tokens": tokens}
        return {
            "id": "x",
            "type": "message",
            "role": "assistant",
            **MODEL,
            "content": content,
            **reason,
            "usage": usage,
        }

    def events(self, reply):
        yield {"type": "message_start", "message": {**reply, "content": [], "stop_reason": None}}
        for index, block in enumerate(reply["content"]):
            kind = block["type"]
            (name,) = {"text", "thinking"} & block.keys()
            start = {**block, name: ""}
            yield {"type": "content_block_start", "index": index, "content_block": start}
            delta = {"type": f"{kind}_delta", name: block[name]}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        end = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
        yield {"type": "message_delta", "delta": end, "usage": reply["usage"]}
        yield {"type": "message_stop"}

    def settings_for(self, url):
        return {"base_url": url, "max_retries": 0}


class Gemini(Provider):
    name, package = "google_genai:gemini-3-pro", "langchain_google_genai"

    def limit(self, body):
        assert "logprobs" not in body["generationConfig"], "it is only valid with responseLogprobs"
        return body["generationConfig"].get("maxOutputTokens")

    def reply(self, thought, answer, is_cut, tokens):
        parts = [{"text": thought, "thought": True}] if thought else []
        parts += [{"text": answer}] if answer else []
        candidate = {"content": {"role": "model", "parts": parts}, "index": 0}
        candidate["finishReason"] = "MAX_TOKENS" if is_cut else "STOP"
        usage = {
            "promptTokenCount": 7,
            "candidatesTokenCount": tokens - self.thinks,
            "totalTokenCount": 7 + tokens,
        }
        if self.thinks:
            usage["thoughtsTokenCount"] = self.thinks
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m"}

    def settings_for(self, url):
        return {"base_url": url, "max_retries": 1, "include_thoughts": True}

    def events(self, reply):
        (candidate,) = reply["candidates"]
        for part in candidate["content"]["parts"]:
            yield {**reply, "candidates": [{**candidate, "content": {"role": "model", "parts": [part]}}]}


class Ollama(Provider):
    name, package = "ollama:qwen3", "langchain_ollama"

    def limit(self, body):
        return body["options"].get("num_predict")

    def reply(self, thought, answer, is_cut, tokens):
        shared = {**MODEL, "created_at": "2026-01-01T00:00:00Z"}
        thinking = {"message": {"role": "assistant", "content": "", "thinking": thought}, "done": False}
        end = {"done": True, "done_reason": "length" if is_cut else "stop", "prompt_eval_count": 7}
        last = {"message": {"role": "assistant", "content": answer}, "eval_count": tokens, **end}
        lines = [thinking, last] if thought else [last]
        return 200, "".join(f"{json.dumps({**shared, **line})}\n" for line in lines)

    def settings_for(self, url):
        return {"base_url": url, "reasoning": True}
