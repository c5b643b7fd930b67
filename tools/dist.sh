#!/usr/bin/env bash
# Behind `make dist`: build the source distribution and the wheel, check the metadata, and try both in
# an empty environment and an empty folder, with the commands and snippets of the package index page.
# Every Python on this machine that the package supports tries the wheel; the first one tries both.
#
#   tools/dist.sh PYTHON    PYTHON has build and twine (requirements/dist.txt)
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH  # Only the installed package is tried.
python=$(realpath --no-symlinks "$1")
root=$PWD

rm -rf dist build/lib build/bdist.*
"$python" -m build --outdir dist . > /dev/null
"$python" -m twine check --strict dist/*

# try_package PYTHON FILE
try_package() {
    local folder
    folder=$(mktemp -d)
    echo "== $2 with $("$1" --version), in an empty environment"
    "$1" -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check "$root/$2"
    mkdir "$folder/work"
    (
        cd "$folder/work"
        PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/python" -I "$root/tools/follow.py" "$root/PYPI.md"
    )
    rm -rf "$folder"
}

# find_pythons: one interpreter for each supported minor version, from PATH or from pyenv
find_pythons() {
    local minor candidate
    for minor in 11 12 13 14; do
        for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor.*/bin/python; do
            if "$candidate" -c "import sys, venv; sys.exit(sys.version_info[:2] != (3, $minor))" 2> /dev/null; then
                command -v "$candidate"
                break
            fi
        done
    done
}

try_package "$python" dist/*.tar.gz
for candidate in $(find_pythons); do
    try_package "$candidate" dist/*.whl
done
ls -l dist
