"""Write the tables of docs/versions.md from docs/versions.json, what ``scripts/test-matrix`` found.

Run it from a checkout: ``.venv/bin/python scripts/versions_table.py``. A test compares.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parent.parent / "docs"
PAGE: Final = DOCS / "versions.md"
RECORDS: Final = DOCS / "versions.json"
_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Records = Mapping[str, Any]


def row(*cells: str) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"


def _shown(answer: str) -> str:
    return answer if answer == "yes" else f"`{answer}`"


def verbs(records: Records) -> list[str]:
    """Return the table of verbs, in each mode and with each engine."""
    columns: dict[str, Mapping[str, str] | str] = {"in memory": records["memory"]}
    for engine, found in records["engines"].items():
        columns[engine] = found["real"]
    for engine, found in records["engines"].items():
        columns[f"{engine}, dummy"] = found["dummy"]
    lines = [row("verb", *columns), row(*["---"] * (len(columns) + 1))]
    for verb in records["memory"]:
        name, _, more = verb.partition(" ")
        cells = (
            "refused" if isinstance(found, str) else _shown(found[verb])
            for found in columns.values()
        )
        lines.append(row(f"`{name}` {more}".strip(), *cells))
    return lines


def options(records: Records) -> list[str]:
    """Return the table of options, and of what else differs."""
    engines: Mapping[str, Any] = records["engines"]
    newest = list(engines.values())[-1]
    lines = [row("", *engines), row(*["---"] * (len(engines) + 1))]
    direct = ["yes" if found["direct"] else "no" for found in engines.values()]
    lines.append(row("set-up and close leave the loop free", *direct))
    shared: dict[tuple[str, ...], list[str]] = {}
    for option in newest["options"]:
        cells = tuple(
            "yes" if option in found["options"] else "refused" for found in engines.values()
        )
        shared.setdefault(cells, []).append(f"`{option}`")
    lines += [row(", ".join(names), *cells) for cells, names in shared.items()]
    count = [str(len(found["methods"].split())) for found in engines.values()]
    lines.append(row("methods of `store.engine`", *count))
    return lines


def methods(records: Records) -> list[str]:
    """Return the table of the binding's methods that not every engine has."""
    engines = {name: set(found["methods"].split()) for name, found in records["engines"].items()}
    known: set[str] = set()
    lines = [row("from", "methods"), row("---", "---")]
    for number, (engine, names) in enumerate(engines.items()):
        if number:
            new = sorted(names - known)
            lines.append(row(engine, ", ".join(f"`{name}`" for name in new) or "none"))
        known |= names
    return lines


def runs(records: Records) -> list[str]:
    """Return the table of the tests that passed."""
    series = sorted(
        {each for found in records["runs"].values() for each in found},
        key=lambda each: tuple(map(int, each.split("."))),
    )
    lines = [row("engine", *(f"CPython {each}" for each in series))]
    lines.append(row(*["---"] * (len(series) + 1)))
    for engine, found in records["runs"].items():
        lines.append(row(engine, *(_counted(found.get(each)) for each in series)))
    return lines


def _counted(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "not run"
    lacking = counts.get("xfailed", 0)
    return f"{counts['passed']} passed" + (f", {lacking} refused" if lacking else "")


TABLES: Final[Mapping[str, Callable[[Records], list[str]]]] = {
    "verbs": verbs,
    "options": options,
    "methods": methods,
    "runs": runs,
}


def page(text: str) -> str:
    """Return the page with fresh tables between its marks."""
    records: Records = json.loads(RECORDS.read_text(encoding="utf-8"))

    def fresh(mark: re.Match[str]) -> str:
        return mark[1] + "\n".join(("", *TABLES[mark[2]](records), "", mark[3]))

    return _TABLE.sub(fresh, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
