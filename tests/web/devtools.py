"""Chromium without a window, driven over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.web.tab import PageError, Tab

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--use-fake-device-for-media-stream",
    "--remote-debugging-port=0",
)
KEYS = {"c": 67, "/": 191, "+": 187, "Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}
CTRL, SHIFT = 2, 8
# A browser that gets little of a busy machine takes its time.
CALL_S = 300.0


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Page(Tab):
    """One tab. Remembers every request it made and every error it reported."""

    def __init__(self, socket: ClientConnection, downloads: Path) -> None:
        self.downloads = downloads
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self.context = ""
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._crashed = asyncio.Event()
        self._answering: asyncio.Task[Any] | None = None
        self._names: dict[str, str] = {}
        # The name of the last download that was read.
        self.saved_as = ""
        self._finished: asyncio.Queue[str] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read(), name="devtools reader")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps(message))
        return await asyncio.wait_for(answer, CALL_S)

    async def attach(self, context: str | None = None) -> None:
        """Open a tab of its own, with nothing kept from others, or beside those of `context`."""
        if context is None:
            context = (await self.call("Target.createBrowserContext", disposeOnDetach=True))["browserContextId"]
            allowed = ["audioCapture", "clipboardReadWrite", "clipboardSanitizedWrite"]
            await self.call("Browser.grantPermissions", permissions=allowed, browserContextId=context)
            where = {"behavior": "allowAndName", "downloadPath": str(self.downloads), "eventsEnabled": True}
            await self.call("Browser.setDownloadBehavior", browserContextId=context, **where)
        self.context = context
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Inspector"):
            await self.call(f"{domain}.enable")

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            await self._read_all()
        except Exception as error:
            # Whoever waits for an answer is told why none comes.
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(PageError(f"the browser's messages cannot be read: {error!r}"))
            raise

    async def _read_all(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame)
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if "error" in message:
                    answer.set_exception(PageError(str(message["error"])))
                else:
                    answer.set_result(message["result"])
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Page.javascriptDialogOpening":
            # The page asks whether it may be left; until that is answered, the browser answers nothing.
            self._answering = asyncio.create_task(self.call("Page.handleJavaScriptDialog", accept=True))
        elif method in ("Inspector.targetCrashed", "Target.targetCrashed"):
            self._crashed.set()
        elif method == "Browser.downloadWillBegin":
            self._names[params["guid"]] = params["suggestedFilename"]
        elif method == "Browser.downloadProgress" and params["state"] == "completed":
            self._finished.put_nowait(params["guid"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(params["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["source"] == "security":
            self.errors.append(params["entry"]["text"])

    # What tests do with it

    async def open(self, url: str) -> None:
        """Load the page; its modules have run by then."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), CALL_S)

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def click(self, selector: str) -> None:
        """A real click in the middle of an element, which must be visible there."""
        box = await self.evaluate(
            f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        await self.point(*box)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def point(self, x: float, y: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def press(self, key: str, modifiers: int = 0) -> None:
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        text = key if len(key) == 1 else {"Enter": "\r"}.get(key)
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **common, **({"text": text} if text else {})
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **common)

    async def before_load(self, script: str) -> None:
        """Run a script in every page that this tab opens, before the page's own."""
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def reload(self) -> None:
        self._loaded.clear()
        await self.call("Page.reload")
        await asyncio.wait_for(self._loaded.wait(), CALL_S)

    async def crash(self) -> None:
        """The tab's process ends at once."""
        crashed = asyncio.create_task(self.call("Page.crash"))
        await asyncio.wait_for(self._crashed.wait(), 20)
        crashed.cancel()

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def choose_file(self, selector: str, path: Path) -> None:
        root = (await self.call("DOM.getDocument"))["root"]["nodeId"]
        node = (await self.call("DOM.querySelector", nodeId=root, selector=selector))["nodeId"]
        await self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    async def deny(self, permission: str, url: str) -> None:
        where = {"origin": url, "browserContextId": self.context}
        await self.call("Browser.setPermission", permission={"name": permission}, setting="denied", **where)

    async def media(self, **features: str) -> None:
        """Pretend to prefer something, for example prefers_color_scheme="dark"."""
        shown = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=shown)

    async def size(self, width: int, height: int, scale: float = 1, *, mobile: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    async def screenshot(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    async def downloaded(self, suffix: str) -> str:
        """The text of the next finished download, whose name must have this ending."""
        number = await asyncio.wait_for(self._finished.get(), 10)
        self.saved_as = self._names[number]
        assert self.saved_as.endswith(f".{suffix}")
        return await asyncio.to_thread((self.downloads / number).read_text, encoding="utf-8")


@contextmanager
def running_browser(browser: str, sound: Path) -> Iterator[str]:
    """A browser whose microphone plays `sound` once; gives the address of its DevTools socket."""
    with tempfile.TemporaryDirectory(prefix="tickertape-browser-", ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}"]
        flags.append(f"--use-file-for-fake-audio-capture={sound}%noloop")
        quiet = subprocess.DEVNULL
        process = subprocess.Popen([browser, *flags], stdin=quiet, stdout=quiet, stderr=quiet)
        try:
            yield _address(Path(profile, "DevToolsActivePort"), process)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the browser listens: it writes the port and the path to a file in its profile."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the browser ended with status {process.returncode}")
        if file.exists() and len(lines := file.read_text().split()) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise TimeoutError("the browser did not start within a minute")


@asynccontextmanager
async def open_page(address: str, downloads: Path, context: str | None = None) -> AsyncIterator[Page]:
    """A fresh tab of a running browser."""
    async with connect(address, max_size=None, compression=None, ping_interval=None) as socket:
        page = Page(socket, downloads)
        await page.attach(context)
        try:
            yield page
        finally:
            await page.close()
