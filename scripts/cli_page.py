"""Write the tables of docs/cli.md: the options of each command, and the exit codes.

Run it from a checkout: ``.venv/bin/python scripts/cli_page.py``. A test compares.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import click

from aiomooncake.cli.commands import cli
from aiomooncake.cli.exits import EXITS

PAGE: Final = Path(__file__).parent.parent / "docs" / "cli.md"
_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def row(*cells: str) -> str:
    """Return one line of a table."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def options(command: click.Command) -> list[str]:
    """Return the arguments and options of a command."""
    lines = [row("argument, option", "default", "what it is"), row(*["---"] * 3)]
    for param in command.params:
        if isinstance(param, click.Option):
            names = ", ".join((*param.opts, *param.secondary_opts))
            shown = f"`{names} {param.metavar}`" if param.metavar else f"`{names}`"
            lines.append(row(shown, default(param), param.help or ""))
        else:
            name = (param.metavar or (param.name or "").upper()).strip("[]")
            lines.append(row(f"`{name}`", default(param), ""))
    return lines


def default(param: click.Parameter) -> str:
    """Return what counts where a parameter is not given."""
    if param.required:
        return "required"
    if not (isinstance(param, click.Option) and param.show_default):
        return ""
    given = param.default if param.multiple else [param.default]
    assert isinstance(given, (list, tuple))  # noqa: S101 - for the type checker
    return ", ".join(
        f"`{value:g}`" if isinstance(value, float) else f"`{value}`" for value in given
    )


def exits() -> list[str]:
    """Return the exit codes."""
    lines = [row("exit code", "word in `--json`", "it means"), row(*["---"] * 3)]
    for each in EXITS:
        word = f"`{each.cause}`" if isinstance(each.cause, str) else ""
        lines.append(row(str(each.code), word, each.meaning))
    return lines


def page(text: str) -> str:
    """Return the page with its tables made anew."""

    def table(found: re.Match[str]) -> str:
        name = found[2]
        lines = exits() if name == "exits" else options(cli.commands[name])
        return f"{found[1]}\n" + "\n".join(lines) + f"\n\n{found[3]}"

    return _TABLE.sub(table, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
