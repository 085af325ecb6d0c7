"""A small client of the Python package index, for environments without pip.

Speaks the simple repository API, HTML (PEP 503) and JSON (PEP 691), over http(s) and file URLs,
and takes its addresses from where pip takes them: ``PIP_*`` variables and pip's config files.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from octavo.core.loading.errors import CorruptFileError, SourceError
from octavo.core.loading.progress import Progress

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_TIMEOUT_S = 60
_BLOCK = 1 << 20


@dataclass(frozen=True)
class IndexSettings:
    """Where packages are looked for: simple-index URLs, and flat pages or folders of wheels."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...]
    cert: str | None = None
    has_main: bool = True  # whether index-url is set: pip has a default for it, this client none


@dataclass(frozen=True)
class WheelLink:
    """A wheel an index offers. sha256 is None when the index states no hash."""

    url: str
    filename: str
    version: Version
    sha256: str | None
    yanked: bool


def pip_settings(environ: Mapping[str, str] | None = None) -> IndexSettings:
    """The index settings pip would use, from its variables and config files (in pip's order)."""
    environ = os.environ if environ is None else environ
    options: dict[str, str] = {}
    for path in _config_paths(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        for section in ("global", "download"):
            if parser.has_section(section):
                options.update(parser.items(section))
    for key, value in environ.items():
        if key.startswith("PIP_"):
            options[key[4:].lower().replace("_", "-")] = value
    no_index = options.get("no-index", "").lower() in {"1", "true", "yes", "on"}
    indexes = options.get("index-url", "").split() + options.get("extra-index-url", "").split()
    return IndexSettings(
        indexes=() if no_index else tuple(indexes),
        find_links=tuple(options.get("find-links", "").split()),
        cert=options.get("cert") or None,
        has_main=no_index or bool(options.get("index-url")),
    )


def _config_paths(environ: Mapping[str, str]) -> list[Path]:
    home = Path(environ.get("HOME", "~")).expanduser()
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    xdg_dirs = environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(os.pathsep)
    paths = [Path(folder) / "pip" / "pip.conf" for folder in reversed(xdg_dirs) if folder]
    paths += [Path("/etc/pip.conf"), home / ".pip" / "pip.conf"]
    paths.append(Path(environ.get("XDG_CONFIG_HOME", home / ".config")) / "pip" / "pip.conf")
    if sys.platform == "win32" and "APPDATA" in environ:
        paths.append(Path(environ["APPDATA"]) / "pip" / "pip.ini")
    paths.append(Path(sys.prefix) / "pip.conf")
    if named:
        paths.append(Path(named))
    return paths


def index_download(
    requirement: Requirement, into: Path, progress: Progress, settings: IndexSettings
) -> Path:
    """Download the best wheel for ``requirement`` into ``into`` and check the index's hash.

    Raises SourceError when nothing fits, CorruptFileError when the hash does not match.
    """
    if not settings.indexes and not settings.find_links:
        raise SourceError(
            f"{requirement.name!r} cannot be fetched: this interpreter has no pip and no package "
            "index is configured. Set PIP_INDEX_URL (or index-url in pip's config file), or "
            "install pip into this environment."
        )
    links, notes = _candidates(requirement, settings)
    best = _best(requirement, links)
    if best is None:
        offered = ", ".join(sorted({str(link.version) for link in links})) or "none"
        looked = "; ".join([*settings.indexes, *settings.find_links])
        if not settings.has_main:
            notes.append("No index-url is configured and there is no pip here: set PIP_INDEX_URL.")
        raise SourceError(
            f"no wheel for {str(requirement)!r} fits this interpreter. Versions offered: {offered}. "
            f"Looked in: {_without_credentials(looked)}. {' '.join(notes)}".rstrip()
        )
    return _fetch(best, into, progress, settings)


def _candidates(
    requirement: Requirement, settings: IndexSettings
) -> tuple[list[WheelLink], list[str]]:
    links: list[WheelLink] = []
    notes: list[str] = []
    name = canonicalize_name(requirement.name)
    for index in settings.indexes:
        url = f"{index.rstrip('/')}/{name}/"
        try:
            links += _read_page(url, name, settings)
        except (OSError, ValueError) as error:  # this index lacks it or is down; others may serve
            notes.append(f"{_without_credentials(url)}: {error}.")
    for place in settings.find_links:
        try:
            links += _read_flat(place, name, settings)
        except (OSError, ValueError) as error:
            notes.append(f"{_without_credentials(place)}: {error}.")
    return links, notes


def _best(requirement: Requirement, links: list[WheelLink]) -> WheelLink | None:
    exact = any(item.operator in {"==", "==="} for item in requirement.specifier)
    usable = [
        link
        for link in links
        if requirement.specifier.contains(link.version, prereleases=True)
        and (exact or not link.yanked)
    ]
    # As pip does: a pre-release only when asked for, or when there is nothing else.
    if not exact:
        usable = [link for link in usable if not link.version.is_prerelease] or usable
    return max(usable, key=lambda link: (link.version, link.sha256 is not None), default=None)


def _wheel_link(
    url: str,
    filename: str,
    name: str,
    *,
    sha256: str | None,
    requires_python: str | None,
    yanked: bool,
    supported: frozenset[Any],
) -> WheelLink | None:
    try:
        found, version, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return None
    if found != name or supported.isdisjoint(tags):
        return None
    if requires_python:
        python = ".".join(map(str, sys.version_info[:3]))
        try:
            if not SpecifierSet(requires_python).contains(python, prereleases=True):
                return None
        except InvalidSpecifier:
            return None
    return WheelLink(url, filename, version, sha256, yanked)


class _Anchors(HTMLParser):
    """The links of an HTML index page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: list[dict[str, str | None]] = []
        self.base: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.anchors.append(dict(attrs))
        elif tag == "base":
            self.base = dict(attrs).get("href")


def _read_page(url: str, name: str, settings: IndexSettings) -> Iterator[WheelLink]:
    body, kind, final_url = _get(url, settings)
    supported = frozenset(sys_tags())
    if "json" in kind:
        for item in json.loads(body)["files"]:
            link = _wheel_link(
                urllib.parse.urljoin(final_url, item["url"]),
                item["filename"],
                name,
                sha256=item.get("hashes", {}).get("sha256"),
                requires_python=item.get("requires-python"),
                yanked=bool(item.get("yanked", False)),
                supported=supported,
            )
            if link is not None:
                yield link
        return
    page = _Anchors()
    page.feed(body.decode("utf-8", "replace"))
    base = urllib.parse.urljoin(final_url, page.base or "")
    for anchor in page.anchors:
        target, fragment = urllib.parse.urldefrag(
            urllib.parse.urljoin(base, anchor.get("href") or "")
        )
        link = _wheel_link(
            target,
            urllib.parse.unquote(target.rsplit("/", 1)[-1]),
            name,
            sha256=urllib.parse.parse_qs(fragment).get("sha256", [None])[0],
            requires_python=anchor.get("data-requires-python"),
            yanked="data-yanked" in anchor,
            supported=supported,
        )
        if link is not None:
            yield link


def _read_flat(place: str, name: str, settings: IndexSettings) -> Iterator[WheelLink]:
    folder = Path(urllib.request.url2pathname(urllib.parse.urlparse(place).path))
    local = not urllib.parse.urlparse(place).scheme or place.startswith("file:")
    if not local or folder.suffix in {".html", ".htm"}:
        yield from _read_page(folder.as_uri() if local else place, name, settings)
        return
    supported = frozenset(sys_tags())
    for path in sorted(folder.expanduser().glob("*.whl")):
        link = _wheel_link(
            path.absolute().as_uri(),
            path.name,
            name,
            sha256=None,
            requires_python=None,
            yanked=False,
            supported=supported,
        )
        if link is not None:
            yield link


def _get(url: str, settings: IndexSettings) -> tuple[bytes, str, str]:
    """An index page: (body, content type, the URL it came from after redirects)."""
    if url.startswith("file:"):
        page = Path(urllib.request.url2pathname(urllib.parse.urlparse(url).path))
        if page.is_dir():
            page = page / "index.html"
        return page.read_bytes(), "text/html", page.as_uri()
    with _open(url, settings, {"Accept": _ACCEPT}) as response:
        return response.read(), response.headers.get("Content-Type", ""), response.geturl()


def _open(url: str, settings: IndexSettings, headers: dict[str, str]) -> Any:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in {"http", "https", "file"}:
        raise ValueError(f"{parts.scheme!r} addresses are not read")
    if parts.username is not None:  # credentials in an index URL are sent as basic authentication
        import base64

        pair = (
            f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        )
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))
    context = ssl.create_default_context(cafile=settings.cert) if parts.scheme == "https" else None
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)


def _fetch(link: WheelLink, into: Path, progress: Progress, settings: IndexSettings) -> Path:
    target = into / Path(link.filename).name
    digest = hashlib.sha256()
    try:
        with _open(link.url, settings, {}) as response, target.open("wb") as file:
            total = int(response.headers.get("Content-Length") or 0) or None
            task = progress.task(f"Downloading {link.filename}", total)
            try:
                while block := response.read(_BLOCK):
                    file.write(block)
                    digest.update(block)
                    task.advance(len(block))
            finally:
                task.close()
    except (OSError, urllib.error.URLError) as error:
        raise SourceError(f"downloading {link.filename} failed: {error}. Try again.") from error
    if link.sha256 is not None and digest.hexdigest() != link.sha256:
        raise CorruptFileError(
            f"{link.filename} has SHA-256 {digest.hexdigest()}, the index says {link.sha256}: the "
            "download is damaged or was tampered with, and is not used. Try again."
        )
    return target


def _without_credentials(text: str) -> str:
    """The text with any user:password@ of a URL blanked, fit for an error message."""
    import re

    return re.sub(r"(?<=://)[^/@\s]+@", "***@", text)
