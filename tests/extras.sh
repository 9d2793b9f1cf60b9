#!/usr/bin/env bash
# Each extra alone in a fresh virtual environment, and the LangChain tests on the lowest supported versions.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fresh() { # fresh NAME REQUIREMENTS...: a new environment in $work/NAME
  local name=$1
  shift
  "$PYTHON" -m venv "$work/$name"
  "$work/$name/bin/pip" install --quiet --disable-pip-version-check "$@"
}

fresh core -c constraints.txt -e .
"$work/core/bin/python" - <<'PY'
from rgate_integrations import load_gate, list_gates
assert load_gate("constant:never").decide("who?").retrieve is False
assert len(list_gates()) >= 18
for adapter, extra in (("langchain", "langchain"), ("llama_index", "llama-index")):
    try:
        __import__(f"rgate_integrations.{adapter}")
    except ImportError as error:
        assert f"rgate-integrations[{extra}]" in str(error), error
    else:
        raise AssertionError(adapter)
PY
echo "core alone: ok"

fresh langchain -c constraints.txt -e ".[langchain]"
"$work/langchain/bin/python" - <<'PY'
import importlib.util
from rgate_integrations.langchain import RetrievalGate
assert importlib.util.find_spec("llama_index") is None and importlib.util.find_spec("torch") is None
chain = RetrievalGate("constant:never").route(retrieve=lambda q: "rag", direct=lambda q: "direct")
assert chain.batch(["a", "b"]) == ["direct", "direct"]

# The LLM's own tokens are judged without any model of ours, so without torch.
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

def answering(logprob):
    logprobs = {"content": [{"token": "Shakespeare", "logprob": logprob}]}
    message = AIMessage("Shakespeare", response_metadata={"finish_reason": "stop", "logprobs": logprobs})
    return GenericFakeChatModel(messages=iter([message]))

sure = RetrievalGate("token_probability", llm=answering(-0.01)).invoke("who wrote hamlet?")
unsure = RetrievalGate("token_probability", llm=answering(-5.0)).invoke("who wrote hamlet?")
assert (sure.retrieve, unsure.retrieve, sure.error, unsure.error) == (False, True, None, None), (sure, unsure)
PY
echo "langchain alone: ok"

fresh llama -c constraints.txt -e ".[llama-index]"
"$work/llama/bin/python" - <<'PY'
import importlib.util
from rgate_integrations.llama_index import GatedQueryEngine, RetrievalGateSelector
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import MockLLM
for absent in ("langchain_core", "torch", "openai", "llama_index.llms.openai"):
    try:
        assert importlib.util.find_spec(absent) is None, absent
    except ModuleNotFoundError:
        pass
llm = MockLLM()
engine = GatedQueryEngine.from_defaults(EmptyIndex().as_query_engine(llm=llm), "constant:never", llm=llm)
assert "who?" in str(engine.query("who?"))
PY
echo "llama-index alone, without any OpenAI package: ok"

fresh lowest -c constraints-lowest.txt -e ".[langchain-agents,llama-index,faiss,train]" \
  pytest pytest-asyncio pytest-timeout langchain-tests hypothesis
"$work/lowest/bin/python" -m pytest -q -m "not model and not slow" tests/test_langchain*.py tests/test_langgraph.py tests/test_llama_index*.py
echo "lowest versions: ok"

# The three wheels as a package index would have them, each thin one in an environment of its own.
fresh build build
(unset RGATE_REPOSITORY && for folder in . distributions/langchain-rgate distributions/llama-index-selectors-rgate; do
  "$work/build/bin/python" -m build --quiet --wheel --outdir "$work/wheels" "$folder"
done)
fresh langchain-rgate -c constraints.txt --find-links "$work/wheels" "langchain-rgate[test]"
"$work/langchain-rgate/bin/python" -m pytest -q -c distributions/langchain-rgate/pyproject.toml \
  -p no:cacheprovider distributions/langchain-rgate/tests
fresh selectors-rgate -c constraints.txt --find-links "$work/wheels" llama-index-selectors-rgate pytest
"$work/selectors-rgate/bin/python" -m pytest -q -c distributions/llama-index-selectors-rgate/pyproject.toml \
  -p no:cacheprovider distributions/llama-index-selectors-rgate/tests
echo "wheels of the thin distributions: ok"
