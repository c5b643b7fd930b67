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
    """Return the first `MAX_ROWS` rows of a table as HTML, and a line with the number of the others.

    Args:
        columns: The heads of the columns.
        rows: At least the rows that are shown.
        row_count: How many rows the whole table has.
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
    hidden_row_count = row_count - len(shown_rows)
    if hidden_row_count > 0:
        table += f'<div style="{FAINT}">… {hidden_row_count:,} more</div>'
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
    """Return bars for the first counts as an SVG image. The largest count is 16 pixels high.

    A bar is 1.6 pixels wide, and the next one starts 2 pixels after it.
    """
    # If all counts are 0, every bar has the height 0.
    max_count = max([1, *counts])
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
        """Return the card that a notebook shows: plain fields as facts, all others as tables."""
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
    """Return the text for the value of a field.

    Args:
        name: The name of the field. If it ends in `nbytes`, the value is a size.
        value: The value.
    """
    # This comes first, because a boolean is an integer for Python.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        # A negative number is not a size, and is shown as it is.
        is_size = name.endswith("nbytes") and value >= 0
        if not is_size:
            return f"{value:,}"
        if value >= UNLIMITED_NBYTES:
            return "any"
        return format_nbytes(value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    if value is None or value == "":
        return "–"
    return str(value)


def _render_field_table(name: str, value: object) -> str:
    """Return a field that has rows as an HTML table with a title. The result is empty without rows.

    Args:
        name: The name of the field.
        value: A mapping, a tuple or a list. Each item becomes a row. Other values have no rows.
    """
    if isinstance(value, Mapping):
        value = tuple((str(key), item) for key, item in value.items())
    if not isinstance(value, tuple | list) or not value:
        return ""

    # Rows may have different columns. The table has all of them, in the order of their first rows.
    rows = [_flatten_row(item) for item in value[:MAX_ROWS]]
    columns: list[str] = []
    for row in rows:
        columns += [column for column in row if column not in columns]
    columns = columns[:MAX_COLUMNS]

    # A bar shows a value relative to the largest one of its column.
    labels: list[str] = []
    max_values: list[float] = []
    for column in columns:
        labels.append(_make_label(column) if column else "")
        max_values.append(max(_get_bar_size(row.get(column)) for row in rows))

    table_rows: list[list[Cell]] = []
    for row in rows:
        cells: list[Cell] = []
        for column, max_value in zip(columns, max_values, strict=True):
            cells.append(_make_cell(column, row.get(column), max_value))
        table_rows.append(cells)

    row_count_html = f'<span style="{FAINT}">{len(value):,}</span>'
    title_html = render_text(_make_label(name))
    heading = f'<div style="margin-top:.3em">{title_html} {row_count_html}</div>'
    return heading + render_table(labels, table_rows, len(value))


def _get_bar_size(value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return abs(value)
    return 0.0


def _flatten_row(item: object) -> dict[str, object]:
    """Return the values of a row of a table, by the names of their columns.

    Args:
        item: A result with fields, a pair of a name and a value, or any other value. The latter is
            shown in a column without a name.
    """
    fields = _get_fields(item)
    if fields:
        # A field that is a result with fields itself is replaced by these.
        columns: dict[str, object] = {}
        for name, value in fields.items():
            inner_fields = _get_fields(value)
            if inner_fields:
                columns.update(inner_fields)
            else:
                columns[name] = value
        return columns

    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        name, value = item
        # An integer in such a pair is shown as a size, such as that of a file.
        value_column = "nbytes" if isinstance(value, int) else ""
        return {"name": name, value_column: value}
    if _is_plain(item):
        return {"": str(item)}
    return {"": type(item).__name__}


def _make_cell(column: str, value: object, max_value: float) -> Cell:
    """Return the cell for a value.

    Args:
        column: The name of the column.
        value: The value of the row in this column.
        max_value: The largest absolute value in the column.
    """
    if isinstance(value, tuple):
        if column == "histogram":
            return Bars(value)
        return _list_items(value)

    # Sizes and fractions have a bar behind them.
    is_size = type(value) is int and column.endswith("nbytes")
    if isinstance(value, int | float) and (is_size or column in ("relative", "zeros")):
        text = _render_fact(column, value)
        if is_size and value < 0:
            text = str(value)
        # If all values of the column are 0, no bar has a length.
        fraction = value / max_value if max_value else 0.0
        return Bar(text, fraction)
    if _is_plain(value):
        return _render_fact(column, value)
    return type(value).__name__


def _list_items(items: tuple[object, ...]) -> str:
    """Return the first items of a tuple as a text: `[4, 3]` for a shape, `a, b` for other items."""
    if len(items) <= MAX_ITEMS and all(type(item) is int for item in items):
        return str(list(items))
    texts: list[str] = []
    for item in items[:MAX_ITEMS]:
        if isinstance(item, tuple):
            texts.append(str(list(item)))
        elif _is_plain(item):
            texts.append(str(item))
        else:
            texts.append("…")
    text = ", ".join(texts)
    if len(items) > MAX_ITEMS:
        text += " …"
    return text
