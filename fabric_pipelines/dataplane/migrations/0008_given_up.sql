-- Tasks that the broker retired, that this database does not hold since it was restored from an older state, and that an
-- operator gave up. A start asks for all others.
create table fabric.given_up (
    ids       int8multirange not null,
    tasks     bigint not null,
    given_at  timestamptz not null default clock_timestamp()
);
