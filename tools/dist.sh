#!/usr/bin/env bash
# Behind `make dist`: build the source distribution and the wheel, check what the package index would show of them, and use
# each as a stranger would: in an empty environment and an empty folder, by the page that the index shows.
#
#   tools/dist.sh PYTHON    PYTHON has build and twine (requirements/dist.txt)
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH  # what is installed is tried, and nothing else
python=$(realpath --no-symlinks "$1")
root=$PWD

rm -rf dist build/lib build/bdist.*
"$python" -m build --outdir dist . > /dev/null
"$python" -m twine check --strict dist/*

for made in dist/*.tar.gz dist/*.whl; do
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    echo "== $made, in an empty environment"
    "$python" -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check "$made"
    mkdir "$folder/work"
    cd "$folder/work"
    PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/python" -I "$root/tools/follow.py" "$root/PYPI.md"
    cd "$root"
    rm -rf "$folder"
done
ls -l dist
