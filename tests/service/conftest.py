"""A service in this process, and one in a process of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="pip install evoengine[service]")
pytest.importorskip("httpx2", reason="pip install evoengine[client]")

import uvicorn
from fastapi.testclient import TestClient

from evoengine.ledger.store import open_ledger
from evoengine.service.app import configured, make_app
from evoengine.service.client import Client
from evoengine.service.executors import Executors, Slot
from evoengine.service.settings import Settings
from tests.support.recorded import cache
from tests.support.waiting import wait_for

PATIENCE = 2.0
"""the shortest time after which a server is taken for killed"""


@pytest.fixture(scope="session")
def empty_ledger(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("empty") / "evo.db"
    open_ledger(str(path), create=True).close()
    return path


@pytest.fixture
def ledger(empty_ledger, tmp_path):
    path = tmp_path / "evo.db"
    shutil.copy(empty_ledger, path)
    with open_ledger(str(path), create=False) as opened:
        yield opened


@pytest.fixture
def recorded(tmp_path) -> Path:
    """A folder with one recorded space, test.json."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    cache(folder / "test.json")
    return folder


@pytest.fixture
def service(ledger, recorded):
    """Makes the parts of a service in this process, by its settings."""

    def make(**settings: object) -> SimpleNamespace:
        chosen = Settings(recorded=recorded, **settings)
        executors = Executors(ledger, "here", [Slot(0)], PATIENCE)
        app = make_app(chosen, ledger, executors)
        http = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
        return SimpleNamespace(
            app=app, http=http, executors=executors, state=app.state.service, jobs=app.state.service.jobs
        )

    return make


@pytest.fixture
def served(service):
    """The same on a port, in a thread: `.url`, and `.client` with it."""
    with ExitStack() as ending:

        def serve(**settings: object) -> SimpleNamespace:
            parts = service(**settings)
            config = configured(parts.app, parts.state.settings)
            config.port, config.timeout_graceful_shutdown = 0, 1
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run)
            thread.start()

            def stop() -> None:
                parts.state.stopping.set()
                server.should_exit = True
                thread.join()

            ending.callback(stop)
            wait_for(lambda: server.started)
            parts.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            parts.client = ending.enter_context(Client(parts.url))
            return parts

        yield serve


class Running:
    """`evoengine serve` in a process of its own."""

    def __init__(self, folder: Path, **settings: object) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url, self.said = f"http://127.0.0.1:{self.port}", folder / "server.log"
        named = {f"EVOENGINE_{name.upper()}": str(value) for name, value in settings.items()}
        self._env = {**os.environ, "EVOENGINE_TAKEOVER_SECONDS": str(PATIENCE), **named, "PYTHONWARNINGS": "error"}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Running:
        command = [sys.executable, "-m", "evoengine", "serve", "--port", str(self.port)]
        with self.said.open("ab") as log:
            self.process = subprocess.Popen(command, env=self._env, stdout=subprocess.DEVNULL, stderr=log)
        wait_for(self.answers)
        return self

    def answers(self) -> bool:
        assert self.process.poll() is None, self.said.read_text()
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=300)

    def client(self, token: str | None = None) -> Client:
        return Client(self.url, token)


@contextmanager
def running(folder: Path, **settings: object) -> Iterator[Running]:
    server = Running(folder, **settings)
    try:
        yield server.start()
    finally:
        if server.process.poll() is None:
            server.stop()
