"""A llama.cpp server on loopback (`pip install xllamacpp`), and a LangChain chat model that streams from it.

The server uses the quantised model file as it is. Any other OpenAI-compatible server would do in its place.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import Field, PrivateAttr

from rgate_integrations.models.download import download_gguf

SERVE = """
import sys, xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_parallel, options.n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options.port, options.use_jinja, options.endpoint_slots = 0, True, True
options.slot_save_path, options.cache_ram_mib = sys.argv[4], 0
if int(sys.argv[5]):
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = int(sys.argv[5])
server = xllamacpp.Server(options)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def gguf(name: str) -> Path:
    """Return the quantised file of a model of the catalogue; `rgate download` keeps it converted."""
    return download_gguf(name)


@contextlib.contextmanager
def serving(model: Path, *, slots: int = 4, context: int = 8192, threads: int = 0) -> Iterator[str]:
    """Run a server; gives its URL.

    Args:
        model: The model file.
        slots: How many requests it works on at a time.
        context: Tokens of context, shared by all slots.
        threads: How many threads compute; 0 for as many as there are cores.
    """
    slot_folder = f"{tempfile.gettempdir()}/"  # nothing is saved, but without a folder no slot can be erased
    command = [sys.executable, "-c", SERVE, str(model), str(slots), str(context), slot_folder, str(threads)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        url = process.stdout.readline().strip() if process.stdout else ""
        if not url.startswith("http"):
            raise RuntimeError("The llama.cpp server did not start.")
        yield url
    finally:
        process.kill()
        process.wait()


class ServedChat(BaseChatModel):
    """A model on a llama.cpp server. It streams, and tells log-probabilities if it is asked for them.

    Attributes:
        url: The server's URL.
        tokens: Maximum number of tokens of an answer.
        logprobs: Whether to ask for log-probabilities always.
        calls: What the server counted for each call: ``prompt`` and ``written`` tokens so far, and whether it is
            ``whole``.
    """

    url: str
    tokens: int = 64
    logprobs: bool | None = None
    calls: list[dict[str, Any]] = Field(default_factory=list)
    _client: Any = PrivateAttr(default=None)

    @property
    def _llm_type(self) -> str:
        return "llama.cpp"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        if self._client is None:
            # The server closes a kept connection when it likes, perhaps just when it is used again.
            self._client = httpx.Client(timeout=600, headers={"Connection": "close"})
        call = self._start_call()
        with self._client.stream(
            "POST", self._address(), json=self._build_body(messages, kwargs)
        ) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                yield from _chunk(line, call)

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._start_call()
        body = self._build_body(messages, kwargs)
        async with (
            httpx.AsyncClient(timeout=600) as client,
            client.stream("POST", self._address(), json=body) as response,
        ):
            response.raise_for_status()
            async for line in response.aiter_lines():
                for chunk in _chunk(line, call):
                    yield chunk

    def _start_call(self) -> dict[str, Any]:
        call: dict[str, Any] = {"prompt": 0, "written": 0, "whole": False}
        self.calls.append(call)
        return call

    def _address(self) -> str:
        return f"{self.url}/v1/chat/completions"

    def _build_body(self, messages: list[BaseMessage], options: dict[str, Any]) -> dict[str, Any]:
        body = {
            "messages": convert_to_openai_messages(messages),
            "stream": True,
            "temperature": 0,
            "max_tokens": options.get("max_tokens", self.tokens),
            "timings_per_token": True,
        }
        if options.get("logprobs", self.logprobs):
            body["logprobs"] = True
        return body


def _chunk(line: str, call: dict[str, Any]) -> Iterator[ChatGenerationChunk]:
    """Read one line of a server's stream, and note what it counted."""
    if not line.startswith("data: {"):
        return
    data = json.loads(line.removeprefix("data: "))
    timings = data.get("timings")
    usage = None
    if timings:
        if not call["prompt"]:  # said once, with the first token: LangChain adds up what the chunks say
            prompt_tokens = timings["prompt_n"] + timings.get("cache_n", 0)
            usage = {"input_tokens": prompt_tokens, "output_tokens": 0, "total_tokens": prompt_tokens}
        call["prompt"] = timings["prompt_n"] + timings.get("cache_n", 0)
        call["written"] = timings["predicted_n"]
    for choice in data.get("choices", []):
        information = {}
        if choice.get("logprobs"):
            information["logprobs"] = choice["logprobs"]
        if choice.get("finish_reason"):
            information["finish_reason"] = choice["finish_reason"]
            call["whole"] = True
        text = choice["delta"].get("content") or ""
        yield ChatGenerationChunk(
            message=AIMessageChunk(text, usage_metadata=usage), generation_info=information or None
        )
