"""Messages of a subscription, both ways, as JSON in the metadata of a DoExchange stream. See docs/protocol.md.

The descriptor says the protocol version, `Opened` says the server's; the messages between them are of that version.
What the subscriber wants answered has a `seq` of its choice, which the answer repeats.
"""

from __future__ import annotations

import msgspec

from flight.messages import Request


class Subscribe(Request, tag="subscribe", tag_field="verb"):
    """Descriptor of a DoExchange: have rows pushed. `heartbeat_s` is how often the server speaks at least."""

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


class _Said(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"):
    """Base of what a subscriber says on the open stream; a field that the server does not know is refused."""


class _Answer(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of what a server says; a subscriber ignores fields that it does not know."""


# ---- from the subscriber ----------------------------------------------------------------------------------------


class Grant(_Said, tag="credit"):
    """Let the server push more."""

    rows: int = 0
    bytes: int = 0


class AckRows(_Said, tag="ack"):
    """Finish the rows of a lease, or those of `uids` in it."""

    seq: int
    lease_id: str
    uids: list[str] | None = None
    step: int | None = None


class NackRows(_Said, tag="nack"):
    """Give the rows of a lease back, or skip them."""

    seq: int
    lease_id: str
    reason: str
    uids: list[str] | None = None
    requeue: bool = True


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

# ---- from the server --------------------------------------------------------------------------------------------


class Opened(_Answer, tag="opened"):
    """First message: the subscription stands."""

    v: int
    heartbeat_s: float


class Rows(_Answer, tag="rows"):
    """Metadata of a batch: number `part` of the `num_parts` batches of a lease of `num_rows` rows.

    num_bytes: what the lease costs of a credit in bytes.
    max_staleness, staleness_policy: by which bound rows were marked, for the staleness consumer.
    max_attempt: how often the row of it that was tried most was delivered, this time included.
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


class Done(_Answer, tag="done"):
    """What the subscriber asked for was done; `num_rows` as an ack or nack returns."""

    seq: int
    num_rows: int = 0


class Refused(_Answer, tag="refused"):
    """What the subscriber asked for was not done. The stream goes on."""

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
