-- A watch is bound to one relation and to the columns that it had, by their numbers: a name can be given to another table
-- or column (a swap by rename), and what is under the name then is not what was watched. What the trigger cannot compare
-- it notes as "anything may have moved" and lets the owner's statement pass.

-- The one way from a relation's name to its number, as fabric_pipelines.dataplane.sql.relation quotes it for reading:
-- "table" or "schema.table", each part as it is written (capitals count), in double quotes where it holds a dot.
-- Null where there is no such relation or the name is none.
create function fabric.relation_oid(relation_name text) returns oid
language sql stable
as $$
    select case when relation_name ~ '^("([^"]|"")+"|[^".]+)(\.("([^"]|"")+"|[^".]+))?$' then (
        select to_regclass(string_agg(
            case when part[1] like '"%' then part[1] else quote_ident(part[1]) end, '.' order by place))::oid
        from regexp_matches(relation_name, '"(?:[^"]|"")+"|[^".]+', 'g') with ordinality as found (part, place)
    ) end
$$;

-- Numbers and types of the columns of these names, in the order of the names; with '*' also a sum over all columns of the
-- relation, for a filter may read any. Null where one of them is missing.
create function fabric.column_numbers(relation oid, names text[]) returns text
language sql stable
as $$
    select case when bool_and(a.attnum is not null)
                then string_agg(a.attnum || ':' || a.atttypid, ' ' order by n.name collate "C") end
        || case when '*' = any (names) then (
               select ' ' || md5(string_agg(format('%s %s:%s', attnum, atttypid, attname), ',' order by attnum))
               from pg_catalog.pg_attribute
               where attrelid = relation and attnum > 0 and not attisdropped) else '' end
    from unnest(names) as n (name)
    left join pg_catalog.pg_attribute as a
        on a.attrelid = relation and a.attname = n.name and a.attnum > 0 and not a.attisdropped
    where n.name <> '*'
$$;

-- What a generation keeps as relation_files: the files that its rows lay in and the columns that they were read from. What is
-- older than this migration has files only, and its columns are believed.
create function fabric.bound_files(relation oid, names text[]) returns text
language sql stable
as $$
    select coalesce(fabric.relation_files(relation), '') || ' / ' || coalesce(fabric.column_numbers(relation, names), '?')
$$;

-- A crash of the server empties such a table, or a partition of it, and no trigger fires.
create function fabric.is_unlogged(relation oid) returns boolean
language sql stable
as $$
    with recursive part (oid) as (
        select relation
        union
        select i.inhrelid from pg_inherits as i join part as p on i.inhparent = p.oid
    )
    select exists (select from pg_class as c join part using (oid) where c.relpersistence = 'u')
$$;

create table fabric.unwatched (
    relation  oid primary key,
    at        timestamptz not null default clock_timestamp()
);
comment on table fabric.unwatched is 'relations that the operator wants no triggers on; their shards are audited';

alter table fabric.source_change drop constraint source_change_op_check;
alter table fabric.source_change add constraint source_change_op_check
    check (op in ('insert', 'update', 'delete', 'truncate', 'unknown'));

alter table fabric.watched add column bound text;
comment on column fabric.watched.bound is 'fabric.column_numbers of what it compares; null: one is missing';

-- Columns that a watch reads by name. A whole-row comparison reads none by name, so '*' is not among them.
create function fabric.watched_names(watch bigint) returns text[]
language sql stable
as $$
    select array_agg(distinct name)
    from fabric.watched as w
    cross join lateral (
        select unnest(array[w.id_column, w.vector_column, w.scope_column])
        union
        select column_name from fabric.watched_column where watch_id = w.watch_id
    ) as used (name)
    where w.watch_id = watch and name is not null and name <> '*'
$$;

-- Whether the columns under the names are still those that the watch compares.
create function fabric.watch_bound(watch bigint) returns boolean
language sql stable
as $$
    select coalesce(w.bound = fabric.column_numbers(w.relation, fabric.watched_names(watch)), false)
    from fabric.watched as w where w.watch_id = watch
$$;

-- Makes the trigger function of a watch anew, from what stands in its rows, bound to the columns that are there now. Images
-- are compared, not values: 0.0 and -0.0 are equal and have different bytes, and a content hash is over bytes. Only where
-- the note itself cannot be written (a full disk) does the owner's statement fail: no verdict could tell of it otherwise.
create function fabric.bind_watch(watch bigint) returns void
language plpgsql
as $body$
declare
    w        fabric.watched;
    scope    text;
    old_key  text;
    new_key  text;
    compared text[];
    changed  text;
begin
    update fabric.watched set bound = fabric.column_numbers(relation, fabric.watched_names(watch))
    where watch_id = watch;
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
                return null;
            end if;
            if fabric.column_numbers(tg_relid, %7$L::text[]) is distinct from %8$L then
                raise undefined_column; -- another column under the name
            end if;
            if tg_op = 'INSERT' then
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
        exception when others then
            begin
                insert into fabric.source_change (watch_id, op, rows)
                select watch_id, 'unknown', 0 from fabric.watched where watch_id = %2$s;
            exception when undefined_table or undefined_column or foreign_key_violation then
                null; -- the log is gone, and with it every verdict from it
            end;
            return null;
        end
        $note$
        $make$,
        format('note_change_%s', watch), watch, w.id_column, w.vector_column, scope, changed,
        fabric.watched_names(watch), w.bound);
end
$body$;

-- Binds a watch and makes its four triggers anew. Whoever calls it holds a lock on the relation that no writer holds with it.
create or replace function fabric.arm_watch(watch bigint) returns void
language plpgsql
as $body$
declare
    w     fabric.watched;
    event text;
begin
    perform fabric.bind_watch(watch);
    select * into strict w from fabric.watched where watch_id = watch;
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

-- As before, and also anew where the columns under the names are others than those that are compared. Null, and nothing done,
-- for a relation that is to be left alone (fabric.unwatch).
create or replace function fabric.watch(relation_name text, id_column text, vector_column text, columns text[])
returns bigint
language plpgsql
as $body$
declare
    target  regclass := fabric.relation_oid(relation_name)::regclass;
    needed  text[];
    missing text;
    known   bigint;
begin
    if target is null then
        raise undefined_table using message = format('there is no relation %s', relation_name);
    end if;
    if exists (select from fabric.unwatched as u where u.relation = target::oid) then
        return null;
    end if;
    select array_agg(distinct c) into needed
    from unnest(columns || vector_column || (
        select array_agg(attname::text) from pg_attribute
        where attrelid = target and attname = 'submission_id' and attnum > 0 and not attisdropped
    )) as c
    where c is not null and c <> id_column;
    select string_agg(c, ', ') into missing
    from unnest(needed || id_column) as c
    where c <> '*' and fabric.column_numbers(target::oid, array[c]) is null;
    if missing is not null then
        raise undefined_column using message = format('relation %s has no column %s', relation_name, missing);
    end if;
    select w.watch_id into known
    from fabric.watched as w
    where w.relation = target::oid and w.id_column = watch.id_column
      and w.vector_column = watch.vector_column
      and fabric.watch_armed(w.watch_id) and fabric.watch_bound(w.watch_id)
      and needed <@ (select array_agg(c.column_name) from fabric.watched_column as c
                     where c.watch_id = w.watch_id);
    if known is not null then
        return known;
    end if;
    execute format('lock table %s in share row exclusive mode', target);
    insert into fabric.watched as w (relation, id_column, vector_column)
    values (target::oid, watch.id_column, watch.vector_column)
    on conflict do nothing;
    select w.watch_id into strict known
    from fabric.watched as w
    where w.relation = target::oid and w.id_column = watch.id_column
      and w.vector_column = watch.vector_column;
    if not fabric.watch_armed(known) or not fabric.watch_bound(known) then
        delete from fabric.watched_column as c where c.watch_id = known; -- what was missed, nobody knows
    end if;
    update fabric.watched as w
    set scope_column = case when 'submission_id' = any (needed) then 'submission_id' end
    where w.watch_id = known;
    insert into fabric.watched_column (watch_id, column_name, xid)
    select known, c, pg_current_xact_id() from unnest(needed) as c
    on conflict do nothing;
    perform fabric.arm_watch(known);
    return known;
end
$body$;

-- Takes a watch away with its triggers, wherever a restore has put them, and its function.
create function fabric.forget_watch(watch bigint) returns void
language plpgsql
as $body$
declare
    t pg_trigger;
begin
    for t in
        select * from pg_trigger
        where not tgisinternal
          and tgname in (
              format('fabric_watch_%s_insert', watch), format('fabric_watch_%s_update', watch),
              format('fabric_watch_%s_delete', watch), format('fabric_watch_%s_truncate', watch))
    loop
        execute format('drop trigger %I on %s', t.tgname, t.tgrelid::regclass);
    end loop;
    execute format('drop function if exists fabric.%I()', format('note_change_%s', watch));
    delete from fabric.watched where watch_id = watch;
end
$body$;

create or replace function fabric.forget_watches_from_elsewhere() returns void
language plpgsql
as $body$
begin
    perform fabric.forget_watch(watch_id) from fabric.watched
    where cluster <> fabric.cluster() or not exists (select from pg_class where oid = relation);
end
$body$;

-- Leave a relation alone from now on: its watches go, and none is made until fabric.allow_watch. Returns how many went.
create function fabric.unwatch(target oid) returns bigint
language plpgsql
as $body$
declare
    gone bigint;
begin
    insert into fabric.unwatched (relation) values (target) on conflict do nothing;
    select count(fabric.forget_watch(watch_id)::text) into gone from fabric.watched where relation = target;
    return gone;
end
$body$;

create or replace function fabric.ring(relation_name text) returns void
language sql
as $$
    select pg_notify('fabric_stale', relation_name)
    where exists (select from fabric.watched where relation = fabric.relation_oid(relation_name))
$$;

create or replace view fabric.shard_movement as
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
        when s.relation_oid is distinct from fabric.relation_oid(s.relation)
             or s.cluster is distinct from (select system_identifier::text from pg_control_system())
             or s.database_id is distinct from (select value from fabric.meta where key = 'database_id')
            then 'elsewhere'
        when w.watch_id is null then 'unwatched'
        when fabric.is_unlogged(s.relation_oid) then 'unlogged'
        when not fabric.watch_armed(w.watch_id) then 'disarmed'
        when not fabric.watch_bound(w.watch_id)
             or nullif(split_part(b.files, ' / ', 2), '') <> fabric.column_numbers(s.relation_oid, s.names)
            then 'other columns'
        when exists (
            select from unnest(s.needed) as needed (column_name)
            where not exists (
                select from fabric.watched_column as c
                where c.watch_id = w.watch_id and c.column_name = needed.column_name
                  and pg_visible_in_snapshot(c.xid, b.snapshot))) then 'begun later'
        when w.pruned_below > pg_snapshot_xmin(b.snapshot) then 'pruned'
        when split_part(b.files, ' / ', 1) <> coalesce(fabric.relation_files(s.relation_oid), '') then 'rewritten'
        when m.unknown then 'not compared'
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
        src ->> 'relation_files' as files,
        (src ->> 'pg_snapshot')::pg_snapshot as snapshot,
        array(select jsonb_object_keys(src -> 'columns') except select src ->> 'id_column')
            || case when src ->> 'filter' is null then array[]::text[] else array['*'] end as needed,
        array(select jsonb_object_keys(src -> 'columns'))
            || case when src ->> 'submission_id' is null then array[]::text[] else array['submission_id'] end
            || case when src ->> 'filter' is null then array[]::text[] else array['*'] end as names
    from (select g.manifest -> 'source' as src) as source
) as s
left join fabric.watched as w
    on w.relation = s.relation_oid and w.id_column = s.id_column and w.vector_column = s.vector_column
left join lateral (
    select audit_id, snapshot, relation_files, inserted, updated, deleted
    from fabric.shard_audit
    where shard = g.name and generation = g.generation
    order by audit_id desc limit 1
) as a on true
cross join lateral (
    select coalesce(a.snapshot, s.snapshot) as snapshot,
           case when a.audit_id is null then s.files else a.relation_files end as files
) as b
cross join lateral (
    select
        coalesce(bool_or(c.op = 'truncate'), false) as truncated,
        coalesce(bool_or(c.op = 'unknown'), false) as unknown,
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
      and (c.op in ('truncate', 'unknown') or s.submission_id is null or c.scope = s.submission_id)
) as m;

-- Watches that are there keep their triggers; what the triggers run is the text above from now on.
select fabric.bind_watch(watch_id) from fabric.watched
where cluster = fabric.cluster() and exists (select from pg_class where oid = relation);
