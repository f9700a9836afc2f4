#!/usr/bin/env bash
# Creates .venv with the pinned CPU set and this package; does nothing when that is already done.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # where it is set, every process would compile all it imports: twice the start time

python=${PYTHON:-python3.11}
venv=.venv
requirements=deployments/requirements-cpu.txt
stamp=$venv/.forge-flows-setup
uv_version=0.13.9
key=$(cat "$requirements" pyproject.toml deployments/bootstrap.sh | sha256sum | cut -d' ' -f1)

if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
    exit 0
fi

step() { bash deployments/step.sh "$@"; }

# uv does not read pip's PIP_FIND_LINKS, hence the explicit option.
torch_source=(--torch-backend cpu)
if [ -n "${PIP_FIND_LINKS:-}" ]; then
    torch_source=()
    for place in $PIP_FIND_LINKS; do torch_source+=(--find-links "$place"); done
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    echo "==> FAILED: '$python' is not a working Python 3.11, the version the pinned CPU set is tested with." >&2
    echo "    What to do: install Python 3.11 with its venv module (Debian: apt-get install python3.11-venv)," >&2
    echo "    or name it: make setup PYTHON=/path/to/python3.11" >&2
    exit 1
fi

echo "Setting up $venv, about 5 GB (first call, or the requirements changed)"
rm -f "$stamp"
if [ ! -x "$venv/bin/python" ]; then
    step "create $venv" "check that '$python -m venv' works (Debian: apt-get install python3.11-venv) and the disk is not full" \
        "$python" -m venv --clear "$venv"
fi
step "install uv" "check the network: pip must reach PyPI (settings: 'pip config list')" \
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
step "install the pinned packages" \
    "if torch==2.13.0+cpu was not found, set PIP_FIND_LINKS to a directory with that wheel, or unset it to use PyTorch's CPU index; otherwise check the network (PyPI) and the disk (df -h .), and call make again: downloads are kept" \
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps "${torch_source[@]}" -r "$requirements"
step "install this package (editable)" "pyproject.toml is likely broken: read the error above" \
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation -e .
step "compile what every process imports" "check the disk (df -h .) and call make again" \
    bash -c "cd '$venv'/lib/python3*/site-packages && '$PWD/$venv/bin/python' -m compileall -q -j 0 \
        torch torchtitan transformers vllm prefect mlflow torchao numpy sympy pandas sqlalchemy > /dev/null || true"
rm -rf "$venv/share/forge-flows" # empty databases kept by deployments/services.py, perhaps of other versions
echo "$key" > "$stamp"
