-- What a watch did not see: a child that was away and came back, triggers that were off and on again, a table that is written
-- through its parent, a filter whose answer changes while no row does. And arming takes no lock that a reader feels.

-- When each child, at any depth, was attached, and when the id column was last given another place in a tree of tables:
-- numbers of the transactions, which VACUUM, ANALYZE and a freeze leave alone. A child that was detached, changed and
-- attached again has its old files; this differs.
create function fabric.lineage(relation oid, id_column text) returns text
language sql stable
as $$
    with recursive line (child, parent, attached) as (
        select inhrelid, inhparent, xmin::text from pg_catalog.pg_inherits where inhparent = relation
        union
        select i.inhrelid, i.inhparent, i.xmin::text
        from pg_catalog.pg_inherits as i join line on i.inhparent = line.child
    )
    select md5(concat_ws(
        ',',
        (select xmin::text from pg_catalog.pg_attribute
         where attrelid = relation and attname = id_column and attnum > 0 and not attisdropped),
        (select string_agg(format('%s %s %s', child, parent, attached), ',' order by child, parent) from line)))
$$;

-- The same question about a generation that kept no lineage. A number of 32 bits is taken for the newest of 64 that it can be,
-- and what was under way at the snapshot for later than it: an audit too many, never one too few.
create function fabric.attached_since(relation oid, since pg_snapshot) returns boolean
language sql stable
as $$
    with recursive line (child, attached) as (
        select inhrelid, xmin::text::bigint from pg_catalog.pg_inherits where inhparent = relation
        union
        select i.inhrelid, i.xmin::text::bigint
        from pg_catalog.pg_inherits as i join line on i.inhparent = line.child
    )
    select coalesce(bool_or(
        newest - ((newest - attached) % 4294967296 + 4294967296) % 4294967296
        >= pg_snapshot_xmin(since)::text::bigint), false)
    from line
    cross join (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 1) as now (newest)
$$;

-- The first of the names is that of the id column.
create or replace function fabric.bound_files(relation oid, names text[]) returns text
language sql stable
as $$
    select coalesce(fabric.relation_files(relation), '') || ' / ' || coalesce(fabric.column_numbers(relation, names), '?')
        || ' / ' || fabric.lineage(relation, names[1])
$$;

-- The triggers of a watch are those that call its function, whatever they are called.
create function fabric.note_function(watch bigint) returns oid
language sql stable
as $$ select to_regprocedure(format('fabric.note_change_%s()', watch))::oid $$;

-- For which event a trigger notes changes; null where it was made in another way than by fabric.arm_watch.
create function fabric.notes_event(t pg_catalog.pg_trigger) returns text
language sql immutable
as $$
    select case
        when t.tgqual is not null or t.tgconstraint <> 0 or t.tgattr::text <> '' then null
        when t.tgtype = 4 and t.tgoldtable is null and t.tgnewtable = 'new_rows' then 'insert'
        when t.tgtype = 16 and t.tgoldtable = 'old_rows' and t.tgnewtable = 'new_rows' then 'update'
        when t.tgtype = 8 and t.tgoldtable = 'old_rows' and t.tgnewtable is null then 'delete'
        when t.tgtype = 32 then 'truncate'
    end
$$;

-- Triggers that note each of the four events, with the transactions that last changed them: one that was switched off and
-- on again is not what it was. Null where an event goes unnoted.
create function fabric.armed_by(watch bigint) returns text
language sql stable
as $$
    select case when count(distinct event) = 4 then string_agg(format('%s:%s', number, version), ' ' order by number) end
    from (
        select t.oid as number, t.xmin::text as version, fabric.notes_event(t) as event
        from fabric.watched as w
        join pg_catalog.pg_trigger as t on t.tgrelid = w.relation
        where w.watch_id = watch and t.tgfoid = fabric.note_function(watch) and t.tgenabled = 'A'
    ) as t
    where event is not null
$$;

alter table fabric.watched add column armed text;
comment on column fabric.watched.armed is 'fabric.armed_by when it was last armed';
update fabric.watched set armed = fabric.armed_by(watch_id) where fabric.watch_armed(watch_id);

create or replace function fabric.watch_armed(watch bigint) returns boolean
language sql stable
as $$
    select coalesce((select armed = fabric.armed_by(watch) from fabric.watched where watch_id = watch), false)
$$;

-- As before; the body is quoted as a literal, for a name of a column may hold any quote of another kind.
create or replace function fabric.bind_watch(watch bigint) returns void
language plpgsql
as $body$
declare
    w        fabric.watched;
    scope    text;
    old_key  text;
    new_key  text;
    compared text[];
    changed  text;
    body     text;
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
    body := format(
        $make$
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
        $make$,
        null, watch, w.id_column, w.vector_column, scope, changed, fabric.watched_names(watch), w.bound);
    execute format(
        'create or replace function fabric.%I() returns trigger language plpgsql security definer '
        'set search_path = pg_catalog, pg_temp as %L',
        format('note_change_%s', watch), body);
end
$body$;

-- Binds a watch and makes what triggers it lacks. Whoever calls it holds SHARE ROW EXCLUSIVE on the relation, and nothing
-- here takes more: DROP TRIGGER would, and wait for every reader with the writers behind it.
create or replace function fabric.arm_watch(watch bigint) returns void
language plpgsql
as $body$
declare
    w     fabric.watched;
    event text;
    named name;
begin
    perform fabric.bind_watch(watch);
    select * into strict w from fabric.watched where watch_id = watch;
    foreach event in array array['insert', 'update', 'delete', 'truncate'] loop
        select t.tgname into named
        from pg_catalog.pg_trigger as t
        where t.tgrelid = w.relation and t.tgfoid = fabric.note_function(watch) and fabric.notes_event(t) = event
        order by t.tgenabled = 'A' desc, t.oid
        limit 1;
        if named is null then
            named := format('fabric_watch_%s_%s', watch, event);
            execute format(
                'create or replace trigger %I after %s on %s %s for each statement execute function fabric.%I()',
                named, event, w.relation::regclass,
                case event
                    when 'insert' then 'referencing new table as new_rows'
                    when 'update' then 'referencing old table as old_rows new table as new_rows'
                    when 'delete' then 'referencing old table as old_rows'
                    else ''
                end,
                format('note_change_%s', watch));
        end if;
        -- ALWAYS: a session whose role is "replica" writes rows too
        if exists (select from pg_catalog.pg_trigger
                   where tgrelid = w.relation and tgname = named and tgenabled <> 'A') then
            execute format('alter table only %s enable always trigger %I', w.relation::regclass, named);
        end if;
    end loop;
    update fabric.watched set armed = fabric.armed_by(watch) where watch_id = watch;
end
$body$;

-- As before, with one lock, of the relation alone: who writes to it by its name holds one on it, whichever child the row is in.
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
    execute format('lock table only %s in share row exclusive mode', target);
    if exists (select from fabric.unwatched as u where u.relation = target::oid) then
        return null; -- said while we waited
    end if;
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

-- Takes a watch away with its triggers, whatever they are called and wherever a restore has put them, and its function. The one
-- lock that DROP TRIGGER needs is taken first, while nothing else is held.
create or replace function fabric.forget_watch(watch bigint) returns void
language plpgsql
as $body$
declare
    t record;
begin
    for t in
        select distinct tgrelid from pg_catalog.pg_trigger where tgfoid = fabric.note_function(watch) order by tgrelid
    loop
        execute format('lock table only %s in access exclusive mode', t.tgrelid::regclass);
    end loop;
    for t in
        select tgname, tgrelid from pg_catalog.pg_trigger where tgfoid = fabric.note_function(watch)
    loop
        execute format('drop trigger %I on %s', t.tgname, t.tgrelid::regclass);
    end loop;
    execute format('drop function if exists fabric.%I()', format('note_change_%s', watch));
    delete from fabric.watched where watch_id = watch;
end
$body$;

create or replace function fabric.unwatch(target oid) returns bigint
language plpgsql
as $body$
declare
    gone bigint;
begin
    select count(fabric.forget_watch(watch_id)::text) into gone from fabric.watched where relation = target;
    insert into fabric.unwatched (relation) values (target) on conflict do nothing;
    return gone;
end
$body$;

-- Raises where the text is more than one condition: a cursor takes one statement and no other, and none of it is run.
create function fabric.require_one_condition(target regclass, filter text) returns void
language plpgsql
as $body$
declare
    one refcursor;
begin
    open one no scroll for execute format('select from %s where (%s)', target, filter);
    close one;
end
$body$;

-- How the server reads a filter: its tree; its text with times of the session's zone `zone` and of UTC; the tables that it
-- reads; what is now in UTC. Leaves nothing behind. `place` is a schema in which a view may be made.
create function fabric.parsed_filter(
    target regclass, filter text, place text, zone text,
    out tree text, out wall text, out utc text, out tables bigint, out moment text)
language plpgsql
as $body$
declare
    probe text := format('%I.%I', place, 'fabric_filter_' || pg_backend_pid());
begin
    perform fabric.require_one_condition(target, filter);
    perform set_config('TimeZone', zone, true), set_config('DateStyle', 'ISO', true);
    execute format('create view %s as select 1 as one from %s where (%s)', probe, target, filter);
    select ev_action::text into strict tree from pg_catalog.pg_rewrite where ev_class = probe::regclass;
    select count(*) into tables
    from regexp_matches(tree, ':rtekind 0 :relid (\d+)', 'g') as entry
    where entry[1]::oid <> probe::regclass::oid;
    wall := pg_get_viewdef(probe::regclass);
    perform set_config('TimeZone', 'UTC', true);
    utc := pg_get_viewdef(probe::regclass);
    moment := now()::text;
    raise exception using errcode = 'FB001'; -- takes view and settings back
exception when sqlstate 'FB001' then
    null;
end
$body$;

-- Whether the server would take the filter as the predicate of an index, which it does only where the answer for a row never
-- changes, after what can be computed beforehand is. Null where that cannot be asked, as with columns named with their schema.
create function fabric.indexable_filter(target regclass, filter text) returns boolean
language plpgsql
as $body$
declare
    named name := (select relname from pg_catalog.pg_class where oid = target);
begin
    execute format('create temp table %I (like %s)', named, target);
    execute format('create index on pg_temp.%I ((1)) where (%s)', named, filter);
    raise exception using errcode = 'FB001';
exception
    when sqlstate 'FB001' then return true;
    when invalid_object_definition then return false;
    when others then return null;
end
$body$;

-- Why the answer of a filter for a row may change while the row does not; null where it cannot. Raises what is wrong with a
-- filter that is no condition on the relation, and insufficient_privilege where the role may make neither a temporary view
-- nor one in schema fabric.
create function fabric.filter_fault(relation_name text, filter text) returns text
language plpgsql
as $body$
declare
    target  regclass := fabric.relation_oid(relation_name)::regclass;
    place   text := case when has_database_privilege(current_database(), 'TEMP') then 'pg_temp'
                         when has_schema_privilege('fabric', 'CREATE') then 'fabric' end;
    east    record;
    west    record;
    movable text;
    fixed   boolean;
    times   text := '''((?:[^'']|'''')*)''::(?:date|time|ts)';
    offsets text := '(:\d\d(?:\.\d+)?)[+-]\d\d(?::\d\d){0,2}';
begin
    if place is null then
        raise insufficient_privilege using message = 'permission denied to make a temporary view';
    end if;
    east := fabric.parsed_filter(target, filter, place, 'Etc/GMT-14');
    west := fabric.parsed_filter(target, filter, place, 'Etc/GMT+12');
    if east.tables > 1 then
        return 'a table by a sub-select';
    end if;
    select string_agg(distinct name, ', ') into movable
    from (
        select p.oid::regprocedure::text
        from regexp_matches(east.tree, ':(?:funcid|opfuncid|aggfnoid|winfnoid) (\d+)', 'g') as used
        join pg_catalog.pg_proc as p on p.oid = used[1]::oid
        where p.provolatile <> 'i'
        union all
        select case when used[1]::int = 0 then 'current_date'
                    when used[1]::int between 1 and 4 then 'current_time or current_timestamp'
                    when used[1]::int between 5 and 8 then 'localtime or localtimestamp'
                    when used[1]::int between 9 and 12 then 'current_user, session_user or current_role'
                    else 'current_catalog or current_schema' end
        from regexp_matches(east.tree, 'SQLVALUEFUNCTION :op (\d+)', 'g') as used
    ) as used (name);
    fixed := case when place = 'pg_temp' then fabric.indexable_filter(target, filter) end;
    if not coalesce(fixed, movable is null) then
        return coalesce(movable, 'an expression that is not immutable, such as a cast of a time to text');
    end if;
    -- a literal is a constant from the moment that it is read: 'today' is read as one day in the east and as another in the west
    if exists (
        select
        from regexp_matches(east.wall, times, 'g') with ordinality as a (part, place)
        join regexp_matches(west.wall, times, 'g') with ordinality as b (part, place) using (place)
        join regexp_matches(east.utc, times, 'g') with ordinality as c (part, place) using (place)
        join regexp_matches(west.utc, times, 'g') with ordinality as d (part, place) using (place)
        where (c.part <> d.part
               and regexp_replace(a.part[1], offsets, '\1', 'g') <> regexp_replace(b.part[1], offsets, '\1', 'g'))
           or strpos(c.part[1], east.moment) > 0
    ) then
        return 'the clock by a literal such as ''now'' or ''today''';
    end if;
    return null;
end
$body$;

create table fabric.moving_filter (
    relation  oid not null,
    filter    text not null,
    fault     text not null
);
comment on table fabric.moving_filter is 'filters whose answer changes while no row does; shards of them are audited';

-- fabric.filter_fault, kept for the verdict.
create function fabric.judge_filter(relation_name text, filter text) returns text
language plpgsql
as $body$
declare
    fault text := fabric.filter_fault(relation_name, filter);
begin
    if fault is null then
        delete from fabric.moving_filter as m
        where m.relation = fabric.relation_oid(relation_name) and m.filter = judge_filter.filter;
    elsif not exists (
        select from fabric.moving_filter as m
        where m.relation = fabric.relation_oid(relation_name) and m.filter = judge_filter.filter
    ) then
        insert into fabric.moving_filter values (fabric.relation_oid(relation_name), filter, fault);
    end if;
    return fault;
end
$body$;

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
        when exists (select from pg_catalog.pg_inherits where inhrelid = s.relation_oid) then 'inherited'
        when exists (
            select from fabric.moving_filter as f
            where f.relation = s.relation_oid and f.filter = s.filter) then 'moving filter'
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
        when case when coalesce(split_part(b.files, ' / ', 3), '') = ''
                  then fabric.attached_since(s.relation_oid, b.snapshot)
                  else split_part(b.files, ' / ', 3) <> fabric.lineage(s.relation_oid, s.id_column) end
            then 'rewritten'
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
        src ->> 'filter' as filter,
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

-- Filters of the shards that are there. One that is no condition any more says so itself when it is read.
do $body$
declare
    s record;
begin
    for s in
        select distinct g.manifest #>> '{source,relation}' as relation, g.manifest #>> '{source,filter}' as filter
        from fabric.shard_generation as g
        where g.manifest #>> '{source,filter}' is not null
          and g.generation = (select max(generation) from fabric.shard_generation where name = g.name)
          and fabric.relation_oid(g.manifest #>> '{source,relation}') is not null
    loop
        begin
            perform fabric.judge_filter(s.relation, s.filter);
        exception when others then
            null;
        end;
    end loop;
end
$body$;
