-- The database decides when a shard is stale. Statement triggers write one change row a statement (and a
-- submission), stamped with the transaction's id; a generation keeps the snapshot it was read in. What has moved
-- since is what that snapshot does not see: exact also for a writer that began before the build and committed
-- after it, which any counter or timestamp would miss. Runs on Postgres 15 and newer, with or without pgvector.

create table fabric.watched (
    watch_id       bigint generated always as identity primary key,
    relation       oid not null,
    id_column      text not null,
    vector_column  text not null,
    scope_column   text,
    pruned_below   xid8,
    unique (relation, id_column, vector_column)
);
comment on column fabric.watched.scope_column is 'rows of one value of it can be a source of their own; submission_id';
comment on column fabric.watched.pruned_below is 'changes of older transactions are gone; older snapshots need an audit';

-- Columns whose change moves a row. '*' is the whole row: a filter may read any column.
create table fabric.watched_column (
    watch_id     bigint not null references fabric.watched on delete cascade,
    column_name  text not null,
    xid          xid8 not null,
    primary key (watch_id, column_name)
);
comment on column fabric.watched_column.xid is 'since this transaction; a snapshot that does not see it is not covered';

create table fabric.source_change (
    change_id  bigint generated always as identity primary key,
    watch_id   bigint not null references fabric.watched on delete cascade,
    xid        xid8 not null default pg_current_xact_id(),
    op         text not null check (op in ('insert', 'update', 'delete', 'truncate')),
    scope      text not null default '',
    rows       bigint not null,
    ids        int8multirange not null default '{}',
    at         timestamptz not null default clock_timestamp()
);
create index source_change_of_watch on fabric.source_change (watch_id, xid);

-- What a comparison of the rows themselves found, for times that the change log does not cover. From its
-- snapshot on the log counts again.
create table fabric.shard_audit (
    audit_id    bigint generated always as identity primary key,
    shard       text not null,
    generation  bigint not null,
    snapshot    pg_snapshot not null,
    inserted    int8multirange not null,
    updated     int8multirange not null,
    deleted     int8multirange not null,
    at          timestamptz not null default clock_timestamp(),
    foreign key (shard, generation) references fabric.shard_generation (name, generation) on delete cascade
);
create index shard_audit_of_generation on fabric.shard_audit (shard, generation, audit_id);

-- Shard '*' holds the defaults; null in another row means the default.
create table fabric.staleness_policy (
    shard                 text primary key,
    max_changed_fraction  numeric check (max_changed_fraction between 0 and 1),
    max_deleted_fraction  numeric check (max_deleted_fraction between 0 and 1),
    rebuild_fraction      numeric check (rebuild_fraction between 0 and 1),
    min_recall            numeric check (min_recall between 0 and 1),
    max_age               interval check (max_age > interval '0'),
    quiet_period          interval check (quiet_period >= interval '0'),
    check (shard <> '*' or (max_changed_fraction is not null and max_deleted_fraction is not null
                            and rebuild_fraction is not null and quiet_period is not null))
);
insert into fabric.staleness_policy values ('*', 0.05, 0.02, 0.30, null, null, interval '0');

create function fabric.id_count(ids int8multirange) returns bigint
language sql immutable strict parallel safe
as $$ select coalesce(sum(upper(part) - lower(part)), 0)::bigint from unnest(ids) as part $$;

create function fabric.as_ranges(ids bigint[]) returns int8multirange
language sql immutable strict parallel safe
as $$ select coalesce(range_agg(int8range(id, id, '[]')), '{}') from unnest(ids) as id $$;

create function fabric.watch_armed(watch bigint) returns boolean
language sql stable
as $$
    select count(*) = 4
    from fabric.watched as w
    join pg_trigger as t on t.tgrelid = w.relation
    where w.watch_id = watch and t.tgenabled = 'A' and not t.tgisinternal
      and t.tgname in (
          format('fabric_watch_%s_insert', watch), format('fabric_watch_%s_update', watch),
          format('fabric_watch_%s_delete', watch), format('fabric_watch_%s_truncate', watch))
$$;

-- Makes the trigger function and the four triggers of a watch anew, from what stands in its rows. Whoever calls
-- it holds a lock on the relation that no writer holds with it. Images are compared, not values: 0.0 and -0.0
-- are equal and have different bytes, and a content hash is over bytes.
create function fabric.arm_watch(watch bigint) returns void
language plpgsql
as $body$
declare
    w        fabric.watched;
    scope    text;
    old_key  text;
    new_key  text;
    compared text[];
    changed  text;
    event    text;
begin
    select * into strict w from fabric.watched where watch_id = watch;
    scope := case when w.scope_column is null then $$''$$
                  else format('coalesce(r.%I::text, %L)', w.scope_column, '') end;
    select array_agg(column_name order by column_name) into compared
    from fabric.watched_column where watch_id = watch;
    new_key := (select string_agg(format('n.%I', c), ', ') from unnest(compared) as c where c <> '*');
    old_key := (select string_agg(format('o.%I', c), ', ') from unnest(compared) as c where c <> '*');
    if '*' = any (compared) then
        changed := 'coalesce(record_image_ne(n, o), true)'; -- the id moved: one side is missing
    else
        changed := format('record_image_ne(row(%s), row(%s))', new_key, old_key);
    end if;
    execute format(
        $make$
        create or replace function fabric.%1$I() returns trigger
        language plpgsql security definer set search_path = pg_catalog, pg_temp
        as $note$
        begin
            if tg_op = 'TRUNCATE' then
                insert into fabric.source_change (watch_id, op, rows) values (%2$s, 'truncate', 0);
            elsif tg_op = 'INSERT' then
                insert into fabric.source_change (watch_id, op, scope, rows, ids)
                select %2$s, 'insert', %5$s, count(*), range_agg(int8range(r.%3$I, r.%3$I, '[]'))
                from new_rows as r
                where r.%3$I is not null and r.%4$I is not null
                group by 3;
            elsif tg_op = 'DELETE' then
                insert into fabric.source_change (watch_id, op, scope, rows, ids)
                select %2$s, 'delete', %5$s, count(*), range_agg(int8range(r.%3$I, r.%3$I, '[]'))
                from old_rows as r
                where r.%3$I is not null and r.%4$I is not null
                group by 3;
            else
                insert into fabric.source_change (watch_id, op, scope, rows, ids)
                select %2$s, 'update', side.scope, count(distinct side.id),
                       range_agg(int8range(side.id, side.id, '[]'))
                from new_rows as n
                full join old_rows as o on o.%3$I = n.%3$I
                cross join lateral (
                    select r.%3$I::bigint as id, %5$s as scope from (select n.*) as r
                    union
                    select r.%3$I::bigint, %5$s from (select o.*) as r
                ) as side
                where (n.%4$I is not null or o.%4$I is not null) and %6$s and side.id is not null
                group by side.scope;
            end if;
            return null;
        end
        $note$
        $make$,
        format('note_change_%s', watch), watch, w.id_column, w.vector_column, scope, changed);
    foreach event in array array['insert', 'update', 'delete', 'truncate'] loop
        execute format('drop trigger if exists %I on %s',
                       format('fabric_watch_%s_%s', watch, event), w.relation::regclass);
        execute format(
            'create trigger %I after %s on %s %s for each statement execute function fabric.%I()',
            format('fabric_watch_%s_%s', watch, event), event, w.relation::regclass,
            case event
                when 'insert' then 'referencing new table as new_rows'
                when 'update' then 'referencing old table as old_rows new table as new_rows'
                when 'delete' then 'referencing old table as old_rows'
                else ''
            end,
            format('note_change_%s', watch));
        -- ALWAYS: a session whose role is "replica" writes rows too
        execute format('alter table %s enable always trigger %I', w.relation::regclass,
                       format('fabric_watch_%s_%s', watch, event));
    end loop;
end
$body$;

-- Watch a relation for a source that reads `columns` beside id and vector ('*': any column). Returns the watch's
-- id. What is watched already costs two look-ups; else it waits for writers in flight, for a change that one of
-- them makes must not fall between the triggers and the first snapshot.
create function fabric.watch(relation_name text, id_column text, vector_column text, columns text[])
returns bigint
language plpgsql
as $body$
declare
    target regclass := to_regclass(relation_name);
    needed text[];
    known  bigint;
begin
    if target is null then
        raise undefined_table using message = format('there is no relation %s', relation_name);
    end if;
    select array_agg(distinct c) into needed
    from unnest(columns || vector_column || (
        select array_agg(attname::text) from pg_attribute
        where attrelid = target and attname = 'submission_id' and attnum > 0 and not attisdropped
    )) as c
    where c is not null and c <> id_column;
    select w.watch_id into known
    from fabric.watched as w
    where w.relation = target::oid and w.id_column = watch.id_column
      and w.vector_column = watch.vector_column
      and fabric.watch_armed(w.watch_id)
      and needed <@ (select array_agg(c.column_name) from fabric.watched_column as c
                     where c.watch_id = w.watch_id);
    if known is not null then
        return known;
    end if;
    execute format('lock table %s in share row exclusive mode', target);
    insert into fabric.watched as w (relation, id_column, vector_column, scope_column)
    values (target::oid, watch.id_column, watch.vector_column,
            case when 'submission_id' = any (needed) then 'submission_id' end)
    on conflict do nothing;
    select w.watch_id into strict known
    from fabric.watched as w
    where w.relation = target::oid and w.id_column = watch.id_column
      and w.vector_column = watch.vector_column;
    if not fabric.watch_armed(known) then
        delete from fabric.watched_column as c where c.watch_id = known; -- what was missed, nobody knows
    end if;
    insert into fabric.watched_column (watch_id, column_name, xid)
    select known, c, pg_current_xact_id() from unnest(needed) as c
    on conflict do nothing;
    perform fabric.arm_watch(known);
    return known;
end
$body$;

-- The current generation of every shard, with what the log knows of its source since.
create view fabric.shard_movement as
select
    g.name as shard,
    g.generation,
    g.published_at,
    s.relation,
    s.rows,
    w.watch_id,
    b.snapshot,
    s.submission_id,
    case
        when s.relation_oid is distinct from to_regclass(s.relation)::oid
             or s.cluster is distinct from (select system_identifier::text from pg_control_system())
             or s.database_id is distinct from (select value from fabric.meta where key = 'database_id')
            then 'elsewhere'
        when w.watch_id is null then 'unwatched'
        when not fabric.watch_armed(w.watch_id) then 'disarmed'
        when exists (
            select from unnest(s.needed) as needed (column_name)
            where not exists (
                select from fabric.watched_column as c
                where c.watch_id = w.watch_id and c.column_name = needed.column_name
                  and pg_visible_in_snapshot(c.xid, b.snapshot))) then 'begun later'
        when w.pruned_below > pg_snapshot_xmin(b.snapshot) then 'pruned'
        else 'complete'
    end as log,
    m.truncated,
    coalesce(a.inserted, '{}') + m.inserted as inserted,
    coalesce(a.updated, '{}') + m.updated as updated,
    coalesce(a.deleted, '{}') + m.deleted as deleted,
    m.first_change_at,
    m.last_change_at,
    m.last_change_id,
    a.audit_id
from (select name, max(generation) as generation from fabric.shard_generation group by name) as newest
join fabric.shard_generation as g using (name, generation)
cross join lateral (
    select
        src ->> 'relation' as relation,
        (src ->> 'relation_oid')::oid as relation_oid,
        src ->> 'cluster' as cluster,
        src ->> 'database' as database_id,
        src ->> 'id_column' as id_column,
        src ->> 'vector_column' as vector_column,
        src ->> 'submission_id' as submission_id,
        (src ->> 'rows')::bigint as rows,
        (src ->> 'pg_snapshot')::pg_snapshot as snapshot,
        array(select jsonb_object_keys(src -> 'columns') except select src ->> 'id_column')
            || case when src ->> 'filter' is null then array[]::text[] else array['*'] end as needed
    from (select g.manifest -> 'source' as src) as source
) as s
left join fabric.watched as w
    on w.relation = s.relation_oid and w.id_column = s.id_column and w.vector_column = s.vector_column
left join lateral (
    select audit_id, snapshot, inserted, updated, deleted
    from fabric.shard_audit
    where shard = g.name and generation = g.generation
    order by audit_id desc limit 1
) as a on true
cross join lateral (select coalesce(a.snapshot, s.snapshot) as snapshot) as b
cross join lateral (
    select
        coalesce(bool_or(c.op = 'truncate'), false) as truncated,
        coalesce(range_agg(c.ids) filter (where c.op = 'insert'), '{}') as inserted,
        coalesce(range_agg(c.ids) filter (where c.op = 'update'), '{}') as updated,
        coalesce(range_agg(c.ids) filter (where c.op = 'delete'), '{}') as deleted,
        min(c.at) as first_change_at,
        max(c.at) as last_change_at,
        max(c.change_id) as last_change_id
    from fabric.source_change as c
    where c.watch_id = w.watch_id
      and c.xid >= pg_snapshot_xmin(b.snapshot) -- all older ones are seen by it; the index ends here
      and not pg_visible_in_snapshot(c.xid, b.snapshot)
      and (c.op = 'truncate' or s.submission_id is null or c.scope = s.submission_id)
) as m;

-- The policy's verdict. "audit": the log does not cover this generation, so only the rows themselves can tell.
create view fabric.shard_staleness as
select
    v.*,
    v.verdict <> 'fresh' and (
        v.verdict in ('age', 'quality', 'audit') or v.last_change_at is null
        or v.last_change_at < clock_timestamp() - v.quiet_period
        -- writers that never rest must not keep a shard stale for ever
        or v.first_change_at < clock_timestamp() - 10 * v.quiet_period) as due
from (
    select
        n.*,
        case
            when n.log = 'elsewhere' or n.truncated or n.moved_fraction >= n.rebuild_fraction then 'rebuild'
            when n.log <> 'complete' then 'audit'
            when n.deleted_fraction > n.max_deleted_fraction then 'deleted'
            when n.moved_fraction > n.max_changed_fraction then 'changed'
            when n.recall < n.min_recall then 'quality'
            when n.age > n.max_age then 'age'
            else 'fresh'
        end as verdict
    from (
        select
            m.shard, m.generation, m.relation, r.receipt_id, m.log, m.rows,
            fabric.id_count(m.inserted) as inserted,
            fabric.id_count(m.updated) as updated,
            fabric.id_count(m.deleted) as deleted,
            m.truncated,
            fabric.id_count(m.inserted + m.updated + m.deleted) as moved,
            fabric.id_count(m.inserted + m.updated + m.deleted)::numeric / greatest(m.rows, 1)
                as moved_fraction,
            fabric.id_count(m.deleted)::numeric / greatest(m.rows, 1) as deleted_fraction,
            clock_timestamp() - m.published_at as age,
            r.recall,
            m.first_change_at, m.last_change_at, m.last_change_id,
            coalesce(p.max_changed_fraction, d.max_changed_fraction) as max_changed_fraction,
            coalesce(p.max_deleted_fraction, d.max_deleted_fraction) as max_deleted_fraction,
            coalesce(p.rebuild_fraction, d.rebuild_fraction) as rebuild_fraction,
            coalesce(p.min_recall, d.min_recall) as min_recall,
            coalesce(p.max_age, d.max_age) as max_age,
            coalesce(p.quiet_period, d.quiet_period) as quiet_period
        from fabric.shard_movement as m
        join fabric.staleness_policy as d on d.shard = '*'
        left join fabric.staleness_policy as p on p.shard = m.shard and m.shard <> '*'
        left join lateral (
            select
                receipt_id,
                coalesce(
                    statement #>> '{predicate,quality,recall_at_10_probed}',
                    statement #>> '{predicate,quality,recall_at_10}')::numeric as recall
            from fabric.receipt
            where shard = m.shard and generation = m.generation
            order by issued_at desc limit 1
        ) as r on true
    ) as n
) as v;

-- Forget changes that every current generation has seen; returns how many rows went.
create function fabric.prune_changes() returns bigint
language sql
as $$
    with floor as (
        select w.watch_id,
               coalesce(min(pg_snapshot_xmin(m.snapshot)), pg_snapshot_xmin(pg_current_snapshot())) as xid
        from fabric.watched as w
        left join fabric.shard_movement as m using (watch_id)
        group by w.watch_id
    ), gone as (
        delete from fabric.source_change as c
        using floor as f
        where c.watch_id = f.watch_id and c.xid < f.xid
        returning c.watch_id
    ), marked as (
        update fabric.watched as w
        set pruned_below = f.xid
        from floor as f
        where w.watch_id = f.watch_id and w.watch_id in (select watch_id from gone)
          and (w.pruned_below is null or w.pruned_below < f.xid)
    )
    select count(*) from gone
$$;

-- The doorbell: says that something moved in a relation, never what. A writer rings after its commit, in a
-- statement of its own, because NOTIFY holds a database-wide lock while its transaction commits. The view is the
-- truth, and whoever listens reads it at intervals as well.
create function fabric.ring(relation_name text) returns void
language sql
as $$
    select pg_notify('fabric_stale', relation_name)
    where exists (select from fabric.watched where relation = to_regclass(relation_name)::oid)
$$;
