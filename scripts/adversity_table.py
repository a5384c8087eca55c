"""Write the tables of docs/faults.md from the expectations in tests/adversity/matrix.py.

Run it from a checkout: ``.venv/bin/python scripts/adversity_table.py``. A test compares.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.adversity.matrix import AT_ONCE, FAMILIES, GROUPS, USUAL, Cell, Family  # noqa: E402

PAGE: Final = ROOT / "docs" / "faults.md"
_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def row(*cells: str) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"


def shown(cell: Cell) -> str:
    """Return what a cell of a table says."""
    if cell == USUAL:
        return "as usual"
    text = " or ".join(re.sub(r"(\w+Error)", r"`\1`", result) for result in cell.results)
    return text if cell.time == AT_ONCE else f"{text}, *{cell.time.name}*"


def table(family: Family) -> list[str]:
    """Return the table of a family; verbs of one group for which the same holds share a row."""
    lines = [
        row("verb", *(column.title for column in family.columns)),
        row(*["---"] * (len(family.columns) + 1)),
    ]
    for verbs in GROUPS.values():
        rows: dict[tuple[str, ...], list[str]] = {}
        for verb in verbs:
            cells = tuple(shown(column.cell(verb)) for column in family.columns)
            name, _, more = verb.partition(" ")
            rows.setdefault(cells, []).append(f"`{name}` {more}".strip())
        lines += [row(", ".join(names), *cells) for cells, names in rows.items()]
    health = (" or ".join(f"`{state}`" for state in each.health) for each in family.columns)
    lines.append(row("**`health().state`**", *health))
    return lines


def page(text: str) -> str:
    """Return the page with fresh tables between its marks."""
    families = {family.name: family for family in FAMILIES}

    def fresh(mark: re.Match[str]) -> str:
        return mark[1] + "\n".join(("", *table(families[mark[2]]), "", mark[3]))

    return _TABLE.sub(fresh, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
