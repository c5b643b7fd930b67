"""Run the converters that this environment has, and write what was found.

python -m tools.map_oracle titan                       every family that TorchTitan converts
python -m tools.map_oracle megatron --family qwen3     one family
python -m tools.map_oracle titan --debug folder        whole index arrays too, as folder/*.npz
"""

import argparse
import importlib
from pathlib import Path

from tools.map_oracle.configs import CONFIGS
from tools.map_oracle.record import record

ORACLES = ("titan", "megatron", "stacked", "meta", "gguf")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("oracle", choices=ORACLES)
    parser.add_argument("--family")
    parser.add_argument("--variant")
    parser.add_argument("--out", type=Path, default=Path("tests/extras/maps/oracles"))
    parser.add_argument("--debug", type=Path)
    options = parser.parse_args()
    oracle = importlib.import_module(f"tools.map_oracle.{options.oracle}")
    for family in oracle.FAMILIES:
        if options.family not in (None, family):
            continue
        for variant, config in CONFIGS[family].items():
            if options.variant not in (None, variant):
                continue
            for found in oracle.run(family, config):
                ends = found.pop("about")
                about = {
                    "family": family,
                    "variant": variant + found.pop("suffix", ""),
                    **ends,
                    "config": config,
                }
                record(
                    found.pop("source"),
                    found.pop("target"),
                    about=about,
                    debug=options.debug,
                    out=options.out,
                    **found,
                )


if __name__ == "__main__":
    main()
