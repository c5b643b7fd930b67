"""The options of a verb on its page: the signature lists them by name, and a table says what each does.

griffe reads source, where a verb says `**options: Unpack[ConvertOptions]`. What that record has comes from `holdfast.core.options`.
"""

from __future__ import annotations

import inspect

from holdfast.core import options as records
from holdfast.extras.runs.run import RunOptions


def record_of(annotation: str) -> type | None:
    """The record that `Unpack[…]` names."""
    return (
        getattr(records, annotation[7:-1], RunOptions) if annotation.startswith("Unpack[") else None
    )


def table(record: type) -> str:
    """The options of a record, a line each."""
    rows = [
        f"| `{name}` | {'' if option.default is ... else f'`{option.default!r}`'} | {option.help.replace('|', chr(92) + '|')} |"
        for name, option in records.get_options(record).items()
    ]
    return "\n".join(["| option | default | what it does |", "| --- | --- | --- |", *rows])


try:
    import griffe
except ImportError:  # the tests have no generator of sites
    pass
else:

    class Options(griffe.Extension):
        """Called for every function that griffe has read."""

        def on_function(self, *, func: griffe.Function, **kwargs: object) -> None:
            rest = [one for one in func.parameters if one.kind is griffe.ParameterKind.var_keyword]
            record = record_of(str(rest[0].annotation)) if rest else None
            if record is None:
                return
            shown = [
                griffe.Parameter(
                    name, kind=griffe.ParameterKind.keyword_only, annotation=records.get_annotation(record, name),
                    default=None if option.default is ... else repr(option.default),
                )
                for name, option in records.get_options(record).items()
            ]  # fmt: skip
            func.parameters = griffe.Parameters(
                *(one for one in func.parameters if one not in rest), *shown
            )
            if func.docstring:
                func.docstring.value = (
                    f"{inspect.cleandoc(func.docstring.value)}\n\n{table(record)}"
                )
