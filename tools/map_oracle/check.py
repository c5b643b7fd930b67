"""Whether what was recorded agrees with itself: hashes with index arrays, and there and back with where it began.

python -m tools.map_oracle.check FOLDER     the folder that --debug wrote
"""

import json
import sys
from pathlib import Path

import numpy as np
from tools.map_oracle.record import Arrays, digest

RECORDED = Path("tests/extras/maps/oracles")


def _side(file: Path, side: str) -> Arrays:
    with np.load(file) as arrays:
        return {
            name.removeprefix(f"{side}/"): arrays[name]
            for name in arrays
            if name.startswith(f"{side}/")
        }


def main(folder: Path) -> None:
    """Print each pair of directions; exit with 1 if anything disagrees."""
    pairs = wrong = 0
    for path in sorted(RECORDED.glob("*.json")):
        document = json.loads(path.read_text())
        there = _side(folder / f"{path.stem}.npz", "target")
        if {name: (list(a.shape), digest(a)) for name, a in there.items()} != {
            n: (s, h) for n, s, h in document["target"]
        }:
            wrong += 1
            print(f"{path.stem}: hashes are not those of the index arrays")
        way_back = folder / f"{path.stem.rsplit('.', 1)[0]}.{document['to']}-hf.npz"
        if document["from"] != "hf" or not way_back.exists():
            continue
        begun = _side(folder / f"{path.stem}.npz", "source")
        between = _side(way_back, "source")
        flat = np.concatenate(
            [there.get(name, np.full(between[name].shape, -1)).ravel() for name in sorted(between)]
        )
        back = {name: flat[a] for name, a in _side(way_back, "target").items()}
        differ = [name for name, a in back.items() if not np.array_equal(a, begun[name])]
        pairs += 1
        wrong += bool(differ)
        lost = len(begun) - len(back)
        print(
            f"{path.stem}: {len(back)} tensors there and back, {len(differ)} differ"
            + (f", {lost} lost" if lost else "")
        )
    print(f"{pairs} pairs, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
