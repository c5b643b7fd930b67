"""The version of the package, for whatever says it: `holdfast.__version__`, `--version`, the pages of a report."""

VERSION = "0.1.0"
