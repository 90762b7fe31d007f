"""The timers of the protocol, as rows for ``docs/protocol.md``: timer, side, length, what happens when it ends."""

from __future__ import annotations

from kvshuttle.handoff import claim, holdings, inbox, ledger, orders, reader_lease


def rows() -> list[list[str]]:
    """All of them."""
    return [*_of_reads(), *_of_pushes()]


def _of_reads() -> list[list[str]]:
    renewals = reader_lease.RENEWALS_PER_LEASE
    return [
        ["acquire", "reader", "`acquire_timeout_s`", "`acquire_timed_out`: the prompt is computed here"],
        [
            "renewal",
            "reader",
            f"1/{renewals} of the lease",
            f"a renew is sent; {renewals - 1} may be lost in a row",
        ],
        [
            "last submit",
            "reader",
            "lease less `submit_margin_s`",
            "before a read: `lease_lost`; no read starts, or is submitted, from here on",
        ],
        ["read", "reader", "`read_timeout_s`; the lease is renewed meanwhile", "the workers report the read as failed"],
        ["wait", "reader", "`total_wait_s`", "`waited_too_long`: the lease is given back"],
        ["lease", "reader", f"{1 - reader_lease.MAX_CLOCK_RATE_SKEW:.1%} of the granted duration", "`read_too_late`"],
        [
            "lease",
            "holder",
            f"what the reader wants, at most {ledger.MAX_LEASE_S:g} s",
            "the lease is gone; renewals get a negative number",
        ],
        ["holding", "holder", "as granted, and never before a lease on it", "the blocks are let go"],
        [
            "keeping",
            "holder",
            "`decoder_kv_blocks_ttl`, renewed by use or by the router where that is wanted",
            f"nothing is lent any more; a lease outlives it by {holdings.FIRST_LEASE_S:g} s at most, or lasts for"
            f" {holdings.LAST_LEASE_S:g} s from its last renewal",
        ],
    ]


def _of_pushes() -> list[list[str]]:
    quickest, slowest = claim.FIRST_WITHDRAW_S, claim.SLOWEST_WITHDRAW_S
    return [
        ["register", "reader of a push", "`acquire_timeout_s`", "`register_timed_out`: the prompt is computed here"],
        [
            "proceed",
            "reader of a push",
            f"{claim.PROCEED_INTERVAL_S:g} s, at most 1/{reader_lease.RENEWALS_PER_LEASE} of the lease",
            "it says again that it waits",
        ],
        [
            "quiet",
            "reader of a push",
            "`push_timeout_s` after blocks arrived or the holder said that it computes",
            "`went_quiet`: the registration is withdrawn, and a fetch tried",
        ],
        ["wait", "reader of a push", "`total_wait_s`", "`waited_too_long`: the same without a fetch"],
        [
            "withdrawal",
            "reader of a push",
            f"{quickest:g} s, doubled up to {slowest:g} s",
            "asked again, until it is confirmed",
        ],
        [
            "confirmation",
            "reader of a push",
            "`confirm_timeout_s`",
            "the load fails, and its blocks are quarantined until it is confirmed",
        ],
        ["registration", "holder", "as the reader wants, from each proceed", "the workers close it"],
        [
            "orders",
            "holder",
            f"{orders.FIRST_ASK_S:g} s, doubled up to {orders.SLOWEST_ASK_S:g} s",
            "orders are sent again until they are taken, and drained where they close",
        ],
        ["leftovers", "reader's worker", f"{inbox.EARLY_LIFE_S:g} s", "notifications that nobody expected are dropped"],
    ]
