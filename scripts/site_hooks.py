"""What the documentation site needs beside MkDocs and its plugins.

Pages are plain Markdown with relative links, so that a forge shows them as they are. Some of these
links lead out of ``docs/``, to a file or folder of the repository: the site gets a copy of each
such file, a page of each that is Markdown, and a list of the files of a folder without README.
Docstrings name other names by ``:class:`` and ``:meth:``, which become links of the site. What
can't be found stays as it is, and ``--strict`` fails.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import griffe
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parent.parent
_PLACE: Final = "repository"
_LINK: Final = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_ROLE: Final = re.compile(r":(?:class|meth|func|attr|data|exc|mod):`(~?[\w.]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages lead to, and those that these lead to."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for path in _leads_to(page):
            place = f"{_PLACE}/{path}"
            if files.get_file_from_path(place) is not None:
                continue
            if (ROOT / path).is_file():
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
            else:
                files.append(File.generated(config, place, content=_listing(path)))
            if path.endswith(".md"):
                waiting.append(place)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to files of the repository into links to their copies."""
    here = page.file.src_uri

    def turn(link: re.Match[str]) -> str:
        path = _path_in_repository(here, link[2])
        if path is None:
            return link[0]
        place = path.removeprefix("docs/") if path.startswith("docs/") else f"{_PLACE}/{path}"
        return f"{link[1]}{posixpath.relpath(place, posixpath.dirname(here) or '.')}{link[3]}"

    return _LINK.sub(turn, markdown)


def _leads_to(src_uri: str) -> Iterator[str]:
    """Name the files outside of ``docs/`` that a page leads to."""
    source = _source(src_uri)
    if source.is_file():
        text = source.read_text(encoding="utf-8")
    else:
        text = _listing(source.relative_to(ROOT).as_posix())
    for link in _LINK.finditer(text):
        path = _path_in_repository(src_uri, link[2])
        if path is not None and not path.startswith("docs/"):
            yield path


def _listing(readme: str) -> str:
    """Write the README that a folder lacks: links to its files."""
    folder = (ROOT / readme).parent
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    links = [f"- [`{path.as_posix()}`]({path.as_posix()})" for path in paths]
    return "\n".join((f"# {folder.relative_to(ROOT).as_posix()}/", "", *links, ""))


def _source(src_uri: str) -> Path:
    inside = src_uri.removeprefix(f"{_PLACE}/")
    return ROOT / inside if inside != src_uri else ROOT / "docs" / src_uri


def _path_in_repository(src_uri: str, target: str) -> str | None:
    """Find the file that a link leads to, from the root; a folder's is its README."""
    if "://" in target or target.startswith(("/", "mailto:")):
        return None
    here = _source(src_uri).parent.relative_to(ROOT).as_posix()
    path = posixpath.normpath(posixpath.join(here, target))
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


class SphinxRoles(griffe.Extension):
    """Turns the roles of docstrings into links to where the site explains the name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of whatever was loaded."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _ROLE.sub(lambda role: _reference(obj, role[1]), text)


def _reference(obj: griffe.Object, name: str) -> str:
    """Write a name as a link to what the site says of it, or as code where it says nothing."""
    short = name.startswith("~")
    name = name.lstrip("~")
    shown = f"`{name.rpartition('.')[2] if short else name}`"
    head, _, rest = name.removeprefix("aiomooncake.").partition(".")
    if head in _public_names():
        # One name is that of a module too, which hides what the package has by it.
        module = f".{head}" if (ROOT / "aiomooncake" / f"{head}.py").exists() else ""
        return f"[{shown}][aiomooncake{module}.{head}{'.' * bool(rest)}{rest}]"
    owner = obj if obj.is_class else obj.parent
    if owner is not None and owner.name in _public_names() and name in owner.members:
        return f"[{shown}][aiomooncake.{owner.name}.{name}]"
    return shown


def _public_names() -> frozenset[str]:
    text = (ROOT / "aiomooncake" / "__init__.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r'^    "(\w+)",$', text, re.MULTILINE))
