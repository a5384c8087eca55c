"""The documentation is whole: it builds strictly, has no dead link, and is current."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Final, get_args
from urllib.parse import unquote, urldefrag, urljoin

import pytest

import aiomooncake
import aiomooncake.errors
import aiomooncake.testing
from aiomooncake.cli.exits import EXITS
from aiomooncake.diagnosis import DiagnosisKind
from aiomooncake.observe import HealthState

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"
SITE: Final = "http://site"
FENCES: Final = re.MULTILINE | re.DOTALL


def script(name: str) -> ModuleType:
    """Import a script of the checkout."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the site -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as a reader of this page does, and fail on any warning."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # an advertisement of the theme's makers
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Found(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in {"href", "src"} and tag != "base":
                self.links.add(value)
            elif value and name in {"id", "name"}:
                self.places.add(value)


@pytest.mark.timeout(180)
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {
        f"{SITE}/{path.relative_to(site).as_posix()}": Found(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"  # its links are those of the site's root
    }
    assert len(pages) > 30
    dead = []
    for page, found in pages.items():
        for link in found.links:
            url, place = urldefrag(urljoin(page, link))
            if not url.startswith(f"{SITE}/"):
                continue
            path = unquote(url.removeprefix(f"{SITE}/"))
            if not path or path.endswith("/"):
                path += "index.html"
            there = pages.get(f"{SITE}/{path}")
            ok = (site / path).is_file() and (
                not place or there is None or unquote(place) in there.places
            )
            if not ok:
                dead.append(f"{page}: {link}")
    assert not dead, "\n".join(dead)


@pytest.mark.timeout(180)
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img|iframe)[^>]*src="https?:', text), path
        assert not re.search(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="https?:', text)


@pytest.mark.timeout(180)
def test_docstrings_are_shown_as_text_for_readers(site: Path) -> None:
    for path in (site / "reference").rglob("*.html"):
        assert not re.search(r":(?:class|meth|func|mod|attr|data|exc):", path.read_text()), path


# --- the pages as a forge shows them --------------------------------------------------------------

MARKDOWN: Final = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_the_plain_page_lead_to_files(path: Path) -> None:
    for target, place in links(path):
        there = path if not target else Path(os.path.normpath(path.parent / target))
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        if place and there.suffix == ".md":
            assert place in places(there), f"{target}#{place}"


def links(path: Path) -> Iterator[tuple[str, str]]:
    """Find the links of a Markdown page to other files and to itself."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=FENCES)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            file, _, place = target.partition("#")
            yield file, place


def places(path: Path) -> set[str]:
    """Find the anchors that a forge makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=FENCES)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


# --- tables and names -----------------------------------------------------------------------------


def test_tables_of_errors_are_current() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert script("errors_table").page(text) == text, "run scripts/errors_table.py"


def test_every_diagnosis_is_in_the_guide() -> None:
    text = (DOCS / "warmup.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|(.*)\|$", text, re.MULTILINE)
    shown = {kind: int(code) for kind, code, _ in rows}
    exits = {str(each.cause): each.code for each in EXITS if isinstance(each.cause, DiagnosisKind)}
    assert shown == exits
    assert set(shown) == {str(kind) for kind in DiagnosisKind}
    for _, _, rest in rows:  # symptom, how it is found, cure
        assert all(cell.strip() for cell in rest.split("|"))
        assert rest.count("|") == 2


def test_policy_in_the_guide_is_the_default() -> None:
    text = (DOCS / "warmup.md").read_text(encoding="utf-8")
    policy = aiomooncake.WarmupPolicy()
    for field in policy.__dataclass_fields__:
        assert f"`{field}`" in text
    shown = f"| {policy.initial_delay} s, {policy.backoff}, {policy.max_delay} s |"
    assert shown in text
    assert f"| `timeout` | {policy.timeout:g} s |" in text
    assert f"| `value_size` | {policy.value_size} |" in text


def test_every_state_of_health_is_on_the_page_for_operators() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    for state in get_args(HealthState):
        assert f"`{state}`" in text, state


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    for name in aiomooncake.__all__:
        if name == "__version__":
            continue
        there = {f"aiomooncake.{name}", f"aiomooncake.{name}.{name}"} & shown
        assert there or name in aiomooncake.errors.__all__, name
    for name in aiomooncake.testing.__all__:
        assert f"aiomooncake.testing.{name}" in shown, name
    for module in ("aiohttp", "compat", "errors", "prometheus", "tracing"):
        assert f"aiomooncake.{module}" in shown


def test_every_verb_is_on_a_page() -> None:
    text = "\n".join(path.read_text() for path in DOCS.glob("*.md"))
    for name in dir(aiomooncake.Store):
        if not name.startswith("_"):
            assert re.search(rf"\b{name}\b", text), name


def test_every_placement_option_is_on_its_page() -> None:
    text = (DOCS / "placement.md").read_text(encoding="utf-8")
    for name in aiomooncake.ReplicateConfig.__dataclass_fields__:
        if name not in {"_", "preferred_segment", "preferred_nof_segments"}:  # in the reference
            assert f"`{name}`" in text, name
