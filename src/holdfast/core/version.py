"""The version of the package: `holdfast.__version__`, `--version`, and in reports."""

VERSION = "0.1.0"
