-- Every statement of the data plane that is not a migration, as named blocks: `-- name: x` up to the next
-- one. {braces} are identifiers or fragments composed by psycopg.sql, %(names)s are bound parameters.

-- name: bootstrap
create schema if not exists fabric;
create table if not exists fabric.meta (
    key    text primary key,
    value  text not null
);
create table if not exists fabric.migrations (
    number      integer primary key,
    name        text not null,
    sha256      text not null,
    applied_at  timestamptz not null default clock_timestamp()
);

-- name: migration_lock
select pg_advisory_xact_lock(hashtextextended('fabric.migrations', 0));

-- name: applied_migrations
select number, name, sha256 from fabric.migrations order by number;

-- name: record_migration
insert into fabric.migrations (number, name, sha256) values (%(number)s, %(name)s, %(sha256)s);

-- name: pgvector
select (select extversion from pg_extension where extname = 'vector'), to_regtype('halfvec') is not null;

-- name: table_sizes
select c.relname::text, c.reltuples::bigint, pg_total_relation_size(c.oid)
from pg_class as c
where c.relnamespace = to_regnamespace('fabric') and c.relkind = 'r'
order by 3 desc, 1;

-- name: database_size
select pg_database_size(current_database());

-- name: schema_rights
select current_user::text, current_database()::text,
       has_database_privilege(current_database(), 'create'),
       (select pg_get_userbyid(nspowner)::text from pg_namespace where nspname = 'fabric'),
       (select pg_has_role(nspowner, 'member') from pg_namespace where nspname = 'fabric');

-- name: get_meta
select value from fabric.meta where key = %(key)s;

-- name: set_meta
insert into fabric.meta (key, value) values (%(key)s, %(value)s)
on conflict (key) do update set value = excluded.value;

-- name: cluster
select system_identifier::text, current_setting('server_version_num')::int, current_database()
from pg_control_system();

-- name: journals_lock
lock table fabric.journals in share row exclusive mode;

-- name: journals
select journal_id, incarnation from fabric.journals order by registered_at, journal_id;

-- name: holds_results
select exists (select from fabric.acks) or exists (select from fabric.dead_letters);

-- name: add_journal
insert into fabric.journals (journal_id, incarnation) values (%(journal_id)s, %(incarnation)s);

-- name: snapshot
select pg_current_snapshot()::text,
       case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end::text,
       (select timeline_id from pg_control_checkpoint()),
       fabric.bound_files(%(oid)s::oid, %(names)s::text[]);

-- name: column_types
-- With the type under a domain, and whether no value may be missing.
select attname, format_type(atttypid, null), attrelid::bigint,
    (
        with recursive under (type_oid) as (
            select atttypid
            union all
            select t.typbasetype from under join pg_type as t on t.oid = under.type_oid where t.typtype = 'd'
        )
        select format_type(type_oid, null)
        from under join pg_type as t on t.oid = under.type_oid
        where t.typtype <> 'd'
    ),
    attnotnull
from pg_attribute
where attrelid = fabric.relation_oid(%(relation)s) and attnum > 0 and not attisdropped
order by attnum;

-- name: row_security
select row_security_active(%(oid)s::oid), current_user::text;

-- name: hold_relation
-- Until the transaction ends neither it nor a column of it is given another name.
select from {relation} where {filter} limit 0

-- name: copy_source_rows
copy (
    select {id}::bigint, {vector}{columns} from {relation} where {filter} and {only} order by {id}
) to stdout (format binary)

-- name: count_missing
-- By column, rows that have no value there.
select {counts} from {relation} where {filter} and {only}

-- name: content_sums
select bucket, count(*), sum(lane_0), sum(lane_1)
from (
    select
        (id & 1023)::integer as bucket,
        ('x' || encode(substr(digest, 1, 8), 'hex'))::bit(64)::bigint as lane_0,
        ('x' || encode(substr(digest, 9, 8), 'hex'))::bit(64)::bigint as lane_1
    from (
        select {id}::bigint as id, sha256(int8send({id}::bigint) || {wire}) as digest
        from {relation} where {filter}
        offset 0 -- keeps the digest from being computed once per lane
    ) as digests
) as lanes
group by bucket
order by bucket

-- name: engine_fingerprints
select distinct engine_fingerprint from {relation} where {filter} order by 1

-- name: acquire_shard
insert into fabric.shard_lease as held (name, holder, token, expires)
values (%(name)s, %(holder)s, 1, clock_timestamp() + %(ttl_s)s * interval '1 second')
on conflict (name) do update
    set holder = excluded.holder, token = held.token + 1, expires = excluded.expires
    where held.expires <= clock_timestamp() or held.holder = excluded.holder
returning token;

-- name: shard_holder
select holder, token, greatest(0, extract(epoch from expires - clock_timestamp()))::float8
from fabric.shard_lease where name = %(name)s;

-- name: renew_shard
update fabric.shard_lease
set expires = clock_timestamp() + %(ttl_s)s * interval '1 second'
where name = %(name)s and holder = %(holder)s and token = %(token)s and expires > clock_timestamp();

-- name: release_shard
update fabric.shard_lease
set expires = clock_timestamp()
where name = %(name)s and holder = %(holder)s and token = %(token)s;

-- name: acquire_device
insert into fabric.device_lease as held (name, holder, token, expires)
values (%(name)s, %(holder)s, 1, clock_timestamp() + %(ttl_s)s * interval '1 second')
on conflict (name) do update
    set holder = excluded.holder, token = held.token + 1, expires = excluded.expires,
        generation = null, loaded_at = null
    where held.expires <= clock_timestamp() or held.holder = excluded.holder
returning token;

-- name: device_holder
select holder, token, greatest(0, extract(epoch from expires - clock_timestamp()))::float8
from fabric.device_lease where name = %(name)s;

-- name: renew_device
update fabric.device_lease
set expires = clock_timestamp() + %(ttl_s)s * interval '1 second'
where name = %(name)s and holder = %(holder)s and token = %(token)s and expires > clock_timestamp();

-- name: release_device
update fabric.device_lease
set expires = clock_timestamp(), generation = null, loaded_at = null
where name = %(name)s and holder = %(holder)s and token = %(token)s;

-- name: publish_device
update fabric.device_lease
set generation = %(generation)s, loaded_at = clock_timestamp()
where name = %(name)s and holder = %(holder)s and token = %(token)s and expires > clock_timestamp();

-- name: devices
select name, holder, token, greatest(0, extract(epoch from expires - clock_timestamp()))::float8,
    generation, loaded_at
from fabric.device_lease
where expires > clock_timestamp() and (%(name)s::text is null or name = %(name)s)
order by name;

-- name: last_generation
select coalesce(max(generation), 0) from fabric.shard_generation where name = %(name)s;

-- name: publish_generation
insert into fabric.shard_generation (name, generation, token, manifest_sha256, manifest)
select name, %(generation)s, token, %(manifest_sha256)s, %(manifest)s
from fabric.shard_lease
where name = %(name)s and holder = %(holder)s and token = %(token)s and expires > clock_timestamp()
for update;

-- name: published
select name, generation, token, manifest_sha256, manifest, published_at, pruned_at, pinned_at, pin_reason
from fabric.shard_generation
where name = %(name)s
order by generation;

-- name: lock_shard
-- Publication, pruning and pins of one shard take turns at this row.
select token from fabric.shard_lease
where name = %(name)s
for update;

-- name: lock_held_shard
select token from fabric.shard_lease
where name = %(name)s and holder = %(holder)s and token = %(token)s and expires > clock_timestamp()
for update;

-- name: prune_generation
update fabric.shard_generation
set pruned_at = clock_timestamp(), manifest = fabric.manifest_kept(name, generation, manifest)
where name = %(name)s and generation = %(generation)s and pruned_at is null and pinned_at is null
  and not fabric.generation_needed(name, generation);

-- name: forget_audits
delete from fabric.shard_audit where shard = %(name)s and generation = %(generation)s;

-- name: pin_generation
update fabric.shard_generation
set pinned_at = clock_timestamp(), pin_reason = %(reason)s
where name = %(name)s and generation = %(generation)s and pruned_at is null;

-- name: unpin_generation
update fabric.shard_generation
set pinned_at = null, pin_reason = null
where name = %(name)s and generation = %(generation)s and pinned_at is not null;

-- name: current_generation
select name, generation, token, manifest_sha256, manifest, published_at, pruned_at, pinned_at, pin_reason
from fabric.shard_generation
where name = %(name)s and (%(generation)s::bigint is null or generation = %(generation)s)
order by generation desc
limit 1;

-- name: shard_names
select distinct name from fabric.shard_generation order by name;

-- name: insert_receipt
insert into fabric.receipt (receipt_id, shard, generation, statement)
values (%(receipt_id)s, %(shard)s, %(generation)s, %(statement)s)
on conflict (receipt_id) do nothing;

-- name: find_receipts
select receipt_id, shard, generation, statement, issued_at
from fabric.receipt
where (%(prefix)s::text is null or starts_with(receipt_id, %(prefix)s))
  and (%(shard)s::text is null or shard = %(shard)s)
  and (%(generation)s::bigint is null or generation = %(generation)s)
order by issued_at desc, receipt_id
limit %(limit)s;

-- name: list_receipts
-- Without the statements, which are large, and with what became of the generation's bytes.
select r.receipt_id, r.shard, r.generation, r.issued_at,
    case when g.pruned_at is not null then 'pruned' when g.pinned_at is not null then 'pinned' when g.name is not null then 'kept' end,
    count(*) over ()
from fabric.receipt as r
left join fabric.shard_generation as g on g.name = r.shard and g.generation = r.generation
where %(shard)s::text is null or r.shard = %(shard)s
order by r.issued_at desc, r.receipt_id
limit %(limit)s;

-- name: durable_commits
-- A role or server may have it off; "landed" must mean durable. Stronger settings stay.
select set_config('synchronous_commit', 'on', false)
where current_setting('synchronous_commit') = 'off';

-- name: bounded_waits
-- Whoever locks a results table makes landing wait and try again, not hang; as long as that has a writer other functions
-- share the rest.
set lock_timeout = '5s';

-- name: current_xid
select pg_current_xact_id()::text;

-- name: xact_status
select pg_xact_status(%(xid)s::xid8);

-- name: refusal_accepted
select accepted_at is not null from fabric.refusals
where function = %(function)s and sqlstate = %(sqlstate)s and message = %(message)s and constraint_ = %(constraint)s;

-- name: forget_refusals
delete from fabric.refusals
where function = %(function)s and accepted_at is null
  and (sqlstate, message, constraint_) is distinct from (%(sqlstate)s, %(message)s, %(constraint)s);

-- name: note_refusal
insert into fabric.refusals (function, sqlstate, message, constraint_)
values (%(function)s, %(sqlstate)s, %(message)s, %(constraint)s)
on conflict (function, sqlstate, message, constraint_) do update set last_said = now();

-- name: refusals
select function, sqlstate, message, constraint_, since, last_said, accepted_at from fabric.refusals
where %(function)s::text is null or function = %(function)s
order by function, accepted_at nulls first, since;

-- name: accept_refusal
-- Those that wait for it first, else those that were accepted before.
update fabric.refusals as r set accepted_at = coalesce(r.accepted_at, now())
from (select ctid from fabric.refusals where function = %(function)s order by accepted_at is not null, last_said desc limit 1) as last
where r.ctid = last.ctid
returning r.function, r.sqlstate, r.message, r.constraint_, r.since, r.last_said, r.accepted_at;

-- name: withdraw_refusals
delete from fabric.refusals where function = %(function)s and accepted_at is not null;

-- name: look_at_constraints
-- COMMIT would look at the deferred ones, when no row can be told from another any more.
set constraints all immediate;

-- name: defer_constraints
set constraints all deferred;

-- name: owners_triggers
-- Triggers that see an insert and are not the fabric's own, which are of its schema and see statements. Only those can
-- leave a row out of the table that was counted: rules do not see COPY, and ON CONFLICT refuses a table that has one.
select exists (
    select from pg_trigger as t
    join pg_proc as p on p.oid = t.tgfoid
    where t.tgrelid = to_regclass(%(table)s) and not t.tgisinternal and t.tgenabled <> 'D' and t.tgtype & 4 = 4
        and (t.tgtype & 1 = 1 or p.pronamespace is distinct from to_regnamespace('fabric'))
);

-- name: insert_nothing
-- Triggers of the statement see it all the same.
insert into {table} ({columns}) select {columns} from {table} where false

-- name: defaults_not_sent
select pg_get_expr(d.adbin, d.adrelid)
from pg_attrdef as d
join pg_attribute as a on a.attrelid = d.adrelid and a.attnum = d.adnum
where d.adrelid = to_regclass(%(table)s) and a.attgenerated = '' and not a.attname = any(%(sent)s)
order by a.attnum;

-- name: in_table
select task_id from {table} where task_id = any(%(task_ids)s)

-- name: has_letters
select exists (select from fabric.dead_letters where task_id between %(first_task)s and %(last_task)s);

-- name: letters_of
select task_id from fabric.dead_letters where task_id = any(%(task_ids)s);

-- name: not_in_table
select sent.task_id from unnest(%(task_ids)s::bigint[]) as sent (task_id)
where not exists (select from {table} as landed where landed.task_id = sent.task_id)

-- name: make_stage
create temporary table if not exists {stage}
(like {table} including defaults) on commit delete rows

-- name: copy_rows
copy {target} ({columns}) from stdin (format binary)

-- name: merge_stage
insert into {table} ({columns}) select {columns} from {stage} on conflict (task_id) do nothing

-- name: bury_stage
-- A later death of a requeued task replaces the earlier one; the same one again changes nothing. A death that
-- somebody held on to until its task was requeued and landed is none any more.
insert into fabric.dead_letters as old ({columns})
select {columns} from {stage} as new
where not exists (select from {results} as landed where landed.task_id = new.task_id)
on conflict (task_id) do update
    set (status, error_code, reason, prompt_tokens, engine, engine_fingerprint, attempts, raw, requeues, consumer, landed_at)
        = (excluded.status, excluded.error_code, excluded.reason, excluded.prompt_tokens, excluded.engine,
           excluded.engine_fingerprint, excluded.attempts, excluded.raw, excluded.requeues, excluded.consumer, excluded.landed_at)
    where old.requeues < excluded.requeues

-- name: unbury
-- What was decided in an earlier round; of the same round the letter stays, and its task with it.
delete from fabric.dead_letters as old
using unnest(%(task_ids)s::bigint[], %(requeues)s::integer[]) as new (task_id, requeues)
where old.task_id = new.task_id and old.requeues < new.requeues

-- name: explain
-- TIMING costs two clock reads a row and says nothing about WAL.
explain (analyze, wal, timing off, format json) {statement}

-- name: empty_stage
delete from {stage}

-- name: own_wal
select wal_bytes::bigint from pg_stat_get_backend_wal(pg_backend_pid());

-- name: flush_statistics
-- Otherwise the numbers of this backend lag by a second.
select pg_stat_force_next_flush();

-- name: table_parts
-- What makes a row of this table dearer: further indexes by access method, triggers that fire on insert.
select am.amname::text
from pg_index as i
join pg_class as c on c.oid = i.indexrelid
join pg_am as am on am.oid = c.relam
where i.indrelid = to_regclass(%(table)s) and not i.indisprimary
union all
select case when tgtype & 1 = 1 then 'row trigger' else 'statement trigger' end
from pg_trigger
where tgrelid = to_regclass(%(table)s) and not tgisinternal and tgenabled <> 'D' and tgtype & 4 = 4
order by 1;

-- name: probe
-- The smallest transaction that must reach the disk; it leaves no row. Timed where it runs: bulk's threads in the asking
-- process hold the interpreter's lock for milliseconds, which says nothing of the database.
select clock_timestamp();
begin;
select pg_logical_emit_message(true, 'fabric probe', '');
commit;
select clock_timestamp();

-- name: signal_wal_since_redo
select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), redo_lsn)::float8
       / pg_size_bytes(current_setting('max_wal_size'))
from pg_control_checkpoint();

-- name: signal_checkpoints_requested_17
select num_requested from pg_stat_checkpointer;

-- name: signal_checkpoints_requested_15
select checkpoints_req from pg_stat_bgwriter;

-- name: signal_wal_buffers_full
select wal_buffers_full from pg_stat_wal;

-- name: signal_replication_lag_bytes
select max(pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn))::bigint from pg_stat_replication;

-- name: signal_lock_waiters
select count(*)
from pg_locks as l
join pg_stat_activity as a using (pid)
where not l.granted and a.datname = current_database() and a.application_name <> %(application)s;

-- name: acknowledge
insert into fabric.acks (function, first_task, last_task, rows, inserted, dead, size, ids)
values (%(function)s, %(first_task)s, %(last_task)s, %(rows)s, %(inserted)s, %(dead)s, %(size)s,
        %(ids)s::int8multirange)
-- Last of all and until the commit: who buries and who lands tasks take turns, so that the later one sees what the other
-- decided of them. Those that only land hold it together.
returning case when %(dead)s > 0 then pg_advisory_xact_lock(hashtextextended('fabric.decided', 0))::text
               else pg_advisory_xact_lock_shared(hashtextextended('fabric.decided', 0))::text end;

-- name: one_snapshot
set transaction isolation level repeatable read, read only;

-- name: count_acks
select count(ids), count(*) - count(ids) from fabric.acks;

-- name: acked_functions
select distinct function from fabric.acks where ids is not null order by function;

-- name: lost
select count(*), (array_agg(id order by id))[1:%(shown)s]
from (
    select distinct id
    from fabric.acks as a
    cross join unnest(a.ids) as r (run)
    cross join generate_series(lower(run), upper(run) - 1) as id
    where a.function = %(function)s and a.ids is not null
) as landed
where not exists (select from {table} where task_id = id)
  and not exists (select from fabric.dead_letters where task_id = id)

-- name: never_landed
select lower(run), upper(run)
from unnest(
    %(ids)s::int8multirange
    - coalesce(
        (
            -- a landing of scattered ids reaches far beyond the page that is asked for
            select range_agg(
                coalesce(ids, int8multirange(int8range(first_task, last_task, '[]')))
                * int8multirange(int8range(%(first)s, %(end)s))
            )
            from fabric.acks
            where last_task >= %(first)s and first_task < %(end)s and (ids is not null or %(whole)s)
        ),
        '{}'
    )
    - coalesce((select range_agg(ids) from fabric.given_up), '{}')
) as missing (run)
order by 1

-- name: proven
-- Nothing, unless the landings that it rests on are what they were.
select p.page, p.tasks, p.mark
from fabric.proven as p
join fabric.proven_by as b using (journal_id)
where journal_id = %(journal_id)s
  and (b.landings, b.mark) = (select landings, mark from fabric.landings_below(b.below))
  and b.given_up = (select coalesce(sum(tasks), 0) from fabric.given_up);

-- name: prove_page
insert into fabric.proven as known (journal_id, page, tasks, mark)
values (%(journal_id)s, %(page)s, %(tasks)s, %(mark)s)
on conflict (journal_id, page) do update set tasks = excluded.tasks, mark = excluded.mark;

-- name: proven_by
insert into fabric.proven_by as known (journal_id, below, landings, mark, given_up)
select %(journal_id)s, now.below, found.landings, found.mark,
       (select coalesce(sum(tasks), 0) from fabric.given_up)
from (select pg_snapshot_xmin(pg_current_snapshot()) as below) as now
cross join lateral fabric.landings_below(now.below) as found
on conflict (journal_id) do update
    set below = excluded.below, landings = excluded.landings, mark = excluded.mark, given_up = excluded.given_up;

-- name: give_up
insert into fabric.given_up (ids, tasks) values (%(ids)s::int8multirange, %(tasks)s);

-- name: has_given_up
select to_regclass('fabric.given_up')::text;

-- name: count_given_up
select coalesce(sum(tasks), 0)::bigint from fabric.given_up;

-- name: read_results
select {columns} from {table} where {filter} order by task_id

-- name: has_submission
select exists (select from {table} where submission_id = %(submission_id)s)

-- name: has_function
select exists (select from fabric.results where function = %(function)s)

-- name: read_dead_letters
select task_id, function, submission_id, source_row, status, error_code, reason, prompt_tokens, engine,
       engine_fingerprint, attempts, requeues, consumer, landed_at
from fabric.dead_letters
where (%(function)s::text is null or function = %(function)s)
  and (%(submission_id)s::text is null or submission_id = %(submission_id)s)
  and (%(error_code)s::text is null or error_code = %(error_code)s)
order by task_id
limit %(limit)s;

-- name: dead_letter_ids
select task_id
from fabric.dead_letters
where (%(function)s::text is null or function = %(function)s)
  and error_code = %(error_code)s
  and task_id > %(after)s
order by task_id
limit %(limit)s;

-- name: count_dead_letters
select error_code, count(*)
from fabric.dead_letters
where (%(function)s::text is null or function = %(function)s)
group by error_code
order by 2 desc, 1;

-- name: count_results
select 'generate', count(*) from fabric.generate
union all select 'embed', count(*) from fabric.embed
union all select 'hidden_states', count(*) from fabric.hidden_states
union all select 'results', count(*) from fabric.results
union all select 'dead_letters', count(*) from fabric.dead_letters;

-- name: unaccounted
-- An anti-join by id: rates or totals of two definitions can differ while nothing is missing.
select id
from unnest(%(task_ids)s::bigint[]) as asked (id)
where not exists (select from fabric.generate where task_id = id)
  and not exists (select from fabric.embed where task_id = id)
  and not exists (select from fabric.hidden_states where task_id = id)
  and not exists (select from fabric.results where task_id = id)
  and not exists (select from fabric.dead_letters where task_id = id)
order by id;

-- name: record_artifact
insert into fabric.artifacts (uri, sha256, size, rows)
values (%(uri)s, %(sha256)s, %(size)s, %(rows)s)
on conflict (uri) do nothing;

-- name: find_artifact
select uri, size, sha256, rows from fabric.artifacts where uri = %(uri)s;

-- name: relation_kind
select relkind::text, oid::bigint from pg_class where oid = fabric.relation_oid(%(relation)s);

-- name: watches_from_elsewhere
-- With the table that has the triggers now.
select w.watch_id, coalesce(
    (select tgrelid from pg_trigger where tgfoid = fabric.note_function(w.watch_id) order by tgrelid limit 1),
    w.relation)::bigint
from fabric.watched as w
where w.cluster <> fabric.cluster() or not exists (select from pg_class where oid = w.relation);

-- name: forget_watch
select fabric.forget_watch(%(watch)s);

-- name: waits_for_locks
-- One row a table and process in the way of the client `application`; pid 0 stands for a prepared transaction.
select format('%%s.%%s', n.nspname, c.relname),
       case
           when b.pid is null then 'a prepared transaction (pg_prepared_xacts)'
           else format('pid %%s (%%s, role %%s) since %%s', b.pid, coalesce(nullif(b.application_name, ''), b.backend_type, '?'),
                       coalesce(b.usename, '?'), coalesce(b.xact_start::text, 'a time that this role may not see'))
       end
from pg_stat_activity as a
join pg_locks as l on l.pid = a.pid and not l.granted and l.locktype = 'relation'
join pg_class as c on c.oid = l.relation
join pg_namespace as n on n.oid = c.relnamespace
cross join lateral unnest(pg_blocking_pids(a.pid)) as before (pid)
left join pg_stat_activity as b on b.pid = nullif(before.pid, 0)
where a.application_name = %(application)s and a.datname = current_database()
order by 1, 2;

-- name: is_template
select datistemplate from pg_database where datname = current_database();

-- name: template_encoding
select pg_encoding_to_char(encoding) from pg_database where datname = 'template1';

-- name: fabric_holders
select distinct format('pid %s (%s, role %s) since %s', a.pid, coalesce(nullif(a.application_name, ''), 'no name'), a.usename, a.xact_start)
from pg_locks as l
join pg_class as c on c.oid = l.relation
join pg_stat_activity as a on a.pid = l.pid
where l.locktype = 'relation' and l.granted and l.pid <> pg_backend_pid()
  and l.database = (select oid from pg_database where datname = current_database())
  and c.relnamespace = to_regnamespace('fabric');

-- name: judge_filter
select fabric.judge_filter(%(relation)s, %(filter)s);

-- name: filter_fault
select fabric.filter_fault(%(relation)s, %(filter)s);

-- name: autovacuum_holds
select exists (
           select from pg_locks as l
           join pg_stat_activity as a using (pid)
           where l.locktype = 'relation' and l.relation = %(relation)s::oid and l.granted
             and l.database = (select oid from pg_database where datname = current_database())
             and l.mode = any (%(modes)s::text[]) and a.backend_type = 'autovacuum worker'),
       (select setting::integer from pg_settings where name = 'deadlock_timeout');

-- name: lock_holders
-- A prepared transaction has no process; what it is called stands beside the number that it holds a lock on as well.
select case
    when p.gid is not null then format('prepared transaction %%L since %%s', p.gid, p.prepared)
    else format('pid %%s (%%s, role %%s) since %%s', l.pid, coalesce(nullif(a.application_name, ''), a.backend_type, '?'),
                coalesce(a.usename, '?'), coalesce(a.xact_start::text, 'a time that this role may not see'))
end
from pg_locks as l
left join pg_stat_activity as a using (pid)
left join pg_locks as x
    on l.pid is null and x.pid is null and x.locktype = 'transactionid' and x.virtualtransaction = l.virtualtransaction
left join pg_prepared_xacts as p on p.transaction = x.transactionid
where l.locktype = 'relation' and l.relation = %(relation)s::oid and l.granted
  and l.database = (select oid from pg_database where datname = current_database())
  and l.mode = any (%(modes)s::text[]) and l.pid is distinct from pg_backend_pid()
group by 1
order by 1;

-- name: watch
select fabric.watch(%(relation)s, %(id)s, %(vector)s, %(columns)s::text[]);

-- name: relation_of
-- Of a shard's current generation, or else of a relation by its name.
select coalesce(
    (select (manifest #>> '{source,relation_oid}')::oid from fabric.shard_generation
     where name = %(name)s order by generation desc limit 1),
    fabric.relation_oid(%(name)s))::bigint,
    (select manifest #>> '{source,relation}' from fabric.shard_generation
     where name = %(name)s order by generation desc limit 1);

-- name: shards_of_relation
select name from fabric.shard_generation as g
where generation = (select max(generation) from fabric.shard_generation where name = g.name)
  and (manifest #>> '{source,relation_oid}')::oid = %(relation)s::oid
order by name;

-- name: unwatch
select fabric.unwatch(%(relation)s::oid);

-- name: allow_watch
delete from fabric.unwatched where relation = %(relation)s::oid;

-- name: staleness
select shard, generation, relation, receipt_id, log, rows, inserted, updated, deleted, truncated, moved,
       moved_fraction::float8, deleted_fraction::float8, extract(epoch from age)::float8, recall::float8,
       last_change_at, verdict, due, min_recall::float8
from fabric.shard_staleness
where %(shard)s::text is null or shard = %(shard)s
order by shard;

-- name: movement
select generation, log, truncated from fabric.shard_movement where shard = %(shard)s;

-- name: copy_moved_ids
copy (
    select id
    from fabric.shard_movement as m,
         unnest(m.inserted + m.updated + m.deleted) as part,
         generate_series(lower(part), upper(part) - 1) as id
    where m.shard = {shard}
    order by id
) to stdout (format binary)

-- name: in_moved_ids
{id} in (
    select id
    from fabric.shard_movement as m,
         unnest(m.inserted + m.updated + m.deleted) as part,
         generate_series(lower(part), upper(part) - 1) as id
    where m.shard = {shard}
)

-- name: record_audit
insert into fabric.shard_audit (shard, generation, snapshot, relation_files, inserted, updated, deleted)
select %(shard)s, %(generation)s, %(snapshot)s::pg_snapshot, %(relation_files)s,
       fabric.as_ranges(%(inserted)s::bigint[]), fabric.as_ranges(%(updated)s::bigint[]),
       fabric.as_ranges(%(deleted)s::bigint[]);

-- name: prune_changes
select fabric.prune_changes();

-- name: policies
select shard, max_changed_fraction::float8, max_deleted_fraction::float8, rebuild_fraction::float8,
       min_recall::float8, extract(epoch from max_age)::float8, extract(epoch from quiet_period)::float8
from fabric.staleness_policy order by shard;

-- name: add_policy
insert into fabric.staleness_policy (shard)
select %(shard)s where not exists (select from fabric.staleness_policy where shard = %(shard)s);

-- name: set_policy
update fabric.staleness_policy set
    max_changed_fraction = case when %(set_max_changed_fraction)s then %(max_changed_fraction)s::numeric
                                else max_changed_fraction end,
    max_deleted_fraction = case when %(set_max_deleted_fraction)s then %(max_deleted_fraction)s::numeric
                                else max_deleted_fraction end,
    rebuild_fraction = case when %(set_rebuild_fraction)s then %(rebuild_fraction)s::numeric
                            else rebuild_fraction end,
    min_recall = case when %(set_min_recall)s then %(min_recall)s::numeric else min_recall end,
    max_age = case when %(set_max_age_s)s then %(max_age_s)s::float8 * interval '1 second' else max_age end,
    quiet_period = case when %(set_quiet_period_s)s then %(quiet_period_s)s::float8 * interval '1 second'
                        else quiet_period end
where shard = %(shard)s
returning shard, max_changed_fraction::float8, max_deleted_fraction::float8, rebuild_fraction::float8,
          min_recall::float8, extract(epoch from max_age)::float8, extract(epoch from quiet_period)::float8;

-- name: ring
select fabric.ring(%(relation)s);
