#!/usr/bin/env bash
# Install the clients of the tests beside this file: install.sh pinned|newest python DIRECTORY, or ... npm DIRECTORY.
# DIRECTORY/installed says that it went well. Where node is missing, the npm part is left out, and its tests are skipped.
set -euo pipefail
which=$1 kind=$2 directory=$3
own=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
# Nothing but names: the newest of each, though their pins contradict each other.
libraries=(anthropic instructor langchain-anthropic langchain-openai litellm llama-index-llms-openai-like llm-comply
  openai openai-agents "pydantic-ai-slim[anthropic,openai]" "smolagents[openai]")
# What the newest of those are made with.
cores=(langchain-core llama-index-core llama-index-llms-openai pydantic-graph)

mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
rm -f "$directory/installed"
if [ "$kind" = python ]; then
  "$python" -m venv "$directory"
  "$python" -m venv "$directory/aider"
  if [ "$which" = pinned ]; then
    "$directory/bin/python" -m pip install --quiet --no-deps --requirement "$own/requirements.txt"
    "$directory/aider/bin/python" -m pip install --quiet --no-deps --requirement "$own/requirements-aider.txt"
  else
    # One by one for what they need, and then themselves: asked for all at once, pip looks for older ones that agree.
    for library in "${libraries[@]}"; do
      "$directory/bin/python" -m pip install --quiet --upgrade "$library"
    done
    "$directory/bin/python" -m pip install --quiet --upgrade --no-deps "${libraries[@]}" "${cores[@]}"
    "$directory/aider/bin/python" -m pip install --quiet --upgrade aider-chat
  fi
else
  command -v npm >/dev/null || { echo "no npm: the programs that need node are not installed, and their tests are skipped"; exit 0; }
  cp "$own/package.json" "$own/package-lock.json" "$directory"
  cd "$directory"
  if [ "$which" = newest ]; then
    rm package-lock.json
    node -e 'const f = require("fs"), p = JSON.parse(f.readFileSync("package.json"));
      for (const name in p.dependencies) p.dependencies[name] = "latest"; f.writeFileSync("package.json", JSON.stringify(p))'
  fi
  # Not `npm ci`: it asks for the packages of other platforms, too. No script runs but the two that put a binary in place.
  npm install --ignore-scripts --no-audit --no-fund --omit-lockfile-registry-resolved --loglevel=error
  (cd node_modules/@anthropic-ai/claude-code && node install.cjs)
  (cd node_modules/opencode-ai && node postinstall.mjs)
fi
touch "$directory/installed"
