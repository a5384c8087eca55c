"""Write the maps of modules and scripts in CONTRIBUTING.md from what each says that it is.

Run it from a checkout: ``.venv/bin/python scripts/module_map.py``. A test compares.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ROOT / "aiomooncake"
PAGE: Final = ROOT / "CONTRIBUTING.md"
_MAP: Final = re.compile(r"(<!-- map: (\w+) -->\n).*?(<!-- end of map -->)", re.DOTALL)


def what_it_is(path: Path) -> str:
    """Return the first line of a docstring, of a shell script the first comment; for a table."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        line = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    else:
        (line,) = re.findall(r"^# (?!shellcheck)(.*)", text, re.MULTILINE)[:1]
    return re.sub(r":\w+:`(\w+)`", r"`\1`", line).replace("``", "`").replace("|", r"\|")


def scripts() -> list[str]:
    """Return a table of the scripts."""
    paths = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())
    rows = [f"| `scripts/{path.name}` | {what_it_is(path)} |" for path in paths]
    return ["", "| script | what it does |", "|---|---|", *rows]


def modules() -> list[str]:
    """Return a table for the package, and one for each folder in it."""
    lines = []
    for folder in (PACKAGE, *sorted(path for path in PACKAGE.rglob("*") if path.is_dir())):
        paths = sorted(folder.glob("*.py"))
        if paths:
            name = folder.relative_to(ROOT).as_posix()
            lines += ["", f"**`{name}/`**", "", "| module | what it is |", "|---|---|"]
            lines += [f"| `{path.stem}` | {what_it_is(path)} |" for path in paths]
    return lines


def page(text: str) -> str:
    """Return the page with fresh maps between their marks."""
    maps = {"modules": modules, "scripts": scripts}
    return _MAP.sub(lambda mark: mark[1] + "\n".join((*maps[mark[2]](), "", mark[3])), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
