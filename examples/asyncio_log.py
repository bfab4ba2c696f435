"""The asyncio API.

python examples/asyncio_log.py [directory]
"""

import asyncio
import sys
from pathlib import Path

import headwater

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")


async def main() -> None:
    async with headwater.open_async(directory / "asyncio.db") as log:
        # Concurrent publishes share a commit: a hundred cost little more than one.
        seqs = await asyncio.gather(*(log.publish("sensors.kitchen", {"degrees": n}) for n in range(100)))
        print("published", len(seqs), "distinct seqs:", len(set(seqs)))

        async with log.subscribe("average", "sensors.*") as subscription:
            batch = await subscription.fetch(100)
            await subscription.ack_many(batch)
            print("mean:", sum(message.data["degrees"] for message in batch) / len(batch))

        hot = asyncio.Event()

        @log.on("sensors.*", id="alarm", where="data.degrees >= 98", start="first")
        async def alarm(message: headwater.AsyncReceivedMessage) -> None:
            print("alarm:", message.data)
            if message.data["degrees"] == 120:
                hot.set()

        await log.start()
        await log.publish("sensors.cellar", {"degrees": 8})
        await log.publish("sensors.oven", {"degrees": 120})
        await asyncio.wait_for(hot.wait(), 10)


asyncio.run(main())
