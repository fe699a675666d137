"""Build the documentation as a site: ``python docs/site/build.py [FOLDER]``.

The pages are those of the repository, whose links lead to files of the repository. A copy is made
of them in which the README is the first page, and links lead to pages of the site, or to the source
where there is no page. Zensical builds the copy; links and anchors that lead nowhere are errors.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = Path(__file__).with_name("mkdocs.yml")
URLS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Pages of the site by the files of the repository's top level that they are made of."""

FIGURES = DOCS / "figures"

_LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_LEFT_OUT = ("site", "plugins", "build")


def pages() -> Iterator[tuple[str, str]]:
    """Yield the file of each page, and the page's place on the site."""
    yield from TOP.items()
    for file in sorted(DOCS.rglob("*.md")):
        if not {*file.relative_to(DOCS).parts} & {*_LEFT_OUT}:
            yield str(file.relative_to(ROOT)), str(file.relative_to(DOCS))


_places = cache(lambda: dict(pages()))


def target(source: str, link: str) -> str:
    """Where a link leads on the site.

    Args:
        source: the page's file in the repository.
        link: a path relative to it.
    """
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    places = _places()
    if FIGURES in (ROOT / file).parents:
        places = {**places, file: posixpath.relpath(file, "docs")}
    if file in places:
        return posixpath.relpath(places[file], posixpath.dirname(places[source]) or ".")
    if not (ROOT / file).exists():
        return link  # The strict build names it.
    kind = "tree" if (ROOT / file).is_dir() else "blob"
    return f"{URLS['Source']}/{kind}/main/{file}"


def page_of(source: str) -> str:
    """The text of a page, whose links are those of the site."""
    text = (ROOT / source).read_text()
    return _LINK.sub(lambda link: f"]({target(source, link[1])}{link[2] or ''})", text)


def in_nav(nav: list[object]) -> Iterator[str]:
    """Yield the pages that a table of contents lists."""
    for each in nav:
        if isinstance(each, dict):
            for below in each.values():
                yield from in_nav(below) if isinstance(below, list) else [str(below)]
        else:
            yield str(each)


def unlisted() -> list[str]:
    """Pages that the table of contents lacks, or lists and that do not exist."""
    listed = [*in_nav(yaml.safe_load(CONFIG.read_text())["nav"])]
    return sorted({place for _, place in pages()} ^ {*listed})


def prepare(folder: Path) -> Path:
    """Write the source of the site, and return its configuration."""
    for source, place in pages():
        (folder / "docs" / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / "docs" / place).write_text(page_of(source))
    shutil.copytree(CONFIG.parent / "stylesheets", folder / "docs" / "stylesheets")
    shutil.copytree(FIGURES, folder / "docs" / FIGURES.name)
    config = yaml.safe_load(CONFIG.read_text())
    config |= {"site_url": f"{URLS['Documentation']}/", "repo_url": URLS["Source"]}
    config |= {"docs_dir": "docs", "site_dir": "site"}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder / "mkdocs.yml"


def build(config: Path) -> Path:
    """Build a site strictly, beside its configuration.

    Raises:
        SystemExit: with what is wrong with it.
    """
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        sys.exit(re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr))
    return config.parent / "site"


def main() -> None:
    """Build the site in the folder that is named, by default ``build/site``."""
    if wrong := unlisted():
        sys.exit(f"{CONFIG.relative_to(ROOT)}: nav and pages differ in {', '.join(wrong)}")
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    with tempfile.TemporaryDirectory() as folder:
        made = build(prepare(Path(folder)))
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(made, out)
    print(f"{out / 'index.html'}")


if __name__ == "__main__":
    main()
