"""The files of deploy/: nginx in front of a service, and what compose and systemd make of theirs."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request

import pytest
import yaml

from evoengine.service.settings import Settings
from tests.service.conftest import running
from tests.support.documents import ROOT
from tests.support.waiting import wait_for

DEPLOY = ROOT / "deploy"
NGINX = shutil.which("nginx")


def settings_named(text: str) -> set[str]:
    return set(re.findall(r"EVOENGINE_([A-Z_]+)", text))


@pytest.mark.parametrize("file", ["Containerfile", "compose.yaml", "systemd/evoengine.service"])
def test_the_settings_that_a_file_names_are_there(file):
    named = {name.removesuffix("_FILE").lower() for name in settings_named(DEPLOY.joinpath(file).read_text())}
    assert named and named <= {*Settings.model_fields, "db"}


def test_compose_builds_targets_that_are_there_and_installs_extras_that_are_there():
    containers = DEPLOY.joinpath("Containerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", containers, re.MULTILINE))
    services = yaml.safe_load(DEPLOY.joinpath("compose.yaml").read_text())["services"]
    used = {service["build"]["target"] for service in services.values() if "build" in service}
    assert used == {"api", "cpu-worker", "gpu-worker"} and used <= targets
    assert services["api"]["ports"] == ["127.0.0.1:8765:8765"]
    extras = {name for group in re.findall(r"'\.\[([\w,]+)\]'", containers) for name in group.split(",")}
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    assert extras and extras <= project["optional-dependencies"].keys()
    copied = re.findall(r"^COPY (.+) \S+$", containers, re.MULTILINE)
    assert all(ROOT.joinpath(name).exists() for line in copied for name in line.split())


def test_systemd_takes_the_unit(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "evoengine.service"
    unit.write_text(
        DEPLOY.joinpath("systemd/evoengine.service").read_text().replace("/opt/evoengine/bin/evoengine", "/bin/true")
    )
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert "evoengine.service" not in done.stderr, done.stderr


@pytest.mark.exhaustive
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_carries_requests_and_streams_and_everybody_needs_a_token(tmp_path, recorded):
    with (
        running(tmp_path, db=str(tmp_path / "evo.db"), recorded=recorded) as server,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        port = free.getsockname()[1]
        free.close()
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        pair = ["-keyout", tmp_path / "key", "-out", tmp_path / "crt"]
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject, *pair],
            check=True,
            capture_output=True,
        )
        own = DEPLOY.joinpath("nginx/evoengine.conf").read_text()
        changes = {
            "127.0.0.1:8765": f"127.0.0.1:{server.port}", "listen 443": f"listen 127.0.0.1:{port}",
            "/etc/nginx/evoengine.crt": f"{tmp_path}/crt", "/etc/nginx/evoengine.key": f"{tmp_path}/key",
            "tuner.example": "localhost",
        }  # fmt: skip
        for old, new in changes.items():
            assert old in own
            own = own.replace(old, new)
        paths = "".join(
            f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        conf = tmp_path / "nginx.conf"
        conf.write_text(
            f"pid {tmp_path}/pid; error_log stderr; daemon off; events {{}} http {{ access_log off; {paths} {own} }}"
        )
        proxy = subprocess.Popen([NGINX, "-c", conf, "-p", tmp_path], stderr=subprocess.PIPE)
        try:
            url, trust = f"https://localhost:{port}", ssl.create_default_context(cafile=tmp_path / "crt")

            def ask(path: str, token: str | None = None, data: bytes | None = None) -> tuple[int, str]:
                headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
                try:
                    with urllib.request.urlopen(
                        urllib.request.Request(url + path, data, headers), timeout=90, context=trust
                    ) as answer:
                        return answer.status, answer.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()
                except urllib.error.URLError:
                    return 0, ""

            wait_for(lambda: ask("/v1/jobs")[0])
            assert ask("/v1/jobs")[0] == 401
            made = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "evoengine",
                    "token",
                    "new",
                    "t",
                    "--scope",
                    "submit",
                    "--db",
                    tmp_path / "evo.db",
                ],
                capture_output=True,
                text=True,
                cwd=ROOT,
            )
            token = made.stdout.strip()
            assert ask("/v1/jobs", token)[0] == 200
            assert ask("/v1/jobs", token, b'{"device": "recorded:test.json", "trials": 5}')[0] == 202
            status, stream = ask("/v1/jobs/1/events", token)
            assert status == 200 and stream.count("event: trial") == 5
            assert ask("/v1/jobs", token, b"x" * 70_000)[0] == 413
            assert ask("/metrics", token)[0] == ask("/readyz")[0] == 404
        finally:
            proxy.terminate()
            proxy.wait(timeout=30)
