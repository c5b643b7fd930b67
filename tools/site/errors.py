"""The table of errors on their page: each class with its built-in base and its first sentence."""

from __future__ import annotations

import inspect
import pickle

import holdfast.errors

__all__ = ["as_markdown", "list_classes"]


def list_classes() -> list[type[BaseException]]:
    """Return the errors and warnings of `holdfast.errors`, in the order of the source."""
    values = vars(holdfast.errors).values()
    return [value for value in values if inspect.isclass(value) and is_public_error(value)]


def is_public_error(value: type) -> bool:
    """Return whether a class is an error or a warning that Holdfast defines."""
    return issubclass(value, BaseException) and value.__name__ in holdfast.errors.__all__


def as_markdown() -> str:
    """Return the table as Markdown."""
    rows = ["| class | also a | meaning |", "| --- | --- | --- |"]
    for error_class in list_classes():
        summary = inspect.getdoc(error_class).split("\n\n")[0].replace("\n", " ")
        name = error_class.__name__
        link = f"[`{name}`](#holdfast.errors.{name})"
        rows.append(f"| {link} | {list_builtin_bases(error_class)} | {summary} |")
    return "\n".join(rows)


def list_builtin_bases(error_class: type) -> str:
    """Return the built-in exceptions that an `except` for this class can name."""
    too_general = (Exception, BaseException, Warning, object, pickle.PickleError)
    names = []
    for base in error_class.__mro__:
        is_builtin = base.__module__ in ("builtins", "_pickle")
        if is_builtin and base not in too_general:
            names.append(f"`{base.__name__}`")
    return ", ".join(names)
