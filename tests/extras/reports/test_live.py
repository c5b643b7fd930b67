"""`holdfast view`: who is answered, and with what."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

import holdfast
from holdfast.extras.reports.live import ADDRESS, Live, tile
from holdfast.extras.reports.report import ReportRequest, prepared
from tests.extras.reports.pages import data_of, names_of


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(2)
    state = {
        "a": rng.standard_normal((700, 600)).astype(np.float32),
        "b": rng.standard_normal((5, 6, 40)).astype(ml_dtypes.bfloat16),
        "c": np.arange(1000, dtype=np.int64),
        "s": np.array(3.0),
        "empty": np.zeros((0, 3), np.float32),
    }
    state["a"][300, 511] = np.nan
    holdfast.save(state, tmp_path / "m.pt")
    return tmp_path / "m.pt"


@contextmanager
def serving(path, other=None):
    with prepared(path, other, ReportRequest()) as ready:
        made = ready.make(None)
        live = Live(made.document, made.tensors, counterparts=made.counterparts)
        thread = threading.Thread(target=live.serve)
        thread.start()
        try:
            yield live, names_of(made.document)
        finally:
            live.stop()
            thread.join()
            live.close()


def get(live, path, *, token=None, host=None, method="GET"):
    connection = http.client.HTTPConnection(ADDRESS, live.port, timeout=20)
    try:
        headers = {} if token is None else {"X-Holdfast-Token": token}
        connection.request(
            method, path, headers={**headers, "Host": host or f"{ADDRESS}:{live.port}"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def asked(live, path):
    status, content, _ = get(live, path, token=live.token)
    return status, json.loads(content)


def test_a_difference_answers_for_both_sides(model, tmp_path):
    with holdfast.open(model) as checkpoint:
        state = {name: tensor.numpy() for name, tensor in checkpoint.items()}
    state["a"] = np.full((700, 600), 4, np.float32)
    state["a"][5, 7] = np.inf
    state["added"] = np.ones(3, np.float32)
    holdfast.save(state, tmp_path / "other.pt")

    with serving(model, tmp_path / "other.pt") as (live, names):
        row, added = names.index("a"), names.index("added")
        first = asked(live, f"/api/detail?tensor={row}")[1]
        second = asked(live, f"/api/detail?tensor={row}&other=1")[1]
        tile = asked(live, f"/api/tile?tensor={row}&other=1&row=0&col=0&level=0")[1]
        refusal = asked(live, f"/api/detail?tensor={added}&other=1")

    assert (first["first_nan"], first["first_inf"]) == ([300, 511], None)
    assert (second["first_nan"], second["first_inf"]) == (None, [5, 7])
    assert first["quantiles"] != second["quantiles"]
    assert second["quantiles"] == [4] * 9
    assert (tile["low"], tile["high"]) == (4, 4)
    assert refusal[0] == 422
    assert "only one of the two checkpoints" in refusal[1]["error"]


def test_a_page_of_one_checkpoint_has_no_other_side(model):
    with serving(model) as (live, _):
        assert asked(live, "/api/detail?tensor=0&other=1")[0] == 422


def test_the_page(model):
    with serving(model) as (live, _):
        status, content, headers = get(live, f"/?token={live.token}")
        assert status == 200
        page = content.decode()
        assert data_of(page)["live"] == {"token": live.token}
        assert "connect-src &#x27;self&#x27;" in page
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert live.url.startswith("http://127.0.0.1:")


def test_nobody_else_is_answered(model):
    with serving(model) as (live, _):
        good = "/api/detail?tensor=0"
        assert get(live, good, token=live.token)[0] == 200
        for path, token, host in [
            ("/", None, None),
            ("/?token=", None, None),
            (f"/?token={live.token}x", None, None),
            (f"/?token={live.token}", None, "evil.example"),
            (f"/?token={live.token}", None, f"evil.example:{live.port}"),
            (f"/?token={live.token}", None, "127.0.0.1"),
            (good, None, None),
            (good, "é", None),
            (f"{good}&token={live.token}", None, None),
            (good, live.token, "evil.example"),
            ("/api/nothing", None, None),
        ]:
            status, content, _ = get(
                live, path, token=token.encode() if token == "é" else token, host=host
            )
            assert status == 403, path
            assert live.token.encode() not in content
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert get(live, f"/?token={live.token}", method=method)[0] == 501


def test_it_listens_on_this_machine_alone(model):
    with serving(model) as (live, _):
        assert live._server.server_address[0] == ADDRESS == "127.0.0.1"
        others = {
            info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        } - {"127.0.0.1"}
        for other in others:
            with (
                pytest.raises((ConnectionError, TimeoutError)),
                socket.create_connection((other, live.port), timeout=0.3),
            ):
                pass


def test_details(model):
    whole = holdfast.report(model, stats=True).document
    with serving(model) as (live, names):
        for at, name in enumerate(names):
            status, found = asked(live, f"/api/detail?tensor={at}")
            assert status == 200
            for key in ("exponents", "negative", "quantiles", "rows", "columns"):
                assert found[key] == whole["details"][key][at], (name, key)
        status, found = asked(live, f"/api/detail?tensor={names.index('b')}&svd=1")
        with holdfast.open(model) as checkpoint:
            wanted = np.linalg.svd(
                checkpoint["b"].numpy().astype(np.float64).reshape(30, 40), compute_uv=False
            )
        assert np.allclose(found["singular"], wanted[: len(found["singular"])], rtol=1e-3)
        assert asked(live, f"/api/detail?tensor={names.index('a')}&svd=1")[1]["singular"] is None


@pytest.mark.parametrize(
    "query",
    [
        "tensor=9",
        "tensor=-1",
        "tensor=",
        "tensor=x",
        "",
        "tensor=1e0",
        "tensor=٣",
        "tensor=99999999999999999999",
    ],
)
def test_tensors_that_are_not_there(model, query):
    with serving(model) as (live, _):
        status, found = asked(
            live, f"/api/detail?{query.encode('ascii', 'backslashreplace').decode()}"
        )
        assert status == 422
        assert "number from 0 to 4" in found["error"]
        assert asked(live, "/api/tile?tensor=0&row=0&col=0&level=99")[0] == 422
        assert asked(live, "/api/tile?tensor=0&row=700&col=0&level=0")[0] == 422
        assert asked(live, "/api/nothing")[0] == 422


def picture(found):
    return np.frombuffer(base64.b64decode(found["values"]), "<f4").reshape(
        found["rows"], found["cols"]
    )


def test_tiles_are_the_elements(model):
    with serving(model) as (live, names), holdfast.open(model) as checkpoint:
        for name in ("a", "b", "c", "s"):
            array = checkpoint[name].numpy().astype(np.float32)
            array = array.reshape(-1, array.shape[-1] if array.ndim else 1)
            at = names.index(name)
            for row in range(0, array.shape[0], 256):
                for column in range(0, array.shape[1], 256):
                    status, found = asked(
                        live, f"/api/tile?tensor={at}&row={row}&col={column}&level=0"
                    )
                    assert status == 200
                    assert np.array_equal(
                        picture(found),
                        array[row : row + 256, column : column + 256],
                        equal_nan=True,
                    )
                    assert not found["sampled"]
        assert asked(live, f"/api/tile?tensor={names.index('empty')}&row=0&col=0&level=0")[0] == 422


def test_tiles_of_a_level_are_means(model):
    with holdfast.open(model) as checkpoint:
        array = checkpoint["a"].numpy().astype(np.float64)
        made = tile(checkpoint["a"], 0, 0, level=2).values
        assert made.shape == (175, 150)
        assert np.allclose(
            made, array.reshape(175, 4, 150, 4).mean(axis=(1, 3)), equal_nan=True, atol=1e-6
        )
        assert np.isnan(made).sum() == 1
        assert np.isnan(tile(checkpoint["a"], 0, 0, level=10).values).all()


def test_a_tile_of_something_large_is_sampled(tmp_path):
    holdfast.save(
        {"w": np.ones((3000, 20_000), np.int8), "long": np.ones(10_000_000, np.int8)},
        tmp_path / "m.safetensors",
    )
    with holdfast.open(tmp_path / "m.safetensors") as checkpoint:
        for name, shape in (("w", (24, 157)), ("long", (1, 256))):
            level = 7 if name == "w" else 16
            made = tile(checkpoint[name], 0, 0, level=level)
            assert made.values.shape == (shape[0], -(-checkpoint[name].shape[-1] // (1 << level)))
            assert (made.values == 1).all()
            assert not made.whole


def test_a_difference_has_the_tensors_of_its_rows(tmp_path):
    holdfast.save({"x": np.ones(3, np.float32), "old": np.arange(4.0)}, tmp_path / "a.safetensors")
    holdfast.save({"new": np.arange(4.0), "y": np.full(2, 7.0)}, tmp_path / "b.safetensors")
    with serving(tmp_path / "a.safetensors", tmp_path / "b.safetensors") as (live, names):
        assert sorted(names) == ["new", "x", "y"]
        found = asked(live, f"/api/tile?tensor={names.index('y')}&row=0&col=0&level=0")[1]
        assert picture(found).tolist() == [[7.0, 7.0]]


def test_a_port_that_is_taken(model):
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        taken.listen()
        with (
            pytest.raises(holdfast.errors.BadArgument, match="cannot be had"),
            prepared(model, None, ReportRequest()) as ready,
        ):
            Live(ready.make(None).document, (), port=taken.getsockname()[1])


@pytest.mark.parametrize("begun", [False, True], ids=["while asking", "while answered"])
def test_a_tab_that_is_closed_is_nothing_to_tell(model, capfd, begun):
    with serving(model) as (live, _):
        live._page = bytes(
            64 << 20
        )  # more than any system takes from a sender before somebody reads
        with socket.create_connection((ADDRESS, live.port), timeout=20) as tab:
            tab.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # closing resets the connection
            asking = f"GET /?token={live.token} HTTP/1.1\r\nHost: {ADDRESS}:{live.port}\r\n"
            tab.sendall(f"{asking}\r\n".encode() if begun else asking.encode())
            if begun:
                assert tab.recv(1) == b"H"
            else:
                assert until(lambda: answering())
        assert until(lambda: not answering())
        assert get(live, "/api/detail?tensor=0", token=live.token)[0] == 200
    assert capfd.readouterr() == ("", "")


def answering():
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def until(ready):
    """Wait for something that other threads do; whether it came."""
    for _ in range(2000):
        if ready():
            return True
        time.sleep(0.01)
    return False


def test_a_mistake_of_ours_is_answered(model, capfd, monkeypatch):
    with serving(model) as (live, _):
        monkeypatch.setattr(live, "trusts", lambda *_: 1 / 0)
        status, content, _ = get(live, f"/?token={live.token}")
        assert until(lambda: not answering())
    assert status == 500
    assert b"ZeroDivisionError" in content
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://[::1 HTTP/1.0", b"400"),
        (b"GET http://[x]y/?token=TOKEN HTTP/1.1", b"400"),
        (b"GET [ HTTP/1.1", b"403"),
        (b"GET http://a:b/ HTTP/1.1", b"403"),
        (b"GET /?token=%ff%00&=&;;= HTTP/1.1", b"403"),
        (b"GET /" + b"?" * 70_000 + b" HTTP/1.1", b"414"),
        (b"GET / HTTP/1.1.1", b"400"),
        (b"GET / HTTP/" + b"9" * 5000 + b".0", b"400"),
        (b"GET / HTTP/\xb2.0", b"400"),
        (b"\0\xff\x80", b"400"),
        (b"G\xe9T / HTTP/1.1", b"501"),
    ],
)
def test_a_malformed_request_is_refused_and_prints_nothing(model, capfd, line, status):
    with serving(model) as (live, _):
        with socket.create_connection((ADDRESS, live.port), timeout=20) as connection:
            request = line.replace(b"TOKEN", live.token.encode())
            connection.sendall(request + b"\r\nHost: [::1\r\nX-Holdfast-Token: \xff\r\n\r\n")
            answer = connection.makefile("rb").read()
        assert until(lambda: not answering())
    # A line without a version is answered by a page alone, which names the status.
    assert status in answer
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent otherwise there")
def test_ctrl_c_ends_it(model):
    command = [sys.executable, "-m", "holdfast", "view", str(model), "--no-browser"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        line = running.stdout.readline()
        (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/\?token=", line)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    with pytest.raises((ConnectionError, TimeoutError)):
        socket.create_connection((ADDRESS, int(port)), timeout=2).close()
