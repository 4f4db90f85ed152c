"""Side routes are tried again over a connection that broke, and say who did not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from inspect_ai.model import get_model

from inspect_lens._patching.runs import find_subject
from inspect_lens.client import LensClient
from inspect_lens.errors import CaptureError, LensError
from inspect_lens.patch._sweep import _Served

BODY = b'{"tokens": [1, 2], "data": [{"id": "org/tiny"}]}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
GOOD = HEAD % len(BODY)


@contextmanager
def closing_server(broken: int, answer: bytes = GOOD + BODY) -> Iterator[tuple[str, list[bytes]]]:
    """Reads a request and closes, as many times as it is told; then it answers."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    seen.append(connection.recv(65536))
                    if len(seen) > broken:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", seen
        listening.shutdown(socket.SHUT_RDWR)


LONG = (
    b'{"error": {"message": "This model\'s maximum context length is 256 tokens. However, your '
    b'prompt contains at least 257 input tokens.", "type": "BadRequestError", "code": 400}}'
)
TOO_LONG = HEAD.replace(b"200 OK", b"400 Bad Request") % len(LONG) + LONG


@pytest.mark.anyio
async def test_a_prompt_longer_than_the_context_is_told_what_helps_and_where() -> None:
    with closing_server(0, TOO_LONG) as (url, _):
        model = get_model("lens/org/tiny", base_url=url, memoize=False)
        model.api._context_window_registered = True
        output = await model.generate("x")
        assert output.stop_reason == "model_length"
        with LensClient(url, model="org/tiny") as client, pytest.raises(LensError) as error:
            client.generate("x", capture_layers=[1])
    for said in (output.completion, str(error.value)):
        assert "is 256 tokens" in said
        assert f"the server at {url}: shorten the messages" in said
        assert "larger --max-model-len" in said


@pytest.mark.anyio
async def test_a_side_route_survives_broken_connections() -> None:
    with closing_server(3) as (url, seen):
        model = get_model("lens/org/tiny", base_url=url, memoize=False)
        model.api._context_window_registered = True
        assert (await model.api.post("/tokenize", {"prompt": "x"}))["tokens"] == [1, 2]
        assert len(seen) == 4


@pytest.mark.anyio
async def test_a_server_that_never_answers_is_named_with_its_model() -> None:
    with closing_server(99) as (url, seen):
        model = get_model("lens/org/tiny", base_url=url, memoize=False)
        model.api._context_window_registered = True
        with pytest.raises(CaptureError, match=rf"{url}/tokenize \(model org/tiny\).*broke"):
            await model.api.post("/tokenize", {"prompt": "x"})
        assert len(seen) == 4


def test_the_plain_client_survives_them_too() -> None:
    with closing_server(2) as (url, seen), LensClient(url.removeprefix("http://")) as client:
        assert client.model == "org/tiny"
        assert len(seen) == 3
        # Hooks are added, and would be added twice.
        with (
            closing_server(9) as (other, asked),
            LensClient(other) as wrong,
            pytest.raises(LensError),
        ):
            wrong.clear_hooks()
        assert len(asked) == 1


@pytest.mark.anyio
async def test_a_refused_connection_of_a_generation_names_address_and_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = get_model("lens/org/tiny", base_url=f"http://127.0.0.1:{port}", memoize=False)
    with pytest.raises(Exception, match=rf"no server answers at http://127.0.0.1:{port} \(model"):
        await model.generate("hello")


def test_texts_of_an_unknown_tokenizer_are_no_texts() -> None:
    with closing_server(0) as (url, _), LensClient(url) as client:
        runs = _Served(client)
        texts = runs.texts([284, 11])
        with pytest.raises(ValueError, match=rf"no tokenizer of 'org/tiny' .*{url}.*positions"):
            find_subject("Paris", texts, where=runs.where)
