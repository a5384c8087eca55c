"""Write the tables of docs/errors.md from aiomooncake/errors.py and its table of codes.

Run it from a checkout: ``.venv/bin/python scripts/errors_table.py``. A test compares.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from aiomooncake import errors
from aiomooncake._codes import CODES

PAGE: Final = Path(__file__).parent.parent / "docs" / "errors.md"
_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def row(*cells: str) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"


def yes(value: bool) -> str:  # noqa: FBT001 - what it is about
    """Return a truth as a word."""
    return "yes" if value else "no"


def bases(cls: type[errors.MooncakeError]) -> str:
    """Name the builtins and the other classes of ours that an error derives from."""
    roots = (errors.MooncakeError, Exception)
    names = [base.__name__ for base in cls.__bases__ if base not in roots]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names)) or "–"


def classes() -> list[str]:
    """Return the table of classes, in the order in which they are written."""
    lines = [row("class", "is also", "retryable", "it means"), row(*["---"] * 4)]
    for name, cls in vars(errors).items():
        if not (isinstance(cls, type) and issubclass(cls, errors.MooncakeError)):
            continue
        coded = {info.retryable for info in CODES.values() if info.error == name}
        if cls is errors.BatchError:
            again = "if each of its errors is"
        elif len(coded) > 1 or cls is errors.MooncakeError:
            again = "by code"
        else:
            again = yes(coded.pop() if coded else cls._retryable)
        summary = (cls.__doc__ or "").partition("\n")[0].replace("``", "`")
        lines.append(row(f"`{name}`", bases(cls), again, summary))
    return lines


def codes() -> list[str]:
    """Return the table of codes, by number."""
    lines = [row("code", "name", "class", "retryable", "what to do"), row(*["---"] * 5)]
    for code, info in sorted(CODES.items(), reverse=True):
        if code:
            name, again = f"`{info.name}`", yes(info.retryable)
            lines.append(row(str(code), name, f"`{info.error}`", again, info.advice))
    return lines


TABLES: Final[Mapping[str, Callable[[], list[str]]]] = {"classes": classes, "codes": codes}


def page(text: str) -> str:
    """Return the page with fresh tables between its marks."""
    return _TABLE.sub(lambda mark: mark[1] + "\n".join(("", *TABLES[mark[2]](), "", mark[3])), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
