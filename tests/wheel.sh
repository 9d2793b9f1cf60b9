#!/usr/bin/env bash
# The wheel with one extra at a time, each in an empty environment of its own, and the smoke tests of its guides.
#   tests/wheel.sh                       every extra that needs no download beside packages
#   tests/wheel.sh core langchain local  these ones; `local` also needs models: rgate download multilingual-e5-small smollm2-135m-reader smollm2-135m-instruct
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
extras=("$@")
[ ${#extras[@]} -gt 0 ] || extras=(core langchain langchain-agents llama-index openai faiss train ray)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$PYTHON" -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check build
(unset RGATE_REPOSITORY && "$work/build/bin/python" -m build --quiet --wheel --outdir "$work/wheels" .)
wheel=$(echo "$work"/wheels/rgate_integrations-*.whl)
cp constraints.txt tests/wheel_smoke.py "$work"

cd "$work" # nothing of the repository is beside the tests
for extra in "${extras[@]}"; do
  echo "$extra: installing"
  "$PYTHON" -m venv "$work/$extra"
  [ "$extra" = core ] && wanted=$wheel || wanted="$wheel[$extra]"
  "$work/$extra/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt "$wanted"
  "$work/$extra/bin/python" -I wheel_smoke.py "$extra"
  rm -rf "${work:?}/$extra"
done
