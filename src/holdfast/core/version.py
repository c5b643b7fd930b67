"""The version of the package, for whatever says it: `holdfast.__version__`, `--version`, the pages of a report."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
