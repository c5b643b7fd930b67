"""What a notebook shows of a result: a small card of facts, tables and bars, as HTML. Text out of files is escaped twice over.

    class VerifyReport(Shown): …      a dataclass, whose fields are the facts; rows of dataclasses are tables

Of a result with ten thousand rows, the first `ROWS` are shown, and how many there are. Colours are those of the notebook, light or
dark: bars are its text colour, made faint. Nothing is read from a file to draw a card.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from holdfast.core.order import sort_naturally
from holdfast.core.text import clip, escape, format_nbytes
from holdfast.core.value import Value

MAX_ROWS = 50

MAX_COLUMNS = 14

MAX_CHARACTERS = 120


class Bar(Value, frozen=True):
    text: str
    fraction: float


class Bars(Value, frozen=True):
    counts: Sequence[int]


Cell = str | Bar | Bars

FAINT = "opacity:.65"
CELL = "padding:.15em .8em .15em 0;text-align:left;white-space:nowrap;vertical-align:top"


def render_text(value: str, limit: int = MAX_CHARACTERS) -> str:
    """Text out of a file, as HTML.

    >>> render_text("<b>\\u202e")
    '&lt;b&gt;\\\\u202e'
    """
    return html.escape(escape(clip(value, limit)))


def render_card(title: str, facts: Iterable[tuple[str, str]], *, tables: Iterable[str] = ()) -> str:
    line = " · ".join(
        f'<span style="{FAINT}">{render_text(label)}</span> {render_text(value)}'
        for label, value in facts
    )
    head = f"<div><strong>{render_text(title, 200)}</strong></div><div>{line}</div>"
    return f'<div style="margin:.4em 0">{head}{"".join(tables)}</div>'


def render_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], total: int) -> str:
    shown = [row for row, _ in zip(rows, range(MAX_ROWS), strict=False)]
    head = "".join(
        f'<th style="{CELL};font-weight:normal;{FAINT}">{render_text(column)}</th>'
        for column in columns
    )
    body = "".join(
        f"<tr>{''.join(f'<td style={QUOTE}{CELL}{QUOTE}>{_cell(cell)}</td>' for cell in row)}</tr>"
        for row in shown
    )
    more = f'<div style="{FAINT}">… {total - len(shown):,} more</div>' if total > len(shown) else ""
    return (
        '<table style="border-collapse:collapse;margin:.3em 0">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"
    )


QUOTE = '"'


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return render_text(cell)
    if isinstance(cell, Bar):
        width = round(100 * min(max(cell.fraction, 0.0), 1.0))
        drawn = f"display:inline-block;height:.6em;width:{width}px;background:currentColor;opacity:.35;margin-right:.5em"
        return f'<span style="{drawn}"></span>{render_text(cell.text)}'
    top = max(cell.counts, default=0) or 1
    bars = "".join(
        f'<rect x="{2 * at}" y="{16 - height}" width="1.6" height="{height}"/>'
        for at, height in enumerate(round(16 * count / top) for count in cell.counts[:64])
    )
    wide = 2 * min(len(cell.counts), 64)
    return (
        f'<svg width="{wide}" height="16" viewBox="0 0 {wide} 16" fill="currentColor" '
        f'opacity=".55" aria-hidden="true">{bars}</svg>'
    )


class NotebookResult:
    __slots__ = ()

    def _headline(self) -> Iterator[tuple[str, str]]:
        """Facts that are no fields, and come first: whether all is well, where the result says so."""
        for name in ("ok", "equal"):
            if isinstance(getattr(type(self), name, None), property):
                yield name, "yes" if getattr(self, name) else "no"

    def _arranged(self, field: str, value: object) -> object:
        """A field as it is shown: names, and rows that have some, in the order in which people count."""
        if field == "notes" or not isinstance(value, tuple):
            return value
        return tuple(sort_naturally(value, _name)) if all(map(_name, value)) else value

    def _repr_html_(self) -> str:
        values = {name: self._arranged(name, value) for name, value in _fields(self).items()}
        facts = [
            *self._headline(),
            *(
                (_words(name), _fact(name, value))
                for name, value in values.items()
                if _plain(value)
            ),
        ]
        tables = [_rows(name, value) for name, value in values.items() if not _plain(value)]
        return render_card(type(self).__name__, facts, tables=filter(None, tables))


def _name(row: object) -> str:
    """What a row is called: itself, the first of a pair, its name, or the first of the tensors that it is about."""
    found = getattr(row, "name", None) or getattr(row, "tensors", None) or row
    first = found[0] if isinstance(found, tuple) and found else found
    return first if isinstance(first, str) else ""


def _fields(value: object) -> dict[str, object]:
    if isinstance(value, Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if not dataclasses.is_dataclass(value):
        return {}
    return {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr
    }


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _words(name: str) -> str:
    """
    >>> _words("checked_nbytes"), _words("nbytes"), _words("same_by_checksum")
    ('checked', 'size', 'same by checksum')
    """
    return name.removesuffix("nbytes").strip("_").replace("_", " ") or "size"


def _fact(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        # Room that has no end is as many bytes as can be counted.
        return (
            ("any" if value >= 1 << 62 else format_nbytes(value))
            if name.endswith("nbytes") and value >= 0
            else f"{value:,}"
        )
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return "–" if value is None or value == "" else str(value)


def _rows(name: str, value: object) -> str:
    """A field that is a row of things, as a table; nothing where it is empty, or something else."""
    if isinstance(value, Mapping):
        value = tuple((str(key), item) for key, item in value.items())
    if not isinstance(value, tuple | list) or not value:
        return ""
    some = [_flat(item) for item in value[:MAX_ROWS]]
    columns = list(dict.fromkeys(column for row in some for column in row))[:MAX_COLUMNS]
    largest = {
        column: max((_size(row.get(column)) for row in some), default=0.0) for column in columns
    }
    cells = [
        [_shown(column, row.get(column), largest[column]) for column in columns] for row in some
    ]
    title = f'<div style="margin-top:.3em">{render_text(_words(name))} <span style="{FAINT}">{len(value):,}</span></div>'
    return title + render_table(
        [_words(column) if column else "" for column in columns], cells, len(value)
    )


def _size(value: object) -> float:
    return abs(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _flat(item: object) -> dict[str, object]:
    """A row: the fields of a result, those of one in it among them; a pair of a name and a length; or one text."""
    fields = _fields(item)
    if fields:
        flat: dict[str, object] = {}
        for name, value in fields.items():
            flat |= _fields(value) or {name: value}
        return flat
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return {"name": item[0], "nbytes" if isinstance(item[1], int) else "": item[1]}
    return {"": str(item) if _plain(item) else type(item).__name__}


def _shown(column: str, value: object, largest: float) -> Cell:
    if isinstance(value, tuple):
        if column == "histogram":
            return Bars(value)
        whole = all(type(n) is int for n in value)
        inside = [
            str(list(item)) if isinstance(item, tuple) else str(item) if _plain(item) else "…"
            for item in value[:8]
        ]
        return (
            str(list(value))
            if whole and len(value) <= 8
            else ", ".join(inside) + (" …" if len(value) > 8 else "")
        )
    if isinstance(value, int) and column.endswith("nbytes") and not isinstance(value, bool):
        return Bar(
            format_nbytes(value) if value >= 0 else str(value), value / largest if largest else 0.0
        )
    if column in ("relative", "zeros") and isinstance(value, int | float):
        return Bar(_fact(column, value), value / largest if largest else 0.0)
    return _fact(column, value) if _plain(value) else type(value).__name__
