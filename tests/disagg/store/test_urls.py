"""Which URLs name a floor, and how others are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from disagg.store.floors import open_floor
from disagg.store.floors.url import parse_url

REFUSED = {
    "": "one of memory://name, file:///path, s3://bucket/prefix",
    "objects": "one of memory://name",
    "/var/objects": "one of memory://name, file:///path",
    "file:objects": "one of memory://name",
    "file://objects": "a path begins with '/': 'objects' stands where a host would. Such as file:///",
    "file://localhost/objects": "a path begins with '/'",
    "file:///": "an absolute path of a folder",
    "file:///a/../etc": "without '..'",
    "file:///a/%2e%2e/etc": "without '..'",
    "file:///a%00b": "an absolute path",
    "file:///a?sync=1": "option 'sync'; known are none",
    "file:///a#b": "'#' is not part of it",
    " file:///a": "without spaces around it",
    "file:///a\nb": "control characters",
    "memory://a/b": "no path",
    "s3://": "bucket ''",
    "s3://b": "bucket 'b'",
    "s3://bucket/../x": "prefix '../x'",
    "s3://bucket/a b": "prefix 'a b'",
    "s3://bucket:443/x": "bucket 'bucket:443'",
    "s3://bucket/x?timeout=0": "option timeout='0': 0.1 to 600 seconds",
    "s3://bucket/x?timeout=soon": "option timeout='soon'",
    "s3://bucket/x?timeout=nan": "option timeout='nan'",
    "s3://bucket/x?timeout": "timeout",
    "s3://bucket/x?timeot=3": "option 'timeot'; known are timeout, endpoint, region. Did you mean",
    "s3://bucket/x?timeout=3&timeout=4": "option 'timeout' twice",
    "s3://bucket/x?endpoint=minio:9000": "an address such as https://host:9000",
    "gs://bucket?endpoint=http://x": "option 'endpoint'; known are timeout",
    "s4://bucket": "one of memory://name",
    "mooncake://host": "the port of mooncake_master. Such as mooncake://host:50051",
    "mooncake://:50051": "a host's name",
    "mooncake://host:0": "a port, 1 to 65535",
    "mooncake://host:70000": "a port, 1 to 65535",
    "mooncake://[::1]:50051": "IPv4 address",
    "mooncake://host:50051/x": "no path",
    "mooncake://host:50051?memory=4Q": "memory '4Q': bytes, or a number of",
    "mooncake://host:50051?protocol=udp": "tcp or rdma",
}


@pytest.mark.parametrize(("url", "words"), REFUSED.items())
def test_another_url_is_refused_with_what_it_should_be(url, words):
    with pytest.raises(ValueError) as refusal:
        open_floor(url)
    assert words in str(refusal.value) and str(refusal.value).startswith("store")


def test_a_password_in_a_url_is_refused_and_not_repeated():
    for url in ("s3://me:secret@bucket/x", "s3://bucket/x?endpoint=http://me:secret@host"):
        with pytest.raises(ValueError, match="no user or password") as refusal:
            open_floor(url)
        assert "secret" not in str(refusal.value)


def test_a_url_has_its_parts_and_options():
    url = parse_url("mooncake://10.0.0.7:50051?memory=2GiB&staging=1MiB&http=9004")
    assert (url.scheme, url.place, url.port, url.path) == ("mooncake", "10.0.0.7", 50051, "")
    assert url.options == {"memory": 2 << 30, "staging": 1 << 20, "http": 9004}
    url = parse_url("s3://My.Bucket/a/b/?timeout=2.5&endpoint=http://h:9/&region=eu-west-1")
    assert (url.place, url.path) == ("My.Bucket", "a/b")
    assert url.options == {"timeout": 2.5, "endpoint": "http://h:9", "region": "eu-west-1"}
    assert parse_url("file:///var/kv%20state").path == "/var/kv state"
    assert str(url).startswith("s3://My.Bucket")


def test_a_url_is_read_without_the_packages_of_floors():
    code = """
import sys
from disagg.store.floors import open_floor
try:
    open_floor("s4://x")
except ValueError:
    pass
heavy = {"obstore", "mooncake", "torch", "xxhash", "disagg.engines"} & set(sys.modules)
print(sorted(heavy))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize(
    ("package", "url", "words"),
    [
        (
            "obstore",
            "memory://x",
            "A store at memory:// needs obstore: pip install 'kvpool[store",
        ),
        ("mooncake", "mooncake://h:1", "A store at mooncake://: Mooncake is not installed: pip"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command(package, url, words):
    code = f"""
import sys
sys.modules[{package!r}] = None
from disagg.store.floors import open_floor
from kvpool.extras import MissingExtra
try:
    open_floor({url!r})
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(words), done.stderr
