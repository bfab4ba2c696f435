"""A client that has gone without closing its connection."""

from __future__ import annotations

import asyncio
import time

import pytest
from foreign_client import PATIENCE_S, Serve, connect, gone, turn

# A client in the same loop answers a ping only in the loop's next turn, and on a busy machine that may take a while.
QUICK = {"limits_ping_interval": 0.1, "limits_ping_timeout": 0.5}


async def test_a_silent_client_is_noticed_and_what_it_held_is_free(serve: Serve) -> None:
    async with serve(**QUICK) as server, connect(server) as next_one, connect(server) as silent:
        await silent.publish_many("a", 2)
        await silent.subscribe("s", "a")
        await silent.deliveries(2)
        silent.stop_reading()  # as if the cable were pulled: it hears no ping, so it answers none
        async with asyncio.timeout(PATIENCE_S):
            while len(server.connections) > 1 or server._context.closing:
                await next_one.call("rpc.hello")
        assert (await next_one.subscribe("s", "a"))["undelivered_count"] == 2
        delivery = await next_one.delivery()
        assert (delivery["sequence_id"], delivery["attempt"]) == (1, 2)
        silent.vanish()


async def test_a_client_that_answers_pings_stays(serve: Serve) -> None:
    async with serve("memory:", **QUICK) as server, connect(server) as quiet, connect(server) as silent:
        silent.stop_reading()
        async with asyncio.timeout(PATIENCE_S):
            while len(server.connections) > 1:  # the silent one went, and it had as long
                await asyncio.wait([asyncio.ensure_future(quiet.socket.ping())])
                await turn()
        assert await quiet.publish("a") == 1
        silent.vanish()


async def test_pings_are_sent_to_idle_clients_and_nothing_else_is_needed(serve: Serve) -> None:
    async with serve("memory:", **QUICK) as server, connect(server) as quiet, connect(server) as silent:
        silent.stop_reading()
        reading = asyncio.ensure_future(quiet.frame())  # the library answers pings while it reads
        async with asyncio.timeout(PATIENCE_S):
            while len(server.connections) > 1:
                await turn()
        assert not reading.done()
        reading.cancel()
        silent.vanish()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_server_that_was_stuck_itself_disconnects_no_client(serve: Serve) -> None:
    """It sent no ping in that time, so no client has failed to answer."""
    async with serve("memory:", **QUICK) as server, connect(server) as quiet, connect(server) as silent:
        await quiet.call("rpc.hello")
        time.sleep(1.0)  # the loop stands still, the server with it
        silent.stop_reading()
        async with asyncio.timeout(PATIENCE_S):
            while len(server.connections) > 1:  # it goes on disconnecting clients that do not answer
                await turn()
        assert await quiet.publish("a") == 1
        silent.vanish()


@pytest.mark.parametrize("how", ["abort", "half close", "close frame"])
async def test_whatever_way_a_client_goes_it_is_gone(serve: Serve, how: str) -> None:
    async with serve() as server:
        async with connect(server) as client:
            await client.subscribe("s", "a")
            if how == "abort":
                client.vanish()
            elif how == "half close":
                client.socket.transport.write_eof()
                async with asyncio.timeout(PATIENCE_S):
                    await client.socket.wait_closed()
        await gone(server)
        assert server.metrics.connections._value.get() == 0
        assert not server.acceptor.connections
        async with connect(server) as client:
            await client.subscribe("s", "a")


@pytest.mark.usefixtures("short_close")
async def test_a_client_that_does_not_answer_the_close_is_cut(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        client.stop_reading()
        [connection] = server.connections
        connection.close(1008, "out")
        await gone(server)
        client.vanish()
