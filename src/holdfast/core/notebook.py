"""Renders results for notebooks: a small card of facts, tables and bars, as HTML.

    class VerifyReport(NotebookResult): …    a dataclass. Its fields are facts, or rows of a table.

Text from files is escaped twice: control characters become visible, and then HTML is escaped. Of a
result with ten thousand rows the first `MAX_ROWS` are shown, with the number of rows. Bars have the
color of the notebook's text, so that they fit light and dark themes.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec import Struct

from holdfast.core.order import sort_naturally
from holdfast.core.text import clip, escape, format_nbytes
from holdfast.core.value import Value

MAX_ROWS = 50
MAX_COLUMNS = 14
MAX_CHARACTERS = 120
"""The length at which a text in a cell is cut."""
MAX_TITLE_CHARACTERS = 200
MAX_ITEMS = 8
"""The most items of a tuple that a cell shows."""
MAX_BARS = 64
"""The most bars of a histogram in a cell."""
UNLIMITED_NBYTES = 1 << 62
"""Sizes from here on mean that there is no limit."""

FAINT = "opacity:.65"
CELL = "padding:.15em .8em .15em 0;text-align:left;white-space:nowrap;vertical-align:top"


class Bar(Value, frozen=True):
    """A cell with a text behind a bar."""

    text: str
    fraction: float
    """The length of the bar, from 0 to 1."""


class Bars(Value, frozen=True):
    """A cell with a histogram."""

    counts: Sequence[int]


Cell = str | Bar | Bars


def render_text(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Return text from a file as HTML.

    >>> render_text("<b>\\u202e")
    '&lt;b&gt;\\\\u202e'
    """
    return html.escape(escape(clip(text, max_characters)))


def render_card(title: str, facts: Iterable[tuple[str, str]], *, tables: Iterable[str] = ()) -> str:
    """Return a card as HTML.

    Args:
        title: The title.
        facts: Labels and values, which are shown in one line.
        tables: HTML that is shown below them.
    """
    labeled_values: list[str] = []
    for label, value in facts:
        label_html = f'<span style="{FAINT}">{render_text(label)}</span>'
        labeled_values.append(f"{label_html} {render_text(value)}")
    title_html = f"<strong>{render_text(title, MAX_TITLE_CHARACTERS)}</strong>"
    return (
        f'<div style="margin:.4em 0"><div>{title_html}</div>'
        f"<div>{' · '.join(labeled_values)}</div>{''.join(tables)}</div>"
    )


def render_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], row_count: int) -> str:
    """Return the first rows of a table as HTML.

    Args:
        columns: The heads of the columns.
        rows: The rows. There may be fewer than in the table, but not fewer than are shown.
        row_count: How many rows the table has.
    """
    shown_rows = list(islice(rows, MAX_ROWS))
    head_style = f"{CELL};font-weight:normal;{FAINT}"
    heads = [f'<th style="{head_style}">{render_text(column)}</th>' for column in columns]
    row_texts: list[str] = []
    for row in shown_rows:
        cells = [f'<td style="{CELL}">{_render_cell(cell)}</td>' for cell in row]
        row_texts.append(f"<tr>{''.join(cells)}</tr>")

    table = (
        '<table style="border-collapse:collapse;margin:.3em 0">'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(row_texts)}</tbody></table>"
    )
    if row_count > len(shown_rows):
        table += f'<div style="{FAINT}">… {row_count - len(shown_rows):,} more</div>'
    return table


def _render_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return render_text(cell)
    if isinstance(cell, Bars):
        return _render_histogram(cell.counts)
    width = round(100 * min(max(cell.fraction, 0.0), 1.0))
    style = (
        f"display:inline-block;height:.6em;width:{width}px;"
        "background:currentColor;opacity:.35;margin-right:.5em"
    )
    return f'<span style="{style}"></span>{render_text(cell.text)}'


def _render_histogram(counts: Sequence[int]) -> str:
    """Return bars for the first counts as an SVG image. The largest count is 16 pixels high."""
    max_count = max(counts, default=0) or 1
    bars: list[str] = []
    for index, count in enumerate(counts[:MAX_BARS]):
        height = round(16 * count / max_count)
        bars.append(f'<rect x="{2 * index}" y="{16 - height}" width="1.6" height="{height}"/>')
    width = 2 * len(bars)
    return (
        f'<svg width="{width}" height="16" viewBox="0 0 {width} 16" fill="currentColor" '
        f'opacity=".55" aria-hidden="true">{"".join(bars)}</svg>'
    )


class NotebookResult:
    """The base of results that a notebook shows as a card. They are dataclasses."""

    __slots__ = ()

    def _list_headline_facts(self) -> Iterator[tuple[str, str]]:
        """Yield the facts that come first and are not fields: whether everything is in order."""
        for name in ("ok", "equal"):
            if isinstance(getattr(type(self), name, None), property):
                yield name, _render_fact(name, bool(getattr(self, name)))

    def _arrange_field(self, field: str, value: object) -> object:
        """Return the value of a field as it is shown. Named rows are sorted by their names."""
        if field != "notes" and isinstance(value, tuple) and all(map(_get_row_name, value)):
            return tuple(sort_naturally(value, _get_row_name))
        return value

    def _repr_html_(self) -> str:
        facts = [*self._list_headline_facts()]
        tables: list[str] = []
        for name, field_value in _get_fields(self).items():
            value = self._arrange_field(name, field_value)
            if _is_plain(value):
                facts.append((_make_label(name), _render_fact(name, value)))
            else:
                tables.append(_render_field_table(name, value))
        return render_card(type(self).__name__, facts, tables=tables)


def _get_row_name(row: object) -> str:
    """Return the name that a row is sorted by, or an empty text if it has none.

    It is the row itself, the first item of a pair, the attribute `name`, or the first of `tensors`.
    """
    name = getattr(row, "name", None) or getattr(row, "tensors", None) or row
    if isinstance(name, tuple) and name:
        name = name[0]
    return name if isinstance(name, str) else ""


def _get_fields(value: object) -> dict[str, object]:
    """Return the fields of a struct or a dataclass by their names. Other values have none."""
    names: Iterable[str] = ()
    if isinstance(value, Struct):
        names = value.__struct_fields__
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.repr]
    return {name: getattr(value, name) for name in names}


def _is_plain(value: object) -> bool:
    """Return whether a value is shown as a text, and not as a table."""
    return value is None or isinstance(value, str | int | float)


def _make_label(name: str) -> str:
    """Return the label of a field.

    >>> _make_label("checked_nbytes"), _make_label("nbytes"), _make_label("same_by_checksum")
    ('checked', 'size', 'same by checksum')
    """
    return name.removesuffix("nbytes").strip("_").replace("_", " ") or "size"


def _render_fact(name: str, value: object) -> str:
    """Return the text for the value of a field."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        if not name.endswith("nbytes") or value < 0:
            return f"{value:,}"
        return "any" if value >= UNLIMITED_NBYTES else format_nbytes(value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return "–" if value is None or value == "" else str(value)


def _render_field_table(name: str, value: object) -> str:
    """Return a field that has rows as a table. The result is empty if it has none."""
    if isinstance(value, Mapping):
        value = tuple((str(key), item) for key, item in value.items())
    if not isinstance(value, tuple | list) or not value:
        return ""

    rows = [_flatten_row(item) for item in value[:MAX_ROWS]]
    columns: list[str] = []
    for row in rows:
        columns += [column for column in row if column not in columns]
    columns = columns[:MAX_COLUMNS]
    labels = [_make_label(column) if column else "" for column in columns]

    # A bar shows a value relative to the largest one of its column.
    max_values = [max(_get_bar_size(row.get(column)) for row in rows) for column in columns]
    cells: list[list[Cell]] = []
    for row in rows:
        pairs = zip(columns, max_values, strict=True)
        cells.append([_make_cell(column, row.get(column), size) for column, size in pairs])
    count = f'<span style="{FAINT}">{len(value):,}</span>'
    title = f'<div style="margin-top:.3em">{render_text(_make_label(name))} {count}</div>'
    return title + render_table(labels, cells, len(value))


def _get_bar_size(value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return abs(value)
    return 0.0


def _flatten_row(item: object) -> dict[str, object]:
    """Return the columns of a row.

    They are the fields of a result, and those of results in it; or a name and a value, if the row
    is such a pair; or a text without a column name.
    """
    fields = _get_fields(item)
    if fields:
        columns: dict[str, object] = {}
        for name, value in fields.items():
            columns |= _get_fields(value) or {name: value}
        return columns
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        name, value = item
        return {"name": name, "nbytes" if isinstance(value, int) else "": value}
    return {"": str(item) if _is_plain(item) else type(item).__name__}


def _make_cell(column: str, value: object, max_value: float) -> Cell:
    """Return the cell for a value.

    Args:
        column: The name of the column.
        value: The value of the row in this column.
        max_value: The largest absolute value in the column.
    """
    if isinstance(value, tuple):
        return Bars(value) if column == "histogram" else _list_items(value)
    is_size = type(value) is int and column.endswith("nbytes")
    if isinstance(value, int | float) and (is_size or column in ("relative", "zeros")):
        text = str(value) if is_size and value < 0 else _render_fact(column, value)
        return Bar(text, value / max_value if max_value else 0.0)
    return _render_fact(column, value) if _is_plain(value) else type(value).__name__


def _list_items(items: tuple[object, ...]) -> str:
    """Return the first items of a tuple as a text. A shape keeps its brackets."""
    if len(items) <= MAX_ITEMS and all(type(item) is int for item in items):
        return str(list(items))
    texts: list[str] = []
    for item in items[:MAX_ITEMS]:
        if isinstance(item, tuple):
            texts.append(str(list(item)))
        else:
            texts.append(str(item) if _is_plain(item) else "…")
    ending = " …" if len(items) > MAX_ITEMS else ""
    return ", ".join(texts) + ending
