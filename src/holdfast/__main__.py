"""Runs the command line with `python -m holdfast`, if the script `holdfast` is not on the path."""

from __future__ import annotations

import sys

from holdfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
