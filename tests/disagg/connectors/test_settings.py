"""What a user of a serving engine sets is taken as it is meant, or refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from disagg import DecodeEndpoint, PrefillEndpoint, create_engine
from disagg.connectors.settings import Settings
from kvpool import MLAPool
from tests.disagg.stepping import MLA

SECONDS = "a number of seconds from 0.05 to 86400"
TLS = {"ca": "a", "certificate": "b", "key": "c"}
BIND = "ipc://PATH or tcp://HOST:PORT, with PORT one of 29100, 29100-29107, 29100+rank and *"
WRONG = [
    ("engine", 7, "an installed engine's name. Installed are "),
    ("engine", "nixll", "Did you mean 'nixl'?"),
    *(("bind", value, BIND) for value in ("10.0.0.1", "http://10.0.0.1:1", 4, "tcp://a:1-0")),
    *(("advertise", value, "tcp://HOST:PORT, or None") for value in ("10.0.0.1", 4, "tcp://a:x")),
    *(("engine_options", value, "a JSON object of the engine's options") for value in ("a", [], 4)),
    ("keys", True, "a folder of `kvpool keys`"),
    ("keys", "", "a folder of `kvpool keys`"),
    *(
        ("tls", value, 'paths "ca", "certificate" and "key", or None')
        for value in ("a", {}, {"ca": "a"}, TLS | {"more": "d"}, TLS | {"key": 7})
    ),
    *(("insecure", value, "True or False") for value in ("false", "true", 1, 0, None)),
    ("shared_memory", "false", "True or False"),
    *(("lease", value, "a number of seconds above 0, or None") for value in ("300", 0, -1, True)),
    *(("offer_timeout", value, f"{SECONDS}, or None") for value in ("60", 0, 1e9)),
    *(("peer_timeout", value, SECONDS) for value in (-5, "10", True, float("nan"))),
    *(("verify", value, "'checksum', or None") for value in ("md5", True, "")),
    *(("stream", value, "'chunks', 'layers', or None") for value in ("bytes", True)),
    *(
        ("contract", value, "HOST:PORT such as 127.0.0.1:9400, or None")
        for value in (9400, ":9400", "127.0.0.1", "http://127.0.0.1:1", "h:99999", "")
    ),
    *(("store", value, "a URL (docs/store.md), or None") for value in (7, "", True)),
    *(("chunk_tokens", value, "a number from 1 to 1048576") for value in (0, "256", 1.5, True)),
    *(("store_timeout", value, SECONDS) for value in (0, None, "10")),
    *(("drain_seconds", value, "a number of seconds up to 86400") for value in (-1, None, "3")),
    *(
        ("store_room", value, 'bytes, 1,048,576 or more, or text with a unit such as "4GiB"')
        for value in (0, -1, 256, 2.5e9, True, "", "4", "4Q", "-1GiB", "all")
    ),
    ("conventions", "llama", "names, each with a number or a short text"),
    ("conventions", {"model": [1]}, "model=[1]: a number, or a text"),
    ("conventions", {"a\nb": None}, "name 'a\\nb': 1 to 128 printable characters"),
    ("conventions", {"theta": True}, "theta=True"),
]
RIGHT = {
    "engine": "nixl",
    "engine_options": {"transports": "tcp", "patience": 2},
    "bind": "tcp://10.0.0.1:29100+rank",
    "advertise": "tcp://gpu-7.example:31000+rank",
    "keys": "/etc/kvpool",
    "tls": TLS,
    "insecure": False,
    "lease": None,
    "offer_timeout": 60,
    "drain_seconds": 0,
    "peer_timeout": 0.5,
    "verify": "checksum",
    "stream": "layers",
    "shared_memory": False,
    "contract": "0.0.0.0:9400",
    "store": "s3://bucket/prefix",
    "chunk_tokens": 512,
    "store_timeout": 2.5,
    "store_room": "1.5GiB",
    "conventions": {"quantization": None, "rope_theta": 1e6, "model": "llama"},
}


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_value_that_cannot_be_is_refused_with_its_name_and_what_is_allowed(name, value, allowed):
    with pytest.raises(ValueError) as refused:
        Settings.read({name: value}, "extra")
    text = str(refused.value)
    assert text.startswith(f"extra: {name}") and allowed in text
    if name != "conventions":
        assert f"{name}={value!r}: " in text


def test_all_that_may_be_set_is_taken(monkeypatch):
    monkeypatch.setenv("KVPOOL", json.dumps(RIGHT))
    for settings in Settings.read(RIGHT, "extra"), Settings.of_environment("KVPOOL", ()):
        assert {name: getattr(settings, name) for name in RIGHT} == RIGHT
    assert Settings.read({}, "extra") == Settings()


@pytest.mark.parametrize(
    ("size", "nbytes"), [("4GiB", 4 << 30), ("80 MB", 80 * 10**6), (1 << 20, 1 << 20), (None, None)]
)
def test_the_room_of_a_store_is_bytes_or_text(size, nbytes):
    assert Settings.read({"store_room": size}, "extra").room == nbytes


def test_a_name_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"extra: 'insecur' is not known; there are advertise, .*"
                       r"Did you mean 'insecure'\?"):  # fmt: skip
        Settings.read({"insecur": True}, "extra")


@pytest.mark.parametrize("text", ["{", "[1]", '{"lease": 0}', '{"stream": "layers"}'])
def test_a_variable_that_cannot_be_is_refused_by_name(text, monkeypatch):
    monkeypatch.setenv("KVPOOL", text)
    with pytest.raises(ValueError, match=r"^KVPOOL: "):
        Settings.of_environment("KVPOOL", ["stream"])


def endpoint(kind, **options):
    pool = MLAPool(layers=range(1), **MLA)
    return kind(pool.layout, create_engine("local"), **options)


OPTIONS = {
    PrefillEndpoint: {"lease": -1},
    DecodeEndpoint: {"offer_timeout": 0, "verify": "md5", "ranks": 1 << 17, "staging": -1},
}
EITHER = {"insecure": 1, "keys": "", "tls": {}, "peer_timeout": -5, "threaded": "no"}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, *option) for kind in OPTIONS for option in (OPTIONS[kind] | EITHER).items()]
    + [(DecodeEndpoint, "ranks", value) for value in (0, "2", True)]
    + [(DecodeEndpoint, "staging", value) for value in ("1", 1.5)]
    + [(DecodeEndpoint, "read_timeout", value) for value in ("1", 0, None)],
)
def test_an_endpoint_refuses_a_value_that_cannot_be(kind, name, value):
    with pytest.raises(ValueError) as refused:
        endpoint(kind, **{name: value})
    assert str(refused.value).startswith(f"{name}={value!r}: ")


def test_an_option_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"takes no insecur\. Did you mean 'insecure'\?"):
        endpoint(PrefillEndpoint, insecur=True)


def test_numbers_of_numpy_are_seconds():
    endpoint(PrefillEndpoint, lease=np.float64(3), peer_timeout=np.float64(3)).close()
