#!/usr/bin/env bash
# Build llama.cpp's own server, which benchmarks/peers/llama_cpp.py compares with, from a source package of PyPI: some
# twelve minutes of two cores. It needs cmake, ninja and g++.
#   llama_cpp.sh VENV    environment: PYTHON (default python3); the server is VENV/bin/llama-server
set -euo pipefail
venv=$1
package=llama-cpp-python version=0.3.36
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT

"$venv/bin/python" -m pip download --quiet --no-deps --no-binary :all: --dest "$sources" "$package==$version"
tar --extract --gzip --file "$sources"/*.tar.gz --directory "$sources" --strip-components 1
# Libraries within the program, so that it may leave the folder that it was built in.
cmake -S "$sources/vendor/llama.cpp" -B "$sources/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
  -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
ninja -C "$sources/build" llama-server llama-bench
cp "$sources/build/bin/llama-server" "$sources/build/bin/llama-bench" "$venv/bin/"
"$venv/bin/llama-server" --version
