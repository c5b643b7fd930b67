#!/usr/bin/env bash
# The tour of `make demo`. It prints and runs each command, on test files that torch and safetensors wrote.
set -euo pipefail
cd "$(dirname "$0")/.."
export COLUMNS="${COLUMNS:-110}"

files=tests/golden/files
hostile=tests/golden/hostile
out=build/demo

# Bold and dim on a terminal only.
if [ -t 1 ]; then bold=$'\033[1m' dim=$'\033[2m' off=$'\033[0m'; else bold='' dim='' off=''; fi

say() { printf '\n%s%s%s\n' "$bold" "$*" "$off"; }

# run EXPECTED_STATUS COMMAND…: print a command, run it, and stop if it ends with another exit status.
run() {
    local expected=$1 status=0
    shift
    printf '%s' "$dim\$$off"
    for word in "$@"; do
        case $word in *[\ \*\[]*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    "$@" || status=$?
    if [ "$status" -ne "$expected" ]; then
        echo "demo: expected exit status $expected, got $status" >&2
        exit 1
    fi
}

rm -rf "$out"
mkdir -p "$out"
trap 'rm -rf "$out"' EXIT

say "1. Show a pickled model. Its class is not installed here, and Holdfast runs none of its code."
run 0 holdfast show $files/module.pt

say "2. Show the top level of a training checkpoint: weights, optimizer state, random states and settings."
run 0 holdfast show $files/training.pt --depth 1

say "3. Read two rows of a tensor. Holdfast reads only the bytes of these rows."
run 0 holdfast read $files/training.pt model.embed.weight --slice '1:3, :'

say "4. Open a file in the format of torch before 1.6, with tied weights and views."
run 0 holdfast show $files/legacy.pt

say "5. List some tensors of a Hugging Face folder with several safetensors files."
run 0 holdfast show $files/hf_index --filter 'layers.*'

say "6. Scan a malicious file, which runs a shell command when Python unpickles it. The exit status is 1."
run 1 holdfast scan $hostile/os_system.pt

say "7. Open the same file safely. The call is shown as data."
run 0 holdfast show $hostile/os_system.pt

say "8. Convert a .pt file to safetensors, and then to a native directory. Holdfast compares each result with its source."
run 0 holdfast convert $files/plain.pt $out/plain.safetensors
run 0 holdfast convert $out/plain.safetensors $out/plain

say "9. Compare the first and the last file. The formats differ, and the tensors are the same."
run 0 holdfast diff $files/plain.pt $out/plain

say "10. Cast the weights to 8 bits, and see how much they changed."
run 0 holdfast convert $files/training.pt $out/weights.safetensors --keep 'model.*.weight' --quiet
run 0 holdfast edit $out/weights.safetensors $out/small.safetensors --dtype float8_e4m3fn --quiet
run 1 holdfast diff $out/weights.safetensors $out/small.safetensors

say "11. Damage one byte of a copy, and find the tensors that it belongs to. torch.load would not notice."
run 0 cp $files/plain.pt $out/broken.pt
printf '\xff' | dd of=$out/broken.pt bs=1 seek=1540 conv=notrunc status=none
run 1 holdfast verify $out/broken.pt

if python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)'; then
    say "All of this ran without torch, which is not installed in this environment."
fi
say "Next: open docs/start.md, or run 'make test' (6 to 8 minutes on two cores)."
