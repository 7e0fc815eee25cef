"""A generation on a card: the same answers, checked bytes, one lease, and nothing half done. Over the stand-in card."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import (
    AlreadyRunning,
    CorruptionFound,
    DatabaseUnavailable,
    DeviceRefused,
    FencingLost,
    UsageError,
)
from fabric_pipelines.shards import canary, device_copy
from fabric_pipelines.shards.residence import Residence
from fabric_pipelines.testing.standin_card import StandInCard
from tests.support_resident import same_answers


def build(store, root, **changes):
    wanted = {
        "lists": 6,
        "seed": 7,
        "metric": "cosine",
        "recipe": {},
        "lists_per_block": 2,
    } | changes
    return shards.build(store, root, "notes", **wanted)


def residence(store, root, card, **more):
    """On the store's clock, renewed by hand."""
    clock = Clock(monotonic_s=lambda: store.now_s, wall_us=lambda: 0)
    return Residence(store, root, "notes", card, clock=clock, keep=False, **more)


def taken(card):
    return card.memory().total_bytes - card.memory().free_bytes


@pytest.fixture(params=[4096, 256])
def small_chunks(request, monkeypatch):
    """Files of several parts, whose borders cut rows."""
    monkeypatch.setattr(device_copy, "CHUNK_BYTES", request.param)


@pytest.mark.parametrize("dtype", device_copy.DTYPES)
@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_the_card_answers_as_the_maps_do(store, rows, tmp_path, metric, dtype, small_chunks):
    build(store, tmp_path, metric=metric)
    xq = np.concatenate([rows[1][:20].astype(np.float32), np.ones((2, 24)), np.zeros((1, 24))])
    card = StandInCard()
    with (
        shards.open_shard(store, tmp_path, "notes") as mapped,
        shards.open_shard(store, tmp_path, "notes", device=card, dtype=dtype) as there,
    ):
        for k in (1, 10, 300):
            same_answers(there.search(xq, k), mapped.search(xq, k))
        assert there.answered_by_cpu == len(xq) - (
            metric == "cosine"
        )  # k = 300 is above what a card settles
        same_answers(there.search(xq, 5, False, nprobe=2), mapped.search(xq, 5, False, nprobe=2))
        np.testing.assert_array_equal(there.vectors(), mapped.vectors())
        assert there.copy.bytes >= card.peak_bytes
    assert taken(card) == 0
    assert store.devices("notes") == []


def test_layers_and_tombstones_are_searched_as_from_the_maps(store, rows, tmp_path, small_chunks):
    build(store, tmp_path)
    ids, vectors = rows
    store.remove(ids[:7])
    store.put(ids[20:30], -vectors[20:30])
    assert shards.refresh(store, tmp_path, "notes").how == "increment"
    with (
        shards.open_shard(store, tmp_path, "notes") as mapped,
        shards.open_shard(store, tmp_path, "notes", device=StandInCard()) as there,
    ):
        assert there.stored > there.manifest.rows
        same_answers(there.search(vectors[:40], 10), mapped.search(vectors[:40], 10))
        assert there.answered_by_cpu == 0


def test_copies_of_one_row_past_the_cards_room_are_answered_from_the_maps(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr("fabric_pipelines.analytics.resident.CAPACITY", 50)
    store.put(np.arange(60), np.ones((60, 24)))
    build(store, tmp_path)
    with (
        shards.open_shard(store, tmp_path, "notes") as mapped,
        shards.open_shard(store, tmp_path, "notes", device=StandInCard()) as there,
    ):
        xq = np.concatenate([np.ones((1, 24)), -np.eye(24)[:3]])
        before = there.answered_by_cpu
        same_answers(there.search(xq, 10), mapped.search(xq, 10))
        assert there.answered_by_cpu == before + 1


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("role", ["vectors", "ids"])
@pytest.mark.parametrize("readers", [1, 3])
def test_a_bit_flipped_on_disk_is_named_before_anything_is_served(
    store, tmp_path, role, readers, small_chunks
):
    generation = build(store, tmp_path)
    entry = generation.manifest.of_role(role)[1]
    flip(generation.folder / entry.path, 300)
    card = StandInCard()
    with residence(store, tmp_path, card) as held:
        with pytest.raises(CorruptionFound, match=f"{role} block of lists 2..3 .* damaged on disk"):
            held.open(readers=readers)
        assert taken(card) == 0
        assert [row.generation for row in store.devices()] == [None]


@pytest.mark.parametrize("number", [0, 5, 9])
def test_a_bit_that_changed_on_the_way_is_told_from_a_damaged_file(
    store, tmp_path, number, small_chunks
):
    build(store, tmp_path)
    arrivals = []

    def rot(arrived):
        arrivals.append(len(arrived))
        if len(arrivals) == number + 1:
            arrived[len(arrived) // 2] ^= 16

    card = StandInCard(rot=rot)
    with (
        pytest.raises(CorruptionFound, match=r"came back from stand-in card.*its file is whole"),
        residence(store, tmp_path, card) as held,
    ):
        held.open(readers=1)
    assert taken(card) == 0
    assert shards.scrub(store, tmp_path, "notes").ok


class Rotting(StandInCard):
    """Its memory loses a bit of every row after the copy was checked."""

    rotten = False

    def products(self, left, right, out, *, add=False):
        if not self.rotten:
            self.rotten = True
            right.view(np.uint32)[:, 5] ^= 1
        super().products(left, right, out, add=add)


@pytest.mark.parametrize("with_receipt", [True, False])
def test_memory_that_rots_after_the_copy_is_found_by_the_canaries(store, tmp_path, with_receipt):
    build(store, tmp_path)
    if with_receipt:
        receipts.issue(store, tmp_path, "notes", quality={})
    with (
        pytest.raises(CorruptionFound, match="canary 0 is answered otherwise"),
        residence(store, tmp_path, Rotting()) as held,
    ):
        held.open()
    with residence(store, tmp_path, StandInCard()) as held, held.open() as shard:
        known = canary.answers(shard)
        shard.copy.rows.view(np.uint32)[:, 5] ^= 1
        assert list(canary.changed_answers(shard, known))


def test_values_that_two_bytes_do_not_hold_are_refused_and_those_that_they_hold_take_half(
    store, rows, tmp_path
):
    build(store, tmp_path)
    card = StandInCard()
    with residence(store, tmp_path, card) as held, held.open(dtype="<f2") as shard:
        assert shard.copy.rows.nbytes == 2 * shard.stored * 24
    with pytest.raises(UsageError, match="cannot be held as"):
        shards.open_shard(store, tmp_path, "notes", device=card, dtype="<i4")
    store.rows = {
        name: row.astype(np.float32) + np.float32(1e-5) for name, row in store.rows.items()
    }
    store.changes.append(("update", rows[0]))
    build(store, tmp_path)
    with pytest.raises(UsageError, match="values that float16 does not hold: load it as '<f4'"):
        shards.open_shard(store, tmp_path, "notes", device=card, dtype="<f2")


def test_a_card_without_room_is_refused_with_both_numbers_before_any_memory_is_taken(
    store, tmp_path
):
    build(store, tmp_path)
    small = StandInCard(memory_bytes=10_000)
    with pytest.raises(
        DeviceRefused, match=r"needs [\d,]+ bytes on stand-in card .*, 10,000 are free: "
    ):
        shards.open_shard(store, tmp_path, "notes", device=small)
    roomy = StandInCard()
    with pytest.raises(DeviceRefused, match=r"needs [\d,]+ bytes on .*, its budget is 5,000 \("):
        shards.open_shard(store, tmp_path, "notes", device=roomy, budget_bytes=5000)
    assert small.peak_bytes == roomy.peak_bytes == 0
    with shards.open_shard(store, tmp_path, "notes", device=StandInCard(address="other")) as shard:
        assert shard.token == 3


def test_a_card_is_named_and_one_that_is_not_there_is_refused(store, tmp_path):
    build(store, tmp_path)
    with pytest.raises(UsageError, match="device 'gpu' is unknown; use 'cpu', 'cuda' or 'cuda:N'"):
        shards.open_shard(store, tmp_path, "notes", device="gpu")
    with pytest.raises(UsageError, match="build it first"):
        Residence(store, tmp_path, "nowhere", StandInCard())


def test_one_card_at_a_time_and_one_reader_on_it(store, tmp_path):
    build(store, tmp_path)
    with shards.open_shard(store, tmp_path, "notes", device=StandInCard()) as first:
        with pytest.raises(AlreadyRunning, match=r"is on the card .*:stand-in-0"):
            shards.open_shard(store, tmp_path, "notes", device=StandInCard(address="stand-in-1"))
        with pytest.raises(AlreadyRunning, match="another reader of this machine"):
            shards.open_shard(store, tmp_path, "notes", device=StandInCard())
        assert first.search(np.ones((1, 24)), 3).found.tolist() == [3]
        assert [(row.generation, row.token) for row in store.devices("notes")] == [(1, first.token)]
    with shards.open_shard(store, tmp_path, "notes", device=StandInCard(address="stand-in-1")):
        assert [row.holder.split(":")[1] for row in store.devices()] == ["stand-in-1"]


def overtake(store):
    store.now_s += 10_000
    return store.acquire_device("notes", "another machine", ttl_s=1e9)


def test_a_lost_lease_releases_the_card_and_ends_every_search(store, tmp_path):
    build(store, tmp_path)
    card = StandInCard()
    with residence(store, tmp_path, card) as held:
        shard = held.open()
        overtake(store)
        store.now_s -= 10_000 - 15  # by its own clock there is still time
        with pytest.raises(FencingLost):
            held.beat()
        assert taken(card) == 0
        with pytest.raises(FencingLost, match="no longer holds"):
            shard.search(np.ones((1, 24)), 3)
        with pytest.raises(FencingLost):
            held.open()
    assert [row.holder for row in store.devices()] == ["another machine"]


def test_an_answer_that_was_computed_while_the_lease_ran_out_is_not_given(store, tmp_path):
    build(store, tmp_path)
    card = StandInCard()
    with residence(store, tmp_path, card) as held, held.open() as shard:

        def late(step):
            if step == "launch":
                store.now_s += 1

        card.before = late
        assert shard.search(np.ones((1, 24)), 3).found.tolist() == [3]
        store.now_s += 23
        with pytest.raises(FencingLost, match="was not confirmed for 30 s"):
            shard.search(np.ones((1, 24)), 3)
        assert card.launched.count("flat_take_cosine") == 3  # canaries, and both questions
    assert taken(card) == 0


def test_a_zombie_that_was_overtaken_while_it_loaded_publishes_nothing(store, tmp_path):
    build(store, tmp_path)
    steps = []

    def sleep_at_products(step):
        steps.append(step)
        if step == "products" and steps.count(step) == 1:
            held._until_s += 20_000  # its own clock stood still: only the database knows
            overtake(store)

    card = StandInCard(before=sleep_at_products)
    with residence(store, tmp_path, card) as held:
        with pytest.raises(FencingLost, match="no longer holds"):
            held.open()
        assert taken(card) == 0
    assert [(row.holder, row.generation) for row in store.devices()] == [("another machine", None)]


def test_a_database_that_is_away_is_waited_for_until_the_lease_is_over(
    store, tmp_path, monkeypatch
):
    build(store, tmp_path)
    asked = []

    def away(*args, **more):
        asked.append(args)
        raise DatabaseUnavailable("away")

    with residence(store, tmp_path, StandInCard()) as held, held.open() as shard:
        monkeypatch.setattr(store, "renew_device", away)
        store.now_s += 9
        held.beat()
        assert not asked
        store.now_s += 12
        held.beat()
        assert len(asked) == 1
        assert shard.search(np.ones((1, 24)), 3).found.tolist() == [3]
        store.now_s += 9
        with pytest.raises(FencingLost, match="was not confirmed"):
            held.beat()


def test_the_lease_is_renewed_without_anybody_asking(store, tmp_path):
    build(store, tmp_path)
    renewed = threading.Event()

    class Noticing:
        def __getattr__(self, name):
            return getattr(store, name)

        def renew_device(self, lease, *, ttl_s):
            store.renew_device(lease, ttl_s=ttl_s)
            renewed.set()

    with Residence(Noticing(), tmp_path, "notes", StandInCard(), ttl_s=0.6) as held:
        assert renewed.wait(60)
        assert held.lost is None


def test_an_opened_generation_stays_whole_while_the_next_one_is_switched_to(store, rows, tmp_path):
    first = build(store, tmp_path)
    card = StandInCard()
    with residence(store, tmp_path, card) as held:
        old = held.open()
        before = old.search(rows[1][:5], 4)
        store.put(rows[0], -rows[1])
        build(store, tmp_path)
        new = held.open()
        shutil.rmtree(first.folder)
        same_answers(old.search(rows[1][:5], 4), before)
        assert not np.array_equal(new.search(rows[1][:5], 4).I, before.I)
        assert [row.generation for row in store.devices()] == [2]
        size = taken(card)
        old.close()
        assert taken(card) < size
        same_answers(new.search(-rows[1][:5], 4), before)
        with pytest.raises(UsageError, match="was closed"):
            old.search(rows[1][:5], 4)


def test_a_reader_that_fails_ends_the_others_and_gives_the_memory_back(
    store, tmp_path, small_chunks
):
    build(store, tmp_path)
    sent = threading.Semaphore(7)

    def fail(step):
        if step == "send" and not sent.acquire(blocking=False):
            raise DeviceRefused("the card fell off the bus")

    card = StandInCard(before=fail)
    with residence(store, tmp_path, card) as held:
        with pytest.raises(DeviceRefused, match="fell off the bus"):
            held.open(readers=3)
        card.before = lambda step: None
        assert taken(card) == 0
        assert held.open(readers=3).search(np.ones((1, 24)), 2).found.tolist() == [2]


def test_a_trial_says_what_a_card_took_and_lets_it_go(store, tmp_path):
    build(store, tmp_path)
    receipts.issue(store, tmp_path, "notes", quality={})
    card = StandInCard()
    there, here = (
        shards.trial(store, tmp_path, "notes", device=device) for device in (card, "cpu")
    )
    assert (there.rows, there.bytes) == (here.rows, here.bytes) == (400, 400 * (24 * 4 + 8))
    assert there.device_bytes > there.bytes > here.device_bytes == 0
    assert there.canaries_of_receipt
    assert taken(card) == 0
    flip(next(iter((tmp_path / "notes" / "g000001-t1" / "ids").iterdir())), 130)
    with pytest.raises(CorruptionFound, match="ids block of lists"):
        shards.trial(store, tmp_path, "notes")


def test_neighbours_are_asked_by_id_and_one_that_is_not_there_is_named(store, rows, tmp_path):
    build(store, tmp_path)
    ids, vectors = rows
    store.remove(ids[:3])
    shards.refresh(store, tmp_path, "notes")
    with shards.open_shard(store, tmp_path, "notes", device=StandInCard()) as shard:
        found = shards.neighbours(shard, [int(ids[9]), int(ids[20])], 4)
        asked = shard.search(vectors[[9, 20]], 4)
        assert [[near.id for near in found[int(ids[at])]] for at in (9, 20)] == asked.I.tolist()
        assert found[int(ids[9])][0].id == ids[9]
        with pytest.raises(UsageError, match=f"has no row {ids[1]} in generation 2"):
            shards.neighbours(shard, [int(ids[1])], 4)
