"""What stands in the blocks of the documentation, and a program that runs those of one page.

Three kinds of Python blocks:

* **tests**: they define ``test_…`` functions, and run under pytest with the plugin's fixtures. A
  block that begins with ``# conftest.py`` is the file of that name beside the tests that follow.
* **fragments**: they await at their top level. Those of a page run one after the other in a
  coroutine, with ``store`` an open store of the real engine, and see each other's names.
* **programs**: all others. Each runs by itself, in the order of the page, in a process of its own.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Final

import aiomooncake

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"

_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE_NAME: Final = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        page: Name of the page's file, without its end.
        line: Where its first line stands.
        language: What the fence says.
        text: The block.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def kind(self) -> str:
        """Tell a Python block's kind, or the language of another one."""
        if self.language != "python":
            return self.language
        tree = self._tree()
        if "def test_" in self.text or _FILE_NAME.match(self.text):
            return "tests"
        return "fragments" if any(map(_awaits, tree.body)) else "programs"

    def code(self) -> CodeType:
        """Compile a fragment; the lines of its errors are those of the page."""
        tree = ast.increment_lineno(self._tree(), self.line - 1)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(tree, str(DOCS / f"{self.page}.md"), "exec", flags=flags)
        return code

    def _tree(self) -> ast.Module:
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = compile(self.text, self.place, "exec", flags=flags)
        assert isinstance(tree, ast.Module)
        return tree


@dataclass
class Page:
    """The Python blocks of a page, as they are run.

    Attributes:
        suites: Files of tests, by name.
        fragments: In their order.
        programs: Likewise.
        others: Blocks that are not Python.
    """

    suites: list[dict[str, str]] = field(default_factory=list)
    fragments: list[Block] = field(default_factory=list)
    programs: list[Block] = field(default_factory=list)
    others: list[Block] = field(default_factory=list)


def blocks(path: Path) -> list[Block]:
    """Find the blocks of a page."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(DOCS).with_suffix("").as_posix()
    return [
        Block(name, text.count("\n", 0, found.start(2)) + 1, found[1], found[2])
        for found in _BLOCK.finditer(text)
    ]


def pages() -> dict[str, Page]:
    """Sort the blocks of all pages."""
    sorted_pages: dict[str, Page] = {}
    for path in sorted(DOCS.rglob("*.md")):
        page = Page()
        named: dict[str, str] = {}
        for block in blocks(path):
            kind = block.kind
            if kind == "fragments":
                page.fragments.append(block)
            elif kind == "programs":
                page.programs.append(block)
            elif kind != "tests":
                page.others.append(block)
            elif file := _FILE_NAME.match(block.text):
                named[file[1]] = block.text
            else:
                page.suites.append({**named, "test_page.py": block.text})
                named = {}
        assert not named, f"{path.name}: no tests follow {', '.join(named)}"
        sorted_pages[path.relative_to(DOCS).with_suffix("").as_posix()] = page
    return sorted_pages


def _awaits(statement: ast.stmt) -> bool:
    """Whether a statement awaits outside of any function."""
    if isinstance(statement, (ast.AsyncFor, ast.AsyncWith)):
        return True
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    return any(
        isinstance(node, ast.Await) or _awaits(node)  # type: ignore[arg-type]  # any node will do
        for node in ast.iter_child_nodes(statement)
    )


async def _run_fragments(page: str) -> None:
    fragments = pages()[page].fragments
    linecache.checkcache()
    async with (
        aiomooncake.LocalCluster() as cluster,
        aiomooncake.connect(
            cluster.address,
            global_segment_size="128mb",
            master_metrics_port=cluster.metrics_port,
            warmup=True,
        ) as store,
    ):
        names: dict[str, Any] = {"store": store, "aiomooncake": aiomooncake, "__name__": page}
        for fragment in fragments:
            result = eval(fragment.code(), names)
            if inspect.isawaitable(result):
                await result


if __name__ == "__main__":
    asyncio.run(_run_fragments(sys.argv[1]))
