from tests.kvpool.client.arena_world import OTHER, SEQ, ArenaWorld, key


def test_a_part_of_a_chain_is_found_by_where_it_begins():
    world = ArenaWorld()
    world.lease(SEQ, 1, 2, 3, 4)
    found = world.leases.find(SEQ, (key(3), key(4), key(5)), first_block=2)
    assert found is not None
    assert (found.keys, found.slots.tolist()) == ((key(3), key(4)), [3, 4])
    assert found.checksums == (world.checksums(3), world.checksums(4))
    assert world.leases.find(SEQ, (key(3),), first_block=1) is None


def test_the_longest_of_several_leases_is_read():
    world = ArenaWorld()
    world.lease(SEQ, 1, 2, lease_id="short")
    world.lease(SEQ, 1, 2, 3, lease_id="long")
    found = world.leases.find(SEQ, (key(1), key(2), key(3), key(4)))
    assert found is not None
    assert (found.lease_id, len(found.keys)) == ("long", 3)


def test_a_lease_that_is_over_gives_way_to_a_shorter_one():
    world = ArenaWorld()
    world.lease(SEQ, 1, 2, 3, lease_id="long", lease_s=1)
    world.lease(SEQ, 1, lease_id="short", lease_s=9)
    world.clock.advance(2)
    assert world.leases.offer(SEQ, [key(1), key(2), key(3)]) == 1


def test_a_chain_that_parts_from_the_leased_one_is_offered_up_to_there():
    world = ArenaWorld()
    world.lease(SEQ, 1, 2, 3)
    assert world.leases.offer(SEQ, [key(1), key(2), key(7), key(3)]) == 2
    assert world.leases.offer(OTHER, [key(1)]) == 0


def test_only_leases_that_somebody_may_still_read_under_are_renewed():
    world = ArenaWorld()
    world.lease(SEQ, 1, lease_id="a")
    world.lease(OTHER, 2, lease_id="b")
    world.leases.forget(SEQ)
    assert world.leases.open() == ["b"]
    world.leases.renewed(["a", "b"], asked_s=world.clock.now_s() + 100, lease_s=5)
    assert not world.leases.holds("a")
    assert world.leases.holds("b")


def test_a_node_that_gives_less_time_than_this_worker_asks_for_prolongs_by_less_too():
    world = ArenaWorld()
    world.lease(SEQ, 1, 2, lease_s=5)
    world.clock.advance(4)
    world.leases.renewed(["L"], asked_s=world.clock.now_s(), lease_s=30)
    world.clock.advance(4)
    assert world.leases.holds("L")
    world.clock.advance(2)
    assert not world.leases.holds("L")
    assert world.leases.offer(SEQ, [key(1)]) == 0
