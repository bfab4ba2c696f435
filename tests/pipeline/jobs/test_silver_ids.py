"""Silver knows an id on its own topic, from one run to the next, and in lakes from before it did."""

from __future__ import annotations

from lake_world import World

from headwater.pipeline.jobs.tables import GIVEN_IDS


def test_an_id_on_another_topic_is_another_message(world: World) -> None:
    with world.log() as log:
        log.publish("a.x", 1, id="order-17")
        world.take_in()
        world.make_silver()
        log.publish("orders.new", 2, id="order-17")
    world.insert_by_hand("orders.new", "3", id="order-17")
    world.insert_by_hand("a.x", "4", id="order-17")
    world.take_in()
    world.make_silver()
    assert world.seqs("silver.messages") == [1, 2]


def test_ids_of_an_older_lake_get_their_topics(world: World) -> None:
    with world.log() as log:
        log.publish("a.x", 1, id="order-17")
        log.publish("b.x", 2, id="order-18")
    world.take_in()
    world.make_silver()
    known = world.lake.table(world.spark, GIVEN_IDS)
    assert known is not None
    world.lake.publish([(GIVEN_IDS, world.lake.write(GIVEN_IDS, known.select("id", "seq"), seqs=(1, 2)), None)])
    with world.log() as log:
        log.publish("orders.new", 3, id="order-17")
    world.insert_by_hand("a.x", "4", id="order-17")
    world.take_in()
    world.make_silver()
    assert world.seqs("silver.messages") == [1, 2, 3]
    found = sorted((row["id"], row["topic"], row["seq"]) for row in world.lake.rows(GIVEN_IDS))
    assert found == [("order-17", "a.x", 1), ("order-17", "orders.new", 3), ("order-18", "b.x", 2)]
