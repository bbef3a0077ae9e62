"""A real browser with real keys, driven over a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Tab": 9, "End": 35}


class Page:
    """A page in a window of ``width``; a context manager."""

    def __init__(self, url: str, width: int, folder: Path) -> None:
        self._url, self._width, self._folder = url, width, folder
        self._number, self._session = 0, ""

    def __enter__(self) -> Page:
        to_read, to_write = os.pipe(), os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
        command = [str(PATH), *flags.split(), "--remote-debugging-pipe", f"--user-data-dir={self._folder}"]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (to_read[0], to_write[1])]

        def wire() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._browser = subprocess.Popen(
            command, preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for fd in high:
            os.close(fd)
        os.close(to_read[0])
        os.close(to_write[1])
        self._out, self._in = os.fdopen(to_read[1], "wb"), os.fdopen(to_write[0], "rb")
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        phone = self._width < 600
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=self._width, height=900, deviceScaleFactor=1, mobile=phone
        )
        self._ask("Page.enable")
        self._ask("Page.navigate", url=self._url)
        while self.value("document.readyState") != "complete":
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()
        self._in.close()
        self._browser.terminate()
        self._browser.wait(10)

    def value(self, expression: str) -> Any:
        """What JavaScript makes of ``expression``."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Press and let go."""
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def picture(self, path: Path) -> None:
        """Save what is seen as PNG."""
        import base64

        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            text = b""
            while (letter := self._in.read(1)) != b"\0":
                assert letter, "the browser is gone"
                text += letter
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
