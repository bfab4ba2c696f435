"""Redelivery over the wire: one unacked message blocks no other, and those of a vanished client come one by one."""

from __future__ import annotations

from foreign_client import Serve, connect, gone

ACK_WAIT_S = 0.3


async def test_one_that_is_never_acked_comes_again_among_the_others(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 3)
        await client.subscribe("s", "a", ack_wait=ACK_WAIT_S, max_attempts=5)
        came = [(await client.delivery())["sequence_id"] for _ in range(3)]
        assert came == [1, 2, 3]
        await client.ack("s", 2, 3)
        attempts = {1: 1}
        for seq in range(4, 24):  # new ones, while the first is given up four times
            await client.publish("a", seq)
            while (found := await client.delivery())["sequence_id"] != seq:
                attempts[found["sequence_id"]] = found["attempt"]
            await client.ack("s", seq)
            if attempts[1] < 5:
                found = await client.delivery()
                attempts[found["sequence_id"]] = found["attempt"]
        assert attempts == {1: 5}
        while not (letters := await client.call("rpc.dead_letters")):
            await client.publish("a", "wakes it")
            await client.ack("s", (await client.delivery())["sequence_id"])
        assert [(letter["reason"], letter["error"]) for letter in letters] == [
            ("timeout", "not acked within ack_wait, 5 times")
        ]


async def test_one_that_acks_every_fifth_makes_progress_after_a_kill(serve: Serve) -> None:
    async with serve() as server:
        async with connect(server) as client:
            await client.publish_many("a", 50)
            await client.subscribe("s", "a", max_in_flight=20)
            for _ in range(20):
                await client.delivery()
            client.vanish()
        await gone(server)
        async with connect(server) as client:
            await client.subscribe("s", "a", max_in_flight=20)
            acked: set[int] = set()
            while not acked >= {25, 30, 35, 40}:  # those that it had when it vanished come one by one among them
                seq = (await client.delivery())["sequence_id"]
                if seq % 5 == 0:
                    await client.ack("s", seq)
                    acked.add(seq)
