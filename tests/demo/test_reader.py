import gc
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from stretto.demo import reader
from stretto.demo.client import connect, open_store
from stretto.demo.fashion import FashionMNIST
from stretto.demo.link import Link
from stretto.demo.reader import ShardDataset, StoreError
from stretto.demo.server import ObjectStore
from stretto.demo.shards import Index, ShardEntry, encode, upload

EXAMPLES_PER_SHARD = 64


@dataclass(frozen=True)
class Uploaded:
    """What lies at `url`."""

    url: str
    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    options: dict[str, Any]


@pytest.fixture(scope="module")
def uploaded(store: ObjectStore, fashion: FashionMNIST) -> Uploaded:
    options = {"endpoint": store.endpoint, "access_key": store.access_key, "secret_key": store.secret_key}
    images, labels = fashion.test_images[:1000], fashion.test_labels[:1000]
    url = "s3://fashion/test"
    upload(open_store(url, **options), images, labels, examples_per_shard=EXAMPLES_PER_SHARD)
    return Uploaded(url, images, labels, options)


def stream(loader: DataLoader) -> list[tuple[bytes, int]]:
    """Every example of a pass, in order."""
    found = []
    for images, labels in loader:
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (1, 28, 28)
        assert labels.dtype == torch.int64
        found += [(image.numpy().tobytes(), label) for image, label in zip(images, labels.tolist(), strict=True)]
    return found


def expected(uploaded: Uploaded) -> list[tuple[bytes, int]]:
    pairs = zip(uploaded.images, uploaded.labels.tolist(), strict=True)
    return sorted((image.tobytes(), label) for image, label in pairs)


@pytest.fixture
def dataset(uploaded: Uploaded) -> Callable[..., ShardDataset]:
    return partial(ShardDataset, uploaded.url, backoff_s=0.001, **uploaded.options)


@pytest.mark.parametrize(("num_workers", "start"), [(0, None), (2, "fork"), (1, "spawn")])
def test_a_pass_through_the_link_has_every_example_exactly_once(
    num_workers: int, start: str | None, uploaded: Uploaded
) -> None:
    with Link(uploaded.options["endpoint"], delay_s=0.002, rate_bytes_per_s=5e6) as link:
        dataset = ShardDataset(uploaded.url, batch_size=128, **uploaded.options | {"endpoint": link.endpoint})
        loader = DataLoader(dataset, 128, num_workers=num_workers, multiprocessing_context=start)
        assert len(loader) == 8
        assert sorted(stream(loader)) == expected(uploaded)


def test_equal_epochs_are_equal_and_others_differ(dataset: Callable[..., ShardDataset]) -> None:
    orders = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        shards = dataset(seed=seed)
        shards.set_epoch(epoch)
        orders.append(stream(DataLoader(shards, 100)))
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])


def test_persistent_workers_follow_set_epoch(dataset: Callable[..., ShardDataset]) -> None:
    def passes(**options: Any) -> list[list[tuple[bytes, int]]]:
        shards, found = dataset(batch_size=64), []
        loader = DataLoader(shards, 64, num_workers=2, **options)
        for epoch in (0, 1, 0):
            shards.set_epoch(epoch)
            found.append(stream(loader))
        return found

    persistent = passes(persistent_workers=True)
    assert persistent == passes()
    assert persistent[0] == persistent[2] != persistent[1]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [EXAMPLES_PER_SHARD // 2, EXAMPLES_PER_SHARD, 96, 1000])
def test_length_is_the_number_of_batches_for_any_number_of_workers(
    batch_size: int, num_workers: int, dataset: Callable[..., ShardDataset]
) -> None:
    shards = dataset(batch_size=batch_size)
    loader = DataLoader(shards, batch_size, num_workers=num_workers)
    assert len(shards) == 1000
    assert len(list(loader)) == len(loader)


def test_without_batch_size_there_is_no_length(dataset: Callable[..., ShardDataset]) -> None:
    with pytest.raises(TypeError, match=r"give ShardDataset\(\.\.\., batch_size=\.\.\.\)"):
        len(DataLoader(dataset(), 64))


def test_ranks_share_every_example_without_overlap(
    dataset: Callable[..., ShardDataset], uploaded: Uploaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        shards = dataset(batch_size=64)
        part = stream(DataLoader(shards, 64))
        assert len(part) == len(shards)
        found += part
    assert sorted(found) == expected(uploaded)


def test_pickled_data_set_reads_the_same(dataset: Callable[..., ShardDataset]) -> None:
    shards = dataset(seed=3)
    shards.set_epoch(5)
    first = stream(DataLoader(shards, 64))
    assert stream(DataLoader(pickle.loads(pickle.dumps(shards)), 64)) == first


def test_cut_connection_is_retried_and_no_example_is_lost(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    with Link(uploaded.options["endpoint"]) as link:
        shards = ShardDataset(uploaded.url, backoff_s=0.001, **uploaded.options | {"endpoint": link.endpoint})
        shards.index()
        link.cut(after_bytes=200_000)  # in the fourth shard
        assert sorted(stream(DataLoader(shards, 64))) == expected(uploaded)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "retry 1 of 4" in record.message


def test_reading_process_that_dies_is_replaced_and_no_example_is_lost(
    dataset: Callable[..., ShardDataset], uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    before = psutil.Process().children()
    shards = dataset()
    shards.index()
    (helper,) = [one for one in psutil.Process().children() if one not in before]
    assert helper.cmdline()[-1].endswith("client.py")
    helper.kill()
    assert sorted(stream(DataLoader(shards, 64))) == expected(uploaded)
    (record,) = caplog.records
    assert "the reading process ended with exit code -9" in record.message


def test_refused_store_is_one_error_after_the_retries(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        shards = ShardDataset(
            "s3://b/p", retries=2, backoff_s=0.001, endpoint=endpoint, access_key="a", secret_key="hidden"
        )
        with pytest.raises(StoreError) as error:
            next(iter(shards))
    message = str(error.value)
    for part in ("index.json of s3://b/p", endpoint, "in 3 attempts", "error sending request", "store is up"):
        assert part in message
    assert "hidden" not in message
    assert len(caplog.records) == 2


def test_error_in_a_worker_reaches_the_training(dataset: Callable[..., ShardDataset]) -> None:
    iterator = iter(DataLoader(dataset(retries=0, secret_key="wrong"), 64, num_workers=1))
    with pytest.raises(StoreError, match=r"index\.json.*in 1 attempt\..*403"):
        next(iterator)
    # The error's traceback is a cycle that holds the iterator; collected with it, the worker would end 5 s later.
    gc.collect()
    del iterator


def test_missing_object_and_wrong_key_are_not_retried(
    dataset: Callable[..., ShardDataset], uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreError, match=r"index\.json of s3://fashion/none .* in 1 attempt\..*404"):
        ShardDataset("s3://fashion/none", **uploaded.options).index()
    with pytest.raises(StoreError, match=r"in 1 attempt\..*403"):
        dataset(secret_key="wrong").index()
    assert caplog.records == []


def damaged(uploaded: Uploaded, name: str, change: Callable[[bytes], bytes]) -> ShardDataset:
    """A store with a single shard, changed after its upload."""
    url = f"s3://fashion/{name}"
    store = open_store(url, **uploaded.options)
    (shard,) = upload(store, uploaded.images[:10], uploaded.labels[:10]).shards
    obstore.put(store, shard.name, change(obstore.get(store, shard.name).bytes().to_bytes()))
    return ShardDataset(url, retries=1, backoff_s=0.001, **uploaded.options)


def test_truncated_shard_is_retried_and_then_one_error(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    shards = damaged(uploaded, "truncated", lambda data: data[:-1])
    with pytest.raises(StoreError, match=r"00000\.shard of .*2 attempts.*truncated: 7,877 bytes, expected 7,878"):
        list(shards)
    assert len(caplog.records) == 1


def test_corrupt_shard_is_an_error(uploaded: Uploaded) -> None:
    with pytest.raises(StoreError, match=r"s3://fashion/corrupt/shards/00000\.shard is corrupt"):
        list(damaged(uploaded, "corrupt", lambda data: data[:-1] + bytes([data[-1] ^ 1])))


class Site(BaseHTTPRequestHandler):
    """Serves a folder over HTTP, but answers the next `num_failures` requests for a shard with 503."""

    folder: Path
    num_failures = 0

    def do_GET(self) -> None:
        fails = self.path.endswith(".shard") and Site.num_failures > 0
        Site.num_failures -= fails
        body = b"busy" if fails else (self.folder / self.path.lstrip("/")).read_bytes()
        self.send_response(503 if fails else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    shard = encode(np.zeros((5, 28, 28), np.uint8), np.arange(5))
    (tmp_path / "data" / "shards").mkdir(parents=True)
    (tmp_path / "data" / "shards" / "00000.shard").write_bytes(shard)
    index = Index(5, (ShardEntry("shards/00000.shard", len(shard), 5),))
    (tmp_path / "data" / "index.json").write_bytes(index.to_json())
    handler = type("ThisSite", (Site,), {"folder": tmp_path})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/data"
        running.shutdown()
        thread.join()


def test_busy_http_store_is_retried_after_growing_keyed_waits(
    site: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    monkeypatch.setattr(reader.time, "sleep", waits_s.append)
    for _ in range(2):
        Site.num_failures = 2
        assert sorted(label for _, label in ShardDataset(site, backoff_s=0.5)) == [0, 1, 2, 3, 4]
    assert ["503" in record.message for record in caplog.records] == [True] * 4
    first_s, second_s = waits_s[:2]
    assert 0.25 <= first_s <= 0.5 <= second_s <= 1.0
    assert waits_s == [first_s, second_s] * 2  # keyed by seed, name and attempt; the URL has no part in it


def test_index_that_disagrees_with_a_shard_is_an_error(uploaded: Uploaded) -> None:
    url = "s3://fashion/miscounted"
    store = open_store(url, **uploaded.options)
    (shard,) = upload(store, uploaded.images[:10], uploaded.labels[:10]).shards
    obstore.put(store, "index.json", Index(10, (ShardEntry(shard.name, shard.size_bytes, 11),)).to_json())
    with pytest.raises(StoreError, match=r"has 10 examples, index\.json says 11"):
        list(ShardDataset(url, **uploaded.options))


def test_loopback_store_is_read_without_the_proxy_of_the_environment(
    uploaded: Uploaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    client = connect(uploaded.url, uploaded.options, in_worker=False)
    assert Index.from_json(client.get("index.json")).num_examples == 1000
    client.close()


def test_store_of_the_aws_environment_is_found(uploaded: Uploaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", uploaded.options["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", uploaded.options["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", uploaded.options["secret_key"])
    assert ShardDataset(uploaded.url).index().num_examples == 1000


def test_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"A store is s3://BUCKET/PREFIX or http\(s\)://HOST/PATH, found 'gs://b'"):
        open_store("gs://b")


@pytest.mark.parametrize(
    ("name", "value"), [("seed", -1), ("batch_size", -2), ("retries", -1), ("backoff_s", -0.5)]
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* or more, found {value}"):
        ShardDataset("s3://b/p", **{name: value})
