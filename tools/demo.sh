#!/usr/bin/env bash
# The tour behind `make demo`: every command is printed and then really run, on files that torch and safetensors wrote.
set -euo pipefail
cd "$(dirname "$0")/.."
export COLUMNS="${COLUMNS:-110}"

files=tests/golden/files
hostile=tests/golden/hostile

# Bold and dim on a terminal only.
if [ -t 1 ]; then bold=$'\033[1m' dim=$'\033[2m' off=$'\033[0m'; else bold='' dim='' off=''; fi

say() { printf '\n%s%s%s\n' "$bold" "$*" "$off"; }

# run EXPECTED_STATUS COMMAND…: print it as it would be typed, run it, and insist on its exit status.
run() {
    local wanted=$1 status=0
    shift
    printf '%s' "$dim\$$off"
    for word in "$@"; do
        case $word in *[\ \*\[]*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    "$@" || status=$?
    if [ "$status" -ne "$wanted" ]; then
        echo "demo: expected exit status $wanted, got $status" >&2
        exit 1
    fi
}

say "A whole pickled model whose classes are not installed here. Nothing in it is executed or imported."
run 0 holdfast show $files/module.pt

say "A training checkpoint: optimizer, scheduler, RNG states, dataclasses, numpy arrays, paths."
run 0 holdfast show $files/training.pt --depth 1

say "Two rows of one tensor. Only their bytes are read."
run 0 holdfast read $files/training.pt model.embed.weight --slice '1:3, :'

say "A file as torch wrote it before 1.6, with tied weights and views."
run 0 holdfast show $files/legacy.pt

say "A directory of safetensors shards, filtered."
run 0 holdfast show $files/hf_index --filter 'layers.*'

say "A checkpoint that would run a shell command when unpickled. The exit status is 1."
run 1 holdfast scan $hostile/os_system.pt

say "It still opens, as data."
run 0 holdfast show $hostile/os_system.pt

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

say "Convert: streamed, read back, published by one rename. Ties and the tree are kept."
run 0 holdfast convert $files/plain.pt "$out/plain.safetensors"
run 0 holdfast convert "$out/plain.safetensors" "$out/plain"

say "The same tensors, whatever the format. Equal checksums are not read."
run 0 holdfast diff $files/plain.pt "$out/plain"

say "Cast, and see what it cost."
run 0 holdfast edit "$out/plain.safetensors" --dtype bf16 --in-place
run 1 holdfast diff $files/plain.pt "$out/plain.safetensors"

say "Flip one bit in a copy: torch would load it in silence."
cp $files/plain.pt "$out/broken.pt"
printf '\xff' | dd of="$out/broken.pt" bs=1 seek=1540 conv=notrunc status=none
run 1 holdfast verify "$out/broken.pt"

if python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)'; then
    say "torch is not installed in this .venv. Nothing above needed it."
fi
