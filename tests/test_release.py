"""What would be released is whole and works without extras; all of it: scripts/release_check."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Final

import pytest

import aiomooncake
from scripts import release_check
from scripts.release_check import CheckError, Release

ROOT: Final = Path(__file__).parent.parent

pytestmark = pytest.mark.timeout(180)  # one of them installs from the package index


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return Release.build(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def metadata(release: Release) -> Message:
    with zipfile.ZipFile(release.wheel) as archive:
        name = f"aiomooncake-{aiomooncake.__version__}.dist-info/METADATA"
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_the_package_and_nothing_else(release: Release) -> None:
    release.check_wheel()


def test_the_sdist_has_every_file(release: Release) -> None:
    release.check_sdist()


def test_a_missing_file_is_noticed(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    files = release_check.project_files()
    wanted = files | {"aiomooncake/forgotten.py"}
    monkeypatch.setattr(release_check, "project_files", lambda: wanted)
    with pytest.raises(CheckError, match=r"^the sdist lacks aiomooncake/forgotten\.py$"):
        release.check_sdist()
    with pytest.raises(CheckError, match=r"^the wheel lacks aiomooncake/forgotten\.py$"):
        release.check_wheel()
    monkeypatch.setattr(release_check, "project_files", lambda: files - {"README.md"})
    with pytest.raises(CheckError, match=r"^the sdist should not have README\.md$"):
        release.check_sdist()


def test_without_extras_it_needs_only_anyio_and_says_what_others_need(release: Release) -> None:
    release.check_base()


def test_every_extra_is_checked(release: Release, metadata: Message) -> None:
    names = [name for name, _ in release.checks()]
    tried = {name.removeprefix("extra ") for name in names if name.startswith("extra ")}
    tried |= {"torch", "test-torch"}  # of several GB; the tests themselves need them
    assert tried | set(release_check.ENGINES) == set(metadata.get_all("Provides-Extra", []))


def test_a_failed_check_fails_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the others are made all the same."""

    def broken(_: Release) -> None:
        raise CheckError("as staged")

    monkeypatch.setattr(Release, "check_base", broken)
    monkeypatch.setattr(Release, "check_cli", lambda _: None)
    kept = tmp_path / "dist"
    assert release_check.main(["--keep", str(kept), "--only", "base", "cli"]) == 1
    said = capsys.readouterr().out
    assert "FAILED  no extra\nas staged\nok      extra cli" in said
    assert said.endswith("1 failed\n")
    assert sorted(path.suffix for path in kept.iterdir()) == [".gz", ".whl"]


# --- metadata -----------------------------------------------------------------------------------


def test_the_version_is_written_in_one_place(release: Release, metadata: Message) -> None:
    version = aiomooncake.__version__
    assert metadata["Version"] == release_check.version() == version
    assert importlib.metadata.version("aiomooncake") == version, "install it again"
    assert release.sdist.name == f"aiomooncake-{version}.tar.gz"
    written = re.compile(r"^(?:__version__|version) *= *[\"'](\d.*)[\"']", re.MULTILINE)
    places = [ROOT / "pyproject.toml", *(ROOT / "aiomooncake").rglob("*.py")]
    found = [path.name for path in places if written.search(path.read_text(encoding="utf-8"))]
    assert found == ["_version.py"]


def test_what_an_index_shows(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata["Keywords"].count(",") >= 5
    classifiers = metadata.get_all("Classifier", [])
    assert {"Typing :: Typed", "Framework :: AsyncIO", "Framework :: Pytest"} <= set(classifiers)
    assert not [each for each in classifiers if each.startswith("License ::")]  # PEP 639


def test_the_plugin_and_the_command_are_registered(release: Release) -> None:
    with zipfile.ZipFile(release.wheel) as archive:
        name = f"aiomooncake-{aiomooncake.__version__}.dist-info/entry_points.txt"
        text = archive.read(name).decode()
    assert "[pytest11]\npytest_aiomooncake = pytest_aiomooncake" in text
    assert "[console_scripts]\naiomooncake = aiomooncake.cli:main" in text


def test_the_script_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/release_check.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    for option in ("--only", "--keep", "--tests"):
        assert option in done.stdout
