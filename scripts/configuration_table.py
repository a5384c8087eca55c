"""Write the tables of docs/configuration.md from the rules in aiomooncake/_dialects.

Run it from a checkout: ``.venv/bin/python scripts/configuration_table.py``. A test compares.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Final

from aiomooncake._dialects import RULES
from aiomooncake._dialects.rules import Key, Rules
from aiomooncake._dialects.wheel import SETUP
from aiomooncake._settings import SETTINGS
from aiomooncake.config import StoreConfig

PAGE: Final = Path(__file__).parent.parent / "docs" / "configuration.md"
_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def columns() -> dict[str, Rules]:
    """Return the rules by the names of their columns and tables."""
    return dict(RULES.items()) | {"setup": SETUP}


def shown(field: str, value: Any) -> str:
    """Return a value for a table: a size with its unit, anything else as code."""
    if field.endswith("_size"):
        unit, name = (1 << 30, "GiB") if value >= 1 << 30 else (1 << 20, "MiB")
        return f"{value / unit:g} {name}"
    if value == "":
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def default_of(key: Key) -> str:
    """Return what the project takes when a key is not given."""
    if key.shown:
        return key.shown
    if key.variable_default is not None:
        return f"required in a file, else {shown(key.into, key.variable_default)}"
    if key.required:
        return "required"
    return "–" if key.default is None else shown(key.into, key.default)


def row(*cells: str) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"


def codes(names: tuple[str, ...]) -> str:
    """Return names as code, one below the other."""
    return "<br>".join(f"`{name}`" for name in names) or "–"


def overview() -> list[str]:
    """Return the table of the fields' defaults by dialect."""
    own = {spec.name: spec.default for spec in dataclasses.fields(StoreConfig)}
    lines = [
        row("field", "our own", *(f"`{name}`" for name in columns())),
        row(*["---"] * (len(columns()) + 2)),
    ]
    for field, setting in SETTINGS.items():
        cells = []
        for rules in columns().values():
            keys = [key for key in rules.keys if key.into == field]
            cells.append(default_of(keys[0]) if keys else "")
        if any(cells):
            mine = own[field]
            if mine is dataclasses.MISSING:
                text = "required"
            else:
                text = "–" if mine is None else shown(field, setting.parse(mine, field))
            lines.append(row(f"`{field}`", text, *cells))
    return lines


def table(rules: Rules) -> list[str]:
    """Return the table of one dialect's keys."""
    lines = [row("key", "variable", "field", "default", "note"), row(*["---"] * 5)]
    for key in rules.keys:
        if key.into in SETTINGS:
            field = f"`{key.into}`"
        else:
            field = "see the note" if key.into else "ignored"
        variables = codes(key.variables)
        lines.append(row(codes(key.names), variables, field, default_of(key), key.note))
    return lines


def page(text: str) -> str:
    """Return the page with fresh tables between its marks."""

    def fresh(mark: re.Match[str]) -> str:
        lines = overview() if mark[2] == "defaults" else table(columns()[mark[2]])
        return mark[1] + "\n".join(("", *lines, "", mark[3]))

    return _TABLE.sub(fresh, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
