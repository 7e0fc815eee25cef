-- Policies may hide rows from the role that asks, and no trigger fires when they are made: what such a role reads is not believed.
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
        when row_security_active(s.relation_oid) then 'row security'
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
