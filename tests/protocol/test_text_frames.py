"""Text frames are written here; the `websockets` library, which reads them at both ends, is the judge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN, Protocol
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from headwater.protocol.websocket import ClientSocket, ServerSocket, text_frame

LENGTHS = (0, 1, 125, 126, 127, 65_535, 65_536, 70_000)  # around the ends of the three forms of a length


def reading(*, is_server: bool) -> Protocol:
    protocol = ServerProtocol() if is_server else ClientProtocol(parse_uri("ws://here"))
    protocol.state = OPEN
    protocol.parser = Protocol.parse(protocol)
    next(protocol.parser)
    return protocol


def read(protocol: Protocol, data: bytes) -> list[tuple[Opcode, bytes, bool]]:
    protocol.receive_data(data)
    return [(each.opcode, bytes(each.data), each.fin) for each in protocol.events_received() if isinstance(each, Frame)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("masked", [True, False])
def test_the_library_reads_the_frame_and_nothing_else(length: int, masked: bool) -> None:
    text = b"x" * length
    protocol = reading(is_server=masked)
    assert read(protocol, text_frame(text, masked=masked) * 2) == [(Opcode.TEXT, text, True)] * 2
    assert protocol.parser_exc is None
    assert not protocol.reader.buffer


@pytest.mark.parametrize("length", LENGTHS)
def test_unmasked_it_is_the_library_s_own_byte_for_byte(length: int) -> None:
    text = b"x" * length
    assert text_frame(text, masked=False) == Frame(Opcode.TEXT, text).serialize(mask=False)
    assert len(text_frame(text, masked=True)) == len(Frame(Opcode.TEXT, text).serialize(mask=True))


@given(st.lists(st.text(max_size=300), max_size=5))
def test_texts_of_any_content_arrive(texts: list[str]) -> None:
    sent = [text.encode() for text in texts]
    for masked in (True, False):
        data = b"".join(text_frame(text, masked=masked) for text in sent)
        assert [found for _, found, _ in read(reading(is_server=masked), data)] == sent


def test_each_masked_frame_has_a_key_of_its_own() -> None:
    frames = {text_frame(b"the same", masked=True) for _ in range(20)}
    assert len(frames) == 20


def opened() -> tuple[ClientSocket, ServerSocket]:
    client, server = ClientSocket("ws://here/", {}, 1_000_000), ServerSocket(1_000_000)
    request = server.receive_request(client.data_to_send())
    assert request is not None
    assert server.accept(request)
    client.receive_messages(server.data_to_send())
    assert client.is_open
    return client, server


def test_texts_cross_in_order_and_before_a_close() -> None:
    client, server = opened()
    client.send([b"one", b"two"])
    assert server.receive_messages(client.data_to_send()) == [(b"one", True), (b"two", True)]
    server.send([b"three"])
    server.close(1000, "")
    assert client.receive_messages(server.data_to_send()) == [(b"three", True)]
    assert client.close_code == 1000


def test_nothing_is_sent_before_the_handshake_or_after_a_close() -> None:
    client, server = ClientSocket("ws://here/", {}, 1_000_000), ServerSocket(1_000_000)
    client.send([b"too early"])
    assert client.data_to_send().endswith(b"\r\n\r\n")
    server.send([b"too early"])
    assert server.data_to_send() == b""
    client, server = opened()
    client.close(1000, "")
    client.data_to_send()
    client.send([b"too late"])
    assert client.data_to_send() == b""
