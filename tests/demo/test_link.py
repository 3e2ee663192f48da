import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from stretto.demo.link import Link
from tests.patience import PATIENCE_S

BLOB = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def echo_server() -> Iterator[str]:
    """Sends back what it gets."""

    def serve(client: socket.socket) -> None:
        with client, suppress(OSError):
            while data := client.recv(65536):
                client.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect(link: Link) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(link.endpoint.rsplit(":", 1)[1])), timeout=PATIENCE_S)


def read_exactly(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = client.recv(count - len(data))
        assert piece, f"ended after {len(data)} bytes"
        data += piece
    return data


@pytest.mark.parametrize("rate", [None, 20e6])
@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_bytes_and_end_pass_unchanged(echo_server: str, delay_s: float, rate: float | None) -> None:
    with Link(echo_server, delay_s=delay_s, rate_bytes_per_s=rate) as link, connect(link) as client:
        sender = threading.Thread(target=client.sendall, args=(BLOB,))
        sender.start()
        assert read_exactly(client, len(BLOB)) == BLOB
        sender.join()
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
        assert link.stats().sent_bytes == len(BLOB)
        assert link.stats().num_connections == 1


def test_paused_link_passes_nothing_and_a_resumed_one_the_rest(echo_server: str) -> None:
    with Link(echo_server, rate_bytes_per_s=1e5) as link, connect(link) as client:  # all would take 10 s
        sender = threading.Thread(target=client.sendall, args=(BLOB,))
        sender.start()
        first = read_exactly(client, 1)
        link.pause()
        sent_bytes = link.stats().sent_bytes
        assert 0 < sent_bytes < len(BLOB)
        first += read_exactly(client, sent_bytes - 1)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert link.stats().sent_bytes == sent_bytes
        client.settimeout(PATIENCE_S)
        link.resume()
        first += read_exactly(client, 1000)
        link.set_rate(None)
        assert first + read_exactly(client, len(BLOB) - len(first)) == BLOB
        sender.join()


def test_new_rate_holds_for_bytes_already_on_their_way(echo_server: str) -> None:
    with Link(echo_server, rate_bytes_per_s=1) as link, connect(link) as client:
        client.sendall(BLOB[:50_000])  # 14 hours at this rate
        link.set_rate(None)
        assert read_exactly(client, 50_000) == BLOB[:50_000]


def test_cut_ends_one_connection_after_exactly_so_many_bytes(echo_server: str) -> None:
    with Link(echo_server) as link:
        link.cut(after_bytes=1000)
        with connect(link) as client:
            client.sendall(BLOB[:50_000])
            assert read_exactly(client, 1000) == BLOB[:1000]
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        with connect(link) as client:
            client.sendall(BLOB[:50_000])
            assert read_exactly(client, 50_000) == BLOB[:50_000]


def test_server_that_refuses_ends_the_connection_and_not_the_link() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        with Link(f"127.0.0.1:{unheard.getsockname()[1]}") as link:
            for _ in range(2):
                with connect(link) as client, suppress(ConnectionResetError):
                    assert client.recv(1) == b""
            assert link.stats().num_connections == 2


@pytest.mark.parametrize("target", ["127.0.0.1", "https://127.0.0.1:80", "http://127.0.0.1/x", ""])
def test_target_without_host_and_port_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=r"target must be http://HOST:PORT"):
        Link(target)


def test_impossible_rates_and_delays_are_refused() -> None:
    for rate in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"found {rate}"):
            Link("127.0.0.1:80", rate_bytes_per_s=rate)
    for delay_s in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"delay_s must be .* found {delay_s}"):
            Link("127.0.0.1:80", delay_s=delay_s)


def test_command_to_a_link_that_is_not_there_is_an_error(echo_server: str) -> None:
    link = Link(echo_server)
    with pytest.raises(RuntimeError, match="not open"):
        link.pause()
    with link:
        psutil.Process(link.pid).kill()
        with pytest.raises(RuntimeError, match="ended with exit code -9"):
            link.pause()
