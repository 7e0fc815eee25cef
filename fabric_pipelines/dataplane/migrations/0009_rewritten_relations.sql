-- A rewrite of the table (ALTER TABLE ... USING, an added default that is computed per row) may change every row and
-- fires no trigger. It changes the file that the rows lie in, and so do VACUUM FULL and CLUSTER, which change no row:
-- so a changed file asks for an audit, not for a build.

-- Files of a relation and of its partitions and children, at any depth; null where it has none, as a view. One that was
-- attached or detached changes them too. What is older than this migration has none written down and is believed.
create function fabric.relation_files(relation oid) returns text
language sql stable
as $$
    with recursive part (oid) as (
        select relation
        union
        select i.inhrelid from pg_inherits as i join part as p on i.inhparent = p.oid
    )
    select string_agg(pg_relation_filenode(oid)::text, ' ' order by oid) from part
$$;

alter table fabric.shard_audit add column relation_files text;
comment on column fabric.shard_audit.relation_files is 'fabric.relation_files of the source in that snapshot';

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
        when b.files <> fabric.relation_files(s.relation_oid) then 'rewritten'
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
            || case when src ->> 'filter' is null then array[]::text[] else array['*'] end as needed
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
