#!/usr/bin/env bash
# The wheel with each extra alone, the adapters' tests on the lowest supported versions, and the thin distributions.
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

tests/wheel.sh

fresh lowest -c constraints-lowest.txt -e ".[langchain-agents,llama-index,faiss,train]" \
  pytest pytest-asyncio pytest-timeout langchain-tests hypothesis
"$work/lowest/bin/python" -m pytest -q -m "not model and not slow" tests/test_langchain*.py tests/test_langgraph.py tests/test_llama_index*.py \
  tests/test_evaluation.py
fresh lowest-serve -e ".[serve]" fastapi==0.115.0 uvicorn==0.31.1 prometheus-client==0.20.0 httpx==0.27.0 \
  pytest pytest-asyncio pytest-timeout hypothesis typesafe-sdk
"$work/lowest-serve/bin/python" -m pytest -q -m "not model and not slow" tests/test_serve.py tests/test_gateway.py tests/test_remote_gate.py
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
