-- Tables of the fabric, version 1. {{vector}} is halfvec where pgvector offers it, else bytea (little-endian
-- float16); the choice is made once per database and kept in fabric.meta('vector_type').

create table fabric.journals (
    journal_id     text primary key,
    incarnation    bigint not null unique,
    registered_at  timestamptz not null default clock_timestamp()
);

-- One row a task. No index beside the primary key: each one costs every landed row (a btree 1.2-1.7 x, an
-- HNSW index 97 x the write).
create table fabric.generate (
    task_id             bigint primary key,
    submission_id       text not null,
    source_row          bigint not null,
    finish_reason       text not null,
    prompt_tokens       integer not null,
    output_tokens       integer,
    output              bytea,
    text                text,
    artifact_uri        text,
    artifact_sha256     text,
    engine              text not null,
    engine_fingerprint  text not null,
    attempts            smallint not null,
    t_start_us          bigint not null,
    t_end_us            bigint not null,
    metadata            bytea not null,
    landed_at           timestamptz not null default now()
);
comment on column fabric.generate.output is 'token ids, packed little-endian uint32';

create table fabric.embed (
    task_id             bigint primary key,
    submission_id       text not null,
    source_row          bigint not null,
    finish_reason       text not null,
    prompt_tokens       integer not null,
    dim                 integer,
    vector              {{vector}},
    artifact_uri        text,
    artifact_sha256     text,
    engine              text not null,
    engine_fingerprint  text not null,
    attempts            smallint not null,
    t_start_us          bigint not null,
    t_end_us            bigint not null,
    metadata            bytea not null,
    landed_at           timestamptz not null default now()
);

create table fabric.hidden_states (like fabric.embed including all);

-- Functions without a sink of their own: never dropped, kept as they came.
create table fabric.results (
    task_id             bigint primary key,
    function            text not null,
    submission_id       text not null,
    source_row          bigint not null,
    finish_reason       text not null,
    prompt_tokens       integer not null,
    output_tokens       integer,
    output              bytea,
    dim                 integer,
    vector              bytea,
    artifact_uri        text,
    artifact_sha256     text,
    engine              text not null,
    engine_fingerprint  text not null,
    attempts            smallint not null,
    t_start_us          bigint not null,
    t_end_us            bigint not null,
    metadata            bytea not null,
    landed_at           timestamptz not null default now()
);
comment on column fabric.results.output is 'token ids, packed little-endian uint32';
comment on column fabric.results.vector is 'elements, packed little-endian float16';

create table fabric.dead_letters (
    task_id             bigint primary key,
    function            text not null,
    submission_id       text not null,
    source_row          bigint not null,
    status              text not null,
    error_code          text not null,
    reason              text not null,
    prompt_tokens       integer not null,
    engine              text not null,
    engine_fingerprint  text not null,
    attempts            smallint not null,
    raw                 bytea,
    landed_at           timestamptz not null default now()
);
comment on column fabric.dead_letters.raw is 'the row as an Arrow IPC stream, as completion pulled it';

-- What each landing transaction did. Numbers of one landing, written in its transaction.
create table fabric.acks (
    xid         xid8 not null default pg_current_xact_id(),
    function    text not null,
    first_task  bigint not null,
    last_task   bigint not null,
    rows        integer not null,
    inserted    integer not null,
    dead        integer not null,
    size        bigint not null,
    landed_at   timestamptz not null default now(),
    primary key (xid, function)
);

create table fabric.artifacts (
    uri          text primary key,
    sha256       text not null,
    size         bigint not null,
    rows         bigint,
    recorded_at  timestamptz not null default clock_timestamp()
);

-- A shard belongs to one holder at a time; `token` only grows and fences off older holders. Time is the
-- database's own.
create table fabric.shard_lease (
    name     text primary key,
    holder   text not null,
    token    bigint not null,
    expires  timestamptz not null
);

create table fabric.shard_generation (
    name             text not null,
    generation       bigint not null,
    token            bigint not null,
    manifest_sha256  text not null,
    manifest         jsonb not null,
    published_at     timestamptz not null default clock_timestamp(),
    primary key (name, generation)
);

create table fabric.receipt (
    receipt_id  text primary key,
    shard       text not null,
    generation  bigint not null,
    statement   jsonb not null,
    issued_at   timestamptz not null default clock_timestamp()
);
create index receipt_of_generation on fabric.receipt (shard, generation);
