"""Messages of open streams, both ways, as JSON in the metadata of a DoExchange. See docs/protocol.md.

Three kinds: a subscription has rows pushed, a put stream puts, a take stream takes and finishes. The descriptor says
which, and the protocol version; `Opened` says the server's; the messages between them are of that version. What the
client wants answered has a `seq` of its choice, which the answer repeats.
"""

from __future__ import annotations

import msgspec

from flight.messages import Finished, Request, SharedRef
from flight.schema import StalenessPolicy
from flight.shared.layout import SharedTable
from flight.state.ledger import TakeStatus


class Subscribe(Request, tag="subscribe", tag_field="verb"):
    """Descriptor of a DoExchange: have rows pushed. `heartbeat_s` is how often the server speaks at least.

    shared: the wish for large leases in shared memory; `grant` is the first of the numbers that the server may use,
        one a lease, counting up.
    """

    table: str
    consumer: str
    max_rows: int
    min_rows: int = 1
    columns: list[str] | None = None
    policy_version: int | None = None
    lease_s: float = 60.0
    credit_rows: int | None = None
    credit_bytes: int | None = None
    heartbeat_s: float = 5.0
    shared: SharedRef | None = None


class PutStream(Request, tag="put_stream", tag_field="verb"):
    """Descriptor of a DoExchange: put rows, many times; each put is answered."""

    table: str
    writer: str = ""


class TakeStream(Request, tag="take_stream", tag_field="verb"):
    """Descriptor of a DoExchange: take the same columns, many times, and finish what was taken."""

    table: str
    consumer: str
    columns: list[str] | None = None


Exchange = Subscribe | PutStream | TakeStream


class _Said(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"):
    """Base of what a client says on the open stream; a field that the server does not know is refused."""


class _Answer(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of what a server says; a client ignores fields that it does not know."""


# ---- from the subscriber ----------------------------------------------------------------------------------------


class Grant(_Said, tag="credit"):
    """Let the server push more."""

    rows: int = 0
    bytes: int = 0


class AckRows(_Said, tag="ack"):
    """Finish the rows of a lease, or those of `uids` in it. `credit` grants anew what a subscriber finishes."""

    seq: int
    lease_id: str
    uids: list[str] | None = None
    step: int | None = None
    credit: Grant | None = None


class NackRows(_Said, tag="nack"):
    """Give the rows of a lease back, or skip them. `credit` is as in `AckRows`."""

    seq: int
    lease_id: str
    reason: str
    uids: list[str] | None = None
    requeue: bool = True
    credit: Grant | None = None


class RenewLease(_Said, tag="renew"):
    """Let a lease last `lease_s` from now."""

    seq: int
    lease_id: str
    lease_s: float


class Heartbeat(_Said, tag="heartbeat"):
    """Still there: the answer to each `Beat`. It also renews leases that wait for their turn."""

    renew: list[str] = []


class Adopt(_Said, tag="adopt"):
    """The policy version that the subscriber generates from or trains for now."""

    policy_version: int


FromSubscriber = Grant | AckRows | NackRows | RenewLease | Heartbeat | Adopt


class SharedSlots(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where the rows of a put lie: slots of the client's `connection`, in order."""

    connection: str
    slots: list[int]


class PutRows(_Said, tag="put"):
    """Put the batch that this comes with, or what lies in shared memory; waits up to `deadline_s` for room."""

    seq: int
    deadline_s: float = 30.0
    shared: SharedSlots | None = None


class TakeRows(_Said, tag="take"):
    """Lease rows, after finishing those of `ack`; if that is refused, nothing is taken."""

    seq: int
    max_rows: int
    min_rows: int = 1
    policy_version: int | None = None
    lease_s: float = 60.0
    deadline_s: float = 30.0
    ack: Finished | None = None
    shared: SharedRef | None = None


FromTaker = TakeRows | AckRows | NackRows | RenewLease

# ---- from the server --------------------------------------------------------------------------------------------


class Opened(_Answer, tag="opened"):
    """First message: the stream stands.

    heartbeat_s: as asked for by a subscription; other streams have no heartbeats.
    idle_s: how long the client of another stream may say nothing before its connection is closed.
    """

    v: int
    heartbeat_s: float | None = None
    idle_s: float | None = None


class Rows(_Answer, tag="rows"):
    """Metadata of a batch: number `part` of the `num_parts` batches of a lease of `num_rows` rows.

    num_bytes: what the lease costs of a credit in bytes.
    max_staleness, staleness_policy: by which bound rows were marked, for the staleness consumer.
    max_attempt: how often the row of it that was tried most was delivered, this time included.
    shared: where the rows lie, instead of a batch.
    """

    lease_id: str
    num_rows: int
    num_bytes: int
    policy_version: int
    max_staleness: int | None = None
    staleness_policy: str | None = None
    max_attempt: int = 1
    part: int = 0
    num_parts: int = 1
    shared: SharedTable | None = None


class Added(_Answer, tag="added"):
    """The rows of a put are in the table. `runs` are their numbers in order, as (first number, how many)."""

    seq: int
    num_rows: int
    num_duplicates: int = 0
    runs: list[tuple[int, int]] = []


class Taken(_Answer, tag="taken"):
    """Metadata of each of the `num_parts` batches of a take; without a batch if `shared` says where the rows lie, or
    there are none. Fields as in the metadata of a take's answer.
    """

    seq: int
    status: TakeStatus
    policy_version: int
    lease_id: str = ""
    num_rows: int = 0
    max_staleness: int | None = None
    staleness_policy: StalenessPolicy | None = None
    part: int = 0
    num_parts: int = 1
    shared: SharedTable | None = None


class Done(_Answer, tag="done"):
    """What the client asked for was done; `num_rows` as an ack or nack returns."""

    seq: int
    num_rows: int = 0


class Refused(_Answer, tag="refused"):
    """What the client asked for was not done. The stream goes on."""

    seq: int
    code: str
    message: str


class Beat(_Answer, tag="heartbeat"):
    """Still there; the subscriber should say so too."""


class Outdated(_Answer, tag="outdated"):
    """A newer policy version is out; no rows come until the subscriber has adopted it."""

    policy_version: int


class Sealed(_Answer, tag="sealed"):
    """No row will ever come. Acks are still taken."""


class Failed(_Answer, tag="failed"):
    """No more will come, for this reason; the subscriber should close the stream."""

    code: str
    message: str


FromServer = Opened | Rows | Done | Refused | Beat | Outdated | Sealed | Failed

ToPutter = Opened | Added | Refused
ToTaker = Opened | Taken | Done | Refused
