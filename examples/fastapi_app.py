"""FastAPI with an asyncio log: requests publish, a handler runs in the same process, own tables are in the log's file.

python examples/fastapi_app.py [directory]

Nothing here uses the `sqlite3` module, so the process may open the log. `uvicorn` would serve `app`; here a test client
sends the requests.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel

import headwater

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")


class Order(BaseModel):
    id: str
    item: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
    async with headwater.open_async(directory / "fastapi.db") as log:
        async with log.transaction() as tx:
            await tx.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, item TEXT)")

        @log.on("orders.new", id="confirmations", mode="shared")
        async def confirm(message: headwater.AsyncReceivedMessage) -> None:
            await log.publish("mails.confirmation", {"order": message.data["id"]}, id=f"confirmation-{message.id}")

        await log.start()
        async with log.subscribe("mails", "mails.>") as mails:
            yield {"log": log, "mails": mails}


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def new_order(order: Order, request: Request) -> dict[str, int]:
    """The row and the message commit together."""
    try:
        async with request.state.log.transaction() as tx:
            await tx.execute("INSERT INTO orders VALUES (?, ?)", (order.id, order.item))
            return {"seq": await tx.publish("orders.new", order.model_dump())}
    except headwater.errors.SqlError as exc:
        raise HTTPException(409, "there is an order of this id") from exc


@app.get("/mails/next")
async def next_mail(request: Request) -> Any:
    """Waits for a mail for up to ten seconds."""
    for message in await request.state.mails.fetch(1, timeout=10):
        await message.ack()
        return message.data
    raise HTTPException(404, "no mail")


with TestClient(app) as client:
    created = client.post("/orders", json={"id": "o-1", "item": "lamp"})
    print(created.status_code, created.json())
    again = client.post("/orders", json={"id": "o-1", "item": "lamp"})
    print(again.status_code, again.json())
    print(client.get("/mails/next").json())
