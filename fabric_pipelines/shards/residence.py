"""A shard's residence on one card: the device lease, kept by renewals, and the generations loaded under it.

A shard lives on one card at a time. Whoever holds its device lease may load generations and answer from them; a
lease that was lost (another card took it, or the database did not confirm it in time) ends that at once: the
memory is given back, and every search after it, also one that was under way, raises FencingLost instead of answering.
A generation counts as loaded only by the statement that checks the lease, after its digests and canaries held.
Generations are opened beside each other, so a switch takes nothing from a reader of the older one. The holder's
own clock is used for one thing: to stop early. It counts from before each question to the database.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from fabric_pipelines.analytics.search import Queries, Ranked
from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.device.card import Card
from fabric_pipelines.errors import (
    CorruptionFound,
    FabricError,
    FencingLost,
    TransientError,
    UsageError,
)
from fabric_pipelines.shards import canary
from fabric_pipelines.shards.device_copy import DeviceCopy
from fabric_pipelines.shards.disk import locked
from fabric_pipelines.shards.generation import Generation, shard_folder
from fabric_pipelines.shards.scrub import damage_of
from fabric_pipelines.shards.shard import Shard, open_generation
from fabric_pipelines.shards.store import VectorStore, store_of

LEASE_TTL_S = 30.0


class Residence:
    """The right to hold shard `name` on `card`. A context manager; closing releases what was opened under it."""

    def __init__(
        self,
        db: Database | VectorStore,
        root: Path,
        name: str,
        card: Card,
        *,
        ttl_s: float = LEASE_TTL_S,
        clock: Clock = SYSTEM_CLOCK,
        keep: bool = True,
    ) -> None:
        """keep: a thread renews the lease; otherwise the caller calls `beat`. Raises UsageError for a shard without a
        generation, AlreadyRunning while another card, or another process on this one, has it."""
        self._store, self._root, self.name, self.card = store_of(db), root, name, card
        self._ttl_s, self._clock = ttl_s, clock
        open_generation(self._store, root, name)
        self._open: list[DeviceShard] = []
        self._guard = threading.Lock()
        self.lost: str | None = None
        self._ended = threading.Event()
        with ExitStack() as undo:
            undo.enter_context(locked(self._lock_path(), self._busy()))
            asked_s = clock.monotonic_s()
            holder = f"{socket.gethostname()}:{card.address}"
            self.lease = self._store.acquire_device(name, holder, ttl_s=ttl_s)
            self._until_s = asked_s + ttl_s
            self._undo = undo.pop_all()
        self._keeper = threading.Thread(target=self._keep, name=f"lease of {name}", daemon=True)
        if keep:
            self._keeper.start()

    def __enter__(self) -> Residence:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(
        self,
        number: int | None = None,
        *,
        dtype: str = "<f4",
        budget_bytes: int | None = None,
        readers: int | None = None,
    ) -> DeviceShard:
        """Load generation `number` (default: the current one), check it and say in the database that this card has it.
        Raises what DeviceCopy raises, and FencingLost."""
        self.require()
        generation = open_generation(self._store, self._root, self.name, number)
        shard = DeviceShard(generation, self)
        try:
            shard.copy = DeviceCopy(
                self.card,
                shard,
                dtype=dtype,
                budget_bytes=budget_bytes,
                readers=readers,
                beat=self._beat_and_require,
            )
            self._hash_the_rest(generation)
            with self._guard:
                self._open.append(shard)
            self._ask_canaries(shard)
            self._beat_and_require()
            self._publish(generation)
        except BaseException:
            shard.close()
            raise
        return shard

    def beat(self) -> None:
        """Renew once a third of the lease has gone. FencingLost, with everything released, when it is lost; a database
        that is away is asked again until the lease has run out by this clock."""
        now = self._clock.monotonic_s()
        if self.lost is None and now >= self._until_s - self._ttl_s * 2 / 3:
            try:
                self._store.renew_device(self.lease, ttl_s=self._ttl_s)
                self._until_s = now + self._ttl_s
            except FencingLost as fault:
                self._lose(str(fault))
            except TransientError:
                pass  # `require` ends it when the time is up
        self.require()

    def require(self) -> None:
        """FencingLost unless the lease is held for sure."""
        if self.lost is None and self._clock.monotonic_s() >= self._until_s:
            self._lose(
                f"the device lease of shard {self.name!r} (token {self.lease.token}) was not confirmed for "
                f"{self._ttl_s:.0f} s: what {self.card.name} had loaded is released; open the shard again"
            )
        if self.lost is not None:
            raise FencingLost(self.lost)

    def close(self) -> None:
        """Release what is loaded and give the lease back; one that cannot be given back runs out."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._keeper.is_alive() and self._keeper is not threading.current_thread():
            self._keeper.join()
        for shard in self._opened():
            shard.let_go()
        if self.lost is None:
            self.lost = f"the residence of shard {self.name!r} on {self.card.name} was closed"
            with suppress(TransientError):
                self._store.release_device(self.lease)
        self._undo.close()

    def forget(self, shard: DeviceShard) -> None:
        with self._guard:
            if shard in self._open:
                self._open.remove(shard)

    def _opened(self) -> list[DeviceShard]:
        with self._guard:
            return list(self._open)

    def _beat_and_require(self) -> None:
        self.beat()

    def _hash_the_rest(self, generation: Generation) -> None:
        """Tombstones, centroids and whatever else is not on the card, where what came back was hashed."""
        for entry in generation.manifest.files:
            if entry.role.removeprefix("layer_") not in ("vectors", "ids"):
                self._beat_and_require()
                damage = damage_of(generation, entry)
                if damage is not None:
                    raise CorruptionFound(str(damage))

    def _publish(self, generation: Generation) -> None:
        try:
            self._store.publish_device(self.lease, generation=generation.number)
        except FencingLost as fault:
            self._lose(str(fault))
            raise

    def _ask_canaries(self, shard: DeviceShard) -> None:
        """Answers from the card against those of the receipt; without one, against those from the maps."""
        known = canary.known_answers(self._store, shard.generation)
        if known is None:
            with Shard(shard.generation) as mapped:
                known = canary.answers(mapped)
        try:
            changed = next(canary.changed_answers(shard, known), None)
        except (KeyError, TypeError, ValueError) as fault:
            raise CorruptionFound(
                f"the receipt's canaries of shard {self.name!r} cannot be read ({fault!r}): issue it again"
            ) from fault
        if changed is not None:
            raise CorruptionFound(f"{self.card.name}: {changed}")

    def _lose(self, why: str) -> None:
        self.lost = why
        for shard in self._opened():
            shard.let_go()

    def _keep(self) -> None:
        while not self._ended.wait(self._ttl_s / 6):
            try:
                self.beat()
            except FencingLost:
                return
            except FabricError as fault:
                self._lose(f"the device lease of shard {self.name!r} cannot be renewed: {fault}")
                return

    def _lock_path(self) -> Path:
        card = re.sub(r"[^A-Za-z0-9]+", "-", self.card.address)
        return shard_folder(self._root, self.name) / f".card-{card}.lock"

    def _busy(self) -> str:
        return (
            f"shard {self.name!r} is loaded on {self.card.name} by another reader of this machine: "
            "close that one, use the same Residence for several generations, or open it with device='cpu'"
        )


class DeviceShard(Shard):
    """A shard whose exact search runs on a card; rows, ids, columns and probed search are those of the maps.

    Exact answers equal the CPU's bit for bit. Queries that the card does not settle (see analytics.resident) are
    answered from the maps, and counted in `answered_by_cpu`."""

    def __init__(self, generation: Generation, residence: Residence) -> None:
        super().__init__(generation)
        self.copy: DeviceCopy | None = None
        self.also_close: list[Callable[[], None]] = []
        self.answered_by_cpu = 0
        self._residence = residence

    @property
    def token(self) -> int:
        """Of the device lease under which it answers."""
        return self._residence.lease.token

    def close(self) -> None:
        self._residence.forget(self)
        self.let_go()
        super().close()
        while self.also_close:
            self.also_close.pop(0)()

    def let_go(self) -> None:
        """Give the card's memory back; the maps stay."""
        if self.copy is not None:
            self.copy.release()

    def _exact(self, queries: Queries, k: int) -> Ranked:
        self._residence.require()
        copy = self.copy
        scan = copy.scan if copy is not None else None
        if copy is None or scan is None:
            self._residence.require()
            raise UsageError(f"shard {self.manifest.name!r} was closed; open it again")
        answer, left = scan.search(queries, k)
        del scan  # what `require` raises must not keep the card's memory
        if copy.scan is None:
            copy.release()  # it was released meanwhile, and this search held on to the rest
        if len(left):
            self.answered_by_cpu += len(left)
            rest = super()._exact(Queries(queries.wide[left], queries.metric), k)
            for there, here in ((answer.D, rest.D), (answer.I, rest.I), (answer.found, rest.found)):
                there[left] = here
        self._residence.require()
        return answer
