"""A llama.cpp server on loopback (`pip install xllamacpp`), and a LangChain chat model that streams from it.

The server reads the quantised model file directly. Any other OpenAI-compatible server works too.
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

from rgate_integrations.models.catalog import entry
from rgate_integrations.models.download import cache_dir
from rgate_integrations.models.sources import fetch_files

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
    """Return the path of a catalogue model's quantised file, downloading it if it is missing."""
    path = cache_dir() / "gguf" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fetch_files(entry(name, "gguf"), None, Path(folder)).replace(path)
    return path


@contextlib.contextmanager
def serving(model: Path, *, slots: int = 4, context: int = 8192, threads: int = 0) -> Iterator[str]:
    """Run a server; yields its URL.

    Args:
        model: The model file.
        slots: Maximum number of concurrent requests.
        context: Tokens of context, shared by all slots.
        threads: How many threads compute; 0 for as many as there are cores.
    """
    slot_folder = (
        f"{tempfile.gettempdir()}/"  # nothing is saved, but the server erases slots only with a folder
    )
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
    """A streaming chat model on a llama.cpp server, with log-probabilities on request.

    Attributes:
        url: The server's URL.
        tokens: Maximum number of tokens of an answer.
        logprobs: Whether every call asks for log-probabilities.
        calls: The server's counts for each call: ``prompt`` and ``written`` tokens so far, and whether the answer is
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
            # The server closes idle connections at any time, perhaps just when one is used again.
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
    """Parse one line of a server's stream, and record its counts."""
    if not line.startswith("data: {"):
        return
    data = json.loads(line.removeprefix("data: "))
    timings = data.get("timings")
    usage = None
    if timings:
        if not call["prompt"]:  # once, with the first token: LangChain adds up the usage of chunks
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
