"""Write the table of docs/observability.md from the metrics of aiomooncake.prometheus.

Run it from a checkout: ``.venv/bin/python scripts/metrics_table.py``. A test compares.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from aiomooncake.prometheus import METRICS

PAGE: Final = Path(__file__).parent.parent / "docs" / "observability.md"
_TABLE: Final = re.compile(r"(<!-- table: metrics -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table() -> list[str]:
    """Return the table, one line per metric."""
    lines = ["| metric | kind | labels | what it tells |", "| --- | --- | --- | --- |"]
    for spec in METRICS:
        kind = "gauge, always 1" if spec.kind == "info" else spec.kind
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        lines.append(f"| `{spec.exported}` | {kind} | {labels} | {spec.help} |")
    return lines


def page(text: str) -> str:
    """Return the page with a fresh table between its marks."""
    return _TABLE.sub(lambda mark: mark[1] + "\n".join(("", *table(), "", mark[2])), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
