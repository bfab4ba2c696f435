"""`headwater serve`: its flags, what it says, how it ends."""

import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import headwater
from headwater.cli.commands import load_command
from headwater.cli.serve import setting_of
from headwater.cli.stopping import SAME_SIGNAL_S
from headwater.errors import HeadwaterError
from headwater.settings.load import PATHS, flag_of


def spellings() -> set[str]:
    command = load_command("serve")
    return {each for parameter in command.params for each in [*parameter.opts, *parameter.secondary_opts]}


def get(url: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url.replace("ws://", "http://") + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


# --- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in PATHS if path != "server.log" and not path.startswith("cli.")])
def test_every_setting_is_a_flag(path: str):
    flag = flag_of(path)
    assert flag in spellings() if path.startswith("server.") else setting_of(flag) == path


def test_no_flag_of_the_server_is_taken_for_one_of_another_section():
    assert setting_of("--log-level") == "log.level"  # which is no setting: it is declared, so it goes to typer
    assert "--log-level" in spellings()
    others = ("--port", "--log", "--limits", "events.db", "-h", "limits-burst")
    assert {setting_of(word) for word in others} == {None}


def test_flags_arrive(serve, path: Path):
    served = serve("--limits-frame-bytes", "5kB", "--log-dedupe=1h", "--no-console")
    with headwater.open(served.url) as log:
        assert log.remote.call("rpc.hello", {})["frame_bytes_max"] == 5_000
    served.stop()
    assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "output", "next"),
    [
        (["--port", "eight"], "--port: must be a whole number, not 'eight'", "The default is 8765"),
        (["--limits-brust", "3"], "--limits-brust: there is no key limits.brust", "Did you mean --limits-burst?"),
        (["--limits-burst"], "--limits-burst needs a value", "headwater serve --help"),
        (["--xyzzy"], "No such option: --xyzzy", "headwater serve --help"),
        (
            ["--host", "0.0.0.0"],
            "server.host (--host): other machines can reach 0.0.0.0, and no tokens are set",
            "Set --tokens to a file of tokens, or --allow-anonymous to accept every client",
        ),
        (["ws://x:1"], "ws://x:1: this is a server, not a log", "Name a file, like events.db"),
        (["--demo", "x.db"], "--demo brings its own log and settings", "Give it --host and --port at most"),
    ],
)
def test_what_cannot_be_served_is_refused(run, arguments, output, next):
    result = run("serve", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines() == [f"error: {output}", f"next: {next}"]


def test_a_certificate_that_cannot_be_used_is_refused(finish, path: Path):
    result = finish("serve", path, "--port", 0, "--tls-certificate", "missing.pem")
    assert (result.code, result.out) == (2, "")
    assert "missing.pem: the certificate or its key cannot be used" in result.err
    assert "next: Set --tls-certificate and --tls-key to PEM files that belong together" in result.err


def test_a_port_that_is_taken_is_refused(finish, path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = finish("serve", path, "--port", port)
        assert result.code == 2
        assert f"error: 127.0.0.1:{port}: another program listens here already" in result.err.splitlines()
        in_json = finish("serve", path, "--port", port, "--log-format", "json")
    assert in_json.code == 2
    [line] = in_json.err.splitlines()
    fields = json.loads(line)
    assert (fields["level"], fields["where"]) == ("critical", f"127.0.0.1:{port}")


# --- serving and ending ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(serve, path: Path, number: int):
    served = serve()
    assert re.fullmatch(r"ws://127\.0\.0\.1:\d+", served.url)
    assert get(served.url, "/readyz") == (200, '{"status":"ready"}\n')
    assert "headwater_connections_active 0.0" in get(served.url, "/metrics")[1]
    with headwater.open(served.url) as log:
        assert log.publish("orders.new", 1) == 1
    assert [line["message"] for line in served.stop(number)] == ["stopping", "stopped"]
    with headwater.open(path) as log:
        assert log.last_seq() == 1


def test_a_client_that_follows_is_let_go(serve, start):
    served = serve()
    follower = start("subscribe", served.url, "billing", ">")
    with headwater.open(served.url) as log:
        log.publish("orders.new", 1)
        assert '"order' not in follower.stdout.readline()  # it is there, and has the message
        [info] = log.subscriptions()
        assert info.holder
    stopping = served.stop()[0]
    assert stopping["clients"] == 1
    assert "lost ws://" in follower.stderr.readline()


def stubborn_client(url: str) -> socket.socket:
    """A WebSocket that never answers, not even a goodbye."""
    host, _, port = url.removeprefix("ws://").rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=10)
    client.sendall(
        b"GET /rpc HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert b" 101 " in client.recv(4096)
    return client


def test_a_later_signal_does_not_wait_for_clients(serve):
    served = serve("--shutdown-timeout", "60s")
    with stubborn_client(served.url):
        served.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            served.process.wait(2 * SAME_SIGNAL_S)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(30) == 130  # by itself it would end with 0


def test_one_signal_that_comes_twice_counts_once(serve):
    served = serve("--shutdown-timeout", "1s")
    with stubborn_client(served.url):
        served.process.send_signal(signal.SIGTERM)
        assert json.loads(served.process.stderr.readline())["message"] == "stopping"
        lines = served.stop(signal.SIGTERM)
    assert [line["level"] for line in lines] == ["warning", "info"]
    assert (lines[0]["clients"], lines[1]["message"]) == (1, "stopped")


def test_a_service_manager_is_reported(start, tmp_path: Path, path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(30)
        manager.bind(str(tmp_path / "notify"))
        process = start("serve", path, "--port", 0, env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert manager.recv(100) == b"READY=1"
        process.terminate()
        assert manager.recv(100) == b"STOPPING=1"
    process.communicate(timeout=30)
    assert process.returncode == 0


# --- what it says ---------------------------------------------------------------------------------------------------


def test_logs_are_json_in_production(start, path: Path, tmp_path: Path, run):
    tokens = tmp_path / "tokens"
    run("token", "create", "--tokens", tokens, "--admin")
    process = start("serve", path, "--port", 0, "--profile", "production", "--tokens", tokens)
    first = json.loads(process.stderr.readline())
    assert first["message"] == f"serving {path} on {first['url']}"
    assert (first["level"], first["logger"], first["log"]) == ("info", "headwater.server", str(path))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert [json.loads(line)["message"] for line in err.splitlines()] == ["stopping", "stopped"]


def test_connections_are_logged_without_secrets(serve, tmp_path: Path, run):
    tokens = tmp_path / "tokens"
    token = run("token", "create", "--tokens", tokens, "--publish", "orders.>", "--label", "the shop").out.strip()
    served = serve("--tokens", tokens, "--log-level", "debug")
    with headwater.open(served.url, token=token) as log:
        log.publish("orders.new", {"secret": "payload"})
    with pytest.raises(HeadwaterError):
        headwater.open(served.url, token="hw_wrong", connect_timeout=1)
    lines = served.stop()
    came, left, refused = (line for line in lines if line["level"] == "debug")
    assert (came["message"], came["address"], came["label"]) == ("client connected", "127.0.0.1", "the shop")
    assert (left["message"], left["label"], left["vanished"]) == ("client left", "the shop", False)
    assert 0 <= left["seconds"] < 60
    assert (refused["message"], refused["status"], refused["why"]) == (
        "client refused",
        401,
        "the token is unknown or expired",
    )
    reported = json.dumps(lines)
    assert all(secret not in reported for secret in (token, token.split("_")[2], "hw_wrong", "payload"))


def test_text_logs_are_for_people(start, path: Path):
    process = start("serve", path, "--port", 0)
    first = process.stderr.readline()
    assert re.match(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}} info    serving {path} on ws://127", first)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert [line.split(maxsplit=2)[2] for line in err.splitlines()] == ["info    stopping clients=0", "info    stopped"]


def shown_until(master: int, word: str) -> str:
    """What a terminal shows, without colours, up to a word."""
    shown = ""
    while word not in shown:
        shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(master, 65_536).decode())
    return shown


def test_a_terminal_gets_a_banner(start, path: Path):
    master, slave = pty.openpty()
    process = start("serve", path, "--port", 0, stderr=slave)
    os.close(slave)
    banner = shown_until(master, "Ctrl-C")
    [url] = re.findall(r"address +(ws://127\.0\.0\.1:\d+)", banner)
    assert f"serves {path} (a new log)" in banner.replace("\r\n", "")
    assert "every client on this machine, without a token" in banner
    assert f"{url.replace('ws', 'http')}/metrics" in banner
    assert f"{url.replace('ws', 'http')}/readyz" in banner
    assert f"publish {url} orders.new" in banner
    assert f"sync app.db {url}/shop/app.db" in banner
    assert " info " not in banner  # it says the same as the first line of the log would
    process.send_signal(signal.SIGINT)
    assert "stopping" in shown_until(master, "stopped")
    process.wait(30)
    os.close(master)
    assert process.returncode == 0


def test_the_banner_says_which_clients_are_admitted(start, path: Path, tmp_path: Path, run):
    tokens = tmp_path / "tokens"
    run("token", "create", "--tokens", tokens, "--admin")
    run("token", "revoke", "--tokens", tokens, run("token", "ls", "--tokens", tokens, "--json").items[0]["id"])
    master, slave = pty.openpty()
    start("serve", path, "--port", 0, "--host", "0.0.0.0", "--tokens", tokens, stderr=slave)
    os.close(slave)
    banner = shown_until(master, "Ctrl-C")
    os.close(master)
    [suggested] = re.findall(
        r"no client yet; make a token: .*?(token create .*--consume '\*')", re.sub(r"\s+", " ", banner)
    )
    assert run(*shlex.split(suggested)).code == 0
    assert "and every other address of this machine" in banner
    assert "HEADWATER_TOKEN=hw_…" in banner
