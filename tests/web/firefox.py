"""Firefox without a window, driven over WebDriver BiDi."""

from __future__ import annotations

import asyncio
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

BROWSERS = ("firefox-esr", "firefox")
PREFERENCES = {
    # BiDi and nothing else; no first pages, no updates, no calls home.
    "remote.active-protocols": 1,
    "browser.startup.page": 0,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "toolkit.telemetry.enabled": False,
    "app.normandy.enabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "extensions.update.enabled": False,
    "app.update.enabled": False,
    "services.settings.server": "data:,#remote-settings-dummy/v1",
    "browser.region.network.url": "",
    "browser.safebrowsing.malware.enabled": False,
    "browser.safebrowsing.phishing.enabled": False,
    "browser.aboutwelcome.enabled": False,
    "browser.newtabpage.enabled": False,
    "browser.newtab.preload": False,
    # Few processes: on a busy machine it starts in half the time.
    "fission.autostart": False,
    "dom.ipc.processCount": 1,
    "dom.ipc.processPrelaunch.enabled": False,
    "browser.tabs.remote.separatePrivilegedContentProcess": False,
    "layers.gpu-process.enabled": False,
    "media.rdd-process.enabled": False,
    "media.utility-process.enabled": False,
    "network.process.enabled": False,
    "gfx.webrender.software": True,
    # A microphone without a question.
    "media.navigator.permission.disabled": True,
    "media.navigator.streams.fake": True,
}
# A browser that has just started answers late on a busy machine; until then it does not answer pings either.
ANSWER_SECONDS = 240
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "ArrowRight": "\ue014", "Tab": "\ue004"}


def find_firefox() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class FirefoxTab(Tab):
    """One tab in a container of its own."""

    def __init__(self, socket: ClientConnection) -> None:
        self.errors = []
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._context = self._container = ""
        self._reader = asyncio.create_task(self._read(), name="bidi reader")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        return await asyncio.wait_for(answer, ANSWER_SECONDS)

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame)
            if message["type"] == "event":
                entry = message["params"]
                if message["method"] == "log.entryAdded" and entry["level"] == "error":
                    self.errors.append(str(entry["text"]))
                continue
            answer = self._answers.pop(message["id"])
            if message["type"] == "error":
                answer.set_exception(PageError(message["message"]))
            else:
                answer.set_result(message["result"])

    async def attach(self) -> None:
        await self.call("session.new", capabilities={})
        self._container = (await self.call("browser.createUserContext"))["userContext"]
        opened = await self.call("browsingContext.create", type="tab", userContext=self._container)
        self._context = opened["context"]
        await self.call("session.subscribe", events=["log.entryAdded"], contexts=[self._context])

    async def close(self) -> None:
        await self.call("browser.removeUserContext", userContext=self._container)
        await self.call("session.end")
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def open(self, url: str) -> None:
        await self.call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    async def reload(self) -> None:
        await self.call("browsingContext.reload", context=self._context, wait="complete")

    async def evaluate(self, expression: str) -> Any:
        # Values come back as JSON, which is all that tests ask for.
        wrapped = f"(async () => JSON.stringify((await ({expression})) ?? null))()"
        where = {"target": {"context": self._context}, "awaitPromise": True}
        answer = await self.call("script.evaluate", expression=wrapped, userActivation=True, **where)
        if answer["type"] == "exception":
            raise PageError(answer["exceptionDetails"]["text"])
        return json.loads(answer["result"]["value"])

    async def before_load(self, script: str) -> None:
        function = f"() => {{ {script} }}"
        await self.call("script.addPreloadScript", functionDeclaration=function, contexts=[self._context])

    async def click(self, selector: str) -> None:
        place = {"type": "element", "element": await self._element(selector)}
        moves = [
            {"type": "pointerMove", "x": 0, "y": 0, "origin": place},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        ]
        await self._act({"type": "pointer", "id": "mouse", "actions": moves})

    async def press(self, key: str) -> None:
        await self.type(KEYS.get(key, key))

    async def type(self, text: str) -> None:
        strokes = [{"type": kind, "value": character} for character in text for kind in ("keyDown", "keyUp")]
        await self._act({"type": "key", "id": "keyboard", "actions": strokes})

    async def choose_file(self, selector: str, path: Path) -> None:
        element = await self._element(selector)
        await self.call("input.setFiles", context=self._context, element=element, files=[str(path)])

    async def _act(self, source: dict[str, Any]) -> None:
        await self.call("input.performActions", context=self._context, actions=[source])

    async def _element(self, selector: str) -> dict[str, Any]:
        locator = {"type": "css", "value": selector}
        nodes = (await self.call("browsingContext.locateNodes", context=self._context, locator=locator))["nodes"]
        return {"sharedId": nodes[0]["sharedId"]}


@contextmanager
def running_firefox(browser: str) -> Iterator[str]:
    """Gives the address of its BiDi socket."""
    with tempfile.TemporaryDirectory(prefix="tickertape-firefox-", ignore_cleanup_errors=True) as profile:
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in PREFERENCES.items()]
        Path(profile, "user.js").write_text("\n".join(lines))
        command = [browser, "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port=0"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        try:
            yield _address(Path(profile, "WebDriverBiDiServer.json"), process)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the browser listens: it writes that to a file in its profile."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the browser ended with status {process.returncode}")
        if file.exists() and (text := file.read_text()):
            where = json.loads(text)
            return f"ws://{where['ws_host']}:{where['ws_port']}/session"
        time.sleep(0.1)
    raise TimeoutError("the browser did not start within 90 s")


@asynccontextmanager
async def open_tab(address: str) -> AsyncIterator[FirefoxTab]:
    async with connect(address, max_size=None, compression=None, ping_interval=None) as socket:
        tab = FirefoxTab(socket)
        await tab.attach()
        try:
            yield tab
        finally:
            await tab.close()
